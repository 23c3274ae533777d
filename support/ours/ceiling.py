"""A ceiling on distances: a base reads on in a text that is longer than its context.

Rotary positions tell a query how far back an entry stands. A base has learned this up to a
largest distance, which is its context, or the length that its positions were divided for.
Before new tokens would read at a larger one, all entries that are farther back than a
ceiling C are moved to the distance C, as in LM-Infinite (arXiv 2308.16137) and InfLLM (arXiv
2402.04617). So SmolLM2, whose context has 8,192 tokens, reads texts of 32,768 with a learned
score: its loss is 0.065 +- 0.014 nats per token below that of a window (docs/results.md).

It departs from the paper only where a text is longer than that. Angles are computed in
float32, which is exact enough for a million tokens.
"""

import torch
from torch import Tensor, nn

from lococo import Memory, Settings, numbers_of_slots
from model import Entries, LlamaConfig, rotate


class CeilingMemory(Memory):
    """A memory that moves old entries up. The position of a token is its index in the
    text, also beyond the context, as rotary positions say distances alone. A key that was
    rotated to position p is rotated by q - p more, so that it stands at q. It can be saved:
    `counters`, and what `stored` returns of each layer, are all that it holds."""

    counters = ("seen", "lowest")

    def __init__(self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList):
        super().__init__(config, settings, compressors)
        # The largest distance that the base reads, in tokens.
        self.reach = round(config.context * self.rope_scale)
        # C is lower by an eighth, or by a segment if that is more. In low precision each move
        # rounds the keys, so that moves must be rare.
        self.ceiling = max(0, self.reach - max(settings.segment, self.reach // 8))
        self.lowest = 0  # no entry stands below this position
        # The positions of entries, (B, G, S): of those that were held at the last
        # compression or move. Entries since then stand one after the other. There are none
        # if positions are places in the cache.
        self.positions: list[Tensor | None] = [None] * len(self.of_layer)

    def make_room(self, B: int, T: int) -> None:
        super().make_room(B, T)
        if not self.by_place and self.seen + T > self.lowest + self.reach:
            self.lowest = self.seen - self.ceiling
            for layer, keys in enumerate(self.keys):
                if keys.size:
                    self.move_up(layer)

    def move_up(self, layer: int) -> None:
        """Entries below the lowest position come to stand there."""
        before, k = self.positions_of(layer), self.keys[layer].held
        self.positions[layer] = before.clamp(min=self.lowest)
        self.keys[layer] = Entries(rotate(k, *self.rotation(self.positions[layer] - before)))

    def positions_of(self, layer: int) -> Tensor:
        """The positions of all entries of a layer, (B, G, S), in float32."""
        assert not self.by_place, "this memory needs positions of the text"
        keys, known = self.keys[layer], self.positions[layer]
        size = 0 if known is None else known.shape[2]
        first = self.seen - (keys.size - size)
        new = torch.arange(first, self.seen, device=keys.buffer.device, dtype=torch.float32)
        new = new.expand(*keys.buffer.shape[:2], -1)
        return new if known is None else torch.cat((known, new), dim=2)

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        """As in Memory. A merged slot has the mean, by w, of the positions of its
        entries."""
        if self.by_place:
            return super().compress(layer)
        before = self.positions_of(layer)
        order, w = super().compress(layer)
        self.positions[layer] = numbers_of_slots(before, order, w, self.of_layer[layer])
        return order, w

    def stored(self, layer: int) -> dict[str, Tensor]:
        """What a saved memory needs of a layer, so that `restore` makes it again."""
        own = {"keys": self.keys[layer].held, "values": self.values[layer].held}
        if self.received[layer] is not None:
            own["received"] = self.received[layer]
        if not self.by_place:
            own["positions"] = self.positions_of(layer)
        return own

    def restore(self, layer: int, stored: dict[str, Tensor]) -> None:
        self.hold(layer, stored["keys"], stored["values"], stored.get("received"))
        self.positions[layer] = stored.get("positions")
