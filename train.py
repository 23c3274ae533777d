"""Extend a pretrained Llama-2: tune compressors, LoRA, embeddings and norms on long sequences, segment by segment.

    python train.py                               # the embedded model, CPU
    python train.py --mem 512 --seq 8192          # the same, 8 times its pretrained context
    python train.py --model Llama-2-7b-hf --data RedPajama/ --mem 512 --seq 32768
    python train.py --resume runs/my-run          # go on after Ctrl-C, a crash or a power cut
    torchrun --nproc_per_node=4 train.py ...      # the sequences of a step shared out; on many machines likewise
"""

import argparse
import fcntl
import itertools
import json
import math
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Callable, Iterator, TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from eval_ppl import (
    HERE, TINY, Corpus, Parser, exit_on_user_error, from_first, join, leave, load_base, perplexity, precision,
    processes, scored_batches,
)  # fmt: skip
from lococo import METHODS, NORMALISE, LoCoCo, Settings, read_file, segment_losses, whole, write_file
from model import KVCache, Tokenizer, UserError, attend

# --- Sequences -----------------------------------------------------------------------------------------------


class Sequences:
    """Training sequences of L tokens: the documents, shuffled anew for each pass, one after the other, cut to L.

    Sequence i depends on nothing but (corpus, L, seed, i).
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, L: int, seed: int):
        self.corpus, self.documents, self.L, self.seed = corpus, documents, L, seed
        lengths = documents[:, 2] - documents[:, 1] + 1
        self.per_pass, self.epoch = int(lengths.sum()) // L, None
        if self.per_pass == 0:
            raise UserError(f"the text has {int(lengths.sum())} tokens to train on, a sequence needs {L}")

    def __getitem__(self, i: int) -> np.ndarray:
        epoch, i = divmod(i, self.per_pass)
        if epoch != self.epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
            self.epoch, self.order = epoch, self.documents[order]
            self.ends = np.cumsum(self.order[:, 2] - self.order[:, 1] + 1)
            # Neighbours in the stream share a document: visited out of order, a batch holds different ones.
            self.visits = np.random.default_rng((self.seed, epoch, 1)).permutation(self.per_pass)
        position = int(self.visits[i]) * self.L
        pieces, need = [], self.L
        d = int(np.searchsorted(self.ends, position, side="right"))
        while need:
            start = position - (self.ends[d - 1] if d else 0)
            pieces.append(self.corpus.read(self.order[d], start, start + need))
            position, need, d = position + len(pieces[-1]), need - len(pieces[-1]), d + 1
        return np.concatenate(pieces)


# --- Recipes -------------------------------------------------------------------------------------------------

# Both: AdamW without weight decay, linear decay to 0, LoRA alpha 16 on q, k, v, o; gradients clipped at norm 1, which
# the official code does not do.
RECIPES = {
    #              embedded  Llama-2: the paper
    "method":      ("lococo",   "lococo"),
    "mem":         (128,        512),
    "sinks":       (4,          0),
    "heavy":       (0,          0),
    "recent":      (None,       0),  # None: 7/8 of the memory, less sinks and heavy
    "positions":   ("slots",    "interpolated"),
    "segment":     (None,       512),  # None: as many tokens as slots
    "seq":         (2048,       8192),
    "kernel":      (21,         21),
    "filters":     (1,          0),  # 0: one for each merged slot
    "normalise":   ("softmax",  "sum"),
    "score":       ("sum",      "sum"),
    "lora_rank":   (8,          8),
    "lr":          (1e-3,       5e-5),
    "conv_lr":     (5e-2,       5e-2),
    "steps":       (160,        200),
    "batch":       (2,          128),
    "micro_batch": (2,          1),
    "bptt":        (4,          1),
}  # fmt: skip
EVALUATED = 64  # held-out documents that a run is scored on, at most

# --- Training ------------------------------------------------------------------------------------------------


class ShiftedGroups(KVCache):
    """LongLoRA's training attention (arXiv 2309.12307): quarters of a sequence attend within themselves, and for the
    second half of the heads the borders are moved by half a quarter. Its ends are groups of their own there, so that
    the sequence's end does not leak to its start. Nothing is kept: a whole sequence must enter at once."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        H, G, L = q.shape[1], k.shape[1], q.shape[2]
        k, v = k.repeat_interleave(H // G, dim=1), v.repeat_interleave(H // G, dim=1)
        size = -(-L // 4)
        edges = [range(0, L, size), [0, *range(size // 2, L, size)]]
        halves = []
        for heads, starts in zip((slice(0, H // 2), slice(H // 2, H)), edges):
            groups = [slice(a, b) for a, b in zip(starts, [*starts[1:], L]) if b > a]
            halves.append(torch.cat([attend(q[:, heads, g], k[:, heads, g], v[:, heads, g]) for g in groups], dim=2))
        return torch.cat(halves, dim=1)


def check_shard(args: argparse.Namespace, number: int) -> None:
    """Blocks are gathered by all processes at the same moment, so that all must have as many sequences."""
    if number == 1:
        raise UserError("--shard: there is one process; start several with torchrun")
    if args.batch % (number * args.micro_batch):
        raise UserError(f"--shard: --batch {args.batch} must be a multiple of --micro-batch {args.micro_batch} times "
                        f"the {number} processes")  # fmt: skip


def shard(lococo: LoCoCo, args: argparse.Namespace) -> None:
    """Each process keeps a part of every tensor, frozen or trained, and gathers a block only while it runs (FSDP2)."""
    from torch.distributed.fsdp import fully_shard  # here, as it takes a second to import

    mesh = dist.init_device_mesh(torch.device(args.device).type, (processes()[1],))
    for module in (*lococo.compressors, *lococo.model.layers, lococo.model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)  # the parameters are always the parts then


def like(t: Tensor, p: Tensor) -> Tensor:
    """A copy of t where p is, and in parts if p is."""
    if not hasattr(p, "full_tensor"):
        return t.to(p.device, copy=True)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(t.to(p.device), p.device_mesh, p.placements)


def add_up(lococo: LoCoCo, now: bool) -> None:
    """Whether the next backward pass of a model in parts adds up the gradients of all since the last that did."""
    for module in (*lococo.compressors, lococo.model):
        module.set_requires_gradient_sync(now)


def make_optimizer(lococo: LoCoCo, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW without weight decay, one learning rate for the compressors and one for the rest; see `set_rates`."""
    groups = [{"params": list(tensors.values()), "initial_lr": args.conv_lr if group == "compressors" else args.lr}
              for group, tensors in lococo.groups().items()]  # fmt: skip
    return torch.optim.AdamW(groups, weight_decay=0.0)


def set_rates(optimizer: torch.optim.Optimizer, left: float) -> None:
    """The learning rates of a step with this share of the steps left: linear decay to 0."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * left


def backward_through(lococo: LoCoCo, tokens: Tensor, scored: int, bptt: int = 1) -> Iterator[float]:
    """One pass over tokens (B, L) from an empty memory, adding to the gradients every `bptt` segments.

    Yields their summed loss; what is differentiated is that divided by `scored`, the tokens of the step.
    """
    cache = ShiftedGroups(lococo.model.config.n_layers) if METHODS[lococo.settings.method].groups else lococo.cache()
    for losses in segment_losses(lococo.model, tokens, cache, lococo.settings.segment, bptt):
        loss = losses.sum()
        if loss.requires_grad:  # without LoRA nothing that trains comes before the first compression
            (loss / scored).backward()  # at once, so that the graph of these segments is all there ever is
        yield loss.item()


def gradients_of_step(lococo: LoCoCo, data: Sequences, args: argparse.Namespace, step: int, stop: list,
                      done: Callable[[int], None]) -> tuple[float, bool]:  # fmt: skip
    """Gradients of the mean loss of a step: (the loss summed over all processes, whether one was asked to stop).

    The args.batch sequences are dealt out to the processes, which read args.micro_batch of them at a time; done(n)
    is told of every n tokens. What is in `stop` ends it after the segments that are under way (with --shard after
    args.micro_batch sequences, by agreement, as nobody can gather a block alone).
    """
    rank, number = processes()
    scored, total, halt = args.batch * (args.seq - 1), 0.0, [] if args.shard else stop
    if args.shard:  # which takes the mean over processes
        scored /= number
    own = range(step * args.batch + rank, (step + 1) * args.batch, number)
    piece = lococo.settings.segment * args.bptt  # tokens of a backward pass
    for n in range(0, len(own), args.micro_batch):
        if args.shard:
            halt = exchange([], [float(len(stop))], args)[0]
        if halt:
            break
        tokens = torch.from_numpy(np.stack([data[i] for i in own[n : n + args.micro_batch]])).to(args.device)
        starts = range(0, args.seq - 1, piece)
        with precision(args):
            losses = backward_through(lococo, tokens, scored, args.bptt)
            for start in starts:
                if args.shard:
                    add_up(lococo, n + args.micro_batch >= len(own) and start == starts[-1])
                total += next(losses)
                done(len(tokens) * min(piece, args.seq - 1 - start))
                if halt:
                    break
    parameters = [] if args.shard else list(lococo.named_parameters().values())
    total, stops = exchange(parameters, [total, float(len(stop))], args)
    return total, stops > 0


def exchange(parameters: list[nn.Parameter], numbers: list[float], args: argparse.Namespace) -> list[float]:
    """Add up gradients, and some numbers, over all processes in one go."""
    if processes()[1] == 1:
        return numbers
    pieces = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    pieces.append(torch.tensor(numbers, device=args.device))
    flat = torch.cat([piece.flatten() for piece in pieces])
    dist.all_reduce(flat)
    *gradients, numbers = flat.split([piece.numel() for piece in pieces])
    for p, gradient in zip(parameters, gradients):
        p.grad = gradient.view_as(p)
    return numbers.tolist()


@contextmanager
def stopping() -> Iterator[list[int]]:
    """A list into which SIGINT (Ctrl-C) or SIGTERM puts itself; a second one has its usual effect."""
    asked = []

    def ask(number: int, frame) -> None:
        asked.append(number)
        signal.signal(number, usual[number])

    usual = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


PATIENCE = 3  # steps in a row whose loss or gradient is not finite


def train(lococo: LoCoCo, data: Sequences, args: argparse.Namespace, optimizer: torch.optim.Optimizer, begin: int = 0,
          keep: Callable[[int], None] = lambda steps: None) -> int:  # fmt: skip
    """Steps from `begin` to args.steps; keep(steps done) is called every args.save_every of them and at the end.

    Returns the signal that stopped it, or 0. A step that is stopped, or whose loss or gradient is not a finite number,
    changes nothing; PATIENCE of the latter in a row raise UserError.
    """
    rank, number = processes()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    share, scored, failed = -(-args.batch // number) * number, args.batch * (args.seq - 1), 0
    shown = sys.stderr.isatty()  # a log wants fewer lines
    bar = tqdm(total=args.steps * share * (args.seq - 1), initial=begin * share * (args.seq - 1), desc="training",
               unit=" tokens", unit_scale=True, disable=rank > 0,
               mininterval=0.1 if shown else 10)  # fmt: skip
    log_file = args.out / "log.jsonl" if rank == 0 else os.devnull
    with bar, stopping() as stop, open(log_file, "a") as log:
        for step in range(begin, args.steps):
            begun = time.time()
            set_rates(optimizer, 1 - step / args.steps)
            total, stopped = gradients_of_step(lococo, data, args, step, stop, lambda n: bar.update(n * number))
            if stopped:
                optimizer.zero_grad()
                keep(step)
                return stop[0] if stop else signal.SIGTERM  # another process was asked
            norm = whole(torch.nn.utils.clip_grad_norm_(parameters, 1.0))
            fine = math.isfinite(total) and bool(norm.isfinite())
            if fine:
                optimizer.step()
            optimizer.zero_grad()
            failed = 0 if fine else failed + 1
            bar.set_postfix_str(f"step {step + 1}/{args.steps}, loss {total / scored:.3f}" + ", left out" * (not fine),
                                refresh=shown)  # fmt: skip
            row = dict(step=step + 1, loss=total / scored, tokens_per_s=round(scored / (time.time() - begun)))
            log.write(json.dumps(row) + "\n")
            log.flush()
            if failed == PATIENCE:
                raise UserError(f"step {step + 1}: the loss is {total / scored:g}, its gradient's norm {norm:g}, and "
                                f"{PATIENCE} steps in a row were left out; try a lower --lr or --conv-lr in a new "
                                f"run. {args.out} keeps the state before them")  # fmt: skip
            if fine and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
                keep(step + 1)
    return 0


# --- The state of a run --------------------------------------------------------------------------------------


def save_state(lococo: LoCoCo, optimizer: torch.optim.Optimizer, file: Path | None, **about) -> None:
    """All that the rest of a training depends on: what trains, AdamW's moments, the random state, and `about`.

    The data's order needs no state: `Sequences` knows the sequence of any step. No file: see `LoCoCo.save`.
    """
    tensors = {"random": torch.get_rng_state()}
    for name, p in lococo.named_parameters().items():
        parts = {"value": p, **optimizer.state[p]}
        tensors |= {f"{key}.{name}": whole(t.detach()).cpu() for key, t in parts.items()}
    if file:
        write_file(file, "state", tensors, base=lococo.base, **about)


@torch.no_grad()
def restore_state(lococo: LoCoCo, optimizer: torch.optim.Optimizer, text: int, args: argparse.Namespace) -> int:
    """Put the state that --resume has read in place; returns the steps done."""
    tensors, about = args.state
    if about["base"] != lococo.base:
        raise UserError(f"--resume {args.resume}: the model {args.model or 'tiny/'} has changed since")
    if about["text"] != text:
        raise UserError(f"--resume {args.resume}: the text to train on has changed since")
    torch.set_rng_state(tensors["random"])
    for name, p in lococo.named_parameters().items():
        p.copy_(like(tensors[f"value.{name}"], p))
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key}.{name}" in tensors:  # none before the first step
                t = tensors[f"{key}.{name}"]
                optimizer.state[p][key] = t if key == "step" else like(t, p)
    if processes()[0] == 0:  # steps after the state will be done again
        log = args.out / "log.jsonl"
        os.truncate(log, sum(map(len, log.read_bytes().splitlines(keepends=True)[: about["step"]])))
    return about["step"]


MAY_CHANGE = ("save_every", "micro_batch", "recompute", "shard")  # from what a resumed run had, if given
OF_A_START = ("out", "resume", "state", "device")  # not recorded


def recorded(args: argparse.Namespace) -> dict:
    """The flags as a state file has them, which a resumed run takes from there; paths from the root."""

    def plain(value):
        if isinstance(value, list):
            return [plain(item) for item in value]
        value = value.resolve() if isinstance(value, Path) else value
        return str(value).removeprefix("torch.") if isinstance(value, (Path, torch.dtype)) else value

    return {name: plain(value) for name, value in vars(args).items() if name not in OF_A_START}


def resumed(args: argparse.Namespace, parser: Parser) -> argparse.Namespace:
    """The flags of the run that --resume names; others may be given if they are the same, or MAY_CHANGE."""
    file = args.resume / "state.safetensors"
    if not file.is_file() and (args.resume / "adapter.safetensors").is_file():
        raise UserError(f"--resume {args.resume}: this run is finished; eval_ppl.py {args.resume} scores its adapter")
    if not file.is_file():
        raise UserError(f"--resume {args.resume}: there is no state.safetensors of a run")
    if args.out not in (None, args.resume):
        raise UserError(f"--out {args.out}: --resume goes on in {args.resume}; leave it out")
    args.state, args.out, given = read_file(file, "state"), args.resume, recorded(args)
    for name, value in args.state[1]["flags"].items():
        if given[name] in (parser.get_default(name), value):
            setattr(args, name, value)
        elif name not in MAY_CHANGE:
            raise UserError(f"--{name.replace('_', '-')} {given[name]}: the run to resume has {value}; leave it out")
    args.model, args.data = args.model and Path(args.model), [Path(path) for path in args.data]
    return args


def reserve(out: Path, fresh: bool) -> TextIO:
    """The log of a run, open; no other process can have the run as long as it is."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log.jsonl", "a")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out}: another process is at work on this run") from None
    if fresh:  # nobody was faster
        refuse_taken(out)
    return log


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="PATH",
        help="text, folders, .jsonl(.gz), .bin of token ids (default: Python's standard library)")  # fmt: skip
    add("--out", type=Path, help="new directory of the run (default: runs/ and a name)")
    add("--recipe", choices=("embedded", "paper"), help="default: embedded for tiny/, paper for any other --model")
    add("--method", help=f"one of {', '.join(METHODS)}")
    parser.add_counts()
    add("--seq", type=int, help="trained length L in tokens")
    add("--kernel", type=int, help="taps of the convolution, odd")
    add("--filters", type=int, help="of the convolution; each fills a slot from every piece; 0: one per slot")
    add("--depthwise", action="store_true", help="a cheaper convolution: a kernel per channel, then a mix of channels")
    add("--normalise", help=f"one of {', '.join(NORMALISE)}")
    add("--blend", type=float, help="start of the official code's learnt blend with kept entries (default: none)")
    add("--lora-rank", type=int, help="0: only the compressors train (the paper's inference mode)")
    add("--lr", type=float)
    add("--conv-lr", type=float, help="learning rate of the compressors")
    add("--steps", type=int)
    add("--batch", type=int, help="sequences per step")
    add("--micro-batch", type=int, help="sequences in memory at once")
    add("--bptt", type=int, help="segments that the gradient reaches back over; memory grows as much")
    add("--recompute", action="store_true", help="activation checkpointing: less memory, more time")
    add("--shard", action="store_true", help="under torchrun: weights in parts, for models larger than a GPU")
    add("--save-every", type=int, default=10, metavar="STEPS", help="of the state that --resume goes on from")
    add("--resume", type=Path, metavar="RUN", help="go on with a run that was stopped, with the flags that it has")
    args = parser.parse_args()
    if args.save_every < 1:
        raise UserError(f"--save-every {args.save_every}: at least 1 is needed")
    if args.resume:
        return resumed(args, parser)
    embedded = args.model is None or args.model.resolve() == TINY.resolve()
    args.recipe = args.recipe or ("embedded" if embedded else "paper")
    column = ("embedded", "paper").index(args.recipe)
    own = args.method in (None, RECIPES["method"][column])  # the recipe's counts are those of its method
    for name, values in RECIPES.items():
        if getattr(args, name) is None and (own or name not in ("sinks", "heavy", "recent", "positions")):
            setattr(args, name, values[column])
    if own and args.recent is None:
        args.recent = max(args.mem * 7 // 8 - args.sinks - args.heavy, 0)
    if args.segment is None:
        args.segment = args.mem
    for name in ("steps", "batch", "micro_batch", "bptt", "lr", "conv_lr"):
        if not 0 < getattr(args, name) < math.inf:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: a number above 0 is needed")
    if args.blend is not None and not math.isfinite(args.blend):
        raise UserError(f"--blend {args.blend}: a number is needed, the official code's is 0.5")
    return args


def run_directory(args: argparse.Namespace, settings: Settings) -> Path:
    """A new directory for this run; one that holds anything, or cannot be made, is refused before any work."""
    name = HERE / "runs" / f"{settings.method}-mem{settings.mem or 'all'}-seq{args.seq}"
    numbered = (name.with_name(f"{name.name}-{i}") for i in itertools.count(2))
    out = args.out or (next(d for d in numbered if not d.exists()) if name.exists() else name)
    refuse_taken(out)
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"{out}: cannot be made, as {there} is not a directory that you may write to")
    return out


def refuse_taken(out: Path) -> None:
    """More than an empty log and a state that was never finished is there."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is not a directory")
    if out.exists() and any(f.suffix != ".part" and f.stat().st_size for f in out.iterdir()):
        raise UserError(f"--out {out} holds another run; give a new directory")


def print_groups(lococo: LoCoCo, args: argparse.Namespace) -> None:
    """The method and what trains."""
    s = lococo.settings
    counts = [f"{n} {kind}" for kind in ("sinks", "heavy", "merged", "recent") if (n := getattr(s, kind))]
    print(f"method {s.method}: {' + '.join(counts) + ' slots' if counts else 'every entry kept'}, "
          f"positions {s.positions}, RoPE factor {lococo.model.config.rope_scale:g}")  # fmt: skip
    rows = [("what trains", "tensors", "parameters", "learning rate")]
    for group, tensors in lococo.groups().items():
        rate = args.conv_lr if group == "compressors" else args.lr
        rows.append((group, str(len(tensors)), f"{sum(p.numel() for p in tensors.values()):,}", f"{rate:g}"))
    frozen = [p for p in lococo.model.parameters() if not p.requires_grad]
    rows.append(("frozen", str(len(frozen)), f"{sum(p.numel() for p in frozen):,}", "-"))
    for group, count, size, rate in rows:
        print(f"  {group:12} {count:>8} {size:>14} {rate:>14}")


def settings_of(args: argparse.Namespace) -> Settings:
    settings = Settings.of(args.method, args.mem, args.segment, args.seq, args.sinks, args.heavy, args.recent,
                           args.positions, args.kernel, args.normalise, args.blend, args.score,
                           args.lora_rank, args.filters, args.depthwise)  # fmt: skip
    if not (settings.merged or settings.lora_rank):
        raise UserError(f"--lora-rank 0 with --method {args.method}: there is nothing to train")
    if settings.merged and args.seq - 1 <= settings.mem + args.segment:
        raise UserError(f"--seq {args.seq} fits into --mem {args.mem} and one segment of {args.segment}: "
                        "nothing would be merged, so the compressors would not train")  # fmt: skip
    return settings


def score_window(lococo: LoCoCo, args: argparse.Namespace, score: Callable[[LoCoCo], float]) -> dict[str, float]:
    """{what it is: perplexity} of a window of as many slots on the base, which untrained LoRA leaves as it is."""
    model, config, equal = lococo.model, lococo.model.config, lococo.settings.mem or args.mem
    model.config = lococo.base_config
    window = LoCoCo(model, Settings.of("streaming", equal, args.segment, args.seq, min(4, equal - 1), lora_rank=0))
    factor = model.config.rope_scale  # more than 1 if M + T exceeds the pretrained context
    kept = f"{window.settings.sinks} sinks + {window.settings.recent} recent, by slot"
    kept += f", RoPE factor {factor:g}" if factor > 1 else ""
    scores = {f"untouched base, window of equal memory ({kept})": score(window)}
    model.config = config
    return scores


def main() -> None:
    with ExitStack() as held:  # the lock of a run, given back however it ends
        run(parse(), held)


def texts(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Corpus, Sequences, list[Tensor]]:
    """The corpus, what is trained on, and batches of held-out documents to score."""
    corpus = from_first(lambda: Corpus(args.data, tokenizer))
    # A corpus so small that its names put all of it into the held-out part is trained on and not scored.
    part = "training" if len(corpus.part("training")) else "all"
    data = Sequences(corpus, corpus.part(part), args.seq, args.seed)
    heldout = [] if part == "all" else scored_batches(
        corpus, "held-out", args.seq, args.device, EVALUATED, args.micro_batch)  # fmt: skip
    print(f"text: {data.per_pass * args.seq / 1e6:.1f} M tokens to train on, "
          f"{sum(map(len, heldout))} held-out documents of {args.seq} tokens")  # fmt: skip
    return corpus, data, heldout


def start(args: argparse.Namespace, settings: Settings) -> tuple[LoCoCo, Tokenizer]:
    """The model with the method in it, ready to be trained; in parts if --shard asks for it."""
    model, tokenizer = load_base(args, "cpu" if args.shard else None)
    print(f"run {os.path.relpath(args.out)}")
    print(f"model {args.model or 'tiny/'}: {sum(p.numel() for p in model.parameters()):,} parameters, "
          f"context {model.config.context}, {args.dtype} on {args.device}; recipe {args.recipe}")  # fmt: skip
    model.recompute = args.recompute
    lococo = LoCoCo(model, settings)
    lococo.start_training()
    if args.shard:
        shard(lococo, args)
    return lococo, tokenizer


def run(args: argparse.Namespace, held: ExitStack) -> None:
    settings = settings_of(args)
    join(args)
    rank, number = processes()
    if args.shard:
        check_shard(args, number)
    if args.resume:
        from_first(lambda: held.enter_context(reserve(args.out, fresh=False)) if rank == 0 else None)
    else:
        args.out = from_first(lambda: run_directory(args, settings))
    lococo, tokenizer = start(args, settings)
    corpus, data, heldout = texts(args, tokenizer)

    def score(method: LoCoCo) -> float:
        with precision(args):
            return perplexity(method.model, method.cache, heldout, args.segment) if heldout else float("nan")

    scores = args.state[1]["scores"] if args.resume else score_window(lococo, args, score)
    print_groups(lococo, args)
    optimizer, begin = make_optimizer(lococo, args), 0
    state, text = args.out / "state.safetensors", corpus.checksum()

    def keep(steps: int) -> None:
        if rank == 0 or args.shard:
            save_state(lococo, optimizer, state if rank == 0 else None, step=steps, scores=scores,
                       flags=recorded(args), text=text)  # fmt: skip

    if args.resume:
        begin = restore_state(lococo, optimizer, text, args)
    else:
        scores[f"{settings.method} before training"] = score(lococo)
        from_first(lambda: held.enter_context(reserve(args.out, fresh=True)) if rank == 0 else None)
        keep(0)
    if stopped := train(lococo, data, args, optimizer, begin, keep):
        say_how_to_go_on(args)
        leave()
        sys.exit(128 + stopped)
    if rank == 0 or args.shard:
        lococo.save(args.out / "adapter.safetensors" if rank == 0 else None)
    if rank == 0:
        state.unlink()
    scores[f"{settings.method} after training"] = score(lococo)
    print_scores(scores if heldout else {}, args)


def print_scores(scores: dict[str, float], args: argparse.Namespace) -> None:
    if scores:
        print(f"held-out perplexity at {args.seq} tokens")
    else:
        print(f"no perplexity: no held-out document has {args.seq} tokens")
    for name, value in scores.items():
        print(f"  {name:72} {value:>8.3f}")
    print(f"adapter: {os.path.relpath(args.out / 'adapter.safetensors')}")


def say_how_to_go_on(args: argparse.Namespace) -> None:
    rank, number = processes()
    if rank == 0:
        launch = "python" if number == 1 else f"torchrun --nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"
        words = shlex.join([sys.argv[0], "--resume", os.path.relpath(args.out)])
        print(f"stopped; to go on: {launch} {words}", file=sys.stderr)


if __name__ == "__main__":
    exit_on_user_error(main)
