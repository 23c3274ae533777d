"""Which memory loses least on a real Llama? Makes the tables of docs/real-llama.md.

    python tools/real_llama.py --model SmolLM2-135M --prose prose              # every row, one seed
    python tools/real_llama.py --model SmolLM2-135M --prose prose --rows ours --seeds 0 1 2
    python tools/real_llama.py --model SmolLM2-135M --prose prose --ablations --seeds 0 1
    python tools/real_llama.py --print                                        # the tables alone

A cell of a table is one row with one seed: train.py trains its convolutions on a frozen base (rows
that are tuned have LoRA, too), then documents of --seq tokens are scored. Three books and
WikiText-2's validation part are given. train.py splits texts by the checksum of their names, and
trains on two of these books and 56 articles. Forms are chosen on a fourth book (--part choosing),
and not on the documents of WikiText-2's test part. A row without convolutions is not trained.

Runs are in runs/real-llama/ and go on where they were stopped. The figures of a cell are one line
of docs/real-llama.jsonl, with the nats of each document. cells.py says how a cell is named and
kept, so that a stored figure never answers another question.
"""

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import cells  # noqa: E402
import train  # noqa: E402
from eval_ppl import token_losses  # noqa: E402
from lococo import AdaptedLlama, load_adapter  # noqa: E402
from model import load_base  # noqa: E402
from support.command_line import HERE, Machine, at_least, config_of  # noqa: E402
from support.command_line import counted, prepare, run_program  # noqa: E402
from support.files import UserError  # noqa: E402
from support.text import long_documents, token_streams  # noqa: E402
from support.tokenizer import Tokenizer  # noqa: E402
import official_code  # noqa: E402, F401, it adds a compressor
import variants  # noqa: E402, F401, it adds compressors

BOOKS = ("book_adv.txt", "book_colonel.txt", "book_jack.txt", "wikitext2-valid.jsonl")
PARTS = {"choosing": "book_news.txt", "test": "wikitext2-test.jsonl"}
TOOL = "real_llama.py"
RESULTS = HERE / "docs" / "real-llama.jsonl"
RUNS = HERE / "runs" / "real-llama"
DOCUMENTS = 48  # that are scored, if no other number is asked for

# --- Rows -------------------------------------------------------------------------------

