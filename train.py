"""Extend a pretrained Llama-2: tune the method's convolutions, LoRA, embeddings and norms.

    python train.py                               # the embedded model, on a CPU
    python train.py --mem 512 --seq 8192          # the same, at 8 times its pretrained context
    python train.py --model Llama-2-7b-hf --data RedPajama/ --mem 512 --seq 32768
    python train.py --resume runs/my-run          # go on after Ctrl-C, a crash or a power cut
"""

import argparse
import json
import math
import os
import signal
from functools import partial
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from eval_ppl import long_documents, ranges, sequence, tell, tell_all, token_losses, token_streams
from generate import HERE, TINY, Parser, checksum, described, load_base, method_flags, precision
from generate import prepare, read_file, run_program, write_file
from lococo import METHODS, LoCoCo, segment_losses, settings_for
from model import UserError

# --- Recipes -------------------------------------------------------------------------------------

# In both, beyond the paper: no weight decay; the gradient of the convolutions and that of the rest
# are each clipped at norm 1. Without a batch a step takes 4,096 tokens, or one longer sequence.
RECIPES = {
    "embedded": dict(
        method="lococo+window", mem=128, seq=2048, kernel=5, normalise="softmax", lora_rank=8,
        lr=2e-3, conv_lr=7.5e-3, steps=240, batch=None, micro_batch=2, bptt=4, save_every=10,
        facts=8, answer_weight=20.0, score_documents=32,
    ),
    "paper": dict(  # section 4.1
        method="lococo", mem=512, seq=8192, kernel=21, normalise="sum", lora_rank=8,
        lr=5e-5, conv_lr=5e-2, steps=200, batch=128, micro_batch=1, bptt=1, save_every=1,
        facts=0, answer_weight=1.0, score_documents=4,
    ),
}  # fmt: skip


# --- Training ------------------------------------------------------------------------------------


def gradients(lococo: LoCoCo, draw: Callable, args: argparse.Namespace, step: int,
              done: Callable[[int], None] = lambda tokens: None) -> float:  # fmt: skip
    """Add the gradient of the step's loss to p.grad; return the loss, nats over tokens. draw(i) is
    training sequence i, as `tell` returns it. In the gradient of the convolutions the word of a
    fact told before counts --answer-weight times; if it did so for LoRA, plain text would get
    worse. done(n) is told of every n tokens."""
    total, scored = 0.0, args.batch * (args.seq - 1)
    convolutions = list(lococo.compressors.parameters())
    own = range(step * args.batch, (step + 1) * args.batch)
    for n in range(0, args.batch, args.micro_batch):
        rows = [draw(i) for i in own[n : n + args.micro_batch]]
        tokens, ago = (torch.stack(row).to(args.device) for row in zip(*rows))
        answers = (ago > 0)[:, 1:].split(args.bptt * args.segment, dim=1)
        with precision(args):
            pieces = segment_losses(lococo.model, tokens, lococo.cache(), args.segment, args.bptt)
            for (losses, _), answer in zip(pieces, answers):
                loss = losses.sum() / scored
                if loss.requires_grad:  # with --lora-rank 0 not before the first compression
                    if convolutions and args.answer_weight != 1:
                        extra = (args.answer_weight - 1) * losses[answer].sum() / scored
                        extra.backward(inputs=convolutions, retain_graph=True)
                    loss.backward()  # for all; now, so that the graph never spans more
                total += loss.item()
                done(losses.numel())
    return total


def make_optimizer(lococo: LoCoCo, args: argparse.Namespace) -> torch.optim.AdamW:
    """One learning rate for the convolutions and one for the rest."""
    convolutions = list(lococo.compressors.parameters())
    rest = [p for p in lococo.model.parameters() if p.requires_grad]
    groups = [{"params": convolutions, "rate": args.conv_lr}, {"params": rest, "rate": args.lr}]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0)


