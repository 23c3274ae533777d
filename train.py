"""Extend a pretrained Llama-2: tune the method's convolutions, LoRA, embeddings and norms.

    python train.py                               # the embedded model, on a CPU
    python train.py --mem 512 --seq 8192          # the same, at 8 times its pretrained context
    python train.py --recipe inference --mem 128 --seq 1024 --batch 4    # the base stays as it is
    python train.py --model Llama-2-7b-hf --data RedPajama/ --mem 512 --seq 32768
    python train.py --resume runs/my-run          # go on after Ctrl-C, a crash or a power cut
    torchrun --nproc_per_node=4 train.py ...      # the sequences of a step are dealt out to 4 GPUs
"""

import argparse
import json
import math
import os
import signal
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from eval_ppl import ranges, token_losses
from lococo import COMPRESSORS, METHODS, AdaptedLlama, Settings, identity, segment_losses
from lococo import settings_for, untrained
from model import Tokenizer, attention, load_base
from support.command_line import HERE, TINY, Machine, Parser, at_least, method_flags, prepare
from support.command_line import run_program
from support.facts import FORMS, tell, tell_all
from support.files import UserError, checksum, read_file, write_file
from support.text import long_documents, sequence, token_streams

# --- Recipes -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """What holds without a flag; first the paper's context extension. Where the paper is silent: no
    weight decay; the gradients of convolutions and of the rest are each clipped at norm 1."""

    method: str = "lococo+h2o"  # "Ours" of table 2, and what the official code does by default
    mem: int = 512  # slots M; section 4.1. A segment (its chunk) is as long
    seq: int = 8192  # trained length L, in tokens; section 4.3 also takes 16,384 and 32,768
    compressor: str = "paper"  # section 3.2.1
    kernel: int = 21  # taps of the convolution; section 4.1
    lora_rank: int = 8  # section 4.1; with 0 the convolutions train alone
    lr: float = 5e-5  # of LoRA, embeddings and norms; section 4.1. Both fall linearly to 0
    conv_lr: float = 5e-2  # of the convolutions; section 4.1
    # Our choice: 99.2 steps are the 104 million tokens that section 3.3 names for inference mode.
    steps: int = 100
    batch: int | None = 128  # sequences; section 4.1. None: at most 4,096 tokens, at least one
    micro_batch: int = 1  # sequences in memory at once; section 4.1
    bptt: int = 1  # segments that the gradient spans; algorithm 2
    save_every: int = 1  # steps
    facts: int = 0  # written into each sequence
    answer_weight: float = 1.0  # of a fact's word when told again, for the convolutions
    sharper: float = 1.0  # after training the convolutions' logits are multiplied by this
    score_tokens: int = 32768  # so many tokens of held-out documents: 4 of 8,192


RECIPES = {
    "paper": Recipe(),
    "paper-inference": Recipe(seq=4096, lora_rank=0, steps=200),  # section 4.1; 104 million tokens
    "inference": Recipe(  # ours: a real Llama stays as it is; 60 x 4,096 tokens (docs/real-llama.md)
        method="lococo+h2o+recent", mem=64, seq=1024, compressor="scored", kernel=3, lora_rank=0,
        conv_lr=2e-2, steps=60, batch=None, micro_batch=4, bptt=4,
    ),
    "embedded": Recipe(  # ours: twice the pretrained context; 240 x 4,096 tokens; 32 to score
        method="lococo+window", mem=128, seq=2048, compressor="facts", kernel=3,
        lr=2e-3, conv_lr=7.5e-3, steps=240, batch=None, micro_batch=2, bptt=4, save_every=10,
        facts=8, answer_weight=20.0, sharper=16.0, score_tokens=65536,
    ),
}  # fmt: skip

# --- Many processes (torchrun) -------------------------------------------------------------------

RANK = int(os.environ.get("RANK", "0"))  # of this process; 0 alone prints, scores, writes files
WORLD = int(os.environ.get("WORLD_SIZE", "1"))  # processes


def join() -> None:
    """Meet the other processes. Returns when all are here."""
    if torch.cuda.is_available():  # choose the one that "cuda" means
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(timeout=timedelta(days=1))


def add_up(t: Tensor) -> Tensor:
    """The sum of t over all processes, in its place."""
    if WORLD > 1:
        dist.all_reduce(t)
    return t


# --- Training ------------------------------------------------------------------------------------


def shifted_groups(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """LongLoRA's KVCache.attend while it trains (arXiv 2309.12307): a sequence enters whole, and
    attention is within its quarters. For the second half of the heads the borders are moved by half
    a quarter; both ends are groups of their own, so that the end is not seen at the start."""
    H, L = q.shape[1], q.shape[2]
    quarter = math.ceil(L / 4)
    k, v = (t.repeat_interleave(H // t.shape[1], dim=1) for t in (k, v))
    read = torch.empty_like(q)
    for heads, first in ((slice(0, H // 2), 0), (slice(H // 2, H), quarter // 2)):
        borders = sorted({0, *range(first, L, quarter), L})
        for start, stop in zip(borders, borders[1:]):
            group = (slice(None), heads, slice(start, stop))
            read[group] = attention(q[group], k[group], v[group])
    return read


def gradients(adapted: AdaptedLlama, draw: Callable, args: argparse.Namespace, machine: Machine,
              step: int, done: Callable[[int], None] = lambda tokens: None) -> float:  # fmt: skip
    """Add the gradient of the step's loss to p.grad; return the loss, nats over tokens. draw(i) is
    sequence i, as `tell` returns it; the processes share a step's sequences. In the convolutions'
    gradient a fact told before counts --answer-weight times on average. done(n): n tokens more."""
    total, scored = 0.0, args.batch * (args.seq - 1)
    convolutions = list(adapted.compressors.parameters())
    own = range(step * args.batch + RANK, (step + 1) * args.batch, WORLD)
    for n in range(0, len(own), args.micro_batch):
        rows = [draw(i) for i in own[n : n + args.micro_batch]]
        tokens, ago = (torch.stack(row).to(machine.device) for row in zip(*rows))
        cache, segment = adapted.cache(), args.segment
        if adapted.settings.method == "longlora":
            cache.attend, segment = shifted_groups, args.seq
        answers = (ago > 0)[:, 1:].split(args.bptt * segment, dim=1)
        with machine.precision():
            pieces = segment_losses(adapted.model, tokens, cache, segment, args.bptt)
            turn = step + RANK + n * WORLD  # each third piece has two backward passes
            for number, ((losses, _), answer) in enumerate(zip(pieces, answers), start=turn):
                loss = losses.sum() / scored
                if loss.requires_grad:  # with --lora-rank 0 not before the first compression
                    if convolutions and answer.any() and number % 3 == 0:
                        # For the convolutions alone: LoRA would get worse on plain text.
                        extra = 3 * (args.answer_weight - 1) * losses[answer].sum() / scored
                        extra.backward(inputs=convolutions, retain_graph=True)
                    loss.backward()  # for all; now, so that the graph never spans more
                total += loss.item()
                done(losses.numel())
    for p in adapted.trained().values():
        p.grad = add_up(torch.zeros_like(p) if p.grad is None else p.grad)
    return add_up(torch.tensor(total, dtype=torch.float64)).item()


def make_optimizer(adapted: AdaptedLlama, args: argparse.Namespace) -> AdamW:
    """A "rate" for the convolutions, one for the rest; `train` makes the falling "lr" of them."""
    convolutions = list(adapted.compressors.parameters())
    rest = [p for p in adapted.model.parameters() if p.requires_grad]
    groups = [{"params": convolutions, "rate": args.conv_lr}, {"params": rest, "rate": args.lr}]
    return AdamW([group for group in groups if group["params"]], weight_decay=0.0)


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM add their number to the list. A second one ends the process at once."""
    noted = []

    def note(number: int, frame) -> None:
        noted.append(number)
        signal.signal(number, signal.SIG_DFL)

    usual = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield noted
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def train(adapted: AdaptedLlama, draw: Callable, args: argparse.Namespace, machine: Machine,
          optimizer: AdamW, begin: int, save: Callable[[int], None]) -> int:  # fmt: skip
    """Steps from `begin` to args.steps; save(steps done) is called after every args.save_every. A
    signal to any process ends all after the step that is under way. Returns its number, or 0."""
    tokens = len(range(RANK, args.batch, WORLD)) * (args.seq - 1)  # of a step, in this process
    bar = tqdm(desc="training", total=args.steps * tokens, initial=begin * tokens, unit=" tokens",
               unit_scale=True, mininterval=1, disable=RANK > 0)  # fmt: skip
    with noted_signals() as noted, bar:
        for step in range(begin, args.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * (1 - step / args.steps)
            optimizer.zero_grad()
            loss = gradients(adapted, draw, args, machine, step, bar.update)
            norms = [torch.nn.utils.clip_grad_norm_(g["params"], 1) for g in optimizer.param_groups]
            if not sum(norms).isfinite():
                raise UserError(f"step {step + 1}: a gradient is not finite; lower --lr, --conv-lr")
            optimizer.step()
            bar.set_postfix_str(f"step {step + 1}/{args.steps}, loss {loss:.3f}", refresh=False)
            if RANK == 0:
                with open(args.out / "log.jsonl", "a") as log:
                    log.write(json.dumps({"step": step + 1, "loss": loss}) + "\n")
            stop = add_up(torch.tensor(len(noted))) > 0
            if stop or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
                save(step + 1)
            if stop:
                return max(noted, default=signal.SIGTERM)
    return 0


# --- The state of a run --------------------------------------------------------------------------


def save_state(adapted: AdaptedLlama, optimizer: AdamW, file: Path, about: dict, step: int) -> None:
    """What trains, AdamW's moments and `about`. Nothing in a step is random."""
    tensors = {}
    for name, p in adapted.trained().items():
        tensors[f"value {name}"] = p
        for key, moment in optimizer.state[p].items():
            tensors[f"{key} {name}"] = moment
    if RANK == 0:
        write_file(file, tensors, **about | {"step": step})
    add_up(torch.zeros(1))  # wait for the file: torchrun ends all when one ends with an error


@torch.no_grad()
def restore_state(adapted: AdaptedLlama, optimizer: AdamW, tensors: dict[str, Tensor]) -> None:
    for name, p in adapted.trained().items():
        p.copy_(tensors[f"value {name}"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key} {name}" in tensors:  # not before the first step
                device = "cpu" if key == "step" else p.device
                optimizer.state[p][key] = tensors[f"{key} {name}"].to(device, copy=True)


# --- The program ---------------------------------------------------------------------------------


def odd(text: str) -> int:
    number = at_least(1)(text)
    if number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text}: it must be odd, to have a middle")
    return number


def parse(line: list[str] | None = None) -> tuple[argparse.Namespace, dict[str, Tensor], dict]:
    """The arguments of a line (None: the program's own), and the state to resume from: its tensors
    (none at a start), its `about`."""
    parser = Parser(__doc__)
    add, count, whole = parser.add_argument, at_least(1), at_least(0)
    add("--data", type=Path, nargs="+", default=[], help='texts; .jsonl: {"text": ...}')
    add("--held-out", type=Path, nargs="+", default=[], metavar="DATA",
        help="texts to score; all of --data trains then (default: a tenth of --data is scored)")
    add("--out", type=Path, help="new directory of the run (default: in runs/)")
    add("--recipe", choices=RECIPES, help="default: embedded for tiny/, paper for other models")
    add("--method", choices=METHODS)
    add("--seq", type=at_least(2), help="trained length L, in tokens")
    add("--compressor", choices=COMPRESSORS, help="the paper's, or ours for facts")
    add("--kernel", type=odd, help="taps of the convolution")
    add("--lora-rank", type=whole, help="0: only the convolutions train (inference mode)")
    add("--lr", type=at_least(0, float), help="learning rate of LoRA, embeddings and norms")
    add("--conv-lr", type=at_least(0, float), help="learning rate of the convolutions")
    add("--steps", type=count)
    add("--batch", type=count, help="sequences per step")
    add("--micro-batch", type=count, help="sequences in memory at once")
    add("--facts", type=whole, metavar="N",
        help="facts to write into a sequence (support/facts.py)")
    add("--fact-form", choices=FORMS, default="line", help="default: line; as in eval_ppl.py")
    add("--answer-weight", type=at_least(0, float), metavar="W", help="of a fact told again")
    add("--sharper", type=at_least(0, float), metavar="N", help="logits times N after training")
    add("--bptt", type=count, help="segments that the gradient spans")
    add("--recompute", action="store_true", help="less memory, more time")
    add("--save-every", type=count, metavar="STEPS", help="of the state to resume from")
    add("--score-tokens", type=whole, metavar="N", help="of held-out documents to score")
    add("--resume", type=Path, metavar="RUN", help="go on with a run; other flags win over its own")
    args = parser.parse_args(line)
    if args.resume:
        tensors, about = read_file(args.resume / "state.safetensors")
        if about["args"].keys() != vars(args).keys():
            parser.error(f"--resume {args.resume}: made by another version of this program")
        parser.set_defaults(**about["args"])
    else:
        if RANK == 0 and args.out and args.out.exists() and any(args.out.iterdir()):
            parser.error(f"--out {args.out}: it is there already; give a new directory")
        recipe = args.recipe or ("embedded" if args.model.resolve() == TINY else "paper")
        parser.set_defaults(recipe=recipe, **asdict(RECIPES[recipe]))
        tensors, about = {}, {"step": 0, "scores": {}}
    args = parser.parse_args(line)  # again: a flag wins over the recipe or the stored run
    if about["step"] > args.steps:
        parser.error(f"--steps {args.steps}: this run is at step {about['step']}")
    args.segment = args.segment or args.mem
    args.batch = args.batch or max(1, 4096 // args.seq)
    args.model, args.data = args.model.resolve(), [Path(data).resolve() for data in args.data]
    args.held_out = [Path(data).resolve() for data in args.held_out]
    ends = ("", *(f"-{i}" for i in range(2, 1000)))
    names = (HERE / "runs" / f"{args.method}-mem{args.mem}-seq{args.seq}{end}" for end in ends)
    args.out = args.resume or args.out or next(out for out in names if not any(out.glob("*")))
    about["args"] = json.loads(json.dumps(vars(args), default=str))
    return args, tensors, about


def chosen_settings(args: argparse.Namespace) -> Settings:
    """Raises UserError if nothing would train."""
    settings = settings_for(args.method, args.mem, args.segment, args.seq, **method_flags(args))
    if settings.merged and args.seq - 1 <= settings.mem + args.segment:
        raise UserError(f"--seq {args.seq}: it fits into memory and segment: nothing to compress")
    if not settings.merged and not args.lora_rank:
        raise UserError(f"--lora-rank 0 --method {args.method}: there is nothing to train")
    return settings


def texts(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[np.ndarray, Tensor]:
    """Token ids to train on, and documents (N, L) to score. If no document falls into the training
    part, another part is trained on and scoring is skipped."""
    streams = token_streams(args.data, tokenizer)
    if args.held_out:
        held_out = np.concatenate([*token_streams(args.held_out, tokenizer).values()])
        most = args.score_tokens // args.seq
        documents = long_documents(held_out, tokenizer.bos, args.seq, most)
        return np.concatenate([*streams.values()]), documents
    part = next(part for part in ("training", "choosing", "held-out") if len(streams[part]))
    scored = part == "training" and args.score_tokens
    most = max(1, args.score_tokens // args.seq) if scored else 0
    return streams[part], long_documents(streams["held-out"], tokenizer.bos, args.seq, most)


def score(adapted: AdaptedLlama, documents: Tensor, tokenizer: Tokenizer,
          args: argparse.Namespace, machine: Machine) -> dict[str, float]:  # fmt: skip
    """Perplexity of documents (N, L); with --facts, recall of facts told in each, by distance."""
    nats, _, _ = token_losses(adapted, documents, machine, args.micro_batch)
    row = {"perplexity": math.exp(nats.double().mean())}
    if args.facts:
        told, ago = tell_all(documents, "held-out", tokenizer, args.fact_form)
        _, hits, _ = token_losses(adapted, told, machine, args.micro_batch)
        mem = adapted.settings.mem or args.mem
        for distance, mask in ranges("recall ", ago, mem + args.segment).items():
            row[distance] = hits[mask].double().mean().item()
    return row


def start_or_resume(adapted: AdaptedLlama, args: argparse.Namespace, ids: np.ndarray,
                    state: dict[str, Tensor], about: dict) -> AdamW:  # fmt: skip
    """Everything as it is at the start, or as it was in the run to resume."""
    owner = identity(adapted) | {"text": checksum({"ids": torch.from_numpy(ids)}, "")}
    if about.setdefault("owner", owner) != owner:
        raise UserError(f"--resume {args.out}: its model, text, method or version differs")
    optimizer = make_optimizer(adapted, args)
    if state:
        restore_state(adapted, optimizer, state)
    if args.recompute:  # the backward pass runs these again: all but attention
        again = [(block, n) for block in adapted.model.layers for n in ("project", "finish")]
        for module, name in again + [(c, "forward") for c in adapted.compressors]:
            setattr(module, name, partial(checkpoint, getattr(module, name), use_reentrant=False))
    return optimizer


def run(args: argparse.Namespace, state: dict[str, Tensor], about: dict) -> None:
    settings, machine = chosen_settings(args), prepare(args)
    model, tokenizer = load_base(args.model, machine)
    ids, documents = texts(args, tokenizer)

    def draw(i: int) -> tuple[Tensor, Tensor]:
        text = sequence(ids, args.seq, args.seed, i)
        return tell(text, args.facts, "training", args.seed, i, tokenizer, args.fact_form)

    def add_score(name: str, adapted: AdaptedLlama) -> None:
        if RANK == 0 and len(documents):
            about["scores"][name] = score(adapted, documents, tokenizer, args, machine)

    draw(0)  # refuses a text that is too short
    window = untrained(model, "streaming", settings.mem or args.mem, args.segment)
    if WORLD > 1 and RANK == 0:
        join()
    print(f"recipe {args.recipe} on {args.model}, {machine.dtype} on {machine.device}")
    print(f"text: {len(ids):,} tokens to train on, {len(documents)} documents to score")
    args.out.mkdir(parents=True, exist_ok=True)
    if not state:
        add_score("window of equal memory, base untouched", window)
    adapted = AdaptedLlama(model, settings)  # changes the base, so the window is scored before
    optimizer = start_or_resume(adapted, args, ids, state, about)
    print(settings)
    print(f"{sum(p.numel() for p in adapted.trained().values()):,} parameters train")
    save = partial(save_state, adapted, optimizer, args.out / "state.safetensors", about)
    if not state:
        add_score(f"{args.method}, before training", adapted)
        save(0)
    stopped = train(adapted, draw, args, machine, optimizer, about["step"], save)
    if stopped:
        print(f"stopped; to go on: python train.py --resume {os.path.relpath(args.out)}")
        raise SystemExit(128 + stopped)
    if RANK > 0:
        return
    for p in adapted.compressors.parameters():
        p.data *= args.sharper  # the logits of "facts" are linear in all of them
    write_file(args.out / "adapter.safetensors", adapted.trained(), **identity(adapted))
    add_score(f"{args.method}, after training", adapted)
    columns = next(iter(about["scores"].values()), [])
    print(f"{f'{len(documents)} held-out documents':40}", *columns, sep="  ")
    for name, row in about["scores"].items():
        print(f"{name:40}", *(f"{row.get(c, math.nan):>{len(c)}.3f}" for c in columns), sep="  ")
    print(f"adapter: {os.path.relpath(args.out / 'adapter.safetensors')}")


def main(line: list[str] | None = None) -> None:
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")
        join()  # process 0 refuses flags and texts, and tokenizes, before it comes
    try:
        run(*parse(line))
        if WORLD > 1:
            dist.destroy_process_group()  # or gloo may abort a process while it ends
    except BaseException:
        if RANK > 0:
            time.sleep(3)  # process 0 prints an error that all have; when it ends, so do the others
        raise


if __name__ == "__main__":
    run_program(main)
