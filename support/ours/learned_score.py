"""A learned score: heavy slots keep the entries that are expected to receive attention, and
not those that have received most.

KVzap (arXiv 2601.07891) predicts KVzip's scores, and KVP (arXiv 2602.10238) learns a rank.
Here a small network says of each entry how much attention it will receive. It is fitted to
what full attention pays in some texts (tools/fit_scores.py), in minutes of a core and without
a gradient through the model. Two things are learned: the attention that will come in all, and
the largest share that one later token will pay. On SmolLM2 with budgets and M = T = 512 it
finds 58 % of the facts in 8,192 tokens, H2O that forgets with the same budgets 14 %, and the
full cache 57 % (docs/results.md; the standard errors are 2 to 5 points). Its loss is 0.005 nats
per token lower. With 1,792 slots it gains little, as the heads that need most drop nothing then.

It departs from H2O in which entries are heavy, and from the paper in that it merges nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import COMPRESSORS, MEMORIES, METHODS
from model import rotate, widened
from support.ours.budgets import BudgetMemory

HIDDEN = 16  # units of the network

METHODS["learned"] = lambda M: METHODS["h2o+forget"](M) | dict(
    forget_in=128, compressor="learned", memory="scored"
)


class LearnedScore(nn.Module):
    """Predicts the attention to come from the key and the value of an entry, the attention that
    it has received, and its age. The heads of a layer share it. It stands in the place of a
    compressor, and fills no slots."""

    fitted_by = "tools/fit_scores.py"

    def __init__(self, head_dim: int, *_):
        """The other arguments of a compressor are not needed."""
        super().__init__()
        features = 2 * head_dim + 2
        # Of the features, over the fitted texts. As parameters they are stored with the rest.
        self.mean = nn.Parameter(torch.zeros(features))
        self.deviation = nn.Parameter(torch.ones(features))
        self.linear = nn.Linear(features, 2)
        self.hidden = nn.Linear(features, HIDDEN)
        self.out = nn.Linear(HIDDEN, 2, bias=False)

    @staticmethod
    def features(entries: Tensor, received: Tensor, age: Tensor) -> Tensor:
        logs = torch.stack(((received + 1e-4).log(), age.log()), dim=-1)
        return torch.cat((entries, logs), dim=-1)

    def forward(self, entries: Tensor, received: Tensor, age: Tensor) -> Tensor:
        """Entries (..., S, 2D), whose keys are not rotated, received (..., S), and age
        (..., S) in tokens -> two logarithms, each up to a constant of a head, (..., S, 2):
        of the attention to come, and of the largest share that one token will pay.
        """
        x = (self.features(entries, received, age) - self.mean) / self.deviation
        return self.linear(x) + self.out(F.gelu(self.hidden(x)))


class ScoredMemory(BudgetMemory):
    """A memory whose heavy slots keep the entries with the highest of two scores."""

    def choose(self, n: int, k: Tensor, v: Tensor, received: Tensor) -> Tensor:
        """As Memory.choose. Three of five heavy slots keep the entries that will receive
        most attention in all. The others keep, of the remaining entries, those to which one
        token will pay most."""
        s = self.of_layer[n]
        older = slice(k.shape[2] - s.recent)  # recent slots keep the others
        positions = self.positions_of(n)[:, :, older]
        k, v, received = (x[:, :, older] for x in (k, v, received))
        with torch.autocast(k.device.type, enabled=False):
            k = rotate(widened(k), *self.rotation(-positions))  # as it was before its rotation
            entries = torch.cat((k, widened(v)), dim=-1)
            age = self.seen - positions
            in_all, at_once = self.compressors[n](entries, received, age).unbind(dim=-1)
        chosen = torch.zeros_like(in_all, dtype=torch.bool)
        chosen[:, :, : s.sinks] = True
        first = s.heavy * 3 // 5
        for score, slots in ((in_all, first), (at_once, s.heavy - first)):
            best = score.masked_fill(chosen, -torch.inf).topk(slots, dim=2).indices
            chosen.scatter_(2, best, True)
        return F.pad(chosen, (0, s.recent))


COMPRESSORS["learned"] = LearnedScore
MEMORIES["scored"] = ScoredMemory
