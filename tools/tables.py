"""Make the tables of README.md and docs/: what does each memory lose?

    python tools/tables.py long --model SmolLM2-135M --prose prose --seeds 0 1
    python tools/tables.py long --model SmolLM2-135M --prose prose --rows h2o "h2o, budgets"
    python tools/tables.py                             # print all stored tables
    python tools/tables.py --write                     # write them into the pages

Run it in the repository's root.

A cell is one row of a table with one seed. train.py trains it if there is something to
train, then documents are scored. Runs are in runs/tables/, and go on where they were
stopped. A cell is one line of docs/results.jsonl, with the nats of each document. To score
one again, remove its line. To train it again, remove its run, too.

A table has cells of one model, one --dtype and one scored text. It shows each row after
the most steps, and the newest cell of each seed. A page has it between
`<!-- tools/tables.py: NAME -->` and `<!-- end -->`; a name is as
"long, SmolLM2-135M, float32".
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Iterable

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from eval_ppl import ranges, standard_error, token_losses
from lococo import COMPRESSORS, METHODS, AdaptedLlama, Settings
from model import load_base
from support.programs.adapter import identity, load_adapter
from support.command_line import HERE, SIZES, PlainParser, at_least, counted, prepare
from support.command_line import run_program
from support.files import UserError, as_json, checksum, read_json, read_text
from support.files import write_text
from support.ours.official_code import OfficialCompressor
from support.programs.settings import untrained
from support.programs.scoring import given, name_of
from support.text import long_documents, read_rows, token_streams
from support.tokenizer import Tokenizer

RESULTS = HERE / "docs" / "results.jsonl"
RUNS = HERE / "runs" / "tables"
PAGES = (HERE / "README.md", *sorted((HERE / "docs").glob("*.md")))
BOOKS = ("book_adv.txt", "book_colonel.txt", "book_jack.txt", "wikitext2-valid.jsonl")
# What each part scores; the others of these texts train. The novel and the articles of the
# long part are joined, and cut into long pieces.
SCORED = {
    "choosing": ("book_news.txt",),
    "test": ("wikitext2-test.jsonl",),
    "long": ("book_jack.txt", "wikitext2-test.jsonl"),
}

# --- Two more forms of LoCoCo -----------------------------------------------------------


class ClosedGate(OfficialCompressor):
    """LoCoCo's code that begins by choosing, as H2O does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gate = nn.Parameter(torch.tensor(0.0))


COMPRESSORS["official-closed"] = ClosedGate
METHODS["lococo-code-closed"] = lambda M: METHODS["lococo-code-0.02"](M) | {
    "compressor": "official-closed"
}
METHODS["lococo+h2o-0.02"] = lambda M: METHODS["lococo+h2o"](M) | {"start": 0.02}

# --- Rows and tables --------------------------------------------------------------------


STORED = "adapters/smollm2-135m"
# A row is named by its method and then, behind commas, by some of these words:
FLAGS = {  # flags of train.py
    "budgets": f"--budgets {STORED}/budgets.json",
    "budgets-pyramid": f"--budgets {STORED}/budgets-pyramid.json",
    "budgets-duo": f"--budgets {STORED}/budgets-duo.json",
    "budgets-layers": f"--budgets {STORED}/budgets-layers.json",
    "batch 1": "--batch 1",
    "rate 0.005": "--conv-lr 0.005",
    "rate 0.015": "--conv-lr 0.015",
    "rate 0.15": "--conv-lr 0.15",
    "bfloat16": "--dtype bfloat16",  # in training
}
BITS = {"8 bits": 8, "4 bits": 4}  # of stored entries; else those of --dtype
# Some methods are stored adapters, or those of a word. The adapter's README says how to make
# those in runs/.
ADAPTERS = {
    ("learned", ""): f"{STORED}/learned",
    ("learned", "another seed"): "runs/learned-1",
    ("learned", "no facts"): "runs/plain",
    ("lococo-code-0.02", "trained"): "runs/lococo",
}


@dataclass(frozen=True)
class Row:
    """What makes a memory."""

    flags: str  # of train.py, after those of the table
    bits: int  # in which its entries are stored; 0: those of --dtype
    adapter: str  # the folder of the adapter that it is, in the sizes of the table; or nothing


