"""Train a memory: its convolutions and, with a --lora-rank above 0, LoRA on its base
together with the base's embeddings and norms.

    python train.py                            # the embedded model, on a CPU
    python train.py --mem 512 --seq 8192       # the paper's sizes
    python train.py --model SmolLM2-135M --mem 512 --seq 8192 --data books/
    python train.py --model Llama-2-7b-hf --recipe paper --data RedPajama/ --seq 32768
    python train.py --resume runs/my-run       # after Ctrl-C, a crash or a power cut
    torchrun --nproc_per_node=4 train.py ...   # 4 GPUs share the sequences of a step

The file follows a run from the inside out: what a recipe sets, the gradient of one step,
the loop over steps, and a run from its texts to its adapter. The letters are those of
model.py.
"""

import os
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from tqdm import tqdm

from eval_ppl import perplexity, print_table, ranges, token_losses
from lococo import AdaptedLlama, Settings, segment_losses
from model import Llama, load_base
from support.command_line import HERE, TINY, Machine, counted, prepare
from support.command_line import resume_command, run_program
from support.facts import note_no_facts, tell, tell_all
from support.files import UserError
from support.processes import RANK, WORLD, add_up, agreed, end_together, join
from support.processes import noted_signals, share, start_alike, start_process
from support.programs.adapter import identity, write_adapter
from support.programs.longlora import training_cache
from support.programs.run_folder import State, make_folder, read_state, refuse_used
from support.programs.run_folder import restore, tensors_of, write_state, write_step
from support.programs.scoring import baselines, name_of
from support.programs.settings import make_settings
from support.programs.train_flags import check_use, flags_given, make_parser
from support.programs.train_report import print_start, progress_bar
from support.text import Texts, read_texts, sequence
from support.tokenizer import Tokenizer

