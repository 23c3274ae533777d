"""Extend a pretrained Llama-2: tune the method's convolutions, LoRA, embeddings and norms.

    python train.py                               # the embedded model, on a CPU
    python train.py --mem 512 --seq 8192          # the same, at 8 times its pretrained context
    python train.py --model Llama-2-7b-hf --data RedPajama/ --mem 512 --seq 32768
    python train.py --resume runs/my-run          # go on after Ctrl-C, a crash or a power cut
    torchrun --nproc_per_node=4 train.py ...      # the sequences of a step are dealt out to 4 GPUs
"""

import argparse
import json
import math
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Callable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from eval_ppl import long_documents, sequence, token_losses, token_streams
from generate import (
    HERE, TINY, Parser, checksum, described, load_base, method_flags, precision,
    prepare, read_file, run_program, write_file,
)  # fmt: skip
from lococo import METHODS, LoCoCo, segment_losses, settings_for
from model import KVCache, UserError, attend, recompute

# --- Recipes -------------------------------------------------------------------------------------

# Both, beyond the paper: no weight decay, gradients clipped at norm 1. Rates fall linearly to 0.
RECIPES = {
    "embedded": dict(
        method="lococo+window", mem=128, seq=2048, kernel=5, normalise="softmax", lora_rank=8,
        lr=1e-3, conv_lr=5e-2, steps=160, batch=2, micro_batch=2, bptt=4, save_every=10,
        score_documents=64,
    ),
    "paper": dict(  # section 4.1
        method="lococo", mem=512, seq=8192, kernel=21, normalise="sum", lora_rank=8,
        lr=5e-5, conv_lr=5e-2, steps=200, batch=128, micro_batch=1, bptt=1, save_every=1,
        score_documents=4,
    ),
}  # fmt: skip


class ShiftedGroups(KVCache):
    """LongLoRA's training attention (arXiv 2309.12307): within quarters of a sequence. For the
    second half of the heads the borders are moved by half a quarter, and both ends are groups of
    their own: the end of the sequence must not be seen at its start. A whole sequence enters."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        H, L = q.shape[1], q.shape[2]
        k = k.repeat_interleave(H // k.shape[1], dim=1)
        v = v.repeat_interleave(H // v.shape[1], dim=1)
        size = math.ceil(L / 4)
        read = torch.empty_like(q)
        for heads, first in ((slice(0, H // 2), 0), (slice(H // 2, H), size // 2)):
            borders = sorted({0, *range(first, L, size), L})
            for start, stop in zip(borders, borders[1:]):
                part = (slice(None), heads, slice(start, stop))
                read[part] = attend(q[part], k[part], v[part])
        return read


# --- Many processes ------------------------------------------------------------------------------


def join(args: argparse.Namespace) -> None:
    """Under torchrun: meet the other processes, and take a GPU of one's own if there are any."""
    if "RANK" in os.environ:
        if args.device != "cpu" and torch.cuda.is_available():
            args.device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(args.device)
        dist.init_process_group(timeout=timedelta(days=1))


