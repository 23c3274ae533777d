"""What slots hold: each slot is a mixture of tokens. It is the data of
support/memory_page.html."""

import torch
from torch import Tensor

from lococo import KINDS, MEMORIES, AdaptedLlama, Settings

LEAST = 0.01  # smaller shares are left out


def mixing_matrix(s: Settings, order: Tensor, w: Tensor) -> Tensor:
    """The mixing matrix (B, G, M, S) that is drawn in lococo.Memory: of one part with the
    settings `s`, from what `Memory.compress` returns for it, order (B, G, S) and w."""
    S = order.shape[2]
    merged = slice(s.pinned, s.pinned + s.merged)
    matrix = w.new_zeros(*w.shape[:2], s.mem, S)
    matrix[:, :, : s.pinned, : s.pinned] = torch.eye(s.pinned, device=w.device)
    matrix[:, :, merged, s.pinned : S - s.recent] = w
    matrix[:, :, s.mem - s.recent :, S - s.recent :] = torch.eye(s.recent, device=w.device)
    # Columns back in the order of the cache.
    columns = order[:, :, None].expand_as(matrix)
    return torch.zeros_like(matrix).scatter(3, columns, matrix)


class Tracing:
    """A memory for a batch of one text that knows each slot as a mixture of tokens: it multiplies
    the mixing matrices of all compressions. `traced` adds this class to that of a memory. Its
    lists have an item for each part (see Part in support/ours/budgets.py)."""

    def __init__(self, *args):
        """`args` as those of Memory."""
        super().__init__(*args)
        self.seen_at = [[] for _ in self.parts]  # tokens that had entered at each compression
        # shares[n][g, slot, place] is how much of the slot of part n is the token at this
        # place of the text, (G, M, tokens).
        none = dict(device="cpu", dtype=torch.float32)
        self.shares = [torch.zeros(len(part.heads), 0, 0, **none) for part in self.parts]
        # For each part, after each compression: the three largest shares of each slot, and
        # their tokens' places, both (G, M, 3). `shares` grows with the text, these do not.
        self.largest = [[] for _ in self.parts]

    def compress(self, n: int) -> tuple[Tensor, Tensor]:
        order, w = super().compress(n)
        self.seen_at[n].append(self.seen)
        matrix = mixing_matrix(self.parts[n].settings, order, w)
        self.follow(n, matrix[0].float().cpu())
        return order, w

    def follow(self, n: int, matrix: Tensor) -> None:
        """Multiply the shares of part n by a mixing matrix (G, M, S)."""
        before = self.shares[n]
        # Entries in slots: 0 before the first compression, then M. Every other entry is one
        # whole token.
        in_slots = before.shape[1]
        old, new = matrix.tensor_split([in_slots], dim=2)
        with torch.autocast("cpu", enabled=False):
            shares = torch.cat((old @ before, new), dim=2)
        self.shares[n] = shares
        self.largest[n].append(shares.topk(min(3, shares.shape[2])))


def traced(adapted: AdaptedLlama) -> Tracing:
    """An empty memory, of the class that the settings name, that is traced. It must be a
    BudgetMemory (see `check_slots` in settings.py)."""
    own = MEMORIES[adapted.settings.memory]
    return adapted.cache(type("TracedMemory", (Tracing, own), {}))


# --- The data of the page ---------------------------------------------------------------

TITLES = {  # what the page calls methods
    "streaming": "window (streaming)",
    "h2o": "H2O",
    "h2o+forget": "H2O that forgets",
    "learned": "a learned score",
}


def slot_record(shares: list[float], tokens: list[int]) -> int | list[int]:
    """One slot: [token, share, token, share ...] with shares in hundredths, the largest
    first. A slot that is one whole token, as most are, is that token's number alone."""
    record = []
    for share, token in zip(shares, tokens):
        if share >= LEAST:
            record += [token, round(100 * share)]
    return record[0] if record[1:] == [100] else record


def head_record(memory: Tracing, n: int, own: int) -> dict:
    """What the page shows of head number `own` of part n. `counts` has its slots of each kind,
    and `read` the tokens that had been read at each compression. `held` has for each compression
    what the slots hold."""
    held = []
    for shares, tokens in memory.largest[n]:
        slots = zip(shares[own].tolist(), tokens[own].tolist())
        held.append([slot_record(*slot) for slot in slots])
    s = memory.parts[n].settings
    counts = {kind: getattr(s, kind) for kind in KINDS if getattr(s, kind)}
    return {"counts": counts, "read": memory.seen_at[n], "held": held}


def page_record(name: str, memory: Tracing, following: str) -> dict:
    """What the page shows of a memory that has read the text. `following` is the token that
    it predicts after the text."""
    heads = [[None] * memory.config.n_kv_heads for _ in range(memory.config.n_layers)]
    for n, part in enumerate(memory.parts):
        for own, head in enumerate(part.heads):
            heads[part.layer][head] = head_record(memory, n, own)
    method, comma, adapter = name.partition(",")
    return {
        "name": TITLES.get(method, method) + comma + adapter,
        "bytes": memory.nbytes,
        "full_bytes": memory.full_nbytes,
        "next": following,
        "heads": heads,  # by layer
    }
