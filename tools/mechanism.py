"""Draw assets/mechanism.png: one compression, as the paper makes it and as ours.

    pip install matplotlib          # only the programs that draw need it
    python tools/mechanism.py
"""

import argparse
import sys
from functools import partial
from pathlib import Path

from matplotlib import pyplot
from matplotlib.patches import Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.command_line import HERE, run_program
from support.files import write_whole

FILE = HERE / "assets" / "mechanism.png"
COLOURS = {"heavy": "#009e73", "merged": "#e69f00", "recent": "#0072b2", "new": "white"}
TOP, BOTTOM, SIZE = 2.5, 0.0, 0.84  # heights of both rows; the side of an entry

# 8 slots and 8 new entries become 8 slots. By slot, the entries that go into it, and how
# much of each. What is kept has one.
LOCOCO = ["heavy"] * 4 + ["merged"] * 4
LOCOCO_PARTS = {
    0: {0: 1},
    1: {2: 1},
    2: {9: 1},
    3: {12: 1},
    4: {1: 0.7, 3: 0.5, 4: 0.9, 5: 0.3, 8: 0.4},
    5: {3: 0.5, 5: 1, 6: 0.7, 8: 0.6, 10: 0.8, 13: 0.5},
    6: {6: 0.3, 7: 0.5, 10: 0.9, 11: 0.6, 13: 0.4},
    7: {8: 0.3, 11: 0.3, 13: 0.7, 14: 0.9, 15: 0.8},
}
FAINT = {4, 6, 7}  # mixed like slot 5, which is drawn in full
OURS = ["heavy"] * 3 + ["merged"] * 2 + ["recent"] * 3
OURS_PARTS = {slot: {entry: 1} for slot, entry in enumerate((0, 2, 9, 4, 11, 13, 14, 15))}


def draw_entries(axes, kinds: list[str], height: float) -> None:
    for n, kind in enumerate(kinds):
        colours = dict(facecolor=COLOURS[kind], edgecolor="#333333")
        axes.add_patch(Rectangle((n + 0.08, height), SIZE, SIZE, **colours))


def draw_compression(axes, kinds: list[str], parts: dict, title: str, below: str) -> None:
    draw_entries(axes, [*kinds, *["new"] * 8], TOP)
    draw_entries(axes, kinds, BOTTOM)
    for slot, entries in parts.items():
        for entry, share in entries.items():
            ends = (entry + 0.5, slot + 0.5), (TOP - 0.06, BOTTOM + SIZE + 0.06)
            shade = 0.3 if slot in FAINT and len(entries) > 1 else 1
            axes.plot(*ends, color=COLOURS[kinds[slot]], lw=4 * share, alpha=shade)
    axes.text(0.08, TOP + 1.95, title, fontsize=20, weight="bold")
    axes.text(4, TOP + 1.1, "8 slots", fontsize=16, ha="center")
    axes.text(12, TOP + 1.1, "8 new entries", fontsize=16, ha="center")
    axes.text(8.4, BOTTOM + SIZE / 2, below, fontsize=16, va="center", color="#333333")
    axes.set_xlim(-0.1, 16.1)
    axes.set_ylim(-0.2, TOP + 2.7)
    axes.set_axis_off()


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=plain).parse_args()
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    mixed = "a merged slot: a weighted\nmean of many entries"
    chosen = "a merged slot:\none entry"
    draw_compression(panels[0], LOCOCO, LOCOCO_PARTS, "LoCoCo mixes", mixed)
    draw_compression(panels[1], OURS, OURS_PARTS, "Ours chooses", chosen)
    labels = {"heavy": "heavy: most attended", "merged": "merged: learned",
              "recent": "recent: the last ones"}
    boxes = [Rectangle((0, 0), 1, 1, facecolor=COLOURS[kind]) for kind in labels]
    look = dict(ncols=3, fontsize=16, frameon=False, handlelength=1)
    figure.legend(boxes, labels.values(), loc="outside lower center", **look)
    write_whole(FILE, partial(figure.savefig, dpi=100, facecolor="white", format="png"))
    print(FILE)


if __name__ == "__main__":
    run_program(main)