# Slots of SmolLM2's 30 layers at M = 64. The texts are among those that train:
#     python tools/budgets.py --model SmolLM2-135M --dtype bfloat16 \
#         --data prose/wikitext2-valid.jsonl --mem 64 --heavy 40 --forget 0.75
BUDGETS = (44, 52, 52, 24, 40, 68, 36, 108, 68, 32, 24, 40, 44, 36, 60, 68, 24, 172, 176, 24, 216,
           44, 76, 128, 100, 24, 36, 32, 48, 24)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What a table calls a memory, and what makes it."""

    label: str
    flags: str  # of train.py
    trained: bool = True
    steps: int | None = None  # of training, whatever --steps says; None: as many as --steps says


PAPER = "--compressor paper --kernel 21 --conv-lr 5e-2 --bptt 1 --sharper 1"
RECIPE = "--recipe inference --sharper 16"
SOFT = "--recipe inference --sharper 1"  # a merged slot is a mixture
# The recipe sent the gradient through 4 segments when some rows, and nearly all changes of
# ABLATIONS, were measured. Through 1 the loss is the same, so the recipe has 1 today.
FOUR = "--bptt 4"
LORA = f"--lora-rank 8 --lr 3e-4 {FOUR}"
ROWS = {
    "full": Row("full attention", "--method full", trained=False),
    "window": Row("window: 4 first, M - 4 last", "--method streaming", trained=False),
    "h2o": Row(
        "H2O: M/2 heavy, M/2 last",
        "--method h2o --positions slots",
        trained=False,
    ),
    "h2o text": Row("H2O, positions of the text", "--method h2o", trained=False),
    "h2o forget": Row(
        "H2O with forgetting: earlier attention times 0.75 per segment",
        "--method h2o --forget 0.75",
        trained=False,
    ),
    "h2o 5/8 forget": Row(
        "ours without merged slots: 5M/8 heavy, 3M/8 last, forgetting",
        "--method h2o --heavy {heavy} --forget 0.75",
        trained=False,
    ),
    "h2o 5/8 forget budgets": Row(
        "ours without merged slots, with budgets of layers",
        "--method h2o --heavy {heavy} --forget 0.75 --budgets {budgets}",
        trained=False,
    ),
    "official h2o": Row(
        "H2O of the official code: M heavy, by the last segment's attention",
        "--method h2o --heavy {mem} --recent 0 --forget 0",
        trained=False,
    ),
    "lococo": Row("the paper's `lococo`: all merged", f"--method lococo {PAPER}"),
    "lococo+h2o": Row(
        "the paper's `lococo+h2o`: M/2 heavy, M/2 merged", f"--method lococo+h2o {PAPER}"
    ),
    "official code": Row(
        "the official code's LoCoCo",
        f"--method lococo+h2o {PAPER} --compressor official --forget 0",
    ),
    "window merged": Row(
        "window with M/4 merged (at most 24), mixtures", f"{SOFT} --method lococo+window {FOUR}"
    ),
    "ours untrained soft": Row("ours before training, mixtures", f"{SOFT} --conv-lr 0", steps=1),
    "ours untrained": Row("ours before training", f"{RECIPE} --conv-lr 0", steps=1),
    "ours, paper's compressor": Row("ours with the paper's compressor instead", f"{SOFT} {PAPER}"),
    "ours, softmax": Row(
        "ours with a softmax alone instead, mixtures", f"{SOFT} --compressor softmax"
    ),
    "ours soft": Row("ours with mixtures: logits as trained", SOFT),
    "ours": Row("**ours** (`lococo+h2o+recent`)", RECIPE),
    "ours budgets soft": Row(
        "ours with budgets of layers and mixtures", f"{SOFT} --budgets {{budgets}}"
    ),
    "ours budgets soft 200": Row(
        "ours with budgets of layers and mixtures, gradient through 4 segments",
        f"{SOFT} --budgets {{budgets}} {FOUR}",
        steps=200,
    ),
    "ours budgets": Row("**ours with budgets of layers**", f"{RECIPE} --budgets {{budgets}}"),
    "ours budgets 200": Row(
        "the same, trained longer", f"{RECIPE} --budgets {{budgets}}", steps=200
    ),
    # With LoRA, embeddings and norms as in the paper's context extension.
    "full lora": Row("full attention, tuned", f"--method full {LORA}"),
    "window lora": Row("window, tuned", f"--method streaming {LORA}"),
    "h2o lora": Row("H2O, positions of the slots, tuned", f"--method h2o --positions slots {LORA}"),
    "h2o 5/8 forget lora": Row(
        "ours without merged slots, tuned", f"--method h2o --heavy {{heavy}} --forget 0.75 {LORA}"
    ),
    "ours lora": Row("**ours**, tuned", f"{RECIPE} {LORA}"),
}


@dataclass(frozen=True)
class Change:
    """Something of a row that is taken out or made otherwise, to see what it is worth."""

    label: str
    row: str
    flags: str
    steps: int


ABLATIONS = (
    Change("for comparison: ours, with a gradient through 4 segments", "ours", FOUR, 40),
    Change("not trained: filters as at the start", "ours untrained", "", 1),
    Change("mixtures: logits as trained, not multiplied by 16", "ours soft", FOUR, 40),
    Change("mixtures, not trained", "ours untrained soft", "", 1),
    Change("logits multiplied by 4", "ours", f"{FOUR} --sharper 4", 40),
    Change("logits multiplied by 64", "ours", f"{FOUR} --sharper 64", 40),
    Change("1 tap instead of 3", "ours", f"{FOUR} --kernel 1", 40),
    Change("1 tap, mixtures", "ours soft", f"{FOUR} --kernel 1", 40),
    Change("9 taps", "ours", f"{FOUR} --kernel 9", 40),
    Change("21 taps", "ours", f"{FOUR} --kernel 21", 40),
    Change("one entry in training, too: straight-through gradient", "ours",
           f"{FOUR} --compressor scored-straight-through --sharper 1", 40),
    Change("all slots choose at once", "ours", f"{FOUR} --compressor scored-at-once", 40),
    Change("all slots choose at once, mixtures",
           "ours soft", f"{FOUR} --compressor scored-at-once", 40),
    Change("one filter for all slots", "ours", f"{FOUR} --compressor scored-one-filter", 40),
    Change("one filter of 1 tap: a learnt score of each entry",
           "ours", f"{FOUR} --compressor scored-one-filter --kernel 1", 40),
    Change("the same, and the slots take the highest scores, copies or not (top-k)",
           "ours", f"{FOUR} --compressor scored-top-k --kernel 1", 40),
    Change("a softmax alone, mixtures", "ours soft", f"{FOUR} --compressor softmax", 40),
    Change("without the attention received: compressor `facts`",
           "ours", f"{FOUR} --compressor facts", 40),
    Change("8 heavy and 32 merged slots instead of 24 and 16",
           "ours", f"{FOUR} --heavy 8 --recent 24", 40),
    Change("32 heavy and 8 merged slots", "ours", f"{FOUR} --heavy 32 --recent 24", 40),
    Change("36 heavy and 4 merged slots instead of 24 and 16",
           "ours", f"{FOUR} --heavy 36 --recent 24", 40),
    Change("36 heavy and 12 last slots instead of 24 and 24",
           "ours", f"{FOUR} --heavy 36 --recent 12", 40),
    Change("12 heavy and 36 last slots", "ours", f"{FOUR} --heavy 12 --recent 36", 40),
    Change("gradient through 1 segment, as in the recipe", "ours", "", 40),
    Change("gradient through 2 segments", "ours", "--bptt 2", 40),
    Change("rate 0.005 instead of 0.02", "ours", f"{FOUR} --conv-lr 5e-3", 40),
    Change("rate 0.05", "ours", f"{FOUR} --conv-lr 5e-2", 40),
    Change("no forgetting", "ours", f"{FOUR} --forget 1", 40),
)

# In README.md.
SHORT = ("full", "window", "h2o", "official code", "ours", "ours budgets")
TUNED = ("full lora", "window lora", "h2o lora", "h2o 5/8 forget lora", "ours lora")
PAGES = (HERE / "README.md", HERE / "docs" / "real-llama.md")


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model: Path
    prose: Path  # the folder of BOOKS and PARTS
    changes: tuple[Change, ...]  # to make; a row as it is has no flags of its own
    seeds: list[int]
    mem: int  # slots M; a segment has as many tokens
    seq: int  # tokens of a document
    part: str  # of PARTS, to score
    documents: int  # at most
    print: bool  # stored cells alone
    write: bool


# --- A cell -----------------------------------------------------------------------------


def all_flags(row: Row, mem: int, more: str) -> str:
    budgets = " ".join(str(slots * mem // 64) for slots in BUDGETS)
    return f"{row.flags.format(mem=mem, heavy=mem * 5 // 8, budgets=budgets)} {more}".strip()


def checksums(options: Options) -> dict:
    """Of all files that make a cell."""
    return {
        "base": cells.checksum_of_base(options.model),
        "texts": cells.checksum_of_files(options.prose / text for text in BOOKS),
        "sources": cells.checksum_of_sources(TOOL),
        "scored": cells.checksum_of_files([options.prose / PARTS[options.part]]),
    }


def cell_name(change: Change, seed: int, options: Options, files: dict) -> dict:
    """All that makes a cell; `files` are the checksums."""
    row = ROWS[change.row]
    return {
        "flags": all_flags(row, options.mem, change.flags),
        "steps": change.steps if row.trained else 0,
        "seed": seed if row.trained else 0,
        "mem": options.mem,
        "seq": options.seq,
        "part": options.part,
        "documents": options.documents,
    } | files


def train_cell(name: dict, options: Options) -> Path:
    """Train as the cell's name says, but leave the parameters as trained. So cells that differ in
    --sharper alone have one run. Returns its directory."""
    trained_by = {key: name[key] for key in name if key not in ("part", "documents", "scored")}
    trained_by["flags"] = re.sub(r"--sharper \S+ ?", "", name["flags"]).strip()
    out = RUNS / cells.digest_of(trained_by)
    line = [*train_line(trained_by, options.model), "--sharper", "1"]
    line += ["--device", "cpu", "--dtype", "bfloat16", "--score-tokens", "0"]
    line += ["--data", *(str(options.prose / text) for text in BOOKS)]
    line += ["--steps", str(name["steps"]), "--seed", str(name["seed"])]
    cells.train_in(out, line)
    return out


def train_line(name: dict, model: Path) -> list[str]:
    """The command line of train.py for a cell, without what only training needs. The flags of the
    cell come last, as the last of two values counts."""
    line = ["--model", str(model), "--recipe", "inference", "--seq", str(name["seq"])]
    slots = str(name["mem"])
    return [*line, "--mem", slots, "--segment", slots, *name["flags"].split()]


def documents_to_score(options: Options, tokenizer: Tokenizer) -> torch.Tensor:
    """Tokens (documents, --seq). Raises UserError if no document is so long."""
    file = options.prose / PARTS[options.part]
    streams = token_streams([file], tokenizer)
    # In this order, because all stored figures have it.
    ids = np.concatenate([streams[part] for part in sorted(streams)])
    if options.part == "test":
        documents = long_documents(ids, tokenizer.bos, options.seq, options.documents)
    else:  # one book: pieces of it, evenly spread
        pieces = torch.from_numpy(ids[: len(ids) // options.seq * options.seq].astype(np.int64))
        pieces = pieces.view(-1, options.seq)
        documents = pieces[:: max(1, len(pieces) // options.documents)][: options.documents]
    if not len(documents):
        raise UserError(f"--seq {options.seq}: no document of {file} is so long")
    return documents


def make_cell(row: Row, name: dict, options: Options, machine: Machine) -> dict:
    """Train if the row trains, and score: nats per token of each document."""
    about = {}
    begun = time.time()
    config, _, _ = train.parse(train_line(name, options.model))
    if row.trained:
        run = train_cell(name, options)
        about["seconds of training"] = round(time.time() - begun)
        log = [json.loads(line) for line in open(run / "log.jsonl")]
        about["last training losses"] = [round(entry["loss"], 3) for entry in log[-3:]]
    model, tokenizer = load_base(options.model, machine.dtype, machine.device)
    if row.trained:
        adapted = load_adapter(run, model)
        for compressor in adapted.compressors:
            compressor.sharpen(config.sharper)
    else:
        adapted = AdaptedLlama(model, train.settings_of(config))
    begun = time.time()
    losses, _, held = token_losses(adapted, documents_to_score(options, tokenizer), machine, 8)
    about["seconds of scoring"] = round(time.time() - begun)
    about["trained parameters"] = sum(p.numel() for p in adapted.trained().values())
    about["cache bytes"] = held
    means = losses.double().mean(dim=1)
    by_document = [round(nats, 5) for nats in means.tolist()]
    return about | {"nats": means.mean().item(), "by document": by_document}


# --- Stored cells and tables ------------------------------------------------------------


def mean_and_error(values: np.ndarray) -> str:
    return f"{values.mean():+.4f} ± {values.std(ddof=1) / len(values) ** 0.5:.4f}"


def best_of(
    rows: tuple[str, ...], nats: dict[tuple, np.ndarray], steps: int, extra: str
) -> np.ndarray | None:
    """Of these rows, after so many steps, the one with the lowest loss: with the same further flags
    if there is one, or else without any."""
    for flags in (extra, ""):
        alike = [values for key, values in nats.items()
                 if key[0] in rows and key[1:] == (steps, flags)]  # fmt: skip
        if alike:
            return min(alike, key=lambda values: values.mean())
    return None


def cells_of_rows(stored: list[dict], **about) -> dict[tuple[str, int, str], list[dict]]:
    """Cells like `about` that today's flags make, the newest of each seed in the order of seeds: by
    row, steps and further flags, in the order of ROWS."""
    today = []
    for cell in stored:
        flags = all_flags(ROWS[cell["row"]], cell["mem"], cell["extra"])
        if cell["flags"] == flags and about.items() <= cell.items():
            today.append(cell)
    rows = {}
    for cell in cells.latest(today, "row", "steps", "extra", "seed"):
        rows.setdefault((cell["row"], cell["steps"], cell["extra"]), []).append(cell)
    for some in rows.values():
        some.sort(key=lambda cell: cell["seed"])
    order = list(ROWS)
    return dict(sorted(rows.items(), key=lambda item: (order.index(item[0][0]), item[0][1:])))


def nats_of_rows(rows: dict[tuple, list[dict]]) -> dict[tuple, np.ndarray]:
    """Nats per token of each document, (documents,): the mean of the seeds."""
    nats = {}
    for key, some in rows.items():
        nats[key] = np.mean([cell["by document"] for cell in some], axis=0)
    return nats


def table(stored: list[dict], **about) -> str:
    """A line for each row that has cells like `about`: nats per token, the mean of its seeds;
    perplexity; the paired difference from H2O, with the positions that suit it better, and its
    standard error over documents; and which part of that H2O's gap to full attention is closed, by
    each seed. Rows that are tuned stand in tables of their own, with H2O tuned alike, for as many
    steps."""
    rows = cells_of_rows(stored, **about)
    nats = nats_of_rows(rows)
    head = "memory | steps | seeds | nats per token | perplexity | from H2O, nats per token"
    lines = [f"| {head} | gap closed, % |", "|---|---|---|---|---|---|---|"]
    for (row, steps, extra), values in nats.items():
        some = rows[row, steps, extra]
        label = ROWS[row].label
        seeds = len(some) if steps else "-"  # without training all seeds are alike
        line = f"| {label}{' ' + extra if extra else ''} | {steps or '-'} | {seeds} "
        line += f"| {values.mean():.4f} | {np.exp(values.mean()):.3f} "
        if row in TUNED:
            h2o = best_of(("h2o lora",), nats, steps, extra)
            full = best_of(("full lora",), nats, steps, extra)
        else:
            h2o = best_of(("h2o", "h2o text"), nats, 0, extra)
            full = best_of(("full",), nats, 0, extra)
        if h2o is None or full is None or len(h2o) != len(values):
            line += "| | |"
        else:
            gap = (h2o - full).mean()
            shares = [100 * (h2o.mean() - c["nats"]) / gap for c in some]
            closed = ", ".join(str(round(share)) for share in shares)
            line += f"| {mean_and_error(values - h2o)} | {closed} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def ablation_table(stored: list[dict], **about) -> str:
    """A line for each change of ours that has cells like `about`: nats per token, the mean of its
    seeds; the paired difference from ours with the same seeds, with its standard error over
    documents; and the difference of each seed."""
    made = {}  # nats of each document, by change and seed
    for change in ABLATIONS:
        flags = all_flags(ROWS[change.row], about["mem"], change.flags)
        this = about | {"row": change.row, "flags": flags, "steps": change.steps}
        some = [cell for cell in stored if this.items() <= cell.items()]
        for cell in cells.latest(some, "seed"):
            made.setdefault(change, {})[cell["seed"]] = np.array(cell["by document"])
    ours = made.get(ABLATIONS[0], {})
    lines = ["| change | seeds | nats per token | from ours | each seed |", "|---|---|---|---|---|"]
    for change, nats in made.items():
        seeds = sorted(nats.keys() & ours.keys())
        if not seeds:
            continue
        mean = np.mean([nats[seed] for seed in seeds])
        above = [nats[seed] - ours[seed] for seed in seeds]
        each = ", ".join(f"{values.mean():+.4f}" for values in above)
        line = f"| {change.label} | {len(seeds)} | {mean:.4f} | "
        line += "| |" if nats is ours else f"{mean_and_error(np.mean(above, axis=0))} | {each} |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def tables(stored: list[dict]) -> dict[str, str]:
    """All tables by name; a name that ends with "in short" has the rows of README.md. Rows that are
    not tuned and have further flags (--flags) stand in a table of their own, beside the same rows
    without them, full attention and H2O."""
    frozen = [row for row in ROWS if "lora" not in row]
    rows_of_tables = {"": frozen, ", in short": SHORT, ", tuned": TUNED}
    usual = [cell for cell in stored if not cell["extra"]]
    made = {}
    for cell in stored:
        # What all cells of a table have in common.
        about = {key: cell[key] for key in ("part", "mem", "seq", "documents")}
        size = f"M = {cell['mem']}, {cell['seq']:,} tokens"
        if cell["documents"] != DOCUMENTS:
            size += f", {counted(cell['documents'], 'document')}"
        name = f"{cell['part']}, {size}"
        if name in made:
            continue
        for ending, rows in rows_of_tables.items():
            some = [cell for cell in usual if cell["row"] in rows]
            if any(about.items() <= cell.items() for cell in some):
                made[name + ending] = table(some, **about)
        alike = [
            cell for cell in stored if about.items() <= cell.items() and cell["row"] in frozen
        ]
        for flags in sorted({cell["extra"] for cell in alike} - {""}):
            shown = {cell["row"] for cell in alike if cell["extra"] == flags}
            shown |= {"full", "h2o", "h2o text"}
            some = [cell for cell in alike if cell["row"] in shown and cell["extra"] in ("", flags)]
            made[f"{name}, {flags}"] = table(some, **about)
        if cell["part"] == "choosing":
            made[f"ablations, {size}"] = ablation_table(stored, **about)
    return made


def parse() -> Options:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    positive = at_least(1)
    each = "not with --ablations, where each change has its own"
    add("--model", type=Path, help="directory of the base model")
    add("--prose", type=Path, help=f"folder with {', '.join((*BOOKS, *PARTS.values()))}")
    add("--rows", nargs="+", choices=ROWS, metavar="ROW",
        help=f"rows to make: {', '.join(ROWS)} (default: all); {each}")  # fmt: skip
    add("--seeds", nargs="+", type=at_least(0), default=[0], help="of training (default: 0)")
    add("--steps", type=positive,
        help=f"training steps of 4,096 tokens (default: 60); {each}")
    add("--mem", type=positive, default=64,
        help="slots M; a segment has as many tokens (default: 64)")
    add("--seq", type=positive, default=1024, help="tokens of a document (default: 1,024)")
    add("--part", choices=PARTS,
        help="documents to score (default: test; for --ablations: choosing)")
    add("--documents", type=positive, default=DOCUMENTS,
        help=f"documents to score at most (default: {DOCUMENTS})")
    add("--flags", help=f"more flags of train.py, for a variation of a row; {each}")
    add("--ablations", action="store_true", help="make ours with each change of ABLATIONS instead")
    add("--print", action="store_true", help="print the tables of stored cells; make none")
    add("--write", action="store_true", help="write the tables into the pages, too")
    flags = parser.parse_args()
    flags.print = flags.print or flags.write
    if flags.ablations:
        for flag in ("rows", "steps", "flags"):
            if getattr(flags, flag):
                parser.error(f"--{flag}: {each}")
        flags.changes, flags.part = ABLATIONS, flags.part or "choosing"
    else:
        flags.changes = chosen_rows(flags)
    flags.part = flags.part or "test"
    if not flags.print:
        if not (flags.model and flags.prose):
            parser.error("--model and --prose are needed to make a cell")
        flags.model, flags.prose = flags.model.resolve(), flags.prose.resolve()
    return config_of(Options, flags)


def chosen_rows(flags: argparse.Namespace) -> list[Change]:
    """The rows that --rows, --steps and --flags ask for. Raises UserError."""
    chosen = []
    for name in flags.rows or ROWS:
        if "{budgets}" in ROWS[name].flags and flags.mem % 16:
            sixteen = "the budgets of layers need a multiple of 16"
            raise UserError(f"--mem {flags.mem}: {sixteen}; leave out the row {name!r}")
        steps = ROWS[name].steps or flags.steps or 60
        chosen.append(Change("", name, flags.flags or "", steps))
    return chosen


def make_cells(options: Options) -> None:
    """Make and store the cells that are asked for, but for those that are stored already."""
    if not options.prose.is_dir():
        remedy = "docs/real-llama.md says under 'Repeat it' which texts it must have"
        raise UserError(f"--prose {options.prose}: there is no such folder; {remedy}")
    machine = prepare("cpu", "bfloat16")
    # Once, now: what has been imported computes all cells, even if a file is edited meanwhile.
    files, origin = checksums(options), cells.origin()
    for seed, change in product(options.seeds, options.changes):
        row = ROWS[change.row]
        name = cell_name(change, seed, options, files)
        if not cells.find(RESULTS, name):
            print(f"{change.row} {change.flags}, seed {seed}", file=sys.stderr)
            about = {"row": change.row, "extra": change.flags} | origin
            cells.add(RESULTS, about | name | make_cell(row, name, options, machine))


def main() -> None:
    options = parse()
    if not options.print:
        make_cells(options)
    stored = cells.read(RESULTS)
    if options.write:
        cells.write_tables(PAGES, TOOL, tables(stored))
    for name, made in tables(stored).items():
        if not name.endswith("in short"):
            print(f"\n{name}\n\n{made}", end="")


if __name__ == "__main__":
    run_program(main)