# --- Recipes ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on.

    The defaults are the paper's context extension. What is not in the paper, such as
    facts, is off, and comments say where the paper gives no number. A recipe overrides
    the defaults, and flags override the recipe. Paths are strings, so that a configuration
    can be stored as JSON.
    """

    recipe: str  # its name; what it sets is in the other fields

    # Model and machine
    model: str = str(TINY)
    device: str | None = None  # None: a GPU if there is one
    dtype: str | None = None  # None: float32 on a CPU; on a GPU bfloat16, or else float16
    seed: int = 0

    # Memory
    method: str = "lococo+h2o"  # "Ours" in the paper's table 2
    mem: int = 512  # slots M; section 4.1
    segment: int | None = 512  # tokens that enter together, the paper's chunk; None: M
    budgets: list[list[int]] | None = None  # slots of heads, by layer

    # Text
    data: list[str] = field(default_factory=list)  # paths; none: Python's own library
    held_out: list[str] = field(default_factory=list)  # none: a tenth of `data`
    seq: int = 8192  # trained length L, in tokens; section 4.3 also has 16,384 and 32,768
    facts: int = 0  # written into each sequence

    # Training
    lora_rank: int = 8  # section 4.1; with 0 the convolutions train alone
    # Rate of LoRA, embeddings and norms; section 4.1. Both rates fall linearly towards 0.
    lr: float = 5e-5
    conv_lr: float = 5e-2  # rate of the convolutions; section 4.1
    # The paper gives no number for context extension. 100 steps are 104.9 million
    # tokens; section 3.3 has 104 million for inference mode.
    steps: int = 100
    # Sequences per step; section 4.1. None: one, or as many as fit into 4,096 tokens.
    batch: int | None = 128
    micro_batch: int = 1  # sequences in memory at once; section 4.1
    # Segments that the gradient spans. The paper does not say how many; the authors'
    # code has 1.
    bptt: int = 1
    recompute: bool = False  # True takes less memory and more time

    # Scoring and output
    score_tokens: int = 32768  # about so many are scored: 4 documents of 8,192
    out: str = ""  # the run's directory; empty: a new one in runs/

    @property
    def settings(self) -> Settings:
        """What the memory is. Raises UserError if its slots do not fit."""
        sizes = self.mem, self.segment, self.seq, self.budgets
        return make_settings(self.method, *sizes, lora_rank=self.lora_rank)


RECIPES = {  # what each changes of the defaults above
    "paper": dict(),
    # Section 4.1; 104.9 million tokens.
    "paper-inference": dict(seq=4096, lora_rank=0, steps=200),
    # The default, in minutes: the base stays as it is; 60 x 4,096 tokens.
    "inference": dict(
        method="lococo-code-0.02", mem=64, segment=None, seq=1024,
        lora_rank=0, steps=60, batch=None, micro_batch=4,
    ),
}


def config_of(recipe: str = "inference", **given) -> TrainConfig:
    """The configuration of a recipe, which the fields that are given override. Then
    `segment` and `batch` become numbers, if they are None."""
    config = TrainConfig(recipe, **RECIPES[recipe] | given)
    segment = config.segment or config.mem
    batch = config.batch or max(1, 4096 // config.seq)
    return replace(config, segment=segment, batch=batch)


# --- What a run is made of --------------------------------------------------------------


@dataclass(frozen=True)
class Setup:
    """What stays the same from the start of a run to its end."""

    config: TrainConfig
    machine: Machine
    model: Llama  # the base
    tokenizer: Tokenizer
    texts: Texts  # to train on and to score

    @property
    def out(self) -> Path:
        """The folder of the run."""
        return Path(self.config.out)

    def sequences(self, step: int) -> list[Tensor]:
        """The sequences of a step that this process reads, (L,) each."""
        first = step * self.config.batch
        return [self.draw(i) for i in share(range(first, first + self.config.batch))]

    def draw(self, i: int) -> Tensor:
        """Training sequence i, (L,), with facts written into it."""
        c = self.config
        tokens = sequence(self.texts.ids, c.seq, c.seed, i)
        return tell(tokens, c.facts, "training", c.seed, i, self.tokenizer)[0]


# --- One step ---------------------------------------------------------------------------

# The loss is multiplied by this before its backward pass, and the gradients are divided
# by it: float16 would round small ones to 0. A power of two rounds nothing.
SCALE = 2.0**14


def gradients(
    adapted: AdaptedLlama, sequences: list[Tensor], config: TrainConfig,
    machine: Machine, bar: tqdm,
) -> float:
    """Put the gradient of a step's loss into p.grad, which must be None before; return
    the loss in nats per token.

    `sequences` are those of the step that this process has, (L,) each. The gradients and
    losses of all processes are added up. The bar moves after each micro-batch.
    """
    loss = 0.0
    for first in range(0, len(sequences), config.micro_batch):
        at_once = sequences[first : first + config.micro_batch]
        tokens = torch.stack(at_once).to(machine.device)
        loss += backward(adapted, tokens, config, machine)
        bar.update(tokens[:, 1:].numel())
    for p in adapted.trained().values():  # a process without a sequence has no gradient
        p.grad = add_up(torch.zeros_like(p) if p.grad is None else p.grad / SCALE)
    return add_up(torch.tensor(loss, dtype=torch.float64, device="cpu")).item()


def backward(
    adapted: AdaptedLlama, tokens: Tensor, config: TrainConfig, machine: Machine
) -> float:
    """Read sequences (B, L) in pieces of `bptt` segments, and go back through each piece
    before the next one, so that the graph never spans more. Returns what they add to the
    loss of the step."""
    cache = training_cache(adapted)
    # Full attention has no segments: its gradient reaches over the whole sequence.
    segment = config.segment if adapted.settings.mem else config.seq
    length = config.bptt * segment  # targets of a piece
    targets = config.batch * (config.seq - 1)  # of the whole step
    total = 0.0
    for start in range(0, config.seq - 1, length):
        # The last target of a piece is the first token of the next.
        piece = tokens[:, start : start + length + 1]
        with machine.precision():  # autocast, unless the base is in float32
            segments = segment_losses(adapted.model, piece, cache, segment)
            loss = sum(nats.sum() for nats, _ in segments) / targets
        # With --lora-rank 0 nothing before the first compression has a gradient.
        if loss.requires_grad:
            (SCALE * loss).backward()
        cache.detach()
        total += loss.item()
    return total


def make_optimizer(adapted: AdaptedLlama, config: TrainConfig) -> AdamW:
    """AdamW with a group for the convolutions and one for the rest. Each group stores
    its first rate as "rate". From it `train` computes "lr", the rate of a step. There is no
    weight decay, as the paper names none."""
    convolutions = list(adapted.compressors.parameters())
    rest = [p for p in adapted.model.parameters() if p.requires_grad]
    groups = [
        {"params": convolutions, "rate": config.conv_lr},
        {"params": rest, "rate": config.lr},
    ]
    return AdamW([group for group in groups if group["params"]], weight_decay=0.0)


# --- The loop ---------------------------------------------------------------------------


def train(setup: Setup, adapted: AdaptedLlama, optimizer: AdamW, state: State) -> int:
    """Take the steps that follow a state. After each step a line of the log and a new
    state are written. A signal to any process ends all processes after the current step.
    Returns the signal's number, or 0 if all steps are done."""
    config = setup.config
    adapted.train()
    with noted_signals() as noted, progress_bar(config, state.step) as bar:
        for step in range(state.step, config.steps):
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * (1 - step / config.steps)
            optimizer.zero_grad()
            loss = gradients(adapted, setup.sequences(step), config, setup.machine, bar)
            # The paper is silent: the gradient of each group is clipped to norm 1.
            norms = [clip_grad_norm_(g["params"], 1) for g in optimizer.param_groups]
            if not sum(norms).isfinite():
                remedy = "lower --lr or --conv-lr"
                raise UserError(f"step {step + 1}: a gradient is not finite; {remedy}")
            optimizer.step()

            bar.set_postfix_str(f"step {step + 1}, loss {loss:.3f}", refresh=False)
            before_clipping = [round(norm.item(), 6) for norm in norms]
            entry = {"step": step + 1, "loss": loss, "gradient norms": before_clipping}
            tensors = tensors_of(adapted, optimizer)
            state = state._replace(step=step + 1, tensors=tensors)
            write_step(setup.out, state, entry)
            stop = agreed(noted)
            if stop:
                return stop
    return 0


