"""A learned score: heavy slots keep the entries that will receive attention, and not those that
have received it.

As KVzap (arXiv 2601.07891) and KVP (arXiv 2602.10238) do for a whole prompt, a small network says of
each entry how much attention it will receive. It is fitted to the attention that full attention
paid later in some texts (tools/fit_scores.py): minutes of a core, and no gradient through the model.
FIGURE

It departs from H2O in how heavy slots are chosen, and from the paper in that nothing is merged.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import COMPRESSORS, MEMORIES, METHODS, Compressor, in_order
from model import rotate, widened
from support.ours.budgets import BudgetMemory

HIDDEN = 32


class Score(nn.Module):
    """What an entry's key and value, the attention that it has received and its age say of the
    attention to come. The heads of a layer share it."""

    def __init__(self, head_dim: int):
        super().__init__()
        features = 2 * head_dim + 2
        self.register_parameter("mean", nn.Parameter(torch.zeros(features)))
        self.register_parameter("deviation", nn.Parameter(torch.ones(features)))
        self.linear = nn.Linear(features, 1)
        self.hidden = nn.Linear(features, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1, bias=False)

    def forward(self, entries: Tensor, received: Tensor, age: Tensor) -> Tensor:
        """entries (..., S, 2D) with keys that are not rotated, received and age (..., S) in
        tokens -> (..., S), the logarithm of the attention to come, up to a constant."""
        logs = torch.stack(((received + 1e-4).log(), age.log()), dim=-1)
        x = (torch.cat((entries, logs), dim=-1) - self.mean) / self.deviation
        return (self.linear(x) + self.out(F.gelu(self.hidden(x)))).squeeze(-1)


class LearnedScore(Compressor):
    """It fills no slots: it says which entries are heavy."""

    memory_name = "scored"
    always = True

    def __init__(self, head_dim: int, slots: int, kernel: int, start: float = 1.0):
        nn.Module.__init__(self)
        self.slots = slots
        self.score = Score(head_dim)

    def weights(self, entries: Tensor, received: Tensor | None) -> Tensor:
        return entries.new_zeros(len(entries), self.slots, entries.shape[2])


class ScoredMemory(BudgetMemory):
    def choose(self, n: int, k: Tensor, v: Tensor, received: Tensor) -> Tensor:
        """As Memory.choose, with the score in the place of the attention received."""
        score = getattr(self.compressors[n], "score", None) if self.compressors else None
        if score is None:
            return super().choose(n, k, v, received)
        positions = self.positions_of(n)
        with torch.autocast(k.device.type, enabled=False):
            plain = rotate(widened(k), *self.rotation(-positions))
            entries = torch.cat((plain, widened(v)), dim=-1)
            return super().choose(n, k, v, score(entries, received, self.seen - positions))


COMPRESSORS["learned"] = LearnedScore
MEMORIES["scored"] = ScoredMemory
METHODS["learned"] = lambda M: dict(
    heavy=M * 6 // 7, recent=M - M * 6 // 7, forget=0.75, forget_in=512, compressor="learned"
)
