"""Makes tables of docs/: what facts need (facts.md), what merging gains on prose (results.md).

    python tools/reproduce.py --only window ours --seeds 0 1 2   # train, score, print the table
    python tools/reproduce.py --only window --steps 100 --mem 64
    python tools/reproduce.py --model DIR --data FILE --seeds 0 1 2     # the table of plain text
    python tools/reproduce.py --facts 0 --mem 512 --seq 4096 --steps 160 --only h2o "official h2o"
    python tools/reproduce.py --print                            # all tables of stored figures
    python tools/reproduce.py --write                            # all tables into the files

A cell is one run of train.py: the embedded recipe and the row's flags. With facts (the embedded
model, T = 128) it is scored on 64 held-out documents of --seq tokens, or on all of --part choosing.
On plain text (--data, or --facts 0 for Python's library; T = M) it is scored on 64 documents that
do not train; where none is so long as --seq, on so many tokens of consecutive ones.

Runs are in runs/reproduce/ and go on where they were stopped. The figures of a cell are one line of
docs/results.jsonl. cells.py says how a cell is named and kept, so that a stored figure never
answers another question; --again trains and scores even what is stored. The lines with "sources":
null were made before cells had checksums. No question is answered by them, but tables have them
until the same row is made again.
"""

import argparse
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Iterable

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import cells  # noqa: E402
from eval_ppl import perplexity, token_losses  # noqa: E402
from lococo import load_adapter  # noqa: E402
from model import load_base  # noqa: E402
from support.command_line import HERE, TINY, Machine, config_of, named_path  # noqa: E402
from support.command_line import prepare, run_program  # noqa: E402
from support.facts import tell_all  # noqa: E402
from support.files import UserError  # noqa: E402
from support.text import PARTS, find_files, long_documents, token_streams  # noqa: E402
from support.tokenizer import Tokenizer  # noqa: E402
import official_code  # noqa: E402, F401, it adds a compressor
import variants  # noqa: E402, F401, it adds compressors

# --- Rows -------------------------------------------------------------------------------

PAPER = "--positions slots --compressor paper --kernel 21 --conv-lr 5e-2 --sharper 1"
WINDOW = "--method lococo+window --compressor"
ROWS = {  # name: what a table says of it, flags of train.py
    "full": ("full attention", "--method full --positions original"),
    "window": ("the window: 4 first and 124 last tokens", "--method streaming"),
    "h2o": ("H2O", "--method h2o --positions slots"),
    "official code": (
        "the official code",
        f"--method lococo+h2o {PAPER} --compressor official --forget 0",
    ),
    "lococo": ("the paper's `lococo`: all merged", f"--method lococo {PAPER}"),
    "lococo+h2o": (
        "the paper's `lococo+h2o`: half heavy, half merged",
        f"--method lococo+h2o {PAPER}",
    ),
    "recent": (
        "+ 100 last and 4 first tokens instead of the heavy ones, 24 merged",
        f"--method lococo+window {PAPER}",
    ),
    "small": (
        "+ 3 taps and `--conv-lr` 7.5e-3 instead of 21 and 5e-2",
        f"{WINDOW} paper --sharper 1",
    ),
    "softmax": ("+ softmax instead of the ReLU and (7)", f"{WINDOW} softmax --sharper 1"),
    "common": (
        "+ a common filter, one-tap filters for slots, a start that hardly sees neighbours",
        f"{WINDOW} common --sharper 1",
    ),
    "rows in turn": ("+ rows in turn that avoid copies", f"{WINDOW} facts --sharper 1"),
    "ours": ("+ logits times 16 after training: **ours**", WINDOW + " facts"),
}  # fmt: skip
MIXING = "--conv-lr 2e-2 --sharper 1"
OURS = f"--method lococo+window --sinks 0 --recent {{recent}} {MIXING}"
PLAIN = {  # the same for plain text
    "full": ("full attention", "--method full"),
    "window": ("a window of the last M tokens, without first ones", "--method streaming --sinks 0"),
    "window with sinks": ("4 first and M - 4 last tokens", "--method streaming"),
    "h2o": ("H2O: M/2 heavy, M/2 last", "--method h2o --positions slots"),
    "official h2o": (
        "H2O as the official code has it: M heavy",
        "--method h2o --heavy {mem} --recent 0 --forget 0 --positions slots",
    ),
    "ours": ("**ours**: M/4 merged, 3M/4 last", OURS),
    "ours by (7)": ("the same with the paper's compressor", f"{OURS} {PAPER}"),
    "heavy": (
        "`lococo+h2o` with our compressor",
        f"--method lococo+h2o --positions slots {MIXING}",
    ),
    "lococo+h2o": (
        "the paper's `lococo+h2o`: M/2 heavy, M/2 merged",
        f"--method lococo+h2o {PAPER}",
    ),
    "merged": (
        "`lococo` with our compressor",
        f"--method lococo --positions slots {MIXING}",
    ),
    "lococo": ("the paper's `lococo`: all merged", f"--method lococo {PAPER}"),
    "official code": (
        "the official code",
        f"--method lococo+h2o {PAPER} --compressor official --forget 0",
    ),
}  # fmt: skip
COLUMNS = {"to 256": (0, 256), "256-512": (256, 512), "512-2,048": (512, 2048)}  # told so long ago
TOOL = "reproduce.py"
RESULTS = HERE / "docs" / "results.jsonl"
RUNS = HERE / "runs" / "reproduce"
FILES = [HERE / "docs" / page for page in ("facts.md", "results.md", "notebook.md")]


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model: Path
    data: Path | None  # None: Python's own library
    made: list[str]  # rows to make
    seeds: list[int]
    mem: int
    segment: int
    seq: int
    steps: int
    facts: int  # in each sequence; with 0 there are the rows of PLAIN
    flags: str  # more flags of train.py
    part: str  # that is scored; more than one are joined by "+"
    again: bool  # also what is stored
    print: bool  # stored cells alone
    write: bool


