"""Which words does a memory know that a window does not? A table, and assets/words.png.

    python tools/words.py --model DIR --data FILE --window RUN ... --memory RUN ... --full RUN ...

Each group of runs of train.py (of several seeds) is averaged. A word's nats are those of its tokens
together, in the documents that did not train. It is new there, or was last written up to M tokens
ago, up to M + T, or longer ago, which no window holds. A name is written with a capital only. The
picture needs `pip install matplotlib`.
"""

import argparse
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Iterator

import numpy as np
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import token_losses  # noqa: E402
from lococo import load_adapter, read_adapter  # noqa: E402
from model import load_base  # noqa: E402
from support.command_line import HERE, output_file, prepare, run_program  # noqa: E402
from support.files import UserError, write_whole  # noqa: E402
from support.text import long_documents, token_streams  # noqa: E402
from support.tokenizer import Tokenizer  # noqa: E402


def words(ids: list[int], tokenizer: Tokenizer) -> Iterator[tuple[str, list[int]]]:
    """The words of a text, and where the tokens of each are."""
    text, places, start = "", [], len(tokenizer.prefix)
    for place, token in enumerate(ids[start:], start):
        piece = tokenizer.piece(token)
        text += piece
        places += [place] * len(piece)
    for found in re.finditer(r"\w+", text):
        yield found.group(), sorted(set(places[found.start() : found.end()]))


def draw(rows: dict[tuple[str, str], list], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.2), layout="constrained")
    labels = [f"{kind}s\n{when}\n({row[0]})" for (when, kind), row in rows.items()]
    for n, name in enumerate(("ours", "full attention")):
        places = np.arange(len(rows)) + 0.4 * n - 0.2
        axes.bar(places, [row[n + 2] / row[0] for row in rows.values()], 0.4, label=name)
    axes.axhline(0, color="#999999", linewidth=0.5)
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_ylabel("nats per word, less the window's")
    axes.legend(fontsize=9)
    save = partial(figure.savefig, dpi=100, facecolor="white", format=file.suffix[1:] or "png")
    write_whole(file, save)


GROUPS = ("window", "memory", "full")  # of runs; the first is what the others are compared with
NAMES = {"window": "a window", "memory": "ours", "full": "full attention"}


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    model: Path
    data: Path
    window: list[Path]  # runs
    memory: list[Path]
    full: list[Path]
    out: Path  # a picture


def parse() -> Options:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, help="directory of the base model")
    add("--data", type=Path, required=True, help="the text that the runs were trained on")
    for group in GROUPS:
        add(f"--{group}", type=Path, nargs="+", required=True, metavar="RUN",
            help=f"runs of train.py with {NAMES[group]}, one for each seed")
    add("--out", type=output_file, default=HERE / "assets" / "words.png",
        help="the picture (default: assets/words.png)")
    return Options(**vars(parser.parse_args()))


def score(options: Options, length: int) -> tuple[list, dict[str, Tensor]]:
    """The words of each text, and for each group of runs their mean nats of each token."""
    machine = prepare("cpu", "float32")
    nats = {}
    for group in GROUPS:
        for run in vars(options)[group]:
            model, tokenizer = load_base(options.model, machine.dtype, machine.device)
            streams = token_streams([options.data], tokenizer)
            ids = np.concatenate([streams["held-out"], streams["choosing"]])
            texts = long_documents(ids, tokenizer.bos, length, 64)
            if not len(texts):
                held_out = "no document that train.py holds out or leaves for choosing"
                sentence = f"{held_out} has {length} tokens; name others"
                raise UserError(f"--data {options.data}: {sentence}")
            found = token_losses(load_adapter(run, model), texts, machine, 8)[0].double()
            nats[group] = nats.get(group, 0) + found / len(vars(options)[group])
    return [list(words(ids, tokenizer)) for ids in texts.tolist()], nats


def sort_words(
    texts: list, nats: dict[str, Tensor], M: int, reach: int
) -> tuple[dict[tuple, list[float]], dict[str, float]]:
    """By when a word was last read and its kind: how many there are, the window's nats, and what
    the memory and full attention add to these. And for each word what the memory adds."""
    lower = {word for text in texts for word, _ in text if not word[0].isupper()}
    whens = {"new": 0, f"{M} ago or less": M, f"{M} to {reach}": reach, f"over {reach}": 10**9}
    rows = {(when, kind): [0, 0.0, 0.0, 0.0] for kind in ("name", "other word") for when in whens}
    gains = defaultdict(float)
    for n, text in enumerate(texts):
        last = {}
        for word, places in text:
            ago = places[0] - last.get(word, places[0])
            when = next(when for when, most in whens.items() if ago <= most)
            name = word[0].isupper() and word.lower() not in lower
            own = [place - 1 for place in places]
            window, memory, full = (nats[group][n, own].sum() for group in GROUPS)
            row = rows[when, "name" if name else "other word"]
            for column, value in enumerate((1, window, memory - window, full - window)):
                row[column] += float(value)
            gains[word] += float(memory - window)
            last[word] = places[0]
    return rows, gains


def main() -> None:
    options = parse()
    settings = read_adapter(options.memory[0]).settings
    texts, nats = score(options, settings.length)
    rows, gains = sort_words(texts, nats, settings.mem, settings.room)
    total = (nats["memory"] - nats["window"]).sum()
    print(f"{'':28}{'words':>7}{'window':>9}{'memory':>9}{'full':>9}{'of gain':>9}")
    for (when, kind), (count, *sums) in rows.items():
        window, memory, full = (value / max(count, 1) for value in sums)
        line = f"{kind + ', ' + when:28}{int(count):>7}{window:>9.3f}{memory:>+9.3f}{full:>+9.3f}"
        print(f"{line}{sums[1] / total:>9.0%}")
    best = sorted(gains, key=gains.get)[:10]
    print("most:", ", ".join(f"{word} {gains[word]:+.1f}" for word in best))
    draw({key: [int(row[0]), *row[1:]] for key, row in rows.items()}, options.out)


if __name__ == "__main__":
    run_program(main)
