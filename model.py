"""Llama-2 in plain PyTorch: the model, its cache, and how official weights are loaded.

Read this file first. It is an ordinary Llama-2 (arXiv 2307.09288), with switches for
other models: `tied` (SmolLM2, Llama 3.2), `llama3_rope` (Llama 3.1 and 3.2), `qkv_bias`
and `turned` (ChatGLM3). LoCoCo plugs in at one place, the cache: the model tells it how
many tokens come (`make_room`), and each block hands q, k and v to `cache.attend`. The
cache decides where tokens stand (RoPE) and what is kept. The KVCache below keeps every
entry; the Memory of lococo.py keeps M slots. Equation numbers are those of the LoCoCo
paper. Its Q, K and V have a column for each token, and ours a row.

Letters:

    B  texts in a batch
    T  tokens that enter in one call of the model: a segment, which the paper calls B, or
       fewer; in "M + T" a whole segment
    S  entries in the cache
    M  slots of a memory
    H  query heads
    G  key/value heads
    D  channels of a head
    L  tokens of a whole text; the paper's tables swap L and T
    N  the B * G heads of all texts, which a compressor treats as one batch
"""

import copy
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.files import FOREIGN, UserError, read_given, read_tensors
from support.tokenizer import Tokenizer
from support.weights import blamed_on, check_numbers, checked, config_file, has_own_output
from support.weights import hugging_face_fields, hugging_face_weights, meta_fields
from support.weights import meta_shards, weight_files


@dataclass(frozen=True)
class LlamaConfig:
    dim: int
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G; fewer than H is grouped-query attention (70B)
    ffn_dim: int
    vocab_size: int = 32000
    norm_eps: float = 1e-5
    context: int = 4096  # pretrained length, in tokens
    rope_theta: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by this (position interpolation)
    tied: bool = False  # the embeddings are the output matrix, too
    qkv_bias: bool = False  # True for ChatGLM3 (tools/chatglm3.py)
    # The share of a head's channel pairs (i, i + D/2) that are rotated, from the first pair
    # on; ChatGLM3: 0.5.
    turned: float = 1.0
    # The checksum by which an adapter knows its base includes this class's repr. A new
    # field needs `repr=False`, or stored adapters seem to be of another base.
    llama3_rope: "Llama3Rope | None" = field(default=None, repr=False)

    def __post_init__(self):
        check_numbers(self)
        unequal = self.dim % self.n_heads or self.n_heads % self.n_kv_heads
        if unequal or self.head_dim % 2:
            heads = f"{self.n_heads} heads, {self.n_kv_heads} of keys and values"
            raise ValueError(f"dim {self.dim} and {heads}, do not fit together")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def longest(self) -> int:
        """The most tokens of a text that the base reads well."""
        return round(self.context * self.rope_scale)


