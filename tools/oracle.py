"""How much of the gap could a memory of equal slots close, if it knew what is read next?

    python tools/oracle.py --model SmolLM2-135M --prose prose

Full attention reads a text first, and the attention that each entry receives from each
segment is noted. Then a memory of 512 slots reads it, and keeps the entries that receive
most from the next segment, or from all that follow. No memory can know this. The share of
the gap between H2O and full attention that it closes says what a better choice of entries
by their attention could gain. Two pieces of the novel and two of joined articles are
read; the table "long" of tools/tables.py has eight of each.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import tables
from lococo import AdaptedLlama, Memory, attention_weights, segment_losses
from lococo import settings_for
from model import KVCache, Llama, LlamaConfig, load_base
from support.command_line import PlainParser, prepare, run_program
from support.programs.settings import untrained

M = T = 512
L = 8192


class Witness(KVCache):
    """The full cache. `received[layer][i]` is the attention that entries receive from the
    queries of segment i, (G, S)."""

    def __init__(self, config: LlamaConfig):
        super().__init__(config)
        self.received: list[list[Tensor]] = [[] for _ in self.keys]

    def read(self, n: int, q: Tensor) -> Tensor:
        self.received[n].append(attention_weights(q, self.keys[n].held).sum(dim=2)[0])
        return super().read(n, q)


class Oracle(Memory):
    """All slots keep the entries that will receive most attention. `received` has here the
    positions of the entries in the text, which a compression carries along."""

    def __init__(self, *args, witness: Witness, segments: int):
        """A witness has read the same text. So many segments are foreseen."""
        super().__init__(*args)
        self.witness, self.segments = witness, segments

    def read(self, n: int, q: Tensor) -> Tensor:
        positions = torch.arange(self.seen - q.shape[2], self.seen).float()
        positions = positions.expand(*self.keys[n].held.shape[:2], -1)
        if self.received[n] is not None:
            positions = torch.cat((self.received[n], positions), dim=2)
        self.received[n] = positions
        return KVCache.read(self, n, q)

    def choose(self, layer: int, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        s = self.of_layer[layer]
        coming = self.seen // s.segment  # the number of the segment that enters now
        received = self.witness.received[layer][coming : coming + self.segments]
        future = sum(attention[:, : self.seen] for attention in received)  # (G, seen)
        held = future.gather(1, positions[0].long())[None]
        chosen = torch.zeros_like(held, dtype=torch.bool)
        return chosen.scatter(2, held.topk(s.heavy, dim=2).indices, True)


def nats_of(model: Llama, text: Tensor, cache: KVCache) -> float:
    """The mean over all tokens of a text (1, L)."""
    pieces = [nats for nats, _ in segment_losses(model, text, cache, T)]
    return torch.cat(pieces, dim=1).mean().item()


@torch.inference_mode()
def nats_of_rows(model: Llama, adapted: AdaptedLlama, text: Tensor) -> dict[str, float]:
    """Of one text (1, L), by the name of a row."""
    witness = Witness(model.config)
    nats = {"full attention": nats_of(model, text, witness)}
    h2o = untrained(model, "h2o", M, T)
    nats["H2O"] = nats_of(model, text, h2o.cache())
    every = len(witness.received[0])  # the segments of the text
    for what, segments in (("the next segment", 1), ("all that follows", every)):
        oracle = partial(Oracle, witness=witness, segments=segments)
        nats[f"oracle of {what}"] = nats_of(model, text, adapted.cache(oracle))
    return nats


def main() -> None:
    parser = PlainParser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="directory of the base")
    parser.add_argument("--prose", type=Path, required=True, help="as of tools/tables.py")
    options = parser.parse_args()
    prepare("cpu", "float32")
    model, tokenizer = load_base(options.model)
    adapted = AdaptedLlama(model, settings_for("h2o", M, T, L, heavy=M, recent=0, lora_rank=0))
    four = replace(tables.LONG, documents=4)
    documents = tables.documents_of(four, options, tokenizer)
    rows = []
    for text in tqdm(documents, desc="texts"):
        rows.append(nats_of_rows(model, adapted, text[None]))
    for half, some in (("novel", rows[:2]), ("articles", rows[2:])):
        means = {name: sum(row[name] for row in some) / len(some) for name in some[0]}
        gap = means["H2O"] - means["full attention"]
        for name, nats in means.items():
            share = 100 * (means["H2O"] - nats) / gap
            print(f"{half:9} {name:28} {nats:.4f} nats per token, {share:.0f} % of the gap")


if __name__ == "__main__":
    run_program(main)