def train(lococo: LoCoCo, draw: Callable, args: argparse.Namespace, optimizer, begin: int = 0,
          save: Callable[[int], None] = lambda steps: None) -> int:  # fmt: skip
    """Steps from `begin` to args.steps; save(steps done) is called after every args.save_every.
    Ctrl-C and SIGTERM end it after the step that is under way. Returns the signal, or 0."""
    asked = []

    def ask(number: int, frame) -> None:
        asked.append(number)
        signal.signal(number, signal.SIG_DFL)  # a second one ends it at once

    lococo.train()
    usual = [signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)]
    tokens = args.batch * (args.seq - 1)
    bar = tqdm(desc="training", total=args.steps * tokens, initial=begin * tokens, unit=" tokens",
               unit_scale=True, mininterval=1)  # fmt: skip
    for step in range(begin, args.steps):
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * (1 - step / args.steps)
        optimizer.zero_grad()
        loss = gradients(lococo, draw, args, step, bar.update)
        norms = [torch.nn.utils.clip_grad_norm_(g["params"], 1.0) for g in optimizer.param_groups]
        if not sum(norms).isfinite():
            bar.close()
            raise UserError(f"step {step + 1}: the gradient is not finite; try a lower --lr or "
                            "--conv-lr in a new run")  # fmt: skip
        optimizer.step()
        bar.set_postfix_str(f"step {step + 1}/{args.steps}, loss {loss:.3f}", refresh=False)
        with open(args.out / "log.jsonl", "a") as log:
            log.write(json.dumps({"step": step + 1, "loss": loss}) + "\n")
        if asked or (step + 1) % args.save_every == 0 or step + 1 == args.steps:
            save(step + 1)
        if asked:
            break
    bar.close()
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), usual):
        signal.signal(number, handler)
    return asked[0] if asked else 0


# --- The state of a run --------------------------------------------------------------------------


def save_state(lococo: LoCoCo, optimizer: torch.optim.AdamW, file: Path, **about) -> None:
    """What trains, AdamW's moments and `about`. Nothing in a step is random."""
    tensors = {}
    for name, p in lococo.trained().items():
        tensors[f"value {name}"] = p
        for key, moment in optimizer.state[p].items():
            tensors[f"{key} {name}"] = moment
    write_file(file, tensors, **about)


