"""Perplexity and recall of runs with a memory, beside their base with its full cache.

    python eval_ppl.py                                      # the embedded model and adapter
    python eval_ppl.py runs/a runs/b --lengths 2048 8192 --by-position
    python eval_ppl.py --method streaming h2o --mem 512     # without training, on any base
    python eval_ppl.py runs/a --recall --json figures.json  # also recall; also as a file

Perplexity is exp(nats / tokens) over all tokens of a piece after the first. Texts are cut
into pieces of each length, and what is too short for a length is left out: compare within
a column. The paper's tasks are scored by tools/tasks.py. How it works is in the
function `token_losses`.
"""

import argparse
import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from lococo import AdaptedLlama, segment_losses
from model import load_base
from support.command_line import Machine, Parser, at_least, counted, prepare, run_program
from support.facts import fact_tokens, note_no_facts, tell_all
from support.files import refuse_not_finite, write_json
from support.programs.scoring import add_runs_and_texts, documents_to_score, models_to_score
from support.programs.scoring import note_limits, parse_models, parts_to_score

# --- Perplexity -------------------------------------------------------------------------


@torch.no_grad()
def token_losses(
    adapted: AdaptedLlama, documents: Tensor, machine: Machine, micro_batch: int
) -> tuple[Tensor, Tensor, int]:
    """Score documents (P, L), `micro_batch` of them at once. Returns the nats of each token
    after the first, whether it was the likeliest one, both (P, L - 1), and the bytes that
    the cache of one document has at the end. Raises UserError if a loss is not finite."""
    nats, hits = [], []
    batches = documents.split(micro_batch)
    for batch in tqdm(batches, desc="scoring", leave=False, disable=None):
        batch = batch.to(machine.device)
        cache = adapted.cache()  # each batch of documents begins with an empty one
        segment = adapted.settings.segment
        batch_nats, likeliest = [], []
        with machine.precision():  # autocast, unless the base is in float32
            for losses, logits in segment_losses(adapted.model, batch, cache, segment):
                batch_nats.append(losses)
                likeliest.append(logits.argmax(dim=-1))
        nats.append(torch.cat(batch_nats, dim=1).cpu())
        refuse_not_finite(nats[-1])
        hits.append((torch.cat(likeliest, dim=1) == batch[:, 1:]).cpu())
    return torch.cat(nats), torch.cat(hits), cache.nbytes // len(batch)


def perplexity(nats: Tensor) -> float:
    """exp of the mean of nats of any shape."""
    return nats.double().mean().exp().item()


def ranges(what: str, numbers: Tensor, near: int) -> dict[str, Tensor]:
    """A mask (P, L - 1) for each range of `numbers` (P, L - 1), which are positions or
    distances of tokens. Range "a-b" has those above a, up to b. The first one ends at
    `near`, M + T, which a window can hold. The others end at 512, 1024 ... L. A distance of
    0 marks a token that is no answer, and is in no range."""
    L = numbers.shape[1] + 1
    doubled = {2**e for e in range(9, L.bit_length()) if near < 2**e < L}
    edges = sorted({0, min(near, L), L} | doubled)
    masks = {}
    for above, to in zip(edges, edges[1:]):
        masks[f"{what}{above}-{to}"] = (above < numbers) & (numbers <= to)
    return masks


# --- Tables -----------------------------------------------------------------------------

NAME = 36  # columns for a method's name in a table
ENOUGH = 8  # pieces of text, for a standard error that means something


class Scores(NamedTuple):
    """The figures of each model, by its name."""

    cells: dict[str, dict]  # of the table
    losses: dict[str, Tensor]  # nats of each token at the last length, (P, L - 1)
    hits: dict[str, Tensor]  # of texts with facts: whether each token was the first guess


def score_all(
    models: dict[str, AdaptedLlama], documents: dict[int, Tensor], told: Tensor | None,
    machine: Machine, micro_batch: int,
) -> Scores:
    """Score `documents`, by their length, and, if there are any, texts with facts (P, L).
    Print a line for each model."""
    print(f"cache bytes are those after {[*documents][-1] - 1:,} tokens")
    title = "perplexity, by tokens of a piece"
    print(f"{title:{NAME}} {'slots':>6} {'cache bytes':>14}", *(f"{L:>10}" for L in documents))
    scores = Scores({}, {}, {})
    for name, adapted in models.items():
        by_length = {}
        for L, rows in documents.items():
            nats, _, held = token_losses(adapted, rows, machine, micro_batch)
            by_length[L] = perplexity(nats)
        scores.losses[name] = nats  # those of the last length, as `held` is
        if told is not None:
            _, scores.hits[name], _ = token_losses(adapted, told, machine, micro_batch)
        slots = adapted.settings.mem or None
        cells = {"slots": slots, "cache bytes": held, "perplexity": by_length}
        scores.cells[name] = cells
        columns = [f"{value:>10.3f}" for value in by_length.values()]
        print(f"{name:{NAME}} {slots or '-':>6} {held:>14,}", *columns, flush=True)
    return scores


def standard_error(values: Tensor) -> float:
    """The standard error of the mean of values (P,). It is NaN if there is only one."""
    return values.std().item() / len(values) ** 0.5 if len(values) > 1 else math.nan


