"""Draw assets/mechanism.png: one compression, from a full cache back to M slots.

    pip install matplotlib          # only the programs that draw need it
    python tools/mechanism.py
"""

import sys
from functools import partial
from pathlib import Path

from matplotlib import pyplot
from matplotlib.patches import FancyArrowPatch, Rectangle

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.command_line import run_program  # noqa: E402
from support.files import write_whole  # noqa: E402

FILE = Path(__file__).resolve().parent.parent / "assets" / "mechanism.png"
COLOURS = {"heavy": "#009e73", "merged": "#e69f00", "recent": "#0072b2"}  # as memory_page.html
MEMORY = ["heavy", "heavy", "heavy", "merged", "merged", "recent", "recent", "recent"]
SEGMENT = 8  # new tokens; the picture has M = T = 8
KEPT = {0: 0, 2: 1, 9: 2, 13: 5, 14: 6, 15: 7}  # entry of the full cache: the slot that keeps it
# Slot: entries, and how much of them. A merged slot may take from every entry that is not kept.
MIXED = {3: [(1, 0.7), (3, 0.5), (4, 0.9), (6, 0.3), (8, 0.6), (10, 0.25)],
         4: [(4, 0.25), (5, 0.4), (7, 0.6), (8, 0.3), (10, 0.9), (11, 0.4), (12, 0.8)]}  # fmt: skip
TOP, BOTTOM = 3.0, 0.0  # heights of the two rows of entries


def draw_entries(axes, colours: list[str], height: float) -> None:
    for n, colour in enumerate(colours):
        place = (n + 0.08, height)
        box = Rectangle(place, 0.84, 0.62, facecolor=colour, edgecolor="#333333", lw=0.8)
        axes.add_patch(box)


def draw_arrow(axes, entry: int, slot: int, colour: str, width: float) -> None:
    start, end = (entry + 0.5, TOP - 0.04), (slot + 0.5, BOTTOM + 0.68)
    arrow = FancyArrowPatch(start, end, arrowstyle="-", color=colour, lw=width, alpha=0.8)
    axes.add_patch(arrow)


def main() -> None:
    figure, axes = pyplot.subplots(figsize=(10, 3.9), layout="constrained")
    before = [COLOURS[kind] for kind in MEMORY] + ["white"] * SEGMENT
    draw_entries(axes, before, TOP)
    draw_entries(axes, [COLOURS[kind] for kind in MEMORY], BOTTOM)
    for slot, parts in MIXED.items():
        for entry, share in parts:
            draw_arrow(axes, entry, slot, COLOURS["merged"], 3.2 * share)
    for entry, slot in KEPT.items():
        draw_arrow(axes, entry, slot, COLOURS[MEMORY[slot]], 2.2)
    text = dict(ha="center", va="bottom", fontsize=11)
    aside = dict(ha="left", va="center")
    axes.text(4, TOP + 0.75, "memory: M slots", **text)
    axes.text(12, TOP + 0.75, "segment: T new tokens", **text)
    axes.text(16.5, TOP + 0.31, "keys and values that one\nlayer attends to", **text | aside)
    axes.text(16.5, 1.85, "K' = w K,  V' = w V", **text | aside | {"fontsize": 13})
    axes.text(16.5, 1.25, "each merged slot is a row of w", **text | aside)
    axes.text(8.5, BOTTOM + 0.31, "memory of the next segment: M slots", va="center", fontsize=11)
    labels = {"heavy": "kept: most attended", "merged": "merged: the convolution mixes the rest",
              "recent": "kept: the last tokens"}  # fmt: skip
    for n, (kind, label) in enumerate(labels.items()):
        place = (0, 5.6, 14.2)[n]
        axes.add_patch(Rectangle((place, -1.05), 0.5, 0.42, facecolor=COLOURS[kind]))
        axes.text(place + 0.7, -0.84, label, va="center", fontsize=11)
    axes.set_xlim(-0.2, 22.5)
    axes.set_ylim(-1.2, TOP + 1.3)
    axes.set_axis_off()
    axes.set_title("ours: one compression of lococo+h2o+recent", loc="left", fontsize=12)
    write_whole(FILE, partial(figure.savefig, dpi=100, format="png"))
    print(FILE)


if __name__ == "__main__":
    run_program(main)
