"""The memory of the official code (VITA-Group/LoCoCo) where it departs from the paper.

Its default is method "lococo+h2o", half of M kept as heavy hitters. Not copied: 16 entries of spare
room, and a first segment whose keys and values get no gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import Compressor, AdaptedLlama, Memory, Settings
from model import Llama


class OfficialCompressor(Compressor):
    """W = (1 - g) onehot + g softmax(ReLU(logits)) with a learnt g. The one-hot rows keep the heavy
    hitters that come next after those that have a slot of their own: g = 0 is plain eviction."""

    def __init__(self, head_dim: int, slots: int, kernel: int):
        super().__init__(head_dim, slots, kernel)  # starts as large as there
        self.conv.bias = nn.Parameter(torch.zeros(slots))
        self.gate = nn.Parameter(torch.tensor(0.5))

    def forward(self, k: Tensor, v: Tensor, from_slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.conv(torch.cat((k, v), dim=-1).flatten(0, 1).transpose(1, 2))  # (6)
        w = logits.unflatten(0, k.shape[:2]).float().relu().softmax(dim=-1)
        best = self.scores.topk(w.shape[2], dim=-1).indices.sort(dim=-1).values  # in time order
        w = ((1 - self.gate) * F.one_hot(best, w.shape[3]) + self.gate * w).type_as(k)
        return w @ k, w @ v, w


class LastScores(Memory):
    """Heavy hitters are those of the last forward pass only."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.scores[layer] = None
        return super().attend(layer, q, k, v)


class OfficialMemory(LastScores):
    def arrange(self, layer: int) -> Tensor:
        arranged = super().arrange(layer)  # [heavy | rest]
        rest = arranged[:, :, self.settings.heavy :]
        self.compressors[layer].scores = self.scores[layer].gather(2, rest)
        return arranged


class OfficialLoCoCo(AdaptedLlama):
    def __init__(self, model: Llama, settings: Settings):
        super().__init__(model, settings)
        shape = model.config.head_dim, settings.merged, settings.kernel
        own = (OfficialCompressor(*shape) for _ in self.compressors)
        self.compressors = nn.ModuleList(own).to(model.norm.weight.device)

    def cache(self, memory: type[Memory] = OfficialMemory) -> Memory:
        return super().cache(memory)


class OfficialH2O(AdaptedLlama):
    """Its H2O, with `--heavy M --recent 0`: no slots are set aside for recent tokens."""

    def cache(self, memory: type[Memory] = LastScores) -> Memory:
        return super().cache(memory)
