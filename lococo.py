"""LoCoCo: a long context in a fixed number of key/value slots, by a convolution.

This file is the paper (arXiv 2406.05317) and what it compares with. Later methods are in
files of their own, as rows of METHODS and subclasses of Memory. An entry is the key and
the value of a token in one head of a layer. A head holds at most M slots and a segment of
T tokens (the paper's B). Letters are those of model.py, and one more:

    R  entries that a compression merges or drops

Equation numbers are the paper's: (1) is `model.attention` or, where attention is counted,
`attention_weights` and `Memory.read`; (2) is `model.Attention.project`; (3) is
`Memory.compress`; (4) and (5) are `merge`; (6) and (7) are `Compressor.weights`.
docs/paper-to-code.md lists what departs.

Two matrices say how much of each entry goes into each slot:

    W  of (6), as the convolution gives it
    w  of (7): each row sums to 1

A place is an index in the cache. A position is what RoPE rotates by: with positions
"text" it is the token's index in the text, and with positions "slots" its place.

A method of your own is a row of METHODS, a compressor one of COMPRESSORS, a memory one of
MEMORIES. Put it into a new file, which adds it to these dictionaries.
"""

from dataclasses import dataclass
from typing import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import Entries, KVCache, Llama, LlamaConfig, RMSNorm
from model import attention, causal_mask, rotate, widened
from support.checks import check_choice, check_rows
from support.files import UserError

# --- Compressor (section 3.2.1) ---------------------------------------------------------


