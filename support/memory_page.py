"""The page that `generate.py --show-memory page.html` writes: what memories hold as a text is read.

memory_page.html, beside this file, is the page itself: HTML, CSS and JavaScript without data. This
module makes the data of what generate.TracedMemory has followed, and puts them into it.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from support.files import write_whole

if TYPE_CHECKING:
    from generate import TracedMemory
    from model import Tokenizer

TEMPLATE = Path(__file__).with_name("memory_page.html")
PLACE = "THE_DATA_OF_THE_PAGE"  # stands once in the template
LEAST = 0.01  # smaller shares are left out


def token_texts(ids: list[int], tokenizer: "Tokenizer") -> tuple[list[str], dict[int, str]]:
    """The text of each token; joined, they are the text that was read. A token that ends inside a
    character has none, the token that completes it has the character. Also a name for each token
    that has no text, such as <s>."""
    texts, names = [], {}
    context, waiting = [], []  # tokens before, and those whose character is incomplete
    for n, token in enumerate(ids):
        waiting.append(token)
        before = tokenizer.decode(context)
        text = tokenizer.decode(context + waiting)[len(before) :]
        incomplete = text.endswith("\ufffd") and n + 1 < len(ids)
        if n < len(tokenizer.prefix) or incomplete:
            text = ""
        texts.append(text)
        if not text:
            names[n] = tokenizer.piece(token)
        if n < len(tokenizer.prefix):
            waiting = []
        elif not incomplete:
            # The last ones suffice: a token's text depends only on its neighbours.
            context, waiting = (context + waiting)[-8:], []
    return texts, names


def slot_record(shares: list[float], tokens: list[int]) -> int | list[int]:
    """One slot: [token, share, token, share ...] with shares in hundredths, the largest first.
    A slot that is one whole token, as most are, is that token's number alone."""
    record = []
    for share, token in zip(shares, tokens):
        if share >= LEAST:
            record += [token, round(100 * share)]
    return record[0] if record[1:] == [100] else record


def head_record(shares: Tensor, tokens: Tensor) -> list[int | list[int]]:
    """All slots of one layer and head after one compression; both (M, 3)."""
    return [slot_record(*slot) for slot in zip(shares.tolist(), tokens.tolist())]


def page_record(name: str, memory: "TracedMemory", counts: dict[str, int]) -> dict:
    """What the page shows of one memory that has read the text; `counts` of slots of each kind."""
    held = []  # [compression][layer][head][slot]
    for layers in zip(*memory.largest.values()):
        held.append([[head_record(*head) for head in zip(*layer)] for layer in layers])
    return {
        "name": name,
        "counts": counts,
        "segment": memory.settings.segment,
        "layers": memory.config.n_layers,
        "heads": memory.config.n_kv_heads,
        "bytes": memory.nbytes,
        "full": memory.nbytes // memory.size * memory.seen,
        "read": memory.read,
        "held": held,
    }


def write_page(file: Path, texts: tuple[list[str], dict[int, str]], memories: list[dict]) -> None:
    """The template with its data. In a script, `<` could end it or begin a comment, so each one is
    written as JavaScript's escape for it."""
    tokens, names = texts
    data = {"tokens": tokens, "names": names, "memories": memories}
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = TEMPLATE.read_text("utf-8").replace(PLACE, text)
    write_whole(file, lambda beside: beside.write_bytes(page.encode("utf-8")))