# --- A run ------------------------------------------------------------------------------


def parse(line: list[str] | None = None) -> tuple[TrainConfig, State | None]:
    """The configuration that a command line asks for (None: the program's own), and the
    state of the run that it goes on with, or None. Raises UserError, also if the folder of a
    new run is in use."""
    recipes = {name: config_of(name) for name in RECIPES}
    given = flags_given(make_parser(__doc__, recipes), line)
    if "resume" not in given:
        config = config_of(**given)
        refuse_used(config.out)
        return config, None

    given["out"] = given.pop("resume")
    state = read_state(Path(given["out"]), [f.name for f in fields(TrainConfig)])
    if given.get("steps", state.step) < state.step:
        done = f"this run is at step {state.step}; it cannot have fewer"
        raise UserError(f"--steps {given['steps']}: {done}")
    return TrainConfig(**state.config | given), state


def score(setup: Setup, adapted: AdaptedLlama) -> dict[str, float]:
    """Perplexity of the run's documents. If --facts is not 0, also the recall of 8 facts
    that are told in each, by distance. It is empty if there is nothing to score, and in
    all processes but the first."""
    config, documents = setup.config, setup.texts.documents
    if RANK > 0 or not len(documents):
        return {}
    adapted.eval()
    nats, _, _ = token_losses(adapted, documents, setup.machine, config.micro_batch)
    row = {"perplexity": perplexity(nats)}
    if config.facts:
        told, ago = tell_all(documents, "held-out", setup.tokenizer)
        _, hits, _ = token_losses(adapted, told, setup.machine, config.micro_batch)
        # Full attention has the ranges of the others.
        near = (adapted.settings.mem or config.mem) + config.segment
        for distance, mask in ranges("recall ", ago, near).items():
            row[distance] = hits[mask].double().mean().item()
    return row


