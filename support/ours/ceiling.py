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

from lococo import Memory, Settings, in_order, numbers_of_slots
from model import Entries, LlamaConfig, rotate


class CeilingMemory(Memory):
    """A memory that moves old entries up. The position of a token is its index in the
    text, also beyond the context, as rotary positions say distances alone. A key that was
    rotated to position p is rotated by q - p more, so that it stands at q. It can be saved:
    `counters`, and what `stored` returns of each layer, are all that it holds."""

    counters = ("seen", "lowest")

    def __init__(
        self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList,
        of_layer: list[Settings] | None = None,
    ):
        super().__init__(config, settings, compressors, of_layer)
        # The largest distance that the base reads, in tokens.
        self.reach = round(config.context * self.rope_scale)
        # C is lower by an eighth, or by a segment if that is more. In low precision each move
        # rounds the keys, so that moves must be rare.
        self.ceiling = max(0, self.reach - max(settings.segment, self.reach // 8))
        self.lowest = 0  # no entry stands below this position
        # The positions of entries, (B, G, S): of those that were held at the last
        # compression or move. Entries since then stand one after the other. By slot there
        # are none.
        self.positions: list[Tensor | None] = [None] * len(self.of_layer)

    def make_room(self, B: int, T: int) -> None:
        super().make_room(B, T)
        if not self.by_slot and self.seen + T > self.lowest + self.reach:
            self.lowest = self.seen - self.ceiling
            for n, keys in enumerate(self.keys):
                if keys.size:
                    self.move_up(n)

    def move_up(self, n: int) -> None:
        """Entries below the lowest position come to stand there."""
        before, k = self.positions_of(n), self.keys[n].held
        self.positions[n] = before.clamp(min=self.lowest)
        self.keys[n] = Entries(rotate(k, *self.rotation(self.positions[n] - before)))

    def positions_of(self, n: int) -> Tensor:
        """The positions of all entries of a layer, (B, G, S), in float32."""
        keys, known = self.keys[n], self.positions[n]
        size = 0 if known is None else known.shape[2]
        first = self.seen - (keys.size - size)
        new = torch.arange(first, self.seen, device=keys.buffer.device, dtype=torch.float32)
        new = new.expand(*keys.buffer.shape[:2], -1)
        return new if known is None else torch.cat((known, new), dim=2)

    def compress(self, n: int) -> tuple[Tensor, Tensor]:
        """As in Memory. A merged slot has the mean, by w, of the positions of its
        entries."""
        if self.by_slot:
            return super().compress(n)
        before = self.positions_of(n)
        order, w = super().compress(n)
        self.positions[n] = numbers_of_slots(in_order(before, order), w, self.of_layer[n])
        return order, w

    def stored(self, n: int) -> dict[str, Tensor]:
        """What a saved memory needs of a layer, so that `restore` makes it again."""
        own = {"keys": self.keys[n].held, "values": self.values[n].held}
        if self.received[n] is not None:
            own["received"] = self.received[n]
        if not self.by_slot:
            own["positions"] = self.positions_of(n)
        return own

    def restore(self, n: int, stored: dict[str, Tensor]) -> None:
        self.hold(n, stored["keys"], stored["values"], stored.get("received"))
        self.positions[n] = stored.get("positions")
