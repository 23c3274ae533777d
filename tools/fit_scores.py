"""Fit the scores of support/ours/learned_score.py to the attention of a base.

    python tools/fit_scores.py --model SmolLM2-135M --data books/ --out runs/scores \\
        --budgets budgets.json

Full attention reads pieces of the texts, into which facts of many forms are written, and it
is noted how much attention each entry receives from each segment. Then the score of each
layer learns, at moments within a piece, how much attention an entry will receive in all, and
the largest share of attention that one later token will pay to it. No gradient goes through
the model. For SmolLM2 this takes 21 minutes of a core, and for tiny/ one. The folder --out gets
an adapter, as train.py writes it, whose memory is in 8 bits. Without --data the texts are those
of Python's own library that train.py trains on.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm, trange

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import prefill
from lococo import AdaptedLlama, attention_weights
from model import KVCache, Llama, LlamaConfig, load_base
from support.command_line import Parser, at_least, named_path, prepare, run_program
from support.facts import FORMS, tell
from support.files import UserError
from support.ours.learned_score import LearnedScore
from support.programs.adapter import write_adapter
from support.programs.run_folder import refuse_used
from support.programs.settings import make_settings
from support.text import PARTS, fingerprints, pieces_to_fit
from support.tokenizer import Tokenizer

SEGMENT = 256  # tokens
# Facts of these forms are written into the texts. Sentences are left for tools/needle.py.
FORMS_TO_FIT = [form for form in FORMS if form != "sentence"]

# --- What full attention pays -----------------------------------------------------------


class Noted(KVCache):
    """The full cache of one text. For each layer it notes the entries that enter, with keys
    that are not rotated, (G, T, 2D), and what entries receive from each segment, as a sum
    over its queries and as the largest share of one query, both (G, S)."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.entries = [[] for _ in self.keys]
        self.sums = [[] for _ in self.keys]
        self.largest = [[] for _ in self.keys]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.entries[layer].append(torch.cat((k, v), dim=-1)[0].half().cpu())
        return super().attend(layer, q, k, v)

    def read(self, layer: int, q: Tensor) -> Tensor:
        attention = attention_weights(q, self.keys[layer].held)[0]  # (G, H/G * T, S)
        group = q.shape[1] // attention.shape[0]
        self.sums[layer].append((attention.sum(dim=1) / group).cpu())
        self.largest[layer].append(attention.amax(dim=1).cpu())
        return super().read(layer, q)


def texts_of(options: argparse.Namespace, tokenizer: Tokenizer) -> tuple[Tensor, set[int]]:
    """Pieces of the texts, (P, L), and the fingerprints of all texts. Two thirds of the pieces
    have facts of two forms, unless --no-facts is given. Raises UserError if no text is long
    enough."""
    rows, ids = pieces_to_fit(options.data, tokenizer, options.length, options.documents)
    told = []
    for i, row in enumerate(rows):
        if i % 3 < 2 and not options.no_facts:
            for n in (2 * i, 2 * i + 1):
                form = FORMS_TO_FIT[n % len(FORMS_TO_FIT)]
                row, _ = tell(row, 8, "training", n, i, tokenizer, form)
        told.append(row)
    return torch.stack(told), fingerprints(ids, tokenizer.bos)


# --- The fit ----------------------------------------------------------------------------

MOMENTS = 10  # in a piece, at which entries are sampled
SAMPLES = 300  # entries of a head at a moment; 40 % of them are of the newest segment
STEPS, BATCH, RATE = 600, 1024, 1e-2