def processes() -> tuple[int, int]:
    """(rank, world size)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def add_up(t: Tensor) -> Tensor:
    """t becomes its sum over all processes."""
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


# --- Training ------------------------------------------------------------------------------------


def gradients(lococo: LoCoCo, ids: np.ndarray, args: argparse.Namespace, step: int,
              done: Callable[[int], None] = lambda tokens: None) -> float:  # fmt: skip
    """Set p.grad of all that trains to the gradient of the step's mean loss; return that loss. The
    sequences are dealt out to the processes; done(n) is told of every n tokens."""
    rank, world = processes()
    scored = args.batch * (args.seq - 1)
    total = torch.zeros(1, dtype=torch.float64)
    own = range(step * args.batch + rank, (step + 1) * args.batch, world)
    for n in range(0, len(own), args.micro_batch):
        rows = [sequence(ids, args.seq, args.seed, i) for i in own[n : n + args.micro_batch]]
        tokens = torch.stack(rows).to(args.device)
        longlora = lococo.settings.method == "longlora"
        cache = lococo.cache(plain=ShiftedGroups if longlora else KVCache)
        segment = args.seq if longlora else lococo.settings.segment
        with precision(args):
            for losses in segment_losses(lococo.model, tokens, cache, segment, args.bptt):
                loss = losses.sum()
                if loss.requires_grad:  # with --lora-rank 0 not before the first compression
                    (loss / scored).backward()  # now, so that the graph never spans more
                total += loss.item()
                done(losses.numel())
    for p in lococo.trained().values():
        p.grad = add_up(torch.zeros_like(p) if p.grad is None else p.grad)
    return add_up(total.to(args.device)).item() / scored


def make_optimizer(lococo: LoCoCo, args: argparse.Namespace) -> torch.optim.AdamW:
    """One learning rate for the convolutions and one for the rest."""
    convolutions = list(lococo.compressors.parameters())
    rest = [p for p in lococo.model.parameters() if p.requires_grad]
    groups = [{"params": convolutions, "rate": args.conv_lr}, {"params": rest, "rate": args.lr}]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)


def train(lococo: LoCoCo, ids: np.ndarray, args: argparse.Namespace, optimizer, begin: int = 0,
          save: Callable[[int], None] = lambda steps: None) -> int:  # fmt: skip
    """Steps from `begin` to args.steps; save(steps done) is called after every args.save_every.
    Ctrl-C and SIGTERM end it after the step that is under way. Returns the signal, or 0."""
    rank, _ = processes()
    asked = []

    def ask(number: int, frame) -> None:
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    usual = [signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)]
    tokens = args.batch * (args.seq - 1)
    bar = tqdm(desc="training", total=args.steps * tokens, initial=begin * tokens, unit=" tokens",
               unit_scale=True, disable=rank > 0, mininterval=1)  # fmt: skip
    stopped = 0
    for step in range(begin, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * (1 - step / args.steps)
        optimizer.zero_grad()
        loss = gradients(lococo, ids, args, step, bar.update)
        norm = torch.nn.utils.clip_grad_norm_(lococo.trained().values(), 1.0)
        if not norm.isfinite():
            bar.close()
            raise UserError(f"step {step + 1}: the gradient is not finite; try a lower --lr or "
                            "--conv-lr in a new run")  # fmt: skip
        optimizer.step()
        bar.set_postfix_str(f"step {step + 1}/{args.steps}, loss {loss:.3f}", refresh=False)
        if rank == 0:
            with open(args.out / "log.jsonl", "a") as log:
                log.write(json.dumps({"step": step + 1, "loss": loss}) + "\n")
        stopped = int(add_up(torch.tensor(max(asked, default=0), device=args.device)))
        if stopped or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(step + 1)
        if stopped:
            break
    bar.close()
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), usual):
        signal.signal(number, handler)
    return max(asked, default=signal.SIGTERM) if stopped else 0


# --- The state of a run --------------------------------------------------------------------------


def save_state(lococo: LoCoCo, optimizer: torch.optim.AdamW, file: Path, **about) -> None:
    """What trains, AdamW's moments, the random state and `about`."""
    tensors = {"random": torch.get_rng_state()}
    for name, p in lococo.trained().items():
        tensors[f"value {name}"] = p
        for key, moment in optimizer.state[p].items():
            tensors[f"{key} {name}"] = moment
    write_file(file, tensors, **about)


