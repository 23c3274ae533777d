"""LongLoRA, which the paper compares with: its attention while it trains. In use it has
full attention."""

import math

import torch
from torch import Tensor

from lococo import AdaptedLlama
from model import KVCache, attention


def training_cache(adapted: AdaptedLlama) -> KVCache:
    """An empty cache to train with."""
    cache = adapted.cache()
    if adapted.settings.method == "longlora":
        return ShiftedGroups(cache.config, cache.rope_scale)
    return cache


class ShiftedGroups(KVCache):
    """LongLoRA's attention while it trains (arXiv 2309.12307). The whole sequence enters
    at once, and each token attends within its quarter of it."""

    def read(self, layer: int, q: Tensor) -> Tensor:
        """For the second half of the heads the borders are moved by half a quarter. Both
        ends are groups of their own then, so that the end is not seen at the start."""
        H, L = q.shape[1], q.shape[2]
        quarter = math.ceil(L / 4)
        k = self.keys[layer].held.repeat_interleave(H // self.config.n_kv_heads, dim=1)
        v = self.values[layer].held.repeat_interleave(H // self.config.n_kv_heads, dim=1)
        read = torch.empty_like(q)
        for heads, first in ((slice(0, H // 2), 0), (slice(H // 2, H), quarter // 2)):
            borders = sorted({0, *range(first, L, quarter), L})
            for start, stop in zip(borders, borders[1:]):
                group = (slice(None), heads, slice(start, stop))
                read[group] = attention(q[group], k[group], v[group])
        return read
