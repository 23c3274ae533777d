"""Rules that others have published since H2O, in the same memory.

Each rule gives the older entries of a head a score, and heavy slots keep the best. The
rows have the heavy and recent slots of H2O that forgets (forgetting.py), so that a
comparison says what a rule is worth in this place. docs/results.md has those that were
measured.

So they depart from their papers, which have other shares, and often no recent slots.
SnapKV and KVzip prune once, after a prompt was read with full attention; here all
choose again and again while a text is read, T entries at a time. What else departs
stands at each rule.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from lococo import MEMORIES, METHODS
from model import rotate, widened
from support.ours.budgets import BudgetMemory

# --- Rules that read the attention ------------------------------------------------------


class SnapKV(BudgetMemory):
    """SnapKV (arXiv 2404.14469): the attention of the queries that entered last,
    averaged over five neighbours. Here these are neighbours in the cache, and the
    queries are those of the last segment, or in writing the last one alone. In the
    paper they are the end of the prompt, with the question in it."""

    def scores(self, n: int, k: Tensor, v: Tensor, received: Tensor) -> Tensor:
        return F.avg_pool1d(received, 5, stride=1, padding=2, count_include_pad=False)


class TOVA(BudgetMemory):
    """TOVA (arXiv 2401.06104): the attention of the last query alone, as a mean of all
    heads of the layer (with budgets, of those with equally many slots). The paper drops
    one entry after each token."""

    def received_after(self, n: int, shares: Tensor, group: int) -> Tensor:
        of_last = shares.unflatten(2, (group, -1))[:, :, :, -1]  # (B, G, group, S)
        mean = of_last.mean(dim=(1, 2))  # (B, S)
        return mean[:, None].expand(-1, of_last.shape[1], -1)


class LargestShare(BudgetMemory):
    """The largest share of its attention that a query has paid to an entry. KVzip
    (arXiv 2505.23416) takes it of queries that repeat the prompt; here those of the
    text count."""

    def received_after(self, n: int, shares: Tensor, group: int) -> Tensor:
        largest = shares.amax(dim=2)
        if self.received[n] is not None:
            older = largest[:, :, : self.received[n].shape[2]]
            torch.maximum(older, self.received[n], out=older)
        return largest


# --- Rules that read keys ---------------------------------------------------------------


class KeyNorm(BudgetMemory):
    """The entries with the shortest keys (Devoto et al., arXiv 2406.11430). The paper
    does not compress the first layers."""

    chooses_by_received = False

    def scores(self, n: int, k: Tensor, v: Tensor, received: None) -> Tensor:
        return -widened(k).norm(dim=-1)


class KeyDiff(BudgetMemory):
    """KeyDiff (arXiv 2504.15364): the entries whose keys are least like the mean of all
    keys of length 1."""

    chooses_by_received = False

    def scores(self, n: int, k: Tensor, v: Tensor, received: None) -> Tensor:
        unit = F.normalize(widened(k), dim=-1)
        return -F.cosine_similarity(unit, unit.mean(dim=2, keepdim=True), dim=-1)


class ExpectedAttention(BudgetMemory):
    """Expected Attention (arXiv 2510.00636): the attention of later queries, if they
    are normally distributed as the last ones are, times the norm of the value. The
    paper adds a constant to the attention, and protects the first tokens. This needs
    positions of the text."""

    chooses_by_received = False
    LAST, FUTURE = 128, 512  # queries that are known, and positions of later ones

    def __init__(self, *args):
        super().__init__(*args)
        self.queries: list[Tensor | None] = [None] * len(self.parts)  # the last, not rotated

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(q.nbytes for q in self.queries if q is not None)

    def read(self, n: int, q: Tensor) -> Tensor:
        positions = self.positions_of(n)[:, :1, -q.shape[2] :]  # of the last T entries
        new = rotate(widened(q), *self.rotation(-positions))
        older = new[:, :, :0] if self.queries[n] is None else self.queries[n]
        self.queries[n] = torch.cat((older, new), dim=2)[:, :, -self.LAST :].detach()
        return super().read(n, q)

    def scores(self, n: int, k: Tensor, v: Tensor, received: None) -> Tensor:
        future = self.seen + torch.arange(self.FUTURE, device=k.device)
        cos, sin = (x.mean(dim=0, keepdim=True) for x in self.rotation(future))
        q = rotate(self.queries[n], cos, sin) / k.shape[-1] ** 0.5  # as a mean of rotations
        q = q.unflatten(1, (k.shape[1], -1))  # (B, G, H/G, T, D)
        mean = q.mean(dim=3, keepdim=True)
        keys = widened(k)[:, :, None].mT
        # The logarithm of the mean of exp(q k): that of q, and half of its variance.
        logits = (mean @ keys)[..., 0, :] + ((q - mean) @ keys).square().mean(dim=3) / 2
        return logits.softmax(dim=-1).mean(dim=2) * widened(v).norm(dim=-1)

    def stored(self, n: int) -> dict[str, Tensor]:
        return super().stored(n) | {"queries": self.queries[n]}

    def restore(self, n: int, stored: dict[str, Tensor]) -> None:
        super().restore(n, stored)
        self.queries[n] = stored["queries"]


# --- Their rows -------------------------------------------------------------------------

RULES = {
    "snapkv": SnapKV, "tova": TOVA, "largest-share": LargestShare, "key-norm": KeyNorm,
    "keydiff": KeyDiff, "expected-attention": ExpectedAttention,
}
MEMORIES |= RULES


def with_rule(name: str, M: int) -> dict:
    """A row of METHODS. `forget` is 0 for SnapKV, whose scores are the attention of the last
    queries. No other rule reads it."""
    return METHODS["h2o+forget"](M) | dict(forget=0.0, memory=name)


for name in RULES:
    METHODS[name] = partial(with_rule, name)
# DuoAttention (arXiv 2410.10819) with budgets: a few heads keep all, the others a window.
# The paper learns which.
METHODS["duo-attention"] = lambda M: dict(sinks=4, recent=M - 4)
