"""From what --prompt and --ask name to tokens."""

import os
import sys
from pathlib import Path

from support.chat import Chat
from support.files import UTF8, UserError
from support.tokenizer import Tokenizer


def read_prompt(name: str) -> str:
    """The text of --prompt, a file; of standard input if the name is -. Raises
    UserError."""
    if name != "-" and not os.path.exists(name):
        remedy = "a text itself comes by standard input: echo TEXT | ... --prompt -"
        raise UserError(f"--prompt {name}: there is no such file; {remedy}")
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = data.decode(UTF8)
    except UnicodeDecodeError as error:
        fault = f"not UTF-8 text (byte {error.start}); save it as UTF-8"
        raise UserError(f"--prompt {name}: {fault}") from None
    if not text:
        raise UserError(f"--prompt {name}: there is no text in it; give one that has some")
    return text


def joined(names: list[str], texts: list[str]) -> str:
    """One text as it is, and of several each below its name."""
    if len(texts) == 1:
        return texts[0]
    return "\n\n".join(f"{Path(name).name}\n\n{text}" for name, text in zip(names, texts))


def prompt_ids(
    names: list[str], texts: list[str], tokenizer: Tokenizer, special: bool,
    chat: Chat | None = None, continues: bool = False,
) -> list[int]:
    """The ids of the text that --prompt names, [] if it names none. A text that
    `continues` a saved memory has no BOS. With a chat it stands in the first turn. With
    `special` the names of special tokens in it are these tokens. Raises UserError."""
    if not texts:
        return []
    text = joined(names, texts)
    if continues:
        ids = tokenizer.continued(text, special)
    elif chat:
        opens = tokenizer.continued(chat.opens, special=True) or tokenizer.prefix
        ids = opens + tokenizer.continued(text)
    else:
        ids = tokenizer.encode(text, special)
    named = " ".join(names)
    if all(i in tokenizer.prefix for i in ids):
        nothing = "the tokenizer has no token for its text; write more"
        raise UserError(f"--prompt {named}: {nothing}")
    listed = ", ".join(sorted(tokenizer.special_in(text)))
    if listed and not special:
        note = "read as plain text; --special-tokens reads them as tokens"
        print(f"note: --prompt {named} has {listed}, {note}", file=sys.stderr)
    return ids


def question_ids(
    question: str, in_turn: bool, chat: Chat | None, tokenizer: Tokenizer
) -> tuple[list[int], set[int]]:
    """The ids of a question, up to where the answer begins, and those that end an answer.
    `in_turn`: the text before it stands in the user's turn. Without a chat it continues
    the text."""
    if not chat:
        return tokenizer.continued(f"\n\n{question}\n"), set()
    between = tokenizer.continued(chat.between, special=True)
    # A special token that stands behind an answer ends it. Some templates put a blank before it.
    behind = chat.between.lstrip()
    named = behind.startswith(tuple(tokenizer.special_in(behind)))
    ends = {*tokenizer.continued(behind, special=True)[:1]} if named else set()
    words = tokenizer.continued(f"\n\n{question}" if in_turn else question)
    closes = tokenizer.continued(chat.closes, special=True)
    before = [] if in_turn else between
    return before + words + closes, ends
