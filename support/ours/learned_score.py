"""A learned score: heavy slots keep the entries that will receive attention, and not those
that have received it.

As KVzap (arXiv 2601.07891) and KVP (arXiv 2602.10238) do after a whole prompt, a small
network says of each entry how much attention a later token will pay to it. It is fitted to
what full attention paid in some texts (tools/fit_scores.py), in minutes of a core and
without a gradient through the model. On SmolLM2 with 1,024 entries in a head, ours with
budgets finds 56 % of the facts in 8,192 tokens with such a score, and 17 % without; the
full cache finds 57 % (docs/results.md; standard error 6 points).

It departs from H2O in what is heavy, and from the paper in that this is learned.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lococo import COMPRESSORS, MEMORIES, METHODS, AdaptedLlama, Compressor
from model import Llama, rotate, widened
from support.ours.budgets import BudgetMemory
from support.ours.selection import Selection

HIDDEN = 8  # units of the network; 32 were no better

# Six of seven slots keep what the score prefers, and the others the last tokens.
METHODS["learned"] = lambda M: dict(
    heavy=M * 6 // 7, recent=M - M * 6 // 7, forget=0.75, forget_in=512, compressor="learned"
)
# Ours, whose heavy slots have the score.
METHODS["selection+learned"] = lambda M: METHODS["selection"](M) | dict(
    forget_in=512, compressor="selection+learned"
)


class Score(nn.Module):
    """What the key and the value of an entry, the attention that it has received and its
    age say of the attention to come. The heads of a layer share it."""

    def __init__(self, head_dim: int):
        super().__init__()
        features = 2 * head_dim + 2
        # Of the features, in the texts of the fit. They are stored with the rest.
        self.mean = nn.Parameter(torch.zeros(features))
        self.deviation = nn.Parameter(torch.ones(features))
        self.linear = nn.Linear(features, 1)
        self.hidden = nn.Linear(features, HIDDEN)
        self.out = nn.Linear(HIDDEN, 1, bias=False)

    @staticmethod
    def features(entries: Tensor, received: Tensor, age: Tensor) -> Tensor:
        logs = torch.stack(((received + 1e-4).log(), age.log()), dim=-1)
        return torch.cat((entries, logs), dim=-1)

    def forward(self, entries: Tensor, received: Tensor, age: Tensor) -> Tensor:
        """Entries (..., S, 2D), whose keys are not rotated, received (..., S), and age
        (..., S) in tokens -> the logarithm of the attention to come, up to a constant of
        each head, (..., S).
        """
        x = (self.features(entries, received, age) - self.mean) / self.deviation
        return (self.linear(x) + self.out(F.gelu(self.hidden(x)))).squeeze(-1)


class LearnedScore(Compressor):
    """A compressor that fills no slots. It has a score, by which heavy slots are chosen."""

    memory_name = "scored"
    fitted_by = "tools/fit_scores.py"
    always = True
    reads_received = True

    def __init__(self, head_dim: int, slots: int, kernel: int, start: float = 1.0):
        nn.Module.__init__(self)  # without a convolution
        self.slots = slots
        self.score = Score(head_dim)

    def weights(self, entries: Tensor, received: Tensor | None) -> Tensor:
        return entries.new_zeros(len(entries), 0, entries.shape[2])


class ScoredSelection(Selection):
    """Ours, with a score by which heavy slots are chosen. train.py does not change the
    score, as no gradient flows through a choice."""

    memory_name = "scored"
    fitted_by = "tools/fit_scores.py"

    def __init__(self, head_dim: int, *args, **more):
        super().__init__(head_dim, *args, **more)
        self.score = Score(head_dim)


class ScoredMemory(BudgetMemory):
    """A memory whose heavy slots keep the entries of the highest scores."""

    def choose(self, n: int, k: Tensor, v: Tensor, received: Tensor) -> Tensor:
        """As Memory.choose, with the score in the place of the attention received."""
        positions = self.positions_of(n)
        with torch.autocast(k.device.type, enabled=False):
            k = rotate(widened(k), *self.rotation(-positions))  # as it was before its rotation
            entries = torch.cat((k, widened(v)), dim=-1)
            age = self.seen - positions
            score = self.compressors[n].score(entries, received, age)
        return super().choose(n, k, v, score)


def with_scores(adapted: AdaptedLlama, model: Llama) -> AdaptedLlama:
    """An adapter of ours on its base, with scores that are not fitted yet."""
    name = "selection+learned"
    changes = dict(method=name, compressor=name, forget_in=512)
    scored = AdaptedLlama(model, replace(adapted.settings, **changes)).eval()
    trained = adapted.trained()
    for name, p in scored.trained().items():
        if name in trained:
            p.data = trained[name].data
    return scored


COMPRESSORS |= {"learned": LearnedScore, "selection+learned": ScoredSelection}
MEMORIES["scored"] = ScoredMemory
