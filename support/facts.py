"""Facts that are written into texts, to train a memory and to see what it remembers."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support.files import UserError
from support.text import PARTS

if TYPE_CHECKING:
    from model import Tokenizer


class FactTokens(NamedTuple):
    """The ids of which facts are made."""

    words: list[int]  # a blank and at least three small letters
    line_break: int  # ends a fact
    at: int  # "@", which begins it
    equals: int  # " ="
    breaks: frozenset[int]  # all that end a line, such as a full stop with a line break


@lru_cache
def fact_tokens(tokenizer: Tokenizer) -> FactTokens:
    """Raises UserError where the tokenizer has no tokens of their own for "@" and the like."""
    pieces = [tokenizer.piece(i) for i in range(tokenizer.vocab_size)]
    words = [i for i, piece in enumerate(pieces) if re.fullmatch(" [a-z]{3,}", piece)]
    breaks = frozenset(i for i, piece in enumerate(pieces) if piece.endswith("\n"))
    line_break, at, equals = tokenizer.encode("x\n@ =")[-3:]
    if [pieces[i] for i in (line_break, at, equals)] != ["\n", "@", " ="]:
        raise UserError(f"{tokenizer.file}: facts need tokens for a line break, for @ and for =")
    return FactTokens(words, line_break, at, equals, breaks)


def tell(tokens: Tensor, facts: int, part: str, seed: int, i: int,
         tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write facts into a text (L,): lines `@ message number = socket`, a name of two words and a
    word. Each is due in the first half, then after gaps of 64 to L tokens (log-uniform), and told
    at the next line break. Its name's checksum decides which of PARTS it belongs to. Returns the
    text, cut at L, and for the word of each fact how long ago it was last told, (L,), else 0."""
    words, line_break, at, equals, breaks = fact_tokens(tokenizer)
    rng, L = np.random.default_rng((seed, i)), len(tokens)
    lines, mentions = {}, []
    wanted = min(facts, L // 6)
    for _ in range(1000 * wanted if words else 0):  # few words do not make many names
        if len(lines) == wanted:
            break
        a, b, word = rng.choice(words, 3).tolist()
        name = tokenizer.piece(a) + tokenizer.piece(b)
        spelled = name.replace(" ", "\u2581")  # as sentencepiece spells it: tiny/ was trained so
        if zlib.crc32(spelled.encode()) % 20 in PARTS[part]:
            lines[name] = [at, a, b, equals, word, line_break]
    if len(lines) < wanted:
        sentence = f"its {len(words)} words of one token do not make {wanted} names of facts"
        raise UserError(f"{tokenizer.file}: {sentence}")
    for name in lines:
        place = rng.uniform(0, L / 2)
        while place < L:
            mentions.append((place, name))
            place += np.exp(rng.uniform(np.log(64), np.log(max(L, 64))))
    mentions.sort(reverse=True)
    told, ago, last = [], [], {}
    for token in tokens.tolist():
        told.append(token)
        ago.append(0)
        while token in breaks and mentions and len(told) >= mentions[-1][0]:
            _, name = mentions.pop()
            told += lines[name]
            here = len(told) - 2  # where the word is
            ago += [0, 0, 0, 0, here - last.get(name, here), 0]
            last[name] = here
    return torch.tensor(told[:L]), torch.tensor(ago[:L])


def tell_all(documents: Tensor, part: str, tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:
    """8 facts in each of documents (N, L): the texts (N, L), and how long ago, (N, L - 1)."""
    rows = [tell(text, 8, part, 0, i, tokenizer) for i, text in enumerate(documents)]
    tokens, ago = (torch.stack(row) for row in zip(*rows))
    return tokens, ago[:, 1:]
