"""What a memory or a compressor of your own must keep, checked while it runs."""

import torch
from torch import Tensor, nn

from support.files import UserError


def check_choice(chosen: Tensor, pinned: int, recent: int) -> None:
    """Assert that a mask of `Memory.choose` (B, G, S) takes `pinned` entries in each head, and
    none of the last `recent` ones. A GPU has to wait for the answer, so that it is asked only
    at the first compression of a text."""
    enough = (chosen.sum(dim=2) == pinned).all()
    assert enough, f"Memory.choose must take {pinned} entries in each head"
    last = chosen[:, :, chosen.shape[2] - recent :].any()
    assert not last, "Memory.choose must take none of the last entries"


@torch.no_grad()
def check_rows(compressor: nn.Module, head_dim: int, counted: bool, like: Tensor) -> None:
    """Raises UserError if w of random entries has another shape, or if its rows do not
    sum to 1, as with a softmax over the wrong dimension: (4) and (5) would not mix. The
    entries have the dtype and the device of `like`. `counted` says if the memory counts
    the attention that they receive."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = (2, 2 * head_dim, compressor.slots + 8)
    entries = torch.randn(sizes, generator=generator, device="cpu").to(like)
    received = entries[:, 0].exp() if counted else None  # any positive numbers
    w = compressor.weights(entries, received)
    name = f"{type(compressor).__name__}.weights"
    expected = (2, compressor.slots, entries.shape[2])
    if w.shape != expected:
        raise UserError(f"{name}: w has the shape {tuple(w.shape)} instead of {expected}")
    sums = w.sum(dim=-1)
    if not torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
        found = f"the rows of w sum to {sums.min():.3g} to {sums.max():.3g} instead of 1"
        raise UserError(f"{name}: {found}; divide by `w.sum(dim=-1, keepdim=True)`")
