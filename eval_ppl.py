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
from typing import Iterable

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
from support.tokenizer import Tokenizer

# --- Perplexity -------------------------------------------------------------------------


@torch.no_grad()
def token_losses(
    adapted: AdaptedLlama, documents: Tensor, machine: Machine, micro_batch: int
) -> tuple[Tensor, Tensor, int]:
    """Score P documents (P, L), `micro_batch` of them at once. Returns the nats of each token
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


# --- Figures ----------------------------------------------------------------------------

# The rows of a table by name. Each has its values by name, in the order of the columns.
Rows = dict[str, dict[str, float]]


def standard_error(values: Tensor) -> float:
    """The standard error of the mean of values (P,). It is NaN if there is only one."""
    return values.std().item() / len(values) ** 0.5 if len(values) > 1 else math.nan


def differences(losses: dict[str, Tensor], first: str | None) -> Rows:
    """The nats per token of each model, and how far they are above those of the model
    `first`. Errors are standard errors over pieces; that of a difference is paired."""
    by_piece = {name: nats.double().mean(dim=1) for name, nats in losses.items()}
    rows = {}
    for name, nats in by_piece.items():
        rows[name] = {"mean": nats.mean().item(), "error": standard_error(nats)}
        if first:
            above = nats - by_piece[first]
            rows[name]["above first"] = above.mean().item()
            rows[name]["error of above"] = standard_error(above)
    return rows


def means(masks: dict[str, Tensor], values: dict[str, Tensor]) -> Rows:
    """For each mask the number of its tokens, and the mean of each model's values there.
    A mean of no tokens is NaN."""
    rows = {}
    for label, mask in masks.items():
        rows[label] = {"tokens": int(mask.sum())}
        for name, value in values.items():
            rows[label][name] = value[mask].double().mean().item()
    return rows


def first_memory(models: dict[str, AdaptedLlama]) -> str | None:
    """The model that others are compared with: of those with slots the first RUN, or else the
    first --method."""
    memories = [name for name, adapted in models.items() if adapted.settings.mem]
    runs = [name for name in memories if not name.startswith("base, ")]
    return next(iter(runs + memories), None)


def near_tokens(models: dict[str, AdaptedLlama]) -> int:
    """M + T of the largest memory, or 0 without one. The first of `ranges` ends there."""
    memories = [adapted.settings for adapted in models.values() if adapted.settings.mem]
    return max((s.capacity for s in memories), default=0)


def by_position(models: dict[str, AdaptedLlama], losses: dict[str, Tensor]) -> Rows:
    """The mean of losses (P, L - 1) in each range of positions."""
    shape = next(iter(losses.values())).shape
    position = torch.arange(1, shape[1] + 1).expand(shape)
    return means(ranges("position ", position, near_tokens(models)), losses)


def recall(
    models: dict[str, AdaptedLlama], told: Tensor, told_ago: Tensor, machine: Machine,
    micro_batch: int,
) -> Rows:
    """Score texts with facts (P, L). Returns the share of answers that are the first
    guess, for each range of how long ago they were told, (P, L - 1)."""
    hits = {}
    for name, adapted in models.items():
        _, hits[name], _ = token_losses(adapted, told, machine, micro_batch)
    return means(ranges("told ago ", told_ago, near_tokens(models)), hits)


# --- Tables -----------------------------------------------------------------------------

ENOUGH = 8  # pieces of text, for a standard error that means something
NAME = 36  # characters for a name in a table, at least
NUMBER = 9  # characters for a number, at least
Columns = list[tuple[str, str]]  # the heading of each, and the format of its numbers


def print_headings(title: str, columns: Columns, width: int) -> None:
    """Print the first line of a table, whose first column is `width` characters wide."""
    headings = [f"{heading:>{NUMBER}}" for heading, _ in columns]
    print(f"{title:{width}}", *headings, sep="  ")


def print_row(name: str, values: Iterable[float], columns: Columns, width: int) -> None:
    """Print a line below the headings: a value in each column, and "-" for NaN."""
    line = f"{name:{width}}"
    for value, (heading, form) in zip(values, columns, strict=True):
        cell = "-" if math.isnan(value) else f"{value:{form}}"
        line += f"  {cell:>{max(NUMBER, len(heading))}}"
    print(line, flush=True)


def print_table(title: str, columns: Columns, rows: Rows) -> None:
    """Print a blank line, the headings, and each row."""
    print()
    width = max(NAME, len(title), *map(len, rows))
    print_headings(title, columns, width)
    for name, row in rows.items():
        print_row(name, row.values(), columns, width)


def score_all(
    models: dict[str, AdaptedLlama], documents: dict[int, Tensor], machine: Machine,
    micro_batch: int,
) -> tuple[dict[str, dict], dict[str, Tensor]]:
    """Score `documents`, by their length. Print a line for each model as soon as it is
    scored. Returns the figures of each line, and the nats of each token at the last
    length, (P, L - 1)."""
    print(f"cache bytes are those after {[*documents][-1] - 1:,} tokens")
    columns = [("slots", "d"), ("bytes of cache", ",")]
    columns += [(str(L), ".3f") for L in documents]
    width = max(NAME, *map(len, models))
    print_headings("perplexity, by tokens of a piece", columns, width)
    cells, losses = {}, {}
    for name, adapted in models.items():
        by_length = {}
        for L, pieces in documents.items():
            nats, _, held = token_losses(adapted, pieces, machine, micro_batch)
            by_length[L] = perplexity(nats)
        losses[name] = nats  # those of the last length, as `held` is
        slots = adapted.settings.mem or math.nan  # a full cache has none
        cells[name] = {"slots": slots, "cache bytes": held, "perplexity": by_length}
        print_row(name, [slots, held, *by_length.values()], columns, width)
    return cells, losses


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


def write_facts(
    flags: argparse.Namespace, parts: list[str], documents: Tensor, tokenizer: Tokenizer
) -> tuple[Tensor, Tensor]:
    """Write facts into documents (P, L). Returns the documents, and how long ago each answer
    was last told, (P, L - 1). Raises UserError if the tokenizer cannot write facts."""
    # The names of facts are divided into parts, as texts are. If all parts are scored,
    # take the held-out names, which no training has seen.
    names = parts[0] if len(parts) == 1 else "held-out"
    note_no_facts(documents.numpy(), documents.shape[1], tokenizer, flags.fact_form)
    return tell_all(documents, names, tokenizer, flags.fact_form)


def print_tables(
    flags: argparse.Namespace, tokenizer: Tokenizer, figures: dict, first: str | None
) -> None:
    """Print the tables that follow the perplexities. Others are compared with the model
    `first`."""
    L, number = [*figures["documents"].items()][-1]
    columns = [("mean", ".4f"), ("error", ".4f")]
    if first:
        columns += [(f"above {first}", "+.4f"), ("error", ".4f")]
    title = f"nats per token, {counted(number, 'piece')} of {L:,}"
    print_table(title, columns, figures["nats per token"])

    of_models = [(name, ".3f") for name in figures["methods"]]
    if flags.by_position:
        columns = [("tokens", ","), *of_models]
        print_table(f"nats in {L:,} tokens", columns, figures["nats by position"])
    if flags.recall:
        words = len(fact_tokens(tokenizer, flags.fact_form).words)
        columns = [("answers", ","), *of_models]
        print_table(f"recalled; by chance 1 in {words}", columns, figures["recall"])


def main() -> None:
    flags = parse()
    machine = prepare(flags.device, flags.dtype)
    model, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    models = models_to_score(flags, model, with_baselines=flags.recall)
    parts = parts_to_score(flags)
    documents = documents_to_score(flags, parts, tokenizer, default=(2048, 4096, 8192))
    last = [*documents.values()][-1]
    if flags.recall:  # now, so that mistakes are refused before anything is scored
        told, told_ago = write_facts(flags, parts, last, tokenizer)
    note_limits(models, [*documents])
    if len(last) < ENOUGH:
        few = f"{counted(len(last), 'piece')} of {last.shape[1]:,} tokens"
        remedy = "too few to tell memories apart; give longer texts"
        print(f"note: {few}: {remedy}", file=sys.stderr)

    cells, losses = score_all(models, documents, machine, flags.micro_batch)
    numbers = {L: len(rows) for L, rows in documents.items()}
    figures = {"parts": parts, "documents": numbers, "methods": cells}
    first = first_memory(models)
    figures["nats per token"] = differences(losses, first)
    if flags.by_position:
        figures["nats by position"] = by_position(models, losses)
    if flags.recall:
        figures["recall"] = recall(models, told, told_ago, machine, flags.micro_batch)
    print_tables(flags, tokenizer, figures, first)
    if flags.json:
        write_json(flags.json, figures)


if __name__ == "__main__":
    run_program(main)
