"""LoCoCo: a long context in a fixed number of key/value slots, by a small convolution.

The sections follow the method: what a memory holds, the compressor, the memory, the segment
loop, positions, LoRA. Equation numbers are those of the paper (arXiv 2406.05317). What is
ours is called so where it stands; our compressors come after LoRA. Letters are those of
model.py, and R is the number of entries that are merged. Three matrices have similar names:

    logits          the paper's W of (6), as the convolution gives it
    w               the paper's w of (7): each row sums to 1
    mixing matrix   ours: the rows of w, and one-hot rows that copy what is kept

Only in the segment loop, logits are those of the next token.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import Entries, KVCache, Llama, LlamaConfig, RMSNorm
from model import causal_mask, rope, rotate, widened
from support.command_line import resume_command
from support.files import UserError, checksum, read_file

# --- Methods: what a memory of M slots holds --------------------------------------------

# Sinks keep the first tokens, heavy slots the entries that have received most attention,
# and recent slots the last tokens. Merged slots mix the rest.
KINDS = ("sinks", "heavy", "merged", "recent")  # in their order in the cache

# A method is a function of M. It gives the fields of Settings (below) that it sets. Another
# rule of which entries are kept goes into `Memory.choose`.
METHODS = {
    # What the paper compares with.
    "full": lambda M: {},
    # `longlora` keeps everything, too. While it trains, its attention is
    # train.ShiftedGroups.
    "longlora": lambda M: {},
    # StreamingLLM with M slots. The LoCoCo paper's version keeps 8 sinks and no window.
    "streaming": lambda M: dict(sinks=4, recent=M - 4, positions="slots"),
    # The paper does not say how H2O divides its slots; H2O's authors do it so. For texts
    # beyond the base's context add `--positions slots`.
    "h2o": lambda M: dict(heavy=M // 2, recent=M - M // 2),
    # The paper: alone, with StreamingLLM's sinks, and with H2O (sections 3.2.3 and 5.2).
    # Half of M for heavy slots is the official code's.
    "lococo": lambda M: dict(merged=M),
    "lococo+sinks": lambda M: dict(sinks=4, merged=M - 4),
    "lococo+h2o": lambda M: dict(heavy=M // 2, merged=M - M // 2),
    # Ours: for a real Llama, and for the embedded model.
    "lococo+h2o+recent": lambda M: dict(
        heavy=M * 3 // 8,  # 24, 16 and 24 slots at M = 64
        merged=M // 4,
        recent=M - M * 3 // 8 - M // 4,
        forget=0.75,
    ),
    "lococo+window": lambda M: dict(
        sinks=4, merged=min(M // 4, 24), recent=M - min(M // 4, 24) - 4, positions="slots"
    ),
}


@dataclass(frozen=True)
class Settings:
    """All that a trained adapter depends on; `settings_for` makes one."""

    method: str
    segment: int  # the most tokens that enter together; what messages and tables call T
    # L that it is trained for, in tokens. Without training: the most that the base can read.
    length: int
    sinks: int = 0  # slots that keep the first tokens
    heavy: int = 0  # slots that keep the entries that have received most attention
    merged: int = 0  # slots that the convolution fills; a memory without any drops the rest
    recent: int = 0  # slots that keep the last tokens
    positions: str = "interpolated"  # or "original" or "slots", see `interpolation`
    compressor: str = "paper"  # or another of COMPRESSORS
    kernel: int = 21  # taps of the convolution
    lora_rank: int = 8
    lora_alpha: int = 16  # the official code's; the paper names none
    # Ours:
    # Earlier attention is multiplied by this at each segment. 1, as in H2O, forgets nothing.
    # 0 counts only the queries that entered last: those of a segment, or of one decoded
    # token.
    forget: float = 1.0
    # Slots of each layer; an empty list means M in every layer.
    budgets: list[int] = field(default_factory=list)

    @property
    def front(self) -> int:
        """Sinks and heavy slots together, which `Memory.choose` fills."""
        return self.sinks + self.heavy

    @property
    def mem(self) -> int:
        """M, slots in each layer and key/value head; 0 if all entries are kept. With
        budgets it is their mean."""
        return self.sinks + self.heavy + self.merged + self.recent

    @property
    def room(self) -> int:
        """M + T, the most entries that a layer holds. With budgets it is the mean of the
        layers."""
        return self.mem + self.segment


def settings_for(method: str, mem: int, segment: int, length: int, **changes) -> Settings:
    """Settings from a row of METHODS at M = mem. Each of `changes` that is not None replaces
    a field.

    If changes replace some counts of slots, one kind gets the slots that remain: the merged
    slots, or the recent ones if the row merges none. With `lococo+window`, M = 128 and
    recent = 84 there are 4 sinks and 40 merged slots. If the count of this kind is given,
    too, there may be fewer than M slots: `h2o` with M = 128 and recent = 0 has 64.
    A row without slots keeps all entries. Raises UserError.
    """
    # Where dictionaries are joined, the later one wins: first the row, then the flags that
    # are given, then the counts after filling.
    row = METHODS[method](mem)
    given = {name: value for name, value in changes.items() if value is not None}
    chosen = row | given
    counts = {kind: chosen.get(kind, 0) for kind in KINDS}
    filler = "merged" if "merged" in row else "recent"
    if row and filler not in given:
        counts[filler] += mem - sum(counts.values())

    rule = broken_rule(row, counts, mem)
    if rule:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise UserError(f"--method {method} --mem {mem}: {listed} slots do not fit; {rule}")
    settings = Settings(method, segment, length, **chosen | counts)
    check_budgets(settings)
    return settings


def broken_rule(row: dict, counts: dict[str, int], mem: int) -> str | None:
    """Why these counts of slots do not suit a row of METHODS; None if they do."""
    total = sum(counts.values())
    if not row:
        return "this method keeps everything and has no slots" if total else None
    if "merged" in row and counts["merged"] == 0:
        return "this method needs merged slots; leave room for them"
    if not 0 < total <= mem or min(counts.values()) < 0:
        return f"together they must be from 1 to {mem}, and none negative"
    return None


# --- Compressor (section 3.2.1) ---------------------------------------------------------


class Compressor(nn.Module):
    """A convolution says how much of each entry goes into each slot. The heads of a layer
    share it. `slots` is the number of slots that it fills, the merged ones.

    One of your own is a subclass with other `weights`, and an entry of COMPRESSORS. All its
    parameters train at the rate --conv-lr.
    """

    reads_scores = False  # True: the memory counts attention, and `weights` gets it

    def __init__(self, head_dim: int, slots: int, kernel: int):
        super().__init__()
        self.slots = slots
        # g of (6)
        self.conv = nn.Conv1d(2 * head_dim, slots, kernel, padding=kernel // 2, bias=False)
        # The official code starts from these numbers. (7) divides their scale out. In a
        # softmax, as a compressor of your own may have, it matters: with 21 taps its rows
        # would be nearly one-hot at the start, and would learn little.
        nn.init.normal_(self.conv.weight)

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        """R entries that are merged, (N, 2D, R) of N = B * G heads -> w (N, slots, R).

        The entries are in float32. R differs from call to call. Each row of w should sum
        to 1.

        The last two arguments are for our compressors below. `from_slot` (N, R) marks
        entries that stood in a heavy or merged slot. Entries of a recent slot count as new:
        they were kept for being recent, and are judged for the first time now. `scores`
        (N, R) is the attention that each entry has received. It is None if `reads_scores` is
        False and no slots are heavy.
        """
        logits = self.conv(entries)  # (6)
        # The paper "prepends a ReLU" and does not say to what. Here, as in the official
        # code, it follows the convolution: no weight is negative. A row of zeros becomes a
        # plain mean.
        w = logits.relu() + 1e-9
        return w / w.sum(dim=-1, keepdim=True)  # (7)

    def forward(
        self, k: Tensor, v: Tensor, from_slot: Tensor, scores: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, G, R, D), with `from_slot` and `scores` (B, G, R) -> K' and V'
        (B, G, slots, D), and w (B, G, slots, R).

        The keys are rotated, each by its position in the text, so that a mixed key has no
        single position; the paper does not discuss this. With `--positions slots` they are
        not rotated. The logits and w are computed in float32, then w is rounded to the
        model's dtype. In bfloat16 neighbouring numbers near 900, which a logit can reach,
        are 4 apart.
        """
        with torch.autocast(k.device.type, enabled=False):
            entries = widened(torch.cat((k, v), dim=-1))
            entries = entries.flatten(0, 1).transpose(1, 2)  # (B * G, 2D, R)
            scores = None if scores is None else scores.flatten(0, 1)
            w = self.weights(entries, from_slot.flatten(0, 1), scores)
            expected = (len(entries), self.slots, k.shape[2])  # (N, slots, R)
            name = type(self).__name__
            assert w.shape == expected, f"{name}.weights: {tuple(w.shape)} instead of {expected}"
            w = w.unflatten(0, k.shape[:2]).type_as(k)
            return w @ k, w @ v, w  # (4), (5)

    @torch.no_grad()
    def sharpen(self, factor: float) -> None:
        """Make the rows of w more nearly one-hot: scale all parameters by `factor`, and so
        what they give. Override this if yours is not proportional to its parameters. With
        the paper's (7) it has no effect."""
        for p in self.parameters():
            p *= factor