def row_named(name: str) -> Row:
    """What the name of a row says. Sizes M + T that are not those of its table stand behind an
    @, as in "h2o+forget, budgets, 8 bits @ 1792 + 256". Raises UserError."""
    words, at, sizes = name.partition(" @ ")
    method, *options = words.split(", ")
    refuse_unknown(method, METHODS, "method")
    others = [word for of, word in ADAPTERS if of == method and word]
    flags, bits, adapter = [f"--method {method}"], 0, ADAPTERS.get((method, ""), "")
    for word in options:
        refuse_unknown(word, [*FLAGS, *BITS, *others], f"word for {method}")
        if word in FLAGS:
            flags.append(FLAGS[word])
        elif word in BITS:
            bits = BITS[word]
        else:
            adapter = ADAPTERS[method, word]
    if at:
        if not re.fullmatch(r"\d+ \+ \d+", sizes):
            raise UserError(f'{name}: sizes are as in "h2o @ 384 + 128"')
        flags += ["--mem", *sizes.replace("+", "--segment").split()]
    return Row(" ".join(flags), bits, adapter)


LABELS = {  # what the tables call rows, in any size
    "full": "full attention",
    "streaming": "window: 4 first, M - 4 last",
    "streaming, 8 bits": "window: 4 first, M - 4 last, in 8 bits",
    "h2o": "H2O: M/2 heavy, M/2 last",
    "h2o, 8 bits": "H2O: M/2 heavy, M/2 last, in 8 bits",
    "h2o-code": "H2O in LoCoCo's code: M heavy, by the last segment",
    "h2o+forget": "H2O that forgets: 5M/8 heavy, 3M/8 last",
    "h2o+forget, budgets": "H2O that forgets, with budgets",
    "h2o+forget, budgets, 8 bits": "H2O that forgets, with budgets, in 8 bits",
    "learned": "a learned score, equal slots",
    "learned, budgets": "**a learned score, with budgets**",
    "learned, budgets, 8 bits": "a learned score, with budgets, in 8 bits",
    "learned, budgets, 4 bits": "a learned score, with budgets, in 4 bits",
    "learned, budgets, another seed": "a learned score, fitted with another seed",
    "learned, budgets, no facts": "a learned score, fitted without facts",
    "lococo": "the paper's `lococo`: all merged",
    "lococo+h2o": "the paper's `lococo+h2o`: M/2 heavy, M/2 merged",
    "lococo+h2o-0.02, batch 1, bfloat16": "the paper's `lococo+h2o` with smaller weights",
    "lococo-code, bfloat16": "LoCoCo's code as published, trained in bfloat16",
    "lococo-code, batch 1, bfloat16": "LoCoCo's code as published",
    "lococo-code-0.02": "LoCoCo's code with smaller weights",
    "lococo-code-0.02, batch 1, bfloat16": "LoCoCo's code with smaller weights",
    "lococo-code-closed, batch 1, bfloat16":
        "LoCoCo's code with smaller weights and a gate that starts at 0",
}


def label_of(name: str) -> str:
    return LABELS.get(name.partition(" @ ")[0], name)


# What the table of other rules calls a memory, its row with equal slots, and that with budgets.
FIELD = {
    "window": ("streaming", ""),
    "H2O": ("h2o", "h2o, budgets"),
    "H2O that forgets": ("h2o+forget", "h2o+forget, budgets"),
    "**a learned score**": ("learned", "learned, budgets"),
    "SnapKV": ("snapkv", "snapkv, budgets"),
    "TOVA": ("tova", "tova, budgets"),
    "the largest share of one query": ("largest-share", "largest-share, budgets"),
    "the shortest keys": ("key-norm", "key-norm, budgets"),
    "KeyDiff": ("keydiff", "keydiff, budgets"),
    "Expected Attention": ("expected-attention", "expected-attention, budgets"),
    "SnapKV with PyramidKV's budgets": ("", "snapkv, budgets-pyramid"),
    "DuoAttention": ("", "duo-attention, budgets-duo"),
    "H2O that forgets, budgets within layers": ("", "h2o+forget, budgets-layers"),
}


@dataclass(frozen=True)
class Table:
    """Its rows, and what all of its cells have in common."""

    rows: tuple[str, ...]
    mem: int  # slots M
    seq: int  # tokens of a document that is scored
    part: str  # that is scored: one of SCORED
    segment: int  # tokens T of a segment
    documents: int = 48  # that are scored, at most
    labels: dict[str, str] = field(default_factory=dict)  # of rows that have another one here


