"""What eval_ppl.py and tools score: the models and the texts that flags name."""

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from torch import Tensor

from lococo import METHODS, AdaptedLlama
from model import Llama
from support.ours.budgets import HeadSettings
from support.programs.adapter import load_adapter, read_adapter
from support.command_line import TINY, Parser, is_tiny, named_path, output_file
from support.files import UserError
from support.programs.settings import method_sizes, refuse_sizes, untrained
from support.programs.settings import warn_if_too_long
from support.text import PARTS, copies, fingerprints, note_of_copies, pieces, token_streams
from support.tokenizer import Tokenizer

# --- Flags ------------------------------------------------------------------------------


def add_shared_flags(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flags that all programs share which score. Returns the group that others may
    join."""
    parser.memory.add_argument("--method", nargs="+", default=[], choices=METHODS,
                               metavar="METHOD",
                               help="methods without training (default: none), of "
                                    "%(choices)s; docs/paper-to-code.md says what each keeps")
    group = parser.add_argument_group("scoring and output")
    group.add_argument(
        "--json", type=output_file, metavar="FILE",
        help="write the tables there, too; null is infinite, or of no tokens",
    )
    return group


def add_runs_and_texts(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flags that eval_ppl.py and tools/needle.py share: those above, and what is
    scored. Returns the group that others may join."""
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN",
                        help="folders with an adapter (default for tiny/: its own)")
    group = add_shared_flags(parser)
    add = group.add_argument
    add("--data", type=named_path, nargs="+", default=[], metavar="PATH",
        help='texts: files, folders, .jsonl of {"text": ...} (default: Python\'s own library)')
    add("--part", choices=(*PARTS, "all"),
        help="which of the texts, by the checksum of their names (default: held-out, which "
             "train.py has not seen; all of --data if no RUN has held out a part of its texts)")
    add("--fact-form", choices=("line", "sentence"),
        help="of facts: lines `@ name name = word` (default), or sentences as RULER's needles")
    return group


def parse_models(parser: Parser) -> argparse.Namespace:
    """Parse the flags of a program that scores. Where no model is named, `runs` is the
    embedded adapter."""
    flags = parser.parse_sizes()
    flags.method = list(dict.fromkeys(flags.method))
    if not flags.runs and not flags.method and is_tiny(flags.model):
        flags.runs = [TINY]
    different = {os.path.realpath(run): run for run in flags.runs}  # one named twice is scored once
    flags.runs = list(different.values())
    return flags


# --- Models -----------------------------------------------------------------------------


def name_of(s: HeadSettings) -> str:
    """A method without training, as a table names it."""
    name = f"base, {s.method}"
    if not s.mem:
        return name
    name += f" M={s.mem}"
    if s.segment != s.mem:
        name += f" T={s.segment}"
    name += " budgets" if s.budgets else ""
    return name + (f" bits={s.bits}" if s.bits else "")


def given(flags: argparse.Namespace) -> str:
    """The sizes that were given for runs, as a table names them."""
    numbers = {"M": flags.mem, "T": flags.segment, "bits": flags.bits}
    named = "".join(f" {name}={n}" for name, n in numbers.items() if n is not None)
    if flags.budgets is not None:
        named += " budgets" if flags.budgets else " equal"
    return named


def baselines(model: Llama, mem: int, segment: int, bits: int = 0) -> list[AdaptedLlama]:
    """A window and H2O of M slots, at least 4, on their base."""
    sizes = dict(mem=max(4, mem), segment=segment, bits=bits)
    return [untrained(model, method, **sizes) for method in ("streaming", "h2o")]