def sampled(noted: Noted, layer: int, forget: float, generator: torch.Generator) -> list[Tensor]:
    """Entries (G, n, 2D), the attention that they have received and their age, both (G, n),
    as LearnedScore takes them. And what comes, (G, n, 2): the attention in all, and the largest
    share of its own that a later query pays to them."""
    entries = torch.cat(noted.entries[layer], dim=1)
    count = len(noted.sums[layer])
    found = []
    for moment in torch.linspace(2, count - 2, MOMENTS).long().tolist():
        seen = (moment + 1) * SEGMENT
        new = seen - 1 - torch.randint(SEGMENT, (2 * SAMPLES // 5,), generator=generator)
        old = torch.randint(seen, (SAMPLES - len(new),), generator=generator)
        some = torch.cat((new, old))
        received = torch.zeros(entries.shape[0], seen)
        for sums in noted.sums[layer][: moment + 1]:
            received *= forget
            received[:, : sums.shape[1]] += sums
        in_all = sum(sums[:, some] for sums in noted.sums[layer][moment + 1 :])
        later = [largest[:, some] for largest in noted.largest[layer][moment + 1 :]]
        target = torch.stack((in_all, torch.stack(later).amax(dim=0)), dim=-1)
        age = (seen - some).float().expand_as(in_all)
        found.append((entries[:, some], received[:, some], age, target))
    return [torch.cat(parts, dim=1) for parts in zip(*found)]


def fit(score: LearnedScore, entries: Tensor, received: Tensor, age: Tensor, target: Tensor) -> None:
    """exp(score) becomes the expected target, divided by its mean in each head: a Poisson loss."""
    features = score.features(entries.float(), received, age).flatten(0, 1)
    score.mean.data, score.deviation.data = features.mean(dim=0), features.std(dim=0)
    learned = [*score.linear.parameters(), *score.hidden.parameters(), *score.out.parameters()]
    target = target / target.mean(dim=1, keepdim=True)
    optimizer = torch.optim.AdamW(learned, RATE, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        some = torch.randint(target.shape[1], (BATCH,))
        z = score(entries[:, some].float(), received[:, some], age[:, some]).clamp(max=12)
        optimizer.zero_grad()
        (z.exp() - target[:, some] * z).mean().backward()
        optimizer.step()


@torch.no_grad()
def samples_of(model: Llama, documents: Tensor, forget: float) -> list[list[Tensor]]:
    """By layer what `sampled` returns, of all pieces of text."""
    generator = torch.Generator().manual_seed(0)
    by_layer = [[] for _ in model.layers]
    for row in tqdm(documents, desc="pieces read with full attention"):
        noted = Noted(model.config)
        prefill(model, row[None].to(model.device), noted, SEGMENT)
        for layer, some in enumerate(by_layer):
            some.append(sampled(noted, layer, forget, generator))
    return [[torch.cat(parts, dim=1) for parts in zip(*some)] for some in by_layer]


# --- The program ------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = Parser(__doc__, mem="1792", segment="256")
    parser.set_defaults(mem=1792, segment=256)
    parser.add_seed()
    add = parser.add_argument_group("text and output").add_argument
    add("--data", type=named_path, nargs="+", metavar="PATH", default=[],
        help="files and folders (default: what train.py trains on of Python's own library)")
    add("--length", type=at_least(1024), metavar="L",
        help="tokens of a piece of text (default: 8192, or the base's context if it is less)")
    add("--documents", type=at_least(1), default=12, metavar="N",
        help="pieces, spread evenly over the texts (default: 12)")
    add("--no-facts", action="store_true", help="write no facts into the texts")
    add("--out", type=named_path, required=True, metavar="RUN", help="new directory")
    options = parser.parse_args()
    refuse_used(str(options.out))
    return options


def main() -> None:
    options = parse()
    machine = prepare(options.device, options.dtype, options.seed)
    model, tokenizer = load_base(options.model, machine.dtype, machine.device)
    context = model.config.longest
    options.length = options.length or min(8192, context)
    if context < 4 * SEGMENT:
        few = f"the base's context has {context:,} tokens, and a score needs {4 * SEGMENT:,}"
        raise UserError(f"--model {options.model}: {few}; take another base")
    if options.length > context:
        passed = f"full attention would pass the base's context of {context:,} tokens"
        raise UserError(f"--length {options.length}: {passed}; take a smaller --length")
    documents, trained = texts_of(options, tokenizer)
    options.out.mkdir(parents=True, exist_ok=True)
    sizes = options.mem, options.segment, options.length, options.budgets
    s = replace(make_settings("learned", *sizes, lora_rank=0), bits=8)
    adapted = AdaptedLlama(model, s)
    with machine.precision():
        samples = samples_of(model, documents, s.forget ** (SEGMENT / s.forget_in))
    for layer in trange(len(samples), desc="layers"):
        score = adapted.compressors[layer].cpu()
        fit(score, *samples[layer])
    parts = [*PARTS] if options.data else ["training"]
    write_adapter(options.out, adapted, parts, trained)
    print(f"adapter: {options.out / 'adapter.safetensors'}")


if __name__ == "__main__":
    run_program(main)
