"""Perplexity and recall of runs with a memory, beside their base with its full cache.

    python eval_ppl.py                                      # the embedded model and adapter
    python eval_ppl.py runs/a runs/b --lengths 2048 8192 --by-position
    python eval_ppl.py --method streaming h2o --mem 512     # without training, on any base
    python eval_ppl.py runs/a --recall --json figures.json  # also recall; also as a file

Perplexity is exp(nats / tokens) over all tokens of a document after the first. Longer
documents are cut and shorter ones left out, so that columns score different documents:
compare within a column. The paper's tasks are scored by tools/tasks.py. For the method read
`token_losses`.
"""

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lococo import METHODS, AdaptedLlama, Settings, segment_losses
from support.adapter import Adapter, load_adapter, read_adapter
from support.settings import untrained, warn_if_too_long
from model import Llama, load_base
from support.command_line import TINY, Machine, Parser, at_least, config_of, counted
from support.command_line import method_flags, named_path, output_file, prepare, run_program
from support.facts import FORMS, fact_tokens, tell_all
from support.files import UserError, write_json
from support.text import PARTS, long_documents, token_streams
from support.tokenizer import Tokenizer

# --- Perplexity -------------------------------------------------------------------------


@torch.no_grad()
def token_losses(
    adapted: AdaptedLlama, documents: Tensor, machine: Machine, micro_batch: int
) -> tuple[Tensor, Tensor, int]:
    """Score documents (N, L), `micro_batch` of them at once. Returns the nats of each token
    after the first, whether it was the likeliest one, both (N, L - 1), and the bytes that
    the cache of one document has at the end."""
    nats, hits = [], []
    for batch in tqdm(documents.split(micro_batch), "scoring", leave=False, disable=None):
        batch = batch.to(machine.device)
        cache = adapted.cache()  # each batch of documents begins with an empty one
        with machine.precision():
            segment = adapted.settings.segment
            nats_of_pieces, hits_of_pieces, at = [], [], 1
            for n, p in segment_losses(adapted.model, batch, cache, segment):
                nats_of_pieces.append(n)
                hits_of_pieces.append(p.argmax(-1) == batch[:, at : at + n.shape[1]])
                at += n.shape[1]
        nats.append(torch.cat(nats_of_pieces, dim=1).cpu())
        hits.append(torch.cat(hits_of_pieces, dim=1).cpu())
    return torch.cat(nats), torch.cat(hits), cache.nbytes // len(batch)


def perplexity(nats: Tensor) -> float:
    """exp of the mean nats, of any shape. It is infinite from 710 nats on."""
    return nats.double().mean().exp().item()


def ranges(what: str, numbers: Tensor, reach: int) -> dict[str, Tensor]:
    """`numbers`: a position or a distance of each token, (N, L - 1). Returns a mask for each
    range; "a-b" has those above a up to b.

    The first range ends at `reach` = M + T: up to here a window may hold the token. The
    others end at 512, 1024 ... L. A distance of 0, which marks a token that is no answer,
    is in no range."""
    L = numbers.shape[1] + 1
    doubled = {2**e for e in range(9, L.bit_length()) if reach < 2**e < L}
    edges = sorted({0, min(reach, L), L} | doubled)
    masks = {}
    for above, to in zip(edges, edges[1:]):
        masks[f"{what}{above}-{to}"] = (above < numbers) & (numbers <= to)
    return masks


# --- The program ------------------------------------------------------------------------

NAME = 36  # columns for a method's name in a table
BASE = "base, full"  # the first row, to compare with


@dataclass(frozen=True)
class Chosen:
    """The models to score."""

    model: Path  # their base
    runs: list[Path]  # directories of train.py
    method: list[str]  # without training
    # Of the methods; None was not given.
    mem: int | None
    segment: int | None
    changes: dict  # of their rows of METHODS


