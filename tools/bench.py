"""What the method costs: training, prefill and decoding, each method beside the others in one run.

    python tools/bench.py                                        # minutes on one core of a CPU
    python tools/bench.py --device cuda --dtype bfloat16 --mem 512 --segment 512 --seq 8192
    python tools/bench.py --model SmolLM2-135M --dtype bfloat16 \\
        --rows window h2o lococo+h2o+recent --parts prefill decode --lora-rank 0 \\
        --mem 64 --segment 64 --contexts 1024 8192

The model has random weights, or those of --model. Methods take turns, for several rounds. The table
has the medians and, behind each, how many times the window's that is.

    train    an optimizer step on one sequence, as train.py takes it, the mean of three: with
             our compressor there are --facts in a text, and a third of its pieces has a second
             backward pass. The gradient reaches back over --bptt segments; that of `full`, which
             has no segments, over the whole sequence
    memory   the most that training keeps for a backward pass, without weights. With a memory of M
             slots it does not grow with the sequence.
    prefill  reading one sequence
    decode   one token, after so many others. The caches are filled with random entries: time
             depends on how many there are, not on what they say. A memory is timed over T tokens,
             so that one compression is in it.

Every row has LoRA of rank 8, also in prefill and decoding; --lora-rank sets another rank.
"""

import argparse
import copy
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import prefill  # noqa: E402
from lococo import AdaptedLlama, settings_for  # noqa: E402
from model import Entries, KVCache, Llama, LlamaConfig, load_llama  # noqa: E402
from support.command_line import TINY, Machine, at_least, prepare, run_program  # noqa: E402
from support.facts import fact_tokens, tell  # noqa: E402
from support.tokenizer import Tokenizer  # noqa: E402
from train import TrainConfig, gradients, make_optimizer  # noqa: E402

ROWS = {  # the row's name: method and settings
    "full": dict(method="full"),
    "window": dict(method="streaming"),
    "h2o": dict(method="h2o"),
    "lococo+window": dict(method="lococo+window", kernel=3, compressor="facts"),  # the recipe
    "lococo+h2o+recent": dict(method="lococo+h2o+recent", kernel=3, compressor="scored"),
    "lococo": dict(method="lococo", kernel=21),  # the paper's, as the next one
    "lococo+h2o": dict(method="lococo+h2o", kernel=21),
}
PARTS = ("train", "prefill", "decode", "memory")


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    parts: list[str]  # of PARTS
    rows: list[str]  # of ROWS
    model: Path | None  # None: random weights of these sizes
    dim: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    mem: int
    segment: int
    seq: int
    long: int  # the other length whose training memory is shown
    contexts: list[int]  # tokens before decoding
    bptt: int
    facts: int
    lora_rank: int
    rounds: int
    device: str
    dtype: str


def machine_of(options: Options) -> Machine:
    return Machine(options.device, getattr(torch, options.dtype))


def seconds(work: Callable, options: Options) -> float:
    def wait() -> None:
        if options.device != "cpu":
            torch.cuda.synchronize()

    wait()
    begun = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - begun


def make(row: str, model: Llama, options: Options) -> AdaptedLlama:
    segment = options.seq if row == "full" else options.segment
    sizes = dict(mem=options.mem, segment=segment, length=options.seq)
    settings = settings_for(lora_rank=options.lora_rank, **sizes, **ROWS[row])
    return AdaptedLlama(copy.deepcopy(model), settings)


def train_config(adapted: AdaptedLlama, L: int, options: Options) -> TrainConfig:
    """The configuration of train.py that trains on one sequence of L tokens at a time."""
    return TrainConfig(
        seq=L, segment=adapted.settings.segment, bptt=options.bptt, batch=1, micro_batch=1,
        answer_weight=20.0, lr=1e-5, conv_lr=1e-5,
    )  # fmt: skip


# --- What is measured -------------------------------------------------------------------


