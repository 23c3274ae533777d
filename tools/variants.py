"""Compressors for ablations: ours without one of its parts, or the paper's with one of ours.

tools/real_llama.py and tools/reproduce.py import this module, which adds the names to COMPRESSORS.
To use one in another program, write `import tools.variants` there.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from lococo import COMMON_SCALE, COMPRESSORS, PENALTY
from lococo import Compressor, FactCompressor, ScoredCompressor


class SoftmaxCompressor(Compressor):
    """The paper's with a softmax instead of the ReLU and (7)."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return self.conv(entries).softmax(dim=-1)


class AtOnce:
    """A mixin, to be named before one of ours: all slots choose at once, and none sees what others
    have taken."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return self.relevance(entries, from_slot, scores).softmax(dim=-1)


class FactsAtOnce(AtOnce, FactCompressor):
    pass


class ScoredAtOnce(AtOnce, ScoredCompressor):
    pass


class ScoredWithOneFilter(ScoredCompressor):
    """Ours for a real Llama, but all slots share a filter. Only their order tells them apart."""

    def relevance(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        new = F.conv1d(entries, COMMON_SCALE * self.common, padding="same")
        old = F.conv1d(entries, COMMON_SCALE * self.slot_common)
        shared = torch.where(from_slot[:, None], old, new) + self.prior(scores)  # (N, 1, R)
        return shared.expand(-1, self.slots, -1)


class ScoredTopK(ScoredWithOneFilter):
    """Ours for a real Llama as a learnt score with top-k: the slots take the entries with the
    highest scores, one each, although some of them may be copies of others."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        relevance = self.relevance(entries, from_slot, scores)  # alike for all slots
        best = relevance[:, 0].topk(self.slots, dim=-1).indices  # (N, slots)
        takes = F.one_hot(best, relevance.shape[2])  # (N, slots, R)
        taken = takes.cumsum(dim=1) - takes  # by earlier slots
        return (relevance - PENALTY * taken).softmax(dim=-1)


class ScoredStraightThrough(ScoredCompressor):
    """Ours for a real Llama, but a slot holds one entry in training, too. The gradient is that of
    the softmax (straight-through estimator, Bengio et al. 2013, arXiv 1308.3432)."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        soft = super().weights(entries, from_slot, scores)
        choice = torch.zeros_like(soft).scatter(-1, soft.argmax(dim=-1, keepdim=True), 1.0)
        return choice + soft - soft.detach()


COMPRESSORS["softmax"] = SoftmaxCompressor
COMPRESSORS["common"] = FactsAtOnce
COMPRESSORS["scored-at-once"] = ScoredAtOnce
COMPRESSORS["scored-one-filter"] = ScoredWithOneFilter
COMPRESSORS["scored-top-k"] = ScoredTopK
COMPRESSORS["scored-straight-through"] = ScoredStraightThrough
