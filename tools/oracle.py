"""How much of the gap could a memory close, if it knew what is read next?

    python tools/oracle.py --model SmolLM2-135M --prose prose \\
        --budgets adapters/smollm2-135m/budgets.json

Full attention reads a text first, and the attention that each entry receives from each
segment is noted. Then a memory of 896 slots reads it, and keeps the entries that receive
most from all segments that follow, with equal slots and with the budgets. No memory can know
this. The share of the gap between H2O and full attention that it closes says what a better
choice of entries by their attention could gain. Two pieces of the novel and two of joined
articles are read; the table "sizes" of tools/tables.py has four of each.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import tables
from fit_scores import Noted
from lococo import AdaptedLlama, segment_losses
from model import KVCache, Llama, load_base
from support.command_line import PlainParser, budgets_file, prepare, run_program
from support.ours.budgets import BudgetMemory
from support.programs.settings import make_settings, untrained

M, T, L = 896, 128, 8192


class Oracle(BudgetMemory):
    """All slots keep the entries that will receive most attention."""

    chooses_by_received = False

    def __init__(self, *args, noted: Noted):
        """`noted` has read the same text, in segments of T tokens."""
        super().__init__(*args)
        self.noted = noted

    def scores(self, n: int, k: Tensor, v: Tensor, received: None) -> Tensor:
        layer, heads = self.parts[n].layer, self.parts[n].heads
        coming = self.seen // T  # the number of the segment that enters now
        later = self.noted.sums[layer][coming:]
        future = sum(attention[heads, : self.seen] for attention in later)  # (heads, seen)
        return future.gather(1, self.positions_of(n)[0].long())[None]


def nats_of(model: Llama, text: Tensor, cache: KVCache) -> float:
    """The mean over all tokens of a text (1, L)."""
    pieces = [nats for nats, _ in segment_losses(model, text, cache, T)]
    return torch.cat(pieces, dim=1).mean().item()


@torch.inference_mode()
def nats_of_rows(model: Llama, text: Tensor, budgets: list[list[int]]) -> dict[str, float]:
    """Of one text (1, L), by the name of a row."""
    noted = Noted(model.config)
    nats = {"full attention": nats_of(model, text, noted)}
    h2o = untrained(model, "h2o", M, T)
    nats["H2O"] = nats_of(model, text, h2o.cache())
    oracle = partial(Oracle, noted=noted)
    for what, slots in (("equal slots", None), ("budgets", budgets)):
        s = make_settings("h2o", M, T, L, slots, heavy=M, recent=0, lora_rank=0)
        nats[f"oracle, {what}"] = nats_of(model, text, AdaptedLlama(model, s).cache(oracle))
    return nats


def main() -> None:
    parser = PlainParser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of the base")
    parser.add_argument("--prose", type=Path, required=True, help="as of tools/tables.py")
    parser.add_argument("--budgets", type=budgets_file, required=True, help="slots of each head")
    options = parser.parse_args()
    prepare("cpu", "float32")
    model, tokenizer = load_base(options.model)
    four = replace(tables.LONG, documents=4)
    documents = tables.documents_of(four, options, tokenizer)
    rows = []
    for text in tqdm(documents, desc="texts"):
        rows.append(nats_of_rows(model, text[None], options.budgets))
    for half, some in (("novel", rows[:2]), ("articles", rows[2:])):
        means = {name: sum(row[name] for row in some) / len(some) for name in some[0]}
        gap = means["H2O"] - means["full attention"]
        for name, nats in means.items():
            share = 100 * (means["H2O"] - nats) / gap
            print(f"{half:9} {name:28} {nats:.4f} nats per token, {share:.0f} % of the gap")


if __name__ == "__main__":
    run_program(main)