def random_ids(L: int, options: Options) -> np.ndarray:
    return np.random.default_rng(0).integers(0, options.vocab, L)


def add_gradients(adapted: AdaptedLlama, L: int, options: Options, n: int = 0,
                  done: Callable[[int], None] = lambda tokens: None) -> None:  # fmt: skip
    """Those of step n, of sequences of L tokens: random tokens, in lines of 16."""
    ids, tokenizer = torch.from_numpy(random_ids(L, options)), Tokenizer(TINY)
    facts = 0 if adapted.settings.compressor == "paper" else options.facts  # as its recipe has it
    ids[::16] = min(fact_tokens(tokenizer).breaks) % options.vocab

    def draw(i: int) -> tuple[Tensor, Tensor]:
        told, ago = tell(ids, facts, "training", 0, i, tokenizer)
        return told % options.vocab, ago

    config = train_config(adapted, L, options)
    gradients(adapted, draw, config, machine_of(options), n, done)


def train_time(adapted: AdaptedLlama, options: Options) -> float:
    """Seconds of a step, as train.py takes it."""
    optimizer = make_optimizer(adapted, train_config(adapted, options.seq, options))

    def three_steps() -> None:
        for n in range(3):
            optimizer.zero_grad()
            add_gradients(adapted, options.seq, options, n)
            torch.nn.utils.clip_grad_norm_(adapted.trained().values(), 1.0)
            optimizer.step()

    return seconds(three_steps, options) / 3


def prefill_time(adapted: AdaptedLlama, options: Options) -> float:
    tokens = torch.from_numpy(random_ids(options.seq, options))[None].to(options.device)
    cache = adapted.cache()
    with machine_of(options).precision():
        return seconds(lambda: prefill(adapted.model, tokens, cache, options.segment), options)


def filled(adapted: AdaptedLlama, n: int, options: Options) -> KVCache:
    """A cache as it is after n tokens, but with random entries."""
    cache, s, config = adapted.cache(), adapted.settings, adapted.model.config
    held = min(n, s.room) if s.mem else n
    dtype = getattr(torch, options.dtype)
    for layer in range(config.n_layers):
        shape = (1, config.n_kv_heads, held, config.head_dim)
        cache.keys[layer] = Entries(torch.randn(shape, device=options.device, dtype=dtype))
        cache.values[layer] = Entries(torch.randn(shape, device=options.device, dtype=dtype))
        if s.mem and cache.scoring:
            cache.scores[layer] = torch.rand(shape[:3], device=options.device)
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

    with machine_of(options).precision():
        write(1)  # after this one a memory has just been compressed
        return seconds(lambda: write(count), options) / count


def kept_bytes(adapted: AdaptedLlama, L: int, options: Options) -> int:
    """The most that a step on L tokens keeps at once for a backward pass, without weights."""
    weights = {p.untyped_storage().data_ptr() for p in adapted.parameters()}
    kept, sums = {}, []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    def done(tokens: int) -> None:  # a backward pass has ended
        sums.append(sum(kept.values()))
        kept.clear()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        add_gradients(adapted, L, options, done=done)
    return max(sums)


def measure(
    models: dict[str, AdaptedLlama], options: Options
) -> dict[str, dict[str, list]]:
    """{column: {row: the values of all rounds}}. Training comes first, as it ends before a model
    reads."""
    columns = defaultdict(lambda: defaultdict(list))

    def take_turns(column: str, value: Callable[[AdaptedLlama], float]) -> None:
        for turn in range(options.rounds + 1):
            for row, adapted in models.items():
                found = value(adapted)
                if turn:  # the first round warms up
                    columns[column][row].append(found)

    if "train" in options.parts:
        take_turns("train, s", lambda adapted: train_time(adapted, options))
    for L in (options.seq, options.long) if "memory" in options.parts else []:
        for row, adapted in models.items():
            if L == options.seq or adapted.settings.mem:  # `full` would take L x L
                columns[f"memory {L:,}, MB"][row].append(kept_bytes(adapted, L, options) / 1e6)
    for adapted in models.values():
        adapted.end_training()
    if "prefill" in options.parts:
        take_turns("prefill, s", lambda adapted: prefill_time(adapted, options))
    for n in options.contexts if "decode" in options.parts else []:
        take_turns(f"decode {n:,}, ms", lambda adapted: 1000 * decode_time(adapted, n, options))
    return columns


