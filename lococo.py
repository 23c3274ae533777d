"""LoCoCo: a long context in a fixed number of key/value slots, by a small convolution (arXiv 2406.05317).

In the paper's order: what a memory keeps (the table of methods), the compressor (section 3.2), the memory,
the segment loop (section 3.3), position interpolation, LoRA, what trains, and the files that are written.
Letters as in model.py. Left out on purpose: everything distributed.

Where the paper and its own code (VITA-Group/LoCoCo) differ, this follows the paper unless it is told otherwise: weights
are ReLU / sum (equation 8), without a learnt blend, and the first segment's keys and values keep their gradient. The
code's softmax of the ReLU, its blend and its scores can be set, and so can what measured better here (README.md).
Compression is lazy, as in the code; unlike there, decoding compresses only when a whole segment has gathered: at
every token it would cost many times the model.
"""

import functools
import hashlib
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Iterator, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from model import KVCache, Llama, LlamaConfig, UserError, attend, rope, rotate

# --- Methods -------------------------------------------------------------------------------------------------

ALL = "all"  # every token there is
HALF = "half"  # of the memory
REST = "rest"  # as many as there is room for


class Method(NamedTuple):
    """What a memory of M slots holds, in this order: [sinks | heavy | merged | recent]. All else is dropped."""

    sinks: int | str  # the first tokens, kept as they are
    heavy: int | str  # the entries that have received most attention, kept as they are, chosen by each head
    recent: int | str  # the last tokens, kept as they are
    merge: bool  # the convolution mixes what is not kept into the remaining slots
    positions: str  # "interpolated" (original ones, divided by a factor), "original", "slots" (the place in the cache)
    groups: bool = False  # while training, whole sequences at once, attention within shifted groups


METHODS = {
    #                       sinks heavy recent  merge  positions
    "full": Method(           ALL,    0,     0, False, "interpolated"),
    "streaming": Method(        4,    0,  REST, False, "slots"),
    "h2o": Method(              0, HALF,  REST, False, "interpolated"),
    "lococo": Method(           0,    0,     0, True,  "interpolated"),
    "lococo+sinks": Method(     4,    0,     0, True,  "interpolated"),
    "lococo+h2o": Method(       0, HALF,     0, True,  "interpolated"),
    "longlora": Method(       ALL,    0,     0, False, "interpolated", groups=True),
}  # fmt: skip
POSITIONS = ("interpolated", "original", "slots")
NORMALISE = ("sum", "softmax-relu", "softmax")  # logits to weights: equation 8, the official code, neither
SCORES = ("sum", "mean", "last")  # of attention: all of it (H2O), per query that could see, the last segment's (code)


