"""The table of README.md: from the paper's form to ours, one change a row, trained and scored.

    python tests/reproduce.py --only window ours --seeds 0 1 2   # train, score, print the table
    python tests/reproduce.py --only window --steps 100 --mem 64
    python tests/reproduce.py --write                            # the table into README.md

A cell is one run of train.py: the embedded model and recipe, T = 128, and the row's flags. It
is scored on 64 held-out documents of 2,048 tokens, or on all of --part choosing. Adapters are in
runs/reproduce/, the figures in tests/results.json, written after every cell with the commit; a
cell that is there is not measured again.
"""

import argparse
import io
import json
import math
import subprocess
import sys
from contextlib import redirect_stdout
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import generate  # noqa: E402
import train  # noqa: E402
from eval_ppl import PARTS, long_documents, tell_all, token_losses, token_streams  # noqa: E402
from generate import HERE, TINY, Machine, load_adapter, load_base, prepare  # noqa: E402
from lococo import COMMON, COMPRESSORS, AdaptedLlama, Compressor, FactCompressor  # noqa: E402
from official_code import OfficialLoCoCo  # noqa: E402

# --- What lies between the paper's compressor and ours -------------------------------------------


class SoftmaxCompressor(Compressor):
    """A softmax instead of the ReLU and (7)."""

    def weights(self, entries: Tensor, from_slot: Tensor) -> Tensor:
        return self.conv(entries).float().softmax(dim=-1)


class CommonCompressor(FactCompressor):
    """Ours with rows that are made all at once, and as soft in use as in training."""

    sharper = 1

    def weights(self, entries: Tensor, from_slot: Tensor) -> Tensor:
        new = F.conv1d(entries, self.conv.weight + COMMON * self.common, padding="same")
        old = F.conv1d(entries, self.slot_filters + COMMON * self.slot_common)
        return torch.where(from_slot[:, None], old, new).float().softmax(dim=-1)


class RowsInTurnCompressor(FactCompressor):
    """Ours with rows that are as soft in use as in training."""

    sharper = 1


COMPRESSORS["softmax"] = SoftmaxCompressor
COMPRESSORS["common"] = CommonCompressor
COMPRESSORS["rows-in-turn"] = RowsInTurnCompressor

# --- Rows ----------------------------------------------------------------------------------------

PAPER = "--positions slots --compressor paper --kernel 21 --conv-lr 5e-2"
WINDOW = "--method lococo+window --compressor"
ROWS = {  # name: what README says of it, flags of train.py
    "full": ("full attention", "--method full --positions original"),
    "window": ("the window: 4 first and 124 last tokens", "--method streaming"),
    "h2o": ("H2O", "--method h2o --positions slots"),
    "official code": ("the official code", f"--method lococo+h2o {PAPER}"),
    "lococo": ("the paper's `lococo`: all merged", f"--method lococo {PAPER}"),
    "lococo+h2o": ("the paper's `lococo+h2o`: half heavy, half merged", f"--method lococo+h2o {PAPER}"),
    "recent": ("+ 100 last and 4 first tokens instead of the heavy ones, 24 merged", f"--method lococo+window {PAPER}"),
    "small": ("+ 3 taps and `--conv-lr` 7.5e-3 instead of 21 and 5e-2", f"{WINDOW} paper"),
    "softmax": ("+ softmax instead of the ReLU and (7)", f"{WINDOW} softmax"),
    "common": ("+ a common filter, one-tap filters for slots, a start that hardly sees neighbours", f"{WINDOW} common"),
    "rows in turn": ("+ rows in turn that avoid copies", f"{WINDOW} rows-in-turn"),
    "ours": ("+ logits times 16 after training: **ours**", WINDOW + " facts"),
}  # fmt: skip
COLUMNS = {"to 256": (0, 256), "256-512": (256, 512), "512-2,048": (512, 2048)}  # told so long ago
RESULTS = HERE / "tests" / "results.json"
START, END = "<!-- tests/reproduce.py writes this table -->\n", "<!-- its end -->\n"


def run_directory(row: str, seed: int, args: argparse.Namespace) -> Path:
    name = f"{row.replace(' ', '-')}-mem{args.mem}-seq{args.seq}-facts{args.facts}"
    return HERE / "runs" / "reproduce" / f"{name}-steps{args.steps}-seed{seed}"


