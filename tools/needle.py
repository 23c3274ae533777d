"""A needle in a haystack: which facts does a memory give back, by depth and length of a text?

    python tools/needle.py runs/facts --model SmolLM2-135M --data book.txt \\
        --method streaming h2o --mem 512 --json needle.json
    python tools/needle.py --model SmolLM2-135M --data book.txt \\
        --method h2o --budgets budgets.json --mem 512 --json needle.json

The second command adds a panel to those that are in the file already. Panels of two files
of budgets have the same name, so that each needs a --json of its own.

In each text nine facts are told, each once, at nine depths: the first one after an 18th
of the text, the last one an 18th before its end. Each text has facts of its own. A depth
at which no line break follows has `nan`. A text is read once, and each question is asked
from a copy of the memory. A fact is found if its word is the first guess.

With --ask the text stands in a chat, in which it is asked. Three sentences are told then, as
ASKED has them, and a fact is found if the answer has its word.
"""

import argparse
import math
import re
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import standard_error
from generate import decode, read_ids
from lococo import AdaptedLlama
from model import load_base
from support.chat import Chat, read_chat
from support.command_line import Parser, at_least, prepare, run_program
from support.facts import choose_facts, fact_tokens
from support.files import UserError, checksum, read_json, write_json
from support.programs.scoring import add_runs_and_texts, documents_to_score
from support.programs.scoring import models_to_score, note_limits, parse_models
from support.programs.scoring import parts_to_score
from support.prompt import question_ids
from support.tokenizer import Tokenizer

DEPTHS = 9
# What a chat is told and asked: RULER's sentence, and two plain ones.
ASKED = (
    ("The code word of the {who} is {word}.\n", "What is the code word of the {who}?"),
    ("The password of the {who} is {word}.\n", "What is the password of the {who}?"),
    ("One of the special magic words for the {who} is: {word}.\n",
     "What is the special magic word for the {who} mentioned in the provided text?"),
)
WHO = ("old sailor", "young baker", "tall miller", "blind beggar", "rich widow")
WORDS = ("copper", "lemon", "river", "candle", "winter", "velvet", "thunder", "marble")
ANSWER = 24  # tokens of an answer in a chat, at most


def plant(
    tokens: Tensor, lines: list[list[int]], breaks: frozenset[int]
) -> tuple[Tensor, int]:
    """Write the lines into a text (L,), each at the first line break after its depth. The text
    is cut behind its last line break within L tokens, so that a question may follow. Returns
    it, and how many of the lines are in it: where line breaks are rare, the last are not."""
    L = len(tokens)
    told, ends = [], []
    for token in tokens.tolist():
        told.append(token)
        depth = (len(ends) + 0.5) / len(lines)
        if token in breaks and len(ends) < len(lines) and len(told) >= depth * L:
            told += lines[len(ends)]
            ends.append(len(told))
    cut = 1 + max((n for n, token in enumerate(told[:L]) if token in breaks), default=L - 1)
    return torch.tensor(told[:cut]), sum(end <= cut for end in ends)


class Fact(NamedTuple):
    line: list[int]  # its ids
    question: list[int]  # ids, up to where the answer begins
    word: str = ""  # that an answer in a chat must have; else it is the next id of the line
    ends: frozenset[int] = frozenset()  # ids that end an answer


def facts_of(i: int, tokenizer: Tokenizer, form: str) -> list[Fact]:
    """Those of text number i, in the order of their depths."""
    rng = np.random.default_rng((0, i))
    _, _, before, between, _ = fact_tokens(tokenizer, form)
    asked = len(before) + 2 + len(between)
    lines = choose_facts(DEPTHS, "held-out", rng, tokenizer, form).values()
    return [Fact(line, line[:asked]) for line in lines]


def sentences_of(i: int, tokenizer: Tokenizer, chat: Chat) -> list[Fact]:
    """Those of text number i that a chat is asked for. The forms change their places from
    text to text."""
    rng, facts = np.random.default_rng((0, i)), []
    for who, word, n in zip(rng.permutation(WHO), rng.permutation(WORDS), range(len(ASKED))):
        sentence, question = ASKED[(i + n) % len(ASKED)]
        line = tokenizer.continued(sentence.format(who=who, word=word))
        ids, ends = question_ids(question.format(who=who), True, chat, tokenizer)
        facts.append(Fact(line, ids, str(word), frozenset(ends)))
    return facts


def found(
    adapted: AdaptedLlama, ids: list[int], facts: list[Fact], tokenizer: Tokenizer
) -> Iterator[bool]:
    """Read a text, and ask for the word of each fact from a copy of the memory."""
    cache = adapted.cache()
    read_ids(adapted, ids, cache)
    for line, question, word, ends in facts:
        copy = cache.copy()
        logits = read_ids(adapted, question, copy)
        if not word:
            yield int(logits.argmax()) == line[len(question)]
            continue
        answer = decode(adapted.model, tokenizer, logits, copy, ANSWER, 0, ends)
        yield word in re.findall(r"\w+", tokenizer.decode([*answer]).lower())