def print_differences(losses: dict[str, Tensor], first: str | None) -> dict[str, dict]:
    """Print a line for each model: its nats per token, and how far they are above those of
    the model `first`. The errors are standard errors over pieces; that of a difference is
    paired. Returns the figures of each line."""
    by_piece = {name: nats.double().mean(dim=1) for name, nats in losses.items()}
    number, length = next(iter(losses.values())).shape
    title = f"nats per token, {counted(number, 'piece')} of {length + 1:,}"
    compared = f"  above {first.removeprefix('base, ')}" if first else ""
    print(f"\n{title:{NAME}}    mean   error", f"{compared}  error" if first else "")
    rows = {}
    for name, nats in by_piece.items():
        row = {"mean": nats.mean().item(), "error": standard_error(nats)}
        line = f"{name.removeprefix('base, '):{NAME}} {row['mean']:>7.4f} {row['error']:>7.4f}"
        if first:
            above = nats - by_piece[first]
            row |= {"above first": above.mean().item(), "error of above": standard_error(above)}
            line += f" {row['above first']:>+{len(compared)}.4f} {row['error of above']:>6.4f}"
        print(line)
        rows[name] = row
    return rows


def print_means(
    title: str, counts: str, masks: dict[str, Tensor], values: dict[str, Tensor]
) -> dict[str, dict[str, float | None]]:
    """Print a line for each mask, with the number of its tokens, which are called `counts`,
    and a column for each model. Returns the figures of each line; a mean of no tokens is
    None."""
    print(f"\n{title:30}{counts:>9}", *(f"{name:>5}" for name in values), sep="  ")
    rows = {}
    for label, mask in masks.items():
        tokens = int(mask.sum())
        line = f"{label:30}{tokens:>9,}"
        rows[label] = {"tokens": tokens}
        for name, value in values.items():
            mean = value[mask].double().mean().item() if tokens else None
            rows[label][name] = mean
            cell = "-" if mean is None else f"{mean:.3f}"
            line += f"  {cell:>{max(len(name), 5)}}"
        print(line)
    return rows


# --- The program ------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = add_runs_and_texts(parser).add_argument
    add("--lengths", type=at_least(2), nargs="+", metavar="L",
        help="tokens of a piece of text (default: 2048 4096 8192, if the texts are so long)")
    add("--documents", type=at_least(1), default=64, metavar="N",
        help="pieces of each length at most, spread evenly over the texts (default: 64)")
    add("--micro-batch", type=at_least(1), default=4, metavar="N",
        help="pieces in memory at once (default: 4)")
    add("--by-position", action="store_true",
        help="also the loss by position in the text, at the last length")
    add("--recall", action="store_true",
        help="also what is remembered; without --method a window and H2O stand beside each RUN")
    flags = parse_models(parser)
    if flags.fact_form and not flags.recall:
        parser.error(f"--fact-form {flags.fact_form}: it is for facts; add --recall")
    flags.fact_form = flags.fact_form or "line"
    return flags


def main() -> None:
    flags = parse()
    machine = prepare(flags.device, flags.dtype)
    model, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    models = models_to_score(flags, model, with_baselines=flags.recall)
    parts = parts_to_score(flags)
    documents = documents_to_score(flags, parts, tokenizer, default=(2048, 4096, 8192))
    L, last = [*documents.items()][-1]
    told = told_ago = None
    if flags.recall:
        # The names of facts are divided into parts, as texts are. If all parts are
        # scored, take the held-out names, which no training has seen.
        names = parts[0] if len(parts) == 1 else "held-out"
        note_no_facts(last.numpy(), L, tokenizer, flags.fact_form)
        told, told_ago = tell_all(last, names, tokenizer, flags.fact_form)
    note_limits(models, [*documents])
    if len(last) < ENOUGH:
        few = f"{counted(len(last), 'piece')} of {L:,} tokens: too few to tell memories apart"
        print(f"note: {few}; give longer texts", file=sys.stderr)
    scores = score_all(models, documents, told, machine, flags.micro_batch)

    numbers = {L: len(rows) for L, rows in documents.items()}
    figures = {"parts": parts, "documents": numbers, "methods": scores.cells}
    memories = [name for name, adapted in models.items() if adapted.settings.mem]
    near = max((models[name].settings.capacity for name in memories), default=0)
    # Others are compared with the first RUN that has slots, or else the first --method.
    runs = [name for name in memories if not name.startswith("base, ")]
    first = next(iter(runs + memories), None)
    figures["nats per token"] = print_differences(scores.losses, first)
    if flags.by_position:
        position = torch.arange(1, L).expand(len(last), -1)
        masks = ranges("position ", position, near)
        rows = print_means(f"nats in {L} tokens", "tokens", masks, scores.losses)
        figures["nats by position"] = rows
    if flags.recall:
        words = len(fact_tokens(tokenizer, flags.fact_form).words)
        masks = ranges("told ago ", told_ago, near)
        title = f"recalled; by chance 1 in {words}"
        figures["recall"] = print_means(title, "answers", masks, scores.hits)
    if flags.json:
        write_json(flags.json, figures)


if __name__ == "__main__":
    run_program(main)