def all_flags(row: str, options: Options) -> str:
    """The flags of train.py that make a row, but for the seed, the base and the text."""
    recent = options.mem - options.mem // 4
    flags = (ROWS if options.facts else PLAIN)[row][1].format(mem=options.mem, recent=recent)
    flags += f" --recipe embedded --mem {options.mem} --segment {options.segment}"
    flags += f" --seq {options.seq}"
    flags += f" --facts {options.facts} --steps {options.steps} --score-tokens 0"
    if not options.facts:
        flags += " --micro-batch 16"  # a whole step: the model is small
    return f"{flags} {options.flags}".strip()


def checksums(options: Options) -> dict:
    """Of all files that make a cell. The name of a text decides which part of it trains."""
    files = find_files([options.data] if options.data else [])
    texts = cells.checksum_of_files(files)  # some parts of them train, others are scored
    return {
        "base": cells.checksum_of_base(options.model),
        "data": options.data.name if options.data else "the library of Python",
        "texts": texts,
        "scored": texts,
        "sources": cells.checksum_of_sources(TOOL),
    }


def run_directory(row: str, name: dict, options: Options) -> Path:
    """Where a cell is trained: a folder that no other name has; with --again, one of no run."""
    label = f"{row.replace(' ', '-')}-mem{options.mem}-seq{options.seq}-steps{options.steps}"
    trained_by = {key: name[key] for key in name if key != "part"}
    first = out = RUNS / f"{label}-seed{name['seed']}-{cells.digest_of(trained_by)}"
    number = 1
    while options.again and out.exists():
        number += 1
        out = Path(f"{first}-{number}")
    return out


def train_cell(row: str, name: dict, options: Options) -> Path:
    """Train as the cell's name says; returns the run's directory."""
    out = run_directory(row, name, options)
    line = [*name["flags"].split(), "--seed", str(name["seed"]), "--model", str(options.model)]
    if options.data:
        line += ["--data", str(options.data)]
    cells.train_in(out, line)
    return out


def texts_to_score(options: Options, tokenizer: Tokenizer) -> torch.Tensor:
    """Documents (N, L) of --part. Raises UserError if it has fewer than L tokens."""
    streams = token_streams([options.data] if options.data else [], tokenizer)
    ids = np.concatenate([streams[part] for part in options.part.split("+")])
    texts = long_documents(ids, tokenizer.bos, options.seq, 64)
    if not len(texts):
        whole = len(ids) // options.seq * options.seq
        texts = torch.from_numpy(ids[:whole].astype(np.int64)).view(-1, options.seq)
    if not len(texts):
        few = f"the documents that do not train ({options.part}) have {len(ids):,} tokens"
        raise UserError(f"--seq {options.seq}: {few}; give more documents, or a smaller --seq")
    return texts


