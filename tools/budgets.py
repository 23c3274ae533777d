"""Which layers of a model need more slots? Measures it, and writes the slots of each one.

    python tools/budgets.py --model SmolLM2-135M --data texts.jsonl --mem 64 --out FILE
    python tools/budgets.py --model SmolLM2-135M --data texts.jsonl --mem 128 --recall

Layers differ in how much of a long text they read, so that equal budgets waste slots
(PyramidKV, arXiv 2406.02069, gives lower layers more; here it is measured). For each
layer in turn, that layer alone keeps all entries while every other layer has M slots;
nothing is trained. What the loss gains by it is the layer's need. Every layer gets LEAST
of M slots, 4 or more, and the needs share the others.

With --recall facts are written into the texts, and the loss is that of answers whose
facts were last told more than M + T tokens ago. Several layers work together where a
fact is recalled, so that a single one gains nothing alone. So it is the other way round:
for each layer in turn, all others keep everything while it has LEAST of M slots, and its
need is what the loss rises by.

The needs are measured on texts that may be trained on; what is scored must not be among
them.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import token_losses
from lococo import METHODS, AdaptedLlama, Settings
from model import Llama, load_base
from support.command_line import Machine, Parser, at_least, counted
from support.command_line import method_flags, named_path
from support.command_line import output_file, prepare, run_program
from support.facts import FORMS, tell_all
from support.files import UserError, write_json
from support.programs.settings import settings_for
from support.text import long_documents, token_streams
from support.tokenizer import Tokenizer

LEAST = 3 / 8  # of M, for a layer that needs no more
# A layer with twice the need gets 2^0.7 = 1.6 times the slots. With a power of 1 the loss
# was 0.003 nats per token higher.
POWER = 0.7
STEP = 4  # budgets are multiples of this


class Scored(NamedTuple):
    """What is scored: tokens (N, L), and which of them count, (N, L - 1)."""

    documents: Tensor
    mask: Tensor


def loss(model: Llama, settings: Settings, scored: Scored, machine: Machine) -> float:
    """Nats per token that counts."""
    adapted = AdaptedLlama(model, settings).eval()
    nats, _, _ = token_losses(adapted, scored.documents, machine, 4)
    return nats[scored.mask].double().mean().item()


def measure_needs(
    model: Llama, settings: Settings, scored: Scored, machine: Machine, recall: bool
) -> np.ndarray:
    """For each layer the nats per token that are gained if it alone keeps all entries;
    with `recall` those that are lost if it alone does not."""
    layers, whole = model.config.n_layers, scored.documents.shape[1]
    others, alone = (whole, least_of(settings.mem)) if recall else (settings.mem, whole)
    usual = loss(model, replace(settings, budgets=[others] * layers), scored, machine)
    found = []
    for layer in tqdm(range(layers), desc="layers"):
        budgets = [others] * layers
        budgets[layer] = alone
        changed = loss(model, replace(settings, budgets=budgets), scored, machine)
        found.append(changed - usual if recall else usual - changed)
    return np.array(found)


def least_of(mem: int) -> int:
    """Slots of a layer that needs no more."""
    return int(max(STEP, LEAST * mem))


def shared_out(needs: np.ndarray, mem: int) -> list[int]:
    """Slots of each layer, `mem` on average. What is negative is noise, and no need."""
    weights = needs.clip(min=0) ** POWER
    least = least_of(mem)
    slots = least + (mem - least) * len(needs) * weights / weights.sum()
    budgets = (slots // STEP * STEP).astype(int)
    left = len(needs) * mem - budgets.sum()
    for layer in np.argsort(-needs)[: left // STEP]:  # what rounding has left over
        budgets[layer] += STEP
    budgets[np.argmax(needs)] += left % STEP
    return budgets.tolist()


Options = argparse.Namespace  # the flags of `parse`


def parse() -> Options:
    parser = Parser(__doc__, mem="64", segment="as --mem")
    parser.set_defaults(mem=64)
    add = parser.memory.add_argument
    add("--method", choices=METHODS, default="h2o",
        help="one without merged slots (default: h2o)")
    add = parser.add_argument_group("text").add_argument
    add("--data", type=named_path, nargs="+", metavar="PATH", required=True,
        help="files and folders")
    add("--length", type=at_least(2), default=1024, metavar="L",
        help="tokens of a document that are read (default: 1024)")
    add("--documents", type=at_least(1), default=16, metavar="N",
        help="at most (default: 16)")
    add("--recall", action="store_true", help="what recalling facts needs, as said above")
    add("--fact-form", choices=FORMS, default="line",
        help="with --recall: lines `@ name name = word` (default), or sentences as "
             "RULER's needles")
    add("--out", type=output_file, metavar="FILE",
        help="write the slots of each layer there, for --budgets (default: print them alone)")
    flags = parser.parse_args()
    if flags.budgets:
        parser.error("--budgets are what this program finds; leave the flag out")
    flags.changes = method_flags(vars(flags)) | {"lora_rank": 0}
    return flags


def settings_of(options: Options, model: Llama) -> Settings:
    """Raises UserError if nothing can be measured with them."""
    mem, segment, L = options.mem, options.segment or options.mem, options.length
    # Positions are divided as in use, also for the layers that keep all.
    length = int(model.config.context * model.config.rope_scale)
    s = settings_for(options.method, mem, segment, length, **options.changes)
    if s.merged or s.mem == s.sinks:
        remedy = "take one with heavy or recent slots, which merges nothing"
        raise UserError(f"--method {options.method}: {remedy}")
    if L > length:
        passed = f"a layer that keeps all would pass the base's context of {length:,} tokens"
        raise UserError(f"--length {L}: {passed}; take a smaller --length")
    if L - 1 <= s.uncompressed:
        sizes = f"a memory of {mem} slots and a segment of {segment} tokens hold it"
        nothing = "so that nothing is compressed"
        remedy = "take a larger --length, or a smaller --mem"
        raise UserError(f"--length {L}: {sizes}, {nothing}; {remedy}")
    return s


def what_is_scored(options: Options, settings: Settings, tokenizer: Tokenizer) -> Scored:
    """Raises UserError if there is none."""
    ids = np.concatenate([*token_streams(options.data, tokenizer).values()])
    documents = long_documents(ids, tokenizer.bos, options.length, options.documents)
    if not len(documents):
        raise UserError(f"--data: no document has --length {options.length} tokens")
    if not options.recall:
        return Scored(documents, torch.ones_like(documents[:, 1:], dtype=torch.bool))
    # The names of facts are those for training.
    told, ago = tell_all(documents, "training", tokenizer, options.fact_form)
    scored = Scored(told, ago > settings.capacity)
    if not scored.mask.any():
        none = f"no fact is told again more than {settings.capacity} tokens later"
        raise UserError(f"--recall: {none}; take a larger --length, or more --documents")
    print(counted(int(scored.mask.sum()), "answer"))
    return scored


def main() -> None:
    options = parse()
    machine = prepare(options.device, options.dtype, options.seed)
    model, tokenizer = load_base(options.model, machine.dtype, machine.device)
    settings = settings_of(options, model)
    scored = what_is_scored(options, settings, tokenizer)
    found = measure_needs(model, settings, scored, machine, options.recall)
    what = "nats per token if it alone keeps all"
    if options.recall:
        what = f"nats per answer if it alone has {least_of(options.mem)} slots"
    for layer, nats in enumerate(found):
        print(f"layer {layer:>2}  {nats:+.4f} {what}")
    if found.max() <= 0:
        raise UserError("no layer gains by more slots; take more --documents")
    budgets = shared_out(found, settings.mem)
    if options.out:
        command = shlex.join(["python", "tools/budgets.py", *sys.argv[1:]])
        write_json(options.out, {"made by": command, "budgets": budgets})
    print("budgets", *budgets)


if __name__ == "__main__":
    run_program(main)
