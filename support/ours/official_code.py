"""LoCoCo in its authors' code (VITA-Group/LoCoCo), where it departs from the paper.

`lococo-code` keeps half of M as heavy hitters, by the attention of the last forward pass only,
and `h2o-code`, its H2O, keeps M of them: no slots are set aside for recent tokens.
`lococo-code-0.02` starts with smaller weights. On SmolLM2 with 512 slots and 8,192 tokens it
passes H2O after 60 steps, by 0.0172 +- 0.0048 nats per token (docs/results.md).

It departs from the paper in w, which a learned gate blends with plain eviction, and in a softmax
in the place of (7). Not copied: 16 entries of spare room, and a first segment whose keys and
values get no gradient.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import COMPRESSORS, METHODS, Compressor


class OfficialCompressor(Compressor):
    """w = (1 - gate) one-hot + gate * softmax(ReLU(convolution)), with a learned gate. The
    one-hot rows keep the heavy hitters that come next after those that have a slot of their
    own: with a gate of 0 this is plain eviction."""

    def __init__(self, *args):
        """`args` as those of Compressor."""
        super().__init__(*args)
        self.conv.bias = nn.Parameter(torch.zeros(self.slots))
        self.gate = nn.Parameter(torch.tensor(0.5))

    def weights(self, entries: Tensor, received: Tensor | None) -> Tensor:
        w = self.conv(entries).relu().softmax(dim=-1)  # (6), and a softmax instead of (7)
        heaviest = received.topk(w.shape[1], dim=-1).indices
        best = heaviest.sort(dim=-1).values  # in time order
        return (1 - self.gate) * F.one_hot(best, w.shape[2]) + self.gate * w


COMPRESSORS["official"] = OfficialCompressor
METHODS["h2o-code"] = lambda M: dict(heavy=M, forget=0.0)
METHODS["lococo-code"] = lambda M: dict(
    heavy=M // 2, merged=M - M // 2, forget=0.0, compressor="official"
)
# Its initial weights have a standard deviation of 0.02, as in many networks, and not of 1. A
# softmax depends on their scale: it begins as a plain mean of the entries.
METHODS["lococo-code-0.02"] = lambda M: METHODS["lococo-code"](M) | {"start": 0.02}