@dataclass(frozen=True)
class EvalConfig:
    """What the command line asks for."""

    chosen: Chosen
    device: str | None  # None: a GPU if there is one
    dtype: str | None
    seed: int
    lengths: list[int]  # tokens of a document
    data: list[Path]  # none: Python's own library
    part: str | None  # None: see `parts_to_score`
    documents: int  # of each length, at most
    micro_batch: int
    by_position: bool
    recall: bool
    fact_form: str
    json: Path | None


def memory_sizes(adapters: list[Adapter]) -> list[tuple[int, int]]:
    """(M, T) of each different memory among the adapters."""
    settings = [adapter.settings for adapter in adapters]
    return list(dict.fromkeys((s.mem, s.segment) for s in settings if s.mem))


def name_of(s: Settings) -> str:
    """A method without training, as a table names it: with all that differs from its row of
    METHODS."""
    name = f"base, {s.method}"
    if not s.mem:
        return name
    name += f" M={s.mem}"
    if s.segment != s.mem:
        name += f" T={s.segment}"
    usual = {"sinks": 0, "heavy": 0, "recent": 0, "forget": 1.0, "positions": "text"}
    usual |= METHODS[s.method](s.mem)
    if s.positions != usual["positions"]:
        name += f" positions={s.positions}"
    for key in ("sinks", "heavy", "recent", "forget"):
        if getattr(s, key) != usual[key]:
            name += f" {key}={getattr(s, key):g}"
    return name + " budgets" if s.budgets else name


def baselines(model: Llama, mem: int, segment: int) -> list[AdaptedLlama]:
    """A window and H2O of M slots, at least 4, on their base. Their positions are those of
    the slots, because positions in a long text would pass the base's context."""
    return [
        untrained(model, method, max(4, mem), segment, positions="slots")
        for method in ("streaming", "h2o")
    ]


def compared(
    chosen: Chosen, machine: Machine, sizes: list[tuple[int, int]]
) -> Iterator[tuple[str, AdaptedLlama]]:
    """Names and models that are scored: the base with its full cache, with each --method,
    with a window and H2O of each of the sizes (M, T); then the RUNs. What needs no training
    shares one base, a RUN has its own. Delete a model before asking for the next: a GPU may
    hold just one."""
    mem = chosen.mem or 512
    segment = chosen.segment or mem
    model, _ = load_base(chosen.model, machine.dtype, machine.device)
    # All are made now: a wrong one is refused first.
    models = [untrained(model, "full", mem, segment=512)]
    for method in chosen.method:
        models.append(untrained(model, method, mem, segment, **chosen.changes))
    for size in sizes:
        models += baselines(model, *size)
    yield from {name_of(adapted.settings): adapted for adapted in models}.items()
    del model, models
    for run in dict.fromkeys(chosen.runs):
        yield os.path.relpath(run), load_adapter(
            run, load_base(chosen.model, machine.dtype, machine.device)[0]
        )


