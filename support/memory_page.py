"""The page of tools/show_memory.py: what memories hold while a text is read.

memory_page.html, beside this file, is the page itself: HTML, CSS and JavaScript without data.
"""

import json
from collections import Counter
from pathlib import Path

from support.files import write_whole
from support.programs.tracing import LEAST, Tracing, kinds_of
from support.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("memory_page.html")
PLACE = "THE_DATA_OF_THE_PAGE"  # stands once in the template

# --- Data ------------------------------------------------------------------------------

TITLES = {  # what the page calls methods
    "streaming": "window (streaming)",
    "h2o": "H2O",
    "h2o+forget": "H2O that forgets",
    "learned": "a learned score",
}


def slot_record(shares: list[float], tokens: list[int]) -> int | list[int]:
    """One slot: [token, share, token, share ...] with shares in hundredths, the largest
    first. A slot that is one whole token, as most are, is that token's number alone."""
    record = []
    for share, token in zip(shares, tokens):
        if share >= LEAST:
            record += [token, round(100 * share)]
    return record[0] if record[1:] == [100] else record


def head_record(memory: Tracing, n: int, own: int) -> dict:
    """What the page shows of head number `own` of part n. `counts` has its slots of each kind,
    and `read` the tokens that had been read at each compression. `held` has for each compression
    what the slots hold."""
    held = []
    for shares, tokens in memory.largest[n]:
        slots = zip(shares[own].tolist(), tokens[own].tolist())
        held.append([slot_record(*slot) for slot in slots])
    counts = Counter(kinds_of(memory.parts[n].settings))  # in the order of the slots
    return {"counts": counts, "read": memory.seen_at[n], "held": held}


def page_record(name: str, memory: Tracing, following: str) -> dict:
    """What the page shows of a memory that has read the text. `following` is the token that
    it predicts after the text."""
    heads = [[None] * memory.config.n_kv_heads for _ in range(memory.config.n_layers)]
    for n, part in enumerate(memory.parts):
        for own, head in enumerate(part.heads):
            heads[part.layer][head] = head_record(memory, n, own)
    method, comma, adapter = name.partition(",")
    return {
        "name": TITLES.get(method, method) + comma + adapter,
        "bytes": memory.nbytes,
        "full_bytes": memory.full_nbytes,
        "next": following,
        "heads": heads,  # by layer
    }


# --- Text and file ---------------------------------------------------------------------


def token_texts(ids: list[int], tokenizer: Tokenizer) -> tuple[list[str], dict[int, str]]:
    """The text of each token; joined, they are the text that was read, but for a U+FFFD
    at its end. Also the names of the tokens without text, such as <s> and the first
    tokens of a character that has several."""
    start = len(tokenizer.prefix)
    texts = [""] * start + [*tokenizer.texts(ids[start:])]
    names = {n: tokenizer.piece(ids[n]) for n, text in enumerate(texts) if not text}
    return texts, names


def write_page(
    file: Path, tokens: list[str], names: dict[int, str], memories: list[dict]
) -> None:
    """The template with its data. In a script a `<` could end it or begin a comment, so
    each one is written as an escape."""
    data = {"tokens": tokens, "names": names, "memories": memories}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    page = TEMPLATE.read_text("utf-8").replace(PLACE, text.replace("<", "\\u003c"))
    write_whole(file, lambda beside: beside.write_bytes(page.encode("utf-8", "replace")))