# --- The table --------------------------------------------------------------------------


def print_table(columns: dict[str, dict[str, list]], rows: list[str]) -> None:
    width = max(map(len, rows))
    print(f"{'':{width}}" + "".join(f"{column:>20}" for column in columns))
    for row in rows:
        line = f"{row:{width}}"
        for values in columns.values():
            if row in values:
                value = statistics.median(values[row])
                line += f"{value:>13.4g}{value / statistics.median(values['window']):>7.2f}"
            else:
                line += f"{'-':>13}{'-':>7}"
        print(line)


def parse() -> Options:
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=plain)
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS,
        help="what to measure (default: everything)")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS),
        help="methods; the window is always there (default: all)")
    add("--model", type=Path, help="a base model instead of random weights of these sizes:")
    positive = at_least(1)
    sizes = dict(dim=256, layers=4, heads=4, ffn=688, vocab=2048)
    for name, size in sizes.items():
        add(f"--{name}", type=positive, default=size, help=f"of random weights (default: {size})")
    add("--mem", type=positive, default=128, help="slots M (default: 128)")
    add("--segment", type=positive, default=128, help="tokens T of a segment (default: 128)")
    add("--seq", type=positive, default=2048, help="tokens of a sequence (default: 2048)")
    add("--long", type=positive, default=32768,
        help="the other length, in tokens, whose training memory is shown (default: 32768)")
    add("--contexts", type=positive, nargs="+", default=[2048, 32768],
        help="tokens before decoding (default: 2048 32768)")
    add("--bptt", type=positive, default=4,
        help="segments that the gradient spans (default: 4, as the embedded model's recipe)")
    add("--facts", type=at_least(0), default=8,
        help="in a sequence; without any there is one backward pass (default: 8)")
    add("--lora-rank", type=at_least(0), default=8,
        help="of all rows; 0 leaves the base frozen, for prefill and decode (default: 8)")
    add("--rounds", type=positive, default=5,
        help="turns of each method; one more warms up (default: 5)")
    add("--device", default="cpu", help="cpu or cuda (default: cpu)")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the base model (default: float32)")
    options = Options(**vars(parser.parse_args()))
    if not options.lora_rank and {"train", "memory"} & set(options.parts):
        parser.error("--lora-rank 0: the window has nothing to train; give --parts prefill decode")
    return options


def main() -> None:
    options = parse()
    prepare(options.device, options.dtype)
    if options.model:
        model = load_llama(options.model, getattr(torch, options.dtype), options.device)
        options = replace(options, vocab=model.config.vocab_size)
    else:
        heads = dict(n_heads=options.heads, n_kv_heads=options.heads)
        sizes = dict(ffn_dim=options.ffn, vocab_size=options.vocab)
        config = LlamaConfig(options.dim, options.layers, **heads, **sizes)
        model = Llama(config).to(options.device, getattr(torch, options.dtype))
    rows = [row for row in ROWS if row == "window" or row in options.rows]
    sizes = f"M = {options.mem}, T = {options.segment}, L = {options.seq:,}"
    machine = f"{options.dtype} on {options.device}, {torch.get_num_threads()} threads"
    print(f"{sizes}; {machine}, torch {torch.__version__}; {options.rounds} rounds")
    print_table(measure({row: make(row, model, options) for row in rows}, options), rows)


if __name__ == "__main__":
    run_program(main)
