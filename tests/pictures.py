"""Draw assets/mixing.png: all of W in every layer, at the last compression of a document.

    pip install matplotlib                    # only this script needs it
    python tests/pictures.py                  # the embedded adapter
    python tests/pictures.py --adapter runs/my-run --out my-run.png

Row i of W says how much of each entry slot i takes. What is kept has a one-hot row; the rows of
merged slots come from the convolution.
"""

import argparse
import sys
from pathlib import Path

import torch
from matplotlib import pyplot
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import long_documents, token_streams  # noqa: E402
from generate import HERE, TINY, load_adapter, load_base, prepare, run_program  # noqa: E402
from lococo import COUNTS, Memory, Settings, prefill  # noqa: E402


class Watched(Memory):
    """A memory that remembers W (M, S) of each layer's head 0 at its last compression."""

    mixing: dict[int, Tensor]

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        order, w = super().compress(layer)
        self.mixing[layer] = self.mixing_matrix(order, w)[0, 0]
        return order, w


def draw(mixing: dict[int, Tensor], settings: Settings, file: Path) -> None:
    counts = {kind: getattr(settings, kind) for kind in COUNTS if getattr(settings, kind)}
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
    figure.supxlabel(f"{settings.mem} slots, then {settings.segment} new entries", fontsize=10)
    figure.colorbar(picture, ax=panels, shrink=0.5, label="weight in W")
    figure.savefig(file, dpi=100, facecolor="white")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapter", type=Path, default=TINY)
    parser.add_argument("--out", type=Path, default=HERE / "assets" / "mixing.png")
    args = argparse.Namespace(model=TINY, device="cpu", dtype="float32", seed=0)
    prepare(parser.parse_args(namespace=args))
    model, tokenizer = load_base(args)
    lococo = load_adapter(args.adapter, model)
    memory = lococo.cache(Watched)
    memory.mixing = {}
    document = long_documents(token_streams([], tokenizer)["held-out"], tokenizer.bos, 2048, 1)
    prefill(model, document, memory, lococo.settings.segment)
    draw(memory.mixing, lococo.settings, args.out)


if __name__ == "__main__":
    run_program(main)
