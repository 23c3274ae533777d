"""A ceiling on distances: a base reads a text of any length, at distances that it knows.

Rotary positions let a query see how far back an entry stands. A base has learnt this up to its
context. Up to a ceiling C the distances here are those of the text. Older entries stand at C, as
in LM-Infinite (arXiv 2308.16137) and InfLLM (arXiv 2402.04617). Until the text reaches the base's
context, nothing differs from the paper's positions. FIGURE

It departs from the paper where a text is longer than the base's context, or than the length that
its positions were divided for.
"""

import torch
from torch import Tensor, nn

from lococo import Memory, Settings, in_order
from model import Entries, LlamaConfig, rotate


class CeilingMemory(Memory):
    """A memory that moves entries up, as soon as the distance to the next tokens would pass what
    the base has learnt. Only distances matter to rotary positions, so that the position of a
    token is its place in the text, also beyond the context. A key that was rotated to place p is
    rotated by q - p more, so that it stands at q."""

    counters = ("seen", "lowest")

    def __init__(self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList):
        super().__init__(config, settings, compressors)
        self.reach = round(config.context * self.rope_scale)  # the largest distance, in tokens
        self.ceiling = self.reach - settings.segment  # C

    def empty(self, slots: list[Settings]) -> None:
        super().empty(slots)
        self.lowest = 0  # no entry stands below this position
        # Where entries stand, (B, G, S): of those that were held at the last compression or
        # move. Entries since then stand one after the other.
        self.places: list[Tensor | None] = [None] * len(slots)

    def make_room(self, B: int, T: int) -> None:
        super().make_room(B, T)
        if not self.by_slot and self.seen + T > self.lowest + self.reach:
            self.lowest = self.seen - self.ceiling
            for n, keys in enumerate(self.keys):
                if keys.size:
                    self.move_up(n)

    def move_up(self, n: int) -> None:
        """Entries below the lowest position come to stand there."""
        before, k = self.places_of(n), self.keys[n].held
        self.places[n] = before.clamp(min=self.lowest)
        self.keys[n] = Entries(rotate(k, *self.rotation(self.places[n] - before)))

    def places_of(self, n: int) -> Tensor:
        """Where all entries of a layer stand, (B, G, S), in float32."""
        B, G, S, _ = self.keys[n].held.shape
        known = self.places[n]
        size = 0 if known is None else known.shape[2]
        first = self.seen - (S - size)
        device = self.keys[n].held.device
        new = torch.arange(first, self.seen, device=device, dtype=torch.float32)
        new = new.expand(B, G, -1)
        return new if known is None else torch.cat((known, new), dim=2)

    def compress(self, n: int) -> tuple[Tensor, Tensor]:
        """As in Memory. A merged slot stands at the mean, by w, of where its entries stood."""
        places, s = self.places_of(n), self.slots[n]
        order, w = super().compress(n)
        sizes = (s.pinned, places.shape[2] - s.pinned - s.recent, s.recent)
        pinned, rest, recent = in_order(places, order).split(sizes, dim=2)
        merged = (w.detach() * rest[:, :, None]).sum(dim=3)
        self.places[n] = torch.cat((pinned, merged, recent), dim=2)
        return order, w

    def stored(self, n: int) -> dict[str, Tensor]:
        return super().stored(n) | {"places": self.places_of(n)}

    def restore(self, n: int, stored: dict[str, Tensor]) -> None:
        super().restore(n, stored)
        self.places[n] = stored["places"]

    def copy(self) -> "CeilingMemory":
        other = super().copy()
        other.places = [*self.places]
        return other
