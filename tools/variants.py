"""Ablations: selection with one of its parts made otherwise, and LoCoCo with smaller first weights
or a gate that starts at 0.

tools/tables.py imports this module, which adds the names to COMPRESSORS and METHODS. To use one
in another program, write `import tools.variants` there.
"""

from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import COMPRESSORS, METHODS
from support.ours.official_code import OfficialCompressor
from support.ours.selection import PENALTY, Selection


class AtOnce(Selection):
    """All slots choose at once, and none sees what others have taken."""

    def normalise(self, relevance: Tensor, entries: Tensor) -> Tensor:
        sharpness = 1 if self.training else self.sharpness
        return (sharpness * relevance).softmax(dim=-1)


class Unattended(Selection):
    """The filters alone judge an entry, and not the attention that it has received."""

    def relevance(self, entries: Tensor, from_slot: Tensor, received: Tensor) -> Tensor:
        return super().relevance(entries, from_slot, torch.ones_like(received))


class OneFilter(Selection):
    """All slots share a filter, which starts at zero. Their order alone is different."""

    def __init__(self, head_dim: int, slots: int, kernel: int, start: float = 1.0):
        super().__init__(head_dim, slots, kernel, start, filters=1)
        with torch.no_grad():
            self.conv.weight.zero_()
            self.slot_filters.zero_()


class TopK(OneFilter):
    """A learnt score with top-k: the slots take the entries with the highest scores, one
    each, although some of them may be copies of others."""

    def normalise(self, relevance: Tensor, entries: Tensor) -> Tensor:
        slots = relevance.shape[1]
        best = relevance[:, 0].topk(slots, dim=-1).indices  # (N, slots); rows are alike
        takes = F.one_hot(best, relevance.shape[2])  # (N, slots, R)
        taken = takes.cumsum(dim=1) - takes  # by earlier slots
        sharpness = 1 if self.training else self.sharpness
        return (sharpness * (relevance - PENALTY * taken)).softmax(dim=-1)


class ClosedGate(OfficialCompressor):
    """LoCoCo's code that begins by choosing, as H2O does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gate = nn.Parameter(torch.tensor(0.0))


def changed(method: str, **changes) -> Callable[[int], dict]:
    """A row of METHODS with these changes."""
    return lambda M: METHODS[method](M) | changes


COMPRESSORS |= {
    "at-once": AtOnce, "unattended": Unattended, "one-filter": OneFilter, "top-k": TopK,
    "official-closed": ClosedGate,
}
for name in ("at-once", "unattended", "one-filter", "top-k"):
    METHODS[f"selection-{name}"] = changed("selection", compressor=name)
METHODS["lococo-code-closed"] = changed("lococo-code-0.02", compressor="official-closed")
METHODS["lococo+h2o-0.02"] = changed("lococo+h2o", start=0.02)
METHODS["selection-paper"] = changed("selection", compressor="paper", kernel=21)
METHODS["selection-3-taps"] = changed("selection", kernel=3)
METHODS["selection-no-forgetting"] = changed("selection", forget=1.0)
