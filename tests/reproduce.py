"""The tables of results.md for this code: train, then score perplexity and recall on held-out text.

    python tests/reproduce.py --only window h2o lococo+window --mem 64 --seeds 0 1 2
    python tests/reproduce.py --only lococo+h2o h2o --steps 1600         # a point of the curve

Each cell is one run of train.py on the embedded model with the row's flags and T = 128, otherwise
the embedded recipe. It is scored on held-out documents: perplexity, recall of 8 facts in each by
distance (at two lengths), recall of one fact at four depths. The adapters are in runs/reproduce/,
the figures in runs/reproduce.json, written after every cell; a cell that is there is not measured
again.
"""

import argparse
import io
import json
import math
import statistics
import sys
import zlib
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import generate  # noqa: E402
import train  # noqa: E402
from eval_ppl import (  # noqa: E402
    PARTS, fact_tokens, long_documents, tell_all, token_losses, token_streams,
)  # fmt: skip
from generate import HERE, TINY, Machine, load_adapter  # noqa: E402
from generate import load_base, prepare, run_program  # noqa: E402
from lococo import AdaptedLlama  # noqa: E402
from official_code import OfficialLoCoCo  # noqa: E402

PAPER = "--positions slots --compressor paper --kernel 21 --conv-lr 5e-2"
ROWS = {  # the row's name: flags of train.py
    "full": "--method full --positions original",
    "window": "--method streaming",
    "h2o": "--method h2o --positions slots",
    "lococo+window": "--method lococo+window",
    "lococo+h2o": f"--method lococo+h2o {PAPER}",
    "lococo": f"--method lococo {PAPER}",
    "lococo+sinks": f"--method lococo+sinks {PAPER}",
    "official code": f"--method lococo+h2o {PAPER}",
    "lococo+window, paper's form": f"--method lococo+window {PAPER}",
}


def at_depth(text: torch.Tensor, depth: float, i: int, tokenizer) -> torch.Tensor:
    """A text (L,) with one fact told at `depth`, 0 to 1; its last token but one asks for it."""
    words, line_break, at, equals = fact_tokens(tokenizer)
    rng, number = np.random.default_rng((2, i)), 20
    while number not in PARTS["held-out"]:
        a, b, word = rng.choice(words, 3).tolist()
        number = zlib.crc32("".join(tokenizer.sp.id_to_piece([a, b])).encode()) % 20
    line = torch.tensor([line_break, at, a, b, equals, word, line_break])
    place = max(1, int(depth * (len(text) - 64)))  # behind the BOS
    filled = torch.cat((text[:place], line, text[place:]))
    return torch.cat((filled[: len(text) - 6], line[:6]))


def run_directory(row: str, seed: int, args: argparse.Namespace) -> Path:
    name = row.replace(", ", "-").replace(" ", "-")
    name += f"-mem{args.mem}-seq{args.seq}-seed{seed}-steps{args.steps}"
    return HERE / "runs" / "reproduce" / name


def train_cell(row: str, seed: int, args: argparse.Namespace) -> Path:
    """Run train.py, or go on with its run; returns the run directory."""
    out = run_directory(row, seed, args)
    if (out / "adapter.safetensors").is_file():
        return out
    if (out / "state.safetensors").is_file():
        flags = f"--resume {out}"
    else:
        flags = f"{ROWS[row]} --recipe embedded --mem {args.mem} --segment 128 --seq {args.seq}"
        flags += f" --seed {seed} --steps {args.steps} --facts {args.facts}"
        flags += f" --score-tokens 0 --out {out}"
    sys.argv = ["train.py", *flags.split()]
    with redirect_stdout(io.StringIO()):
        train.main()
    return out


def score_cell(run: Path, machine: Machine) -> dict[str, float]:
    """Perplexity and recall, by column, of a trained adapter."""
    model, tokenizer = load_base(TINY, machine)
    adapted, ids = load_adapter(run, model), token_streams([], tokenizer)["held-out"]
    cell = {}
    for L, most in ((2048, 64), (8192, 24)):
        texts = long_documents(ids, tokenizer.bos, L, most)
        losses, _, _ = token_losses(adapted, texts, machine, 8)
        cell[f"perplexity {L}"] = math.exp(losses.double().mean())
        told, ago = tell_all(texts, 8, "held-out", tokenizer)
        _, right, _ = token_losses(adapted, told, machine, 8)
        for start, stop in zip((0, 256, 512, 512, 1024, 2048), (256, 512, 2048, 1024, 2048, 8192)):
            mask = (start < ago) & (ago <= stop)
            if mask.any():
                cell[f"{L}: {start}-{stop}"] = right[mask].double().mean().item()
                cell[f"answers {L}: {start}-{stop}"] = int(mask.sum())
        for depth in (0, 0.25, 0.5, 0.75) if L == 2048 else ():
            asked = [at_depth(text, depth, i, tokenizer) for i, text in enumerate(texts)]
            _, right, _ = token_losses(adapted, torch.stack(asked), machine, 8)
            cell[f"{L}: depth {depth}"] = right[:, -1].double().mean().item()
    return cell


def table(cells: dict[str, dict], args: argparse.Namespace) -> str:
    """Markdown; with several seeds the mean and the standard deviation."""
    columns = [c for c in next(iter(cells.values())) if "answers" not in c]
    lines = [f"| M = {args.mem}, {args.steps} steps | " + " | ".join(columns) + " |"]
    lines += ["|---" * (1 + len(columns)) + "|"]
    for row in args.only:
        names = [run_directory(row, seed, args).name for seed in args.seeds]
        measured = [cells[name] for name in names if name in cells]
        texts = []
        for column in columns if measured else []:
            values = [cell[column] for cell in measured]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            texts.append(f"{statistics.mean(values):.3f}{spread}")
        lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--mem", type=int, default=128)
    parser.add_argument("--seq", type=int, default=2048, help="trained length, in tokens")
    parser.add_argument("--steps", type=int, default=train.RECIPES["embedded"].steps)
    parser.add_argument("--facts", type=int, default=8)
    args = parser.parse_args()
    file = HERE / "runs" / "reproduce.json"
    file.parent.mkdir(exist_ok=True)
    machine = prepare(argparse.Namespace(device="cpu", dtype="float32", seed=0))
    for seed in args.seeds:
        for row in args.only:
            kind = OfficialLoCoCo if row == "official code" else AdaptedLlama
            train.AdaptedLlama = generate.AdaptedLlama = kind
            name = run_directory(row, seed, args).name
            if name not in read(file):
                print(name, file=sys.stderr)
                cell = score_cell(train_cell(row, seed, args), machine)
                file.write_text(json.dumps(read(file) | {name: cell}, indent=1) + "\n")
    print(table(read(file), args))


def read(file: Path) -> dict[str, dict]:
    return json.loads(file.read_text()) if file.is_file() else {}


if __name__ == "__main__":
    run_program(main)
