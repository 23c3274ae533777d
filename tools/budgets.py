"""Which layers of a model need more slots? Measures it, and prints a line of --budgets.

    python tools/budgets.py --model SmolLM2-135M --dtype bfloat16 --data texts.jsonl --mem 64

Layers differ in how much of a long text they read, so that equal budgets waste slots (PyramidKV,
arXiv 2406.02069, gives lower layers more; here it is measured). For each layer in turn, that layer
alone keeps all entries while every other layer has M slots; nothing is trained. What the loss gains
by it is the layer's need. Every layer gets LEAST of M slots, 4 or more, and the needs share the
others.

The gains are measured on texts that may be trained on; what is scored must not be among them.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import token_losses  # noqa: E402
from lococo import METHODS, AdaptedLlama, Settings, settings_for  # noqa: E402
from model import Llama, load_base  # noqa: E402
from support.command_line import Machine, Parser, at_least, method_flags, prepare  # noqa: E402
from support.command_line import run_program, text_path  # noqa: E402
from support.files import UserError  # noqa: E402
from support.text import long_documents, token_streams  # noqa: E402

LEAST = 3 / 8  # of M, for a layer that needs no more
# A layer with twice the need gets 2^0.7 = 1.6 times the slots. With a power of 1 the loss was
# 0.003 nats per token higher (docs/notebook.md).
POWER = 0.7
STEP = 4  # budgets are multiples of this


def loss(model: Llama, settings: Settings, documents: Tensor, machine: Machine) -> float:
    """Nats per token."""
    nats, _, _ = token_losses(AdaptedLlama(model, settings), documents, machine, 4)
    return nats.double().mean().item()


def measure_needs(
    model: Llama, settings: Settings, documents: Tensor, machine: Machine
) -> np.ndarray:
    """For each layer the nats per token that are gained if it alone keeps all entries."""
    layers = model.config.n_layers
    usual = loss(model, settings, documents, machine)
    found = []
    for layer in tqdm(range(layers), desc="layers"):
        budgets = [settings.mem] * layers
        budgets[layer] = documents.shape[1]
        found.append(usual - loss(model, replace(settings, budgets=budgets), documents, machine))
    return np.array(found)


def shared_out(needs: np.ndarray, mem: int) -> list[int]:
    """Slots of each layer, `mem` on average. What is negative is noise, and no need."""
    weights = needs.clip(min=0) ** POWER
    least = max(STEP, LEAST * mem)
    slots = least + (mem - least) * len(needs) * weights / weights.sum()
    budgets = (slots // STEP * STEP).astype(int)
    left = len(needs) * mem - budgets.sum()
    for layer in np.argsort(-needs)[: left // STEP]:  # what rounding has left over
        budgets[layer] += STEP
    budgets[np.argmax(needs)] += left % STEP
    return budgets.tolist()


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.memory.add_argument
    add("--method", choices=METHODS, default="h2o", help="one without merged slots (default: h2o)")
    add = parser.add_argument_group("text").add_argument
    add("--data", type=text_path, nargs="+", metavar="PATH", required=True,
        help="files and folders")
    add("--length", type=at_least(2), default=1024, metavar="L",
        help="tokens of a document that are read (default: 1024)")
    add("--documents", type=at_least(1), default=16, metavar="N", help="at most (default: 16)")
    args = parser.parse_args()
    if args.budgets:
        parser.error("--budgets are what this program finds; leave the flag out")
    return args


def main() -> None:
    args = parse()
    machine = prepare(args.device, args.dtype, args.seed)
    model, tokenizer = load_base(args.model, machine)
    mem = args.mem or 64
    flags = method_flags(vars(args)) | {"lora_rank": 0}
    settings = settings_for(args.method, mem, args.segment or mem, args.length, **flags)
    if settings.merged or not settings.mem:
        raise UserError(f"--method {args.method}: take one that has slots and merges nothing")
    if settings.positions == "slots":
        remedy = "take --positions interpolated"
        raise UserError(f"--method {args.method}: budgets cannot have positions by slot; {remedy}")
    ids = np.concatenate([*token_streams(args.data, tokenizer).values()])
    documents = long_documents(ids, tokenizer.bos, args.length, args.documents)
    if not len(documents):
        raise UserError(f"--data: no document has --length {args.length} tokens")
    found = measure_needs(model, settings, documents, machine)
    for layer, nats in enumerate(found):
        print(f"layer {layer:>2}  {nats:+.4f} nats per token if it keeps all")
    if found.max() <= 0:
        raise UserError("no layer gains by more slots; take more --documents")
    print("--budgets", *shared_out(found, settings.mem))


if __name__ == "__main__":
    run_program(main)
