"""What the method costs: training, prefill, decoding, loading and start-up, each method beside the others in one run.

    python tests/bench.py                                        # minutes on one core of a CPU
    python tests/bench.py --parts train prefill --preset 7B --device cuda --dtype bfloat16 --mem 512 --segment 512 \\
                          --seq 16384 --recompute                # a GPU; weights are random, nothing is downloaded

Methods take turns, several times over; medians are printed, ratios within the run. Training is one optimizer step on
one batch of whole sequences (LoRA, embeddings, norms and compressors train; the gradient reaches back over --bptt
segments); `full` has its sequence in one piece there. Decoding starts from caches filled with random entries: what a
token costs depends on how many there are, not on what they say; a memory is timed over T tokens, so that one
compression is in. FLOP are those of a plain convolution, also where a spectrum needs fewer (so some rows pass 100 % of
the matrix product's rate), and of a gradient over one segment.
"""

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor
from tqdm import tqdm

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))
from eval_ppl import precision  # noqa: E402
from lococo import ALL, METHODS, Compressor, LoCoCo, Memory, Settings, convolve, prefill  # noqa: E402
from model import PRESETS, KVCache, Llama, LlamaConfig  # noqa: E402
from train import backward_through, make_optimizer, set_rates  # noqa: E402

M8 = "1/8 merged"  # the rest of the memory verbatim


