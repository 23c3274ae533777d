"""Draw assets/result.png: the table of README.md, from the figures in docs/real-llama.jsonl.

    pip install matplotlib          # only the programs that draw need it
    python tools/result.py
"""

import sys
from functools import partial
from pathlib import Path

from matplotlib import pyplot

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import cells  # noqa: E402
from real_llama import RESULTS, SHORT, cells_of_rows, nats_of_rows  # noqa: E402
from support.command_line import HERE, run_program  # noqa: E402
from support.files import write_whole  # noqa: E402

FILE = HERE / "assets" / "result.png"
LABELS = {
    "window": "window",
    "official code": "official code's LoCoCo, trained",
    "h2o": "H2O",
    "ours": "ours, trained",
    "ours budgets": "ours with budgets of layers, trained",
}
BASELINE, LOCOCO, OURS = "#999999", "#0072b2", "#d55e00"  # colours that all can tell apart
COLOURS = {"official code": LOCOCO, "ours": OURS, "ours budgets": OURS}


def losses_above_full() -> dict[str, tuple[float, float]]:
    """By row the mean and the standard error over documents, in nats per token."""
    stored = [cell for cell in cells.read(RESULTS) if cell["row"] in SHORT and not cell["extra"]]
    rows = cells_of_rows(stored, part="test", mem=64, seq=1024)
    nats = {row: values for (row, _, _), values in nats_of_rows(rows).items()}
    above = {}
    for row in LABELS:
        difference = nats[row] - nats["full"]
        above[row] = difference.mean(), difference.std(ddof=1) / len(difference) ** 0.5
    return above


def main() -> None:
    figure, axes = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    above = losses_above_full()
    for row, (mean, error) in above.items():
        colour = COLOURS.get(row, BASELINE)
        axes.barh(LABELS[row], mean, xerr=error, color=colour, height=0.65, capsize=3)
        axes.text(mean + error + 0.005, LABELS[row], f"{mean:.3f}", va="center", fontsize=10)
    axes.invert_yaxis()
    axes.set_xlim(0, 0.42)
    axes.set_xlabel("nats per token above full attention (less is better)")
    axes.set_title("SmolLM2-135M, frozen: 64 slots, 1,024 tokens", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    write_whole(FILE, partial(figure.savefig, dpi=100, facecolor="white", format="png"))
    print(FILE)


if __name__ == "__main__":
    run_program(main)
