"""What slots hold: each slot is a mixture of tokens. Lines of text say it for one head, and the
data of support/memory_page.html for all."""

from collections import Counter
from functools import partial
from typing import Collection, Iterator

import torch
from torch import Tensor

from lococo import KINDS, MEMORIES, AdaptedLlama, Settings
from support.tokenizer import Tokenizer


LEAST = 0.01  # smaller shares are left out


def kinds_of(s: Settings) -> list[str]:
    """The kind of each slot, in their order."""
    return [kind for kind in KINDS for _ in range(getattr(s, kind))]


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
    the mixing matrices of all compressions, in some layers or in all. `traced` adds this class to
    that of a memory."""

    def __init__(self, *args, layers: Collection[int]):
        """`args` as those of Memory. The parts of `layers` are traced (see Part in
        support/ours/budgets.py)."""
        super().__init__(*args)
        own = [n for n, part in enumerate(self.parts) if part.layer in layers]
        self.seen_at = {n: [] for n in own}  # tokens that had entered at each compression
        # shares[n][g, slot, place] is how much of the slot of part n is the token at this
        # place of the text, (G, M, tokens).
        none = dict(device="cpu", dtype=torch.float32)
        self.shares = {n: torch.zeros(len(self.parts[n].heads), 0, 0, **none) for n in own}
        # For each part, after each compression: the three largest shares of each slot, and
        # their tokens' places, both (G, M, 3). `shares` grows with the text, these do not.
        self.largest = {n: [] for n in own}

    def compress(self, n: int) -> tuple[Tensor, Tensor]:
        order, w = super().compress(n)
        if n in self.shares:
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


def traced(adapted: AdaptedLlama, layers: Collection[int]) -> Tracing:
    """An empty memory, of the class that the settings name, that is traced in these layers. It
    must be a BudgetMemory (see `check_slots` in settings.py)."""
    own = MEMORIES[adapted.settings.memory]
    return adapted.cache(partial(type("TracedMemory", (Tracing, own), {}), layers=layers))


def describe_slots(
    memory: Tracing, layer: int, head: int, ids: list[int], tokenizer: Tokenizer
) -> Iterator[str]:
    """Lines about what the slots hold; ids are the tokens that were read.

    The bars at a line's end follow its first token, one bar for each compression. A bar is
    the token's largest share among the slots in which it came first then.
    """
    n = next(
        n for n, part in enumerate(memory.parts) if part.layer == layer and head in part.heads
    )
    part = memory.parts[n]
    yield f"layer {layer}, head {head}: {memory.keys[n].size} entries after {len(ids)} tokens"
    if not memory.largest[n]:
        yield "nothing has been compressed yet, so that there are no slots to show"
        return
    own = part.heads.index(head)
    for slot, kind in enumerate(kinds_of(part.settings)):
        line = f"{slot:>4} {kind:7}"
        last = memory.largest[n][-1]  # after the last compression
        shares, places = (tensor[own, slot].tolist() for tensor in last)
        for share, place in zip(shares, places):
            if share >= LEAST:
                piece = repr(tokenizer.piece(ids[place]))
                bar = "█" * round(4 * share)
                line += f"  {bar:·<4} {share:.2f} {piece:<10} {place:<5}"
        bars = ""
        for shares_then, places_then in memory.largest[n]:
            same = places_then[own, :, 0] == places[0]
            first = shares_then[own, :, 0] * same
            bars += " ▁▂▃▄▅▆▇█"[round(8 * float(first.max()))]
        yield f"{line}  {bars}"


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
    counts = Counter(kinds_of(memory.parts[n].settings))  # in the order of the slots
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