SHORT = Table(  # trained with one sequence a step
    ("full", "streaming", "h2o", "h2o-code", "h2o+forget", "h2o+forget, budgets",
     "learned", "learned, budgets", "lococo+h2o-0.02, batch 1, bfloat16",
     "lococo-code-closed, batch 1, bfloat16", "lococo-code-0.02, batch 1, bfloat16",
     "lococo-code, batch 1, bfloat16"),
    64, 1024, "test", segment=64,
)
LONG = Table(
    ("full", "streaming", "h2o", "h2o-code", "h2o+forget", "lococo", "lococo+h2o",
     "lococo-code, bfloat16", "lococo-code-0.02"),
    512, 8192, "long", segment=512, documents=16,
)
SMALL_SEGMENTS = replace(LONG, rows=(), mem=896, segment=128, documents=8)

# Sizes are M + T.
OWN = "896 + 128"  # of SMALL_SEGMENTS
RECOMMENDED = "1792 + 256"  # of the memory that README.md recommends, which has 8 bits
SIZES_SHOWN = ("384 + 128", "512 + 512", "768 + 256", OWN, "960 + 64")
# The columns of the table of sizes.
BY_SIZE = {"h2o": "H2O", "h2o+forget, budgets": "H2O that forgets, with budgets",
           "learned, budgets": "a learned score, with budgets"}


def in_size(key: str, sizes: str) -> str:
    """The name of a row of SMALL_SEGMENTS in these sizes."""
    return key if sizes == OWN else f"{key} @ {sizes}"


# These have 33 MB in texts of 8,192 tokens.
WINDOW_33 = f"streaming, 8 bits @ {RECOMMENDED}"
H2O_33 = f"h2o, 8 bits @ {RECOMMENDED}"
BUDGETS_33 = f"h2o+forget, budgets, 8 bits @ {RECOMMENDED}"
LEARNED_33 = f"learned, budgets, 8 bits @ {RECOMMENDED}"
IN_33_MB = "in 8 bits, M = 1,792, T = 256"
# What README.md shows. Rows without sizes have M = T = 512.
RESULT = {
    WINDOW_33: f"window {IN_33_MB}",
    H2O_33: f"H2O {IN_33_MB}",
    BUDGETS_33: f"H2O that forgets, with budgets, {IN_33_MB}",
    LEARNED_33: f"**a learned score, with budgets, {IN_33_MB}**",
    "h2o": "H2O with M = T = 512",
    "lococo-code-0.02": "LoCoCo's code with M = T = 512 (`lococo-code-0.02`, 2 seeds)",
}
# The steps from H2O with the paper's sizes to full attention, and what they are compared with.
LADDER = {
    WINDOW_33: f"window {IN_33_MB}",
    H2O_33: f"H2O {IN_33_MB}",
    "streaming": "window with M = T = 512",
    "lococo-code-0.02": "LoCoCo's code with M = T = 512",
    "h2o": "H2O with M = T = 512",
    "h2o+forget": "+ forgetting",
    "h2o+forget, budgets": "+ budgets",
    f"h2o+forget, budgets @ {OWN}": "+ smaller segments: M = 896, T = 128",
    BUDGETS_33: "+ twice the slots, in 8 bits: M = 1,792, T = 256",
    LEARNED_33: "+ a learned score",
    "full": "full attention",
}
# Whose facts are shown: with M + T = 896 + 128, and in 33 MB.
FACTS = ("full", "streaming", "h2o", "h2o+forget", "h2o+forget, budgets", "learned",
         "learned, budgets, no facts", "learned, budgets",
         WINDOW_33, H2O_33, BUDGETS_33, LEARNED_33)
FULL_8_BITS = "h2o, 8 bits @ 8064 + 128"  # it keeps all 8,192 entries of a text
# The learned score in fewer bits, and other fits of it.
VARIANTS = ("learned, budgets", "learned, budgets, 8 bits", "learned, budgets, 4 bits",
            "learned, budgets, another seed", "learned, budgets, no facts", FULL_8_BITS, "full")