def recipe(M: int, **changes) -> dict:
    """The embedded model's (train.RECIPES), by slot; positions=None: the method's own, so no key is turned."""
    own = dict(sinks=4, recent=M * 7 // 8 - 4, filters=1, normalise="softmax", positions="slots")
    return own | changes


KINDS = {  # row: method and settings, for M slots
    "full": lambda M: ("full", {}),
    "streaming": lambda M: ("streaming", {}),
    "h2o": lambda M: ("h2o", {}),
    "lococo": lambda M: ("lococo", {}),
    "lococo, one filter": lambda M: ("lococo", dict(filters=1)),
    "lococo, depthwise": lambda M: ("lococo", dict(depthwise=True)),
    "lococo+h2o": lambda M: ("lococo+h2o", {}),
    f"lococo, {M8}, depthwise": lambda M: ("lococo", recipe(M, filters=None, depthwise=True, positions=None)),
    f"lococo, {M8}, one filter": lambda M: ("lococo", recipe(M)),
}  # fmt: skip


# --- What is counted -----------------------------------------------------------------------------------------


def flops(config: LlamaConfig, s: Settings, B: int, L: int, train: bool = False, recompute: bool = False) -> float:
    """Floating-point operations of a prefill of (B, L), or of a training pass over it; LoRA unmerged.

    Training: the base is frozen, so it costs a forward pass and the gradient of its activations; attention has
    twice its forward pass to go back, LoRA and convolutions a gradient for their weights, and mixing one for W (the
    keys it mixes are detached); but for a plain softmax, what follows the first convolution is computed again before.
    """
    c, D, heads = config, config.head_dim, B * config.n_layers * config.n_kv_heads
    widths = 2 * c.n_heads * D + 2 * c.n_kv_heads * D  # of wq, wk, wv, wo together
    blocks, output = 2 * B * L * c.n_layers * c.dim * (widths + 3 * c.ffn_dim), 2 * B * c.dim * c.vocab_size
    lora = 2 * B * L * c.n_layers * s.lora_rank * (4 * c.dim + widths)
    attention, scores, conv, second, mixing = 0, 0, 0, 0, 0  # second: the convolution after a depthwise one
    for start in range(0, L, s.segment):
        T, held = min(s.segment, L - start), min(start, s.mem + s.segment if s.mem else start)
        if s.mem and held + T > s.mem + s.segment:
            rest = held - s.sinks - s.heavy - s.recent
            if s.merged:
                conv += heads * 2 * rest * 2 * D * s.kernel * (1 if s.depthwise else s.filters)
                second += heads * 2 * rest * 2 * D * s.filters * s.depthwise
                mixing += heads * 2 * size_of_w(s, rest) * 2 * D
            scores += heads * 2 * size_of_w(s, rest) * 2 * s.scored
            held = s.mem
        attention += B * c.n_layers * c.n_heads * 4 * D * (T * held + T * (T + 1) // 2)
        scores += B * c.n_layers * c.n_heads * 2 * D * T * (held + T) * s.scored
    if not train:
        return blocks + output + lora + attention + scores + conv + second + mixing  # logits of the last token only
    again = blocks - 2 * B * L * c.n_layers * c.dim * c.ffn_dim if recompute else 0  # w2's outcome is not needed
    again += 0 if s.normalise == "softmax" and s.blend is None else second + mixing
    return 2 * (blocks + output * L + conv + mixing) + 3 * (lora + attention + second) + scores + again


def size_of_w(s: Settings, rest: int) -> int:
    """Numbers in one W over so many entries, without what is zero outside of its blocks; a blend fills all of it."""
    return rest * (s.filters if s.blend is None else s.merged)


def matmul_rate(device: str, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product, the machine's own."""
    n = 8192 if device == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n**3 / seconds(lambda: a @ a, device, 9)


def seconds(work: Callable, device: str, repeat: int = 1) -> float:
    times = []
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def peak_bytes(work: Callable, device: str) -> int:
    """The most memory that `work` holds on top of what there was before."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed still counts as the process's
    before, most, done = own_memory(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], own_memory())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    work()
    done.set()
    watcher.join()
    return max(most[0] - before, 0)


def own_memory() -> int:
    """Bytes that are the process's alone (Linux): files mapped into it do not count."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("RssAnon:")[1].split()[0])


def saved_bytes(work: Callable, known: set[int]) -> int:
    """Bytes that a forward pass keeps for its backward pass, the tensors at `known` addresses aside."""
    saved = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = max(saved.get(storage.data_ptr(), 0), storage.nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        work()
    return sum(saved.values())


# --- What is timed -------------------------------------------------------------------------------------------


def settings(kind: str, args: argparse.Namespace, segment: int | None = None) -> Settings:
    method, changes = KINDS[kind](args.mem)
    return Settings.of(method, args.mem, segment or args.segment, args.seq, **changes)


def train_step(lococo: LoCoCo, tokens: Tensor, args: argparse.Namespace) -> Callable:
    optimizer = make_optimizer(lococo, argparse.Namespace(lr=1e-5, conv_lr=1e-5))
    set_rates(optimizer, 1.0)

    def step() -> None:
        with precision(args):
            for _ in backward_through(lococo, tokens, tokens.numel(), args.bptt):
                pass
        optimizer.step()
        optimizer.zero_grad()

    return step


def filled(lococo: LoCoCo, B: int, n: int) -> KVCache:
    """A cache as it is after n tokens; its entries are random."""
    cache, c = lococo.cache(), lococo.model.config
    held = n if lococo.settings.mem is None else min(n, lococo.settings.mem + lococo.settings.segment)
    weight = lococo.model.output.weight
    for layer in range(c.n_layers):
        x = torch.randn(B, c.n_kv_heads, held, c.head_dim, device=weight.device, dtype=weight.dtype)
        cache.write(layer, 0, x, x)
        if isinstance(cache, Memory) and lococo.settings.scored:
            cache.scores[layer] = torch.rand(B, c.n_kv_heads, held, 2, device=weight.device)
    cache.seen = n
    return cache


def measure(model: Llama, args: argparse.Namespace) -> list[dict]:
    """A dictionary for every (part, method, where): seconds of every round and what goes with them."""
    tokens = torch.randint(0, model.config.vocab_size, (args.batch, args.seq), device=args.device)
    rows = {}
    rounds = [(r, kind) for r in range(args.rounds + 1) for kind in args.methods]  # the first one warms up
    for r, kind in tqdm(rounds, unit=" turns", disable=None):
        whole = args.seq if METHODS[KINDS[kind](args.mem)[0]].sinks == ALL else None

        def note(part: str, time: float, **more) -> None:
            row = rows.setdefault((part, kind, *more.values()), {"part": part, "method": kind, "seconds": [], **more})
            if r:
                row["seconds"].append(time)

        if "train" in args.parts:
            lococo = LoCoCo(model, settings(kind, args, whole))
            lococo.start_training()
            model.recompute = args.recompute
            step = train_step(lococo, tokens, args)
            note("train", seconds(step, args.device))
            if r == 1:
                s = lococo.settings
                row = rows["train", kind]
                row["peak_bytes"] = peak_bytes(step, args.device)
                row["flops"] = flops(model.config, s, args.batch, args.seq, True, args.recompute)
            model.recompute = False
            lococo.remove()
            model.requires_grad_(False)
        lococo = LoCoCo(model, settings(kind, args))
        if r == 1 and "train" in args.parts and lococo.settings.merged:
            rows["train", kind] |= compressor_bytes(lococo, args)
        with torch.no_grad(), precision(args):
            if "prefill" in args.parts:
                note("prefill", seconds(lambda: prefill(model, tokens, lococo.cache(), args.segment), args.device))
                rows["prefill", kind]["flops"] = flops(model.config, lococo.settings, args.batch, args.seq)
            for B in args.batches if "decode" in args.parts else []:
                caches, token = [filled(lococo, B, n) for n in args.contexts], tokens[:1, :1].expand(B, 1)
                count = args.segment if lococo.settings.mem else min(args.segment, 16)
                for n, took in zip(args.contexts, decode(model, token, caches, count, args.device)):
                    note("decode", took / count, context=n, batch=B)
        lococo.remove()
    return list(rows.values())


def convolutions(config: LlamaConfig, args: argparse.Namespace) -> list[dict]:
    """The first convolution of a compression of one layer, by `Conv1d` as the official code has it and as here."""
    rows = []
    for kind in args.methods:
        s = settings(kind, args)
        if not s.merged:
            continue
        rest, channels = args.mem + args.segment - s.sinks - s.heavy - s.recent, 2 * config.head_dim
        with torch.device(args.device):
            conv = Compressor(config.head_dim, s.merged, s.kernel, filters=s.filters, depthwise=s.depthwise).convs[0]
            x = torch.randn(args.batch * config.n_kv_heads, rest, channels, dtype=args.dtype)
            dy = torch.randn(len(x), conv.out_channels, rest, dtype=args.dtype)
        conv.to(args.dtype)
        ways = {"Conv1d": lambda conv, x: conv(x.transpose(1, 2)), "here": convolve}

        def there_and_back(way: Callable) -> None:
            way(conv, x).backward(dy)

        found = {name: ([], []) for name in ways}
        for r in range(10 * args.rounds + 3):
            for name, way in ways.items():
                with torch.no_grad():
                    forward = seconds(partial(way, conv, x), args.device)
                times = forward, seconds(partial(there_and_back, way), args.device)
                if r >= 3:
                    for each, time in zip(found[name], times):
                        each.append(time)
        rows += [{"part": "convolution", "method": kind, "way": name, "channels": conv.out_channels, "entries": rest,
                  "seconds": forward, "backward_seconds": both} for name, (forward, both) in found.items()]  # fmt: skip
    return rows


def decode(model: Llama, token: Tensor, caches: list[KVCache], count: int, device: str) -> list[float]:
    """Seconds for so many tokens after each cache; the caches take turns of 16 tokens, so that noise is shared."""

    def write(cache: KVCache, tokens: int) -> None:
        for _ in range(tokens):
            model(token, cache)

    for cache in caches:
        write(cache, 1)
    took = [0.0] * len(caches)
    for done in range(0, count, 16):
        for n, cache in enumerate(caches):
            took[n] += seconds(partial(write, cache, min(16, count - done)), device)
    return took


def compressor_bytes(lococo: LoCoCo, args: argparse.Namespace) -> dict[str, int]:
    """What a compression of all layers keeps for its backward pass, and the size of its mixing matrices."""
    cache, s, c = filled(lococo, args.batch, args.mem + args.segment), lococo.settings, lococo.model.config
    lococo.compressors.requires_grad_(True)
    known = {t.untyped_storage().data_ptr() for t in [*lococo.compressors.parameters(), *cache.keys, *cache.values]}
    known |= {x.untyped_storage().data_ptr() for x in lococo.model.parameters()}
    kept = []
    with precision(args):
        saved = sum(saved_bytes(lambda: kept.append(cache.compress(n, cache.keys[n], cache.values[n])), known)
                    for n in range(c.n_layers))  # fmt: skip
    lococo.compressors.requires_grad_(False)
    rest = args.mem + args.segment - s.sinks - s.heavy - s.recent
    matrices = args.batch * c.n_layers * c.n_kv_heads * size_of_w(s, rest)
    return {"compressor_bytes": saved, "mixing_bytes": matrices * cache.keys[0].element_size()}


def loading(folder: Path) -> dict:
    """A checkpoint of 2 GB in bfloat16, Hugging Face's layout: load it, beside reading its files once."""
    from safetensors.torch import save_file

    from model import hugging_face_name

    sizes = dict(hidden_size=2048, num_hidden_layers=18, num_attention_heads=16, intermediate_size=5504,
                 vocab_size=32000, rms_norm_eps=1e-5, max_position_embeddings=4096)  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    config = LlamaConfig(2048, 18, 16, 16, 5504)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in Llama(config).named_parameters()}
    save_file({hugging_face_name(n): torch.zeros(shape, dtype=torch.bfloat16) for n, shape in shapes.items()},
              folder / "model.safetensors")  # fmt: skip
    weights = 2 * sum(shape.numel() for shape in shapes.values())
    loads, reads, models = [], [], []

    def read() -> None:  # into new memory, which a loader has to ask for too
        (folder / "model.safetensors").read_bytes()

    def load() -> None:
        models[:] = [Llama.from_pretrained(folder, dtype=torch.bfloat16)]

    read()
    for _ in range(3):
        reads.append(seconds(read, "cpu"))
        models.clear()
        loads.append(seconds(load, "cpu"))
    models.clear()
    return {"part": "load", "method": "from_pretrained", "seconds": loads, "read_seconds": reads,
            "weight_bytes": weights, "peak_bytes": peak_bytes(load, "cpu")}  # fmt: skip


START = """
import sys, time, torch
begun = time.perf_counter()
class First:
    def write(self, text):
        if text:
            print(time.perf_counter() - begun, file=sys.__stdout__, flush=True)
            import os; os._exit(0)
    def flush(self): pass
sys.stdout = First()
import runpy
runpy.run_path("generate.py", run_name="__main__")
"""


def start_up() -> dict:
    """Seconds from the end of `import torch` to the first character of text, in fresh processes."""
    words = [sys.executable, "-c", START, "--prompt", "tests/conftest.py"]
    runs = [subprocess.run(words, cwd=HOME, check=True, capture_output=True, text=True) for _ in range(4)]
    return {"part": "start", "method": "generate.py", "seconds": [float(run.stdout) for run in runs[1:]]}


# --- Tables --------------------------------------------------------------------------------------------------


def show(title: str, head: list[str], lines: list[list[str]]) -> None:
    first = max(len(line[0]) for line in lines)
    print(f"\n{title}\n{'':{first}}" + "".join(f"{h:>13}" for h in head))
    for name, *cells in lines:
        print(f"{name:{first}}" + "".join(f"{cell:>13}" for cell in cells))


def print_tables(rows: list[dict], rate: float, args: argparse.Namespace) -> None:
    where = ("way", "context", "batch")
    find = {(row["part"], row["method"], *(row[k] for k in where if k in row)): row for row in rows}
    middle = {key: statistics.median(row["seconds"]) for key, row in find.items()}

    def against(key: tuple, name: str) -> str:
        other = (key[0], name, *key[2:])
        return f"{middle[key] / middle[other]:.2f}" if other in middle else "-"

    for part, unit in (("train", "s/step"), ("prefill", "s")):
        lines = []
        for key, row in find.items():
            if key[0] == part:
                line = [key[1], f"{middle[key]:.3f}", f"{args.batch * args.seq / middle[key]:,.0f}",
                        against(key, "full"), against(key, "streaming"), f"{row['flops'] / 1e9:,.0f}",
                        f"{row['flops'] / middle[key] / rate:.0%}"]  # fmt: skip
                if part == "train":
                    line.append(f"{row['peak_bytes'] / 2**20:,.0f}")
                    line += [f"{row[k] / 2**20:.1f}" if k in row else "-" for k in ("compressor_bytes", "mixing_bytes")]
                lines.append(line)
        if lines:
            head = [unit, "tokens/s", "/ full", "/ streaming", "GFLOP", "of matmul"]
            head += ["peak MiB", "saved MiB", "W MiB"] if part == "train" else []
            show(f"{part}: {args.batch} x {args.seq} tokens, M = {args.mem}, T = {args.segment}", head, lines)
    for B in args.batches if "decode" in args.parts else []:
        lines = []
        for kind in args.methods:
            keys = [("decode", kind, n, B) for n in args.contexts]
            lines.append([kind, *(f"{1e3 * middle[key]:.2f}" for key in keys), against(keys[-1], "full"),
                          f"{middle[keys[-1]] / middle[keys[0]]:.2f}"])  # fmt: skip
        show(f"decode: ms for a token of each of {B} sequences, by tokens of context",
             [*(f"{n:,}" for n in args.contexts), "last / full", "last / first"], lines)  # fmt: skip
    lines = []
    for kind in args.methods if "convolution" in args.parts else []:
        if ("convolution", kind, "here") in find:
            plain, here = (find["convolution", kind, way] for way in ("Conv1d", "here"))
            line = [f"{kind}: to {here['channels']} channels, {here['entries']} entries"]
            for k in ("seconds", "backward_seconds"):
                times = [statistics.median(row[k]) for row in (plain, here)]
                line += [*(f"{1e3 * t:.2f}" for t in times), f"{times[0] / times[1]:.2f}"]
            lines.append(line)
    if lines:
        head = ["Conv1d", "here", "ratio", "+ backward", "here", "ratio"]
        show("convolution: ms for the first one of a layer's compression", head, lines)
    for row in rows:
        if row["part"] == "load":
            took, read = statistics.median(row["seconds"]), statistics.median(row["read_seconds"])
            print(f"\nload: {row['weight_bytes'] / 1e9:.2f} GB in {took:.2f} s, {took / read:.2f} times reading "
                  f"the file; own memory {row['peak_bytes'] / row['weight_bytes']:.2f} times the weights")  # fmt: skip
        if row["part"] == "start":
            print(f"\nstart: {statistics.median(row['seconds']):.2f} s from `import torch` to the first character")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    parts = ("train", "prefill", "decode", "convolution", "load", "start")
    add("--parts", nargs="+", choices=parts, default=list(parts))
    add("--methods", nargs="+", choices=KINDS, default=list(KINDS))
    add("--preset", choices=PRESETS, help="sizes of the model, instead of the next flags")
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=4)
    add("--kv-heads", type=int, default=4)
    add("--ffn", type=int, default=688)
    add("--vocab", type=int, default=2048)
    add("--mem", type=int, default=128)
    add("--segment", type=int, default=128)
    add("--seq", type=int, default=2048)
    add("--batch", type=int, default=1)
    add("--rounds", type=int, default=5, help="turns of each method; one more warms up")
    add("--threads", type=int, default=1)
    add("--contexts", type=int, nargs="+", default=[1024, 2048, 16384, 32768])
    add("--batches", type=int, nargs="+", default=[1, 8], help="sequences that are decoded together")
    add("--device", choices=("cpu", "cuda"), default="cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add("--bptt", type=int, default=1, help="segments that the gradient reaches back over (the recipe: 4)")
    add("--recompute", action="store_true", help="activation checkpointing in training")
    add("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    args.dtype = getattr(torch, args.dtype)
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    sizes = LlamaConfig(args.dim, args.layers, args.heads, args.kv_heads, args.ffn, args.vocab)
    config = LlamaConfig.preset(args.preset) if args.preset else sizes
    rows, rate = [], matmul_rate(args.device, args.dtype)
    if {"train", "prefill", "decode"} & set(args.parts):
        torch.set_default_dtype(args.dtype)
        with torch.device(args.device):  # random weights, made where they will be
            model = Llama(config).requires_grad_(False)
        torch.set_default_dtype(torch.float32)
        rows = measure(model, args)
        del model
    if "convolution" in args.parts:
        rows += convolutions(config, args)
    if "load" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(loading(Path(folder)))
    if "start" in args.parts:
        rows.append(start_up())
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {args.threads} threads"
    print(f"{name}, {args.dtype}, torch {torch.__version__}; matrix product {rate / 1e9:,.0f} GFLOP/s; "
          f"medians of {args.rounds} rounds")  # fmt: skip
    print_tables(rows, rate, args)
    if args.json:
        about = {name: str(value) for name, value in vars(args).items()} | {"cores": os.cpu_count(), "matmul": rate}
        args.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
