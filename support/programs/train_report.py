"""What train.py prints: what a run will do, how far it is, and its scores."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from support.command_line import TINY, Machine
from support.processes import RANK, share
from support.programs.train_flags import described
from support.text import Texts


def print_start(config: Any, machine: Machine, texts: Texts) -> None:
    """Print what a run will do. `config` is a TrainConfig."""
    settings = config.settings
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


def progress_bar(config: Any, done: int) -> tqdm:
    """A bar of the tokens that process 0 reads; others show none. It begins after the
    steps that are done. `config` is a TrainConfig."""
    tokens = len(share(range(config.batch))) * (config.seq - 1)  # of a step
    return tqdm(
        desc="training", total=config.steps * tokens, initial=done * tokens,
        unit=" tokens", unit_scale=True, mininterval=1, disable=RANK > 0,
    )
