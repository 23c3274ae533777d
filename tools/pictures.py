"""Draw our memory for facts (docs/facts.md): assets/mixing.png, recall.png and memory.png.

    pip install matplotlib                    # only this script needs it
    python tools/pictures.py                  # the embedded adapter
    python tools/pictures.py --tuned runs/window runs/h2o
    python tools/pictures.py --only-page      # memory.png; chromium must be installed

mixing.png: the mixing matrix of each layer at the last compression of a document. Row i says how
much of each entry slot i takes. What is kept has a one-hot row; the rows of merged slots come from
the convolution.
recall.png, left: the share of facts recalled, by how long ago they were told. Right: where the word
of the fact in assets/prompt.txt is, compression after compression.
memory.png: what three memories have of this text at the end, as Chromium shows it.
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
from eval_ppl import ranges, token_losses  # noqa: E402
from generate import TracedMemory, prefill  # noqa: E402
from lococo import (  # noqa: E402
    KINDS, AdaptedLlama, Memory, Settings, load_adapter, settings_for,
)  # fmt: skip
from model import load_base  # noqa: E402
from support.command_line import HERE, TINY, prepare, run_program  # noqa: E402
from support.facts import tell_all  # noqa: E402
from support.files import UserError, read_text, write_whole  # noqa: E402
from support.text import long_documents, token_streams  # noqa: E402


class Watched(Memory):
    """A memory that remembers the mixing matrix (M, S) of each layer's head 0 at its last
    compression."""

    def __init__(self, *args):
        super().__init__(*args)
        self.mixing = {}

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        arranged, w = super().compress(layer)
        self.mixing[layer] = self.mixing_matrix(layer, arranged, w)[0, 0]
        return arranged, w


class Following(TracedMemory):
    """Remembers for each layer, after each compression, how much of token `word` is in each slot
    of its heads, (G, M)."""

    def __init__(self, *args, word: int, layers: range):
        super().__init__(*args, layers=layers)
        self.word = word
        self.path = {layer: [] for layer in layers}

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        result = super().compress(layer)
        self.path[layer].append(self.shares[layer][:, :, self.word].clone())
        return result


def write_picture(file: Path, figure: pyplot.Figure) -> None:
    write_whole(file, partial(figure.savefig, dpi=100, facecolor="white", format="png"))


def draw_mixing(mixing: dict[int, Tensor], settings: Settings, file: Path) -> None:
    counts = {kind: getattr(settings, kind) for kind in KINDS if getattr(settings, kind)}
    ends = torch.tensor(list(counts.values())).cumsum(0).tolist()
    middles = [end - n / 2 - 0.5 for n, end in zip(counts.values(), ends)]
    rows = (len(mixing) + 1) // 2
    figure, panels = pyplot.subplots(rows, 2, figsize=(12, 2.8 * rows), layout="constrained")
    for (layer, W), axes in zip(mixing.items(), panels.flat):
        picture = axes.imshow(W, cmap="Blues", norm="log", vmin=1e-3, vmax=1, aspect="auto")
        axes.set_yticks(middles, [f"{n} {kind}" for kind, n in counts.items()])
        for end in ends[:-1]:
            axes.axhline(end - 0.5, color="#999999", linewidth=0.5)
        axes.axvline(settings.mem - 0.5, color="#d55e00", linewidth=1)
        axes.set_title(f"layer {layer}, head 0", loc="left", fontsize=10)
    about = f"ours ({settings.method}): {settings.mem} slots, then {settings.segment} new entries"
    figure.supxlabel(about, fontsize=10)
    figure.colorbar(picture, ax=panels, shrink=0.5, label="weight in the slot")
    write_picture(file, figure)


def draw_recall(lines: dict[str, list[float]], kinds: list[str], path: Tensor, layer: int,
                head: int, file: Path) -> None:  # fmt: skip
    """`lines`: recall of each method in each kind; `path` (compressions, M)."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for (name, values), marker in zip(lines.items(), "osv^Dx"):
        left.plot(kinds, values, marker=marker, label=name)
    left.set_ylim(-0.03, 1.03)
    left.set_xlabel("tokens since the fact was last told")
    left.set_ylabel("share recalled exactly")
    left.legend(fontsize=9, loc=(0.45, 0.2))
    compressions, slots = path.shape
    place = (0.5, compressions + 0.5, slots - 0.5, -0.5)  # the first compression is number 1
    picture = right.imshow(path.T, cmap="Blues", vmin=0, vmax=1, aspect="auto",
                           interpolation="nearest", extent=place)  # fmt: skip
    right.set_xlabel("compression")
    right.set_ylabel("slot")
    title = f"ours: share of the fact's word, layer {layer}, head {head}"
    right.set_title(title, loc="left", fontsize=10)
    figure.colorbar(picture, ax=right)
    write_picture(file, figure)