def score_cell(run: Path, options: Options, machine: Machine) -> dict:
    """Perplexity of documents of --seq tokens; with facts the share of those told in them that is
    recalled, with the number of answers; of plain text the nats of each document."""
    model, tokenizer = load_base(options.model, machine.dtype, machine.device)
    adapted = load_adapter(run, model)
    texts = texts_to_score(options, tokenizer)
    nats, _, _ = token_losses(adapted, texts, machine, 8)
    cell = {"documents": len(texts), "perplexity": perplexity(nats)}
    if not options.facts:
        return cell | {"nats": [round(x, 5) for x in nats.double().mean(dim=1).tolist()]}
    told, ago = tell_all(texts, options.part, tokenizer)
    _, hits, _ = token_losses(adapted, told, machine, 8)
    for column, (start, stop) in COLUMNS.items():
        mask = (start < ago) & (ago <= stop)
        cell |= {column: hits[mask].double().mean().item(), f"answers {column}": int(mask.sum())}
    return cell


def facts_table(stored: list[dict], mem: int, seq: int, steps: int, part: str) -> str:
    """A line for each row that was trained and scored so; a figure for each seed in turn."""
    lines = ["| memory | perplexity | recalled, % |", "|---|---|---|"]
    about = {"mem": mem, "seq": seq, "facts": 8, "steps": steps, "part": part}
    for row, (label, _) in ROWS.items():
        found = [c for c in stored if c.items() >= (about | {"row": row}).items()]
        found = [c for c in found if not c.get("extra")]
        seeds = sorted(cells.latest(found, "seed"), key=lambda c: c["seed"])
        perplexity = ", ".join(f"{c['perplexity']:.2f}" for c in seeds)
        shares = [c["512-2,048"] for c in seeds]  # None: no fact was told so long ago
        recalled = ", ".join("-" if s is None else f"{100 * s:.0f}" for s in shares)
        if seeds:
            lines.append(f"| {label} | {perplexity} | {recalled} |")
    return "\n".join(lines) + "\n"


def plain_table(stored: list[dict], seq: int, steps: int, rows: Iterable[str] = PLAIN,
                model: str = "stories260K", extra: str = "") -> str:  # fmt: skip
    """For each M a column: nats above the window's, mean and standard error over documents, each
    the mean of the seeds; behind it what part of the window's gap to full attention that closes.
    The window itself, and all where there is none, has its perplexity."""
    about = {"model": model, "seq": seq, "steps": steps, "facts": 0}
    found = [c for c in stored if c.items() >= about.items() and c.get("extra", "") == extra]
    found = cells.latest(found, "row", "mem", "seed")
    sizes = sorted({c["mem"] for c in found})
    lines = ["| memory |" + "".join(f" M = {M} |" for M in sizes), "|---|" + "---|" * len(sizes)]
    for row in rows:
        line = f"| {PLAIN[row][0]} |"
        for M in sizes:
            nats = defaultdict(list)
            for c in found:
                if c["mem"] == M:
                    nats[c["row"]].append(c["nats"])
            means = {name: np.mean(values, axis=0) for name, values in nats.items()}
            if row not in means:
                line += " - |"
            elif row == "window" or "window" not in means:
                line += f" {math.exp(means[row].mean()):.3f} |"
            else:
                above = means[row] - means["window"]
                gap = (means.get("full", means["window"]) - means["window"]).mean()
                error = above.std(ddof=1) / len(above) ** 0.5
                line += f" {above.mean():+.4f} ± {error:.4f}"
                if max(above.mean(), gap) < 0:
                    line += f" ({100 * above.mean() / gap:.0f} %)"
                line += " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def comparison(stored: list[dict], steps: int = 160, extra: str = "") -> str:
    """The paper's comparison, on the embedded model and plain text: a perplexity for each seed, and
    nats per token above the official H2O with the same seeds, with the standard error over
    documents. `extra` are further flags of train.py."""
    about = {"model": "tiny", "mem": 512, "seq": 4096, "steps": steps, "facts": 0, "extra": extra}
    found = [c for c in stored if c.items() >= about.items()]
    reference = "official h2o"
    rows = ("official code", reference, "h2o", "window with sinks")
    nats = {row: {} for row in rows}  # of each document, by seed
    for c in cells.latest(found, "row", "seed"):
        if c["row"] in nats:
            nats[c["row"]][c["seed"]] = np.array(c["nats"])
    lines = ["| memory | perplexity | from the official H2O |", "|---|---|---|"]
    for row, by_seed in nats.items():
        seeds = sorted(by_seed.keys() & nats[reference].keys())
        if not seeds:
            continue
        perplexity = ", ".join(f"{math.exp(by_seed[seed].mean()):.3f}" for seed in seeds)
        line = f"| {PLAIN[row][0]} | {perplexity} |"
        if row != reference:
            above = np.mean([by_seed[seed] - nats[reference][seed] for seed in seeds], axis=0)
            line += f" {above.mean():+.4f} ± {above.std(ddof=1) / len(above) ** 0.5:.4f}"
        lines.append(f"{line} |")
    return "\n".join(lines) + "\n"


