"""Make the tables of README.md and docs/: what does each memory lose?

    python tools/tables.py long --model SmolLM2-135M --prose prose --seeds 0 1
    python tools/tables.py long --model SmolLM2-135M --prose prose --rows h2o "h2o heads"
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
import platform
import subprocess
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Iterable

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train
from eval_ppl import perplexity, ranges, standard_error, token_losses
from lococo import COMPRESSORS, METHODS, AdaptedLlama, Settings
from model import load_base
from support.programs.adapter import identity, load_adapter
from support.command_line import HERE, SIZES, PlainParser, at_least, counted, prepare
from support.command_line import run_program
from support.files import UserError, as_json, checksum, read_json, read_text
from support.files import write_text
from support.ours.official_code import OfficialCompressor
from support.ours.published import RULES
from support.programs.settings import untrained
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


@dataclass(frozen=True)
class Row:
    """What a table calls a memory, and what makes it."""

    label: str
    flags: str  # of train.py, after those of the table
    bits: int = 0  # in which its entries are stored; 0: those of --dtype
    stored: str = ""  # the folder of the adapter that it is, in the sizes of the table


STORED = "adapters/smollm2-135m"
BUDGETS = f"{STORED}/budgets.json"
ROWS = {
    "full": Row("full attention", "--method full"),
    "window": Row("window: 4 first, M - 4 last", "--method streaming"),
    "h2o": Row("H2O: M/2 heavy, M/2 last", "--method h2o"),
    "official h2o": Row("H2O in LoCoCo's code: M heavy, by the last segment",
                        "--method h2o-code"),
    "lococo": Row("the paper's `lococo`: all merged", "--method lococo"),
    "lococo+h2o": Row("the paper's `lococo+h2o`: M/2 heavy, M/2 merged",
                      "--method lococo+h2o"),
    "official code": Row("LoCoCo's code as published: M/2 heavy, M/2 merged",
                         "--method lococo-code"),
    "official code, bfloat16": Row("the same, trained in bfloat16",
                                   "--method lococo-code --dtype bfloat16"),
    "official code 0.02": Row("LoCoCo's code with initial weights of 0.02 instead of 1",
                              "--method lococo-code-0.02"),
    # The run of seed 0 went on after its end, with a second fall of the rate from 0.025 to 0.
    "official code 0.02, on": Row("the same, trained on", "--method lococo-code-0.02"),
    # Of the table of results.md with 64 slots, and of the picture `curve`. Cells from before 30
    # November 2026 were trained by earlier programs. Their flags are now those that mean the same.
    "official code, one": Row("LoCoCo's code with 0.02, one sequence a step instead of four",
                              "--method lococo-code-0.02 --batch 1"),
    "official code, one, bfloat16": Row("the same, trained in bfloat16",
                                        "--method lococo-code-0.02 --batch 1 --dtype bfloat16"),
    "official code 1, one": Row("LoCoCo's code as published, one sequence a step",
                                "--method lococo-code --batch 1"),
    "official code 1, one, bfloat16": Row("the same, trained in bfloat16",
                                          "--method lococo-code --batch 1 --dtype bfloat16"),
    "official code closed": Row("LoCoCo's code with initial weights of 0.02 and a gate from 0",
                                "--method lococo-code-closed"),
    "lococo+h2o 0.02": Row("the paper's `lococo+h2o` with initial weights of 0.02",
                           "--method lococo+h2o-0.02"),
    "lococo trained": Row("LoCoCo's code, 60 steps", "--method lococo-code-0.02",
                          stored="runs/lococo"),
    "h2o 5/8 forget": Row("H2O that forgets: 5M/8 heavy, 3M/8 last", "--method h2o+forget"),
    "h2o heads": Row("H2O that forgets, with budgets",
                     f"--method h2o+forget --budgets {BUDGETS}"),
    "learned": Row("**a learned score, with budgets**", f"--method learned --budgets {BUDGETS}",
                   stored=f"{STORED}/learned"),
}
RATES = [f"official code, rate {rate}" for rate in (0.005, 0.015, 0.15)]
for row in RATES:
    rate = row.split()[-1]
    flags = f"--method lococo-code-0.02 --batch 1 --conv-lr {rate}"
    ROWS[row] = Row(f"LoCoCo's code with 0.02, one sequence a step, at a rate of {rate}", flags)
ROWS["h2o heads, 8 bits"] = replace(
    ROWS["h2o heads"], label="H2O that forgets, with budgets, in 8 bits", bits=8
)
# The learned score with its entries in fewer bits, and two other fits of it. The adapter's README
# has the commands that make what is in runs/.
ROWS["8 bits"] = replace(ROWS["learned"], label="the same in 8 bits", bits=8)
ROWS["4 bits"] = replace(ROWS["learned"], label="the same in 4 bits", bits=4)
# All 8,192 entries of a text, in 8 bits.
ROWS["full, 8 bits"] = Row("full attention in 8 bits", "--method h2o --mem 8064", bits=8)
ROWS["learned again"] = replace(
    ROWS["learned"], label="a learned score, fitted with another seed", stored="runs/learned-1"
)
ROWS["learned plain"] = replace(
    ROWS["learned"], label="a learned score, fitted without facts", stored="runs/plain"
)
# What each paper of support/ours/published.py is called, with equal slots and with our budgets.
FIELD = {
    "H2O": ("h2o", ""),
    "H2O that forgets": ("h2o 5/8 forget", "h2o heads"),
    "**a learned score**": ("learned, equal slots", "learned"),
    "SnapKV": ("snapkv", "snapkv heads"),
    "TOVA": ("tova", "tova heads"),
    "the largest share": ("largest-share", "largest-share heads"),
    "the norm of keys": ("key-norm", "key-norm heads"),
    "KeyDiff": ("keydiff", "keydiff heads"),
    "Expected Attention": ("expected-attention", "expected-attention heads"),
    "SnapKV with PyramidKV's budgets": ("", "pyramid"),
    "DuoAttention": ("", "duo"),
    "H2O that forgets, budgets within layers": ("", "layers"),
}
for rule in RULES:
    ROWS[rule] = Row(rule, f"--method {rule}")
    ROWS[f"{rule} heads"] = Row(rule, f"--method {rule} --budgets {BUDGETS}")
for name, method in (("pyramid", "snapkv"), ("duo", "duo-attention"), ("layers", "h2o+forget")):
    ROWS[name] = Row(name, f"--method {method} --budgets {STORED}/budgets-{name}.json")
ROWS["learned, equal slots"] = replace(
    ROWS["learned"], label="a learned score, equal slots", flags="--method learned"
)


@dataclass(frozen=True)
class Table:
    """Its rows, and what all of its cells have in common."""

    rows: tuple[str, ...]
    mem: int  # slots M
    seq: int  # tokens of a document that is scored
    part: str  # that is scored: one of SCORED
    segment: int  # tokens T of a segment
    steps: int = 60  # of training, if --steps does not say otherwise
    documents: int = 48  # that are scored, at most


LOCOCO = (
    "lococo", "lococo+h2o", "official code", "official code, bfloat16", "official code 0.02",
    "official code 0.02, on",
)
SHORT = Table(
    ("official h2o", "h2o", "h2o 5/8 forget", "h2o heads", "learned, equal slots", "learned",
     "lococo+h2o 0.02", "official code closed", "official code", "official code 1, one",
     "official code 1, one, bfloat16", "official code 0.02", "official code, one",
     "official code, one, bfloat16", *RATES),
    64, 1024, "test", segment=64,
)
LONG = Table(
    ("full", "window", "h2o", "official h2o", *LOCOCO, "h2o 5/8 forget", "h2o heads", "learned"),
    512, 8192, "long", segment=512, steps=15, documents=16,
)
SMALL = ("full", "full, 8 bits", "window", "h2o", "h2o 5/8 forget", "h2o heads", "learned")
SMALL += ("8 bits", "4 bits", "learned again", "learned plain")
SMALL_SEGMENTS = replace(LONG, rows=SMALL, mem=896, segment=128, documents=8)


def sized(row: str, sizes: str) -> str:
    """The name of the same row with other numbers of slots M and of tokens T."""
    flags = "{} --mem {} --segment {}".format(ROWS[row].flags, *sizes.split(" + "))
    ROWS[f"{row} @ {sizes}"] = replace(ROWS[row], flags=flags)
    return f"{row} @ {sizes}"


SIZED = [sized("lococo trained", "512 + 512")]
for row in ("h2o", "h2o 5/8 forget", "h2o heads", "learned", "8 bits"):
    SIZED.append(row)
    for sizes in ("384 + 128", "512 + 512", "768 + 256", "960 + 64", "1792 + 256"):
        SIZED.append(sized(row, sizes))
SIZED.insert(SIZED.index("learned"), sized("h2o heads, 8 bits", "1792 + 256"))
# What README.md calls a row, and the panel of its facts. Rows without sizes have M = T = 512.
RESULT = {
    "window": ("window: 4 first, M - 4 last", "base, streaming M=512"),
    "h2o": ("H2O: M/2 heavy, M/2 last", "base, h2o M=512"),
    "official code 0.02": (
        "LoCoCo's code with smaller initial weights (`lococo-code-0.02`)", "runs/lococo",
    ),
    "h2o heads": ("H2O that forgets, with budgets", "base, h2o+forget M=512 budgets"),
    "learned": ("a learned score, with budgets", f"{STORED}/learned M=512 T=512 bits=0"),
    "8 bits @ 1792 + 256": ("**the same in 8 bits, M = 1,792, T = 256**", f"{STORED}/learned"),
    "full": ("full cache", "base, full"),
}
# From H2O with the paper's sizes to full attention: what each step changes, and in which files.
LADDER = {
    "h2o": ("H2O with M = T = 512", ()),
    "h2o 5/8 forget": ("+ forgetting", ("support/ours/forgetting.py",)),
    "h2o heads": ("+ budgets", ("support/ours/budgets.py", "tools/budgets.py")),
    sized("h2o heads", "896 + 128"): ("+ smaller segments: M = 896, T = 128", ()),
    sized("h2o heads, 8 bits", "1792 + 256"): (
        "+ 8 bits: M = 1,792, T = 256", ("support/ours/bits.py",),
    ),
    "8 bits @ 1792 + 256": (
        "+ a learned score", ("support/ours/learned_score.py", "tools/fit_scores.py"),
    ),
    "full": ("full attention", ()),
}
ROWS["8 bits, most slots"] = replace(
    ROWS["8 bits @ 1792 + 256"], label="**the same in 8 bits, M = 1,792, T = 256**"
)
EXTENDED = ("window", "h2o", "h2o heads", "learned", "8 bits, most slots")
TABLES = {
    "articles": SHORT,
    "novel": replace(SHORT, part="choosing"),
    "result": replace(LONG, rows=tuple(RESULT)),
    "long": LONG,
    "lococo": replace(
        LONG, steps=60,
        rows=("official code 0.02", "window", "h2o", "official h2o", "h2o 5/8 forget"),
    ),
    "small segments": SMALL_SEGMENTS,
    "field": replace(SMALL_SEGMENTS, rows=("full", *filter(None, sum(FIELD.values(), ())))),
    "sizes": replace(SMALL_SEGMENTS, rows=tuple(SIZED)),
    "ladder": replace(LONG, rows=tuple(LADDER)),
    "extension": replace(LONG, rows=EXTENDED, mem=896, segment=128, seq=32768, documents=4),
}

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
    return train.settings_of(train.parse([*flags.split(), "--model", str(options.model)])[0])


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
        adapted = load_adapter(run, model)
    elif row.stored:
        settings = settings_of(name["flags"], options)
        sizes = {size: getattr(settings, size) for size in SIZES} | {"bits": row.bits}
        adapted = load_adapter(HERE / row.stored, model, **sizes)
    else:
        settings = replace(settings_of(name["flags"], options), bits=row.bits)
        adapted = AdaptedLlama(model, settings).eval()
    return adapted


def make_cell(name: dict, table: Table, options: Options, documents: Tensor) -> dict:
    row = ROWS[name["row"]]
    adapted = model_of(name, row, options)
    at_once = max(1, 8192 // table.seq)
    losses, _, held = token_losses(adapted, documents, prepare("cpu", options.dtype), at_once)
    means = losses.double().mean(dim=1)
    figures = {"cache bytes": held, "nats": means.mean().item(), "perplexity": perplexity(losses)}
    figures["by document"] = [round(nats, 5) for nats in means.tolist()]
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
        flags = all_flags(ROWS[key], table)
        settings = settings_of(flags, options)
        trains = settings.merged and not ROWS[key].stored
        steps = (options.steps or table.steps) if trains else 0
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


Lines = dict[str, Line]  # by row


def lines_of(table: Table, cells: list[dict]) -> Lines:
    """In the order of the table. `cells` are of one model and dtype."""
    about = {key: getattr(table, key) for key in ("mem", "seq", "part", "documents")}
    found = [cell for cell in cells if about.items() <= cell.items()]
    # Those of the newest base and documents: others cannot be paired. Some do not say theirs.
    for key in ("base", "scored"):
        found = [cell for cell in found if cell.get(key) in (None, found[-1].get(key))]
    lines = {}
    for row in table.rows:
        some = [cell for cell in found if cell["row"] == row]
        if some:
            # A row's flags may have changed since a cell was made.
            some = [cell for cell in some if cell.get("flags") == some[-1].get("flags")]
            steps = max(cell["steps"] for cell in some)
            by_seed = {cell["seed"]: cell for cell in some if cell["steps"] == steps}
            lines[row] = Line(ROWS[row].label, steps, dict(sorted(by_seed.items())))
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


def gap_closed(line: Line, h2o: Line | None, full: Line | None) -> str:
    """How much of the way from H2O to full attention a memory goes on each of the two texts, as
    a mean of the seeds."""
    seeds = common_seeds(line, h2o, full)
    if not seeds:
        return ""
    nats = np.array([[some.nats(seed) for seed in seeds] for some in (h2o, full, line)])
    start, end, here = nats.mean(axis=1).reshape(3, 2, -1).mean(axis=2)
    return ", ".join(str(round(share)) for share in 100 * (start - here) / (start - end))


def loss_table(table: Table, lines: Lines) -> str:
    """Losses are in nats per token, the mean of a row's seeds. MB is what a memory holds after
    a text."""
    columns = ["memory", "MB", "trained", "nats per token", "from H2O"]
    h2o, full = lines.get("h2o"), lines.get("full")
    if full:
        columns.append("gap closed, % (novel, articles)")
    *_, last = lines.values()
    places = [*last.where()][1:]  # the first has no compression
    columns += places
    text = "| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|\n"
    for row, line in lines.items():
        stored = ROWS[row].stored.removeprefix(f"{STORED}/")
        trained = f"`{stored}`" if stored else "-"
        if line.steps:
            trained = f"{line.steps} steps, {counted(len(line.cells), 'seed')}"
        cells = [line.label, f"{line.megabytes():.0f}", trained, f"{line.mean():.4f}"]
        cells.append(difference(line, h2o))
        if full:
            cells.append(gap_closed(line, h2o, full))
        cells += [f"{line.where()[place]:.4f}" for place in places]
        text += "| " + " | ".join(cells) + " |\n"
    return text


FOUND = {  # the panels of docs/needle.json, and of needle-8192.json, by row
    "full": "base, full",
    "window": "base, streaming M=896 T=128",
    "h2o": "base, h2o M=896 T=128",
    "h2o heads": "base, h2o+forget M=896 T=128 budgets",
    "learned": "adapters/smollm2-135m/learned M=896 T=128 bits=0",
    "8 bits": "adapters/smollm2-135m/learned M=896 T=128",
    "h2o heads, 8 bits @ 1792 + 256": "base, h2o+forget M=1792 T=256 budgets bits=8",
    "8 bits @ 1792 + 256": "adapters/smollm2-135m/learned",
}


def panels_of(*names: str, what: str = "found") -> dict[str, dict]:
    """The panels of these files of docs/, which tools/needle.py has made, or their errors."""
    files = (read_json(HERE / "docs" / name).get(what, {}) for name in names)
    return {key: panel for file in files for key, panel in file.items()}


def result_table(table: Table, lines: Lines) -> str:
    """What README.md shows of SmolLM2: bytes, loss and facts in texts of 8,192 tokens."""
    files = "needle.json", "needle-8192.json"
    panels, errors = panels_of(*files), panels_of(*files, what="errors")
    columns = "memory", "MB", "nats per token above full attention", "facts found, %"
    text = f"| {' | '.join(columns)} |\n|---|---|---|---|\n"
    for key, (label, panel) in RESULT.items():
        if key not in lines:
            continue
        line = lines[key]
        shares = panels.get(panel, {}).get(str(table.seq), [])
        found = f"{100 * np.nanmean(np.array(shares, dtype=float)):.0f}" if shares else ""
        if panel in errors:
            found += f" ± {100 * errors[panel][str(table.seq)]:.0f}"
        above = difference(line, lines.get("full"))
        text += f"| {label} | {line.megabytes():.0f} | {above} | {found} |\n"
    return text


def field_table(table: Table, lines: Lines) -> str:
    """Nats per token above full attention, and the lines found in texts of 4,096 tokens."""
    panels = panels_of("needle.json", "needle-field.json")
    text = "| what is kept | equal slots | with budgets | lines found, % |\n|---|---|---|---|\n"
    rows = []
    for label, keys in FIELD.items():
        cells = [difference(lines[key], lines["full"]) if key in lines else "" for key in keys]
        shares = panels.get(found_name(keys), {}).get("4096", [])
        cells.append(f"{100 * np.nanmean(np.array(shares)):.0f}" if shares else "")
        losses = [lines[key].mean() for key in keys if key in lines]
        rows.append((min(losses, default=np.inf), f"| {label} | {' | '.join(cells)} |\n"))
    return text + "".join(row for loss, row in sorted(rows) if loss < np.inf)


def found_name(keys: tuple[str, str]) -> str:
    """The panel of a row of the field, in the files of tools/needle.py. A row with other
    budgets than ours has none."""
    flags = ROWS[keys[1]].flags.split() if keys[1] else []
    own = f"base, {flags[1]} M=896 T=128 budgets" if BUDGETS in flags else ""
    return FOUND.get(keys[1], own)


def sizes_table(table: Table, lines: Lines) -> str:
    """The loss in nats per token of each method with M slots and T tokens."""
    sizes = {key: key.partition(" @ ")[2] or f"{table.mem} + {table.segment}" for key in lines}
    columns = sorted(set(sizes.values()), key=lambda size: [*map(int, size.split(" + "))])
    text = f"| M + T | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}\n"
    for label in dict.fromkeys(line.label for line in lines.values()):
        found = {sizes[key]: line.mean() for key, line in lines.items() if line.label == label}
        cells = [f"{found[size]:.4f}" if size in found else "" for size in columns]
        text += f"| {label} | {' | '.join(cells)} |\n"
    return text


def ladder_table(table: Table, lines: Lines) -> str:
    """Nats per token above full attention, what each step changes, and the lines of its files."""
    columns = "step", "MB", "nats per token above full attention", "change", "lines of code"
    text = f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}\n"
    for key, before in zip(table.rows, (None, *table.rows)):
        if key in lines:
            label, files = LADDER[key]
            above = difference(lines[key], lines.get("full"))
            change = difference(lines[key], lines.get(before))
            code = sum(len(read_text(HERE / file).splitlines()) for file in files)
            cells = label, f"{lines[key].megabytes():.0f}", above, change, str(code or "")
            text += f"| {' | '.join(cells)} |\n"
    return text


def lococo_table(table: Table, lines: Lines) -> str:
    """The loss of LoCoCo's code minus that of other memories, on each text."""
    text = "| LoCoCo's code minus | novel | articles | both |\n|---|---|---|---|\n"
    code, *others = table.rows
    half = table.documents // 2
    parts = slice(half), slice(half, None), slice(None)
    for row in others:
        if row in lines and code in lines:
            cells = [difference(lines[code], lines[row], part) for part in parts]
            text += f"| {ROWS[row].label} | {' | '.join(cells)} |\n"
    return text


