"""LoCoCo: a long context in a fixed number of key/value slots, by a small convolution.

In the order of the paper (arXiv 2406.05317), with its equation numbers: what a memory keeps, the
compressor (section 3.2.1), the memory and the segment loop (algorithm 2), position interpolation,
LoRA. Letters as in model.py. The paper's W of (6) is called logits here, that of (7) is w.
"""

import math
from dataclasses import dataclass
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model import KVCache, Llama, LlamaConfig, RMSNorm, UserError, causal_mask, rope, rotate

# --- Methods: what a memory of M slots holds -----------------------------------------------------

METHODS = {
    "full": lambda M: {},
    "streaming": lambda M: dict(sinks=4, recent=M - 4, positions="slots"),
    "h2o": lambda M: dict(heavy=M // 2, recent=M - M // 2),
    "lococo": lambda M: dict(merged=M),
    "lococo+sinks": lambda M: dict(sinks=4, merged=M - 4),
    "lococo+h2o": lambda M: dict(heavy=M // 2, merged=M - M // 2),
    "lococo+window": lambda M: dict(
        sinks=4, merged=min(M // 2, 16), recent=M - min(M // 2, 16) - 4, positions="slots"
    ),
}
COUNTS = ("sinks", "heavy", "merged", "recent")
POSITIONS = ("interpolated", "original", "slots")  # see `interpolation`


@dataclass(frozen=True)
class Settings:
    """All that a trained adapter depends on; `settings_for` makes one."""

    method: str
    segment: int  # T
    length: int  # L that it is trained for, in tokens
    sinks: int = 0  # slots that keep the first tokens
    heavy: int = 0  # slots that keep the entries that have received most attention
    merged: int = 0  # slots that the convolution fills; without any, all other entries are dropped
    recent: int = 0  # slots that keep the last tokens
    positions: str = "interpolated"
    kernel: int = 21  # taps of the convolution
    normalise: str = "sum"  # form of the Compressor: "sum", equation (7), or "softmax"
    lora_rank: int = 8
    lora_alpha: int = 16

    @property
    def mem(self) -> int:
        """M, slots in each layer and key/value head; 0 if all entries are kept."""
        return self.sinks + self.heavy + self.merged + self.recent


def settings_for(method: str, mem: int, segment: int, length: int, **changes) -> Settings:
    """A row of METHODS at M = mem. `changes` that are not None replace fields. What is left of M
    goes to merged slots, in a row without them to recent ones. Raises UserError."""
    row = METHODS[method](mem)
    given = {name: value for name, value in changes.items() if value is not None}
    fills = "merged" if "merged" in row else "recent"
    counts = {name: (row | given).get(name, 0) for name in COUNTS}
    if row and fills not in given:
        counts[fills] += mem - sum(counts.values())
    total = sum(counts.values())
    fits = (0 < total <= mem) if row else total == 0
    if not fits or min(counts.values()) < 0 or ("merged" in row and counts["merged"] == 0):
        raise UserError(f"--method {method} --mem {mem}: {counts} slots do not fit")
    if given.get("kernel", 21) % 2 == 0:
        raise UserError(f"--kernel {given['kernel']}: it must be odd, to have a middle")
    return Settings(method, segment, length, **row | given | counts)


# --- Compressor (section 3.2.1) ------------------------------------------------------------------


class Compressor(nn.Module):
    """The convolution of section 3.2.1 mixes S entries into a few slots. A layer's heads share it.

    "sum" is the paper's form, a filter for each slot. "softmax" is ours and remembers facts. Three
    times its filter 0, which says what is worth a slot, is added to all others, which say which
    slot takes it. What was merged before has one-tap filters of its own: neighbours in the cache
    are not those in the text. The rows of w are made in turn: each avoids copies of what those
    before it took. In use, not in training, doubled logits make the rows sharper: a slot that holds
    half of one fact and half of another gives back neither."""

    def __init__(self, head_dim: int, slots: int, kernel: int, normalise: str):
        super().__init__()
        self.normalise = normalise
        filters = slots if normalise == "sum" else 1 + slots
        self.conv = nn.Conv1d(2 * head_dim, filters, kernel, padding=kernel // 2, bias=False)  # g
        nn.init.normal_(self.conv.weight)  # as the official code starts
        if normalise == "softmax":  # at the start neighbours and filter 0 hardly count
            self.held = nn.Conv1d(2 * head_dim, filters, 1, bias=False)  # for merged_before
            nn.init.normal_(self.held.weight)
            self.conv.weight.data[:, :, torch.arange(kernel) != kernel // 2] *= 0.02
            self.conv.weight.data[0] = self.held.weight.data[0] = 0.0

    def forward(self, k: Tensor, v: Tensor, merged_before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, G, S, D) -> K' and V' (B, G, slots, D), and w (B, G, slots, S), whose
        row i says how much of each entry slot i takes. S is without the entries that are kept.
        merged_before (B, G, S): those that come from a merged or heavy slot."""
        entries = torch.cat((k, v), dim=-1).float().flatten(0, 1).transpose(1, 2)  # (B * G, 2D, S)
        logits = self.conv(entries).float()  # (6): (B * G, filters, S)
        if self.normalise == "softmax":
            logits = torch.where(merged_before.flatten(0, 1)[:, None], self.held(entries), logits)
            logits = (1 if self.training else 2) * (logits[:, 1:] + 3 * logits[:, :1])
            unit = F.normalize(entries - entries.mean(dim=-1, keepdim=True), dim=1).detach()
            rows, taken = [], 0.0
            for row in logits.split(1, dim=1):  # (B * G, 1, S)
                rows.append((row - 40 * taken).softmax(dim=-1))
                slot = F.normalize(rows[-1].detach() @ unit.mT, dim=-1)  # (B * G, 1, 2D)
                taken = taken + (slot @ unit) ** 32  # near 0 but for (opposite) copies
            w = torch.cat(rows, dim=1)
        else:
            w = logits.relu() + 1e-9  # a row of zeros becomes a plain mean
            w = w / w.sum(dim=-1, keepdim=True)  # (7)
        w = w.unflatten(0, k.shape[:2]).type_as(k)  # (B, G, slots, S)
        return w @ k, w @ v, w  # (4), (5)


@torch.no_grad()
def attention_received(q: Tensor, k: Tensor) -> Tensor:
    """How much attention S entries receive from the last T queries (H2O, arXiv 2306.14048):
    q (B, H, T, D), k (B, G, S, D) -> (B, G, S), the sum over queries, the mean over the query heads
    of a key/value head. Computed again, as fused attention does not return its weights."""
    q = q.unflatten(1, (k.shape[1], -1))  # (B, G, H/G, T, D)
    logits = q @ k[:, :, None].transpose(-1, -2) / q.shape[-1] ** 0.5
    mask = causal_mask(q.shape[3], k.shape[2], q.device)
    weights = logits.float().masked_fill(~mask, -torch.inf).softmax(dim=-1)  # (B, G, H/G, T, S)
    return weights.sum(dim=3).mean(dim=2)


# --- Memory (algorithm 2) ------------------------------------------------------------------------


class Memory(KVCache):
    """M slots and at most one segment of new entries in each layer.

    When the next segment does not fit, S entries become M slots by K' = W K and V' = W V. Every
    method is a W. Its columns are in order of time; (6) writes the segment before the memory.
    For M = 4 and T = 3, with one sink, two merged slots and one recent token:

                     memory     segment
        sink       1  .  .  .   .  .  .     kept: a one-hot row
        merged     .  w  w  w   w  w  .     a row of w, from the convolution; it sums to 1
        merged     .  w  w  w   w  w  .
        recent     .  .  .  .   .  .  1
    """

    def __init__(self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList):
        super().__init__(config)
        self.settings, self.compressors = settings, compressors
        self.scores: list[Tensor | None] = [None] * config.n_layers  # attention received, (B, G, S)

    def enter(self, T: int) -> int:
        """Make room for T tokens; return the position of the first one. What is held is compressed
        only now, in the graph of the next segment: so its loss trains the convolution."""
        assert T <= self.settings.segment
        if self.size + T > self.settings.mem + self.settings.segment:
            for layer in range(self.config.n_layers):
                self.compress(layer)
        first = super().enter(T)
        return self.size if self.settings.positions == "slots" else first

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        read = super().attend(layer, q, k, v)
        if self.settings.heavy:
            received = attention_received(q, self.keys[layer])
            if self.scores[layer] is not None:
                received[:, :, : -k.shape[2]] += self.scores[layer]  # of the older entries
            self.scores[layer] = received
        return read

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        """The operator C of (3), steps 4 and 5: the layer's S entries (B, G, S, D) become M slots.
        Returns `order` (B, G, S) and w, from which `mixing_matrix` makes W."""
        s, k, v = self.settings, self.keys[layer], self.values[layer]
        S, front = k.shape[2], s.sinks + s.heavy
        rest = S - front - s.recent
        order = self.order(layer)
        k = k.gather(2, order[..., None].expand_as(k))
        v = v.gather(2, order[..., None].expand_as(v))
        if s.positions == "slots":
            # A key's position is its place in the cache. What is kept moves to its new place. All
            # else moves to position 0: the convolution reads and mixes keys that are not rotated.
            slots = torch.arange(s.mem, device=k.device)
            place = torch.zeros(S, device=k.device)
            place[:front] = slots[:front]
            place[S - s.recent :] = slots[s.mem - s.recent :]
            k = self.move(k, place - order)  # `order` is the old place
        # Otherwise keys are mixed as they are, each rotated by its position in the text.
        k_front, k_rest, k_recent = k.split((front, rest, s.recent), dim=2)
        v_front, v_rest, v_recent = v.split((front, rest, s.recent), dim=2)
        if s.merged:
            # If compressed before, the cache is [front | merged slots | recent slots | segment].
            merged_before = (order[:, :, front : front + rest] < front + s.merged) & (S < self.seen)
            k_new, v_new, w = self.compressors[layer](k_rest, v_rest, merged_before)
        else:
            k_new, v_new = k_rest[:, :, :0], v_rest[:, :, :0]
            w = k.new_zeros(*k.shape[:2], 0, rest)
        if s.positions == "slots":
            k_new = self.move(k_new, slots[front : front + s.merged])
        self.keys[layer] = torch.cat((k_front, k_new, k_recent), dim=2)
        self.values[layer] = torch.cat((v_front, v_new, v_recent), dim=2)
        if s.heavy:  # a slot inherits the attention that its entries have received
            W = self.mixing_matrix(order, w.detach())
            self.scores[layer] = (W * self.scores[layer][:, :, None]).sum(dim=3)
        return order, w

    def order(self, layer: int) -> Tensor:
        """The entries as [sinks and heavy | rest | recent], each part in time order, (B, G, S)."""
        s, S = self.settings, self.keys[layer].shape[2]
        part = torch.ones_like(self.keys[layer][..., 0])  # 0 sinks and heavy, 1 rest, 2 recent
        part[:, :, : s.sinks] = 0
        part[:, :, S - s.recent :] = 2
        if s.heavy:
            scores = self.scores[layer].masked_fill(part != 1, -torch.inf)
            part.scatter_(2, scores.topk(s.heavy, dim=2).indices, 0)
        return part.argsort(dim=2, stable=True)

    def mixing_matrix(self, order: Tensor, w: Tensor) -> Tensor:
        """All of W, (B, G, M, S), as drawn above, from what `compress` returns."""
        s, S = self.settings, order.shape[2]
        front = s.sinks + s.heavy
        W = w.new_zeros(*w.shape[:2], s.mem, S)
        W[:, :, :front, :front] = torch.eye(front)
        W[:, :, front : front + s.merged, front : S - s.recent] = w
        W[:, :, s.mem - s.recent :, S - s.recent :] = torch.eye(s.recent)
        # Columns back in the order of the cache.
        return torch.zeros_like(W).scatter(3, order[:, :, None].expand_as(W), W)

    def move(self, k: Tensor, by: Tensor) -> Tensor:
        """Rotate keys (B, G, S, D) forward by `by` positions, (S,) or (B, G, S)."""
        return rotate(k, *rope(by / self.scale, self.config))


# --- Segment loop (algorithm 2) ------------------------------------------------------------------


def segment_losses(
    model: Llama, tokens: Tensor, cache: KVCache, segment: int, bptt: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Nats of each token of (B, L) after the first, and whether it was the likeliest one, both
    (B, <= bptt * segment) at a time. Call backward before asking for the next: the graph spans
    `bptt` segments, then it is cut. A segment's last target is the first token of the next."""
    inputs = tokens[:, :-1].split(segment, dim=1)
    targets = tokens[:, 1:].split(segment, dim=1)
    losses, right = [], []
    for n, (x, y) in enumerate(zip(inputs, targets), start=1):
        logits = model(x, cache)
        nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        losses.append(nats.view_as(y))
        right.append(logits.argmax(dim=-1) == y)
        if n % bptt == 0 or n == len(inputs):
            yield torch.cat(losses, dim=1), torch.cat(right, dim=1)
            losses, right = [], []
            cache.detach()


@torch.no_grad()
def prefill(model: Llama, tokens: Tensor, cache: KVCache, segment: int) -> Tensor:
    """Read tokens (B, L) into the cache by segments; float32 logits (B, V) of what comes next."""
    for x in tqdm(tokens.split(segment, dim=1), "reading", leave=False, delay=2, disable=None):
        h = model.hidden(x, cache)
    return model.output(h[:, -1]).float()


# --- Position interpolation (arXiv 2306.15595) ---------------------------------------------------


def interpolation(config: LlamaConfig, settings: Settings) -> float:
    """The number by which positions are divided so that all lie inside the pretrained context.
    "interpolated" (the paper): a token's position in the text, which reaches L. "slots": its place
    in the cache, which never exceeds M + T. "original": the base's own positions."""
    L = settings.length
    held = settings.mem + settings.segment if settings.mem else L
    reach = {"interpolated": L, "slots": min(held, L), "original": 0}[settings.positions]
    return max(config.rope_scale, reach / config.context)  # rope_scale: the checkpoint's own


# --- LoRA (arXiv 2106.09685) ---------------------------------------------------------------------


class LoRALinear(nn.Module):
    """y = x W^T + (alpha / rank) (x A^T) B^T; W is frozen. B starts at zero: y starts unchanged."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        device = base.weight.device
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, device=device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


# --- All together --------------------------------------------------------------------------------


class LoCoCo(nn.Module):
    """A base model with the method dropped in. What trains is what requires a gradient (section
    4.1): the compressors and, with LoRA on q, k, v, o, also embeddings and norms. With rank 0, the
    paper's inference mode, the base stays as it is. What trains is float32 whatever the base is,
    so that small steps are not rounded away."""

    def __init__(self, model: Llama, settings: Settings):
        super().__init__()
        self.settings = settings
        self.model = model.requires_grad_(False)
        config, device = model.config, model.norm.weight.device
        self.compressors = nn.ModuleList(
            Compressor(config.head_dim, settings.merged, settings.kernel, settings.normalise)
            for _ in range(config.n_layers if settings.merged else 0)
        ).to(device)
        if settings.lora_rank:
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

    def cache(self, memory: type = Memory) -> KVCache:
        """An empty memory, or plain cache where all is kept, for one batch of sequences."""
        config, settings = self.model.config, self.settings
        cache = memory(config, settings, self.compressors) if settings.mem else KVCache(config)
        cache.scale = interpolation(config, settings)
        return cache
