"""The pictures of the README, from what is measured here and in tests/reproduce.json.

    pip install matplotlib                    # which only this script needs
    python tests/pictures.py                  # measures (minutes on two cores), writes assets/measured.json, draws
    python tests/pictures.py --draw           # draws what assets/measured.json has

assets/perplexity.png: perplexity by context length, every method of the main table.
assets/position.png:   loss by position in documents of 8,192 tokens.
assets/mixing.png:     W of every layer of the embedded adapter, at the last compression of a document.
assets/cost.png:       bytes of the cache and seconds of a training step by sequence length.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

try:
    import matplotlib
    from matplotlib import pyplot
except ImportError:
    pyplot = None

HOME = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(HOME), str(HOME / "tests")]
from eval_ppl import TINY, Corpus, evaluate, load_base, scored_batches  # noqa: E402
from lococo import LoCoCo, Memory, Settings, dense, prefill  # noqa: E402
from model import Llama, Tokenizer  # noqa: E402
from reproduce import CONTEXT, DOCUMENTS, LENGTHS, METHODS, UNTOUCHED, Cell  # noqa: E402
from train import backward_through  # noqa: E402

ASSETS, STEPS, DEVICE = HOME / "assets", 100, "cpu"
WINDOW = dict(mem=128, segment=128, length=8192, lora_rank=0)


# --- What is measured ----------------------------------------------------------------------------------------


def by_position(model: Llama, corpus: Corpus, bin: int = 256) -> dict[str, list[float]]:
    """Mean nats of each `bin` positions, documents of 8,192 tokens."""
    batches = {8192: scored_batches(corpus, "held-out", 8192, DEVICE, 64, 4)}
    methods = {
        "base, full cache": lambda length: None,
        "window of 128 slots, untouched base": lambda length: LoCoCo(model, Settings.of("streaming", **WINDOW)),
        "LoCoCo in 128 slots, tiny/ (trained at 2,048)": lambda length: LoCoCo.load(TINY, model),
    }
    curves = {}
    for name, method in methods.items():
        losses = evaluate(model, method, batches)["losses"].mean(dim=0)
        curves[name] = [float(part.mean()) for part in losses.split(bin)]
    return curves


class Watched(Memory):
    """A memory that remembers the W of the last compression in every layer, of its first head."""

    def __init__(self, lococo: LoCoCo):
        super().__init__(lococo.model.config, lococo.settings, lococo.compressors)
        self.w: list[Tensor | None] = [None] * lococo.model.config.n_layers

    def follow(self, layer: int, place: Tensor, w: Tensor) -> None:
        super().follow(layer, place, w)
        s = self.settings
        self.w[layer] = dense(w, place.shape[-1] - s.sinks - s.heavy - s.recent)[0, 0]


def mixing(model: Llama, tokenizer: Tokenizer, document: Tensor) -> dict:
    """W (merged slots, entries) of each layer's first head after (1, L) tokens, and names of the entries."""
    lococo = LoCoCo.load(TINY, model)
    s, memory = lococo.settings, Watched(lococo)
    prefill(model, document, memory, s.segment)
    lococo.remove()
    last = document.shape[1] - s.segment  # what enters after the last compression
    tokens = document[0, last - s.recent - s.segment : last - s.recent].tolist()
    names = [f"slot {s.sinks + n}" for n in range(s.merged)] + [json.dumps(tokenizer.piece(t), ensure_ascii=False)
                                                                  for t in tokens]  # fmt: skip
    return {"w": [[[round(x, 3) for x in row] for row in w.tolist()] for w in memory.w], "entries": names}


def cost(model: Llama) -> dict[str, dict[str, list[float]]]:
    """Bytes of the cache of a sequence and seconds of a training step over it, without the optimizer; one thread."""
    lengths, result = [512, 1024, 2048, 4096, 8192], {}
    torch.set_num_threads(1)
    lococo = LoCoCo.load(TINY, model)
    recipe = lococo.settings
    lococo.remove()
    for name, method in (("full cache, whole sequence", "full"), ("LoCoCo, 128 slots", "lococo")):
        rows = {"lengths": lengths, "bytes": [], "seconds": []}
        for L in lengths:
            settings = Settings.of("full", recipe.mem, L, L) if method == "full" else replace(recipe, length=L)
            lococo = LoCoCo(model, settings)
            lococo.start_training()
            tokens, times = torch.randint(3, model.config.vocab_size, (1, L)), []
            for _ in range(4):
                begun = time.perf_counter()
                for _ in backward_through(lococo, tokens, L):
                    pass
                times.append(time.perf_counter() - begun)
            rows["seconds"].append(statistics.median(times[1:]))
            cache = lococo.cache()
            prefill(model, tokens, cache, settings.segment)
            rows["bytes"].append(cache.nbytes)
            lococo.remove()
            model.zero_grad()
        result[name] = rows
    return result


def measure() -> None:
    args = argparse.Namespace(device=DEVICE, dtype=None, model=None, seed=0)
    model, tokenizer = load_base(args)
    corpus = Corpus([], tokenizer)
    document = scored_batches(corpus, "held-out", 2048, DEVICE, 1, 1)[0]
    measured = {
        "mixing": mixing(model, tokenizer, document), "position": by_position(model, corpus), "cost": cost(model),
        "about": f"{platform.machine()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}",
    }  # fmt: skip
    (ASSETS / "measured.json").write_text(json.dumps(measured) + "\n")


