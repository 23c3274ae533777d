"""The paper's table 2 at the scale of the embedded model: training length by method by evaluation length.

    python tests/reproduce.py                      # everything: hours on two cores; run it again to go on
    python tests/reproduce.py --scales 4 --seeds 0 # 4 times the pretrained context, one seed

Every run is `train.py` with the same memory, data, steps and seed, scored by `eval_ppl.py` on the held-out part.
What is finished is found in runs/reproduce/ and not done again. Writes tests/reproduce.json and, between its
two marks, the README's table.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

HOME = Path(__file__).resolve().parent.parent
OUT = HOME / "runs" / "reproduce"
MARKS = "<!-- tests/reproduce.py writes from here -->", "<!-- to here -->"
CONTEXT, MEM, SEGMENT, DOCUMENTS = 1024, 256, 512, 32
LENGTHS = (512, 1024, 2048, 4096, 8192)
SCORE = ("--documents", DOCUMENTS, "--lengths", *LENGTHS)

SLOTS = ("--positions", "slots")
METHODS = {  # name in the table: flags of train.py
    "8 sinks + segment (the paper's StreamingLLM)": ("--method", "streaming", "--sinks", "8", "--recent", "0"),
    "window: 4 sinks + recent": ("--method", "streaming"),
    "H2O": ("--method", "h2o", *SLOTS),
    "LoCoCo": ("--method", "lococo", "--sinks", "0", "--recent", "0"),
    "LoCoCo + sinks": ("--method", "lococo+sinks", *SLOTS),
    "LoCoCo + H2O (the paper's)": ("--method", "lococo+h2o", *SLOTS),
    "LoCoCo, the recipe's 4 sinks + 1/16 merged": ("--method", "lococo"),
    "LongLoRA": ("--method", "longlora"),
    "full": ("--method", "full"),
}


def call(*words: object) -> None:
    done = subprocess.run([sys.executable, *map(str, words)], cwd=HOME, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stderr[-2000:]}")


def run(scale: int, name: str, seed: int, steps: int) -> dict:
    """Train and score one cell of the table, unless it is there; {evaluation length: perplexity}."""
    folder = OUT / f"{scale}x-{list(METHODS).index(name)}-seed{seed}-steps{steps}"
    table = folder / "table.json"
    if not table.is_file():
        if not (folder / "run" / "adapter.safetensors").is_file():
            shutil.rmtree(folder / "run", ignore_errors=True)  # half done
            call("train.py", "--mem", MEM, "--seq", CONTEXT * scale, "--segment", SEGMENT, "--steps", steps,
                 "--seed", seed, "--normalise", "softmax", "--out", folder / "run", *METHODS[name])  # fmt: skip
        call("eval_ppl.py", folder / "run", *SCORE, "--json", table)
    row = json.loads(table.read_text())["rows"][-1]
    return {int(length): value for length, value in row["perplexity"].items()}


def base() -> dict:
    table = OUT / "base.json"
    if not table.is_file():
        call("eval_ppl.py", "--method", "streaming", "--mem", MEM, *SCORE, "--json", table)
    names = {"full cache": 0, "window: 4 sinks + recent": 1}
    rows = json.loads(table.read_text())["rows"]
    return {name: {int(n): v for n, v in rows[i]["perplexity"].items()} for name, i in names.items()}


def write(cells: dict, untouched: dict, about: str) -> None:
    lines = [about, "", "| trained at | method | " + " | ".join(f"{n:,}" for n in LENGTHS) + " |",
             "|---" * (2 + len(LENGTHS)) + "|"]  # fmt: skip
    for name, row in untouched.items():
        lines.append(f"| - | untouched base, {name} | " + " | ".join(f"{row[n]:.3f}" for n in LENGTHS) + " |")
    for (scale, name), runs in cells.items():
        texts = []
        for n in LENGTHS:
            values = [row[n] for row in runs]
            spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
            texts.append(f"{statistics.mean(values):.3f}{spread}")
        lines.append(f"| {CONTEXT * scale:,} | {name} | " + " | ".join(texts) + " |")
    readme = HOME / "README.md"
    before, rest = readme.read_text().split(MARKS[0])
    readme.write_text("\n".join([before + MARKS[0], *lines, MARKS[1]]) + rest.split(MARKS[1])[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    jobs = [(scale, name, seed) for seed in args.seeds for scale in args.scales for name in METHODS]
    cells, untouched, begun = {}, base(), time.time()
    for scale, name, seed in tqdm(jobs, unit=" runs"):
        cells.setdefault((scale, name), []).append(run(scale, name, seed, args.steps))
    scales, seeds = " ".join(map(str, args.scales)), " ".join(map(str, args.seeds))
    about = (f"Perplexity by evaluation length, M = {MEM}, T = {SEGMENT}, {args.steps} steps, "
             f"at most {DOCUMENTS} documents, seeds {seeds}: "
             f"`python tests/reproduce.py --scales {scales} --seeds {seeds} --steps {args.steps}`, "
             f"{time.strftime('%Y-%m-%d')}; this call took {(time.time() - begun) / 60:.0f} minutes.")  # fmt: skip
    runs = [{"trained_at": CONTEXT * scale, "method": name, "perplexity": row} for (scale, name), row in cells.items()]
    record = {"about": about, "untouched": untouched, "runs": runs}
    (HOME / "tests" / "reproduce.json").write_text(json.dumps(record, indent=1) + "\n")
    write(cells, untouched, about)


if __name__ == "__main__":
    main()