def models_to_score(
    flags: argparse.Namespace, model: Llama, with_baselines: bool
) -> dict[str, AdaptedLlama]:
    """By name: the base with its full cache and with each --method, then the runs; beside
    each run its baselines, if no --method is named. All are on one base. All are made at
    once, so that a wrong one is refused before anything is scored."""
    runs = {}
    for run in flags.runs:
        name = os.path.relpath(run) + given(flags)
        runs[name] = load_adapter(run, model, **flags.sizes)
    models = [untrained(model, "full", 512, segment=512)]
    sizes = method_sizes(flags, [*runs.values()])
    for method in flags.method:
        models.append(untrained(model, method, budgets=flags.budgets, **sizes))
    if not any(adapted.settings.mem for adapted in [*runs.values(), *models]):
        refuse_sizes(flags)
    if with_baselines and not flags.method:
        for adapted in runs.values():
            s = adapted.settings
            if s.mem:
                models += baselines(model, s.mem, s.segment, s.bits)
    return {name_of(adapted.settings): adapted for adapted in models} | runs


def note_limits(models: dict[str, AdaptedLlama], lengths: list[int]) -> None:
    """Say where distances are too large, and where nothing is compressed."""
    for name, adapted in models.items():
        s = adapted.settings
        warn_if_too_long(adapted, max(lengths))
        short = [str(L) for L in lengths if L - 1 <= s.capacity]
        if s.mem and short and not s.budgets:  # with budgets a head may be compressed earlier
            nothing = f"up to {s.capacity:,} entries nothing is compressed"
            print(f"note: {name}, --lengths {' '.join(short)}: {nothing}", file=sys.stderr)


# --- Texts ------------------------------------------------------------------------------


def parts_to_score(flags: argparse.Namespace) -> list[str]:
    """The part that --part names. Without --part: the part that train.py holds out, if a
    RUN has left it out or the texts are Python's library; otherwise all parts of --data.
    A RUN that held nothing out has trained on all of its texts, and scores others."""
    left_out = not flags.data
    for run in flags.runs:
        if "held-out" not in read_adapter(run).parts:
            left_out |= not is_tiny(run)  # tiny/ has read Python's library alone
    part = flags.part or ("held-out" if left_out else "all")
    return list(PARTS) if part == "all" else [part]


def documents_to_score(
    flags: argparse.Namespace, parts: list[str], tokenizer: Tokenizer, default: tuple[int, ...]
) -> dict[int, Tensor]:
    """By length L pieces of the texts of these parts, (P, L), spread evenly over them. If
    --lengths does not name any, they have the `default` lengths, as far as the texts are so
    long. Raises UserError if there are none of a length that was asked for, or none at
    all."""
    streams = token_streams(flags.data, tokenizer)
    ids = np.concatenate([streams[part] for part in parts])
    trained = set()  # what is not scored; nothing, if the user asks for what trained
    if flags.part in (None, "held-out"):
        trained.update(*(read_adapter(run).trained for run in flags.runs))
    if parts == ["held-out"]:
        trained |= fingerprints(streams["training"], tokenizer.bos)
    documents = {}
    lengths = flags.lengths or default
    for L in lengths:
        copied = copies(ids, trained, tokenizer.bos, L)
        found = pieces(ids, tokenizer.bos, L, flags.documents, without=copied)
        if len(found):
            documents[L] = found
        elif flags.lengths or L == lengths[0]:
            why = how_long(ids, parts, tokenizer.bos)
            if copied:
                why = "all texts of this length are also training texts, under this name or another; "
                why += "name other --data, or --part all to score them all the same"
            raise UserError(f"--lengths {L}: {why}")
        if copied:
            print(note_of_copies(copied), file=sys.stderr)
    listed = ", ".join(f"{len(rows)} of {L} tokens" for L, rows in documents.items())
    of = "all parts" if len(parts) == len(PARTS) else parts[0]
    whose = "" if flags.data else "Python's standard library, "
    print(f"pieces of texts ({whose}{of}): {listed}")
    return documents


def how_long(ids: np.ndarray, parts: list[str], bos: int) -> str:
    """How long the longest document of these parts is, one part or all."""
    longest = np.diff(np.flatnonzero(ids == bos), append=len(ids)).max(initial=0)
    of = f" of the {parts[0]} part" if len(parts) == 1 else ""
    remedy = "name smaller --lengths, longer texts by --data, or another --part"
    return f"the longest document{of} has {longest:,} tokens; {remedy}"