# --- Attention that can be seen (for H2O) -----------------------------------------------


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """Equation (1) up to its product with V. H2O must see these weights, and fused
    attention does not return them.

    The queries belong to the last T of the S entries: q (B, H, T, D), k (B, G, S, D) ->
    weights in float32, (B, G, H/G * T, S). The rows of a key/value head are the T queries
    of its first query head, then those of its next. Under autocast the products are in
    bfloat16, as in fused attention; the softmax is in float32.
    """
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group)).flatten(2, 3)  # (B, G, H/G * T, D)
    attention_logits = widened(q @ k.mT) / q.shape[-1] ** 0.5
    # In place, as no backward pass needs the logits without the mask.
    attention_logits += causal_mask(T, S, attention_logits).repeat(group, 1)
    return attention_logits.softmax(dim=-1)


# --- Memory (algorithm 2) ---------------------------------------------------------------


def in_order(entries: Tensor, order: Tensor) -> Tensor:
    """Entries (B, G, S, D) in the order (B, G, S) of each head.

    An index copies whole entries. `gather` would need the order of each channel, and takes
    twice as long.
    """
    B, G = order.shape[:2]
    text = torch.arange(B, device=order.device)[:, None, None]
    head = torch.arange(G, device=order.device)[:, None]
    return entries[text, head, order]