MAIN = ("full", "window", "window with sinks", "h2o", "ours", "ours by (7)", "lococo+h2o")
TABLES = {
    "facts": partial(facts_table, mem=128, seq=2048, steps=400, part="held-out"),
    "plain text": partial(plain_table, seq=384, steps=40, rows=MAIN),
    "384 tokens, 40 steps": partial(plain_table, seq=384, steps=40),
    "384 tokens, 160 steps": partial(plain_table, seq=384, steps=160, rows=MAIN[:5]),
    "1,024 tokens, 40 steps": partial(plain_table, seq=1024, steps=40, rows=(*MAIN[:5], MAIN[6])),
    "the paper's comparison": comparison,
    "the paper's comparison, gradient through 1 segment": partial(comparison, extra="--bptt 1"),
    "the paper's comparison, 400 steps": partial(
        comparison, steps=400, extra="--bptt 1 --batch 2"
    ),
}


def tables(stored: list[dict]) -> dict[str, str]:
    return {name: table(stored) for name, table in TABLES.items()}


def make_cells(options: Options) -> None:
    """Make and store the cells that are asked for, but for those that are stored already."""
    machine = prepare("cpu", "float32")
    texts_to_score(options, Tokenizer(options.model))  # refuses too few before anything is trained
    # Once, now: what has been imported computes all cells, even if a file is edited meanwhile.
    files, origin = checksums(options), cells.origin()
    for seed in options.seeds:
        for row in options.made:
            about = {"model": options.model.name, "row": row} | origin
            about |= {key: vars(options)[key] for key in ("mem", "seq", "facts", "steps")}
            about["extra"] = options.flags
            name = {"flags": all_flags(row, options), "seed": seed, "part": options.part} | files
            if cells.find(RESULTS, name) and not options.again:
                print(f"{row}, seed {seed}: from docs/results.jsonl", file=sys.stderr)
            else:
                print(f"{row}, seed {seed}", file=sys.stderr)
                figures = score_cell(train_cell(row, name, options), options, machine)
                cells.add(RESULTS, about | name | figures)


def parse() -> Options:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--model", type=Path, default=TINY, help="of --data (default: tiny/)")
    add("--data", type=named_path, help="plain text without facts, for the other rows")
    add("--only", nargs="+", choices=ROWS | PLAIN, default=[], help="rows to make")
    add("--seeds", nargs="+", type=int, default=[0], help="default: 0")
    add("--mem", type=int, default=128, help="slots M (default: 128)")
    add("--seq", type=int, default=2048, help="trained length, in tokens (default: 2048)")
    add("--steps", type=int, default=400, help="of training (default: 400)")
    add("--facts", type=int, default=8,
        help="in each sequence; with 0 there are the other rows (default: 8)")
    add("--flags", default="", help="more flags of train.py")
    add("--part", choices=PARTS, default="held-out",
        help="documents to score (default: held-out; of plain text those for choosing, too)")
    add("--again", action="store_true", help="train and score also what is stored")
    add("--print", action="store_true", help="print all tables of stored cells; make none")
    add("--write", action="store_true", help="all tables into the pages of docs/")
    flags = parser.parse_args()
    flags.model = flags.model.resolve()
    if flags.data:
        flags.facts = 0
    elif flags.model != TINY.resolve():
        parser.error(f"--model {flags.model}: name the text, too, by --data")
    rows = ROWS if flags.facts else PLAIN
    if not rows.keys() >= set(flags.only):
        parser.error(f"--only: with or without facts there are other rows: {', '.join(rows)}")
    flags.segment = 128 if flags.facts else flags.mem
    if not flags.facts:
        flags.part = "held-out+choosing"
    flags.made = flags.only or list(rows if flags.data else ())
    return config_of(Options, flags)


def main() -> None:
    options = parse()
    if options.made and not options.print:
        make_cells(options)
    stored = cells.read(RESULTS)
    if options.write:
        cells.write_tables(FILES, TOOL, tables(stored))
    if options.print:
        for name, table in tables(stored).items():
            print(f"\n{name}\n\n{table}", end="")
    elif not options.facts:
        about = dict(model=options.model.name, extra=options.flags)
        print(plain_table(stored, options.seq, options.steps, **about), end="")
    else:
        about = dict(steps=options.steps, part=options.part)
        print(facts_table(stored, options.mem, options.seq, **about), end="")


if __name__ == "__main__":
    run_program(main)
