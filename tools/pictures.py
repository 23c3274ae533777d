"""Draw the pictures of README.md and docs/, all or those that are named. Run it in the
repository's root.

    pip install matplotlib                    # nothing else needs it
    python tools/pictures.py mechanism        # assets/mechanism.png
    python tools/pictures.py result           # assets/result.png, from docs/results.jsonl
    python tools/pictures.py curve            # assets/curve.png, from docs/results.jsonl
    python tools/pictures.py needle           # assets/needle.png, from docs/needle.json
    python tools/pictures.py heads            # assets/heads.png, with the model in SmolLM2-135M/
    python tools/pictures.py memory           # from the embedded adapter

mechanism: one compression, as LoCoCo makes it and with a learned score.
result: the loss of memories of many sizes above that of full attention, on a frozen SmolLM2,
    and the facts that they find, from docs/needle*.json.
curve: the loss of LoCoCo's code by tokens trained, in float32 or bfloat16.
needle: which facts each memory finds again, by their depth in texts of several lengths.
heads: which heads need more slots, for prose and for facts, and which find a fact.
memory: what three memories have of assets/prompt.txt at the end, as Chromium shows it, and
    the page itself, assets/memory.html.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tables
from generate import prefill
from lococo import attention_weights
from model import KVCache, LlamaConfig, load_base
from support.command_line import HERE, TINY, PlainParser, end_with, run_program
from support.files import UserError, read_json, write_whole

try:
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle
    from PIL import Image
except ImportError:
    end_with("it needs one more package: pip install matplotlib")


def write_picture(file: Path, figure: pyplot.Figure) -> None:
    write_whole(file, partial(figure.savefig, dpi=100, facecolor="white", format="png"))


# --- One compression, as the paper makes it and with a learned score ------------------------

KIND_COLOURS = {"heavy": "#009e73", "merged": "#e69f00", "recent": "#0072b2", "new": "white"}
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
KEPT = ["heavy"] * 5 + ["recent"] * 3
KEPT_PARTS = {slot: {entry: 1} for slot, entry in enumerate((0, 2, 3, 9, 11, 13, 14, 15))}


def draw_entries(axes, kinds: list[str], height: float) -> None:
    for n, kind in enumerate(kinds):
        colours = dict(facecolor=KIND_COLOURS[kind], edgecolor="#333333")
        axes.add_patch(Rectangle((n + 0.08, height), SIZE, SIZE, **colours))


def draw_compression(axes, kinds: list[str], parts: dict, title: str, below: str) -> None:
    draw_entries(axes, [*kinds, *["new"] * 8], TOP)
    draw_entries(axes, kinds, BOTTOM)
    for slot, entries in parts.items():
        for entry, share in entries.items():
            ends = (entry + 0.5, slot + 0.5), (TOP - 0.06, BOTTOM + SIZE + 0.06)
            shade = 0.3 if slot in FAINT and len(entries) > 1 else 1
            axes.plot(*ends, color=KIND_COLOURS[kinds[slot]], lw=4 * share, alpha=shade)
    axes.text(0.08, TOP + 1.95, title, fontsize=20, weight="bold")
    axes.text(4, TOP + 1.1, "8 slots", fontsize=16, ha="center")
    axes.text(12, TOP + 1.1, "8 new entries", fontsize=16, ha="center")
    axes.text(8.4, BOTTOM + SIZE / 2, below, fontsize=16, va="center", color="#333333")
    axes.set_xlim(-0.1, 16.1)
    axes.set_ylim(-0.2, TOP + 2.7)
    axes.set_axis_off()


def draw_mechanism(file: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    mixed = "merged slots: weighted\nmeans of many entries"
    chosen = "heavy slots: entries that\nwill be attended to"
    draw_compression(panels[0], LOCOCO, LOCOCO_PARTS, "LoCoCo mixes entries", mixed)
    draw_compression(panels[1], KEPT, KEPT_PARTS, "A learned score chooses them", chosen)
    labels = {"heavy": "heavy: the highest scores", "merged": "merged: a mixture",
              "recent": "recent: the last ones"}
    boxes = [Rectangle((0, 0), 1, 1, facecolor=KIND_COLOURS[kind]) for kind in labels]
    look = dict(ncols=3, fontsize=16, frameon=False, handlelength=1)
    figure.legend(boxes, labels.values(), loc="outside lower center", **look)
    write_picture(file, figure)


# --- The result -------------------------------------------------------------------------

LOOKS = {  # of memories: label, colour, and mark; all can tell the colours apart
    "streaming": ("window", "#333333", "x"),
    "h2o": ("H2O", "#999999", "s"),
    "h2o @ 512 + 512": ("H2O, M = T = 512", "#999999", "^"),
    "lococo-code-0.02, trained @ 512 + 512": ("LoCoCo's code, M = T = 512", "#e69f00", "D"),
    "h2o+forget, budgets": ("H2O that forgets, with budgets", "#0072b2", "o"),
    tables.BUDGETS_33: ("the same in 8 bits", "#0072b2", "P"),
    "learned, budgets": ("a learned score, with budgets", "#d55e00", "o"),
    "learned, budgets, 8 bits": ("the same in 8 or 4 bits", "#d55e00", "*"),
}
# Rows that look as others: the same in fewer bits.
LOOK_AS = {
    tables.WINDOW_33: "streaming",
    tables.H2O_33: "h2o",
    "learned, budgets, 4 bits": "learned, budgets, 8 bits",
    tables.LEARNED_33: "learned, budgets, 8 bits",
}
# Labels beside points, and where they stand, in points of the font.
BESIDE = {"learned, budgets, 8 bits": ("8 bits", (0, 9)),
          "learned, budgets, 4 bits": ("4 bits", (0, 9))}
SHOWN = (*LOOKS, *LOOK_AS)
CURVES = ("h2o+forget, budgets", "learned, budgets")
ALONG = ("384 + 128", tables.OWN, tables.RECOMMENDED)  # M + T, which a curve joins
CURVE_ROWS = {row: [tables.in_size(row, sizes) for sizes in ALONG] for row in CURVES}


def stored() -> list[dict]:
    """The cells of docs/results.jsonl that are drawn."""
    about = {"model": "SmolLM2-135M", "dtype": "float32"}
    return [cell for cell in tables.stored_cells() if about.items() <= cell.items()]


def points() -> dict[str, tuple[float, float]]:
    """By row the MB that a memory holds, and its nats per token above full attention."""
    rows = dict.fromkeys(["full", *LOOKS, *LOOK_AS, *sum(CURVE_ROWS.values(), [])])
    lines = tables.lines_of(replace(tables.SMALL_SEGMENTS, rows=tuple(rows)), stored())
    zero = lines["full"].mean()
    return {row: (line.megabytes(), line.mean() - zero) for row, line in lines.items()}


def draw_points(axes, places: dict[str, tuple[float, float]]) -> None:
    """Memories by MB (log) and another figure."""
    for row, at in reversed(places.items()):
        _, colour, mark = LOOKS[LOOK_AS.get(row, row)]
        axes.plot(*at, mark, color=colour, markersize=12 if mark == "*" else 6, zorder=3)
        if row in BESIDE:
            label, beside = BESIDE[row]
            axes.annotate(label, at, beside, textcoords="offset points", ha="center")
    axes.set_xscale("log")
    axes.set_xticks([10, 20, 40, 80], ["10", "20", "40", "80"])
    axes.minorticks_off()
    axes.set_xlim(8, 120)
    axes.set_xlabel("MB that a memory holds (the full cache: 377 MB)")
    axes.spines[["top", "right"]].set_visible(False)


def draw_losses(axes, places: dict) -> None:
    for row, of_curve in CURVE_ROWS.items():
        curve = [places[key] for key in of_curve]
        axes.plot(*np.array(curve).T, "-", color=LOOKS[row][1])
    draw_points(axes, {row: at for row, at in places.items() if row in SHOWN})
    axes.axhline(0, color="#333333", lw=0.8)
    axes.set_ylim(-0.014, 0.065)
    axes.set_ylabel("nats per token above full attention")
    axes.set_title("With budgets an eighth of the bytes adds little loss", loc="left")


def draw_facts(axes, places: dict) -> None:
    """The share of lines that are found in texts of 8,192 tokens."""
    found = {row: tables.share_found(row, tables.SMALL_SEGMENTS) for row in places}
    shares = {row: 100 * share[0] for row, share in found.items() if share}
    full = shares.pop("full")
    axes.axhline(full, color="#333333", lw=0.8)
    axes.annotate("full cache", (8.5, full + 1))
    shown = [row for row in shares if row in SHOWN]
    draw_points(axes, {row: (places[row][0], shares[row]) for row in shown})
    axes.set_ylim(0, 70)
    axes.set_ylabel("facts found in 8,192 tokens, %")
    axes.set_title("A learned score finds nearly as many facts", loc="left")


def draw_result(file: Path) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    places = points()
    draw_losses(panels[0], places)
    draw_facts(panels[1], places)
    marks = [Line2D([], [], color=colour, marker=mark, ls="", ms=12 if mark == "*" else 6)
             for _, colour, mark in LOOKS.values()]
    labels = [label for label, _, _ in LOOKS.values()]
    sizes_of = "M = 896 and T = 128 if not said; at 33 MB 8 bits, M = 1,792 and T = 256"
    curves = "Curves join M + T = 384 + 128, 896 + 128 and 1,792 + 256 in float32"
    look = dict(ncols=3, frameon=False, title=f"{sizes_of}\n{curves}")
    figure.legend(marks, labels, loc="outside lower center", **look)
    write_picture(file, figure)


# --- Learning curves --------------------------------------------------------------------

LEVELS = {  # what needs no training
    "h2o-code": ("H2O in LoCoCo's code", ":"),
    "h2o": ("H2O", "--"),
    "h2o+forget": ("H2O that forgets", "-"),
}


PANELS = {  # title: table
    "512 slots: a novel and articles": "long",
    "64 slots: the choosing novel": "novel",
    "64 slots: articles": "articles",
}

# A label, a colour and a mark, and rows of both sizes. The cell of "on" is stored alone: its run
# went on after its end, and the rate rose to 0.025 and fell again.
TRAINED = {
    ("the paper's lococo+h2o (64 slots: smaller weights)", "#009e73", "^"): (
        "lococo+h2o", "lococo+h2o-0.02, batch 1, bfloat16",
    ),
    ("LoCoCo's code as published", "#0072b2", "s"): (
        "lococo-code", "lococo-code, bfloat16", "lococo-code, batch 1, bfloat16",
    ),
    ("the same with smaller weights", "#e69f00", "o"): (
        "lococo-code-0.02", "lococo-code-0.02, on", "lococo-code-0.02, batch 1",
        "lococo-code-0.02, batch 1, bfloat16",
    ),
    ("the same with a gate that starts at 0", "#cc79a7", "v"): ("lococo-code-closed, batch 1, bfloat16",),
}


def draw_trained(axes, cells: list[dict]) -> None:
    """The loss of one table's cells by tokens trained. A line joins the first seeds."""
    for (label, colour, mark), rows in TRAINED.items():
        trained = {}  # by tokens, the loss of each seed
        for cell in cells:
            if cell["steps"] and cell["row"] in rows:
                nats = float(np.mean(cell["by document"]))
                trained.setdefault(tables.tokens_of(cell), []).append(nats)
        first = {tokens: losses[0] for tokens, losses in sorted(trained.items())}
        axes.plot(first.keys(), first.values(), f"{mark}-", color=colour, label=label)
        for tokens, losses in trained.items():  # a mark for each seed
            axes.plot([tokens] * len(losses), losses, mark, color=colour)