class Memory(KVCache):
    """M slots and at most one segment of new entries in each layer.

    When the next segment does not fit, the mixing matrix turns S entries into M slots. Each
    method is a choice of this matrix. For M = 4 and T = 3, with one heavy slot, two merged
    slots and one recent slot (the paper's own methods have no recent slots), let the entry
    at place 4 have received most attention. Then

        place      0  1  2  3   4  5  6
                     memory     segment
        heavy      .  .  .  .   1  .  .     kept: a one-hot row
        merged     w  w  w  w   .  w  .     from the convolution; the row sums to 1
        merged     w  w  w  w   .  w  .
        recent     .  .  .  .   .  .  1

    The convolution runs over the columns with a w, from left to right. When an entry is
    kept, the entries on both sides of it become neighbours. The paper's (6) has the segment
    first. Here the memory is first, as its tokens are older.
    """

    def __init__(
        self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList,
        recompute: bool = False,
    ):  # fmt: skip
        """`recompute` is that of Block, here for the compressors."""
        super().__init__(config, interpolation(config, settings))
        self.settings, self.compressors = settings, compressors
        # One for each layer. They differ if layers have budgets (ours, see `in_layer`).
        layers = range(config.n_layers)
        self.layer_settings = [in_layer(settings, layer) for layer in layers]
        self.capacity = [s.room for s in self.layer_settings]
        self.scoring = settings.heavy > 0 or any(c.reads_scores for c in compressors)
        # Attention received, (B, G, S)
        self.scores: list[Tensor | None] = [None] * config.n_layers
        self.recompute = recompute

    def copy(self) -> "Memory":
        other = super().copy()
        other.scores = [*self.scores]
        return other

    def enter(self, T: int) -> int:
        """Make room for T new tokens; return the first one's position.

        We compress when the next segment arrives, not right after a segment as algorithm 2
        does. So the order is

            segment n arrives, compression, loss of segment n, backward pass, cut of the graph

        and the compression gets the gradient of the loss of segment n. A compression before
        the previous cut would get none. (The paper does not say where it is cut.)

        Whole segments are compressed as in algorithm 2. Only decoding differs: the paper
        compresses at each token, and we compress once per segment.
        """
        most = self.settings.segment
        assert T <= most, f"{T} tokens at once, but at most {most}: use generate.prefill"
        for layer, capacity in enumerate(self.capacity):
            if self.keys[layer].size + T > capacity:
                self.compress(layer)
        first = super().enter(T)
        return self.size if self.settings.positions == "slots" else first

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend as a KVCache does, and count the attention that each entry receives.

        Heavy hitters (H2O, arXiv 2306.14048) are the entries that have received most.
        Attention is summed over all queries so far, and averaged over the query heads that
        share a key/value head.
        Ours: what was received earlier is first multiplied by `forget` ** (T / segment), so
        that 64 decoded tokens forget as much as a segment of 64 tokens.
        """
        if not self.scoring:
            return super().attend(layer, q, k, v)
        self.append(layer, k, v)
        attention = attention_weights(q, self.keys[layer].held)
        T, group = q.shape[2], q.shape[1] // k.shape[1]  # H/G query heads
        received = attention.detach().sum(dim=2) / group  # (B, G, S)
        if self.scores[layer] is not None:
            kept = self.settings.forget ** (T / self.settings.segment)
            received[:, :, :-T] += kept * self.scores[layer]  # the older entries
        self.scores[layer] = received
        read = attention.type_as(v) @ self.values[layer].held  # (B, G, H/G * T, D)
        return read.unflatten(2, (group, T)).flatten(1, 2)

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        """The operator C of (3), steps 4 and 5: S entries become M slots.

        In the example of the class, 7 entries become 4 slots:

            order    4 | 0 1 2 3 5 | 6      places of the entries: front | rest | recent
            slots    0 |   1   2   | 3      the five of the rest go into slots 1 and 2

        Each head has its own order, as another one may choose another entry.

        One-hot rows copy front and recent. Only w, the block of the merged slots,
        multiplies keys and values. Returns what `mixing_matrix` needs: the order of the
        entries (B, G, S), and w (B, G, merged, R).
        """
        s = self.layer_settings[layer]
        order = self.arrange(layer)
        S = order.shape[2]
        sizes = (s.front, S - s.front - s.recent, s.recent)
        k = in_order(self.keys[layer].held, order)
        v = in_order(self.values[layer].held, order)
        by_slot = s.positions == "slots"
        if by_slot:
            # A key at place p is rotated by p, and `order` has these places. Rotating it by
            # new - p more makes that new.
            k = self.move(k, self.new_places(layer, S, k.device) - order)
        k_front, k_rest, k_recent = k.split(sizes, dim=2)
        v_front, v_rest, v_recent = v.split(sizes, dim=2)

        from_slot = self.from_slot(layer, order)
        scores = self.scores[layer].gather(2, order) if self.scoring else None
        scores_rest = None if scores is None else scores.split(sizes, dim=2)[1]

        k_new, v_new, w = self.merge(layer, k_rest, v_rest, from_slot, scores_rest)
        if by_slot:  # what was mixed at place 0 goes to the places of the merged slots
            places = torch.arange(s.front, s.front + s.merged, device=k.device)
            k_new = self.move(k_new, places)

        self.keys[layer] = Entries(torch.cat((k_front, k_new, k_recent), dim=2))
        self.values[layer] = Entries(torch.cat((v_front, v_new, v_recent), dim=2))
        if self.scoring:
            self.scores[layer] = self.new_scores(w, *scores.split(sizes, dim=2))
        return order, w

    def from_slot(self, layer: int, order: Tensor) -> Tensor:
        """Which of the entries that are merged stood in a heavy or merged slot, (B, G, R).
        If compressed before, the cache was [front | merged | recent slots | segment]."""
        s = self.layer_settings[layer]
        # Until the first compression all tokens that were seen are held. The segment that
        # is about to enter does not count yet.
        compressed_before = self.keys[layer].size < self.seen
        places = order[:, :, s.front : order.shape[2] - s.recent]
        return (places < s.front + s.merged) & compressed_before

    def merge(
        self, layer: int, k: Tensor, v: Tensor, from_slot: Tensor, scores: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K', V' and w of the compressor, which has the same arguments. If the method has
        no merged slots, the entries are dropped."""
        if not self.layer_settings[layer].merged:
            return k[:, :, :0], v[:, :, :0], k.new_zeros(*k.shape[:2], 0, k.shape[2])
        compressor = self.compressors[layer]
        if self.recompute:
            return checkpoint(compressor, k, v, from_slot, scores, use_reentrant=False)
        return compressor(k, v, from_slot, scores)

    @staticmethod
    def new_scores(w: Tensor, front: Tensor, rest: Tensor, recent: Tensor) -> Tensor:
        """The scores of the M slots, from those of the entries, (B, G, entries) each. A
        merged slot gets the mean, by w, of the attention that its entries have received."""
        merged = (w.detach() * rest[:, :, None]).sum(dim=3)
        return torch.cat((front, merged, recent), dim=2)

    def new_places(self, layer: int, S: int, device: torch.device) -> Tensor:
        """For --positions slots: the new position of each of S entries, (S,), which are in
        order [front | rest | recent]. In the example of `compress` 0 | 0 0 0 0 0 | 3.

        What is kept gets the place of its slot. An entry that is merged gets place 0, so
        that (4) mixes keys that are not rotated.
        """
        s = self.layer_settings[layer]
        places = torch.zeros(S, device=device)
        places[: s.front] = torch.arange(s.front)
        places[S - s.recent :] = torch.arange(s.mem - s.recent, s.mem)
        return places

    def arrange(self, layer: int) -> Tensor:
        """The places of all entries in the cache, (B, G, S), in the order
        [front | rest | recent]. Each part is in the order of the cache."""
        s = self.layer_settings[layer]
        chosen = self.choose(layer)
        enough = chosen.sum(dim=2) == s.front
        assert enough.all(), f"Memory.choose must take {s.front} entries in each head"
        last = chosen[:, :, chosen.shape[2] - s.recent :]
        assert not last.any(), "Memory.choose must take none of the last entries"
        # What is chosen comes first. A stable sort keeps the order within both parts.
        return (~chosen).int().argsort(dim=2, stable=True)

    def choose(self, layer: int) -> Tensor:
        """Which entries the front keeps, a mask (B, G, S): the first ones in sinks, those
        that have received most attention in heavy slots.

        For another rule change this function. Each head must choose as many entries as
        the front has slots, and none of the last ones, which the recent slots keep.
        """
        s = self.layer_settings[layer]
        k = self.keys[layer].held
        chosen = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
        chosen[:, :, : s.sinks] = True
        if s.heavy:
            scores = self.scores[layer].masked_fill(chosen, -torch.inf)
            heaviest = scores[:, :, : k.shape[2] - s.recent].topk(s.heavy, dim=2).indices
            chosen.scatter_(2, heaviest, True)
        return chosen

    def move(self, k: Tensor, by: Tensor) -> Tensor:
        """Rotate keys (B, G, S, D) forward by `by` positions, (S,) or (B, G, S)."""
        return rotate(k, *rope(by / self.rope_scale, self.config))

    def mixing_matrix(self, layer: int, order: Tensor, w: Tensor) -> Tensor:
        """A layer's mixing matrix (B, G, M, S), as drawn above, from what `compress`
        returns. Only pictures and --show-memory need it."""
        s = self.layer_settings[layer]
        S = order.shape[2]
        merged = slice(s.front, s.front + s.merged)
        matrix = w.new_zeros(*w.shape[:2], s.mem, S)
        matrix[:, :, : s.front, : s.front] = torch.eye(s.front)
        matrix[:, :, merged, s.front : S - s.recent] = w
        matrix[:, :, s.mem - s.recent :, S - s.recent :] = torch.eye(s.recent)
        # Columns back in the order of the cache.
        columns = order[:, :, None].expand_as(matrix)
        return torch.zeros_like(matrix).scatter(3, columns, matrix)


