"""Extend a pretrained Llama-2: tune the method's convolutions, LoRA, embeddings and norms.

    python train.py                            # the embedded model, on a CPU
    python train.py --mem 512 --seq 8192       # the same, at 8 times its pretrained context
    python train.py --model SmolLM2-135M --recipe inference --data books/    # frozen base
    python train.py --model Llama-2-7b-hf --data RedPajama/ --mem 512 --seq 32768
    python train.py --resume runs/my-run       # go on after Ctrl-C, a crash or a power cut
    torchrun --nproc_per_node=4 train.py ...   # 4 GPUs share the sequences of a step

For the method read TrainConfig, `gradients`, `backward_by_pieces` and `train`. The rest is
the state of a run, the command line, texts, and a run from start to end. For many
processes see support/processes.py, for the folder of a run support/run_folder.py.
"""

import argparse
import json
import math
import os
import signal
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, NamedTuple, TextIO

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm

from eval_ppl import baselines, name_of, perplexity, ranges, token_losses
from lococo import COMPRESSORS, KINDS, METHODS, AdaptedLlama, Compressor, Settings
from lococo import check_names, identity, segment_losses, settings_for
from model import KVCache, Llama, attention, load_base
from support.command_line import HERE, TINY, Machine, Parser, at_least, counted
from support.command_line import method_flags, named_path, prepare, resume_command, run_program
from support.facts import FORMS, tell, tell_all
from support.files import UserError, checksum, read_file, write_file
from support.processes import RANK, WORLD, add_up, end_together, explained, join
from support.processes import noted_signals, start_alike, start_process, wait_for_all
from support.run_folder import claim, is_used, never_began
from support.text import PARTS, find_files, long_documents, sequence, token_streams
from support.tokenizer import Tokenizer