def add_shared_flags(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flags that eval_ppl.py and tools/tasks.py share. Returns the group that others
    may join."""
    parser.memory.add_argument("--method", nargs="+", default=[], choices=METHODS,
                               help="methods without training (default: none)")  # fmt: skip
    group = parser.add_argument_group("scoring and output")
    group.add_argument(
        "--json", type=output_file, metavar="FILE",
        help="write the tables there, too; null is infinite, or of no tokens",
    )  # fmt: skip
    return group


def chosen_models(flags: argparse.Namespace, parser: Parser) -> Chosen:
    """Those that the flags of eval_ppl.py and tools/tasks.py ask for."""
    parser.refuse_counts(flags)
    flags.changes = method_flags(vars(flags))
    return config_of(Chosen, flags)


def make_parser() -> Parser:
    parser = Parser(__doc__)
    own = "run directories of train.py (default for tiny/: its own)"
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help=own)
    add = add_shared_flags(parser).add_argument
    add("--lengths", type=at_least(2), nargs="+", default=[2048, 4096, 8192], metavar="L",
        help="tokens of a document (default: 2048 4096 8192)")
    add("--data", type=named_path, nargs="+", default=[], metavar="PATH",
        help='texts: files, folders, .jsonl of {"text": ...} (default: Python\'s own library)')
    add("--part", choices=(*PARTS, "all"),
        help="which of the texts, by the checksum of their names (default: held-out, which "
             "train.py has not seen; all of --data if no RUN has held out a part of its texts)")
    add("--documents", type=at_least(1), default=64, metavar="N",
        help="documents of each length at most (default: 64)")
    add("--micro-batch", type=at_least(1), default=4, metavar="N",
        help="documents in memory at once (default: 4)")
    add("--by-position", action="store_true", help="also where the loss is, at the last length")
    add("--recall", action="store_true",
        help="also what is remembered; without --method a window and H2O stand beside each RUN")
    add("--fact-form", choices=FORMS,
        help="with --recall: lines `@ name name = word` (default), or sentences as RULER's needles")
    return parser


def parse() -> EvalConfig:
    parser = make_parser()
    flags = parser.parse_args()
    if flags.fact_form and not flags.recall:
        parser.error(f"--fact-form {flags.fact_form}: it goes with --recall")
    flags.fact_form = flags.fact_form or "line"
    names = {}
    for run in flags.runs:
        names.setdefault(run.resolve(), run)  # a run that is named twice is scored once
    flags.runs = list(names.values())
    if not flags.runs and not flags.method and flags.model.resolve() == TINY:
        flags.runs = [TINY]
    flags.chosen = chosen_models(flags, parser)
    return config_of(EvalConfig, flags)


def parts_to_score(config: EvalConfig, adapters: list[Adapter]) -> list[str]:
    """The part that --part names. Without --part: the part that train.py holds out, if a
    RUN has left it out or the texts are Python's library; otherwise all parts of --data.
    A RUN that held nothing out has trained on all of its texts, and scores others."""
    left_out = []
    for run, adapter in zip(config.chosen.runs, adapters):
        if "held-out" in adapter.parts:
            sentence = "it trained on all of its --data"
            remedy = "score it only on other texts, which is not checked"
            print(f"{run}: {sentence}; {remedy}", file=sys.stderr)
        elif run.resolve() != TINY or not config.data:  # tiny/ has read Python's library alone
            left_out.append(run)
    usual = "held-out" if left_out or not config.data else "all"
    part = config.part or usual
    return list(PARTS) if part == "all" else [part]


def print_means(
    title: str, counts: str, masks: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, dict[str, float | None]]:
    """A row for each mask, with the number of its tokens, which are called `counts`; a
    column for each method. Returns the rows; a mean of no tokens is None."""
    print(f"\n{title:30}{counts:>9}", *(f"{name:>5}" for name in values), sep="  ")
    rows = {}
    for label, mask in masks.items():
        tokens, row = int(mask.sum()), ""
        rows[label] = {"tokens": tokens}
        for name, value in values.items():
            mean = value[mask].double().mean().item() if tokens else None
            rows[label][name] = mean
            row += f"  {'-' if mean is None else f'{mean:.3f}':>{max(len(name), 5)}}"
        print(f"{label:30}{tokens:>9,}{row}")
    return rows


def documents_to_score(
    config: EvalConfig, parts: list[str], tokenizer: Tokenizer
) -> dict[int, Tensor]:
    """By length L the first documents of these parts, (N, L)."""
    streams = token_streams(config.data, tokenizer)
    documents = {}
    for L in config.lengths:
        rows = [
            long_documents(streams[part], tokenizer.bos, L, config.documents) for part in parts
        ]
        documents[L] = torch.cat(rows)[: config.documents]
        if not len(documents[L]):
            raise UserError(f"--lengths {L}: {why_none(streams, parts, tokenizer.bos, L)}")
    if config.data:
        print_left_out(streams, parts, tokenizer.bos)
    elif config.chosen.model.resolve() != TINY:
        library = "no --data: it scores Python's standard library"
        print(f"{library}; name your own text by --data", file=sys.stderr)
    return documents


def print_left_out(streams: dict[str, np.ndarray], parts: list[str], bos: int) -> None:
    """Say how many documents are not scored, as their names are of other parts."""
    left_out = [ids for part, ids in streams.items() if part not in parts]
    others = sum(int((ids == bos).sum()) for ids in left_out)
    if others:
        sentence = f"left out: {counted(others, 'document')} of the other parts"
        remedy = "--part all scores these, too, if none of them was trained on"
        print(f"{sentence}; {remedy}", file=sys.stderr)


def why_none(streams: dict[str, np.ndarray], parts: list[str], bos: int, L: int) -> str:
    """Why there is no document of L tokens: one of one's own may have fallen into another
    part."""
    for part in PARTS:
        if len(long_documents(streams[part], bos, L, 1)):
            sentence = f"no document of the {parts[0]} part is so long, but one of the {part} part"
            remedy = "--part all scores every document, if none was trained on"
            return f"{sentence} (the checksum of a name chooses the part); {remedy}"
    longest = 0
    for ids in streams.values():
        starts = np.flatnonzero(ids == bos)
        lengths = np.diff(starts, append=len(ids))
        longest = max(longest, int(lengths.max(initial=0)))
    remedy = "name smaller --lengths, or longer texts by --data"
    return f"the longest document has {counted(longest, 'token')}; {remedy}"


def print_work(
    models: int, documents: dict[int, Tensor], base: AdaptedLlama, config: EvalConfig,
    machine: Machine,
) -> None:  # fmt: skip
    """How much there is to do, and about how long it takes, so that the user can ask for
    less."""
    tokens = sum(rows.numel() for rows in documents.values())
    if config.recall:
        tokens += list(documents.values())[-1].numel()
    some = next(iter(documents.values()))[: config.micro_batch, :512]
    for _ in range(2):  # the first time is longer, as it also sets things up
        begun = time.perf_counter()
        token_losses(base, some, machine, config.micro_batch)
        seconds = time.perf_counter() - begun
    minutes = math.ceil(models * tokens * seconds / some.numel() / 60)
    work = f"{counted(models, 'model')} will score {tokens:,} tokens each"
    work += f" in about {counted(minutes, 'minute')}"
    print(f"{work}; fewer --documents or --lengths take less", file=sys.stderr)


def print_limit(base: AdaptedLlama, longest: int) -> None:
    """A note if documents are longer than what the base was pretrained on."""
    if longest > base.settings.length:
        limit = f"the base was pretrained on {base.settings.length:,} tokens"
        print(f"note: {limit}; the row `{BASE}` goes beyond that", file=sys.stderr)


def score(
    name: str, adapted: AdaptedLlama, documents: dict[int, Tensor], machine: Machine,
    micro_batch: int,
) -> tuple[dict, Tensor]:  # fmt: skip
    """Print the row of a model. Returns its cells, and the nats at the last length,
    (N, L - 1)."""
    if name != BASE:  # about this row there is a note already, see `print_limit`
        warn_if_too_long(adapted.settings, max(documents))
    slots, room = adapted.settings.mem, adapted.settings.capacity
    short = [str(length) for length in documents if length - 1 <= room]
    # With budgets M + T is a mean. A smaller layer may compress earlier, so that the note
    # would be wrong.
    if slots and short and not adapted.settings.budgets:
        nothing = f"up to M + T = {room:,} entries nothing is compressed"
        print(f"note: {name}, --lengths {' '.join(short)}: {nothing}", file=sys.stderr)
    by_length = {}
    for length, rows in documents.items():
        nats, _, held = token_losses(adapted, rows, machine, micro_batch)
        by_length[length] = perplexity(nats)
    row = "".join(f"{value:>9.3f}" for value in by_length.values())
    print(f"{name:{NAME}} {slots or '-':>6} {held:>12,}{row}", flush=True)
    return {"slots": slots or None, "cache bytes": held, "perplexity": by_length}, nats


class Scores(NamedTuple):
    """The figures of each model, by its name."""

    methods: dict[str, dict]  # cells of the table
    losses: dict[str, Tensor]  # nats of each token at the last length, (N, L - 1)
    hits: dict[str, Tensor]  # of texts with facts: whether each token was the first guess
    reaches: list[int]  # the most entries that a layer holds; with budgets on average


def score_all(
    config: EvalConfig, machine: Machine, sizes: list[tuple[int, int]],
    documents: dict[int, Tensor], told: Tensor | None,
) -> Scores:  # fmt: skip
    """Score `documents` and, if there are any, the texts with facts (N, L)."""
    methods = {*config.chosen.method} - {"full"}  # the full cache is always scored
    number = 1 + len(methods) + 2 * len(sizes) + len(config.chosen.runs)  # of models
    scores = Scores({}, {}, {}, [])
    for name, adapted in compared(config.chosen, machine, sizes):
        if not scores.methods:
            print_work(number, documents, adapted, config, machine)
            print_limit(adapted, max(documents))
            lengths = (f"{L:>8}" for L in documents)
            title = "perplexity, by tokens of a document"
            print(f"{title:{NAME}} {'slots':>6} {'cache bytes':>12}", *lengths)
        if adapted.settings.mem:
            scores.reaches.append(adapted.settings.capacity)
        cells, nats = score(name, adapted, documents, machine, config.micro_batch)
        scores.methods[name], scores.losses[name] = cells, nats
        if told is not None:
            scores.hits[name] = token_losses(adapted, told, machine, config.micro_batch)[1]
        del adapted
    return scores


def print_documents(documents: dict[int, Tensor], parts: list[str]) -> None:
    listed = ", ".join(f"{len(rows)} of {L} tokens" for L, rows in documents.items())
    of = "all parts" if len(parts) == len(PARTS) else parts[0]
    print(f"documents ({of}): {listed}; cache bytes at {[*documents][-1]}")


def print_ranges(
    config: EvalConfig, documents: dict[int, Tensor], told_ago: Tensor | None,
    tokenizer: Tokenizer, scores: Scores,
) -> dict[str, dict]:  # fmt: skip
    """What --by-position and --recall ask for. Returns the rows of these tables by their
    name. `told_ago` (N, L - 1) is that of `tell_all` in the documents of the last length."""
    L, last = list(documents.items())[-1]
    reach = max(scores.reaches, default=0)
    tables = {}
    if config.by_position:
        title = f"nats in {L} tokens"
        position = torch.arange(1, L).expand(len(last), -1)
        masks = ranges("position ", position, reach)
        tables["nats by position"] = print_means(title, "tokens", masks, scores.losses)
    if config.recall:
        title = f"recalled; by chance 1 in {len(fact_tokens(tokenizer, config.fact_form).words)}"
        masks = ranges("told ago ", told_ago, reach)
        tables["recall"] = print_means(title, "answers", masks, scores.hits)
    return tables


def main() -> None:
    config = parse()
    chosen = config.chosen
    machine = prepare(config.device, config.dtype, config.seed)
    tokenizer = Tokenizer(chosen.model)
    adapters = [read_adapter(run) for run in chosen.runs]
    for run in chosen.runs:  # one of another base is refused now, before anything is scored
        load_adapter(run, load_base(chosen.model, machine.dtype, machine.device)[0])
    parts = parts_to_score(config, adapters)
    # With --recall a window and H2O stand beside each RUN, unless methods are named.
    sizes = memory_sizes(adapters) if config.recall and not chosen.method else []
    documents = documents_to_score(config, parts, tokenizer)
    told = told_ago = None
    if config.recall:
        # Facts have names of their own for each part, too. With all parts take some that do
        # not train.
        names = parts[0] if len(parts) == 1 else "held-out"
        last = list(documents.values())[-1]
        told, told_ago = tell_all(last, names, tokenizer, config.fact_form)
    scores = score_all(config, machine, sizes, documents, told)

    print_documents(documents, parts)
    figures = {"parts": parts, "documents": {L: len(rows) for L, rows in documents.items()}}
    figures["methods"] = scores.methods
    figures |= print_ranges(config, documents, told_ago, tokenizer, scores)
    if config.json:
        write_json(config.json, figures)


if __name__ == "__main__":
    run_program(main)
