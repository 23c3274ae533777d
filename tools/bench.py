"""What the method costs: each memory beside the others, in one run.

    python tools/bench.py                                    # minutes on one core
    python tools/bench.py --device cuda --mem 512 --segment 512 --seq 8192
    python tools/bench.py --model SmolLM2-135M --rows h2o learned --seq 8192 --contexts \\
        --mem 512 896 --segment 512 128             # reads alone, with two pairs of sizes

Memories take turns, for several rounds. The table has the medians and, behind each, how
many times the first window's that is.

    prefill  reading one sequence
    decode   one token, after so many others. The caches are filled with random entries:
             time depends on how many there are, not on what they say. A memory is timed
             over T tokens, so that one compression is in it.

--budgets are those of the rows with heavy and without merged slots.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor
from torch.utils.benchmark import timer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import prefill
from lococo import METHODS, AdaptedLlama
from model import Entries, KVCache, Llama, load_llama
from support.command_line import TINY, PlainParser, at_least, budgets_file, prepare
from support.command_line import run_program
from support.programs.settings import make_settings

ROWS = ("full", "streaming", "h2o", "h2o+forget", "learned", "lococo", "lococo+h2o")
Options = argparse.Namespace  # the flags of `parse`


def seconds(work: Callable) -> float:
    begun = timer()  # it waits for a GPU
    work()
    return timer() - begun


def make(row: str, mem: int, segment: int, model: Llama, options: Options) -> AdaptedLlama:
    settings = make_settings(row, mem, segment, options.seq, lora_rank=0)
    if options.budgets and settings.heavy and not settings.merged:
        settings = make_settings(row, mem, segment, options.seq, options.budgets, lora_rank=0)
    return AdaptedLlama(model, replace(settings, bits=options.bits)).eval()


def make_all(model: Llama, options: Options) -> dict[str, AdaptedLlama]:
    """By the name of a row. The full cache reads all tokens at once."""
    made = {}
    for row in METHODS:
        if row == "full" and row in options.rows:
            made[row] = make(row, 0, options.seq, model, options)
        elif row == "streaming" or row in options.rows:
            for M, T in zip(options.mem, options.segment):
                made[f"{row}, {M} + {T}"] = make(row, M, T, model, options)
    return made


# --- Reading ----------------------------------------------------------------------------


def prefill_time(adapted: AdaptedLlama, options: Options) -> float:
    vocab_size = adapted.model.config.vocab_size
    tokens = torch.randint(vocab_size, (1, options.seq), device=options.device)
    cache = adapted.cache()
    with options.machine.precision(), torch.no_grad():
        return seconds(lambda: prefill(adapted.model, tokens, cache, adapted.settings.segment))


def filled(adapted: AdaptedLlama, n: int, options: Options) -> KVCache:
    """A cache as it is after n tokens, but with random entries."""
    cache, config = adapted.cache(), adapted.model.config

    def entries(heads: int, held: int) -> Tensor:
        kind = {"device": options.device, "dtype": options.machine.dtype}
        return torch.randn((1, heads, held, config.head_dim), **kind)

    if adapted.settings.mem:
        for number, part in enumerate(cache.parts):
            sizes = len(part.heads), min(n, part.settings.capacity - 1)
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
    count = adapted.settings.segment if adapted.settings.mem else 16

    def write(tokens: int) -> None:
        for _ in range(tokens):
            adapted.model(token, cache)

    with options.machine.precision():
        write(2)  # after these a memory has just been compressed
        return seconds(lambda: write(count)) / count


# --- The table --------------------------------------------------------------------------


def measure(
    models: dict[str, AdaptedLlama], options: Options
) -> dict[str, dict[str, list]]:
    """{column: {row: the values of all rounds}}."""
    columns = defaultdict(lambda: defaultdict(list))

    def take_turns(column: str, value: Callable) -> None:
        for _ in range(options.rounds):
            for row, adapted in models.items():
                columns[column][row].append(value(adapted))

    take_turns("prefill, s", lambda adapted: prefill_time(adapted, options))
    for n in options.contexts:
        take_turns(f"decode {n:,}, ms", lambda adapted: 1000 * decode_time(adapted, n, options))
    return columns


def print_table(columns: dict[str, dict[str, list]], rows: list[str]) -> None:
    width = max(map(len, rows))
    window = next(row for row in rows if row.startswith("streaming"))
    print(f"{'':{width}}" + "".join(f"{column:>20}" for column in columns))
    for row in rows:
        line = f"{row:{width}}"
        for values in columns.values():
            value = statistics.median(values[row])
            times = value / statistics.median(values[window])
            line += f"{value:>13.4g}{times:>7.2f}"
        print(line)


def parse() -> Options:
    parser = PlainParser(__doc__)
    add = parser.add_argument
    add("--rows", nargs="+", choices=METHODS, default=ROWS, metavar="METHOD",
        help=f"methods beside the window, of %(choices)s (default: {' '.join(ROWS)})")
    add("--model", type=Path, default=TINY, help="directory of the base (default: tiny/)")
    positive = at_least(1)
    add("--mem", type=at_least(8), nargs="+", default=[128], help="slots M (default: 128)")
    add("--segment", type=positive, nargs="+", default=[128],
        help="tokens T, as many numbers as --mem has (default: 128)")
    add("--seq", type=positive, default=2048, help="tokens of a sequence (default: 2048)")
    add("--contexts", type=positive, nargs="*", default=[2048, 32768],
        help="tokens before decoding, or nothing, to read alone (default: 2048 32768)")
    add("--budgets", type=budgets_file, metavar="FILE",
        help="slots of each head, for a --model (default: M each)")
    add("--bits", type=int, choices=(8, 4), default=0,
        help="of entries in all rows, for `prefill` (default: those of --dtype)")
    add("--rounds", type=positive, default=5,
        help="turns of each memory; the first is slower (default: 5)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the base model (default: float32)")
    options = parser.parse_args()
    if len(options.mem) != len(options.segment):
        parser.error("--mem and --segment must have equally many numbers")
    return options


def main() -> None:
    options = parse()
    options.machine = prepare(options.device, options.dtype)
    model = load_llama(options.model, options.machine.dtype, options.device)
    models = make_all(model, options)
    machine = f"{options.dtype} on {options.device}, {torch.get_num_threads()} threads"
    print(f"Rows are METHOD, M + T; L = {options.seq:,}; {machine}, torch {torch.__version__}")
    print_table(measure(models, options), list(models))


if __name__ == "__main__":
    run_program(main)
