"""Which heads of a model need more slots? Measures it, and writes the slots of each one.

    python tools/budgets.py --model SmolLM2-135M --data books/ --out budgets.json
    python tools/budgets.py --model SmolLM2-135M --data books/ --recall

Few heads retrieve what was said long ago, so that equal budgets waste slots (DuoAttention,
arXiv 2410.10819; HeadKV, arXiv 2410.19258). Here each key/value head has a gate: at 0 it
reads M slots, at 1 all entries, and between them a blend of both. The need of a head is
how fast the loss falls as its gate opens. This is a gradient, and is taken where all gates
are one half, because several heads work together where a fact is recalled (as integrated
gradients, arXiv 1703.01365, with one step). The graph is cut after each segment. Every head
gets 3M/8 slots. The others are shared out by the square root of the need.

With --recall facts are written into the texts, and the loss is that of answers whose
facts were last told more than M + T tokens ago.

The needs are measured on texts that may be trained on; what is scored must not be among
them.
"""

import argparse
import shlex
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from lococo import METHODS, Memory, Settings, position_divisor, segment_losses
from model import KVCache, Llama, LlamaConfig, load_base
from support.command_line import Parser, at_least, counted, named_path, output_file
from support.command_line import prepare, run_program
from support.facts import tell_all
from support.files import UserError, write_json
from support.programs.settings import make_settings, refuse_not_compressed
from support.text import pieces_to_fit
from support.tokenizer import Tokenizer

LEAST = 3 / 8  # of M, for a head that needs no more
# A head with four times the need gets twice the slots above LEAST. Powers of 0.7 and 1 have
# losses that are 0.001 and 0.005 nats per token higher.
POWER = 0.5