def set_up(config: TrainConfig) -> Setup:
    """Read the base and the texts, then make the folder of the run. Raises UserError if
    nothing can be trained on them."""
    machine = prepare(config.device, config.dtype, config.seed)
    model, tokenizer = load_base(Path(config.model), machine.dtype, machine.device)
    texts = read_texts(config.data, config.held_out, config.seq, config.score_tokens, tokenizer)
    sequence(texts.ids, config.seq, config.seed, 0)  # refuses a text that is too short
    if config.facts and RANK == 0:
        note_no_facts(texts.ids, config.seq, tokenizer)
    default = HERE / "runs" / f"{config.method}-mem{config.mem}-seq{config.seq}"
    out = make_folder(config.out, default)
    # Stored, so that a run which goes on on another device keeps its dtype.
    dtype = str(machine.dtype).removeprefix("torch.")
    config = replace(config, dtype=dtype, out=str(out))
    return Setup(config, machine, model, tokenizer, texts)


def run(config: TrainConfig, state: State | None) -> int:
    """Score, train, write the adapter and score again; or go on from a state. All that is
    written goes into the folder of the run. Returns the exit code."""
    check_use(config.settings)
    setup = set_up(config)
    config = setup.config
    if WORLD > 1 and RANK == 0:
        join()  # the others wait in start_process
    print_start(config, setup.machine, setup.texts)

    adapted = AdaptedLlama(setup.model, config.settings)
    optimizer = make_optimizer(adapted, config)
    owner = identity(adapted) | {"text": setup.texts.checksum}
    if state:
        restore(setup.out, state, owner, adapted, optimizer)
        state = state._replace(config=asdict(config))  # it may have other --steps
    else:
        state = begin(setup, adapted, optimizer, owner)
    if config.recompute:
        adapted.recompute_in_backward()
    stopped = train(setup, adapted, optimizer, state)
    if stopped:
        launched = " (by torchrun, as before)" if WORLD > 1 else ""
        print(f"stopped; to go on: {resume_command(setup.out)}{launched}")
        return 128 + stopped
    if RANK == 0:
        finish(setup, adapted, state.scores)
    return 0


def begin(setup: Setup, adapted: AdaptedLlama, optimizer: AdamW, owner: dict) -> State:
    """Score a new run before it trains. Write and return its state at step 0."""
    scores = scores_before(setup, adapted)
    start_alike(adapted.trained().values())
    tensors = tensors_of(adapted, optimizer)
    state = State(0, asdict(setup.config), owner, scores, tensors)
    write_state(setup.out, state)
    return state


def scores_before(setup: Setup, adapted: AdaptedLlama) -> dict[str, dict]:
    """Those of a window and of H2O on the base as it is, and of the memory before
    training."""
    config = setup.config
    mem = adapted.settings.mem or config.mem  # full attention has no slots
    memories = baselines(setup.model, mem, config.segment)
    scores = {name_of(memory.settings): score(setup, memory) for memory in memories}
    return scores | {f"{config.method}, before training": score(setup, adapted)}


def finish(setup: Setup, adapted: AdaptedLlama, before: dict[str, dict]) -> None:
    """Write the adapter, score it, and print all scores of the run."""
    write_adapter(setup.out, adapted, setup.texts.parts, setup.texts.trained)
    scores = before | {f"{setup.config.method}, after training": score(setup, adapted)}
    documents = len(setup.texts.documents)
    if documents:
        columns = [(name, ".3f") for name in next(iter(scores.values()))]
        print_table(counted(documents, "held-out document"), columns, scores)
    print(f"adapter: {os.path.relpath(setup.out / 'adapter.safetensors')}")


def main(line: list[str] | None = None) -> None:
    start_process()
    code = run(*parse(line))
    end_together(code)


if __name__ == "__main__":
    run_program(main)