@dataclass(frozen=True)
class Settings:
    """All that a trained adapter depends on, stored in its file. Make one with `Settings.of`."""

    method: str
    mem: int | None  # M, slots per layer and key/value head; None: no limit
    sinks: int
    heavy: int
    merged: int  # slots that the convolution fills
    recent: int
    positions: str
    segment: int  # T
    length: int  # L that it is trained for, in tokens
    kernel: int
    filters: int  # output channels of the convolution
    depthwise: bool
    normalise: str
    blend: float | None
    score: str
    lora_rank: int
    lora_alpha: int = 16

    @staticmethod
    def of(method: str, mem: int, segment: int, length: int, sinks: int | None = None, heavy: int | None = None,
           recent: int | None = None, positions: str | None = None, kernel: int = 21, normalise: str = "sum",
           blend: float | None = None, score: str = "sum", lora_rank: int = 8,
           filters: int | None = None, depthwise: bool = False) -> "Settings":  # fmt: skip
        """A row of METHODS, with counts and positions that are given in place of its own; a filter per merged slot.

        What eviction does not keep takes no slot: `streaming` with 8 sinks and nothing recent has M = 8.
        Raises UserError for what makes no sense.
        """
        if method not in METHODS:
            raise UserError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
        for name, value, least in (("mem", mem, 1), ("filters", filters or 0, 0)):
            if value < least:
                raise UserError(f"--{name} {value}: at least {least} is needed")
        row = METHODS[method]
        common = dict(method=method, positions=positions or row.positions, segment=length if row.groups else segment,
                      length=length, kernel=kernel, depthwise=depthwise, normalise=normalise, blend=blend, score=score,
                      lora_rank=lora_rank)  # fmt: skip
        if row.sinks == ALL:
            if sinks or heavy or recent:
                raise UserError(f"--method {method} keeps everything: --sinks, --heavy, --recent do not go with it")
            return Settings(mem=None, sinks=0, heavy=0, merged=0, recent=0, filters=0, **common)
        sinks = row.sinks if sinks is None else sinks
        heavy = row.heavy if heavy is None else heavy
        heavy = mem // 2 if heavy == HALF else heavy
        recent = row.recent if recent is None else recent
        recent = max(mem - sinks - heavy, 0) if recent == REST else recent
        room = mem - sinks - heavy - recent
        if room < row.merge:
            left = " with a slot left to merge into" if row.merge else ""
            raise UserError(f"--sinks {sinks}, --heavy {heavy}, --recent {recent} do not fit into --mem {mem}{left}")
        merged = room if row.merge else 0
        filters = (filters or merged) if row.merge else 0
        mem = sinks + heavy + merged + recent
        return Settings(mem=mem, sinks=sinks, heavy=heavy, merged=merged, recent=recent, filters=filters, **common)

    def __post_init__(self):
        for name, known in (("positions", POSITIONS), ("normalise", NORMALISE), ("score", SCORES)):
            if getattr(self, name) not in known:
                raise UserError(f"unknown {name} {getattr(self, name)!r}; there are {', '.join(known)}")
        for name, value, least in (("segment", self.segment, 1), ("seq", self.length, 2), ("sinks", self.sinks, 0),
                                   ("heavy", self.heavy, 0), ("recent", self.recent, 0),
                                   ("lora-rank", self.lora_rank, 0)):  # fmt: skip
            if value < least:
                raise UserError(f"--{name} {value}: at least {least} is needed")
        if self.length < self.segment:
            raise UserError(f"--seq {self.length} is shorter than one segment; --segment is {self.segment}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise UserError(f"--kernel {self.kernel}: an odd size is needed, so that it is centred on an entry")
        if self.merged and self.merged % self.filters:
            raise UserError(f"--filters {self.filters}: each fills equally many of the {self.merged} slots")
        if self.mem == 0:
            raise UserError(f"--method {self.method} with --sinks 0, --heavy 0 and --recent 0 keeps nothing")

    @property
    def scored(self) -> bool:
        """Whether the memory must know how much attention each entry has received."""
        return self.heavy > 0 or (self.blend is not None and self.merged > 0)


# --- Compressor (section 3.2) --------------------------------------------------------------------------------


class Compressor(nn.Module):
    """Equations 6 to 8: one convolution over the cache says how S entries mix into a few slots.

    Its input has 2D channels, an entry's key and value. The paper has one filter (output channel) per slot, and every
    slot mixes all entries: 2D * slots * kernel weights, 22.0 M in 32 layers of 7B at 128 slots and kernel 21. With
    fewer filters (ours) the entries are cut into slots / filters pieces, in time order, and each filter
    fills one slot from every piece. `depthwise` (ours) is a cheaper convolution: a kernel for each channel, then one
    weight for each channel and filter. All heads of a layer share the kernel.
    """

    def __init__(self, head_dim: int, slots: int, kernel: int, normalise: str = "sum", blend: float | None = None,
                 filters: int | None = None, depthwise: bool = False):  # fmt: skip
        super().__init__()
        self.normalise, self.slots = normalise, slots
        self.gate = None if blend is None else nn.Parameter(torch.tensor([float(blend)]))
        channels, filters = 2 * head_dim, filters or slots
        # 1.0 as the official code: with its softmax a slot starts as little more than one entry, chosen at random.
        # With the plain softmax it starts near the mean of its piece.
        std = 0.02 if normalise == "softmax" else 1.0
        if depthwise:
            per_channel = nn.Conv1d(channels, channels, kernel, padding=kernel // 2, groups=channels)
            self.convs = nn.ModuleList((per_channel, nn.Conv1d(channels, filters, 1)))
            nn.init.normal_(per_channel.weight)
        else:
            self.convs = nn.ModuleList((nn.Conv1d(channels, filters, kernel, padding=kernel // 2),))
        nn.init.normal_(self.convs[-1].weight, std=std)

    def forward(self, k: Tensor, v: Tensor, score: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (B, G, S, D) -> those of the slots, K' = W K and V' = W V, (B, G, slots, D), and W, detached.

        W comes in blocks, see `weights`.
        """
        x = torch.cat((k, v), dim=-1)  # (B, G, S, 2D)
        y = convolve(self.convs[0], x.flatten(0, 1))  # heads join the batch
        if not torch.is_grad_enabled() or (self.normalise == "softmax" and self.gate is None):
            return self.slots_of(y, x, score)  # a softmax needs only W for its backward pass
        # Equation 8 and a blend would keep several steps as large as W: what follows the first convolution, which is
        # cheap, runs again in the backward pass.
        return checkpoint(self.slots_of, y, x, score, use_reentrant=False, preserve_rng_state=False)

    def slots_of(self, y: Tensor, x: Tensor, score: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """`forward` from the first convolution's outcome y (B * G, channels, S) on; x (B, G, S, 2D) gets mixed."""
        for conv in self.convs[1:]:
            y = convolve(conv, y.transpose(1, 2))
        logits = y.float().contiguous().view(*x.shape[:2], -1, x.shape[2])
        w = self.weights(logits, score).type_as(x)
        k, v = x.chunk(2, dim=-1)
        return mix(w, k), mix(w, v), w.detach()

    def weights(self, logits: Tensor, score: Tensor | None) -> Tensor:
        """Logits (B, G, filters, S) -> W; every row sums to 1, by division (equation 8) or by a softmax.

        A slot mixes the entries of one piece, so W is zero outside of blocks (B, G, pieces, filters, n); these are
        returned. With a blend (the official code's, not in the paper) W is mixed with one-hot rows that keep the
        entries of the highest score (B, G, S), by a learnt gate: 0 would be plain eviction. Then all of W is one block.
        """
        S = logits.shape[3]
        if self.normalise != "softmax":
            logits = logits.relu()  # zeros keep a weight of exp(0) in the official code
        if self.normalise == "sum":
            logits = logits + 1e-9  # all logits 0: a plain mean
        nothing = 0.0 if self.normalise == "sum" else -torch.inf  # has weight 0
        pieces = self.slots // logits.shape[2]
        logits = in_pieces(logits.transpose(2, 3), pieces, nothing).transpose(3, 4)  # (B, G, pieces, filters, n)
        w = logits / logits.sum(-1, keepdim=True) if self.normalise == "sum" else logits.softmax(-1)
        if self.gate is None:
            return w
        best = score.topk(self.slots, dim=-1).indices.sort(dim=-1).values
        return ((1 - self.gate) * F.one_hot(best, S) + self.gate * dense(w, S))[:, :, None]


def in_pieces(x: Tensor, count: int, nothing: float = 0.0) -> Tensor:
    """Entries (B, G, S, N) in time order -> (B, G, count, n, N): pieces of n = S / count neighbours.

    Where S is no multiple, n is rounded up, and the last place of a shorter piece holds `nothing`.
    """
    S = x.shape[2]
    if S % count == 0:  # no copy
        return x.unflatten(2, (count, -1))
    piece = torch.arange(count, device=x.device)[:, None]
    entry = (piece * S + count - 1) // count + torch.arange(-(-S // count), device=x.device)
    entry = torch.where(entry * count // S == piece, entry, S)  # entry s belongs to piece s * count // S
    return F.pad(x, (0, 0, 0, 1), value=nothing)[:, :, entry]


def mix(w: Tensor, x: Tensor) -> Tensor:
    """W x: entries (B, G, S, N) -> (B, G, slots, N), by the blocks w (B, G, pieces, filters, n) of W."""
    x = in_pieces(x, w.shape[2])  # (B, G, pieces, n, N)
    if w.shape[3] == 1:  # many tiny products: quicker as sums, of x's dtype also under a GPU's autocast
        return (w.transpose(3, 4) * x).sum(3, dtype=x.dtype)
    return (w @ x).flatten(2, 3)


def dense(w: Tensor, S: int) -> Tensor:
    """W (B, G, slots, S) with its zeros, from its blocks (B, G, pieces, filters, n)."""
    # The last place of a shorter piece says entry 0, with weight 0; only the first piece, never short, has that entry.
    entry = in_pieces(torch.arange(S, device=w.device).view(1, 1, S, 1), w.shape[2]).transpose(3, 4)
    return w.new_zeros(*w.shape[:4], S).scatter(4, entry.expand_as(w), w).flatten(2, 3)


def convolve(conv: nn.Conv1d, x: Tensor) -> Tensor:
    """conv over entries x (N, S, C) -> (N, filters, S), in the way that was quickest on a CPU (no GPU measured)."""
    (filters, channels, kernel), pad = conv.weight.shape, conv.padding[0]
    if filters * kernel <= channels:
        # P, every entry times every tap: no more numbers than x has. Output s is the sum over the taps t of
        # P[s + t - pad, t], a diagonal, and diagonals are what `fold` adds up.
        products = conv.weight.flip(2).transpose(1, 2).flatten(0, 1) @ x.transpose(1, 2)  # (N, filters * kernel, S)
        sums = F.fold(products.float(), (1, x.shape[1]), (1, kernel), padding=(0, pad))
        return sums[:, :, 0] + conv.bias[:, None]
    exact = x.is_cpu and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
    if exact and conv.groups == 1 and min(filters, kernel) > 16:  # a GPU is made for products, bfloat16 too coarse
        return Fourier.apply(x, conv.weight) + conv.bias[:, None]
    # Over an image of one row, whose channels may lie last as they do in x: no copy.
    x, weight = x.transpose(1, 2)[:, :, None], conv.weight[:, :, None]
    return F.conv2d(x, weight, conv.bias, padding=(0, pad), groups=conv.groups)[:, :, 0]


class Fourier(torch.autograd.Function):
    """A convolution of same padding with fewer multiplications: nothing of LoCoCo, skip it at first.

    The spectrum of a convolution is the product of the spectra. `NEW` outputs at a time need a window of n = NEW +
    kernel - 1 entries. At each of its f frequencies a window is one complex number a + ib per channel, a filter c + id,
    and their product is three real ones (Gauss): p = ac, q = bd, r = (a + b)(c + d), (p - q) + i(r - p - q); but just p
    at the lowest and the highest, which are real. So for each pair of channel and filter there are R = 3f - 4 products
    (77 at kernel 21) where taps times outputs were 672. Going there and back is linear: y = B ((A x) (G w)) with
    constant matrices A, G, B (no batch, no heads), and one matrix product over the channels for each of the R rows. It
    rounds as the largest entry of a window demands; where entries are of one size, about as Conv1d. The backward pass
    is by hand, to keep x and w for it instead of spectra.
    """

    NEW = 32
    FILTERS = 32  # at a time, so that their spectra stay in a core's cache

    @staticmethod
    @functools.cache
    def matrices(kernel: int) -> tuple[Tensor, Tensor, Tensor]:
        """A (R, n), G (R, kernel) and B (NEW, R), for windows of n entries; rows for p, for q and for r."""
        n = Fourier.NEW + kernel - 1
        wave = torch.fft.rfft(torch.eye(n, dtype=torch.float64, device="cpu"), dim=0)  # (f, n)
        a, b, c, d = wave.real, wave.imag, wave.real, -wave.imag  # w's is conjugate, as taps look forward
        one = torch.eye(len(wave), dtype=torch.float64, device="cpu")
        # What the real and the imaginary part of a frequency give to the outputs, (n, f): re (p - q) + im (r - p - q).
        re, im = torch.fft.irfft(one, n, dim=0), torch.fft.irfft(1j * one, n, dim=0)
        A, G = torch.cat((a, b, a + b)), torch.cat((c, d, c + d))[:, :kernel]
        B = torch.cat((re - im, -re - im, im), dim=1)[: Fourier.NEW]
        used = A.any(dim=1) & B.any(dim=0)  # not q and r of the real frequencies; n is even, so the highest is real
        return A[used].float(), G[used].float(), B[:, used].float()

    @staticmethod
    def spectrum(x: Tensor, kernel: int) -> Tensor:
        """Entries (N, S, C) -> A x, (R, N windows, C)."""
        A, _, _ = Fourier.matrices(kernel)
        x = F.pad(x, (0, 0, kernel // 2, kernel // 2 + -x.shape[1] % Fourier.NEW))
        x = x.unfold(1, A.shape[1], Fourier.NEW)  # (N, windows, C, n)
        return (A @ x.permute(3, 0, 1, 2).flatten(1)).unflatten(1, (-1, x.shape[2]))

    @staticmethod
    def convolve(x: Tensor, w: Tensor) -> Tensor:
        """Entries (N, S, C) and taps (filters, C, kernel) -> (N, filters, S)."""
        (N, S, _), (_, C, kernel) = x.shape, w.shape
        (_, G, B), X, parts = Fourier.matrices(kernel), Fourier.spectrum(x, kernel), []
        for some in w.split(Fourier.FILTERS):
            W = (G @ some.flatten(0, 1).T).view(-1, len(some), C)  # (R, filters, C)
            y = B @ (X @ W.transpose(1, 2)).flatten(1)
            parts.append(y.view(Fourier.NEW, N, -1, len(some)))  # (NEW, N, windows, filters)
        return torch.cat(parts, dim=3).permute(1, 3, 2, 0).flatten(2)[..., :S]

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return Fourier.convolve(x, w)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # float32, as it is in `forward`
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (x, w), dx, dw = ctx.saved_tensors, None, None
        _, C, kernel = w.shape
        if ctx.needs_input_grad[0]:  # what an entry gave to the outputs around it, it gets back: taps in reverse
            dx = Fourier.convolve(dy.transpose(1, 2), w.transpose(0, 1).flip(2)).transpose(1, 2)
        if ctx.needs_input_grad[1]:  # the three matrices, transposed
            (_, G, B), X, parts = Fourier.matrices(kernel), Fourier.spectrum(x, kernel), []
            dy = F.pad(dy, (0, -dy.shape[2] % Fourier.NEW)).unflatten(2, (-1, Fourier.NEW))
            for some in dy.split(Fourier.FILTERS, dim=1):  # (N, filters, windows, NEW)
                dY = (B.T @ some.permute(3, 0, 2, 1).flatten(1)).unflatten(1, (-1, some.shape[1]))
                dW = dY.transpose(1, 2) @ X  # (R, N windows, filters) and (R, N windows, C) -> (R, filters, C)
                parts.append((G.T @ dW.flatten(1)).view(kernel, -1, C))
            dw = torch.cat(parts, dim=1).permute(1, 2, 0)
        return dx, dw


# --- Attention received, by which heavy entries are chosen (H2O, arXiv 2306.14048) ----------------------------


def take(x: Tensor, place: Tensor) -> Tensor:
    """Entries (B, G, S, D) at indices (B, G, N) -> (B, G, N, D)."""
    return x.gather(2, place[..., None].expand(*place.shape, x.shape[-1]))


@torch.no_grad()
def attention_received(q: Tensor, k: Tensor, queries_at_once: int = 128) -> Tensor:
    """The attention of the last T of S entries, summed over them: q (B, H, T, D), k (B, G, S, D) -> (B, G, S, 2).

    The last axis: attention that an entry received, and the number of queries that could see it. Query heads that
    share a key/value head are averaged (H2O has no such heads). Float32, some of the T at a time.
    """
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    q, k = q.float().view(B, G, H // G, T, D), k.float()[:, :, None].transpose(-1, -2) / D**0.5
    received = torch.zeros(B, G, S, device=k.device)
    with torch.autocast(q.device.type, enabled=False):
        for t in range(0, T, queries_at_once):
            logits = q[:, :, :, t : t + queries_at_once] @ k  # (B, G, H/G, queries, S)
            future = torch.ones(logits.shape[-2:], dtype=torch.bool, device=k.device).triu(S - T + t + 1)
            received += logits.masked_fill(future, -torch.inf).softmax(dim=-1).sum(dim=-2).mean(dim=2)
    queries = (S - torch.arange(S, device=k.device)).clamp(max=T).expand_as(received)
    return torch.stack((received, queries), dim=-1)


def ranking(scores: Tensor, kind: str) -> Tensor:
    """Scores (B, G, S, 2) -> what heavy entries are chosen by, (B, G, S); a plain sum favours old entries."""
    return scores[..., 0] / scores[..., 1] if kind == "mean" else scores[..., 0].clone()


# --- Memory --------------------------------------------------------------------------------------------------


class Memory(KVCache):
    """At most M slots and one segment of new entries per layer (the cache that model.py's attention talks to).

    Before a segment enters that would not fit, each layer maps its S entries to M: K' = W K, V' = W V, where
    the rows of W are one-hot for what is kept and come from the compressor for what is merged. This happens
    lazily, at the start of the next segment, so that its loss trains the convolution (section 3.3).
    """

    def __init__(self, config: LlamaConfig, settings: Settings, compressors: nn.ModuleList):
        super().__init__(config.n_layers)
        self.config, self.settings, self.compressors = config, settings, compressors
        self.make_room = False
        self.scores: list[Tensor | None] = [None] * config.n_layers  # (B, G, S, 2), see `attention_received`

    def begin(self, T: int) -> int:
        s = self.settings
        if T > s.segment:
            raise UserError(f"{T} tokens at once, but a segment has {s.segment}: see segment_losses and prefill")
        self.make_room = self.held + T > s.mem + s.segment
        slot = s.mem if self.make_room else self.held
        start = super().begin(T)
        return slot if s.positions == "slots" else start

    def room(self, entries: int) -> int:
        return self.settings.mem + self.settings.segment

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """[memory | segment], which the segment attends to; what was held has become M slots if there was no room."""
        if self.make_room:
            self.write(layer, 0, *self.compress(layer, self.keys[layer], self.values[layer]))
        return super().update(layer, k, v)

    @torch.no_grad()
    def settle(self) -> None:
        """Compress now, if more than M entries are held, instead of when the next segment does not fit."""
        if self.held > self.settings.mem:
            for layer in range(len(self.keys)):
                self.write(layer, 0, *self.compress(layer, self.keys[layer], self.values[layer]))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = self.update(layer, k, v)
        if self.settings.scored:
            before, now = self.scores[layer], attention_received(q, k)
            if before is not None and self.settings.score != "last":
                now[:, :, : before.shape[2]] += before
            self.scores[layer] = now
        return attend(q, k, v)

    def compress(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values (B, G, S, D) -> (B, G, M, D)."""
        s, S, score = self.settings, k.shape[2], None
        parts = (s.sinks + s.heavy, S - s.sinks - s.heavy - s.recent, s.recent)
        place = torch.arange(S, device=k.device)  # where the entries of [sinks, heavy | rest | recent] are now
        if s.scored:
            place = self.heavy_first(layer)
            k, v = take(k, place), take(v, place)
            if s.blend is not None:
                score = ranking(take(self.scores[layer], place), s.score)[:, :, parts[0] : S - s.recent]
        slot = torch.arange(s.mem, device=k.device)
        first, new, last = slot.split((parts[0], s.merged, s.recent))
        if s.positions == "slots":  # what is kept moves to its slot, the rest to position 0: it is mixed unrotated
            k = self.turn(k, torch.cat((first, slot.new_zeros(parts[1]), last)) - place)
        k_kept, k_rest, k_recent = k.split(parts, dim=2)
        v_kept, v_rest, v_recent = v.split(parts, dim=2)
        if s.merged:
            k_new, v_new, w = self.compressors[layer](k_rest, v_rest, score)
        else:
            k_new, v_new, w = k_rest[:, :, :0], v_rest[:, :, :0], v.new_zeros(*v.shape[:2], 1, 0, parts[1])
        if s.positions == "slots" and s.merged:
            k_new = self.turn(k_new, new)
        self.follow(layer, place, w)
        return torch.cat((k_kept, k_new, k_recent), dim=2), torch.cat((v_kept, v_new, v_recent), dim=2)

    def follow(self, layer: int, place: Tensor, w: Tensor) -> None:
        """What is known of the entries goes the way of their keys and values."""
        if self.settings.scored:
            self.scores[layer] = self.carry(self.scores[layer], place, w)

    def carry(self, x: Tensor, place: Tensor, w: Tensor) -> Tensor:
        """Whatever belongs to the entries, (B, G, S, N) -> (B, G, M, N): W x, as K' = W K."""
        s, S = self.settings, x.shape[2]
        x = take(x, place.expand(x.shape[:3]))
        kept, rest, recent = x.split((s.sinks + s.heavy, S - s.sinks - s.heavy - s.recent, s.recent), dim=2)
        with torch.autocast(x.device.type, enabled=False):
            return torch.cat((kept, mix(w.float(), rest), recent), dim=2)

    def heavy_first(self, layer: int) -> Tensor:
        """Indices (B, G, S) of [sinks and heavy | rest | recent], each in time order."""
        s = self.settings
        rank = ranking(self.scores[layer], s.score)
        rank[:, :, : s.sinks], rank[:, :, rank.shape[2] - s.recent :] = torch.inf, -torch.inf
        chosen = torch.zeros_like(rank, dtype=torch.bool)
        chosen.scatter_(2, rank.topk(s.sinks + s.heavy, dim=-1).indices, True)
        return chosen.logical_not().byte().sort(dim=-1, stable=True).indices

    def turn(self, k: Tensor, by: Tensor) -> Tensor:
        """Move keys (B, G, S, D) by so many positions, (S,) or (B, G, S): rotations compose."""
        return rotate(k, *rope(by, self.config))

    def fork(self) -> "Memory":
        other = super().fork()
        other.scores = list(self.scores)
        return other


# --- Segment loop (section 3.3) ------------------------------------------------------------------------------


def segment_losses(model: Llama, tokens: Tensor, cache: KVCache, segment: int, bptt: int = 1) -> Iterator[Tensor]:
    """Nats of each token of (B, L) after the first: (B, <= bptt * segment) at a time (algorithm 1).

    The target of a segment's last token is the first one of the next, so nothing is lost at the seams. Call
    backward on a piece before asking for the next: its graph reaches back over its own segments only (the paper: one).
    """
    pairs = list(zip(tokens[:, :-1].split(segment, dim=1), tokens[:, 1:].split(segment, dim=1)))
    for n in range(0, len(pairs), bptt):
        yield torch.cat([F.cross_entropy(model(x, cache).flatten(0, 1), y.flatten(), reduction="none").view_as(y)
                         for x, y in pairs[n : n + bptt]], dim=1)  # fmt: skip
        cache.detach()


@torch.no_grad()
def prefill(model: Llama, tokens: Tensor, cache: KVCache, segment: int) -> Tensor:
    """Read tokens (B, L) into the cache segment by segment; float32 logits (B, V) of what comes next (algorithm 2)."""
    for x in tokens.split(segment, dim=1):
        h = model.hidden(x, cache)
    return model.output(h[:, -1]).float()


# --- Position interpolation (arXiv 2306.15595) ---------------------------------------------------------------


def interpolation(config: LlamaConfig, settings: Settings) -> float:
    """The factor s by which positions are divided, so that the farthest one in use is inside the pretrained context.

    Interpolated positions reach L; positions by slot never exceed M + T, whatever L; original ones are left alone.
    """
    if settings.positions == "original":
        return config.rope_scale
    by_slot = settings.positions == "slots" and settings.mem is not None
    reach = settings.mem + settings.segment if by_slot else settings.length
    return max(config.rope_scale, reach / config.context)  # a base that is interpolated already stays so


# --- LoRA (arXiv 2106.09685) ---------------------------------------------------------------------------------


class LoRALinear(nn.Module):
    """y = x W^T + (alpha / rank) (x A^T) B^T with W frozen; B starts at zero, so y starts unchanged to the bit."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features, device=base.weight.device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=base.weight.device))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


LORA_TARGETS = ("wq", "wk", "wv", "wo")


def add_lora(model: Llama, rank: int, alpha: int) -> None:
    for block in model.layers:
        for name in LORA_TARGETS:
            setattr(block.attention, name, LoRALinear(getattr(block.attention, name), rank, alpha))


@torch.no_grad()
def remove_lora(model: Llama, merge: bool) -> None:
    """Put the plain linear layers back, with the trained difference added to their weights or without it."""
    for block in model.layers:
        for name in LORA_TARGETS:
            lora = getattr(block.attention, name)
            if merge:
                lora.base.weight += (lora.scale * lora.lora_b @ lora.lora_a).type_as(lora.base.weight)
            setattr(block.attention, name, lora.base)


# --- All together --------------------------------------------------------------------------------------------


def whole(t: Tensor) -> Tensor:
    """A tensor that may be in parts, one in each process (train.py --shard): all of them must ask for it."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def fingerprint(model: Llama) -> str:
    """A name for a base model: its configuration and 64 values of each tensor, whatever dtype it is loaded in."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, p in model.named_parameters():
        sample = whole(p.detach()).flatten()[:: max(1, p.numel() // 64)][:64].to("cpu", torch.bfloat16)
        digest.update(f"{name} {tuple(p.shape)}".encode() + sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


class LoCoCo:
    """A base model with the method dropped in: compressors beside it, LoRA and interpolation inside it.

    The model stays an ordinary Llama: `model(segment, lococo.cache())` goes through the memory. What trains is
    float32 whatever the base's dtype, so that small steps are not rounded away; run the model under autocast then.
    """

    def __init__(self, model: Llama, settings: Settings):
        self.model, self.settings = model, settings
        self.base, self.base_config = fingerprint(model), model.config
        self.adapter: str | None = None  # checksum of the file that it was loaded from
        model.config = replace(model.config, rope_scale=interpolation(model.config, settings))
        self.compressors = nn.ModuleList(
            Compressor(model.config.head_dim, settings.merged, settings.kernel, settings.normalise, settings.blend,
                       settings.filters, settings.depthwise)
            for _ in range(model.config.n_layers if settings.merged else 0)
        ).to(model.norm.weight.device)  # fmt: skip
        self.originals = {}  # embeddings and norms as the base has them, for `remove`
        if settings.lora_rank:
            add_lora(model, settings.lora_rank, settings.lora_alpha)
            for group in ("embeddings", "norms"):
                for name, p in self.groups()[group].items():
                    self.originals[name] = p.data
                    p.data = p.data.to(torch.float32, copy=True)

    def cache(self) -> KVCache:
        """An empty cache of this method, for one batch of sequences."""
        if self.settings.mem is None:
            return KVCache(self.model.config.n_layers)
        return Memory(self.model.config, self.settings, self.compressors)

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """What trains and what an adapter file holds: group -> name -> parameter (section 4.1).

        Without LoRA (the paper's inference mode) these are the compressors alone: the base stays as it is.
        """
        groups = {"compressors": {f"compressors.{n}": p for n, p in self.compressors.named_parameters()}}
        if self.settings.lora_rank:
            named = dict(self.model.named_parameters())
            groups["LoRA"] = {n: p for n, p in named.items() if "lora_" in n}
            groups["embeddings"] = {n: p for n, p in named.items() if n.startswith("tok_embeddings")}
            groups["norms"] = {n: p for n, p in named.items() if "norm" in n}
        return {group: tensors for group, tensors in groups.items() if tensors}

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """`groups` without the groups."""
        return {name: p for tensors in self.groups().values() for name, p in tensors.items()}

    def start_training(self) -> None:
        """Freeze the base, all but `groups`."""
        self.model.requires_grad_(False)
        for p in self.named_parameters().values():
            p.requires_grad_(True)

    def remove(self) -> Llama:
        """Take compressors, LoRA, interpolation and tuned tensors out again: the base, to the bit."""
        if self.settings.lora_rank:
            remove_lora(self.model, merge=False)
        for name, value in self.originals.items():
            self.model.get_parameter(name).data = value
        self.model.config = self.base_config
        return self.model

    def save(self, file: Path | None) -> None:
        """The tensors of `groups` as an adapter file; None for a process that only adds its parts."""
        tensors = {name: whole(p.detach()).cpu() for name, p in self.named_parameters().items()}
        if file:
            write_file(file, "adapter", tensors, settings=asdict(self.settings), base=self.base)

    @staticmethod
    def load(path: str | Path, model: Llama, **expected) -> "LoCoCo":
        """Put the adapter of a run directory (or file) onto its base; `expected` settings must be the file's."""
        file = adapter_file(path)
        tensors, about = read_file(file, "adapter")
        settings = Settings(**about["settings"])
        for key, value in expected.items():
            if getattr(settings, key) != value:
                raise UserError(f"{file}: trained with {key} {getattr(settings, key)}, not {value}")
        if about["base"] != fingerprint(model):
            raise UserError(f"{file}: made for another base model (fingerprint {about['base']}, "
                            f"this model has {fingerprint(model)})")  # fmt: skip
        lococo = LoCoCo(model, settings)
        lococo.adapter = about["sha256"]
        own = lococo.named_parameters()
        if {n: p.shape for n, p in own.items()} != {n: t.shape for n, t in tensors.items()}:
            raise UserError(f"{file}: its tensors are not those of its settings; was the code changed since?")
        with torch.no_grad():
            for name, p in own.items():
                p.copy_(tensors[name])
        return lococo


# --- Files ---------------------------------------------------------------------------------------------------
# Adapters, the state of a run and saved memories are safetensors files with a JSON object about them. Its `sha256`
# is of the whole file, the digest itself counted as zeros: a file with a changed byte anywhere is not used.

ZEROS = b"0" * 64
SEAL = re.compile(rb'sha256\\": \\"([0-9a-f]{64})\\"')  # JSON in a string of the header's JSON


def write_file(file: Path, kind: str, tensors: dict[str, Tensor], **about) -> None:
    """Write beside, sync, rename: `file` is either the old one or the new one, never half of it.

    Raises UserError when that fails (a full disk, say), with the old file as it was.
    """
    tensors = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
    about = json.dumps({"kind": kind, **about, "sha256": ZEROS.decode()})
    data = memoryview(save(tensors, metadata={"format": "pt", "lococo": about}))
    size = 8 + int.from_bytes(data[:8], "little")  # of the header, whose order varies: sorted, equal files are equal
    head = json.dumps(json.loads(bytes(data[8:size])), sort_keys=True).encode()
    head += b" " * (-len(head) % 8)
    head = len(head).to_bytes(8, "little") + head
    digest = hashlib.sha256(head)
    digest.update(data[size:])
    head = head.replace(ZEROS, digest.hexdigest().encode(), 1)
    part = file.with_name(f"{file.name}.part")
    try:
        with open(part, "wb") as out:
            out.write(head)
            out.write(data[size:])
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise UserError(f"{file}: cannot be written ({error.strerror}); what was there is untouched") from None


def read_file(file: Path, kind: str) -> tuple[dict[str, Tensor], dict]:
    """(tensors by name, what the file says of itself) of a file of `write_file`, whole or not at all."""
    try:
        with open(file, "rb") as data:
            size = data.read(8)
            head = size + data.read(min(int.from_bytes(size, "little"), file.stat().st_size))
            seal = SEAL.search(head)
            if seal is None:
                raise ValueError("no checksum in it")
            digest = hashlib.sha256(head[: seal.start(1)] + ZEROS + head[seal.end(1) :])
            while piece := data.read(1 << 20):
                digest.update(piece)
        if digest.hexdigest().encode() != seal[1]:
            raise ValueError("its checksum does not match")
        with safe_open(file, framework="pt") as handle:
            about = json.loads(handle.metadata()["lococo"])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not a file of this program, or damaged ({error})") from None
    if about["kind"] != kind:
        raise UserError(f"{file}: a file of kind {about['kind']}, not {kind}")
    return tensors, about


def adapter_file(path: str | Path) -> Path:
    file = Path(path) / "adapter.safetensors" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"{path}: no adapter there (a run directory of train.py holds adapter.safetensors)")
    return file
