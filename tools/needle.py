"""A needle in a haystack: which facts does a memory give back, by depth and length of a text?

    python tools/needle.py runs/facts --model SmolLM2-135M --data book.txt \\
        --method streaming h2o --mem 512 --json needle.json
    python tools/needle.py --model SmolLM2-135M --data book.txt \\
        --method h2o --budgets budgets.json --mem 512 --json needle.json
    python tools/pictures.py needle --figures needle.json

The second command adds a panel to those that are in the file already. Panels of two files
of budgets have the same name, so that each needs a --json of its own.

In each text nine facts are told, each once, at nine depths: the first one after an 18th
of the text, the last one an 18th before its end. Each text has facts of its own. A depth
at which no line break follows has `nan`. A text is read once, and each question is asked
from a copy of the memory. A fact is found if its word is the first guess.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import prefill
from lococo import AdaptedLlama
from model import load_base
from support.command_line import Parser, at_least, prepare, run_program
from support.facts import choose_facts, fact_tokens
from support.files import UserError, checksum, read_json, write_json
from support.programs.scoring import add_runs_and_texts, documents_to_score
from support.programs.scoring import models_to_score, note_limits, parse_models
from support.programs.scoring import parts_to_score
from support.tokenizer import Tokenizer

DEPTHS = 9


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


@torch.no_grad()
def found(
    adapted: AdaptedLlama, text: Tensor, lines: list[list[int]], asked: int
) -> Iterator[bool]:
    """Read a text (L,), and ask for the word of each line from a copy of the memory. The
    question is the first `asked` ids of the line, and the word the next one."""
    segment, device = adapted.settings.segment, adapted.model.norm.weight.device
    cache = adapted.cache()
    prefill(adapted.model, text[None].to(device), cache, segment)
    for line in lines:
        question = torch.tensor([line[:asked]], device=device)
        logits = prefill(adapted.model, question, cache.copy(), segment)
        yield int(logits.argmax()) == line[asked]


def panel(
    adapted: AdaptedLlama, documents: dict[int, Tensor], tokenizer: Tokenizer, form: str,
    bar: tqdm,
) -> dict[int, list[float]]:
    """By length the share of facts that are found at each depth."""
    _, breaks, before, between, _ = fact_tokens(tokenizer, form)
    asked = len(before) + 2 + len(between)
    shares = {}
    for L, rows in documents.items():
        hits, missing = [], [math.nan] * DEPTHS  # what is not told counts for nothing
        for i, row in enumerate(rows):
            rng = np.random.default_rng((0, i))
            lines = [*choose_facts(DEPTHS, "held-out", rng, tokenizer, form).values()]
            text, told = plant(row, lines, breaks)
            if not told:
                none = "it has no line break behind which a fact could be told"
                raise UserError(f"a text of {L:,} tokens: {none}; take other --data")
            hits.append([*found(adapted, text, lines[:told], asked)] + missing[told:])
            bar.update(L)
        shares[L] = torch.tensor(hits, dtype=torch.float64).nanmean(dim=0).tolist()
    return shares


def stored_panels(flags: argparse.Namespace, about: dict) -> dict[str, dict]:
    """The panels that are in --json already. Raises UserError if they are not `about` the same
    texts and base."""
    if not flags.json or not flags.json.is_file():
        return {}
    stored = read_json(flags.json)
    if not isinstance(stored, dict) or {**stored, **about} != stored:
        others = "it has other texts, or another base, form of facts or --dtype"
        raise UserError(f"--json {flags.json}: {others}; name another file")
    return stored["found"]


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = add_runs_and_texts(parser).add_argument
    add("--lengths", type=at_least(256), nargs="+", metavar="L",
        help="tokens of a text (default: 1024 2048 4096 8192, if the texts are so long)")
    add("--documents", type=at_least(1), default=8, metavar="N",
        help="texts of each length (default: 8)")
    return parse_models(parser)


def main() -> None:
    flags = parse()
    machine = prepare(flags.device, flags.dtype)
    model, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    models = models_to_score(flags, model, with_baselines=True)
    parts, lengths = parts_to_score(flags), (1024, 2048, 4096, 8192)
    documents = documents_to_score(flags, parts, tokenizer, lengths)
    note_limits(models, [*documents])
    about = {"texts": {str(L): len(rows) for L, rows in documents.items()}}
    of_texts = {str(L): rows for L, rows in documents.items()}
    about["of"] = checksum(of_texts, f"{flags.model.name} {flags.fact_form} {machine.dtype}")
    figures = stored_panels(flags, about)
    for name in figures.keys() & models.keys():
        del models[name]
        print(f"note: {flags.json} has {name} already", file=sys.stderr)
    total = len(models) * sum(rows.numel() for rows in documents.values())
    bar = tqdm(total=total, desc="reading", unit=" tokens", leave=False, disable=None)
    with machine.precision(), bar:
        for name, adapted in models.items():
            figures[name] = panel(adapted, documents, tokenizer, flags.fact_form, bar)
            print(f"\n{name}: facts found at each depth, from the first tokens to the last")
            for L, shares in figures[name].items():
                print(f"{L:>8,} tokens ", *(f"{share:5.2f}" for share in shares), flush=True)
            if flags.json:
                write_json(flags.json, about | {"found": figures})


if __name__ == "__main__":
    run_program(main)
