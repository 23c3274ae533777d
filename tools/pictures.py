"""Draw the pictures of README.md and docs/results.md, all or those that are named.

    pip install matplotlib                    # only the programs that draw need it
    python tools/pictures.py result           # assets/result.png, from docs/results.jsonl
    python tools/pictures.py recall memory    # from the embedded adapter

result: the loss of each memory above that of full attention, on a frozen SmolLM2.
recall, left: the share of facts recalled, by how long ago they were told. Right: where
the word of the fact in assets/prompt.txt is, compression after compression.
needle: which facts each memory finds again, from docs/needle.json.
memory: what three memories have of this text at the end, as Chromium shows it.
"""

import argparse
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from matplotlib import pyplot
from PIL import Image
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import tables  # noqa: E402
from eval_ppl import ranges, token_losses  # noqa: E402
from generate import prefill  # noqa: E402
from lococo import AdaptedLlama  # noqa: E402
from model import load_base  # noqa: E402
from support.programs.adapter import load_adapter  # noqa: E402
from support.command_line import HERE, TINY, prepare, run_program  # noqa: E402
from support.facts import tell_all  # noqa: E402
from support.files import UserError, read_json, read_text, write_whole  # noqa: E402
from support.programs.settings import untrained  # noqa: E402
from support.text import long_documents, token_streams  # noqa: E402
from support.programs.tracing import TracedMemory  # noqa: E402


def write_picture(file: Path, figure: pyplot.Figure) -> None:
    write_whole(file, partial(figure.savefig, dpi=100, facecolor="white", format="png"))


# --- The result -------------------------------------------------------------------------

LABELS = {
    "window": "window",
    "h2o": "H2O",
    "ours": "ours, trained",
    "ours budgets": "ours with budgets of layers, trained",
}
BASELINE, OURS = "#999999", "#d55e00"  # all can tell them apart
COLOURS = {"ours": OURS, "ours budgets": OURS}


def losses_above_full(dtype: str) -> dict[str, tuple[float, float]]:
    """By row the mean and the standard error over documents, in nats per token."""
    about = {"model": "SmolLM2-135M", "dtype": dtype}
    cells = [cell for cell in tables.stored_cells() if about.items() <= cell.items()]
    table = tables.TABLES["frozen, ours"]
    lines = tables.lines_of(table, cells)
    above = {}
    for row in LABELS:
        here = lines.get((row, table.steps)) or lines.get((row, 0))
        full = lines.get(("full", 0))
        if not here or not full:
            none = f"no cell of {row if full else 'full'!r} is stored"
            remedy = "make it with tools/tables.py, or give another --dtype"
            raise UserError(f"--dtype {dtype}: {none}; {remedy}")
        mean, error = tables.difference(here, full).split(" ± ")
        above[row] = float(mean), float(error)
    return above