def follow(adapted: AdaptedLlama, ids: list[int], word: int) -> tuple[Tensor, int, int]:
    """In the layer and head that hold most of token `word` at the end: how much of it is in each
    slot after each compression, (compressions, M)."""
    layers = range(adapted.model.config.n_layers)
    memory = adapted.cache(partial(Following, word=word, layers=layers))
    prefill(adapted.model, torch.tensor([ids]), memory, adapted.settings.segment)
    paths = {}
    for layer, path in memory.path.items():
        for head, slots in enumerate(torch.stack(path, dim=1)):  # (compressions, M)
            paths[layer, head] = slots
    best = max(paths, key=lambda key: paths[key][-1].max())
    return paths[best], *best


def draw_page(run: Path, file: Path) -> None:
    """A page of three memories at its last compression, where ` socket` has the light."""
    browser = shutil.which("chromium")
    if not browser:
        raise UserError(f"{file}: chromium is not installed; Debian's package has this name")
    words = ["--prompt", str(HERE / "assets" / "prompt.txt"), "--adapter", str(run)]
    words += ["--method", "streaming", "h2o", "--positions", "slots"]
    flags = ["--headless", "--disable-gpu", "--hide-scrollbars", "--window-size=1400,1290"]
    flags += ["--virtual-time-budget=2000"]  # milliseconds that the page is given
    flags += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses to run as root with it
    with TemporaryDirectory() as folder:
        page, picture = Path(folder) / "page.html", Path(folder) / "page.png"
        program = [sys.executable, str(HERE / "generate.py"), *words, "--show-memory", str(page)]
        subprocess.run(program, check=True)
        view = f"{page.as_uri()}#compression=17&layer=1&head=0&token=72"
        command = [browser, *flags, f"--screenshot={picture}", view]
        subprocess.run(command, check=True, capture_output=True)  # it also reports on itself
        drawn = Image.open(picture).convert("RGB")
        small = drawn.quantize(256, Image.Quantize.MAXCOVERAGE)  # a third of its size
        write_whole(file, partial(small.save, format="png", optimize=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", type=Path, default=TINY, help="a run (default: tiny/)")
    parser.add_argument("--tuned", type=Path, nargs="*", default=[], help="more runs to compare")
    parser.add_argument("--out", type=Path, default=HERE / "assets",
                        help="folder of the pictures (default: assets/)")  # fmt: skip
    parser.add_argument("--only-page", action="store_true", help="draw memory.png alone")
    args = parser.parse_args()
    if args.only_page:
        return draw_page(args.adapter, args.out / "memory.png")
    machine = prepare("cpu", "float32")
    model, tokenizer = load_base(TINY, machine.dtype, machine.device)
    streams = token_streams([], tokenizer)
    documents = long_documents(streams["held-out"], tokenizer.bos, 2048, 64)
    told, ago = tell_all(documents, "held-out", tokenizer)
    adapted = load_adapter(args.adapter, model)
    s = adapted.settings
    masks = ranges("", ago, s.room)

    memory = adapted.cache(Watched)
    prefill(model, documents[:1], memory, s.segment)
    draw_mixing(memory.mixing, s, args.out / "mixing.png")

    ids = tokenizer.encode(read_text(HERE / "assets" / "prompt.txt"))
    at = tokenizer.encode("x\n@")[-1]
    word = next(n for n, token in enumerate(ids) if token == at) + 4
    if word >= s.room:
        few = f"its {s.mem} slots and segment of {s.segment} tokens do not hold token {word}"
        remedy = "take an adapter with a larger memory"
        raise UserError(f"--adapter {args.adapter}: {few}, whose way is drawn; {remedy}")
    path, layer, head = follow(adapted, ids, word)

    full = Settings("full", segment=512, length=0, positions="original", lora_rank=0)
    rows = {"full cache, untuned": full}
    for name, method in (("window", "streaming"), ("H2O", "h2o")):
        rows[f"{name}, {s.mem} slots, untuned"] = settings_for(
            method, s.mem, s.segment, s.length, lora_rank=0, positions="slots"
        )
    made = {name: lambda model, row=row: AdaptedLlama(model, row) for name, row in rows.items()}
    for run in [*args.tuned, args.adapter]:
        tuned = f"{run.name.split('-')[0]}, tuned"
        name = f"ours, {s.mem} slots" if run == args.adapter else tuned
        made[name] = lambda model, run=run: load_adapter(run, model)
    lines = {}
    for name, make in made.items():
        base, _ = load_base(TINY, machine.dtype, machine.device)
        _, hits, _ = token_losses(make(base), told, machine, 8)
        lines[name] = [hits[mask].double().mean().item() for mask in masks.values()]
    draw_recall(lines, list(masks), path, layer, head, args.out / "recall.png")
    draw_page(args.adapter, args.out / "memory.png")


if __name__ == "__main__":
    run_program(main)
