"""Draw the pictures of README.md and docs/results.md, all or those that are named.

    pip install matplotlib                    # only the programs that draw need it
    python tools/pictures.py result           # assets/result.png, from docs/results.jsonl
    python tools/pictures.py needle           # assets/needle.png, from docs/needle.json
    python tools/pictures.py memory           # from the embedded adapter

result: the loss of each memory above that of full attention, on a frozen SmolLM2.
needle: which facts each memory finds again, by their depth in texts of several lengths.
memory: what three memories have of assets/prompt.txt at the end, as Chromium shows it.
"""

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib import pyplot
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tables
from support.command_line import HERE, TINY, run_program
from support.files import UserError, read_json, write_whole


def write_picture(file: Path, figure: pyplot.Figure) -> None:
    write_whole(file, partial(figure.savefig, dpi=100, facecolor="white", format="png"))


# --- The result -------------------------------------------------------------------------

LABELS = {
    "official code": "LoCoCo's code",
    "window": "window",
    "h2o text": "H2O",
    "h2o heads": "H2O that forgets, with budgets",
    "ours heads": "ours with budgets",
}
BASELINE, OURS = "#999999", "#d55e00"  # all can tell them apart
COLOURS = {"ours heads": OURS}


def losses_above_full(dtype: str) -> dict[str, float]:
    """By row, in nats per token."""
    about = {"model": "SmolLM2-135M", "dtype": dtype}
    cells = [cell for cell in tables.stored_cells() if about.items() <= cell.items()]
    table = tables.TABLES["long"]
    lines = tables.lines_of(table, cells)
    above = {}
    for row in LABELS:
        for needed in (row, "full"):
            if needed not in lines:
                remedy = "make it with tools/tables.py, or give another --dtype"
                raise UserError(f"--dtype {dtype}: no cell of {needed!r} is stored; {remedy}")
        above[row] = lines[row].mean() - lines["full"].mean()
    return above


def draw_result(dtype: str, file: Path) -> None:
    above = losses_above_full(dtype)
    figure, axes = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    for row, nats in above.items():
        axes.barh(LABELS[row], nats, color=COLOURS.get(row, BASELINE), height=0.65)
        axes.text(nats, LABELS[row], f" {nats:.3f}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(above.values()))
    axes.set_xlabel("nats per token above full attention (less is better)")
    axes.set_title("SmolLM2-135M, frozen: 512 slots, 8,192 tokens", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    write_picture(file, figure)


# --- Needles ----------------------------------------------------------------------------


# Of methods without training; what is none of them is an adapter.
NAMES = {
    "full": "full cache",
    "streaming": "window",
    "h2o": "H2O",
    "h2o+forget": "H2O that forgets",
}


def draw_needle(figures: Path, file: Path) -> None:
    """From the file of tools/needle.py: a panel for each memory, with a row for each length
    and a column for each depth."""
    found = read_json(figures)["found"]
    found = dict(sorted(found.items(), key=lambda panel: not panel[0].startswith("base")))
    panels, places = pyplot.subplots(
        1, len(found), figsize=(2.6 * len(found), 2.6), layout="constrained", sharey=True
    )
    for axes, (name, shares) in zip(places, found.items()):
        grid = list(shares.values())
        picture = axes.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        method = name.removeprefix("base, ").split()[0]
        budgets = ", with budgets" if name.endswith(" budgets") else ""
        axes.set_title(NAMES.get(method, "ours") + budgets)
        axes.set_xticks([0, len(grid[0]) - 1], ["first", "last"])
        axes.set_yticks(range(len(shares)), [f"{int(L):,}" for L in shares])
        axes.set_xlabel("where the fact is")
    places[0].set_ylabel("tokens of the text")
    panels.colorbar(picture, ax=places, label="share found")
    write_picture(file, panels)


# --- A page of the memory ---------------------------------------------------------------


def draw_memory(run: Path, file: Path) -> None:
    """A page of three memories at its last compression, where ` socket` has the light."""
    browser = shutil.which("chromium")
    if not browser:
        remedy = "Debian's package has this name"
        raise UserError(f"{file}: chromium is not installed; {remedy}")
    words = ["--prompt", str(HERE / "assets" / "prompt.txt"), "--adapter", str(run)]
    words += ["--method", "streaming", "h2o", "--positions", "slots"]
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars"]
    flags += ["--window-size=1050,1330"]
    flags += ["--virtual-time-budget=2000"]  # milliseconds that the page is given
    flags += ["--no-sandbox"] * (os.geteuid() == 0)  # with a sandbox it refuses root
    with TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        program = [sys.executable, str(HERE / "generate.py"), *words]
        subprocess.run([*program, "--show-memory", str(page)], check=True)
        view = f"{page.as_uri()}#compression=17&layer=1&head=0&token=72"
        command = [browser, *flags, f"--screenshot={picture}", view]
        subprocess.run(command, check=True, capture_output=True)
        drawn = Image.open(picture).convert("RGB")
        drawn = drawn.crop((0, 335, *drawn.size))  # the legend and the controls go
        small = drawn.quantize(256, Image.Quantize.MAXCOVERAGE)  # a third of its size
        write_whole(file, partial(small.save, format="png", optimize=True))


# --- The program ------------------------------------------------------------------------

DRAWN = ("result", "needle", "memory")


def main() -> None:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("pictures", nargs="*", metavar="PICTURE", help=", ".join(DRAWN))
    add("--adapter", type=Path, default=TINY, help="a run (default: tiny/)")
    add("--figures", type=Path, default=HERE / "docs" / "needle.json",
        help="of the needles (default: docs/needle.json)")
    add("--dtype", default="float32", help="of the result's cells (default: float32)")
    add("--out", type=Path, default=HERE / "assets", help="a folder (default: assets/)")
    flags = parser.parse_args()
    for name in flags.pictures or DRAWN:
        tables.refuse_unknown(name, DRAWN, "picture")
        file = flags.out / f"{name}.png"
        if name == "result":
            draw_result(flags.dtype, file)
        elif name == "needle":
            draw_needle(flags.figures, file)
        else:
            draw_memory(flags.adapter, file)
        print(file)


if __name__ == "__main__":
    run_program(main)
