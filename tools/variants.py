"""What lies between the paper's compressor and ours: one step of the way each, for ablations.

A program that imports this module has them as `--compressor` names.
"""

import torch.nn.functional as F
from torch import Tensor

from lococo import COMMON_SCALE, COMPRESSORS, Compressor, FactCompressor, ScoredCompressor


class SoftmaxCompressor(Compressor):
    """The paper's with a softmax instead of the ReLU and (7)."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return self.conv(entries).softmax(dim=-1)


class FactsAtOnce(FactCompressor):
    """Ours for facts, but rows are made all at once: none sees what the others have taken."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return self.relevance(entries, from_slot, scores).softmax(dim=-1)


class ScoredAtOnce(ScoredCompressor):
    """Ours for a real Llama, but rows are made all at once."""

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return self.relevance(entries, from_slot, scores).softmax(dim=-1)


class ScoredWithOneFilter(ScoredCompressor):
    """Ours for a real Llama, but all slots share a filter. Rows in turn alone tell them apart."""

    def relevance(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        slots = self.conv.out_channels
        new = F.conv1d(entries, COMMON_SCALE * self.common, padding="same")
        old = F.conv1d(entries, COMMON_SCALE * self.slot_common)
        shared = new.where(~from_slot[:, None], old)
        return (shared + self.prior(scores)).expand(-1, slots, -1)


COMPRESSORS["softmax"] = SoftmaxCompressor
COMPRESSORS["common"] = FactsAtOnce
COMPRESSORS["scored-at-once"] = ScoredAtOnce
COMPRESSORS["scored-one-filter"] = ScoredWithOneFilter