def draw_result(dtype: str, file: Path) -> None:
    above = losses_above_full(dtype)
    figure, axes = pyplot.subplots(figsize=(9, 2.6), layout="constrained")
    for row, (mean, error) in above.items():
        colour = COLOURS.get(row, BASELINE)
        axes.barh(LABELS[row], mean, xerr=error, color=colour, height=0.65, capsize=3)
        axes.text(mean + error + 0.005, LABELS[row], f"{mean:.3f}", va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2 * max(mean for mean, _ in above.values()))
    axes.set_xlabel("nats per token above full attention (less is better)")
    axes.set_title("SmolLM2-135M, frozen: 64 slots, 1,024 tokens", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    write_picture(file, figure)


# --- Recall -----------------------------------------------------------------------------


class Following(TracedMemory):
    """Remembers for each layer, after each compression, how much of token `word` is in
    each slot of its heads, (G, M)."""

    def __init__(self, *args, word: int, layers: range):
        super().__init__(*args, layers=layers)
        self.word = word
        self.path = {layer: [] for layer in layers}

    def follow(self, layer: int, matrix: Tensor) -> None:
        super().follow(layer, matrix)
        self.path[layer].append(self.shares[layer][:, :, self.word].clone())


def path_of(adapted: AdaptedLlama, ids: list[int], word: int) -> tuple[Tensor, int, int]:
    """In the layer and head that hold most of token `word` at the end: how much of it is
    in each slot after each compression, (compressions, M)."""
    layers = range(adapted.model.config.n_layers)
    memory = adapted.cache(partial(Following, word=word, layers=layers))
    prefill(adapted.model, torch.tensor([ids]), memory, adapted.settings.segment)
    paths = {}
    for layer, path in memory.path.items():
        for head, slots in enumerate(torch.stack(path, dim=1)):  # (compressions, M)
            paths[layer, head] = slots
    best = max(paths, key=lambda key: paths[key][-1].max())
    return paths[best], *best


def recall_by_distance(run: Path) -> tuple[list[str], dict[str, list[float]]]:
    """The distances, and the recall of the full cache, a window, H2O and a run."""
    machine = prepare("cpu", "float32")
    model, tokenizer = load_base(TINY, machine.dtype, machine.device)
    documents = long_documents(
        token_streams([], tokenizer)["held-out"], tokenizer.bos, 2048, 64
    )
    told, ago = tell_all(documents, "held-out", tokenizer)
    s = load_adapter(run, load_base(TINY)[0]).settings
    masks = ranges("", ago, s.capacity)
    made = {"full cache, untuned": untrained(model, "full", s.mem, 512)}
    for name, method in (("window", "streaming"), ("H2O", "h2o")):
        adapted = untrained(model, method, s.mem, s.segment, positions="slots")
        made[f"{name}, {s.mem} slots, untuned"] = adapted
    made[f"ours, {s.mem} slots"] = load_adapter(run, load_base(TINY)[0])
    lines = {}
    for name, adapted in made.items():
        _, hits, _ = token_losses(adapted, told, machine, 8)
        lines[name] = [hits[mask].double().mean().item() for mask in masks.values()]
    return list(masks), lines


def draw_recall(run: Path, file: Path) -> None:
    model, tokenizer = load_base(TINY)
    adapted = load_adapter(run, model)
    ids = tokenizer.encode(read_text(HERE / "assets" / "prompt.txt"))
    word = ids.index(tokenizer.encode("x\n@")[-1]) + 4  # of the first fact
    path, layer, head = path_of(adapted, ids, word)
    kinds, lines = recall_by_distance(run)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for (name, values), marker in zip(lines.items(), "osv^"):
        left.plot(kinds, values, marker=marker, label=name)
    left.set_ylim(-0.03, 1.03)
    left.set_xlabel("tokens since the fact was last told")
    left.set_ylabel("share recalled exactly")
    left.legend(fontsize=9, loc=(0.45, 0.2))
    compressions, slots = path.shape
    place = (0.5, compressions + 0.5, slots - 0.5, -0.5)  # compressions count from 1
    picture = right.imshow(path.T, cmap="Blues", vmin=0, vmax=1, aspect="auto",
                           interpolation="nearest", extent=place)  # fmt: skip
    right.set_xlabel("compression")
    right.set_ylabel("slot")
    title = f"ours: share of the fact's word, layer {layer}, head {head}"
    right.set_title(title, loc="left", fontsize=10)
    figure.colorbar(picture, ax=right)
    write_picture(file, figure)


# --- Needles ----------------------------------------------------------------------------


def draw_needle(figures: Path, file: Path) -> None:
    """From the file of tools/needle.py: a panel for each memory, with a row for each length
    and a column for each depth."""
    found = read_json(figures)["found"]
    panels, places = pyplot.subplots(
        1, len(found), figsize=(3.2 * len(found), 2.6), layout="constrained", sharey=True
    )
    for axes, (name, shares) in zip(places, found.items()):
        grid = list(shares.values())
        picture = axes.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        axes.set_title(name, fontsize=9)
        axes.set_xticks([0, len(grid[0]) - 1], ["first", "last"])
        axes.set_yticks(range(len(shares)), [f"{int(L):,}" for L in shares])
        axes.set_xlabel("where the fact is")
    places[0].set_ylabel("tokens of the text")
    panels.colorbar(picture, ax=places, label="found")
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
    flags += ["--window-size=1400,1290"]
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
        small = drawn.quantize(256, Image.Quantize.MAXCOVERAGE)  # a third of its size
        write_whole(file, partial(small.save, format="png", optimize=True))


# --- The program ------------------------------------------------------------------------

DRAWN = ("result", "recall", "needle", "memory")


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
        elif name == "recall":
            draw_recall(flags.adapter, file)
        elif name == "needle":
            draw_needle(flags.figures, file)
        else:
            draw_memory(flags.adapter, file)
        print(file)


if __name__ == "__main__":
    run_program(main)
