"""What train.py prints: what a run will do, and its scores at the end."""

import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lococo import Settings
from model import LlamaConfig
from support.command_line import TINY, Machine, counted
from support.text import Texts
from support.programs.train_flags import described


def print_start(
    config: Any, settings: Settings, base: LlamaConfig, machine: Machine, texts: Texts
) -> None:
    """`config` is a TrainConfig."""
    print(f"run: {os.path.relpath(config.out)}, {machine.dtype} on {machine.device}")
    named_elsewhere = ("out", "device", "dtype", "data", "held_out")
    left_out = dict.fromkeys([*named_elsewhere, *asdict(settings)])
    print(f"training: {described(asdict(config) | left_out)}")
    print(f"memory: {described(asdict(settings) | {'budgets': None})}")
    if settings.budgets:
        numbers = sum(settings.budgets, [])
        print(f"budgets: heads have {min(numbers):,} to {max(numbers):,} slots")
    print(texts.summary)
    if not config.data and Path(config.model) != TINY:
        print("no --data: it trains on Python's standard library; "
              "name your own text by --data")
    tokens = config.steps * config.batch * config.seq
    passes = tokens / len(texts.ids)
    print(f"training reads {tokens:,} tokens, each token of the text {passes:,.2f} times")


def print_scores(scores: dict[str, dict[str, float]], documents: int) -> None:
    """A row for each memory, if there are documents that were scored."""
    if not documents:
        return
    columns = next(iter(scores.values()))
    print(f"{counted(documents, 'held-out document'):40}", *columns, sep="  ")
    for name, row in scores.items():
        # NaN: there are no answers in this range.
        values = [row.get(column, math.nan) for column in columns]
        cells = ["-" if math.isnan(value) else f"{value:.3f}" for value in values]
        padded = [f"{cell:>{len(column)}}" for cell, column in zip(cells, columns)]
        print(f"{name:40}", *padded, sep="  ")
