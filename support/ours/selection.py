"""A compressor that chooses: each merged slot learns which entry it keeps, and is called a
trained slot.

The model cannot read a fact out of a mixture of several entries, which the paper's
convolution makes. Here nearly all of a slot's weight is on one entry. A slot avoids what
is like another's, as in maximal marginal relevance (Carbonell and Goldstein 1998). On
SmolLM2 with 512 slots and 8,192 tokens the loss is 0.0212 +- 0.0021 nats per token lower
than that of H2O, which closes 28 % of the gap between H2O and full attention
(docs/results.md).

It departs from the paper in seven points. There are 24 filters, which the slots share, and
each sees one entry or three. A softmax of a relevance takes the place of the ReLU and of (7).
The relevance reads the attention received, too. Copies are penalised. Entries that stood in a
slot have filters of their own. It is sharper in use than in training. There are heavy and
recent slots, and earlier attention counts less (forgetting.py).
"""

from functools import partial
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import COMPRESSORS, MEMORIES, METHODS, Compressor, Memory

# At M = 64 there are 24 heavy, 16 merged and 24 recent slots.
METHODS["selection"] = lambda M: dict(
    heavy=M * 3 // 8,
    merged=M // 4,
    recent=M - M * 3 // 8 - M // 4,
    forget=0.75,
    compressor="selection",
    kernel=1,  # an entry is judged without its neighbours
    start=0.3,
)
# For facts, as tiny/ has them: 24 of the slots learn which entries to keep, no slot is
# heavy, and the filters start large. A fact is learnt if a filter hits it by chance.
METHODS["selection+sinks"] = lambda M: dict(
    sinks=4,
    merged=min(24, M // 4),
    recent=M - 4 - min(24, M // 4),
    positions="slots",
    compressor="selection",
    kernel=3,
)

# AdamW changes all parameters about equally fast. The shared filters are multiplied by 3,
# so that they learn three times as fast.
COMMON_SCALE = 3
# At the start, in training, an entry with twice the attention gets 2^2 times the weight.
TRUST_SCALE = 2
# So large that a slot hardly ever takes a copy of what an earlier slot has taken.
PENALTY = 1000


class Selection(Compressor):
    """Slots that learn which entries to keep. They choose in order: each prefers the most
    relevant entry that is neither taken by an earlier slot nor a copy of one that is.

    The relevance of an entry is a sum of three terms: a filter that all slots share, one
    of 24 other filters, and the logarithm of the attention that the entry has received.
    Entries from heavy and merged slots are judged by other filters, which learn to keep
    them. The slots take the 24 in turn, so that what was trained serves any number of
    slots.

    While it trains, a slot is a mixture: its row of w is a softmax of the relevance, so
    that gradients flow. In use the relevance is 16 times as sharp, and a slot holds
    nearly one entry: the model cannot read a fact out of a mixture of several.

    A subclass changes `relevance` or `normalise`.
    """

    memory_name = "selection"
    reads_received = True
    sharpness = 16  # in use; 1 while it trains

    def __init__(
        self, head_dim: int, slots: int, kernel: int, start: float = 1.0, filters: int = 24
    ):
        super().__init__(head_dim, filters, kernel, start)  # `conv` has a row for each filter
        self.slots = slots
        # For new entries: the filters of `conv`, in which the neighbours of an entry
        # start at zero, and `common`, which all slots share.
        self.common = nn.Parameter(torch.zeros(1, 2 * head_dim, kernel))
        # For entries from slots: one tap, as neighbours in slots are none in the text.
        self.slot_filters = nn.Parameter(start * torch.randn(filters, 2 * head_dim, 1))
        self.slot_common = nn.Parameter(torch.zeros(1, 2 * head_dim, 1))
        neighbours = torch.arange(kernel) != kernel // 2
        with torch.no_grad():
            self.conv.weight[:, :, neighbours] = 0
            # Filters beyond the slots do not train. Where a larger memory takes them, they
            # are zero: the shared filters and the attention received judge alone.
            self.conv.weight[slots:] = 0
            self.slot_filters[slots:] = 0
        self.trust = nn.Parameter(torch.ones(1))  # how much the attention received counts

    def relevance(self, entries: Tensor, from_slot: Tensor, received: Tensor) -> Tensor:
        """How relevant each of R entries is by each filter: (N, filters, R)."""
        filters = self.conv.weight + COMMON_SCALE * self.common
        slot_filters = self.slot_filters + COMMON_SCALE * self.slot_common
        new = F.conv1d(entries, filters, padding="same")
        old = slot_filters.squeeze(2) @ entries
        by_filters = torch.where(from_slot[:, None], old, new)
        log_received = (received + 1e-4).log()  # entries below 0.0001 are alike
        return by_filters + TRUST_SCALE * self.trust * log_received[:, None]

    def normalise(self, relevance: Tensor, entries: Tensor) -> Tensor:
        """This takes the place of the ReLU and of (7): w (N, slots, R); each row sums to
        1."""
        sharpness = 1 if self.training else self.sharpness
        return (sharpness * (relevance - copy_penalty(relevance, entries))).softmax(dim=-1)

    def weights(
        self, entries: Tensor, received: Tensor, from_slot: Tensor | None = None,
        slots: int | None = None,
    ) -> Tensor:
        """As Compressor.weights. `from_slot` (N, R) marks entries that stood in a heavy
        or merged slot (None: none of them). Only as many `slots` choose as are asked for
        (None: all)."""
        if from_slot is None:
            from_slot = torch.zeros_like(received, dtype=torch.bool)
        relevance = self.relevance(entries, from_slot, received)
        slots = slots or self.slots
        in_turn = torch.arange(slots, device=relevance.device) % relevance.shape[1]
        return self.normalise(relevance[:, in_turn], entries)


@torch.no_grad()
def copy_penalty(relevance: Tensor, entries: Tensor) -> Tensor:
    """The penalty of each of R entries for each slot: relevance (N, slots, R), entries
    (N, 2D, R) -> (N, slots, R).

    For each earlier slot it grows by PENALTY * c^32. Here c is the cosine between the
    entry's value and the value which that slot has taken, after the mean of all R is
    subtracted from both. A negative c counts as 0. So the penalty grows by 1000 for a
    copy, by 34 if c is 0.9, and by 1 if c is 0.81. What is taken is a copy of itself,
    also where all values are equal. Maximal marginal relevance subtracts the largest
    similarity, and this the sum of all.

    Keys are not compared, as rotations change them with positions of the text. The
    penalty is a constant for the gradient, as is the attention received.
    """
    values = entries.chunk(2, dim=1)[1]  # (N, D, R)
    unit = F.normalize(values - values.mean(dim=-1, keepdim=True), dim=1)
    alike = (unit.mT @ unit).clamp_(min=0)  # (N, R, R); an opposite entry is not a copy
    itself = alike.diagonal(dim1=1, dim2=2)
    itself.masked_fill_(itself < 0.5, 1)  # where a value is the mean, it would be 0
    for _ in range(5):  # c^32, faster than pow
        alike.square_()
    alike *= PENALTY
    heads = torch.arange(len(alike), device=alike.device)
    penalty = torch.zeros_like(relevance[:, 0])
    penalties = []  # for each slot, (N, R)
    for row in relevance.unbind(dim=1):
        penalties.append(penalty)
        taken = (row - penalty).argmax(dim=-1)  # by this slot, (N,)
        penalty = penalty + alike[heads, taken]
    return torch.stack(penalties, dim=1)


class SelectingMemory(Memory):
    """A memory that tells the compressor which entries stood in a slot."""

    def w_function(self, layer: int, places: Tensor) -> Callable:
        """After an earlier compression the cache is [pinned | merged | recent | new
        tokens]. Entries from recent slots count as new, and sinks are never among the
        rest."""
        compressor, s = self.compressors[layer], self.of_layer[layer]
        if not isinstance(compressor, Selection):  # with budgets there may be others
            return super().w_function(layer, places)
        compressed_before = self.keys[layer].size < self.seen  # fewer entries than tokens
        from_slot = (places < s.pinned + s.merged) & compressed_before
        return partial(compressor.weights, from_slot=from_slot.flatten(0, 1), slots=s.merged)


COMPRESSORS["selection"] = Selection
MEMORIES["selection"] = SelectingMemory
