"""The main table of results.md, for the methods of the code: trained, then scored on held-out text.

    python tests/reproduce.py                    # an hour of two cores; run it again to go on
    python tests/reproduce.py --only window lococo+window --seeds 0 1 2
    python tests/reproduce.py --seq 4096         # trained at four times the pretrained context

Each cell is one run of train.py on the embedded model, with the flags below and otherwise the
embedded recipe: M = T = 128, steps of 8,192 tokens, gradients through 4 segments. It is scored on
the first 24 held-out documents of each length. The adapters are in runs/reproduce/. The
perplexities are in runs/reproduce.json, which is written after every cell; a cell that is there is
not measured again.
"""

import argparse
import io
import json
import math
import statistics
import sys
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from eval_ppl import long_documents, token_losses, token_streams  # noqa: E402
from generate import HERE, TINY, load_adapter, load_base, prepare, run_program  # noqa: E402

STEP_TOKENS, DOCUMENTS = 8192, 24
LENGTHS = (512, 1024, 2048, 4096, 8192)

# Memories take positions by slot, full attention original ones: interpolation breaks this base.
PAPER = "--positions slots --kernel 21 --normalise sum"
SOFTMAX = "--positions slots --kernel 21 --normalise softmax"
ROWS = {  # the row's name: flags of train.py
    "full": "--method full --positions original",
    "window": "--method streaming",
    "h2o": "--method h2o --positions slots",
    "lococo+window": "--method lococo+window",
    "lococo+h2o": f"--method lococo+h2o {PAPER}",
    "lococo": f"--method lococo {PAPER}",
    "lococo, softmax": f"--method lococo {SOFTMAX}",
    "lococo+sinks": f"--method lococo+sinks {PAPER}",
    "lococo+sinks, softmax": f"--method lococo+sinks {SOFTMAX}",
    "longlora": "--method longlora --positions original",
    "8 sinks": "--method streaming --sinks 8 --recent 0",
}


def run_directory(row: str, seed: int, args: argparse.Namespace) -> Path:
    name = row.replace(", ", "-").replace(" ", "-")
    return HERE / "runs" / "reproduce" / f"{name}-seq{args.seq}-seed{seed}-steps{args.steps}"


def train_cell(row: str, seed: int, args: argparse.Namespace) -> Path:
    """Run train.py, or go on with its run; returns the run directory."""
    out = run_directory(row, seed, args)
    if (out / "adapter.safetensors").is_file():
        return out
    if (out / "state.safetensors").is_file():
        flags = f"--resume {out}"
    else:
        batch = max(STEP_TOKENS // args.seq, 1)
        flags = f"{ROWS[row]} --recipe embedded --mem 128 --segment 128 --seq {args.seq}"
        flags += f" --seed {seed} --steps {args.steps} --batch {batch} --micro-batch {batch}"
        flags += f" --device {args.device} --score-documents 0 --out {out}"
    sys.argv = ["train.py", *flags.split()]
    with redirect_stdout(io.StringIO()):
        train.main()
    return out


def score_cell(run: Path, args: argparse.Namespace) -> dict[str, float]:
    """{length: perplexity} of a trained adapter."""
    model, tokenizer = load_base(args)
    lococo, ids = load_adapter(run, model), token_streams([], tokenizer)["held-out"]
    perplexity = {}
    for L in LENGTHS:
        losses, _ = token_losses(lococo, long_documents(ids, tokenizer.bos, L, DOCUMENTS), args)
        perplexity[str(L)] = math.exp(losses.double().mean())
    return perplexity


def cell_name(row: str, seed: int, args: argparse.Namespace) -> str:
    return f"{row}; {args.seq} tokens, seed {seed}, {args.steps} steps"


def table(cells: dict[str, dict], args: argparse.Namespace) -> str:
    """Markdown; with several seeds the mean and the standard deviation."""
    lines = [f"| trained at {args.seq:,} | " + " | ".join(f"{L:,}" for L in LENGTHS) + " |"]
    lines += ["|---" * (1 + len(LENGTHS)) + "|"]
    for row in args.only:
        names = [cell_name(row, seed, args) for seed in args.seeds]
        measured = [cells[name] for name in names if name in cells]
        if measured:
            texts = []
            for L in LENGTHS:
                values = [perplexity[str(L)] for perplexity in measured]
                spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
                texts.append(f"{statistics.mean(values):.3f}{spread}")
            lines.append(f"| {row} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), help="rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--seq", type=int, default=2048, help="trained length, in tokens")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    file = HERE / "runs" / "reproduce.json"
    file.parent.mkdir(exist_ok=True)
    cells = json.loads(file.read_text()) if file.is_file() else {}
    scoring = argparse.Namespace(model=TINY, device=args.device, dtype="float32", seed=0)
    scoring.micro_batch = 8
    prepare(scoring)
    for seed in args.seeds:
        for row in args.only:
            name = cell_name(row, seed, args)
            if name not in cells:
                print(name, file=sys.stderr)
                cells[name] = score_cell(train_cell(row, seed, args), scoring)
                file.write_text(json.dumps(cells, indent=1) + "\n")
    print(table(cells, args))


if __name__ == "__main__":
    run_program(main)
