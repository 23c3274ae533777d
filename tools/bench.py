"""What the method costs: each memory beside the others, in one run.

    python tools/bench.py                                    # minutes on one core
    python tools/bench.py --device cuda --mem 512 --segment 512 --seq 8192
    python tools/bench.py --model SmolLM2-135M --rows streaming h2o selection \\
        --parts prefill decode compress --lora-rank 0 --mem 64 --segment 64

The model has random weights, or those of --model. Memories take turns, for several
rounds. The table has the medians and, behind each, how many times the window's that is.

    train     an optimizer step on one sequence, as train.py takes it without facts. The
              gradient reaches back over one segment; that of `full`, which has no segments,
              over the whole sequence
    prefill   reading one sequence
    decode    one token, after so many others. The caches are filled with random entries:
              time depends on how many there are, not on what they say. A memory is timed
              over T tokens, so that one compression is in it.
    compress  one compression of M + T entries, the mean of the layers

Every row has LoRA of rank 8, also in prefill and decoding; --lora-rank sets another rank.
--budgets are those of all rows but `full` and `streaming`, which is the window.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import prefill
from lococo import METHODS, AdaptedLlama
from model import Entries, KVCache, Llama, LlamaConfig, load_llama
from support.command_line import PlainParser, at_least, budgets_file, prepare
from support.command_line import run_program
from support.files import UserError
from support.programs.adapter import round_embeddings
from support.programs.settings import make_settings
from train import TrainConfig, gradients, make_optimizer

ROWS = ("full", "streaming", "h2o", "h2o+forget", "selection", "lococo", "lococo+h2o")
PARTS = ("train", "prefill", "decode", "compress")
Options = argparse.Namespace  # the flags of `parse`


def seconds(work: Callable, options: Options) -> float:
    def wait() -> None:
        if torch.device(options.device).type == "cuda":
            torch.cuda.synchronize(options.device)

    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def make(row: str, model: Llama, options: Options) -> AdaptedLlama:
    segment = options.seq if row == "full" else options.segment
    changes = {"lora_rank": options.lora_rank}
    if row not in ("full", "streaming"):
        changes["budgets"] = options.budgets
    settings = make_settings(row, options.mem, segment, options.seq, **changes)
    return AdaptedLlama(model, replace(settings, bits=options.bits))


# --- Training ---------------------------------------------------------------------------


def random_ids(options: Options) -> Tensor:
    ids = np.random.default_rng(0).integers(0, options.vocab, options.seq)
    return torch.from_numpy(ids)


def train_time(adapted: AdaptedLlama, options: Options) -> float:
    """Seconds of a step on one sequence of random tokens without facts, as train.py takes it."""
    config = TrainConfig(
        seq=options.seq, segment=adapted.settings.segment, batch=1, lr=1e-5, conv_lr=1e-5
    )
    optimizer, ids = make_optimizer(adapted, config), random_ids(options)

    def draw(i: int) -> tuple[Tensor, Tensor]:
        return ids, torch.zeros_like(ids)

    def step() -> None:
        optimizer.zero_grad()
        gradients(adapted, draw, config, options.machine, step=0)
        torch.nn.utils.clip_grad_norm_(adapted.trained().values(), 1.0)
        optimizer.step()

    return seconds(step, options)


# --- Reading ----------------------------------------------------------------------------


def prefill_time(adapted: AdaptedLlama, options: Options) -> float:
    tokens = random_ids(options)[None].to(options.device)
    cache = adapted.cache()
    with options.machine.precision(), torch.no_grad():
        return seconds(
            lambda: prefill(adapted.model, tokens, cache, options.segment), options
        )


def filled(adapted: AdaptedLlama, n: int, options: Options) -> KVCache:
    """A cache as it is after n tokens, but with random entries."""
    cache, config = adapted.cache(), adapted.model.config

    def entries(heads: int, held: int) -> Tensor:
        kind = {"device": options.device, "dtype": options.machine.dtype}
        return torch.randn((1, heads, held, config.head_dim), **kind)

    if adapted.settings.mem:
        parts = getattr(cache, "parts", None)  # of layers, with budgets
        for number, settings in enumerate(cache.of_layer):
            heads = len(parts[number].heads) if parts else config.n_kv_heads
            sizes = heads, min(n, settings.capacity)
            received = torch.rand((1, *sizes), device=options.device)
            received = received if cache.counts_attention else None
            cache.hold(number, entries(*sizes), entries(*sizes), received)
    else:
        for held in (cache.keys, cache.values):
            held[:] = [Entries(entries(config.n_kv_heads, n)) for _ in held]
    cache.seen = n
    return cache


@torch.no_grad()
def decode_time(adapted: AdaptedLlama, n: int, options: Options) -> float:
    """Seconds of a token after n others."""
    cache = filled(adapted, n, options)
    token = torch.zeros(1, 1, dtype=torch.int64, device=options.device)
    count = options.segment if adapted.settings.mem else 16

    def write(tokens: int) -> None:
        for _ in range(tokens):
            adapted.model(token, cache)

    with options.machine.precision():
        write(1)  # after this one a memory has just been compressed
        return seconds(lambda: write(count), options) / count


@torch.no_grad()
def compress_time(adapted: AdaptedLlama, options: Options) -> float:
    """Seconds of a compression in one layer. It is not the first one of a text, so that some
    entries come from a slot."""
    caches = [filled(adapted, 10 * adapted.settings.capacity, options) for _ in range(4)]

    def compress() -> None:
        for cache in caches:
            cache.make_room(1, options.segment)

    return seconds(compress, options) / len(caches) / adapted.model.config.n_layers


# --- The table --------------------------------------------------------------------------


def measure(
    models: dict[str, AdaptedLlama], options: Options
) -> dict[str, dict[str, list]]:
    """{column: {row: the values of all rounds}}. Training comes first, as it ends before
    a model reads."""
    columns, parts = defaultdict(dict), options.parts
    memories = {row: adapted for row, adapted in models.items() if adapted.settings.mem}

    def take_turns(column: str, value: Callable, some: dict = models) -> None:
        for turn in range(options.rounds + 1):
            for row, adapted in some.items():
                found = value(adapted)
                if turn:  # the first round warms up
                    columns[column].setdefault(row, []).append(found)

    if "train" in parts:
        take_turns("train, s", lambda adapted: train_time(adapted, options))
    for adapted in models.values():
        round_embeddings(adapted.eval())
    if "prefill" in parts:
        take_turns("prefill, s", lambda adapted: prefill_time(adapted, options))
    for n in options.contexts if "decode" in parts else []:
        take_turns(f"decode {n:,}, ms", lambda adapted: 1000 * decode_time(adapted, n, options))
    if "compress" in parts:
        column = "compress, ms"
        take_turns(column, lambda adapted: 1000 * compress_time(adapted, options), memories)
    return columns


def print_table(columns: dict[str, dict[str, list]], rows: list[str]) -> None:
    width = max(map(len, rows))
    print(f"{'':{width}}" + "".join(f"{column:>20}" for column in columns))
    for row in rows:
        line = f"{row:{width}}"
        for values in columns.values():
            if row in values:
                value = statistics.median(values[row])
                times = value / statistics.median(values["streaming"])
                line += f"{value:>13.4g}{times:>7.2f}"
            else:
                line += f"{'-':>13}{'-':>7}"
        print(line)


def parse() -> Options:
    parser = PlainParser(__doc__)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS,
        help="what to measure (default: everything)")
    add("--rows", nargs="+", choices=METHODS, default=ROWS,
        help=f"methods; the window is always there (default: {' '.join(ROWS)})")
    add("--model", type=Path, help="a base instead of random weights of these sizes:")
    positive = at_least(1)
    sizes = dict(dim=256, layers=4, heads=4, ffn=688, vocab=2048)
    for name, size in sizes.items():
        add(f"--{name}", type=positive, default=size, help=f"default: {size}")
    add("--mem", type=at_least(8), default=128, help="slots M (default: 128)")
    add("--segment", type=positive, default=128, help="tokens T (default: 128)")
    add("--seq", type=positive, default=2048, help="tokens of a sequence (default: 2048)")
    add("--contexts", type=positive, nargs="+", default=[2048, 32768],
        help="tokens before decoding (default: 2048 32768)")
    add("--lora-rank", type=at_least(0), default=8,
        help="of all rows; 0 leaves the base frozen (default: 8)")
    add("--budgets", type=budgets_file, metavar="FILE",
        help="slots of each head, for a --model (default: M each)")
    add("--bits", type=int, choices=(8, 4), default=0,
        help="of entries in all rows, for `prefill` (default: those of --dtype)")
    add("--rounds", type=positive, default=5,
        help="turns of each memory; one more warms up (default: 5)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the base model (default: float32)")
    options = parser.parse_args()
    if not options.lora_rank and "train" in options.parts:
        remedy = "give --parts prefill decode compress"
        parser.error(f"--lora-rank 0: the window has nothing to train; {remedy}")
    return options


def main() -> None:
    options = parse()
    options.machine = prepare(options.device, options.dtype)
    dtype = options.machine.dtype
    if options.model:
        model = load_llama(options.model, dtype, options.device)
        options.vocab = model.config.vocab_size
    else:
        sizes = dict(ffn_dim=options.ffn, vocab_size=options.vocab)
        heads = dict(n_heads=options.heads, n_kv_heads=options.heads)
        try:
            config = LlamaConfig(options.dim, options.layers, **heads, **sizes)
        except ValueError as error:
            raise UserError(f"{error}; take other --dim and --heads") from None
        with torch.device(options.device):
            model = Llama(config).to(dtype)
    rows = [row for row in METHODS if row == "streaming" or row in options.rows]
    sizes = f"M = {options.mem}, T = {options.segment}, L = {options.seq:,}"
    machine = f"{options.dtype} on {options.device}, {torch.get_num_threads()} threads"
    print(f"{sizes}; {machine}, torch {torch.__version__}; {options.rounds} rounds")
    print_table(measure({row: make(row, model, options) for row in rows}, options), rows)


if __name__ == "__main__":
    run_program(main)
