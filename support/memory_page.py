"""The page of tools/show_memory.py: its texts, and the file.

memory_page.html, beside this file, is the page itself: HTML, CSS and JavaScript without data.
support/programs/tracing.py makes the data.
"""

import json
from pathlib import Path

from support.files import write_whole
from support.tokenizer import Tokenizer

TEMPLATE = Path(__file__).with_name("memory_page.html")
PLACE = "THE_DATA_OF_THE_PAGE"  # stands once in the template


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