# --- Recipes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on.

    The defaults are the paper's context extension. What is not in the paper, such as facts,
    is off, and comments say where the paper gives no number. A recipe, a stored run and
    flags override the defaults, in this order. Paths are strings, so that a configuration
    can be stored as JSON.
    """

    recipe: str = "paper"  # its name; what it sets is in the other fields
    # Model and machine.
    model: str = str(TINY)
    device: str | None = None  # None: a GPU if there is one
    dtype: str | None = None  # None: float32 on a CPU, bfloat16 on a GPU
    seed: int = 0
    # Memory.
    # The paper's main method ("Ours" in its table 2); the official code's default.
    method: str = "lococo+h2o"
    mem: int = 512  # slots M; section 4.1
    segment: int | None = 512  # tokens T that enter together, the paper's chunk; None: M
    compressor: str = "paper"  # section 3.2.1
    kernel: int = 21  # taps of the convolution; section 4.1
    # Memory: with None the method's own value is used.
    sinks: int | None = None
    heavy: int | None = None
    recent: int | None = None
    positions: str | None = None
    forget: float | None = None
    budgets: list[int] | None = None
    # Text.
    # Files and folders; none: Python's own library.
    data: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)  # none: a tenth of `data`
    seq: int = 8192  # trained length L, in tokens; section 4.3 also takes 16,384 and 32,768
    facts: int = 0  # written into each sequence
    fact_form: str = "line"  # see support.facts.FORMS
    # Training.
    lora_rank: int = 8  # section 4.1; with 0 the convolutions train alone
    # Rate of LoRA, embeddings and norms; section 4.1. Both rates fall linearly to 0.
    lr: float = 5e-5
    conv_lr: float = 5e-2  # rate of the convolutions; section 4.1
    # The paper gives no number for context extension. 100 steps are 104.9 million tokens;
    # section 3.3 has 104 million for inference mode.
    steps: int = 100
    # Sequences per step; section 4.1. None: as many as fit into 4,096 tokens, at least one.
    batch: int | None = 128
    micro_batch: int = 1  # sequences in memory at once; section 4.1
    # Segments that the gradient spans. The paper does not say how many; the official code
    # has 1.
    bptt: int = 1
    recompute: bool = False
    # Ours.
    # An answer is the word of a fact that is told again. In the convolutions' gradient its
    # loss counts so many times.
    answer_weight: float = 1.0
    sharper: float = 1.0  # after training our compressors' parameters are multiplied by this
    # Scoring and output.
    score_tokens: int = 32768  # about so many are scored: 4 documents of 8,192
    save_every: int = 1  # steps
    out: str = ""  # the run's directory


RECIPES = {  # what each changes of the defaults above
    "paper": dict(),
    # Section 4.1; 104 million tokens.
    "paper-inference": dict(seq=4096, lora_rank=0, steps=200),
    # Ours: a real Llama stays as it is; 60 x 4,096 tokens (docs/real-llama.md).
    "inference": dict(
        method="lococo+h2o+recent", mem=64, segment=None, seq=1024,
        compressor="scored", kernel=3, lora_rank=0, conv_lr=2e-2,
        steps=60, batch=None, micro_batch=4, sharper=16.0,
    ),
    # Ours: twice the pretrained context; 240 x 4,096 tokens. 32 documents are scored.
    "embedded": dict(
        method="lococo+window", mem=128, segment=None, seq=2048,
        compressor="facts", kernel=3, lr=2e-3, conv_lr=7.5e-3,
        steps=240, batch=None, micro_batch=2, bptt=4, sharper=16.0,
        facts=8, answer_weight=20.0, score_tokens=65536, save_every=10,
    ),
}  # fmt: skip


def table_of(configs: dict[str, TrainConfig]) -> str:
    """What configurations set: a line for each field, a column for each configuration."""
    table = {"": list(configs)}
    for c in configs.values():
        batch = c.batch or sequences_of(c.seq)
        lora = f"rank {c.lora_rank}, rate {c.lr:g}" if c.lora_rank else "-"
        text = f"{c.facts} facts each, weight {c.answer_weight:g}" if c.facts else "no facts"
        cells = {
            "method": c.method,
            "slots M, segment T": f"{c.mem}, {c.segment or c.mem}",
            "tokens of a sequence L": f"{c.seq:,}",
            "text": text,
            "compressor": f"{c.compressor}, {c.kernel} taps",
            "convolutions' rate": f"{c.conv_lr:g}",
            "sharper after training": f"x {c.sharper:g}",
            "LoRA": lora,
            "steps x sequences": f"{c.steps} x {batch}, {c.micro_batch} at once",
            "segments of a gradient": c.bptt,
            "tokens that are scored": f"{c.score_tokens:,}",
            "steps between states": c.save_every,
        }
        for name, cell in cells.items():
            table.setdefault(name, []).append(cell)
    columns = zip(*([name, *row] for name, row in table.items()))
    widths = [max(len(str(cell)) for cell in column) for column in columns]
    lines = []
    for name, row in table.items():
        padded = (f"{cell:<{width}}" for cell, width in zip((name, *row), widths))
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def sequences_of(seq: int) -> int:
    """The sequences of a step of at most 4,096 tokens, at least one."""
    return max(1, 4096 // seq)


# --- What a run is made of --------------------------------------------------------------


class Texts(NamedTuple):
    """What a run trains on and scores."""

    ids: np.ndarray  # tokens to train on
    parts: list[str]  # the parts of --data that they come from
    documents: Tensor  # to score, (N, L)
    summary: str  # for the user


@dataclass
class Record:
    """What the state of a run says beside its tensors. It changes while the run goes on."""

    step: int = 0  # steps done
    config: dict = field(default_factory=dict)  # fields of TrainConfig; none at a start
    # Checksums of model and text, and the settings: what a resumed run must have, too.
    owner: dict = field(default_factory=dict)
    documents: str = ""  # a checksum of what is scored, and how
    # Rows of figures by the name of a memory, see `score`.
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Setup:
    """What stays the same from the start of a run to its end."""

    config: TrainConfig
    settings: Settings
    machine: Machine
    tokenizer: Tokenizer
    text: Texts


def draw_sequence(
    config: TrainConfig, ids: np.ndarray, tokenizer: Tokenizer, i: int
) -> tuple[Tensor, Tensor]:
    """Training sequence i of the tokens `ids`, with its facts, as support.facts.tell returns
    it: its tokens, and how long ago the fact of each answer was told, both (L,). Raises
    UserError if the text is too short."""
    tokens = sequence(ids, config.seq, config.seed, i)
    form = config.fact_form
    return tell(tokens, config.facts, "training", config.seed, i, tokenizer, form)


# --- Training ---------------------------------------------------------------------------

EXTRA_EVERY = 3  # pieces; see `add_answers`


class ShiftedGroups(KVCache):
    """LongLoRA's attention while it trains (arXiv 2309.12307). The whole sequence enters at
    once, so that nothing is cached. Each token attends within its quarter."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, L, D), k and v (B, G, L, D) -> what the heads read, (B, H, L, D).

        For the second half of the heads the borders are moved by half a quarter. Both ends
        are groups of their own then, so that the end is not seen at the start.
        """
        H, L = q.shape[1], q.shape[2]
        quarter = math.ceil(L / 4)
        k = k.repeat_interleave(H // k.shape[1], dim=1)
        v = v.repeat_interleave(H // v.shape[1], dim=1)
        read = torch.empty_like(q)
        for heads, first in ((slice(0, H // 2), 0), (slice(H // 2, H), quarter // 2)):
            borders = sorted({0, *range(first, L, quarter), L})
            for start, stop in zip(borders, borders[1:]):
                group = (slice(None), heads, slice(start, stop))
                read[group] = attention(q[group], k[group], v[group])
        return read


def gradients(
    adapted: AdaptedLlama, draw: Callable, config: TrainConfig, machine: Machine,
    step: int, done: Callable[[int], None] = lambda tokens: None,
) -> float:  # fmt: skip
    """Add the gradient of the step's loss to p.grad; return the loss in nats per token.

    draw(i) is sequence i, as `draw_sequence` returns it. The processes share the sequences
    of a step: this one is number RANK of WORLD (support/processes.py). done(n) is called
    when n tokens more have had their backward pass.
    """
    total = 0.0
    own = range(step * config.batch + RANK, (step + 1) * config.batch, WORLD)
    for n in range(0, len(own), config.micro_batch):
        rows = [draw(i) for i in own[n : n + config.micro_batch]]
        # Both (micro_batch, L).
        tokens, ago = (torch.stack(row).to(machine.device) for row in zip(*rows))
        pieces = backward_by_pieces(adapted, tokens, ago > 0, config, machine, step)
        for loss, scored in pieces:
            total += loss
            done(scored)
    for p in adapted.trained().values():  # a process without a sequence has no gradient
        p.grad = add_up(torch.zeros_like(p) if p.grad is None else p.grad)
    return add_up(torch.tensor(total, dtype=torch.float64)).item()


def backward_by_pieces(
    adapted: AdaptedLlama, tokens: Tensor, answers: Tensor, config: TrainConfig,
    machine: Machine, step: int,
) -> Iterator[tuple[float, int]]:  # fmt: skip
    """Backward passes of sequences (B, L), one for each piece of `bptt` segments, so that
    the graph never spans more. Yields what each adds to the step's loss, and how many
    tokens it has scored.

    `answers` (B, L) marks the tokens that count more, see `add_answers`.
    """
    longlora = adapted.settings.method == "longlora"
    cache = adapted.cache(plain=ShiftedGroups if longlora else KVCache)
    segment = config.seq if longlora else config.segment
    targets_in_step = config.batch * (config.seq - 1)
    pieces = segment_losses(adapted.model, tokens, cache, segment, config.bptt)
    answers_of_pieces = answers[:, 1:].split(config.bptt * segment, dim=1)
    # `next` is called by hand, as only the forward pass is to run in the machine's precision.
    for number, is_answer in enumerate(answers_of_pieces):
        with machine.precision():
            losses, _ = next(pieces)  # runs one piece forward; the next call cuts the graph
        # Outside autocast, as PyTorch advises: a backward pass has the dtypes of its forward
        # pass.
        loss = losses.sum() / targets_in_step
        # With --lora-rank 0 nothing before the first compression has a gradient.
        if loss.requires_grad:
            if (step + number) % EXTRA_EVERY == 0:
                add_answers(losses[is_answer] / targets_in_step, adapted, config)
            loss.backward()
        yield loss.item(), losses.numel()


def add_answers(losses: Tensor, adapted: AdaptedLlama, config: TrainConfig) -> None:
    """In the convolutions' gradient an answer counts `answer_weight` times. The usual
    backward pass counts it once. This adds the others, from the losses of the answers
    in a piece, (answers,).

    This costs a second backward pass. To save time, one piece in EXTRA_EVERY has it,
    EXTRA_EVERY times as large, so that the mean gradient over the steps, before it is
    clipped, is the same. Which pieces these are depends on the step, not on how the
    sequences are dealt out. LoRA does not get it, because plain text would suffer.
    """
    weight = EXTRA_EVERY * (config.answer_weight - 1)
    convolutions = list(adapted.compressors.parameters())
    if weight and convolutions and len(losses):
        extra = weight * losses.sum()
        extra.backward(inputs=convolutions, retain_graph=True)


def make_optimizer(adapted: AdaptedLlama, config: TrainConfig) -> AdamW:
    """AdamW with a group for the convolutions and one for the rest. Each group stores its
    first rate as "rate". From it `train` computes "lr", the rate of a step.

    Ours, as the paper is silent: no weight decay, and `train` clips each group's gradient
    to norm 1.
    """
    convolutions = list(adapted.compressors.parameters())
    rest = [p for p in adapted.model.parameters() if p.requires_grad]
    groups = [
        {"params": convolutions, "rate": config.conv_lr},
        {"params": rest, "rate": config.lr},
    ]
    return AdamW([group for group in groups if group["params"]], weight_decay=0.0)


def train(
    setup: Setup, adapted: AdaptedLlama, optimizer: AdamW, begin: int,
    save: Callable[[int], None], log: TextIO,
) -> int:  # fmt: skip
    """Steps from `begin` to `steps`; save(steps done) is called after every `save_every`. A
    signal to any process ends all after the step that is under way. Returns the signal's
    number, or 0 if all steps are done."""
    config = setup.config
    draw = partial(draw_sequence, config, setup.text.ids, setup.tokenizer)
    # The tokens of a step that this process has.
    own = len(range(RANK, config.batch, WORLD)) * (config.seq - 1)
    bar = tqdm(desc="training", total=config.steps * own, initial=begin * own,
               unit=" tokens", unit_scale=True, mininterval=1, disable=RANK > 0)  # fmt: skip
    with noted_signals() as noted, bar:
        for step in range(begin, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * (1 - step / config.steps)
            optimizer.zero_grad()
            loss = gradients(adapted, draw, config, setup.machine, step, bar.update)
            norms = [clip_grad_norm_(g["params"], 1) for g in optimizer.param_groups]
            if not sum(norms).isfinite():
                remedy = "a gradient is not finite; lower --lr, --conv-lr"
                raise UserError(f"step {step + 1}: {remedy}")
            optimizer.step()
            progress = f"step {step + 1}/{config.steps}, loss {loss:.3f}"
            bar.set_postfix_str(progress, refresh=False)
            before_clipping = [round(norm.item(), 6) for norm in norms]
            line = {"step": step + 1, "loss": loss, "gradient norms": before_clipping}
            if config.sharper != 1:  # the loss is without this factor
                line["sharper after training"] = config.sharper
            log.write(json.dumps(line) + "\n")
            log.flush()
            stop = agreed(noted)
            if stop or (step + 1) % config.save_every == 0 or step + 1 == config.steps:
                save(step + 1)
            if stop:
                return stop
        return agreed(noted)  # one may have come while the last state was written


def agreed(noted: list[int]) -> int:
    """The number of a signal, if any process has noted one; else 0."""
    if add_up(torch.tensor(len(noted))) == 0:
        return 0
    return noted[0] if noted else signal.SIGTERM


# --- The state of a run -----------------------------------------------------------------


def save_state(
    adapted: AdaptedLlama, optimizer: AdamW, file: Path, record: Record, step: int
) -> None:
    """Write what trains, AdamW's moments and `record`. Nothing in a step is random, so that
    a run which goes on from here ends with the same bytes."""
    tensors = {}
    for name, p in adapted.trained().items():
        tensors[f"value {name}"] = p
        for key, moment in optimizer.state[p].items():
            tensors[f"{key} {name}"] = moment
    if RANK == 0:
        write_file(file, tensors, **asdict(replace(record, step=step)))
    # Until process 0 has written the file: if another process ended with an error meanwhile,
    # torchrun would end process 0 in the middle of it.
    wait_for_all()


@torch.no_grad()
def restore_state(
    adapted: AdaptedLlama, optimizer: AdamW, tensors: dict[str, Tensor]
) -> None:
    for name, p in adapted.trained().items():
        p.copy_(tensors[f"value {name}"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key} {name}" in tensors:  # not before the first step
                device = "cpu" if key == "step" else p.device
                optimizer.state[p][key] = tensors[f"{key} {name}"].to(device, copy=True)


# --- The command line -------------------------------------------------------------------


RECIPES_VALUE = "where no default is named, the recipe's value holds: see the table at the end"


def odd(text: str) -> int:
    number = at_least(1)(text)
    if number % 2 == 0:
        raise argparse.ArgumentTypeError(f"{text}: it must be odd, to have a middle")
    return number


def make_parser() -> Parser:
    """A flag that is not given is None. Then the recipe decides, or TrainConfig."""
    parser = Parser(__doc__, mem="the recipe's", segment="the recipe's")
    recipes = {name: TrainConfig(**RECIPES[name]) for name in RECIPES}
    parser.epilog = f"what a recipe sets:\n{table_of(recipes)}"
    parser.set_defaults(model=None, seed=None)
    add_memory_flags(parser)
    add_text_flags(parser)
    add_training_flags(parser)
    add_output_flags(parser)
    return parser


def add_memory_flags(parser: Parser) -> None:
    add = parser.memory.add_argument
    add("--method", choices=METHODS,
        help="what the slots hold: a row of lococo.METHODS (default: the recipe's)")
    add("--compressor", choices=COMPRESSORS,
        help="what merges entries: the paper's or ours (default: the recipe's)")
    add("--kernel", type=odd, metavar="TAPS",
        help="width of the convolution, odd (default: the recipe's)")


def add_text_flags(parser: Parser) -> None:
    whole = at_least(0)
    add = parser.add_argument_group("text", RECIPES_VALUE).add_argument
    add("--data", type=named_path, nargs="+", metavar="PATH",
        help='texts: files, folders, .jsonl of {"text": ...} (default: Python\'s own library)')
    add("--held-out", type=named_path, nargs="+", metavar="PATH",
        help="texts to score; all of --data trains then (default: a tenth of --data is scored)")
    add("--seq", type=at_least(2), metavar="L", help="tokens of a sequence: the trained length")
    add("--facts", type=whole, metavar="N", help="facts that are written into each sequence")
    add("--fact-form", choices=FORMS,
        help="lines `@ name name = word` (default), or sentences as RULER's needles")


def add_training_flags(parser: Parser) -> None:
    positive, whole, number = at_least(1), at_least(0), at_least(0, float)
    add = parser.add_argument_group("training", RECIPES_VALUE).add_argument
    add("--recipe", choices=RECIPES,
        help="values of the flags that are not given (default: embedded for tiny/, else paper)")
    add("--lora-rank", type=whole, metavar="RANK",
        help="of LoRA; with 0 only the convolutions train (inference mode)")
    add("--lr", type=number, metavar="RATE", help="learning rate of LoRA, embeddings and norms")
    add("--conv-lr", type=number, metavar="RATE", help="learning rate of the convolutions")
    add("--steps", type=positive, help="optimizer steps; the rates fall linearly towards 0")
    add("--batch", type=positive, metavar="N", help="sequences per step")
    add("--micro-batch", type=positive, metavar="N", help="sequences in memory at once")
    add("--bptt", type=positive, metavar="N", help="segments that the gradient spans")
    add("--recompute", action="store_true", default=None,
        help="compute activations again in the backward pass: less memory, more time "
             "(default: off)")
    add("--answer-weight", type=number, metavar="W",
        help="how many times the word of a fact that is told again counts, for the convolutions")
    add("--sharper", type=number, metavar="N",
        help="multiply the compressors' parameters by N after training, so that their choices "
             "are sharper")


def add_output_flags(parser: Parser) -> None:
    add = parser.add_argument_group("scoring and output", RECIPES_VALUE).add_argument
    add("--score-tokens", type=at_least(0), metavar="N",
        help="tokens of held-out documents to score; 0: none")
    add("--out", type=named_path, metavar="RUN",
        help="new directory of the run (default: in runs/)")
    add("--save-every", type=at_least(1), metavar="STEPS", help="steps between two saved states")
    add("--resume", type=named_path, metavar="RUN",
        help="go on with a run; docs/training.md says which of its flags may change")


def with_absolute_paths(value):
    """Paths become strings that mean the same in any working directory."""
    if isinstance(value, Path):
        return str(value.resolve())
    if isinstance(value, list):
        return [with_absolute_paths(element) for element in value]
    return value


def parse(line: list[str] | None = None) -> tuple[TrainConfig, dict[str, Tensor], Record]:
    """The configuration that a command line asks for (None: the program's own), and the
    state to resume from: its tensors (none at a start) and its record."""
    parser = make_parser()
    flags = parser.parse_args(line)
    given = {
        name: with_absolute_paths(value)
        for name, value in vars(flags).items()
        if value is not None
    }
    if flags.resume:
        tensors, record = state_of_run(flags, parser)
        recipe, stored = {}, record.config
        given["out"] = given.pop("resume")
    else:
        refuse_out(flags, parser)
        tensors, record = {}, Record()
        recipe, stored = recipe_for(flags), {}
    config = TrainConfig(**recipe | stored | given)
    config = replace(  # what follows from the other fields
        config,
        segment=config.segment or config.mem,
        batch=config.batch or sequences_of(config.seq),
    )
    if record.step > config.steps:
        done = f"this run is at step {record.step}"
        parser.error(f"--steps {config.steps}: {done}; it cannot have fewer")
    return config, tensors, record


def refuse_out(flags: argparse.Namespace, parser: Parser) -> None:
    """Refuse a folder in which a new run cannot begin."""
    if flags.out and flags.out.is_file():
        parser.error(f"--out {flags.out}: this is a file; name a folder")
    if RANK == 0 and flags.out and is_used(flags.out):
        remedy = "give a new directory"
        if (flags.out / "state.safetensors").exists():
            remedy += ", or go on with it by --resume"
        parser.error(f"--out {flags.out}: it is there already; {remedy}")


def recipe_for(flags: argparse.Namespace) -> dict:
    """What the recipe of a new run sets."""
    model = (flags.model or TINY).resolve()
    name = flags.recipe or ("embedded" if model == TINY else "paper")
    return RECIPES[name] | {"recipe": name}


# What a resumed run cannot change. Its model and its text may have moved, see `refuse_others`.
FIXED = (
    "recipe", "method", "mem", "segment", "seq", "compressor", "kernel", "lora_rank",
    "sinks", "heavy", "recent", "positions", "forget", "budgets",
)  # fmt: skip


def state_of_run(
    flags: argparse.Namespace, parser: Parser
) -> tuple[dict[str, Tensor], Record]:
    """Tensors and record of the run to resume."""
    if never_began(flags.resume):
        sentence = "this run has not begun; give its command again, without --resume"
        parser.error(f"--resume {flags.resume}: {sentence}")
    if not (flags.resume / "state.safetensors").exists():
        sentence = "there is no run to go on with; name a folder that train.py has made"
        parser.error(f"--resume {flags.resume}: {sentence}")
    tensors, about = read_file(flags.resume / "state.safetensors")
    same = about.keys() == {f.name for f in fields(Record)}
    if not same or about["config"].keys() != {f.name for f in fields(TrainConfig)}:
        other = "made by another version of this program; start a new run"
        parser.error(f"--resume {flags.resume}: {other}")
    record = Record(**about)
    refuse_changes(flags, record, parser)
    check_names(flags.resume, record.config["method"], record.config["compressor"])
    return tensors, record


def refuse_changes(flags: argparse.Namespace, record: Record, parser: Parser) -> None:
    """Refuse flags that a resumed run cannot take."""
    if flags.out:
        parser.error(f"--out {flags.out}: a run that is resumed keeps its folder")
    if flags.held_out and not record.config["held_out"]:
        held = "this run began without it, and holds out a part of --data; start a new run"
        parser.error(f"--held-out {flags.held_out[0]}: {held}")
    own = {name: value for name, value in record.config.items() if value is not None}
    own = record.owner["settings"] | own  # what the method has set, and what the user has
    for name in FIXED:
        value = getattr(flags, name)
        if value is not None and value != own[name]:
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            kept = "a run that is resumed keeps its own; start a new run for another"
            parser.error(f"--{name.replace('_', '-')} {words}: {kept}")


# --- Texts ------------------------------------------------------------------------------

# How a summary names the parts that do not train (support.text.PARTS). The last is for
# choosing between forms of a method.
PURPOSES = {"held-out": "held out", "choosing": "for choosing"}


def read_texts(config: TrainConfig, tokenizer: Tokenizer) -> Texts:
    """Read the texts of --data and --held-out. Raises UserError."""
    split = split_by_flag if config.held_out else split_by_name
    ids, parts, held_out, summary = split(config, tokenizer)
    most = max(1, config.score_tokens // config.seq) if config.score_tokens else 0
    documents = long_documents(held_out, tokenizer.bos, config.seq, most)
    summary += f"\n{counted(len(documents), 'document')} to score"
    short = int((held_out == tokenizer.bos).sum()) - len(documents)
    if 0 < len(documents) < most and short:
        summary += f", and {short} with fewer than --seq {config.seq} tokens"
    if most and not len(documents):
        reason = f"no document that is held out has --seq {config.seq} tokens"
        if not len(held_out):
            reason = "no document is held out"
        if config.held_out:
            remedy = "give longer ones, a smaller --seq, or --score-tokens 0"
            raise UserError(f"--held-out {' '.join(config.held_out)}: {reason}; {remedy}")
        if parts == [*PARTS]:
            reason = "all documents train"
        summary += f": {reason}; others can be named by --held-out"
    return Texts(ids, parts, documents, summary)


class Split(NamedTuple):
    """How texts are divided."""

    ids: np.ndarray  # tokens to train on
    parts: list[str]  # the parts of --data that they come from
    held_out: np.ndarray  # tokens to score
    summary: str  # for the user


def split_by_flag(config: TrainConfig, tokenizer: Tokenizer) -> Split:
    """All of --data trains, and --held-out is scored."""
    refuse_overlap(config)
    both = []
    for names in (config.data, config.held_out):
        streams = token_streams([Path(name) for name in names], tokenizer)
        both.append(np.concatenate([*streams.values()]))
    ids, held_out = both
    summary = f"text: {size_of(ids, tokenizer)} to train on, "
    summary += f"{size_of(held_out, tokenizer)} held out"
    return Split(ids, [*PARTS], held_out, summary)


def split_by_name(config: TrainConfig, tokenizer: Tokenizer) -> Split:
    """The checksum of a document's name chooses its part. If no document falls into the
    training part, another part is trained on; if this is the part that is held out, nothing
    is scored."""
    streams = token_streams([Path(name) for name in config.data], tokenizer)
    sizes = {part: size_of(ids, tokenizer) for part, ids in streams.items()}
    part = next(part for part in ("training", "choosing", "held-out") if len(streams[part]))
    ids, held_out = streams[part], streams["held-out"]
    parts = [part]
    if len(ids) == sum(map(len, streams.values())):  # there is no other part
        parts = [*PARTS]
    if part == "held-out":
        held_out = held_out[:0]
    summary = f"text: {sizes[part]} to train on"
    if part != "training":
        summary += f" (no name falls into the training part, so that the {part} part trains)"
    for other in ("held-out", "choosing"):
        if other != part:
            summary += f", {sizes[other]} {PURPOSES[other]}"
    return Split(ids, parts, held_out, summary)


def refuse_overlap(config: TrainConfig) -> None:
    """Raises UserError if a text of --held-out would train."""

    def files_of(names: list[str]) -> set[Path]:
        files = find_files([Path(name) for name in names], say=False)
        return {file.resolve() for file in files}

    for file in sorted(files_of(config.data) & files_of(config.held_out)):
        both = "it is among the texts that train, too (--data, or without it Python's library)"
        both += "; take it out of one of them"
        raise UserError(f"--held-out {os.path.relpath(file)}: {both}")


def size_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    documents = (ids == tokenizer.bos).sum()  # each begins with a BOS
    return f"{counted(documents, 'document')} ({len(ids):,} tokens)"


# --- A run ------------------------------------------------------------------------------


def settings_of(config: TrainConfig) -> Settings:
    """Raises UserError if the slots do not fit."""
    flags = method_flags(asdict(config))
    return settings_for(config.method, config.mem, config.segment, config.seq, **flags)


def refuse_idle(config: TrainConfig, settings: Settings) -> None:
    """Raises UserError if there is nothing to train, or if texts are so short that the
    convolutions would not be used."""
    least = min(settings.budgets, default=settings.mem)  # slots of the smallest layer
    if settings.merged and config.seq - 1 <= least + config.segment:
        sizes = f"a memory of {least} slots and a segment of {config.segment} tokens"
        nothing = f"it fits into {sizes}, so that nothing is compressed"
        remedy = "take a larger --seq, or a smaller --mem and --segment"
        raise UserError(f"--seq {config.seq}: {nothing}; {remedy}")
    if not settings.merged and not config.lora_rank:
        chosen = f"--lora-rank 0 --method {config.method}"
        remedy = "take --lora-rank 8, or a method with merged slots"
        raise UserError(f"{chosen}: there is nothing to train; {remedy}")


def score(setup: Setup, adapted: AdaptedLlama) -> dict[str, float]:
    """Perplexity of the run's documents. If --facts is not 0, also the recall of 8 facts
    that are told in each, by distance."""
    config, documents = setup.config, setup.text.documents
    nats, _, _ = token_losses(adapted, documents, setup.machine, config.micro_batch)
    row = {"perplexity": perplexity(nats)}
    if config.facts:
        told, ago = tell_all(documents, "held-out", setup.tokenizer, config.fact_form)
        _, hits, _ = token_losses(adapted, told, setup.machine, config.micro_batch)
        reach = (adapted.settings.mem or config.mem) + config.segment
        for distance, mask in ranges("recall ", ago, reach).items():
            row[distance] = hits[mask].double().mean().item()
    return row


def checksum_of_text(ids: np.ndarray) -> str:
    return checksum({"ids": torch.from_numpy(ids)}, "")


def refuse_others(record: Record, owner: dict, config: TrainConfig) -> None:
    """Raises UserError if a resumed run would get another model, text or method than it had.
    `owner` has all or some of what record.owner has."""
    before = record.owner or owner  # at a start it is empty
    names = {"base": "model", "text": "text", "settings": "row of lococo.METHODS"}
    changed = [names[key] for key in owner if owner[key] != before[key]]
    if changed:
        since = f"its {' and '.join(changed)} changed since it began"
        remedy = "give what it had, or start a new run"
        raise UserError(f"--resume {os.path.relpath(config.out)}: {since}; {remedy}")


def print_changes(config: TrainConfig, record: Record) -> None:
    """Print what differs from the stored run, and what this changes."""
    before = record.config
    if config.steps != before["steps"]:
        print(f"--steps {config.steps} instead of {before['steps']}: "
              f"from here on the rates fall to 0 at step {config.steps}")  # fmt: skip
    for name in ("batch", "seed"):
        new = getattr(config, name)
        if new != before[name]:
            print(f"--{name} {new} instead of {before[name]}: sequences are dealt out "
                  "otherwise from here on; some are left out or read again")  # fmt: skip
    if record.step == config.steps:
        print("all steps are done; the adapter is written and scored again")


@torch.no_grad()
def rows_sum_to_1(compressor: Compressor, head_dim: int, machine: Machine) -> bool:
    """Whether each row of w sums to 1, on random entries."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2 * head_dim, compressor.slots + 8)
    entries = torch.randn(shape, generator=generator).to(machine.device)
    from_slot = torch.zeros_like(entries[:, 0], dtype=torch.bool)
    scores = entries[:, 0].exp()
    sums = compressor.weights(entries, from_slot, scores).sum(dim=-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def print_trained(adapted: AdaptedLlama, machine: Machine) -> None:
    """How much trains, and a warning if a compressor of one's own does not mix."""
    print(f"{sum(p.numel() for p in adapted.trained().values()):,} parameters train")
    for compressor in adapted.compressors[:1]:  # all are of one class
        if not rows_sum_to_1(compressor, adapted.model.config.head_dim, machine):
            name = type(compressor).__name__
            print(f"warning: the rows of {name}.weights do not sum to 1: (4) and (5) do not mix")


def start_or_resume(
    setup: Setup, adapted: AdaptedLlama, state: dict[str, Tensor], record: Record
) -> AdamW:
    """Make everything as it is at the start, or as it was in the run to resume."""
    config = setup.config
    owner = identity(adapted) | {"text": checksum_of_text(setup.text.ids)}
    refuse_others(record, owner, config)
    record.owner = owner
    optimizer = make_optimizer(adapted, config)
    if state:
        restore_state(adapted, optimizer, state)
        print_changes(config, record)
    record.config = asdict(config)
    start_alike(adapted.trained().values())
    return optimizer


def print_scores(scores: dict[str, dict[str, float]], documents: int) -> None:
    """A row for each scored memory."""
    if not scores:
        return
    columns = next(iter(scores.values()))
    print(f"{counted(documents, 'held-out document'):40}", *columns, sep="  ")
    for name, row in scores.items():
        line = f"{name:40}"
        for column in columns:
            value = row.get(column, math.nan)  # NaN: there are no answers in this range
            line += f"  {'-' if math.isnan(value) else f'{value:.3f}':>{len(column)}}"
        print(line)


def print_start(setup: Setup) -> None:
    config, settings, machine = setup.config, setup.settings, setup.machine
    text = setup.text
    print(f"recipe {config.recipe} on {config.model}, {machine.dtype} on {machine.device}")
    print(f"run: {os.path.relpath(config.out)}")
    print(text.summary)
    if not config.data and Path(config.model) != TINY:
        print("no --data: it trains on Python's standard library; "
              "name your own text by --data")  # fmt: skip
    print(table_of({"this run": config}))
    passes = config.steps * config.batch * config.seq / len(text.ids)
    if passes >= 2:
        print(f"each token of the text is read about {passes:.0f} times")
    counts = {kind: getattr(settings, kind) for kind in KINDS}
    slots = [f"{count} {kind}" for kind, count in counts.items() if count]
    if slots:
        print(f"slots: {', '.join(slots)}; positions: {settings.positions}")
        if settings.mem != config.mem:
            print(f"these are {settings.mem} slots, and not --mem {config.mem}")
    if not settings.merged:
        print("nothing is merged: this method uses no compressor")


BEFORE = "stopped before the first step: no training is lost; give the same command again"


def run(config: TrainConfig, state: dict[str, Tensor], record: Record) -> int:
    """Refuse what cannot work, claim the folder of the run, then train and score. Returns
    the exit code."""
    settings = settings_of(config)
    refuse_idle(config, settings)
    machine = prepare(config.device, config.dtype, config.seed)
    with explained(BEFORE):
        model, tokenizer = load_base(Path(config.model), machine.dtype, machine.device)
        text = read_texts(config, tokenizer)
        draw_sequence(config, text.ids, tokenizer, 0)  # refuses a text that is too short
        if state:
            refuse_others(record, {"text": checksum_of_text(text.ids)}, config)
        usual = HERE / "runs" / f"{config.method}-mem{config.mem}-seq{config.seq}"
        out, log = claim(config.out, usual, record.step if state else None)
    setup = Setup(replace(config, out=str(out)), settings, machine, tokenizer, text)
    with log:
        if WORLD > 1 and RANK == 0:
            join()  # the others wait in start_process
        return train_and_score(setup, model, state, record, log)


def train_and_score(
    setup: Setup, model: Llama, state: dict[str, Tensor], record: Record, log: TextIO
) -> int:
    """Score a window and H2O, adapt the base, restore what a run to resume has stored, score,
    train, sharpen, write the adapter and score again. All that is written goes into the
    folder of the run. Returns the exit code."""
    config, settings, documents = setup.config, setup.settings, setup.text.documents
    out = Path(config.out)
    add_score = partial(score_into, setup, record)
    with explained(BEFORE):
        print_start(setup)
        if forget_other_scores(setup, record):
            # A window and H2O are scored first, as the adapter changes the base.
            for other in baselines(model, settings.mem or config.mem, config.segment):
                add_score(name_of(other.settings), other)
        adapted = AdaptedLlama(model, settings)
        if config.recompute:
            adapted.recompute_in_backward()
        optimizer = start_or_resume(setup, adapted, state, record)
        print_trained(adapted, setup.machine)
        save = partial(save_state, adapted, optimizer, out / "state.safetensors", record)
        if not state:
            add_score(f"{config.method}, before training", adapted)
            save(0)

    again = f"stopped; to go on: {resume_command(out)}"
    if WORLD > 1:
        again += " (by torchrun, as before)"
    with explained(again):
        stopped = train(setup, adapted, optimizer, record.step, save, log)
        if stopped:
            print(again)
            return 128 + stopped
        if RANK == 0:
            sharpen(adapted, config)
            write_adapter(adapted, config, setup.text.parts)
            add_score(f"{config.method}, after training", adapted)
            print_scores(record.scores, len(documents))
            print(f"adapter: {os.path.relpath(out / 'adapter.safetensors')}")
    return 0


def score_into(setup: Setup, record: Record, name: str, adapted: AdaptedLlama) -> None:
    """Add a row to the run's scores. One process scores, if there is anything to score."""
    if RANK == 0 and len(setup.text.documents):
        record.scores[name] = score(setup, adapted)


def forget_other_scores(setup: Setup, record: Record) -> bool:
    """Empty the scores, and return True, at a start and where a run that is resumed scores
    other documents, facts or numbers than before."""
    config = setup.config
    how = f"{config.facts > 0} {config.fact_form} {setup.machine.dtype}"
    scored = checksum({"documents": setup.text.documents}, how)
    if record.documents == scored:
        return False
    record.documents, record.scores = scored, {}
    return True


def sharpen(adapted: AdaptedLlama, config: TrainConfig) -> None:
    """The model that is written and scored is the trained one with sharper choices."""
    for compressor in adapted.compressors:
        compressor.sharpen(config.sharper)
    if config.sharper != 1 and len(adapted.compressors) and config.compressor != "paper":
        print(f"the compressors' parameters are multiplied by {config.sharper:g} now "
              "(--sharper); the losses in log.jsonl are without this factor")  # fmt: skip


def write_adapter(adapted: AdaptedLlama, config: TrainConfig, parts: list[str]) -> None:
    """`parts` are those of the texts that the adapter was trained on. They are left out if
    this is the training part alone."""
    file = Path(config.out, "adapter.safetensors")
    unusual = {} if parts == ["training"] else {"parts": parts}
    write_file(file, adapted.trained(), **identity(adapted), **unusual)


def main(line: list[str] | None = None) -> None:
    start_process()
    code = run(*parse(line))
    end_together(code)


if __name__ == "__main__":
    run_program(main)