EXTENDED = ("streaming", "h2o", "h2o+forget, budgets", "learned, budgets", LEARNED_33)
BY_SIZE_ROWS = tuple(in_size(key, sizes) for sizes in SIZES_SHOWN for key in BY_SIZE)
TABLES = {
    "articles": SHORT,
    "novel": replace(SHORT, part="choosing"),
    "result": replace(LONG, rows=(*RESULT, "full"), labels=RESULT),
    "long": LONG,
    "field": replace(SMALL_SEGMENTS, rows=("full", *filter(None, sum(FIELD.values(), ())))),
    "sizes": replace(SMALL_SEGMENTS, rows=("full", *BY_SIZE_ROWS)),
    "variants": replace(SMALL_SEGMENTS, rows=VARIANTS,
                        labels={FULL_8_BITS: "full attention in 8 bits"}),
    "ladder": replace(LONG, rows=tuple(LADDER), labels=LADDER),
    "facts": replace(SMALL_SEGMENTS, rows=FACTS),
    "extension": replace(LONG, rows=EXTENDED, mem=896, segment=128, seq=32768, documents=4),
}

MADE_HERE = [name for name in TABLES if name != "facts"]  # tools/needle.py asks for these

Options = argparse.Namespace  # the flags of `parse`

# --- Making a cell ----------------------------------------------------------------------


def texts_to_train_on(part: str, options: Options) -> list[Path]:
    return [options.prose / name for name in BOOKS if name not in SCORED[part]]