def tokens_of(cell: dict) -> int:
    """How many tokens a cell was trained on."""
    one = "--batch 1" in ROWS[cell["row"]].flags
    sequences = 1 if one else max(1, 4096 // cell["seq"])
    return cell["steps"] * sequences * cell["seq"]


def short_line(cells: list[dict], row: str, steps: int, part: str) -> Line | None:
    """A row with 64 slots after so many steps, on one text; None if it has no cell."""
    about = {"row": row, "steps": steps, "part": part, "mem": SHORT.mem}
    by_seed = {cell["seed"]: cell for cell in cells if about.items() <= cell.items()}
    return Line(ROWS[row].label, steps, dict(sorted(by_seed.items()))) if by_seed else None


def short_table(cells: list[dict]) -> str:
    """The nats per token with 64 slots after each number of steps. `cells` are of one model and
    dtype, on the two texts that the short tables score."""
    columns = "memory", "trained", "choosing novel", "from H2O", "articles", "from H2O"
    text = f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|\n"
    for row in SHORT.rows:
        of_row = [cell for cell in cells if cell["row"] == row and cell["mem"] == SHORT.mem]
        for steps in sorted({cell["steps"] for cell in of_row}):
            some = [cell for cell in of_row if cell["steps"] == steps]
            seeds = counted(len({cell["seed"] for cell in some}), "seed")
            trained = f"{tokens_of(some[0]):,} tokens, {seeds}" if steps else "-"
            columns = [ROWS[row].label, trained]
            for part in ("choosing", "test"):
                line = short_line(cells, row, steps, part)
                h2o = short_line(cells, "h2o", 0, part)
                columns += [f"{line.mean():.4f}", difference(line, h2o)] if line else ["", ""]
            text += f"| {' | '.join(columns)} |\n"
    return text


FORMS = {
    "lococo": lococo_table, "result": result_table, "field": field_table,
    "sizes": sizes_table, "ladder": ladder_table,
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
                form = FORMS.get(name, loss_table)
                made[f"{name}, {model}, {dtype}"] = form(table, lines)
        made[f"64 slots, {model}, {dtype}"] = short_table(some)
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
    add("tables", nargs="*", metavar="TABLE", help=f"to make: {'; '.join(TABLES)}")
    add("--rows", nargs="+", choices=ROWS, default=[], metavar="ROW",
        help="default: all of a table")
    add("--model", type=Path, default=HERE / "SmolLM2-135M",
        help="directory of the base (default: SmolLM2-135M/)")
    add("--prose", type=Path, help=f"folder with {prose}")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the base (default: float32)")
    add("--seeds", nargs="+", type=at_least(0), default=[0], help="default: 0")
    add("--steps", type=at_least(1), help="of training (default: the table's)")
    add("--write", action="store_true", help="write all tables into the pages")
    options = parser.parse_args()
    options.model = options.model.resolve()
    return options


def refuse_unknown(name: str, known: Iterable[str], what: str) -> None:
    if name not in known:
        listed = "; ".join(known)
        raise UserError(f"{name}: there is no such {what}; take one of {listed}")


def main() -> None:
    options = parse()
    for name in options.tables:
        refuse_unknown(name, TABLES, "table")
    for name in options.tables:
        make_cells(TABLES[name], options)
    tables = all_tables(stored_cells())
    for page in PAGES if options.write else ():
        write_text(page, with_tables(page.read_text("utf-8"), tables))
    asked = {name if TABLES[name].part == "long" else "64 slots" for name in options.tables}
    for name, table in tables.items():
        if not asked or name.rsplit(", ", 2)[0] in asked:
            print(f"\n{name}\n\n{table}", end="")


if __name__ == "__main__":
    run_program(main)