# --- Segment loop (algorithm 2) ---------------------------------------------------------


def segment_losses(
    model: Llama, tokens: Tensor, cache: KVCache, segment: int, bptt: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through tokens (B, L) in pieces of `bptt` segments. For each piece yield the loss
    of every token in nats, and whether it was the likeliest one: both (B, bptt * segment),
    or fewer at the end. The first token of a text has no loss.

    `bptt` is the number of segments that one backward pass spans (backpropagation through
    time). With 1 the loss of a segment trains the compression that made room for it, and
    the entries that were compressed are constants. Call backward before asking for the next
    piece, as the graph is cut in between. The last target of a segment is the first token
    of the next.
    """
    pieces = tokens[:, :-1].split(bptt * segment, dim=1)
    piece_targets = tokens[:, 1:].split(bptt * segment, dim=1)
    for piece, targets in zip(pieces, piece_targets):
        nats, hits = [], []
        # One segment after the other: `model` compresses the cache when the next one enters.
        # Logits of one segment at a time take less memory than those of a whole piece.
        for x, y in zip(piece.split(segment, dim=1), targets.split(segment, dim=1)):
            logits = model(x, cache)
            loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            nats.append(loss.view_as(y))
            hits.append(logits.argmax(dim=-1) == y)
        yield torch.cat(nats, dim=1), torch.cat(hits, dim=1)
        cache.detach()


# --- Position interpolation (arXiv 2306.15595) ------------------------------------------


def interpolation(config: LlamaConfig, settings: Settings) -> float:
    """The number by which positions are divided, so that those of a text of L tokens
    (the settings' `length`) lie inside the pretrained context. A longer text may pass it.

    "interpolated" (the paper): a token's position in the text, which reaches L. "slots":
    its place in the cache, which never exceeds M + T. "original": its position in the text,
    divided as the checkpoint itself divides it.
    """
    if settings.positions == "original":
        return config.rope_scale
    highest = settings.length
    if settings.positions == "slots" and settings.mem:
        # A text that is shorter than M + T never fills the cache.
        highest = min(settings.room, settings.length)
    # The checkpoint may divide positions itself; they are never divided by less.
    return max(config.rope_scale, highest / config.context)


# --- LoRA (arXiv 2106.09685) ------------------------------------------------------------


class LoRALinear(nn.Module):
    """y = x W^T + (alpha / rank) (x A^T) B^T. W is frozen. B starts at zero, so that y is
    unchanged at the start."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.base, self.factor = base, alpha / rank
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        # A and B are in float32, also where the base is not.
        change = F.linear(F.linear(x.type_as(self.lora_a), self.lora_a), self.lora_b)
        return y + self.factor * change.type_as(y)


# --- Ours: budgets of layers ------------------------------------------------------------


def in_layer(settings: Settings, layer: int) -> Settings:
    """The settings of one layer. It has all sinks; the rest of its budget is divided among
    the kinds as it is at M. For example, with 24 heavy, 16 merged and 24 recent slots a
    budget of 30 gives 11, 7 and 11, and the one that is left over is heavy, too.

    Layers differ in how much of a long text they read, so that equal budgets waste slots
    (PyramidKV, arXiv 2406.02069). tools/budgets.py measures which layers need more. What it
    gains is in docs/real-llama.md.
    """
    if not settings.budgets:
        return settings
    M, sinks = settings.budgets[layer], settings.sinks  # as many sinks in every layer
    whole = max(1, settings.mem - sinks)
    divided = ("heavy", "merged", "recent")
    counts = {kind: (M - sinks) * getattr(settings, kind) // whole for kind in divided}
    largest = max(divided, key=counts.get)
    counts[largest] += M - sinks - sum(counts.values())  # what rounding has left over
    return replace(settings, budgets=[], **counts)


def check_budgets(settings: Settings) -> None:
    """Raises UserError if the budgets do not suit the other settings."""
    budgets = settings.budgets
    if not budgets:
        return
    if not settings.mem:
        raise UserError(f"--budgets: {settings.method} keeps everything and has no slots")
    # Positions by slot are alike in all layers, and layers with budgets differ in size.
    if settings.positions == "slots":
        needed = "they need positions of the text; add --positions interpolated"
        raise UserError(f"--budgets: {needed}")
    if sum(budgets) != len(budgets) * settings.mem:
        mean = f"their mean is {sum(budgets) / len(budgets):g}"
        raise UserError(f"--budgets: {mean}, but it must be {settings.mem}, as without them")
    layers = [in_layer(settings, layer) for layer in range(len(budgets))]
    # At least 4, as for --mem. Each layer has all sinks, and room for something else.
    too_few = min(budgets) < max(4, settings.sinks + 1) or settings.mem == settings.sinks
    if too_few or (settings.merged and min(s.merged for s in layers) == 0):
        few = f"{min(budgets)} slots are too few for {settings.method}"
        raise UserError(f"--budgets: {few}")


# --- Ours: compressors whose slots choose in order --------------------------------------

# AdamW changes all parameters equally fast. With this scale the shared filter learns three
# times as fast as the filters of single slots.
COMMON_SCALE = 3
# The next two were chosen on the embedded model, and are used on SmolLM2 as they are. In the
# embedded model, with positions by slot, the (centred) cosine of a fact that is told twice is
# 0.995, that of two facts 0.52. To the power of 32 these are 0.85 and 0. The penalty is so
# large that a slot hardly ever takes a copy, even where logits are 16 times larger.
POWER = 32
PENALTY = 1000
# At the start an entry with twice the attention gets 2^2 times the weight.
TRUST_SCALE = 2


class FactCompressor(Compressor):
    """Slots choose in order. Each prefers the most relevant entry that no earlier slot has
    taken. Of entries A, A' (a copy of A) and B, in this order of relevance, the first of two
    slots prefers A, and the second one B.

    `redundancy` finds the entry that each slot prefers, and `weights` lowers the logits of
    this entry and of its copies for the later slots. A slot still holds the mixture that its
    row of w says, a softmax. While the filters learn, this row is softer. Afterwards
    `sharpen` makes it nearly one-hot, so that a slot takes the entry that it prefers: the
    model cannot read a fact out of a mixture of several, and on the prose of a real Llama a
    choice loses less than a mixture (docs/real-llama.md).

    A common filter learns what is relevant. Each slot also has its own filter, which learns
    which of the relevant entries it prefers. Entries that already stand in a merged or
    heavy slot are judged by other filters, which learn to keep them. These are one tap wide,
    because neighbours in slots are no neighbours in the text. Without these filters one of
    two runs forgot its facts (docs/notebook.md).
    """

    def __init__(self, head_dim: int, slots: int, kernel: int):
        super().__init__(head_dim, slots, kernel)
        # For new entries: `conv` has a filter for each merged slot, and all share `common`.
        neighbours = torch.arange(kernel) != kernel // 2
        with torch.no_grad():
            self.conv.weight[:, :, neighbours] *= 0.02  # they hardly count at the start
        self.common = nn.Parameter(torch.zeros(1, 2 * head_dim, kernel))
        # The same two for entries that come from a slot, one tap wide.
        self.slot_filters = nn.Parameter(torch.randn(slots, 2 * head_dim, 1))
        self.slot_common = nn.Parameter(torch.zeros(1, 2 * head_dim, 1))

    def relevance(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        """How relevant each of R entries is for each slot: (N, slots, R)."""
        filters = self.conv.weight + COMMON_SCALE * self.common
        new = F.conv1d(entries, filters, padding="same")
        old_filters = self.slot_filters + COMMON_SCALE * self.slot_common
        old = old_filters[:, :, 0] @ entries  # one tap: much faster than conv1d on a CPU
        return torch.where(from_slot[:, None], old, new)

    def weights(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        """Ours instead of the ReLU and (7), with the same shapes. The logits are the
        relevance less a penalty for copies; a softmax makes each row sum to 1."""
        relevance = self.relevance(entries, from_slot, scores)
        return (relevance - PENALTY * redundancy(relevance, entries)).softmax(dim=-1)


@torch.no_grad()
def redundancy(relevance: Tensor, entries: Tensor) -> Tensor:
    """How much of each entry earlier slots have taken: relevance (N, slots, R), entries
    (N, 2D, R) -> (N, slots, R). It is about 0 if none has taken one like it, and about 1
    for each that has.

    This is maximal marginal relevance (Carbonell and Goldstein 1998). Choosing has no
    gradient; the filters learn through the softmax alone.
    """
    unit = F.normalize(entries - entries.mean(dim=-1, keepdim=True), dim=1)  # (N, 2D, R)
    cosines = (unit.mT @ unit).clamp(min=0)  # (N, R, R); an opposite is no copy
    taken = torch.zeros_like(relevance[:, :1])  # (N, 1, R)
    taken_before = []  # for each slot
    for row in relevance.split(1, dim=1):  # (N, 1, R)
        taken_before.append(taken)
        best = (row - PENALTY * taken).argmax(dim=-1, keepdim=True)  # (N, 1, 1)
        # The row of cosines of the best entry, (N, 1, R).
        taken = taken + cosines.gather(1, best.expand_as(row)) ** POWER
    return torch.cat(taken_before, dim=1)


class ScoredCompressor(FactCompressor):
    """For the text of a real Llama: slots that start from heavy hitters.

    The logarithm of the attention that an entry has received is added to the convolution's
    logits, and the filters are small at the start. So before training a slot is a mean of
    entries, weighted by about the square of their attention, without those that earlier
    slots have taken.
    """

    reads_scores = True

    def __init__(self, head_dim: int, slots: int, kernel: int):
        super().__init__(head_dim, slots, kernel)
        with torch.no_grad():
            self.conv.weight *= 0.1
            self.slot_filters *= 0.1
        self.trust = nn.Parameter(torch.ones(1))  # how much the attention received counts

    def prior(self, scores: Tensor) -> Tensor:
        """Attention received (N, R) -> its part of the relevance, which is alike for all
        slots: (N, 1, R)."""
        received = (scores + 1e-4).log()  # entries below 0.0001 are alike
        received = received - received.mean(dim=-1, keepdim=True)
        return TRUST_SCALE * self.trust * received[:, None]

    def relevance(self, entries: Tensor, from_slot: Tensor, scores: Tensor | None) -> Tensor:
        return super().relevance(entries, from_slot, scores) + self.prior(scores)


COMPRESSORS = {"paper": Compressor, "facts": FactCompressor, "scored": ScoredCompressor}

# --- All together: the adapted model, and its file --------------------------------------


class AdaptedLlama(nn.Module):
    """A base model and everything that trains on it. It changes the base in place. Run it as
    `adapted.model(tokens, cache)` with a `cache` of `adapted.cache()`; without a cache the
    model has full attention and knows nothing of the settings.

    Section 4.1 trains the compressors, embeddings, norms and LoRA (here on q, k, v and o,
    as in LongLoRA and the official code); with rank 0, the inference mode, the compressors
    alone. What trains requires a gradient. It is in float32, or small steps would be rounded
    away. (`end_training` rounds the embeddings, and nothing else.) Raises UserError if the
    budgets are not one for each layer.
    """

    def __init__(self, model: Llama, settings: Settings):
        super().__init__()
        self.settings = settings
        self.model = model.requires_grad_(False)
        self.recompute = False
        config = model.config
        if settings.budgets and len(settings.budgets) != config.n_layers:
            numbers = f"{len(settings.budgets)} numbers for {config.n_layers} layers"
            raise UserError(f"--budgets: there are {numbers}; give one for each")
        compressor = COMPRESSORS[settings.compressor]
        self.compressors = nn.ModuleList(
            compressor(config.head_dim, in_layer(settings, layer).merged, settings.kernel)
            for layer in range(config.n_layers if settings.merged else 0)
        ).to(model.norm.weight.device)
        if settings.lora_rank:  # context extension; without LoRA the base stays frozen
            for block in model.layers:
                for name in ("wq", "wk", "wv", "wo"):
                    linear = getattr(block.attention, name)
                    lora = LoRALinear(linear, settings.lora_rank, settings.lora_alpha)
                    setattr(block.attention, name, lora)
            for module in model.modules():
                if isinstance(module, (nn.Embedding, RMSNorm)):
                    module.float().requires_grad_(True)

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def end_training(self) -> None:
        """Give the embeddings the base's dtype. They may be the output matrix, too, and in
        float32 each call of the model would convert all of them. What the model computes
        stays the same, but small steps of further training would be rounded away."""
        self.model.tok_embeddings.to(self.model.layers[0].feed_forward.w1.weight.dtype)

    def recompute_in_backward(self) -> None:
        """Train with less memory and more time: the backward pass runs the layers, apart
        from attention, and the compressors again."""
        self.recompute = True
        for block in self.model.layers:
            block.recompute = True

    def cache(self, memory: Callable = Memory, plain: Callable = KVCache) -> KVCache:
        """An empty cache for one batch of sequences: of class `memory`, or `plain` if the
        method keeps all."""
        config = self.model.config
        if self.settings.mem:
            return memory(config, self.settings, self.compressors, self.recompute)
        return plain(config, interpolation(config, self.settings))


def untrained(model: Llama, method: str, mem: int, segment: int, **flags) -> AdaptedLlama:
    """A method that needs no training, on its base model. `flags` replace fields of its
    settings. Raises UserError."""
    changes = flags | {"lora_rank": 0}
    length = int(model.config.context * model.config.rope_scale)
    settings = settings_for(method, mem, segment, length, **changes)
    if settings.merged:
        command = f"python train.py --model MODEL --method {method} --data TEXTS --out RUN"
        quick = "--recipe inference takes minutes on a small Llama"
        missing = f"its convolution must be trained first: {command}, then take RUN; {quick}"
        raise UserError(f"--method {method}: {missing}")
    return AdaptedLlama(model, settings)


def warn_if_too_long(settings: Settings, tokens: int) -> None:
    """Print a warning if positions pass those that a memory is for. Positions in the text
    end at `tokens`, those in the cache at M + T."""
    by_slot = settings.positions == "slots" and settings.mem
    positions = min(tokens, settings.room) if by_slot else tokens
    if positions <= settings.length:
        return
    if settings.merged or settings.lora_rank:
        remedy = "train with a larger --seq"
        if settings.mem and not by_slot and not settings.budgets:
            remedy += ", or with --positions slots"
    elif settings.budgets:
        remedy = "take --positions slots instead of --budgets"
    elif by_slot:
        remedy = "take a smaller --mem or --segment"
    elif settings.mem:
        remedy = "--positions slots keeps them small"
    else:
        remedy = "--method h2o --mem 512 --positions slots keeps them small"
    reached = f"positions may reach {positions:,}, and the memory is for {settings.length:,}"
    print(f"warning: {settings.method}: {reached}; {remedy}", file=sys.stderr)


def identity(adapted: AdaptedLlama) -> dict:
    """The settings and a checksum of the base. The checksum covers the configuration and a
    sample of each frozen tensor. The sample is in bfloat16, so that --dtype does not
    matter."""
    config = adapted.model.config
    about = repr(config) + (repr(config.llama3_rope) if config.llama3_rope else "")
    frozen = {n: p.flatten() for n, p in adapted.named_parameters() if not p.requires_grad}
    some = {n: t[:: max(1, len(t) // 64)].bfloat16() for n, t in frozen.items()}
    return dict(settings=asdict(adapted.settings), base=checksum(some, about))


class Adapter(NamedTuple):
    """What a run directory of train.py holds."""

    settings: Settings
    tensors: dict[str, Tensor]  # what was trained, by name
    base: str  # the checksum of its base, see `identity`
    parts: list[str]  # the parts of its texts (support.text.PARTS) that it was trained on


def read_adapter(run: Path) -> Adapter:
    """Raises UserError."""
    if not (run / "adapter.safetensors").exists():
        sentence = "there is no adapter.safetensors; name a folder that train.py has made"
        if (run / "state.safetensors").exists():
            sentence = f"this run has not ended; to go on: {resume_command(run)}"
        raise UserError(f"{run}: {sentence}")
    tensors, about = read_file(run / "adapter.safetensors")
    try:
        settings = Settings(**about["settings"])
        base = about["base"]
    except (LookupError, TypeError) as error:
        raise UserError(f"{run}: its adapter is by another version ({error})") from None
    check_names(run, settings.method, settings.compressor)
    return Adapter(settings, tensors, base, about.get("parts", ["training"]))


def check_names(run: Path, method: str, compressor: str) -> None:
    """Raises UserError if a run's method or compressor is not here any more."""
    if method not in METHODS:
        known = f"lococo.METHODS has {', '.join(METHODS)}"
        raise UserError(f"{run}: its method {method!r} is unknown; {known}")
    if compressor not in COMPRESSORS:
        known = f"lococo.COMPRESSORS has {', '.join(COMPRESSORS)}"
        raise UserError(f"{run}: its compressor {compressor!r} is unknown; {known}")


def load_adapter(run: Path, model: Llama) -> AdaptedLlama:
    """Put the adapter of a run directory of train.py onto its base model, for reading and
    not for training. Raises UserError."""
    settings, tensors, base, _ = read_adapter(run)
    remedy = "give --model as in its training; an adapter of another version must be trained again"
    other = f"{run}: its adapter is for another base; {remedy}"
    if settings.budgets and len(settings.budgets) != model.config.n_layers:
        raise UserError(other)
    adapted = AdaptedLlama(model, settings)
    trained = adapted.trained()
    # The shapes are compared, too, as a tensor of another shape could be broadcast.
    stored = {name: t.shape for name, t in tensors.items()}
    needed = {name: p.shape for name, p in trained.items()}
    if stored != needed or identity(adapted)["base"] != base:
        raise UserError(other)
    for name, p in trained.items():
        p.data = tensors[name].to(p.device, copy=True)
    adapted.end_training()
    return adapted