def draw_curve(file: Path) -> None:
    """What training gains, from docs/results.jsonl."""
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    cells = stored()
    for axes, (title, name) in zip(panels, PANELS.items()):
        table = replace(tables.TABLES[name], rows=(*LEVELS,))
        for row, line in tables.lines_of(table, cells).items():
            label, look = LEVELS[row]
            axes.axhline(line.mean(), ls=look, color="#333333", lw=1, label=label)
        common = {"part": table.part, "mem": table.mem}
        draw_trained(axes, [cell for cell in cells if common.items() <= cell.items()])
        axes.set_xscale("log")
        ticks = [50_000, 100_000, 200_000, 500_000, 1_000_000]
        axes.set_xticks(ticks, [f"{tokens:,}" for tokens in ticks])
        axes.minorticks_off()
        axes.set_xlabel("tokens trained")
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("nats per token")
    seen = "As published, LoCoCo's code passes H2O when it trains on more tokens"
    figure.suptitle(seen, x=0.01, ha="left")
    names, labels = panels[0].get_legend_handles_labels()
    figure.legend(names, labels, loc="outside lower center", ncols=4, frameon=False)
    write_picture(file, figure)


# --- Needles ----------------------------------------------------------------------------

NEEDLES = {  # what is drawn of docs/needle.json, by row
    "full": "full cache",
    "streaming": "window",
    "h2o": "H2O",
    "h2o+forget, budgets": "H2O that forgets,\nwith budgets",
    "learned, budgets": "a learned score",
}


