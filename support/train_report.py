"""What train.py prints: what a run does before it begins, and its scores when it has ended."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lococo import Settings
from support.command_line import TINY, Machine, counted
from support.text import Texts
from support.train_flags import described


def print_start(config: Any, settings: Settings, machine: Machine, texts: Texts) -> None:
    """`config` is a TrainConfig."""
    print(f"recipe {config.recipe} on {config.model}, {machine.dtype} on {machine.device}")
    print(f"run: {os.path.relpath(config.out)}")
    elsewhere = ("out", "data", "held_out", "device", "dtype", "merged", *asdict(settings))
    own = {name: value for name, value in asdict(config).items() if name not in elsewhere}
    print(f"training: {described(own)}")
    print(f"memory: {described(asdict(settings))}")
    print(texts.summary)
    if not config.data and Path(config.model) != TINY:
        print("no --data: it trains on Python's standard library; "
              "name your own text by --data")  # fmt: skip
    tokens = config.steps * config.batch * config.seq
    passes = tokens / len(texts.ids)
    print(f"training reads {tokens:,} tokens, each token of the text {passes:.1f} times")


def print_scores(scores: dict[str, dict[str, float]], documents: int) -> None:
    """A row for each memory, if there are documents that were scored."""
    if not documents:
        return
    columns = next(iter(scores.values()))
    print(f"{counted(documents, 'held-out document'):40}", *columns, sep="  ")
    for name, row in scores.items():
        # NaN: there are no answers in this range.
        cells = ["-" if math.isnan(row[name]) else f"{row[name]:.3f}" for name in columns]
        padded = [f"{cell:>{len(column)}}" for cell, column in zip(cells, columns)]
        print(f"{name:40}", *padded, sep="  ")