def train_cell(row: str, seed: int, args: argparse.Namespace) -> Path:
    """Run train.py, or go on with its run; returns the run directory."""
    out = run_directory(row, seed, args)
    if (out / "adapter.safetensors").is_file():
        return out
    if (out / "state.safetensors").is_file():
        flags = f"--resume {out}"
    else:
        flags = f"{ROWS[row][1]} --recipe embedded --mem {args.mem} --segment 128 --seq {args.seq}"
        flags += f" --facts {args.facts} --seed {seed} --steps {args.steps}"
        flags += f" --score-tokens 0 --out {out}"
    sys.argv = ["train.py", *flags.split()]
    with redirect_stdout(io.StringIO()):
        train.main()
    return out


def score_cell(run: Path, args: argparse.Namespace, machine: Machine) -> dict[str, float]:
    """Perplexity of documents of --seq tokens, and the share of the facts told in them that is
    recalled, with the number of answers."""
    model, tokenizer = load_base(TINY, machine)
    adapted, ids = load_adapter(run, model), token_streams([], tokenizer)[args.part]
    texts = long_documents(ids, tokenizer.bos, args.seq, 64)
    nats, _, _ = token_losses(adapted, texts, machine, 8)
    told, ago = tell_all(texts, 8, args.part, tokenizer)
    _, hits, _ = token_losses(adapted, told, machine, 8)
    cell = {"documents": len(texts), "perplexity": math.exp(nats.double().mean())}
    for column, (start, stop) in COLUMNS.items():
        mask = (start < ago) & (ago <= stop)
        cell |= {column: hits[mask].double().mean().item(), f"answers {column}": int(mask.sum())}
    return cell


def table(cells: dict[str, dict]) -> str:
    """A line for each row and number of steps that was scored on the held-out part; a figure for
    each seed in turn."""
    lines = ["| memory | steps | perplexity | recalled, % | seeds |", "|---|---|---|---|---|"]
    for row, (label, _) in ROWS.items():
        found = [c for c in cells.values() if (c["row"], c["part"]) == (row, "held-out")]
        found = [c for c in found if (c["mem"], c["seq"], c["facts"]) == (128, 2048, 8)]
        for steps in sorted({c["steps"] for c in found}):
            seeds = sorted((c for c in found if c["steps"] == steps), key=lambda c: c["seed"])
            perplexity = ", ".join(f"{c['perplexity']:.2f}" for c in seeds)
            recalled = ", ".join(f"{100 * c['512-2,048']:.0f}" for c in seeds)
            numbers = ", ".join(str(c["seed"]) for c in seeds)
            lines.append(f"| {label} | {steps} | {perplexity} | {recalled} | {numbers} |")
    return "\n".join(lines) + "\n"


def with_table(readme: str, cells: dict[str, dict]) -> str:
    before, rest = readme.split(START)
    return before + START + table(cells) + END + rest.split(END)[1]


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--only", nargs="+", choices=ROWS, default=[], help="rows")
    add("--seeds", nargs="+", type=int, default=[0])
    add("--mem", type=int, default=128)
    add("--seq", type=int, default=2048, help="trained length, in tokens")
    add("--steps", type=int, default=400)
    add("--facts", type=int, default=8)
    add("--part", choices=PARTS, default="held-out")
    add("--write", action="store_true", help="the table into README.md")
    args = parser.parse_args()
    machine = prepare(argparse.Namespace(device="cpu", dtype="float32", seed=0))
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=HERE, capture_output=True, text=True).stdout.strip()
    for seed in args.seeds:
        for row in args.only:
            kind = OfficialLoCoCo if row == "official code" else AdaptedLlama
            train.AdaptedLlama = generate.AdaptedLlama = kind
            name = f"{run_directory(row, seed, args).name} {args.part}"
            if name not in read():
                print(name, file=sys.stderr)
                about = {"row": row, "seed": seed, "commit": commit, "date": str(date.today())}
                about |= {key: vars(args)[key] for key in ("mem", "seq", "facts", "steps", "part")}
                cell = about | score_cell(train_cell(row, seed, args), args, machine)
                RESULTS.write_text(json.dumps(read() | {name: cell}, indent=1) + "\n")
    print(table(read()), end="")
    if args.write:
        file = HERE / "README.md"
        file.write_text(with_table(file.read_text("utf-8"), read()), "utf-8")


def read() -> dict[str, dict]:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


if __name__ == "__main__":
    generate.run_program(main)