def draw_needle(file: Path) -> None:
    """From docs/needle.json: a panel for each memory, with a row for each length and a column
    for each depth."""
    panels = read_json(HERE / "docs" / "needle.json")["found"]
    found = {}
    for row, title in NEEDLES.items():
        [name] = tables.panels_of(row, tables.SMALL_SEGMENTS)
        found[title] = panels[name]
    size = dict(figsize=(2.6 * len(found), 2.6), layout="constrained", sharey=True)
    figure, [places] = pyplot.subplots(1, len(found), squeeze=False, **size)
    for axes, (title, shares) in zip(places, found.items()):
        grid = np.array([*shares.values()], dtype=float)  # null becomes NaN
        picture = axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(title)
        axes.set_xticks([0, len(grid[0]) - 1], ["first", "last"])
        axes.set_yticks(range(len(shares)), [f"{int(L):,}" for L in shares])
        axes.set_xlabel("where the fact is")
    places[0].set_ylabel("tokens of the text")
    figure.colorbar(picture, ax=places, label="share found")
    seen = "A learned score finds facts where the full cache does, H2O only the last ones"
    figure.suptitle(seen, x=0.01, ha="left")
    write_picture(file, figure)


# --- Heads --------------------------------------------------------------------------------


class LastReads(KVCache):
    """The full cache. `shares` has for each layer what the last token reads: the attention of
    its query heads to all entries, (G, H/G, S)."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.shares = {}

    def read(self, layer: int, q: Tensor) -> Tensor:
        self.shares[layer] = attention_weights(q[:, :, -1:], self.keys[layer].held)[0]
        return super().read(layer, q)


def attention_to_the_fact(directory: Path) -> np.ndarray:
    """The share of its attention that the question at the end of assets/shakespeare.txt pays to
    the line with the answer, by layer and key/value head: the largest of the query heads."""
    model, tokenizer = load_base(directory)
    ids = tokenizer.encode((HERE / "assets" / "shakespeare.txt").read_text().rstrip("\n"))
    question = tokenizer.continued("@ vault code =")
    starts = [n for n in range(len(ids)) if ids[n : n + len(question)] == question]
    cache = LastReads(model.config)
    prefill(model, torch.tensor([ids]), cache, 512)
    line = slice(starts[0], starts[0] + len(question) + 1)  # and ` copper`
    found = [cache.shares[layer][..., line].sum(dim=-1).amax(dim=1) for layer in cache.shares]
    return torch.stack(found).numpy()


def draw_heads(file: Path) -> None:
    """How much each key/value head of SmolLM2 needs more slots, as a share of all needs, and
    what it reads where a fact is asked for."""
    folder = HERE / "adapters" / "smollm2-135m"
    maps = {}
    for what, name in {"prose": "budgets.json", "facts": "budgets-facts.json"}.items():
        needs = np.array(read_json(folder / name)["needs"]).clip(min=0)
        maps[f"need of slots for {what}, % of all"] = 100 * needs / needs.sum()
    maps["attention of a question to the fact, %"] = 100 * attention_to_the_fact(HERE / "SmolLM2-135M")
    figure, panels = pyplot.subplots(3, 1, figsize=(9, 5), layout="constrained", sharex=True)
    for axes, (what, shares) in zip(panels, maps.items()):
        most = 100 if "attention" in what else 40
        picture = axes.imshow(shares.T, cmap="Blues", vmin=0, vmax=most, aspect="auto")
        axes.set_yticks(range(shares.shape[1]))
        axes.set_ylabel("head")
        axes.set_title(what, loc="left", fontsize=11)
        figure.colorbar(picture, ax=axes, pad=0.01)
    panels[-1].set_xlabel("layer")
    figure.suptitle("Few of 90 heads need more slots. Most of them find the fact, 5,200 tokens back",
                    x=0.01, ha="left")
    write_picture(file, figure)


# --- A page of the memory ---------------------------------------------------------------


def draw_memory(file: Path) -> None:
    """A page of three memories at its last compression, where ` socket` has the light."""
    browser = shutil.which("chromium")
    if not browser:
        remedy = "Debian's package has this name"
        raise UserError(f"{file}: chromium is not installed; {remedy}")
    words = ["--prompt", str(HERE / "assets" / "prompt.txt"), "--adapter", str(TINY)]
    words += ["--method", "streaming", "h2o"]
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--window-size=1050,1220"]
    flags += ["--virtual-time-budget=2000"]  # milliseconds that the page is given
    flags += ["--no-sandbox"] * (os.geteuid() == 0)  # with a sandbox it refuses root
    with TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        program = [sys.executable, str(HERE / "tools" / "show_memory.py"), *words]
        subprocess.run([*program, "--page", str(page)], check=True)
        shutil.copyfile(page, file.with_suffix(".html"))
        view = f"{page.as_uri()}#layer=1&head=0&token=72"
        command = [browser, *flags, f"--screenshot={picture}", view]
        subprocess.run(command, check=True, capture_output=True)
        drawn = Image.open(picture).convert("RGB")
        drawn = drawn.crop((0, 238, *drawn.size))  # the legend and the controls go
        small = drawn.quantize(256, Image.Quantize.MAXCOVERAGE)  # a third of its size
        write_whole(file, partial(small.save, format="png", optimize=True))


# --- The program ------------------------------------------------------------------------

DRAW = {
    "mechanism": draw_mechanism, "result": draw_result, "curve": draw_curve,
    "needle": draw_needle, "heads": draw_heads, "memory": draw_memory,
}


def main() -> None:
    parser = PlainParser(__doc__)
    parser.add_argument("pictures", nargs="*", metavar="PICTURE", help=", ".join(DRAW))
    for name in parser.parse_args().pictures or DRAW:
        tables.refuse_unknown(name, DRAW, "picture")
        file = HERE / "assets" / f"{name}.png"
        DRAW[name](file)
        print(file)


if __name__ == "__main__":
    run_program(main)