@torch.no_grad()
def restore_state(lococo: LoCoCo, optimizer: torch.optim.AdamW, tensors: dict[str, Tensor]) -> None:
    for name, p in lococo.trained().items():
        p.copy_(tensors[f"value {name}"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key} {name}" in tensors:  # not before the first step
                device = "cpu" if key == "step" else p.device
                optimizer.state[p][key] = tensors[f"{key} {name}"].to(device, copy=True)


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
    add("--normalise", choices=("sum", "softmax"), help="equation (7), or ours")
    add("--lora-rank", type=int, help="0: only the convolutions train (inference mode)")
    add("--lr", type=float)
    add("--conv-lr", type=float, help="learning rate of the convolutions")
    add("--steps", type=int)
    add("--batch", type=int, help="sequences per step")
    add("--micro-batch", type=int, help="sequences in memory at once")
    add("--facts", type=int, metavar="N", help="facts to write into a sequence (eval_ppl.py)")
    add("--answer-weight", type=float, metavar="W", help="of a fact's word when told again")
    add("--bptt", type=int, help="segments that the gradient spans")
    add("--recompute", action="store_true", help="less memory, more time")
    add("--save-every", type=int, metavar="STEPS", help="of the state to resume from")
    add("--score-documents", type=int, metavar="N", help="held-out documents to score")
    add("--resume", type=Path, metavar="RUN", help="go on with a run; other flags win over its own")
    args = parser.parse_args()
    if args.resume:
        tensors, about = read_file(args.resume / "state.safetensors")
        if about["args"].keys() != vars(args).keys():
            parser.error(f"--resume {args.resume}: made by another version of this program")
        parser.set_defaults(**about["args"])
    else:
        if args.out and args.out.exists() and any(args.out.iterdir()):
            parser.error(f"--out {args.out}: it is there already; give a new directory")
        recipe = args.recipe or ("embedded" if args.model.resolve() == TINY else "paper")
        parser.set_defaults(recipe=recipe, **RECIPES[recipe])
        tensors, about = None, {"step": 0, "scores": {}}
    args = parser.parse_args()  # again: a flag wins over the recipe or the stored run
    if about["step"] > args.steps:
        parser.error(f"--steps {args.steps}: this run is at step {about['step']}")
    args.segment = args.segment or args.mem
    args.batch = args.batch or max(1, 4096 // args.seq)
    args.model, args.data = args.model.resolve(), [Path(data).resolve() for data in args.data]
    args.out = args.resume or args.out
    about["args"] = json.loads(json.dumps(vars(args), default=str))
    return args, tensors, about


def main() -> None:
    args, tensors, about = parse()
    prepare(args)
    settings = settings_for(args.method, args.mem, args.segment, args.seq, **method_flags(args))
    mem = settings.mem or args.mem
    if settings.merged and args.seq - 1 <= settings.mem + args.segment:
        raise UserError(f"--seq {args.seq}: all of it fits into --mem {args.mem} and one segment, "
                        "so the convolutions would not train")  # fmt: skip
    if not settings.merged and not args.lora_rank:
        raise UserError(f"--lora-rank 0 --method {args.method}: there is nothing to train")
    model, tokenizer = load_base(args)
    streams = token_streams(args.data, tokenizer)
    # If no document falls into the training part, another part is trained on and nothing scored.
    part = next(part for part in ("training", "choosing", "held-out") if len(streams[part]))
    ids = streams[part]

    def draw(i: int) -> tuple[Tensor, Tensor]:
        text = sequence(ids, args.seq, args.seed, i)
        return tell(text, args.facts, "training", args.seed, i, tokenizer)

    draw(0)  # refuses a text that is too short
    most = args.score_documents if part == "training" else 0
    documents = long_documents(streams["held-out"], tokenizer.bos, args.seq, most)
    told, answers = documents, {}
    if args.facts and len(documents):
        told, ago = tell_all(documents, 8, "held-out", tokenizer)
        answers = ranges("recall ", ago, mem + args.segment)
    print(f"recipe {args.recipe} on {args.model}, {args.dtype} on {args.device}")
    print(f"text: {len(ids):,} tokens to train on, {len(documents)} documents to score")

    def score(name: str, lococo: LoCoCo) -> None:
        """Perplexity of the documents, and recall of the facts in them, by distance."""
        if len(documents):
            nats, _, _ = token_losses(lococo.eval(), documents, args)
            values = [math.exp(nats.double().mean())]
            if answers:
                _, right, _ = token_losses(lococo, told, args)
                values += [right[mask].double().mean().item() for mask in answers.values()]
            about["scores"][name] = values

    if not tensors:
        name = f"{args.method}-mem{args.mem}-seq{args.seq}"
        numbered = [HERE / "runs" / n for n in (name, *(f"{name}-{i}" for i in range(2, 1000)))]
        args.out = args.out or next(out for out in numbered if not out.exists())
        window = settings_for("streaming", mem, args.segment, model.config.context, lora_rank=0)
        args.out.mkdir(parents=True, exist_ok=True)
        score("window of equal memory, base untouched", LoCoCo(model, window))
    lococo = LoCoCo(model, settings)
    if args.recompute:  # the backward pass runs these again: all but attention
        again = [(block, name) for block in model.layers for name in ("project", "add")]
        for module, name in again + [(c, "forward") for c in lococo.compressors]:
            setattr(module, name, partial(checkpoint, getattr(module, name), use_reentrant=False))
    optimizer = make_optimizer(lococo, args)
    owner = described(lococo) | {"text": checksum({"ids": torch.from_numpy(ids)}, "")}
    if tensors:
        if {key: about[key] for key in owner} != owner:
            raise UserError(f"--resume {args.out}: its model, text, method or version differs")
        restore_state(lococo, optimizer, tensors)
    print(settings)
    print(f"{sum(p.numel() for p in lococo.trained().values()):,} parameters train")

    def save(step: int) -> None:
        about.update(owner, step=step)
        save_state(lococo, optimizer, args.out / "state.safetensors", **about)

    if not tensors:
        score(f"{args.method}, before training", lococo)
        save(0)
    stopped = train(lococo, draw, args, optimizer, about["step"], save)
    if stopped:
        print(f"stopped; to go on: python train.py --resume {os.path.relpath(args.out)}")
        raise SystemExit(128 + stopped)
    write_file(args.out / "adapter.safetensors", lococo.trained(), **described(lococo))
    score(f"{args.method}, after training", lococo)
    print(f"{f'{len(documents)} held-out documents':40}", "perplexity", *answers, sep="  ")
    widths = [len(kind) + 2 for kind in ("perplexity", *answers)]
    for name, values in about["scores"].items():
        row = "".join(f"{value:>{width}.3f}" for value, width in zip(values, widths))
        print(f"{name:40}{row}")
    print(f"adapter: {os.path.relpath(args.out / 'adapter.safetensors')}")


if __name__ == "__main__":
    run_program(main)