def documents_of(table: Table, options: Options, tokenizer: Tokenizer) -> Tensor:
    """The tokens to score, (documents, seq). Raises UserError if there are none."""
    L = table.seq
    names = SCORED[table.part]
    most = table.documents // len(names)  # of each text
    rows = []
    for name in names:
        streams = token_streams([options.prose / name], tokenizer)
        ids = np.concatenate([streams[part] for part in sorted(streams)])
        if table.part == "test":
            rows.append(long_documents(ids, tokenizer.bos, L, most))
        else:  # pieces, evenly spread
            cut = torch.from_numpy(ids[: len(ids) // L * L].astype(np.int64)).view(-1, L)
            rows.append(cut[:: max(1, len(cut) // most)][:most])
            if len(rows[-1]) < most:
                few = f"it has {len(rows[-1])} pieces of {L:,} tokens instead of {most}"
                raise UserError(f"{options.prose / name}: {few}; give the whole text")
    documents = torch.cat(rows)
    if not len(documents):
        raise UserError(f"{table.part} texts: none has {L} tokens; give longer ones")
    return documents


def all_flags(row: Row, table: Table) -> str:
    """The flags of train.py that make a row, but for texts, model, steps and seed."""
    sizes = f"--mem {table.mem} --segment {table.segment} --seq {table.seq}"
    return f"--recipe inference {sizes} {row.flags}"


def settings_of(flags: str, options: Options) -> Settings:
    config, _ = train.parse([*flags.split(), "--model", str(options.model)])
    return config.settings


def origin() -> dict:
    """When a cell is made, of which code and on what. The commit has a plus if this tree
    has changed since, other than in docs/."""

    def git(words: str) -> str:
        line = ["git", "-C", str(HERE), *words.split()]
        return subprocess.run(line, capture_output=True, text=True).stdout.strip()

    commit = git("rev-parse --short HEAD")
    if git("status --porcelain -- . :!docs"):
        commit += "+"
    threads = f"{torch.get_num_threads()} threads"
    machine = f"{platform.machine()}, {threads}, torch {torch.__version__}"
    return {"date": str(date.today()), "commit": commit, "machine": machine}


def train_cell(name: dict, options: Options) -> Path:
    """Train as a cell's name says, or go on; returns the run's folder. Cells that differ
    in what is scored share a run."""
    fields = ("flags", "steps", "seed", "model", "dtype", "base", "texts")
    about = json.dumps([name[field] for field in fields])
    out = RUNS / checksum({}, about)[:12]
    line = ["--dtype", name["dtype"], *name["flags"].split()]  # a row may name another --dtype
    line += ["--model", str(options.model), "--device", "cpu", "--steps", str(name["steps"])]
    line += ["--seed", str(name["seed"]), "--score-tokens", "0", "--out", str(out)]
    line += ["--data", *map(str, texts_to_train_on(name["part"], options))]
    if name["part"] == "long":  # else a tenth of the texts, a book, does not train
        line += ["--held-out", *(str(options.prose / text) for text in SCORED["long"])]
    if (out / "state.safetensors").is_file():
        line = ["--resume", str(out)]
    if not (out / "adapter.safetensors").is_file():
        with redirect_stdout(sys.stderr):
            train.main(line)
    return out


def model_of(name: dict, row: Row, options: Options) -> AdaptedLlama:
    """The memory to score. It is trained first if its name has steps."""
    run = train_cell(name, options) if name["steps"] else None
    machine = prepare("cpu", options.dtype)
    model, _ = load_base(options.model, machine.dtype, machine.device)
    if run:
        return load_adapter(run, model)
    settings = replace(settings_of(name["flags"], options), bits=row.bits)
    if row.adapter:
        sizes = {size: getattr(settings, size) for size in SIZES}
        return load_adapter(HERE / row.adapter, model, **sizes)
    return AdaptedLlama(model, settings).eval()


def make_cell(name: dict, table: Table, options: Options, documents: Tensor) -> dict:
    row = row_named(name["row"])
    adapted = model_of(name, row, options)
    at_once = max(1, 8192 // table.seq)
    losses, _, held = token_losses(adapted, documents, prepare("cpu", options.dtype), at_once)
    means = losses.double().mean(dim=1)
    nats = [round(nats, 5) for nats in means.tolist()]
    figures = {"cache bytes": held, "by document": nats}
    if table.part == "long":
        position = torch.arange(1, table.seq).expand(len(losses), -1)
        masks = ranges("", position, table.mem + table.segment)
        where = {label: losses[mask].double().mean().item() for label, mask in masks.items()}
        figures["by position"] = where
    gates = [c.gate.item() for c in adapted.compressors if hasattr(c, "gate")]
    return figures | ({"gates": gates} if gates else {})  # of LoCoCo's code, by layer


def make_cells(table: Table, options: Options) -> None:
    """Make and store the cells that are asked for and not stored yet."""
    if not (options.prose and options.prose.is_dir()):
        remedy = "name one with the files that --help lists"
        raise UserError(f"--prose {options.prose}: there is no such folder; {remedy}")
    model, tokenizer = load_base(options.model)
    documents = documents_of(table, options, tokenizer)
    texts = token_streams(texts_to_train_on(table.part, options), tokenizer)
    texts = {part: torch.from_numpy(ids.copy()) for part, ids in texts.items()}
    common = {key: getattr(table, key) for key in ("mem", "seq", "part", "documents")}
    common |= {"model": options.model.name, "dtype": options.dtype}
    common["base"] = identity(untrained(model, "full", 4, 4))["base"][:12]
    common["texts"] = checksum(texts, "")[:12]
    common["scored"] = checksum({"documents": documents}, "")[:12]
    made_on = origin()
    for seed, key in product(options.seeds, options.rows or table.rows):
        row = row_named(key)
        flags = all_flags(row, table)
        settings = settings_of(flags, options)
        trains = settings.merged and not row.adapter
        steps = options.steps if trains else 0
        name = {"row": key, "flags": flags, "steps": steps}
        name |= common | {"seed": seed if steps else 0}
        if not any(name.items() <= cell.items() for cell in stored_cells()):
            print(f"{name['row']}, seed {name['seed']}", file=sys.stderr)
            add(name | made_on | make_cell(name, table, options, documents))


# --- Stored cells -----------------------------------------------------------------------


def stored_cells() -> list[dict]:
    """The oldest first."""
    return [cell for _, cell in read_rows(RESULTS, lambda row: True)]


def add(cell: dict) -> None:
    """Append a line. An editor may have left the last one without a line break."""
    line = as_json(cell) + "\n"
    if RESULTS.exists() and not read_text(RESULTS).endswith("\n"):
        line = "\n" + line
    with open(RESULTS, "a", encoding="utf-8") as file:
        file.write(line)


def tokens_of(cell: dict) -> int:
    """How many tokens a cell was trained on."""
    config, _ = train.parse(cell["flags"].split())
    return cell["steps"] * config.batch * config.seq


@dataclass(frozen=True)
class Line:
    """A row of a table after so many steps: its newest cells, by seed."""

    label: str
    steps: int
    cells: dict[int, dict]

    def nats(self, seed: int) -> np.ndarray:
        """Of each document. A row that is not trained is the same with all seeds."""
        return np.array(self.cells[seed if self.steps else 0]["by document"])

    def where(self) -> dict[str, float]:
        """The mean nats of tokens by their position."""
        every = [cell["by position"] for cell in self.cells.values()]
        return {place: float(np.mean([cell[place] for cell in every])) for place in every[0]}

    def megabytes(self) -> float:
        *_, newest = self.cells.values()
        return newest["cache bytes"] / 1e6

    def mean(self) -> float:
        return float(np.mean([cell["by document"] for cell in self.cells.values()]))

    def trained(self) -> str:
        """On how many tokens, with how many seeds."""
        *_, newest = self.cells.values()
        seeds = counted(len(self.cells), "seed")
        return f"{tokens_of(newest):,} tokens, {seeds}" if self.steps else "-"


Lines = dict[str, Line]  # by row


def lines_of(table: Table, cells: list[dict]) -> Lines:
    """In the order of the table. `cells` are of one model and dtype."""
    about = {key: getattr(table, key) for key in ("mem", "seq", "part", "documents")}
    found = [cell for cell in cells if about.items() <= cell.items()]
    for key in ("base", "scored"):  # others than the newest cannot be paired
        found = [cell for cell in found if cell[key] == found[-1][key]]
    lines = {}
    for key in table.rows:
        some = [cell for cell in found if cell["row"] == key]
        if some:
            steps = max(cell["steps"] for cell in some)
            by_seed = {cell["seed"]: cell for cell in some if cell["steps"] == steps}
            label = table.labels.get(key, label_of(key))
            lines[key] = Line(label, steps, dict(sorted(by_seed.items())))
    return lines


# --- Tables -----------------------------------------------------------------------------


def common_seeds(*lines: Line | None) -> list[int]:
    """The seeds that all trained lines have. The list is empty if a line is missing."""
    if None in lines:
        return []
    trained = [set(line.cells) for line in lines if line.steps]
    return sorted(set.intersection(*trained)) if trained else [0]


def difference(line: Line, other: Line | None, documents: slice = slice(None)) -> str:
    """The paired difference of the nats of each document, as a mean of the common seeds,
    and its standard error over documents."""
    above = [line.nats(seed) - other.nats(seed) for seed in common_seeds(line, other)]
    if not above:
        return ""
    values = np.mean(above, axis=0)[documents]
    return f"{values.mean():+.4f} ± {standard_error(torch.from_numpy(values)):.4f}"


def row_of(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def head_of(*columns: str) -> str:
    return row_of(*columns) + f"|{'---|' * len(columns)}\n"


def sizes_of(key: str, table: Table) -> str:
    """M + T of a row."""
    return key.partition(" @ ")[2] or f"{table.mem} + {table.segment}"


def long_table(table: Table, lines: Lines) -> str:
    """LoCoCo beside what needs no training. The last columns have the loss of LoCoCo's code minus
    that of a row, on each text."""
    best = "lococo-code-0.02"
    minus = "the last row minus this: novel"
    text = head_of("memory", "trained", "nats per token above full attention", minus, "articles")
    half = table.documents // 2
    for key, line in lines.items():
        cells = [line.label, line.trained(), difference(line, lines.get("full"))]
        for part in (slice(half), slice(half, None)):
            shown = key != best and best in lines
            cells.append(difference(lines[best], line, part) if shown else "")
        text += row_of(*cells)
    return text


def extension_table(table: Table, lines: Lines) -> str:
    """Texts that are longer than the context of the base."""
    last = "16384-32768"  # positions of the tokens in the last column
    text = head_of("memory", "M + T", "MB", "nats per token", "from the window", last)
    for key, line in lines.items():
        cells = [line.label, sizes_of(key, table), f"{line.megabytes():.0f}", f"{line.mean():.4f}"]
        cells += [difference(line, lines.get("streaming")), f"{line.where()[last]:.4f}"]
        text += row_of(*cells)
    return text


# The files of tools/needle.py, by the form of their facts.
LINES = "needle.json", "needle-8192.json", "needle-field.json"
SENTENCES = "needle-sentences.json", "needle-sentences-8192.json"


def panels_of(key: str, table: Table) -> tuple[str, ...]:
    """The names that tools/needle.py gives a row, one for each seed: its method or adapter, and
    the flags that were given."""
    row = row_named(key)
    if key == "lococo-code-0.02":
        return ("runs/lococo", "runs/lococo-1")
    if row.adapter == "runs/lococo":
        return (row.adapter,)
    if "budgets-" in key:  # no facts were asked for with these budgets
        return ()
    config, _ = train.parse(all_flags(row, table).split())
    s = replace(config.settings, bits=row.bits)
    if not row.adapter:
        return (name_of(s),)
    if (f"{s.mem} + {s.segment}", s.bits) == (RECOMMENDED, 8):  # the adapter's own
        return (row.adapter,)
    bits = None if s.bits == 8 else s.bits
    budgets = None if s.budgets else []
    changed = Options(mem=s.mem, segment=s.segment, bits=bits, budgets=budgets)
    return (row.adapter + given(changed),)


def share_found(
    key: str, table: Table, files: tuple[str, ...] = LINES, L: int = 8192
) -> tuple[float, float] | None:
    """The share of facts that a row finds in texts of L tokens, and its standard error, which may
    be NaN; both are means over seeds. None if these facts were not asked for. They are those of
    SmolLM2. Of several files that have a panel the last counts."""
    found = {}
    for name, file in product(panels_of(key, table), files):
        stored = read_json(HERE / "docs" / file)
        shares = stored["found"].get(name, {}).get(str(L))
        if shares:
            error = stored.get("errors", {}).get(name, {}).get(str(L), np.nan)
            found[name] = float(np.nanmean(np.array(shares, dtype=float))), error
    return tuple(np.mean([*found.values()], axis=0)) if found else None


def percent_found(key: str, table: Table, files: tuple[str, ...] = LINES, L: int = 8192) -> str:
    """What `share_found` returns, in percent, for a table."""
    found = share_found(key, table, files, L)
    if not found:
        return ""
    share, error = found
    return f"{100 * share:.0f}" + ("" if np.isnan(error) else f" ± {100 * error:.0f}")


def result_table(table: Table, lines: Lines) -> str:
    """Bytes, loss and facts in texts of 8,192 tokens. The header has those of the full cache."""
    held, found, full = "MB", "facts found, %", lines.get("full")
    if full:
        held += f" (full cache: {full.megabytes():.0f})"
        found += f" (full cache: {percent_found('full', table)})"
    text = head_of("memory", held, "nats per token above full attention", found)
    for key, line in lines.items():
        if line is not full:
            cells = f"{line.megabytes():.0f}", difference(line, full), percent_found(key, table)
            text += row_of(line.label, *cells)
    return text


def facts_table(table: Table, lines: Lines) -> str:
    """The facts that are found in texts of 8,192 tokens, in two forms."""
    text = head_of("memory", "M + T", "lines found, %", "sentences found, %")
    for key in table.rows:
        sizes = "" if key == "full" else sizes_of(key, table)
        found = [percent_found(key, table, files) for files in (LINES, SENTENCES)]
        if any(found):
            text += row_of(label_of(key), sizes, *found)
    return text


def field_table(table: Table, lines: Lines) -> str:
    """Nats per token above full attention, and the lines found in texts of 4,096 tokens."""
    text = head_of("what is kept", "equal slots", "with budgets", "lines found, %")
    rows, full = [], lines.get("full")
    for label, keys in FIELD.items():
        cells = [difference(lines[key], full) if key in lines else "" for key in keys]
        # Facts were asked for with our budgets alone, or where a rule has none.
        cells.append(percent_found(keys[1] or keys[0], table, L=4096))
        losses = [lines[key].mean() for key in keys if key in lines]
        rows.append((min(losses, default=np.inf), row_of(label, *cells)))
    return text + "".join(row for loss, row in sorted(rows) if loss < np.inf)


def sizes_table(table: Table, lines: Lines) -> str:
    """Nats per token above full attention with M slots and T tokens, and the facts that a learned
    score finds."""
    text = head_of("M + T", "MB", *BY_SIZE.values(), "its facts, %")
    full = lines.get("full")
    for sizes in SIZES_SHOWN:
        keys = [in_size(key, sizes) for key in BY_SIZE]
        held = [f"{lines[key].megabytes():.0f}" for key in keys if key in lines]
        cells = [difference(lines[key], full) if key in lines else "" for key in keys]
        if held:
            text += row_of(sizes, held[-1], *cells, percent_found(keys[-1], table))
    return text


def ladder_table(table: Table, lines: Lines) -> str:
    """Nats per token above full attention, what each step changes, and the facts found."""
    above = "nats per token above full attention"
    text = head_of("memory", "MB", above, "change", "facts found, %")
    for key, before in zip(table.rows, (None, *table.rows)):
        if key not in lines:
            continue
        line = lines[key]
        is_step = line.label.startswith("+")
        cells = [f"{line.label}, {line.trained()}" if line.steps else line.label]
        cells += [f"{line.megabytes():.0f}", difference(line, lines.get("full"))]
        cells.append(difference(line, lines.get(before)) if is_step else "")
        text += row_of(*cells, percent_found(key, table))
    return text


def short_table(novel: Lines, articles: Lines) -> str:
    """The loss with 64 slots, as its difference from H2O on each of two texts."""
    text = head_of("memory", "trained", "from H2O: choosing novel", "articles")
    for key, line in novel.items():
        cells = [line.label, line.trained(), difference(line, novel.get("h2o"))]
        on_articles = articles.get(key)
        cells.append(difference(on_articles, articles.get("h2o")) if on_articles else "")
        text += row_of(*cells)
    return text


FORMS = {
    "long": long_table, "extension": extension_table, "result": result_table,
    "field": field_table, "sizes": sizes_table, "variants": result_table, "ladder": ladder_table,
    "facts": facts_table,
}


def all_tables(cells: list[dict]) -> dict[str, str]:
    """By name, for each model and dtype that has cells."""
    groups, made = {}, {}
    for cell in cells:
        groups.setdefault((cell["model"], cell["dtype"]), []).append(cell)
    for (model, dtype), some in groups.items():
        for name, table in TABLES.items():
            lines = lines_of(table, some)
            if lines and table.part == "long":  # short_table has the others
                made[f"{name}, {model}, {dtype}"] = FORMS[name](table, lines)
        novel, articles = (lines_of(TABLES[name], some) for name in ("novel", "articles"))
        if novel:
            made[f"64 slots, {model}, {dtype}"] = short_table(novel, articles)
    return made


def with_tables(text: str, tables: dict[str, str]) -> str:
    """A text in which each table, between two comments, is made anew."""
    end = "<!-- end -->\n"
    for name, table in tables.items():
        start = f"<!-- tools/tables.py: {name} -->\n"
        if start in text:
            before, rest = text.split(start)
            text = before + start + table + end + rest.split(end, 1)[1]
    return text


# --- The program ------------------------------------------------------------------------


def parse() -> Options:
    parser = PlainParser(__doc__)
    add = parser.add_argument
    prose = ", ".join(dict.fromkeys((*BOOKS, *SCORED["choosing"], *SCORED["test"])))
    add("tables", nargs="*", metavar="TABLE", help=f"to make: {'; '.join(MADE_HERE)}")
    words = "; ".join(filter(None, (*FLAGS, *BITS, *(word for _, word in ADAPTERS))))
    add("--rows", nargs="+", type=row_name, default=[], metavar="ROW",
        help=f"a method and, behind commas, some of: {words}; and, behind an @, M + T if they are "
             "not the table's (default: all rows of a table)")
    add("--model", type=Path, default=HERE / "SmolLM2-135M",
        help="directory of the base (default: SmolLM2-135M/)")
    add("--prose", type=Path, help=f"folder with {prose}")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the base (default: float32)")
    add("--seeds", nargs="+", type=at_least(0), default=[0], help="default: 0")
    add("--steps", type=at_least(0), default=60, help="of training (default: 60)")
    add("--write", action="store_true", help="write all tables into the pages")
    options = parser.parse_args()
    options.model = Path(os.path.realpath(options.model))
    return options


def row_name(name: str) -> str:
    """An argparse type. Raises UserError."""
    row_named(name)
    return name


def refuse_unknown(name: str, known: Iterable[str], what: str) -> None:
    if name not in known:
        listed = "; ".join(known)
        raise UserError(f"{name}: there is no such {what}; take one of {listed}")


def main() -> None:
    options = parse()
    for name in options.tables:
        if name == "facts":
            raise UserError("facts: tools/needle.py asks for them; the table is printed without this")
        refuse_unknown(name, MADE_HERE, "table")
    for name in options.tables:
        make_cells(TABLES[name], options)
    tables = all_tables(stored_cells())
    if options.write:
        for page in PAGES:
            write_text(page, with_tables(page.read_text("utf-8"), tables))
    asked = {name if TABLES[name].part == "long" else "64 slots" for name in options.tables}
    for name, table in tables.items():
        if not asked or name.rsplit(", ", 2)[0] in asked:
            print(f"\n{name}\n\n{table}", end="")


if __name__ == "__main__":
    run_program(main)