class Compressor(nn.Module):
    """A convolution says how much of each entry goes into each slot. The heads of a layer
    share it. `slots` is the number of merged slots, which it fills (see KINDS).

    One of your own is a subclass with other `weights`, and an entry of COMPRESSORS. It is
    made with the arguments below, once for each layer. All its parameters train at the
    rate of the convolutions.
    """

    # The program that fits its numbers, if training does not. Such a compressor is made also
    # if no slots are merged.
    fitted_by = ""
    recompute = False  # True: the backward pass merges again, to keep less in between

    def __init__(self, head_dim: int, slots: int, kernel: int, start: float):
        super().__init__()
        self.slots = slots
        # g of (6)
        self.conv = nn.Conv1d(2 * head_dim, slots, kernel, padding=kernel // 2, bias=False)
        # The scale of g cancels in (7). But the steps of AdamW do not grow with it: with a
        # larger `start` w changes more slowly.
        nn.init.normal_(self.conv.weight, std=start)

    def weights(self, entries: Tensor, received: Tensor | None) -> Tensor:
        """R entries that are merged, (N, 2D, R) of N = B * G heads -> w (N, slots, R).

        The entries are in float32. R differs from call to call. Each row of w must sum to
        1. The paper's compressor reads `entries` alone. `received` (N, R) is the attention
        that each entry has received (`Memory.received_after`), or None if it is not counted.
        """
        W = self.conv(entries)  # (6)
        # The paper "prepends a ReLU" and does not say to what. Here, as in the authors'
        # code, it follows the convolution. A row of zeros becomes a plain mean.
        w = W.relu() + 1e-9
        return w / w.sum(dim=-1, keepdim=True)  # (7)


COMPRESSORS = {"paper": Compressor}


def merge(
    compressor: Compressor, entries: Tensor, received: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Equations (4) and (5), after (6) and (7): entries [K, V] (B, G, R, 2D), and the
    attention `received` (B, G, R) -> [K', V'] (B, G, slots, 2D), and w (B, G, slots, R).

    All is computed in float32, as bfloat16 is too coarse for W, and K' and V' are rounded
    to the dtype of the entries. With positions of the text keys are mixed after their
    rotation, so that a mixed key has no single position; the paper does not discuss this.
    """
    with torch.autocast(entries.device.type, enabled=False):
        wide = widened(entries)
        received = None if received is None else received.flatten(0, 1)
        channels_first = wide.flatten(0, 1).mT  # (N, 2D, R), as a convolution reads them
        w = compressor.weights(channels_first, received).unflatten(0, entries.shape[:2])
        mixed = w @ wide  # [K', V'], so that (4) K' = w K and (5) V' = w V
        return mixed.type_as(entries), w


# --- Methods: what a memory of M slots holds --------------------------------------------

# Sinks keep the first tokens, heavy slots the entries that have received most attention,
# and recent slots the last tokens. The compressor fills the merged slots with the rest.
KINDS = ("sinks", "heavy", "merged", "recent")  # in their order in the cache

# A method is a function of M. It gives the fields of Settings (below) that it sets.
METHODS = {
    # What the paper compares with. `longlora` keeps all, as `full` does. It differs in how
    # it trains (support/programs/longlora.py).
    "full": lambda M: {},
    "longlora": lambda M: {},
    # StreamingLLM, here with M slots. The paper's table gives it 8 slots.
    "streaming": lambda M: dict(sinks=4, recent=M - 4, positions="slots"),
    # The paper does not say how H2O divides its slots; H2O's authors do it so.
    "h2o": lambda M: dict(heavy=M // 2, recent=M - M // 2),
    # The paper: alone, with StreamingLLM's sinks, and with H2O (sections 3.2.3 and 5.2).
    # Half of M for heavy slots is as in the authors' code (VITA-Group/LoCoCo).
    "lococo": lambda M: dict(merged=M),
    "lococo+sinks": lambda M: dict(sinks=4, merged=M - 4),
    "lococo+h2o": lambda M: dict(heavy=M // 2, merged=M - M // 2),
}


@dataclass(frozen=True)
class Settings:
    """All that a trained adapter depends on; `settings_for` makes one."""

    method: str
    segment: int  # the most tokens that enter together
    length: int  # L, tokens of a trained text; without training, the most that the base reads
    # How many slots there are of each of KINDS. Without merged slots the rest is dropped.
    sinks: int = 0
    heavy: int = 0
    merged: int = 0
    recent: int = 0
    positions: str = "text"  # or "slots", see `position_divisor`
    compressor: str = "paper"  # or another of COMPRESSORS; one may be a score of entries
    memory: str = "paper"  # or another of MEMORIES
    kernel: int = 21  # taps of the convolution; section 4.1
    start: float = 1.0  # standard deviation of its initial weights, as in the authors' code
    lora_rank: int = 8  # section 4.1
    lora_alpha: int = 16  # as in the authors' code; the paper names none
    # The attention received is multiplied by this in every `forget_in` tokens (0: in every
    # segment). 1, as in H2O, forgets nothing. 0, as in the authors' code, counts only the
    # queries that entered last.
    forget: float = 1.0
    forget_in: int = 0

    @property
    def pinned(self) -> int:
        """Sinks and heavy slots together, which `Memory.choose` fills."""
        return self.sinks + self.heavy

    @property
    def mem(self) -> int:
        """M, the slots of each key/value head in each layer; 0 if all entries are kept."""
        return self.sinks + self.heavy + self.merged + self.recent

    @property
    def largest(self) -> int:
        """The slots of the head that has most. Here all have M."""
        return self.mem

    @property
    def capacity(self) -> int:
        """M + `segment`, the most entries that a head with slots holds."""
        return self.mem + self.segment


def settings_for(method: str, mem: int, segment: int, length: int, **changes) -> Settings:
    """Settings from a row of METHODS at M = mem. Each of `changes`, such as `positions` or
    `lora_rank`, that is not None replaces a field. Raises UserError."""
    if method not in METHODS:
        raise UserError(f"method {method}: lococo.METHODS has {', '.join(METHODS)}")
    row = METHODS[method](mem)
    given = {name: value for name, value in changes.items() if value is not None}
    settings = Settings(method, segment, length, **row | given)
    counts = {kind: getattr(settings, kind) for kind in KINDS}
    # A row without slots keeps all entries. A row with merged slots needs at least one.
    fit = 0 < settings.mem <= mem and min(counts.values()) >= 0
    if (row and not fit) or ("merged" in row and settings.merged == 0):
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise UserError(f"method {method}, mem {mem}: {listed} slots do not fit; change mem")
    return settings


# --- Attention that can be seen (for H2O) -----------------------------------------------


def attention_weights(q: Tensor, k: Tensor) -> Tensor:
    """The softmax of equation (1), which fused attention does not return.

    The queries belong to the last T of the S entries: q (B, H, T, D), k (B, G, S, D) ->
    weights (B, G, H/G * T, S). The rows of a key/value head are the T queries of its
    first query head, then those of its next. The products q k have the dtype of q; the
    softmax and the weights are in float32.
    """
    T, S, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    q = q.unflatten(1, (-1, group)).flatten(2, 3) / q.shape[-1] ** 0.5  # (B, G, H/G * T, D)
    attention_logits = widened(q @ k.mT)
    if T > 1:  # a single token sees all entries
        # Only the last T columns are masked. `last` is a view: adding to it changes
        # attention_logits.
        last = attention_logits.unflatten(2, (group, T))[..., S - T :]
        last += causal_mask(T, T, last)
    return attention_logits.softmax(dim=-1)


# --- Memory (the body of the loop of algorithm 2) ---------------------------------------


class Memory(KVCache):
    """M slots and at most one segment of new entries in each layer and key/value head. The
    lists of keys, values and attention received have one item for each layer.

    When new tokens do not fit into a layer, a matrix of M rows and S columns turns its S
    entries into M slots. Each method is a choice of this matrix. Its one-hot rows copy
    entries, and are never built. For M = 4 and a segment of 3, with one heavy slot, two
    merged slots and one recent slot, let the entry at place 4 have received most attention.
    Then

        place      0  1  2  3   4  5  6
                     memory     segment
        heavy      .  .  .  .   1  .  .     kept: a one-hot row
        merged     w  w  w  w   .  w  .     from the convolution; the row sums to 1
        merged     w  w  w  w   .  w  .
        recent     .  .  .  .   .  .  1

    The convolution sees only the columns with a w, side by side: places 3 and 5 become
    neighbours. The paper does not say how heavy slots enter (6). Its (6) has the segment
    first, and this code the memory, as its tokens are older.
    """

    chooses_by_received = True  # if heavy slots are chosen by the attention received

    def __init__(self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList):
        super().__init__(config, position_divisor(config, settings))
        self.settings, self.compressors = settings, compressors
        self.counts_attention = settings.heavy > 0 and self.chooses_by_received
        # If a key's position is its place, it changes at each compression. So the key is
        # held without a rotation, and rotated whenever it is read.
        self.by_place = settings.positions == "slots"
        self.of_layer = self.settings_of_layers()
        self.keys = [Entries() for _ in self.of_layer]
        self.values = [Entries() for _ in self.of_layer]
        # The attention received, (B, G, S), which `read` counts.
        self.received: list[Tensor | None] = [None] * len(self.of_layer)

    def settings_of_layers(self) -> list[Settings]:
        """One item for each layer. Here all are the same."""
        return [self.settings] * self.config.n_layers

    def make_room(self, B: int, T: int) -> None:
        """Compress the layers into which T new tokens would not fit.

        Algorithm 2 compresses right after a segment. Here this waits until new tokens do not
        fit, so that their loss trains the compressor. With whole segments the slots are
        those of the paper. In decoding the paper compresses at every token, and this memory
        at every `segment` tokens.
        """
        super().make_room(B, T)
        segment = self.settings.segment
        assert T <= segment, f"{T} tokens at once, but at most {segment}: use generate.prefill"
        for layer, keys in enumerate(self.keys):
            if keys.size + T > self.of_layer[layer].capacity:  # M + `segment`
                self.compress(layer)

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        """The operator C of (3), steps 4 and 5 of algorithm 2: S entries become M slots,
        in one layer.

        In the example of the class, 7 entries become 4 slots:

            order       4 | 0 1 2 3 5 | 6    where each entry stood: pinned | rest | recent
            new slot    0 |   1   2   | 3    where it goes; the rest is mixed into two slots

        Each head has its own order. Pinned and recent entries are copied, and only w
        multiplies. Returns the order (B, G, S) and w (B, G, merged, R), which say what is
        in a slot.
        """
        s = self.of_layer[layer]
        k, v = self.keys[layer].held, self.values[layer].held
        received = self.received[layer]  # None if attention is not counted
        chosen = self.choose(layer, k, v, received)
        if k.shape[2] == self.seen:  # all tokens are held: nothing was compressed before
            check_choice(chosen, s.pinned, s.recent)
        # The places of all entries in the cache. A stable sort keeps the order of the cache
        # among the chosen entries, and among the others, so that recent ones stay last.
        order = (~chosen).byte().argsort(dim=2, stable=True)
        sizes = (s.pinned, k.shape[2] - s.pinned - s.recent, s.recent)
        entries = in_order(torch.cat((k, v), dim=-1), order)  # [K, V], (B, G, S, 2D)
        pinned, rest, recent = entries.split(sizes, dim=2)
        of_rest = None
        if received is not None:
            of_rest = in_order(received, order).split(sizes, dim=2)[1]
        merged, w = self.fill_merged(layer, rest, of_rest)
        # Two views of one tensor. The next append copies them.
        k, v = torch.cat((pinned, merged, recent), dim=2).chunk(2, dim=-1)
        if received is not None:
            received = numbers_of_slots(received, order, w, s)
        self.hold(layer, k, v, received)
        return order, w

    def fill_merged(
        self, layer: int, rest: Tensor, received: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """[K', V'] and w of the layer's compressor, for entries (B, G, R, 2D) and what they
        received, (B, G, R). If there are no merged slots, the entries are dropped."""
        if not self.of_layer[layer].merged:
            return rest[:, :, :0], rest.new_zeros(*rest.shape[:2], 0, rest.shape[2])
        compressor = self.compressors[layer]
        if compressor.recompute:
            return checkpoint(merge, compressor, rest, received, use_reentrant=False)
        return merge(compressor, rest, received)

    def hold(self, layer: int, k: Tensor, v: Tensor, received: Tensor | None) -> None:
        """Replace the keys and values that a layer holds, both (B, G, S, D), and the
        attention received (B, G, S)."""
        self.keys[layer] = Entries(k)
        self.values[layer] = Entries(v)
        self.received[layer] = received

    def choose(self, layer: int, k: Tensor, v: Tensor, received: Tensor | None) -> Tensor:
        """Which of the entries k and v (B, G, S, D) are pinned, a mask (B, G, S).

        For another rule override this function or `scores` in a subclass (see MEMORIES).
        Each head must choose `s.pinned` entries, and none of the last `s.recent` ones,
        which the recent slots keep. Here s are the settings of the layer.
        """
        s = self.of_layer[layer]
        chosen = torch.zeros(k.shape[:3], dtype=torch.bool, device=k.device)
        chosen[:, :, : s.sinks] = True
        if s.heavy:
            others = self.scores(layer, k, v, received).masked_fill(chosen, -torch.inf)
            heaviest = others[:, :, : k.shape[2] - s.recent].topk(s.heavy, dim=2).indices
            chosen.scatter_(2, heaviest, True)
        return chosen

    def scores(self, layer: int, k: Tensor, v: Tensor, received: Tensor | None) -> Tensor:
        """Heavy slots keep the entries with the highest scores, (B, G, S)."""
        return received

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As a KVCache does, or with its place in the cache as a token's position."""
        if not self.by_place:
            return super().attend(layer, q, k, v)
        self.keys[layer].append(k)
        self.values[layer].append(v)
        S, T = self.keys[layer].size, k.shape[2]
        places = torch.arange(S - T, S, device=k.device)
        return self.read(layer, rotate(q, *self.rotation(places)))

    def rotated_keys(self, layer: int) -> Tensor:
        """The keys as queries read them, (B, G, S, D)."""
        k = self.keys[layer].held
        if not self.by_place:
            return k
        return rotate(k, *self.rotation(torch.arange(k.shape[2], device=k.device)))

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Attend as a KVCache does, and count the attention that each entry receives."""
        k, v = self.rotated_keys(layer), self.values[layer].held
        if not self.counts_attention:
            return attention(q, k, v)
        shares = attention_weights(q, k)
        group = q.shape[1] // k.shape[1]  # H/G query heads
        self.received[layer] = self.received_after(layer, shares.detach(), group)
        output = shares.type_as(q) @ v  # (B, G, H/G * T, D)
        return output.unflatten(2, (group, -1)).flatten(1, 2)

    def received_after(self, layer: int, shares: Tensor, group: int) -> Tensor:
        """The attention that entries have received, (B, G, S), after T new tokens have
        attended to them. `shares` are their `attention_weights`, (B, G, group * T, S).

        Heavy hitters (H2O, arXiv 2306.14048) are the entries that have received most, in
        sum over all queries so far and as a mean of the `group` of query heads that share
        a key/value head. When T tokens enter, earlier attention is multiplied by `forget`
        ** (T / span), where the span is `forget_in`, or else a segment.
        """
        T = shares.shape[2] // group
        received = shares.sum(dim=2) / group
        if self.received[layer] is not None:
            span = self.settings.forget_in or self.settings.segment
            factor = self.settings.forget ** (T / span)
            received[:, :, :-T] += factor * self.received[layer]  # the older entries
        return received


def in_order(held: Tensor, order: Tensor) -> Tensor:
    """Entries (B, G, S, 2D), or what they received (B, G, S), in the order (B, G, S) of each
    head; faster than `gather`."""
    B, G = order.shape[:2]
    text = torch.arange(B, device=order.device)[:, None, None]
    head = torch.arange(G, device=order.device)[:, None]
    return held[text, head, order]


def numbers_of_slots(numbers: Tensor, order: Tensor, w: Tensor, s: Settings) -> Tensor:
    """A number of each entry (B, G, S), such as the attention that it has received -> one
    of each slot (B, G, M). `order` and w are what `Memory.compress` returns. The paper is
    silent: a merged slot gets the mean, by w, of the numbers of its entries."""
    sizes = (s.pinned, w.shape[3], s.recent)
    pinned, rest, recent = in_order(numbers, order).split(sizes, dim=2)
    merged = (w.detach() * rest[:, :, None]).sum(dim=3)
    return torch.cat((pinned, merged, recent), dim=2)


MEMORIES = {"paper": Memory}

# --- Segment loop (algorithm 2) ---------------------------------------------------------


def segment_losses(
    model: Llama, tokens: Tensor, cache: KVCache, segment: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read tokens (B, L) one segment after the other, into a cache that may hold earlier
    ones. For each segment yield the loss in nats of the token after each input, (B,
    segment), and the logits that predicted it, (B, segment, vocab_size).

    The graph grows with each segment until `cache.detach()` cuts it.
    """
    inputs = tokens[:, :-1].split(segment, dim=1)
    targets = tokens[:, 1:].split(segment, dim=1)
    for x, y in zip(inputs, targets):
        logits = model(x, cache)  # begins with Memory.make_room, which may compress
        nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        yield nats.view_as(y), logits


# --- Position interpolation (arXiv 2306.15595) ------------------------------------------


def position_divisor(config: LlamaConfig, settings: Settings) -> float:
    """The number by which positions are divided, so that those of a text of L tokens (the
    settings' `length`) lie inside the pretrained context. A base that stays frozen keeps
    its own divisor, as it cannot learn other positions.

    "text" (the paper): a token's position in the text, which reaches L. "slots": its place
    in the cache, which never exceeds M + T of the largest head.
    """
    if not settings.lora_rank:  # the base stays frozen
        return config.rope_scale
    highest = settings.length
    if settings.positions == "slots" and settings.mem:
        highest = min(settings.largest + settings.segment, settings.length)
    # The checkpoint may divide positions itself; they are never divided by less.
    return max(config.rope_scale, highest / config.context)


# --- LoRA (arXiv 2106.09685) ------------------------------------------------------------


class LoRALinear(nn.Module):
    """y = x W^T + (alpha / rank) (x A^T) B^T. W is frozen. B starts at zero, so that y is
    unchanged at the start."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.base, self.factor = base, alpha / rank
        # In float32, also where the base is not.
        dtype = torch.promote_types(base.weight.dtype, torch.float32)
        kind = dict(dtype=dtype, device=base.weight.device)
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, **kind))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, **kind))
        nn.init.kaiming_uniform_(self.lora_a, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        change = F.linear(F.linear(x.type_as(self.lora_a), self.lora_a), self.lora_b)
        return y + self.factor * change.type_as(y)


# --- All together: the adapted model ----------------------------------------------------


class AdaptedLlama(nn.Module):
    """A base model and everything that trains on it. Run it as `adapted.model(tokens,
    cache)` with a `cache` of `adapted.cache()`. `train()` and `eval()` are for compressors
    of your own, with dropout for instance. `adapted.model` is a Llama of its own on the
    weights of `model`, which stays as it is and may be adapted again.

    For context extension section 4.1 trains the compressors, LoRA, embeddings and norms.
    LoRA is here on q, k, v and o, as in LongLoRA and the authors' code. In the inference
    mode (`lora_rank` 0) the compressors train alone. What trains requires a gradient. It
    is in float32, or small steps would be rounded away. Raises UserError if the base or a
    compressor cannot be used so.
    """

    def __init__(self, model: Llama, settings: Settings):
        super().__init__()
        if any(isinstance(module, LoRALinear) for module in model.modules()):
            raise UserError("this model is adapted already, with LoRA; give the base itself")
        self.settings = settings
        config = model.config
        with torch.device("meta"):  # shapes without numbers
            self.model = Llama(config)
        self.model.load_state_dict(model.state_dict(), assign=True)  # nothing is copied
        self.model.sample = model.sample  # by which an adapter's file knows its base
        self.model.requires_grad_(False)
        compressor_class = COMPRESSORS[settings.compressor]
        needed = settings.merged > 0 or compressor_class.fitted_by != ""
        layers = self.model.layers if needed else []
        arguments = config.head_dim, settings.merged, settings.kernel, settings.start
        with torch.device("cpu"):  # so that training on a GPU starts from the same numbers
            compressors = [compressor_class(*arguments) for _ in layers]
        like = widened(model.norm.weight[:0])  # an empty tensor on the device
        self.compressors = nn.ModuleList(compressors).to(like)
        if settings.lora_rank:  # context extension; without LoRA the base stays frozen
            self.tune_base()
        cache = self.cache()  # which raises UserError if its memory does not suit the base
        if settings.merged:
            check_rows(self.compressors[0], config.head_dim, cache.counts_attention, like)

    def tune_base(self) -> None:
        """Put LoRA on q, k, v and o, and let embeddings and norms train."""
        for block in self.model.layers:
            for name in ("wq", "wk", "wv", "wo"):
                linear = getattr(block.attention, name)
                lora = LoRALinear(linear, self.settings.lora_rank, self.settings.lora_alpha)
                setattr(block.attention, name, lora)
        for module in self.model.modules():
            if isinstance(module, (nn.Embedding, RMSNorm)):
                own = widened(module.weight.detach()).clone()  # the base's stays as it is
                module.weight = nn.Parameter(own)

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def recompute_in_backward(self) -> None:
        """Train with less of the machine's memory and more time: the backward pass runs
        the layers, apart from attention, and the compressors again."""
        for module in (*self.model.layers, *self.compressors):
            module.recompute = True

    def cache(self, memory_class: Callable | None = None) -> KVCache:
        """An empty cache for one batch of sequences. If there are slots, its class is
        that of the settings, or another one."""
        config = self.model.config
        if self.settings.mem:
            memory_class = memory_class or MEMORIES[self.settings.memory]
            return memory_class(config, self.settings, self.compressors)
        return KVCache(config, position_divisor(config, self.settings))