@torch.no_grad()
def restore_state(lococo: LoCoCo, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["random"].clone())
    for name, p in lococo.trained().items():
        p.copy_(tensors[f"value {name}"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key} {name}" in tensors:  # not before the first step
                device = "cpu" if key == "step" else p.device
                optimizer.state[p][key] = tensors[f"{key} {name}"].to(device, copy=True)


MAY_CHANGE = ("micro_batch", "save_every", "recompute", "device", "resume", "out")


def plain(args: argparse.Namespace) -> dict:
    return json.loads(json.dumps(vars(args), default=str))


def parse() -> tuple[argparse.Namespace, dict[str, Tensor] | None, dict]:
    """The arguments, and the state to resume from: its tensors (None at a start), its `about`."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], help="texts, folders, .jsonl, .jsonl.gz")
    add("--out", type=Path, help="new directory of the run (default: in runs/)")
    add("--recipe", choices=RECIPES, help="default: embedded for tiny/, paper for other models")
    add("--method", choices=METHODS)
    add("--seq", type=int, help="trained length L, in tokens")
    add("--kernel", type=int, help="taps of the convolution")
    add("--normalise", choices=("sum", "softmax"), help="equation (7), or a softmax")
    add("--lora-rank", type=int, help="0: only the convolutions train (inference mode)")
    add("--lr", type=float)
    add("--conv-lr", type=float, help="learning rate of the convolutions")
    add("--steps", type=int)
    add("--batch", type=int, help="sequences per step")
    add("--micro-batch", type=int, help="sequences in memory at once")
    add("--bptt", type=int, help="segments that the gradient reaches back over")
    add("--recompute", action="store_true", help="less memory, more time")
    add("--save-every", type=int, metavar="STEPS", help="of the state to resume from")
    add("--score-documents", type=int, metavar="N", help="held-out documents to score")
    add("--resume", type=Path, metavar="RUN", help="go on with a run, with its own arguments")
    args = parser.parse_args()
    if args.resume:
        tensors, about = read_file(args.resume / "state.safetensors")
        parser.set_defaults(**about["args"])
    else:
        if args.out and args.out.exists() and any(args.out.iterdir()):
            parser.error(f"--out {args.out}: it is there already; give a new directory")
        recipe = args.recipe or ("embedded" if args.model.resolve() == TINY else "paper")
        parser.set_defaults(recipe=recipe, **RECIPES[recipe])
        tensors, about = None, {"step": 0, "scores": {}}
    args = parser.parse_args()  # again: the command line wins over the recipe or the stored run
    args.segment = args.segment or args.mem
    args.model, args.data = args.model.resolve(), [Path(data).resolve() for data in args.data]
    for name, own in about.get("args", {}).items():  # just a few may be given anew
        if name not in MAY_CHANGE and plain(args)[name] != own:
            parser.error(f"--{name.replace('_', '-')}: {args.resume} goes on with {own}")
    args.out = args.resume or args.out
    return args, tensors, {"args": plain(args)} | about


def main() -> None:
    args, tensors, about = parse()
    join(args)
    prepare(args)
    rank, world = processes()
    say = print if rank == 0 else (lambda line: None)
    settings = settings_for(
        args.method, args.mem, args.segment, args.seq, kernel=args.kernel,
        normalise=args.normalise, lora_rank=args.lora_rank, **method_flags(args),
    )  # fmt: skip
    if settings.merged and args.seq - 1 <= settings.mem + args.segment:
        raise UserError(f"--seq {args.seq}: all of it fits into --mem {args.mem} and one segment, "
                        "so the convolutions would not train")  # fmt: skip
    if not settings.merged and not args.lora_rank:
        raise UserError(f"--lora-rank 0 --method {args.method}: there is nothing to train")
    model, tokenizer = load_base(args)
    if rank > 0:
        dist.barrier()  # the first process tokenizes
    streams = token_streams(args.data, tokenizer)
    if rank == 0 and world > 1:
        dist.barrier()
    # If no document falls into the training part, another part is trained on and nothing scored.
    part = next(part for part in ("training", "choosing", "held-out") if len(streams[part]))
    ids = streams[part]
    sequence(ids, args.seq, args.seed, 0)  # refuses a text that is too short
    most = args.score_documents if part == "training" else 0
    documents = long_documents(streams["held-out"], tokenizer.bos, args.seq, most)
    say(f"recipe {args.recipe} on {args.model}, {args.dtype} on {args.device}")
    say(f"text: {len(ids):,} tokens to train on, {len(documents)} documents to score")

    def score(name: str, lococo: LoCoCo) -> None:
        """Perplexity of the documents, which are dealt out to the processes."""
        sums = torch.zeros(2, dtype=torch.float64, device=args.device)
        if len(documents[rank::world]):
            losses, _ = token_losses(lococo, documents[rank::world], args)
            sums += torch.tensor([losses.double().sum(), losses.numel()], device=args.device)
        nats, scored = add_up(sums).tolist()
        about["scores"][name] = math.exp(nats / scored) if scored else math.nan

    if not tensors:
        name = f"{args.method}-mem{args.mem}-seq{args.seq}"
        numbered = [HERE / "runs" / n for n in (name, *(f"{name}-{i}" for i in range(2, 1000)))]
        args.out = args.out or next(out for out in numbered if not out.exists())
        if rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
        mem = settings.mem or args.mem
        window = settings_for("streaming", mem, args.segment, args.seq, lora_rank=0)
        score("window of equal memory, untouched base", LoCoCo(model, window))
    lococo = LoCoCo(model, settings)
    if args.recompute:
        for block in model.layers:
            recompute(block, "project")
            recompute(block, "add")
        for compressor in lococo.compressors:
            recompute(compressor, "forward")
    optimizer = make_optimizer(lococo, args)
    owner = described(lococo) | {"text": checksum({"ids": torch.from_numpy(ids)}, "")}
    if tensors:
        if {key: about[key] for key in owner} != owner:
            raise UserError(f"--resume {args.out}: the model or the text has changed since")
        restore_state(lococo, optimizer, tensors)
    else:
        score(f"{args.method}, before training", lococo)
    say(f"method {args.method}: {settings.sinks} sinks, {settings.heavy} heavy, {settings.merged} "
        f"merged, {settings.recent} recent slots; positions {settings.positions}")  # fmt: skip
    say(f"{sum(p.numel() for p in lococo.trained().values()):,} parameters train")

    def save(step: int) -> None:
        if rank == 0:
            about.update(owner, step=step)
            save_state(lococo, optimizer, args.out / "state.safetensors", **about)

    if not tensors:
        save(0)
    stopped = train(lococo, ids, args, optimizer, about["step"], save)
    if stopped:
        say(f"stopped; to go on: python train.py --resume {os.path.relpath(args.out)}")
        raise SystemExit(128 + stopped)
    if rank == 0:
        write_file(args.out / "adapter.safetensors", lococo.trained(), **described(lococo))
    score(f"{args.method}, after training", lococo)
    say(f"perplexity of held-out text, {args.seq} tokens")
    for name, value in about["scores"].items():
        say(f"  {name:45} {value:>8.3f}")
    say(f"adapter: {os.path.relpath(args.out / 'adapter.safetensors')}")


if __name__ == "__main__":
    run_program(main)
