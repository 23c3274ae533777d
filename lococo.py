"""LoCoCo: a long context in a fixed number of key/value slots, by a convolution.

Equation numbers are those of the paper (arXiv 2406.05317), letters are those of model.py,
and there are two more:

    R  entries of a head that a compression does not keep as they are: it puts them into
       merged slots, or drops them
    n  the index of a part. A part is a layer or, with budgets, those heads of a layer that
       have equally many slots (see `Part`)

Three matrices say how much of each entry goes into each slot:

    logits          the paper's W of (6), as the convolution gives it
    w               the paper's w of (7): each row sums to 1
    mixing matrix   not in the paper: the rows of w, and one-hot rows that copy what is kept
"""

from dataclasses import dataclass, field, replace
from typing import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import Entries, KVCache, Llama, LlamaConfig, RMSNorm
from model import causal_mask, rotate, widened
from support.files import UserError

# --- Methods: what a memory of M slots holds --------------------------------------------

# Sinks keep the first tokens, heavy slots the entries that have received most attention,
# and recent slots the last tokens. The compressor fills the merged slots with the rest: the
# paper's mixes entries, and ours lets each slot choose one.
KINDS = ("sinks", "heavy", "merged", "recent")  # in their order in the cache

# A method is a function of M. It gives the fields of Settings (below) that it sets.
METHODS = {
    # What the paper compares with. `longlora` keeps everything, too; while it trains, its
    # attention is train.ShiftedGroups.
    "full": lambda M: {},
    "longlora": lambda M: {},
    # StreamingLLM with M slots. LoCoCo's table gives it 8 entries, and does not say which.
    "streaming": lambda M: dict(sinks=4, recent=M - 4, positions="slots"),
    # The paper does not say how H2O divides its slots; H2O's authors do it so.
    "h2o": lambda M: dict(heavy=M // 2, recent=M - M // 2),
    # The paper: alone, with StreamingLLM's sinks, and with H2O (sections 3.2.3 and 5.2).
    # Half of M for heavy slots is the official code's.
    "lococo": lambda M: dict(merged=M),
    "lococo+sinks": lambda M: dict(sinks=4, merged=M - 4),
    "lococo+h2o": lambda M: dict(heavy=M // 2, merged=M - M // 2),
    # Not in the paper: H2O in which earlier attention counts less, as in A2SF (arXiv
    # 2407.20485), with more heavy slots.
    "h2o+forget": lambda M: dict(heavy=M * 5 // 8, recent=M - M * 5 // 8, forget=0.75),
    # Ours: merged slots learn which entries to keep. At M = 64 there are 24 heavy,
    # 16 merged and 24 recent slots. The recipe "embedded" of train.py divides M otherwise.
    "selection": lambda M: dict(
        heavy=M * 3 // 8,
        merged=M // 4,
        recent=M - M * 3 // 8 - M // 4,
        forget=0.75,
        compressor="selection",
        kernel=1,  # an entry is judged without its neighbours; "embedded" has 3 taps
        start=0.3,
    ),
}


@dataclass(frozen=True)
class Settings:
    """All that a trained adapter depends on; support.programs.settings.settings_for makes one."""

    method: str
    segment: int  # the most tokens that enter together
    # L that it is trained for, in tokens; without training, the most that the base can read
    length: int
    # How many slots there are of each of KINDS. Without merged slots the rest is dropped.
    sinks: int = 0
    heavy: int = 0
    merged: int = 0
    recent: int = 0
    positions: str = "text"  # or "slots", see `interpolation`
    compressor: str = "paper"  # or another of COMPRESSORS
    kernel: int = 21  # taps of the convolution
    start: float = 1.0  # standard deviation of its first weights, as in the official code
    lora_rank: int = 8
    lora_alpha: int = 16  # as in the official code; the paper names none
    # Not in the paper:
    # Earlier attention is multiplied by this at each segment. 1, as in H2O, forgets nothing;
    # 0 counts only the queries that entered last.
    forget: float = 1.0
    # Slots of the key/value heads of each layer, as [[24, 96, 24], [48, 48, 48], ...]. An
    # empty list means M everywhere.
    budgets: list[list[int]] = field(default_factory=list)

    @property
    def pinned(self) -> int:
        """Sinks and heavy slots together, which `Memory.choose` fills."""
        return self.sinks + self.heavy

    @property
    def mem(self) -> int:
        """M, the slots of each key/value head in each layer; 0 if all entries are kept. With
        budgets it is their mean."""
        return self.sinks + self.heavy + self.merged + self.recent

    @property
    def capacity(self) -> int:
        """M + T, the most entries that a head with slots holds. With budgets it is the mean
        over the heads, and some hold more. In the settings of a Part it is exact."""
        return self.mem + self.segment

    @property
    def head_sizes(self) -> list[int]:
        """The different numbers of slots that heads have, the smallest first."""
        return sorted({M for row in self.budgets or [[self.mem]] for M in row})


# --- Compressor (section 3.2.1) ---------------------------------------------------------


class Compressor(nn.Module):
    """A convolution says how much of each entry goes into each slot. The heads of a layer
    share it. `slots` is the number of slots that it fills, the merged ones. With budgets it is
    the most that a head has, and a head with fewer takes the first rows of w.

    One of your own is a subclass with other `weights`, and an entry of COMPRESSORS. All its
    parameters train at the rate of the convolutions.
    """

    reads_scores = False  # True: the memory counts attention, also without heavy slots
    recompute = False  # as in model.Block

    def __init__(self, head_dim: int, slots: int, kernel: int, start: float = 1.0):
        super().__init__()
        self.slots = slots
        # g of (6)
        self.conv = nn.Conv1d(2 * head_dim, slots, kernel, padding=kernel // 2, bias=False)
        # The scale of these weights cancels in (7), but not in the softmax of Selection.
        nn.init.normal_(self.conv.weight, std=start)

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        """R entries that are merged, (N, 2D, R) of N = B * G heads -> w (N, slots, R).

        The entries are in float32. R differs from call to call. Each row of w must sum to 1.
        The paper's compressor reads `entries` alone. `from_slot` (N, R) marks those that
        stood in a heavy or merged slot. `scores` (N, R) is the attention that each entry has
        received, or None if the memory does not count it (see `reads_scores`).
        """
        logits = self.conv(entries)  # (6)
        # The paper "prepends a ReLU" and does not say to what. Here, as in the official
        # code, it follows the convolution. A row of zeros becomes a plain mean.
        w = logits.relu() + 1e-9
        return w / w.sum(dim=-1, keepdim=True)  # (7)

    def first_weights(
        self, slots: int, entries: Tensor, from_slot: Tensor, scores: Tensor | None
    ) -> Tensor:
        """The first rows of w, (N, slots, R), for heads with so many slots. A subclass may
        save work here, as ours does."""
        return self.weights(entries, from_slot, scores)[:, :slots]


def merge(
    compressor: Compressor, slots: int, k: Tensor, v: Tensor, from_slot: Tensor,
    scores: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Equations (4) to (7): k and v (B, G, R, D), `from_slot` and `scores` (B, G, R) -> K'
    and V' (B, G, slots, D), and w (B, G, slots, R).

    All is computed in float32, as bfloat16 is too coarse for logits, and K' and V' are
    rounded to the dtype of k and v. With positions of the text a mixed key has no single
    position; the paper does not discuss this.
    """
    with torch.autocast(k.device.type, enabled=False):
        k_wide, v_wide = widened(k), widened(v)
        entries = torch.cat((k_wide, v_wide), dim=-1).flatten(0, 1).mT  # (N, 2D, R)
        scores = None if scores is None else scores.flatten(0, 1)
        w = compressor.first_weights(slots, entries, from_slot.flatten(0, 1), scores)
        w = w.unflatten(0, k.shape[:2])
        return (w @ k_wide).type_as(k), (w @ v_wide).type_as(v), w  # (4), (5)


# --- Attention that can be seen (for H2O) -----------------------------------------------


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Equation (1) up to its product with V: fused attention does not return these weights.

    The queries belong to the last T of the S entries: q (B, H, T, D), k (B, G, S, D) ->
    weights (B, G, H/G * T, S). The rows of a key/value head are the T queries of its first
    query head, then those of its next. The products q k have the dtype of q; the softmax and
    the weights are in float32.
    """
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group)).flatten(2, 3) / q.shape[-1] ** 0.5  # (B, G, H/G * T, D)
    attention_logits = widened(q @ k.mT)
    if T > 1:  # a single token sees all entries
        # All queries see the older entries, so that the last T columns alone need the mask.
        # It is added in place. It is a constant, and autograd need not know of it.
        last = attention_logits.detach().unflatten(2, (group, T))[..., S - T :]
        last += causal_mask(T, T, last)
    return attention_logits.softmax(dim=-1)


# --- Memory (algorithm 2) ---------------------------------------------------------------


def in_order(entries: Tensor, order: Tensor) -> Tensor:
    """Entries (B, G, S, D), or their scores (B, G, S), in the order (B, G, S) of each head;
    faster than `gather`."""
    B, G = order.shape[:2]
    text = torch.arange(B, device=order.device)[:, None, None]
    head = torch.arange(G, device=order.device)[:, None]
    return entries[text, head, order]


def check_choice(chosen: Tensor, s: Settings) -> None:
    """Whether `Memory.choose` keeps to its rule. A GPU has to wait for the answer, so that this is
    asked at the first compression of a text only."""
    enough = (chosen.sum(dim=2) == s.pinned).all()
    assert enough, f"Memory.choose must take {s.pinned} entries in each head"
    last = chosen[:, :, chosen.shape[2] - s.recent :].any()
    assert not last, "Memory.choose must take none of the last entries"


@dataclass(frozen=True)
class Part:
    """Key/value heads of one layer that have equally many slots. Without budgets a part has
    all heads of its layer."""

    layer: int
    heads: list[int]
    settings: Settings  # in which M is the number of slots of these heads


class Memory(KVCache):
    """M slots and at most one segment of new entries in each layer and key/value head. The
    lists of keys, values and scores have one item for each part of a layer (see `Part`).

    When new tokens do not fit into a part, the mixing matrix turns its S entries into M slots.
    Each method is a choice of this matrix, whose one-hot rows are never built. For M = 4 and a
    segment of 3, with one heavy slot, two merged slots and one recent slot (the paper's own
    methods have no recent slots), let the entry at place 4 have received most attention. Then

        place      0  1  2  3   4  5  6
                     memory     segment
        heavy      .  .  .  .   1  .  .     kept: a one-hot row
        merged     w  w  w  w   .  w  .     from the convolution; the row sums to 1
        merged     w  w  w  w   .  w  .
        recent     .  .  .  .   .  .  1

    The convolution sees only the columns with a w, side by side: places 3 and 5 become
    neighbours. The paper's (6) has the segment first. Here the memory is first, as its tokens
    are older.
    """

    def __init__(
        self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList
    ):
        super().__init__(config, interpolation(config, settings))
        self.settings, self.compressors = settings, compressors
        self.parts = parts_of(config, settings)
        self.heads: list[Tensor | None] = [None] * len(self.parts)  # their indices, if needed
        self.keys = [Entries() for _ in self.parts]
        self.values = [Entries() for _ in self.parts]
        self.capacity = [part.settings.capacity for part in self.parts]
        self.scoring = settings.heavy > 0 or any(c.reads_scores for c in compressors)
        # Attention received, (B, G, S)
        self.scores: list[Tensor | None] = [None] * len(self.parts)
        # With positions by slot a key has a new place after each compression. The key without
        # a rotation is kept, too, as rotating it again and again would add up errors. With
        # positions of the text `unrotated` stays empty.
        self.by_slot = settings.positions == "slots"
        self.unrotated = [Entries() for _ in self.parts]

    @property
    def to_compress(self) -> list[Entries]:
        """The keys that compressions read and mix: rotated ones with positions of the text (the
        paper's), and unrotated ones by slot."""
        return self.unrotated if self.by_slot else self.keys

    def make_room(self, B: int, T: int) -> None:
        """Compress the parts into which T new tokens would not fit.

        Algorithm 2 compresses at the end of each segment. Here this is done later, just before
        new tokens enter that would not fit. So the loss of these tokens depends on the
        compression, and trains it. For whole segments the slots are the same. While decoding,
        the memory is compressed once for `segment` tokens, where the paper does it at each
        token.
        """
        super().make_room(B, T)
        most = self.settings.segment
        assert T <= most, f"{T} tokens at once, but at most {most}: use generate.prefill"
        for n in range(len(self.parts)):
            if self.keys[n].size + T > self.capacity[n]:  # M + `segment`
                self.compress(n)

    def first_positions(self) -> list[int]:
        """With positions by slot a token's position is its place in the part's cache."""
        if self.by_slot:
            return [keys.size for keys in self.keys]
        return super().first_positions()

    @property
    def nbytes(self) -> int:
        """As in a KVCache, and with positions by slot the keys without a rotation, too."""
        return super().nbytes + sum(keys.held.nbytes for keys in self.unrotated if keys.size)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """KVCache.attend for each part n of the layer, as if it were a layer with fewer
        heads."""
        parts = [n for n, part in enumerate(self.parts) if part.layer == layer]
        if len(parts) == 1:
            return self.attend_part(parts[0], q, k, v)
        q = q.unflatten(1, (k.shape[1], -1))  # (B, G, H/G, T, D)
        read = torch.empty_like(q)
        for n in parts:
            if self.heads[n] is None:  # once, as it is copied to the device
                self.heads[n] = torch.tensor(self.parts[n].heads, device=k.device)
            own_q, own_k, own_v = (x.index_select(1, self.heads[n]) for x in (q, k, v))
            of_part = self.attend_part(n, own_q.flatten(1, 2), own_k, own_v)
            read.index_copy_(1, self.heads[n], of_part.unflatten(1, (-1, q.shape[2])))
        return read.flatten(1, 2)

    def attend_part(self, n: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.by_slot:
            self.unrotated[n].append(k, self.capacity[n])
        return super().attend(n, q, k, v)

    def read(self, n: int, q: Tensor) -> Tensor:
        """Attend as a KVCache does, and count the attention that each entry receives.

        Heavy hitters (H2O, arXiv 2306.14048) are the entries that have received most, in sum
        over all queries so far and as a mean of the query heads that share a key/value head.
        When T tokens enter, earlier attention is multiplied by `forget` ** (T / segment): by
        `forget` for a whole segment.
        """
        if not self.scoring:
            return super().read(n, q)
        attention = attention_weights(q, self.keys[n].held)
        T, group = q.shape[2], q.shape[1] // len(self.parts[n].heads)  # H/G query heads
        received = attention.detach().sum(dim=2) / group  # (B, G, S)
        if self.scores[n] is not None:
            factor = self.settings.forget ** (T / self.settings.segment)
            received[:, :, :-T] += factor * self.scores[n]  # the older entries
        self.scores[n] = received
        read = attention.type_as(q) @ self.values[n].held  # (B, G, H/G * T, D)
        return read.unflatten(2, (group, T)).flatten(1, 2)

    def compress(self, n: int) -> tuple[Tensor, Tensor]:
        """The operator C of (3), steps 4 and 5 of algorithm 2: S entries become M slots, in
        part n.

        In the example of the class, 7 entries become 4 slots:

            order    4 | 0 1 2 3 5 | 6      places of the entries: pinned | rest | recent
            slots    0 |   1   2   | 3      the five of the rest go into slots 1 and 2

        Each head has its own order. Pinned and recent entries are copied, and only w
        multiplies. Returns the order (B, G, S) and w (B, G, merged, R), where G is the
        number of heads of the part; support/programs/tracing.py reads them.
        """
        s = self.parts[n].settings
        k, v, scores = self.to_compress[n].held, self.values[n].held, self.scores[n]
        # After an earlier compression the cache is [pinned | merged | recent | new tokens].
        # Entries from recent slots count as new.
        compressed_before = k.shape[2] < self.seen  # there are fewer entries than tokens
        chosen = self.choose(s, k, v, scores)
        if not compressed_before:
            check_choice(chosen, s)
        # The places of all entries in the cache. A stable sort keeps the order of the cache
        # among the chosen entries, and among the others.
        order = (~chosen).byte().argsort(dim=2, stable=True)
        sizes = (s.pinned, k.shape[2] - s.pinned - s.recent, s.recent)
        k_pinned, k_rest, k_recent = in_order(k, order).split(sizes, dim=2)
        v_pinned, v_rest, v_recent = in_order(v, order).split(sizes, dim=2)
        scores_rest = None
        if self.scoring:
            scores = in_order(scores, order)
            scores_pinned, scores_rest, scores_recent = scores.split(sizes, dim=2)

        places = order.split(sizes, dim=2)[1]  # of the rest
        # Sinks are never among the rest.
        from_slot = (places < s.pinned + s.merged) & compressed_before
        k_merged, v_merged, w = self.fill_merged(n, k_rest, v_rest, from_slot, scores_rest)

        k = torch.cat((k_pinned, k_merged, k_recent), dim=2)
        v = torch.cat((v_pinned, v_merged, v_recent), dim=2)
        if self.scoring:
            # A merged slot gets the mean, by w, of the attention that its entries received.
            scores_merged = (w.detach() * scores_rest[:, :, None]).sum(dim=3)
            scores = torch.cat((scores_pinned, scores_merged, scores_recent), dim=2)
        self.hold(n, k, v, scores)
        return order, w

    def fill_merged(
        self, n: int, k: Tensor, v: Tensor, from_slot: Tensor, scores: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K', V' and w of the layer's compressor. If there are no merged slots, the entries
        are dropped."""
        part = self.parts[n]
        if not part.settings.merged:
            return k[:, :, :0], v[:, :, :0], k.new_zeros(*k.shape[:2], 0, k.shape[2])
        compressor = self.compressors[part.layer]
        args = (compressor, part.settings.merged, k, v, from_slot, scores)
        if compressor.recompute:
            return checkpoint(merge, *args, use_reentrant=False)
        return merge(*args)

    def hold(self, n: int, k: Tensor, v: Tensor, scores: Tensor | None) -> None:
        """Replace what part n holds: keys as compressions read them, and values, both
        (B, G, S, D), and scores (B, G, S). By slot the keys are rotated to their places."""
        if self.by_slot:
            self.unrotated[n] = Entries(k)
            places = torch.arange(k.shape[2], device=k.device)
            k = rotate(k, *self.rotation(places))
        self.keys[n] = Entries(k)
        self.values[n] = Entries(v)
        self.scores[n] = scores

    def choose(self, s: Settings, k: Tensor, v: Tensor, scores: Tensor | None) -> Tensor:
        """Which of the entries k and v (B, G, S, D) are pinned, a mask (B, G, S).

        For another rule change this function. Each head must choose `s.pinned` entries, and
        none of the last `s.recent` ones, which the recent slots keep.
        """
        chosen = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
        chosen[:, :, : s.sinks] = True
        if s.heavy:
            others = scores.masked_fill(chosen, -torch.inf)
            heaviest = others[:, :, : k.shape[2] - s.recent].topk(s.heavy, dim=2).indices
            chosen.scatter_(2, heaviest, True)
        return chosen

    def copy(self) -> "Memory":
        other = super().copy()
        other.scores = [*self.scores]
        other.unrotated = [keys.copy() for keys in self.unrotated]
        return other

    def detach(self) -> None:
        super().detach()
        for keys in self.unrotated:
            keys.detach()


# --- Segment loop (algorithm 2) ---------------------------------------------------------


def segment_losses(
    model: Llama, tokens: Tensor, cache: KVCache, segment: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read tokens (B, L) one segment after the other, into a cache that may hold earlier
    ones. For each segment yield the loss in nats of the token after each input, (B, segment),
    and the logits that predicted it, (B, segment, vocab_size).

    The graph grows with each segment until `cache.detach()` cuts it.
    """
    inputs = tokens[:, :-1].split(segment, dim=1)
    targets = tokens[:, 1:].split(segment, dim=1)
    for x, y in zip(inputs, targets):
        logits = model(x, cache)  # the cache compresses first, if x does not fit
        nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        yield nats.view_as(y), logits


# --- Position interpolation (arXiv 2306.15595) ------------------------------------------


def interpolation(config: LlamaConfig, settings: Settings) -> float:
    """The number by which positions are divided, so that those of a text of L tokens
    (the settings' `length`) lie inside the pretrained context. Positions of a longer text
    may pass the context.

    "text" (the paper): a token's position in the text, which reaches L. "slots": its place
    in the cache, which never exceeds M + T of the largest head.
    """
    highest = settings.length
    if settings.positions == "slots" and settings.mem:
        highest = min(settings.head_sizes[-1] + settings.segment, settings.length)
    # The checkpoint may divide positions itself; they are never divided by less.
    return max(config.rope_scale, highest / config.context)


# --- LoRA (arXiv 2106.09685) ------------------------------------------------------------


class LoRALinear(nn.Module):
    """y = x W^T + (alpha / rank) (x A^T) B^T. W is frozen. B starts at zero, so that y is
    unchanged at the start."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.base, self.factor = base, alpha / rank
        like = widened(base.weight[:0])  # in float32, also where the base is not
        self.lora_a = nn.Parameter(like.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(like.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        change = F.linear(F.linear(x.type_as(self.lora_a), self.lora_a), self.lora_b)
        return y + self.factor * change.type_as(y)


# --- Ours: slots that learn which entries to keep ---------------------------------------

# AdamW changes all parameters about equally fast. The shared filters are multiplied by 3, so
# that they learn three times as fast.
COMMON_SCALE = 3
# At the start, in training, an entry with twice the attention gets 2^2 times the weight.
TRUST_SCALE = 2
# So large that a slot hardly ever takes a copy of what an earlier slot has taken.
PENALTY = 1000


class Selection(Compressor):
    """Slots that learn which entries to keep. They choose in order: each prefers the most
    relevant entry that is neither taken by an earlier slot nor a copy of one that is.

    The relevance of an entry is a sum of three terms: a filter that all slots share, one of
    24 other filters, and the logarithm of the attention that the entry has received. Entries
    from heavy and merged slots are judged by other filters, which learn to keep them. The
    slots take the 24 in turn, so that what was trained serves any number of slots.

    While it trains, a slot is a mixture: its row of w is a softmax of the relevance, so that
    gradients flow. In use the relevance is 16 times as sharp, and a slot holds nearly one
    entry: the model cannot read a fact out of a mixture of several.

    A subclass changes `relevance` or `normalise`.
    """

    reads_scores = True
    sharpness = 16  # in use; 1 while it trains

    def __init__(
        self, head_dim: int, slots: int, kernel: int, start: float = 1.0, filters: int = 24
    ):
        super().__init__(head_dim, filters, kernel, start)  # `conv` has a row for each filter
        self.slots = slots
        # For new entries: the filters of `conv`, in which the neighbours of an entry start at
        # zero, and `common`, which all slots share.
        self.common = nn.Parameter(torch.zeros(1, 2 * head_dim, kernel))
        # For entries from slots: one tap, as neighbours in slots are none in the text.
        self.slot_filters = nn.Parameter(start * torch.randn(filters, 2 * head_dim, 1))
        self.slot_common = nn.Parameter(torch.zeros(1, 2 * head_dim, 1))
        neighbours = torch.arange(kernel) != kernel // 2
        with torch.no_grad():
            self.conv.weight[:, :, neighbours] = 0
            # Filters beyond the slots do not train. Where a larger memory takes them, they
            # are zero: the shared filters and the attention received judge alone.
            self.conv.weight[slots:] = 0
            self.slot_filters[slots:] = 0
        self.trust = nn.Parameter(torch.ones(1))  # how much the attention received counts

    def relevance(self, entries: Tensor, from_slot: Tensor, scores: Tensor) -> Tensor:
        """How relevant each of R entries is by each filter: (N, filters, R)."""
        filters = self.conv.weight + COMMON_SCALE * self.common
        slot_filters = self.slot_filters + COMMON_SCALE * self.slot_common
        new = F.conv1d(entries, filters, padding="same")
        old = slot_filters.squeeze(2) @ entries
        by_filters = torch.where(from_slot[:, None], old, new)
        log_scores = (scores + 1e-4).log()  # entries below 0.0001 are alike
        return by_filters + TRUST_SCALE * self.trust * log_scores[:, None]

    def normalise(self, relevance: Tensor, entries: Tensor) -> Tensor:
        """This takes the place of the ReLU and of (7): w (N, slots, R); each row sums to 1."""
        sharpness = 1 if self.training else self.sharpness
        return (sharpness * (relevance - copy_penalty(relevance, entries))).softmax(dim=-1)

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor) -> Tensor:
        return self.first_weights(self.slots, entries, from_slot, scores)

    def first_weights(
        self, slots: int, entries: Tensor, from_slot: Tensor, scores: Tensor
    ) -> Tensor:
        """Only as many slots choose as are asked for."""
        relevance = self.relevance(entries, from_slot, scores)
        in_turn = torch.arange(slots, device=relevance.device) % relevance.shape[1]
        return self.normalise(relevance[:, in_turn], entries)


@torch.no_grad()
def copy_penalty(relevance: Tensor, entries: Tensor) -> Tensor:
    """The penalty of each of R entries for each slot: relevance (N, slots, R), entries
    (N, 2D, R) -> (N, slots, R). For each earlier slot it grows by PENALTY * c^32. Here c is the
    cosine between the entry's value and the value which that slot has taken, after the mean of
    all R is subtracted from both. A negative c counts as 0. So the penalty grows by 1000 for a
    copy, by 34 if c is 0.9, and by 1 if c is 0.81. What is taken is a copy of itself, also where
    all values are equal. Maximal marginal relevance (Carbonell and
    Goldstein 1998) subtracts the largest similarity, and this the sum of all.

    Keys are not compared, as rotations change them with positions of the text. The penalty is
    a constant for the gradient, as are the scores.
    """
    values = entries.chunk(2, dim=1)[1]  # (N, D, R)
    unit = F.normalize(values - values.mean(dim=-1, keepdim=True), dim=1)
    alike = (unit.mT @ unit).clamp_(min=0)  # (N, R, R); an opposite entry is not a copy
    itself = alike.diagonal(dim1=1, dim2=2)
    itself.masked_fill_(itself < 0.5, 1)  # 0 where a value is the mean
    for _ in range(5):  # c^32, faster than pow
        alike.square_()
    alike *= PENALTY
    heads = torch.arange(len(alike), device=alike.device)
    penalty = torch.zeros_like(relevance[:, 0])
    penalties = []  # for each slot, (N, R)
    for row in relevance.unbind(dim=1):
        penalties.append(penalty)
        taken = (row - penalty).argmax(dim=-1)  # by this slot, (N,)
        penalty = penalty + alike[heads, taken]
    return torch.stack(penalties, dim=1)


COMPRESSORS = {"paper": Compressor, "selection": Selection}

# --- Ours: budgets of heads -------------------------------------------------------------


def parts_of(config: LlamaConfig, settings: Settings) -> list[Part]:
    """The parts of all layers.

    Heads differ in how much of a long text they read, so that equal budgets waste slots: few
    of them retrieve what was said long ago (DuoAttention, arXiv 2410.10819; HeadKV, arXiv
    2410.19258). tools/budgets.py measures which heads need more.
    """
    heads = list(range(config.n_kv_heads))
    if not settings.budgets:
        return [Part(layer, heads, settings) for layer in range(config.n_layers)]
    parts = []
    for layer, slots in enumerate(settings.budgets):
        for M in dict.fromkeys(slots):
            equal = [head for head in heads if slots[head] == M]
            parts.append(Part(layer, equal, with_slots(settings, M)))
    return parts


def with_slots(settings: Settings, M: int) -> Settings:
    """The same memory with M slots in each head. It has all sinks, and the other kinds keep
    their proportions."""
    kinds = KINDS[1:]
    counts = divided(M - settings.sinks, [getattr(settings, kind) for kind in kinds])
    return replace(settings, budgets=[], **dict(zip(kinds, counts)))


def divided(total: int, shares: list[int]) -> list[int]:
    """A total in the proportions of shares, whose sum is positive. What rounding leaves over
    goes to the largest."""
    counts = [total * share // sum(shares) for share in shares]
    counts[counts.index(max(counts))] += total - sum(counts)
    return counts


def check_budgets(budgets: list[list[int]], config: LlamaConfig) -> None:
    """Raises UserError if they are not those of such a base."""
    layers, heads = config.n_layers, config.n_kv_heads
    if budgets and [len(row) for row in budgets] != [heads] * layers:
        found = f"{len(budgets)} layers of {len(budgets[0])} heads"
        needed = f"this base has {layers} layers of {heads}: measure its own by tools/budgets.py"
        raise UserError(f"budgets: they are for {found}; {needed}")


# --- All together: the adapted model ----------------------------------------------------


def check_base(model: Llama) -> None:
    """Raises UserError if a base has LoRA already."""
    if any(isinstance(module, LoRALinear) for module in model.modules()):
        raise UserError("this model is adapted already, with LoRA; give the base itself")


@torch.no_grad()
def check_rows(compressor: Compressor, head_dim: int) -> None:
    """Raises UserError if w of random entries has another shape, or if its rows do not sum to
    1, as with a softmax over the wrong dimension: (4) and (5) would not mix."""
    generator = torch.Generator("cpu").manual_seed(0)
    sizes = (2, 2 * head_dim, compressor.slots + 8)
    entries = torch.randn(sizes, generator=generator, device="cpu")
    entries = entries.to(next(compressor.parameters()))
    from_slot = torch.zeros_like(entries[:, 0], dtype=torch.bool)
    w = compressor.weights(entries, from_slot, entries[:, 0].exp())
    name = f"{type(compressor).__name__}.weights"
    expected = (2, compressor.slots, entries.shape[2])
    if w.shape != expected:
        raise UserError(f"{name}: w has the shape {tuple(w.shape)} instead of {expected}")
    sums = w.sum(dim=-1)
    if not torch.allclose(sums, torch.ones_like(sums), atol=1e-2):
        found = f"the rows of w sum to {sums.min():.3g} to {sums.max():.3g} instead of 1"
        raise UserError(f"{name}: {found}; divide by `w.sum(dim=-1, keepdim=True)`")


class AdaptedLlama(nn.Module):
    """A base model and everything that trains on it. Run it as `adapted.model(tokens, cache)`
    with a `cache` of `adapted.cache()`. `train()` and `eval()` say whether compressors are in
    training or in use. `adapted.model` is a Llama of its own on the weights of `model`, which
    stays as it is and may be adapted once more.

    For context extension section 4.1 trains the compressors, LoRA, embeddings and norms. LoRA
    is here on q, k, v and o, as in LongLoRA and the official code. In the inference mode
    (`lora_rank` 0) the compressors train alone. What trains requires a gradient. It is in
    float32, or small steps would be rounded away. Raises UserError if the base or a compressor
    cannot be used so.
    """

    def __init__(self, model: Llama, settings: Settings):
        super().__init__()
        check_base(model)
        self.settings = settings
        config = model.config
        with torch.device("meta"):  # shapes without numbers
            self.model = Llama(config)
        self.model.load_state_dict(model.state_dict(), assign=True)  # nothing is copied
        self.model.requires_grad_(False)
        check_budgets(settings.budgets, config)
        most = [0] * config.n_layers  # merged slots of each layer's largest head
        for part in parts_of(config, settings):
            most[part.layer] = max(most[part.layer], part.settings.merged)
        compressor = COMPRESSORS[settings.compressor]
        with torch.device("cpu"):  # so that every machine starts from the same numbers
            compressors = [
                compressor(config.head_dim, slots, settings.kernel, settings.start)
                for slots in (most if settings.merged else [])
            ]
        like = widened(model.norm.weight[:0])
        self.compressors = nn.ModuleList(compressors).to(like)
        if self.compressors:  # all are of one class
            check_rows(self.compressors[0], config.head_dim)
        if settings.lora_rank:  # context extension; without LoRA the base stays frozen
            self.tune_base()

    def tune_base(self) -> None:
        """Put LoRA on q, k, v and o, and let embeddings and norms train."""
        for block in self.model.layers:
            for name in ("wq", "wk", "wv", "wo"):
                linear = getattr(block.attention, name)
                lora = LoRALinear(linear, self.settings.lora_rank, self.settings.lora_alpha)
                setattr(block.attention, name, lora)
        for module in self.model.modules():
            if isinstance(module, (nn.Embedding, RMSNorm)):
                module.weight = nn.Parameter(widened(module.weight).clone())

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def recompute_in_backward(self) -> None:
        """Train with less memory and more time: the backward pass runs the layers, apart
        from attention, and the compressors again."""
        for module in (*self.model.layers, *self.compressors):
            module.recompute = True

    def cache(self, memory: Callable = Memory) -> KVCache:
        """An empty cache for one batch of sequences, of class `memory` if there are slots."""
        config = self.model.config
        if self.settings.mem:
            return memory(config, self.settings, self.compressors)
        return KVCache(config, interpolation(config, self.settings))