def widened(t: Tensor) -> Tensor:
    """t in float32, if its own dtype is narrower. bfloat16 is too coarse for sums and
    angles."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


# --- Rotary positions (arXiv 2104.09864) ------------------------------------------------


def rope(positions: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Positions (..., T) -> cosine and sine of position * theta^(-2i/d) for channel pair i,
    each (..., T, D/2).

    d = turned * D channels rotate, which is usually all D. Pairs from d/2 on have angle 0.
    Angles are in float32, as bfloat16 cannot tell position 256 from 257.
    """
    d = config.turned * config.head_dim
    twice_i = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = config.rope_theta ** (-twice_i / d)
    frequency = frequency.masked_fill(twice_i >= d, 0)  # these pairs are not turned
    if config.llama3_rope:
        frequency = config.llama3_rope.slowed(frequency)
    angle = positions[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pair (i, i + D/2) of x (B, heads, T, D) by its position's angle; cos and
    sin are (T, D/2), or (B, heads, T, D/2)."""
    a, b = widened(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


@dataclass(frozen=True)
class Llama3Rope:
    """How Llama 3.1 and 3.2 stretch their positions (rope_type "llama3" in config.json):
    slow rotations are slowed down further, fast ones stay. The fields are named as in that
    file."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self):
        check_numbers(self)

    def slowed(self, frequency: Tensor) -> Tensor:
        """A rotation that turns at least `high_freq_factor` times within the original
        context is kept, one that turns at most `low_freq_factor` times is divided by
        `factor`; between the two the share that is kept grows linearly."""
        times = self.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((times - low) / (high - low)).clamp(0, 1)
        return kept * frequency + (1 - kept) * frequency / self.factor


# --- Attention and its cache ------------------------------------------------------------


def causal_mask(T: int, S: int, like: Tensor) -> Tensor:
    """A mask (T, S) that is added to attention logits. The queries are those of the last T
    of S entries. It is 0 where a query may see an entry, and -inf where the entry comes
    later. It has the dtype and the device of `like`. For T = 3 and S = 5:

        0  0  0  -inf  -inf
        0  0  0  0     -inf
        0  0  0  0     0
    """
    return like.new_full((T, S), -torch.inf).triu(diagonal=S - T + 1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Equation (1). The queries belong to the last T of S entries: q (B, H, T, D), k and v
    (B, G, S, D) -> (B, H, T, D).

    Equation (1) multiplies the logits by the mask. This would leave a logit of 0 where
    nothing may be seen, which still gets a weight. Here the mask is added: -inf.
    """
    T, S = q.shape[2], k.shape[2]
    if T == 1:
        # A single token sees all entries. Query heads that share keys become queries of one
        # head here: `enable_gqa` would copy the keys for each.
        of_group = q.unflatten(1, (k.shape[1], -1)).squeeze(3)  # (B, G, H/G, D)
        return F.scaled_dot_product_attention(of_group, k, v).reshape(q.shape)
    # `is_causal` aligns its mask to the first key, which is right if no entries are older.
    mask = causal_mask(T, S, q) if T < S else None
    options = dict(is_causal=T == S, enable_gqa=q.shape[1] != k.shape[1])
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


class Entries:
    """The keys that one layer holds, or its values: (B, G, S, D). Others can be appended.

    Without gradients the tensor `buffer` may be larger than what is held, and grows by an
    eighth when it is full: torch.cat would copy all entries for each decoded token.
    """

    def __init__(self, held: Tensor | None = None):
        self.buffer = held  # (B, G, S or more, D)
        self.size = 0 if held is None else held.shape[2]  # S

    @property
    def held(self) -> Tensor:
        return self.buffer[:, :, : self.size]

    @property
    def nbytes(self) -> int:
        """Of what is held. The buffer may take an eighth more."""
        return self.held.nbytes if self.size else 0

    def append(self, new: Tensor) -> None:
        """Add new entries (B, G, T, D)."""
        end = self.size + new.shape[2]
        if self.buffer is None:
            self.buffer = new
        elif torch.is_grad_enabled():  # what is in the graph cannot be written to
            self.buffer = torch.cat((self.held, new), dim=2)
        else:
            if self.buffer.shape[2] < end:
                larger = max(end, self.size * 9 // 8)
                self.buffer = F.pad(self.held, (0, 0, 0, larger - self.size))
            self.buffer[:, :, self.size : end] = new
        self.size = end

    def detach(self) -> None:
        """Cut the graph."""
        if self.buffer is not None:
            self.buffer = self.held.detach()

    def copy(self) -> "Entries":
        """The copy shares the tensor and counts as full, so that its next append makes a
        new tensor."""
        return Entries() if self.buffer is None else Entries(self.held)


class KVCache:
    """The cache of algorithm 1: each layer keeps every key and value, so that it grows with
    the text. It also knows where the entries stand, and rotates keys and queries. After an
    error within a call of the model it must not be used again.

    A memory of slots is a subclass (lococo.Memory).
    """

    def __init__(self, config: LlamaConfig, rope_scale: float | None = None):
        """Positions are divided by `rope_scale`; None takes the checkpoint's own."""
        self.config = config
        self.rope_scale = config.rope_scale if rope_scale is None else rope_scale
        self.seen = 0  # tokens that have entered; the model counts new ones after `make_room`
        self.keys = [Entries() for _ in range(config.n_layers)]  # rotated
        self.values = [Entries() for _ in range(config.n_layers)]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries that are held."""
        return sum(entries.nbytes for entries in self.keys + self.values)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the keys and values of every token that has entered."""
        one = sum(values.held[:, :, :1].nbytes for values in self.values if values.size)
        return 2 * one * self.seen

    def copy(self) -> "KVCache":
        """A cache with the same entries. What enters one does not change the other."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):  # an item for each layer
                own = [item.copy() if isinstance(item, Entries) else item for item in value]
                setattr(other, name, own)
        return other

    def make_room(self, B: int, T: int) -> None:
        """Called before T tokens of each of B texts enter. This cache grows, and only
        refuses what cannot enter; a memory also compresses. Raises UserError."""
        if T == 0:
            raise UserError("no tokens enter the cache: give at least one")
        values = self.values[0]
        if values.size and values.buffer.shape[0] != B:
            batches = f"a batch of {B} enters a cache for a batch of {values.buffer.shape[0]}"
            raise UserError(f"{batches}; each batch needs a cache of its own")

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The cosines and sines that `rotate` needs for these positions."""
        return rope(positions.float() / self.rope_scale, self.config)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append a layer's new k and v (B, G, T, D), then let each of its queries
        q (B, H, T, D) attend to the older entries and, causally, to the new ones. Neither q
        nor k is rotated yet. Returns what the heads read, (B, H, T, D)."""
        T = k.shape[2]
        # A token's position is its place in the text.
        turn = self.rotation(self.seen - T + torch.arange(T, device=k.device))
        # Algorithm 1 attends first and appends then. Here what is new is appended first,
        # and the queries attend to all entries.
        self.keys[layer].append(rotate(k, *turn))
        self.values[layer].append(v)
        return self.read(layer, rotate(q, *turn))

    def read(self, layer: int, q: Tensor) -> Tensor:
        """Rotated queries q (B, H, T, D) of the last T entries -> what they read."""
        return attention(q, self.keys[layer].held, self.values[layer].held)

    def detach(self) -> None:
        """Cut the graph, so that it does not grow with the text."""
        for entries in self.keys + self.values:
            entries.detach()


# --- The model --------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x (..., dim) divided by the root of its mean square, times a weight (arXiv
    1910.07467). It is computed in float32."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = widened(x)
        mean_square = h.pow(2).mean(-1, keepdim=True)
        normed = (h * (mean_square + self.eps).rsqrt()).type_as(x)
        return (normed * self.weight).type_as(x)  # an adapter's weight is in float32


class Attention(nn.Module):
    """The four projections. Block uses wq, wk and wv before `cache.attend`, and wo after
    it."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.H, self.G, self.D = config.n_heads, config.n_kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, self.H * self.D, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, self.G * self.D, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, self.G * self.D, bias=config.qkv_bias)
        self.wo = nn.Linear(self.H * self.D, config.dim, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Equation (2), algorithms 1 and 2, step 2: x (B, T, dim) -> q (B, H, T, D), k and
        v (B, G, T, D)."""
        q = self.wq(x).unflatten(2, (self.H, self.D)).transpose(1, 2)
        k = self.wk(x).unflatten(2, (self.G, self.D)).transpose(1, 2)
        v = self.wv(x).unflatten(2, (self.G, self.D)).transpose(1, 2)
        return q, k, v


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): x (B, T, dim) -> (B, T, dim). w1 is the gate."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """A layer: `project`, then `cache.attend`, then `finish`."""

    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.recompute = False  # True takes less memory and more time in training
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.project(self.attention_norm(x))

    def finish(self, x: Tensor, read: Tensor) -> Tensor:
        """Add what the heads read, (B, H, T, D), to the stream x (B, T, dim); then add the
        output of the feed-forward layer."""
        x = x + self.attention.wo(read.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.ffn_norm(x))

    def forward(self, x: Tensor, cache: KVCache) -> Tensor:
        if not self.recompute:
            q, k, v = self.project(x)
            return self.finish(x, cache.attend(self.layer, q, k, v))
        # The backward pass computes `project` and `finish` again, so that their activations
        # are not stored. `cache.attend` cannot run twice, as it appends to the cache.
        q, k, v = checkpoint(self.project, x, use_reentrant=False)
        read = cache.attend(self.layer, q, k, v)
        return checkpoint(self.finish, x, read, use_reentrant=False)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        # Some numbers of each weight as its file has them, by which an adapter knows its base.
        # `load_llama` notes them where float16 has rounded the weights; else it is empty.
        self.sample: dict[str, Tensor] = {}
        # As nn.Embedding, but without random numbers on the meta device, where a model is
        # made before its weights are loaded: there these would take 2 seconds.
        embeddings = torch.empty(config.vocab_size, config.dim)
        if not embeddings.is_meta:
            embeddings.normal_()
        self.tok_embeddings = nn.Embedding.from_pretrained(embeddings, freeze=False)
        blocks = (Block(config, layer) for layer in range(config.n_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """The type of the base's numbers and of what flows through the layers. While an
        adapter trains, embeddings and norms are in float32."""
        return self.layers[0].feed_forward.w1.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) that follow those in the cache -> the output of the last block,
        normalised, (B, T, dim)."""
        cache = KVCache(self.config) if cache is None else cache
        x = self.tok_embeddings(tokens).to(self.dtype)
        B, T = tokens.shape
        cache.make_room(B, T)  # a Memory compresses, if they would not fit
        cache.seen += T
        for block in self.layers:
            x = block(x, cache)
        return self.norm(x)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T), int64, that follow those in the cache -> float32 logits
        (B, T, vocab_size)."""
        return self.logits(self.hidden(tokens, cache))

    def logits(self, h: Tensor) -> Tensor:
        """What `hidden` returns, (..., dim) -> float32 logits (..., vocab_size)."""
        output = self.tok_embeddings if self.config.tied else self.output
        # The embeddings, which may be tied, can be in float32.
        return widened(F.linear(h, output.weight.type_as(h)))


# --- Official weights -------------------------------------------------------------------

# A name in `Llama`, as layers.0.attention.wq.weight, is Meta's. Hugging Face has other
# words for its parts, and writes model.layers.0.self_attn.q_proj.weight.
HUGGING_FACE_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention": "self_attn",
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def hugging_face_name(name: str) -> str:
    return ".".join(HUGGING_FACE_NAMES.get(part, part) for part in name.split("."))


def load_base(
    path: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Llama, Tokenizer]:
    """The model of a directory, and its tokenizer. Raises UserError."""
    model = load_llama(path, dtype, device)
    tokenizer = Tokenizer(Path(path))
    tokenizer.fit(model.config.vocab_size)
    return model, tokenizer


def load_llama(
    path: Path | str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Llama:
    """The model of a directory, with its weights in `dtype`. The directory has Meta's
    layout or Hugging Face's. Raises UserError if a file is missing, damaged or of another
    model."""
    file = config_file(Path(path))  # Meta's params.json, or Hugging Face's config.json
    config = read_config(file)
    files = weight_files(file, config.n_layers)
    if config.tied and has_own_output(map(read_tensors, files)):
        config = replace(config, tied=False)
    with torch.device("meta"):  # shapes without numbers
        model = Llama(config)

    if file.name == "params.json":
        stored = meta_weights(files)
        in_file = {name: name for name in model.state_dict()}
    else:
        stored = hugging_face_weights(map(read_tensors, files), config.tied)
        in_file = {name: hugging_face_name(name) for name in model.state_dict()}
    expected = {in_file[name]: p.shape for name, p in model.state_dict().items()}
    state, sample = {}, {}
    with blamed_on(file, ValueError):
        for name, tensor in checked(stored, expected):
            if name.endswith(("wq.weight", "wk.weight")):  # only Meta's have these names
                tensor = neighbours_to_halves(tensor, config.head_dim)
            # One tensor is copied at a time, so that the weights are never in memory twice.
            state[name] = tensor.to(device, dtype, copy=True)
            sample[name] = sampled(tensor)
            if not state[name].isfinite().all():
                numbers = f"{name}, {tensor.dtype} that becomes {dtype},"
                raise ValueError(f"{numbers} has numbers that are not finite")

    model.load_state_dict({name: state[in_file[name]] for name in in_file}, assign=True)
    if dtype == torch.float16:  # it rounds small numbers more than the sample does
        model.sample = {name: sample[in_file[name]] for name in in_file}
    return model


def sampled(weight: Tensor) -> Tensor:
    """Some 64 numbers of a weight in bfloat16, by which an adapter knows its base."""
    return weight.flatten()[:: max(1, weight.numel() // 64)].to(torch.bfloat16, copy=True)


def read_config(file: Path) -> LlamaConfig:
    """What a params.json or a config.json says of the model. Raises UserError."""
    with blamed_on(file, *FOREIGN):
        if file.name == "params.json":
            values = meta_fields(file)
        else:
            values = hugging_face_fields(read_given(file))
        if "llama3_rope" in values:
            values["llama3_rope"] = Llama3Rope(**values["llama3_rope"])
        return LlamaConfig(**values)


def meta_weights(files: list[Path]) -> Iterator[tuple[str, Tensor]]:
    """The name of each of Meta's weights, and its tensor. Meta cuts a model for several
    GPUs: each file has some rows or some columns of a matrix, and all of a norm."""
    for name, parts in meta_shards(files):
        kind = name.removesuffix(".weight").split(".")[-1]  # such as "wq"
        if "norm" in kind:
            yield name, parts[0]
        elif kind in ("tok_embeddings", "wo", "w2"):
            yield name, torch.cat(parts, dim=-1)
        else:
            yield name, torch.cat(parts, dim=0)


def neighbours_to_halves(rows: Tensor, head_dim: int) -> Tensor:
    """The rows of Meta's wq or wk in the order of `rotate`. Meta turns neighbours
    together, channels 2i and 2i + 1 of a head; `rotate` turns i and i + D/2, as Hugging
    Face does. For D = 8 the rows 0 1 2 3 4 5 6 7 become 0 2 4 6 1 3 5 7."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))  # (heads, D/2, 2, dim)
    return pairs.transpose(1, 2).flatten(0, 2)