# --- What is drawn -------------------------------------------------------------------------------------------

COLOURS = ["#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b", "#b8a000"]


def perplexity() -> None:
    """Trained at twice the pretrained context, seed 0."""
    cells = json.loads((HOME / "tests" / "reproduce.json").read_text())["cells"]
    rows = {name: Cell(flags, 2 * CONTEXT) for name, flags in METHODS.items()}
    rows["untouched base, full cache"] = UNTOUCHED[0]
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for n, (name, cell) in enumerate(rows.items()):
        values = [cells[cell.folder(STEPS).name]["perplexity"][str(length)] for length in LENGTHS]
        bold = name.startswith(("full", "window", "H2O", "LoCoCo, the recipe"))
        width = 5 if name.startswith("window") else 1.8 if bold else 1  # the recipe's line lies on the window's
        axes.plot(LENGTHS, values, "-" if bold else ".--", color=(COLOURS + ["#444444"])[n], linewidth=width,
                  label=name, zorder=2 + bold)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS])
    axes.set_yticks([8, 10, 12, 14, 16, 18, 20], labels=["8", "10", "12", "14", "16", "18", "20"])
    axes.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    axes.set_xlabel(f"context length in tokens (each with its own {DOCUMENTS} documents)")
    axes.set_ylabel("held-out perplexity")
    axes.set_title("128 slots, trained at 2,048 tokens from a base of 1,024", loc="left")
    axes.legend(fontsize=7.5, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    save(figure, "perplexity")


def position(curves: dict[str, list[float]]) -> None:
    figure, axes = pyplot.subplots(figsize=(9, 4))
    for (name, values), colour in zip(curves.items(), (COLOURS[0], COLOURS[6], COLOURS[3])):
        width = 4.5 if name.startswith("window") else 1.5  # the next line lies on it
        axes.plot([128 + 256 * n for n in range(len(values))], values, color=colour, linewidth=width, label=name)
    axes.axvline(1024, color="#999999", linewidth=1, linestyle=":")
    axes.text(1060, axes.get_ylim()[1], "pretrained context", va="top", fontsize=8, color="#555555")
    axes.set_xlabel("position in the document, in tokens")
    axes.set_ylabel("nats per token")
    axes.set_title("held-out documents of 8,192 tokens, means of 256 positions", loc="left")
    axes.legend(fontsize=8, frameon=False)
    save(figure, "position")


def mixing_weights(w: list, entries: list[str]) -> None:
    figure, panels = pyplot.subplots(len(w), 1, figsize=(9, 3.1 * len(w)), sharex=True)
    old = sum(name.startswith("slot") for name in entries)
    for layer, (axes, matrix) in enumerate(zip(panels, map(torch.tensor, w))):
        picture = axes.imshow(matrix, aspect="auto", cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        share, entry = matrix.max(dim=1)
        axes.set_yticks(range(0, len(matrix), 5), entries[: len(matrix) : 5], fontsize=7)
        right = axes.secondary_yaxis("right")
        right.set_yticks(range(len(matrix)), [f"{s:.2f} {entries[n]}" for s, n in zip(share.tolist(), entry.tolist())],
                         fontsize=6.5, family="monospace")  # fmt: skip
        right.tick_params(length=0)
        axes.axvline(old - 0.5, color="#d55e00", linewidth=1)
        axes.set_title(f"layer {layer}, head 0", fontsize=8, loc="left", pad=3)
    panels[-1].set_xlabel(f"entries that are merged: the {old} old slots, then the {len(entries) - old} oldest tokens; "
                          "right: the largest weight of each slot and whose it is")  # fmt: skip
    figure.colorbar(picture, ax=panels, location="top", shrink=0.3, aspect=30, pad=0.025, label="weight in W")
    save(figure, "mixing")


def costs(rows: dict) -> None:
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6))
    for axes, key, unit, factor in zip(panels, ("bytes", "seconds"), ("key/value cache, MB", "training step, s"),
                                       (1e-6, 1)):  # fmt: skip
        for (name, row), colour in zip(rows.items(), (COLOURS[0], COLOURS[3])):
            axes.plot(row["lengths"], [factor * value for value in row[key]], "o-", color=colour, label=name)
        axes.set_xlabel("sequence length in tokens")
        axes.set_xticks(row["lengths"], [f"{n:,}" if n > 512 else "" for n in row["lengths"]], fontsize=7)
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, frameon=False)
    panels[0].set_title("embedded model, one thread", loc="left", fontsize=10)
    save(figure, "cost")


def save(figure: "pyplot.Figure", name: str) -> None:
    """On white, which is legible on a dark page too."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(ASSETS / f"{name}.png", dpi=110, facecolor="white", bbox_inches="tight", pad_inches=0.15)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw: assets/measured.json is there")
    args = parser.parse_args()
    if pyplot is None:
        sys.exit("tests/pictures.py draws with matplotlib, which is not here: pip install matplotlib")
    if not args.draw:
        measure()
    matplotlib.use("Agg")
    measured = json.loads((ASSETS / "measured.json").read_text())
    perplexity()
    position(measured["position"])
    mixing_weights(measured["mixing"]["w"], measured["mixing"]["entries"])
    costs(measured["cost"])


if __name__ == "__main__":
    main()