class GatedMemory(Memory):
    """A memory, and a cache that keeps everything. What a head reads is a blend of both, by
    its gate in `gates` (layers, G)."""

    def __init__(self, config: LlamaConfig, settings: Settings, gates: Tensor):
        super().__init__(config, settings, nn.ModuleList())
        self.whole = KVCache(config, position_divisor(config, settings))
        self.gates = gates

    def make_room(self, B: int, T: int) -> None:
        super().make_room(B, T)
        self.whole.seen += T  # the model counts for this memory, and not for `whole`

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        of_slots = super().attend(layer, q, k, v)
        of_all = self.whole.attend(layer, q, k, v)
        gate = self.gates[layer].repeat_interleave(q.shape[1] // k.shape[1])
        return (of_slots + gate[:, None, None] * (of_all - of_slots)).type_as(q)

    def detach(self) -> None:
        self.whole.detach()
        super().detach()


def measure_needs(
    model: Llama, settings: Settings, documents: Tensor, mask: Tensor
) -> np.ndarray:
    """The need of each head, in nats per token that counts, (layers, G). `documents` (P, L)
    are read, and `mask` (P, L - 1) says which tokens count. A gate counts for what its
    own segment reads, and not for later ones."""
    shape = (model.config.n_layers, model.config.n_kv_heads)
    gates = torch.full(shape, 0.5, device=model.device, requires_grad=True)
    model.requires_grad_(False)
    bar = tqdm(total=mask.numel(), unit=" tokens", unit_scale=True)
    for document, counts in zip(documents, mask):
        cache = GatedMemory(model.config, settings, gates)
        tokens = document[None].to(gates.device)
        losses = segment_losses(model, tokens, cache, settings.segment)
        for (nats, _), part in zip(losses, counts.to(gates.device).split(settings.segment)):
            (nats[0] * part).sum().backward()
            cache.detach()
            bar.update(len(part))
    bar.close()
    return -gates.grad.cpu().numpy() / int(mask.sum())


def shared_out(needs: np.ndarray, mem: int) -> list[list[int]]:
    """Slots of each head, `mem` on average. What is negative is noise, and no need. What
    rounding leaves over, less than a slot of each head, goes to the one of the greatest need."""
    weights = needs.clip(min=0) ** POWER
    shares = LEAST + (1 - LEAST) * needs.size * weights / weights.sum()
    slots = (mem * shares).astype(int)
    slots.flat[np.argmax(needs)] += needs.size * mem - slots.sum()
    return slots.tolist()


Options = argparse.Namespace  # the flags of `parse`


def parse() -> Options:
    parser = Parser(__doc__, mem="256", segment="as --mem")
    parser.set_defaults(mem=256)
    add = parser.memory.add_argument
    add("--method", choices=METHODS, default="h2o+forget", metavar="METHOD",
        help="h2o, h2o+forget, streaming or one like these of your own (default: h2o+forget)")
    add = parser.add_argument_group("text").add_argument
    add("--data", type=named_path, nargs="+", metavar="PATH", default=[],
        help="files and folders (default: what train.py trains on of Python's own library)")
    add("--length", type=at_least(2), metavar="L",
        help="tokens of a piece of text (default: 4096, or the base's context if it is less)")
    add("--documents", type=at_least(1), default=6, metavar="N",
        help="pieces at most, spread evenly over the texts (default: 6)")
    add("--recall", action="store_true", help="what recalling facts needs, as said above")
    add("--out", type=output_file, metavar="FILE",
        help="write the slots of each head there, for --budgets (default: print them alone)")
    flags = parser.parse_args()
    if flags.budgets:
        parser.error("--budgets are what this program finds; leave the flag out")
    return flags


def settings_of(options: Options, model: Llama) -> Settings:
    """Raises UserError if nothing can be measured with them."""
    mem, segment, L = options.mem, options.segment or options.mem, options.length
    length = model.config.longest
    s = make_settings(options.method, mem, segment, length, lora_rank=0)
    if s.merged or s.mem == s.sinks or s.memory != "budgets":  # it has a rule of its own
        remedy = "take h2o, h2o+forget or streaming"
        raise UserError(f"--method {options.method}: {remedy}")
    if LEAST * s.mem <= max(4, s.sinks):
        few = f"--mem {mem}: {s.mem} slots are too few to be divided"
        raise UserError(f"{few}; take a larger --mem")
    if L > length:
        passed = f"a head that reads all would pass the base's context of {length:,} tokens"
        raise UserError(f"--length {L}: {passed}; take a smaller --length")
    refuse_not_compressed("--length", L, s)
    return s


def what_is_scored(
    options: Options, settings: Settings, tokenizer: Tokenizer
) -> tuple[Tensor, Tensor]:
    """Tokens (P, L), and which of them count, (P, L - 1). Raises UserError if none do."""
    documents, _ = pieces_to_fit(options.data, tokenizer, options.length, options.documents)
    if not options.recall:
        return documents, torch.ones_like(documents[:, 1:], dtype=torch.bool)
    # The names of facts are those for training.
    told, ago = tell_all(documents, "training", tokenizer)
    answers = ago > settings.capacity
    if not answers.any():
        none = f"no fact is told again more than {settings.capacity} tokens later"
        raise UserError(f"--recall: {none}; take a larger --length, or more --documents")
    print(counted(int(answers.sum()), "answer"))
    return told, answers


def main() -> None:
    options = parse()
    machine = prepare(options.device, options.dtype)
    model, tokenizer = load_base(options.model, machine.dtype, machine.device)
    options.length = options.length or min(4096, model.config.longest)
    settings = settings_of(options, model)
    documents, mask = what_is_scored(options, settings, tokenizer)
    needs = measure_needs(model, settings, documents, mask)
    print(f"needs of heads, in nats per {'answer' if options.recall else 'token'}")
    for layer, row in enumerate(needs):
        print(f"layer {layer:>2} ", *(f"{nats:+.5f}" for nats in row))
    if needs.max() <= 0:
        raise UserError("no head gains by more slots; take more --documents")
    budgets = shared_out(needs, settings.mem)
    if options.out:
        about = {name: getattr(options, name) for name in ("method", "mem", "length", "documents")}
        about["made by"] = shlex.join(["python", "tools/budgets.py", *sys.argv[1:]])
        rounded = [[round(nats, 6) for nats in row] for row in needs.tolist()]
        write_json(options.out, about | {"needs": rounded, "budgets": budgets})
    print("budgets", *budgets)


if __name__ == "__main__":
    run_program(main)
