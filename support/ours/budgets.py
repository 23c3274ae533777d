"""Budgets: the heads of a layer may have different numbers of slots.

Heads differ in how much of a long text they read, so that equal budgets waste slots: few heads
retrieve what was said long ago (DuoAttention, arXiv 2410.10819; HeadKV, arXiv 2410.19258).
tools/budgets.py measures which heads need more. On SmolLM2 with 512 slots on average and 8,192
tokens budgets lower the loss of H2O that forgets from 0.0631 to 0.0183 nats per token above
full attention, without training (docs/results.md).

It departs from the paper in that heads of a layer are compressed at different times. Methods
with merged slots have no budgets: a convolution has a filter for each slot, and is shared by
the heads of a layer.
"""

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor, nn

from lococo import KINDS, MEMORIES, Settings
from model import LlamaConfig
from support.ours.bits import PackedMemory
from support.files import UserError

# --- Settings with budgets --------------------------------------------------------------


@dataclass(frozen=True)
class HeadSettings(Settings):
    """Settings of what is ours. With budgets M and `capacity` are means over the heads."""

    # Slots of the key/value heads of each layer, as [[24, 96, 24], [48, 48, 48], ...].
    budgets: list[list[int]] = field(default_factory=list)
    bits: int = 0  # of a stored number, 8 or 4 (bits.py); 0: those of the model's dtype

    @property
    def largest(self) -> int:
        return max(sum(self.budgets, []), default=self.mem)


def with_ours(settings: Settings, **changes) -> HeadSettings:
    """The same settings with the fields of ours, such as `budgets`. BudgetMemory takes the
    place of the paper's memory."""
    own = {f.name: getattr(settings, f.name) for f in fields(settings)}
    if settings.memory == "paper":
        own["memory"] = "budgets"
    return HeadSettings(**own | changes)


# --- The memory -------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Key/value heads of one layer that have equally many slots. Without budgets a part has
    all heads of its layer."""

    layer: int
    heads: list[int]
    settings: Settings  # in which M is the number of slots of these heads


def parts_of(config: LlamaConfig, settings: HeadSettings) -> list[Part]:
    """The parts of all layers."""
    heads = list(range(config.n_kv_heads))
    if not settings.budgets:
        return [Part(layer, heads, settings) for layer in range(config.n_layers)]
    parts = []
    for layer, slots in enumerate(settings.budgets):
        for M in dict.fromkeys(slots):
            equal = [head for head in heads if slots[head] == M]
            parts.append(Part(layer, equal, with_slots(settings, M)))
    return parts


class BudgetMemory(PackedMemory):
    """A memory whose lists have one item for each part of a layer (see `Part`). Except in
    `attend`, a `layer` of Memory is the index n of a part here. It also has the ceiling
    (ceiling.py) and the bits (bits.py). The programs hold the paper's methods in it."""

    def __init__(self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList):
        settings = with_ours(settings)
        check_budgets(settings.budgets, config)
        self.parts = parts_of(config, settings)
        self.heads: list[Tensor | None] = [None] * len(self.parts)  # their indices, if needed
        super().__init__(config, settings, compressors)
        if len(compressors):  # the heads of a layer share its compressor
            self.compressors = [compressors[part.layer] for part in self.parts]

    def settings_of_layers(self) -> list[Settings]:
        """One item for each part."""
        return [part.settings for part in self.parts]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Memory.attend for each part n of the layer, as if it were a layer with fewer
        heads."""
        parts = [n for n, part in enumerate(self.parts) if part.layer == layer]
        if len(parts) == 1:
            return super().attend(parts[0], q, k, v)
        q = q.unflatten(1, (k.shape[1], -1))  # (B, G, H/G, T, D)
        read = torch.empty_like(q)
        for n in parts:
            if self.heads[n] is None:  # once, as it is copied to the device
                self.heads[n] = torch.tensor(self.parts[n].heads, device=k.device)
            own_q, own_k, own_v = (x.index_select(1, self.heads[n]) for x in (q, k, v))
            of_part = super().attend(n, own_q.flatten(1, 2), own_k, own_v)
            read.index_copy_(1, self.heads[n], of_part.unflatten(1, (-1, q.shape[2])))
        return read.flatten(1, 2)


MEMORIES["budgets"] = BudgetMemory

# --- Numbers of slots -------------------------------------------------------------------


def scaled(budgets: list[list[int]], mem: int) -> list[list[int]]:
    """Slots of heads in the same proportions, `mem` on average."""
    shares, heads = sum(budgets, []), len(budgets[0])
    slots = divided(mem * len(shares), shares)
    return [slots[n : n + heads] for n in range(0, len(slots), heads)]


def with_slots(settings: Settings, M: int) -> HeadSettings:
    """The same memory with M slots in each head. It has all sinks, and the other kinds keep
    their proportions."""
    kinds = KINDS[1:]
    counts = divided(M - settings.sinks, [getattr(settings, kind) for kind in kinds])
    return with_ours(settings, budgets=[], **dict(zip(kinds, counts)))


def divided(total: int, shares: list[int]) -> list[int]:
    """A total in the proportions of shares, whose sum is positive. What rounding leaves
    over goes to the largest."""
    counts = [total * share // sum(shares) for share in shares]
    counts[counts.index(max(counts))] += total - sum(counts)
    return counts


def check_budgets(budgets: list[list[int]], config: LlamaConfig) -> None:
    """Raises UserError if they are not those of such a base."""
    layers, heads = config.n_layers, config.n_kv_heads
    if budgets and [len(row) for row in budgets] != [heads] * layers:
        found = f"{len(budgets)} layers of {len(budgets[0])} heads"
        needed = f"this base has {layers} layers of {heads}: measure its own by tools/budgets.py"
        raise UserError(f"budgets: they are for {found}; {needed}")
