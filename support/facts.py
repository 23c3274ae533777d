"""Facts that are written into texts, to train a memory and to see what it remembers."""

import re
import sys
from functools import lru_cache
from typing import Iterable, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support.files import UserError
from support.text import part_of
from support.tokenizer import Tokenizer

# What stands before a fact's name, between the name and its word, and after the word.
# tools/fit_scores.py writes all forms but "sentence" into its texts, in this order.
FORMS = {
    "line": ("@", " =", "\n"),
    # The needle of RULER (Hsieh and others 2024), with a word in the place of a number.
    "sentence": ("One of the special magic words for", " is:", ".\n"),
    "name": ("The", " is called", ".\n"),
    "list": ("-", ":", "\n"),
    "question": ("Q: What is the", "? A:", ".\n"),
    "table": ("|", " |", " |\n"),
    "place": ("They keep the", " in the", ".\n"),
    "code": ("set", " to", ";\n"),
}


class FactTokens(NamedTuple):
    """The ids of which facts are made."""

    words: list[int]  # a blank and at least three small letters
    breaks: frozenset[int]  # all that end a line, such as a full stop with a line break
    before: list[int]  # what stands before the name
    between: list[int]  # what stands between the name and the word
    after: list[int]  # what stands after the word

    @property
    def length(self) -> int:
        """Tokens of a fact: its name has two, and its word one."""
        return len(self.before) + 2 + len(self.between) + 1 + len(self.after)


@lru_cache
def fact_tokens(tokenizer: Tokenizer, form: str = "line") -> FactTokens:
    """Raises UserError where the tokenizer joins the parts of a fact."""

    def ids_behind(front: str, text: str) -> list[int]:
        return tokenizer.encode(front + text)[len(tokenizer.encode(front)) :]

    pieces = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
    words = [i for i, piece in enumerate(pieces) if re.fullmatch(" [a-z]{3,}", piece)]
    breaks = frozenset(i for i, piece in enumerate(pieces) if piece.endswith("\n"))
    before, between, after = FORMS[form]
    parts = ids_behind("x\n", before), ids_behind("x", between), ids_behind("x", after)
    x = tokenizer.encode("x")[len(tokenizer.prefix) :]
    for text, ids in zip(FORMS[form], parts):
        if tokenizer.decode(x + ids) != f"x{text}":
            sentence = f"it has no tokens of their own for {text!r} in a fact"
            raise UserError(f"{tokenizer.file}: {sentence}")
    return FactTokens(words, breaks, *parts)


def choose_facts(
    number: int, part: str, rng: np.random.Generator, tokenizer: Tokenizer, form: str
) -> dict[str, list[int]]:
    """So many facts, by name: the ids of their lines. The names are of one of
    support.text.PARTS. Raises UserError if the tokenizer's words do not make so many."""
    words, _, before, between, after = fact_tokens(tokenizer, form)
    lines = {}
    for _ in range(1000 * number if words else 0):
        if len(lines) == number:
            break
        a, b, word = rng.choice(words, 3).tolist()
        name = tokenizer.piece(a) + tokenizer.piece(b)
        # Blanks are spelled as sentencepiece spells them, because tiny/ was trained so.
        if part_of(name.replace(" ", "\u2581")) == part:
            lines[name] = [*before, a, b, *between, word, *after]
    if len(lines) < number:
        few = f"its {len(words)} words of one token do not make {number} names of facts"
        raise UserError(f"{tokenizer.file}: {few}")
    return lines


def schedule(
    names: Iterable[str], L: int, rng: np.random.Generator
) -> list[tuple[float, str]]:
    """When each fact is due in a text of L tokens: once in the first half, then after
    gaps of 64 to L tokens (log-uniform). `pop` takes the one that is due next off the
    end of the list."""
    mentions = []
    for name in names:
        place = rng.uniform(0, L / 2)
        while place < L:
            mentions.append((place, name))
            place += np.exp(rng.uniform(np.log(64), np.log(max(L, 64))))
    return sorted(mentions, reverse=True)


def tell(
    tokens: Tensor, facts: int, part: str, seed: int, i: int, tokenizer: Tokenizer,
    form: str = "line",
) -> tuple[Tensor, Tensor]:
    """Write facts into text number i, (L,). Each is told at the first line break after
    it is due.

    Returns the text, cut at L, and for the word of each fact how long ago it was last
    told, else 0: both (L,).
    """
    if not facts:  # the tokenizer need not have their characters
        return tokens, torch.zeros_like(tokens)
    rng = np.random.default_rng((seed, i))
    L = len(tokens)
    parts = fact_tokens(tokenizer, form)
    lines = choose_facts(min(facts, L // parts.length), part, rng, tokenizer, form)
    due = schedule(lines, L, rng)
    told, ago, last = [], [], {}
    for token in tokens.tolist():
        told.append(token)
        ago.append(0)
        while token in parts.breaks and due and len(told) >= due[-1][0]:
            _, name = due.pop()
            told += lines[name]
            here = len(told) - 1 - len(parts.after)  # where the word is
            ago += [0] * parts.length
            ago[here] = here - last.get(name, here)
            last[name] = here
    return torch.tensor(told[:L], device="cpu"), torch.tensor(ago[:L], device="cpu")


def note_no_facts(ids: np.ndarray, L: int, tokenizer: Tokenizer, form: str = "line") -> None:
    """Say so if no fact can be written into texts of L tokens that are cut out of these."""
    parts = fact_tokens(tokenizer, form)
    reason = ""
    if L < parts.length:
        reason = f"a fact has {parts.length} tokens, which is more than a text of {L}"
    elif not np.isin(ids, [*parts.breaks]).any():
        reason = "the texts have no line break, behind which a fact is told"
    if reason:
        print(f"note: no facts are written: {reason}", file=sys.stderr)


def tell_all(
    documents: Tensor, part: str, tokenizer: Tokenizer, form: str = "line"
) -> tuple[Tensor, Tensor]:
    """8 facts in each of documents (P, L): the texts (P, L), and how long ago the word
    of each was last told, (P, L - 1)."""
    rows = [tell(row, 8, part, 0, i, tokenizer, form) for i, row in enumerate(documents)]
    tokens = torch.stack([text for text, _ in rows])
    ago = torch.stack([distances for _, distances in rows])
    return tokens, ago[:, 1:]