def panel(
    adapted: AdaptedLlama, documents: dict[int, Tensor], tokenizer: Tokenizer, form: str,
    bar: tqdm, chat: Chat | None = None,
) -> tuple[dict[int, list[float]], dict[int, float]]:
    """By length the share of facts that are found at each depth, and the standard error over
    texts of the share that is found in all. With a chat its opening begins the text, in the
    place of BOS."""
    breaks = fact_tokens(tokenizer, form).breaks
    opens = tokenizer.continued(chat.opens, special=True) if chat else None
    shares, errors = {}, {}
    for L, rows in documents.items():
        hits = []
        for i, row in enumerate(rows):
            facts = sentences_of(i, tokenizer, chat) if chat else facts_of(i, tokenizer, form)
            text, told = plant(row, [fact.line for fact in facts], breaks)
            if not told:
                none = "it has no line break behind which a fact could be told"
                raise UserError(f"a text of {L:,} tokens: {none}; take other --data")
            ids = text.tolist()
            ids[:1] = opens or ids[:1]
            missing = [math.nan] * (len(facts) - told)  # what is not told counts for nothing
            hits.append([*found(adapted, ids, facts[:told], tokenizer)] + missing)
            bar.update(L)
        hits = torch.tensor(hits, dtype=torch.float64)
        shares[L] = hits.nanmean(dim=0).tolist()
        errors[L] = standard_error(hits.nanmean(dim=1))
    return shares, errors


def stored_panels(flags: argparse.Namespace, about: dict) -> tuple[dict, dict]:
    """The panels that are in --json already, and their errors, which older files lack. Raises
    UserError if they are not `about` the same texts and base."""
    if not flags.json or not flags.json.is_file():
        return {}, {}
    stored = read_json(flags.json)
    if not isinstance(stored, dict) or {**stored, **about} != stored:
        others = "it has other texts, or another base, form of facts or --dtype"
        raise UserError(f"--json {flags.json}: {others}; name another file")
    return stored["found"], stored.get("errors", {})


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = add_runs_and_texts(parser).add_argument
    add("--lengths", type=at_least(256), nargs="+", metavar="L",
        help="tokens of a text (default: 1024 2048 4096 8192, if the texts are so long)")
    add("--documents", type=at_least(1), default=8, metavar="N",
        help="texts of each length (default: 8)")
    add("--ask", action="store_true", help="ask in a chat, as said above")
    flags = parse_models(parser)
    if flags.ask and flags.fact_form:
        parser.error("--ask: a chat has its own sentences; leave --fact-form out")
    flags.fact_form = flags.fact_form or "line"
    return flags


def main() -> None:
    flags = parse()
    machine = prepare(flags.device, flags.dtype)
    model, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    chat = read_chat(flags.model) if flags.ask else None
    if flags.ask and not chat:
        raise UserError(f"--ask: {flags.model} has no chat template; leave it out")
    models = models_to_score(flags, model, with_baselines=True)
    parts, lengths = parts_to_score(flags), (1024, 2048, 4096, 8192)
    documents = documents_to_score(flags, parts, tokenizer, lengths)
    note_limits(models, [*documents])
    about = {"texts": {str(L): len(rows) for L, rows in documents.items()}}
    of_texts = {str(L): rows for L, rows in documents.items()}
    asked = "asked" if chat else flags.fact_form
    about["of"] = checksum(of_texts, f"{flags.model.name} {asked} {machine.dtype}")
    figures, errors = stored_panels(flags, about)
    for name in figures.keys() & models.keys():
        del models[name]
        print(f"note: {flags.json} has {name} already", file=sys.stderr)
    total = len(models) * sum(rows.numel() for rows in documents.values())
    bar = tqdm(total=total, desc="reading", unit=" tokens", leave=False, disable=None)
    with machine.precision(), bar:
        for name, adapted in models.items():
            made = panel(adapted, documents, tokenizer, flags.fact_form, bar, chat)
            figures[name], errors[name] = made
            print(f"\n{name}: facts found at each depth, from the first tokens to the last, and in")
            print("all, with the standard error over texts")
            for L, shares in figures[name].items():
                columns = " ".join(f"{share:5.2f}" for share in shares)
                in_all = f"{np.nanmean(shares):.2f} ± {errors[name][L]:.2f}"
                print(f"{L:>8,} tokens  {columns}   {in_all}", flush=True)
            if flags.json:
                write_json(flags.json, about | {"found": figures, "errors": errors})


if __name__ == "__main__":
    run_program(main)
