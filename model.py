"""Llama-2 in plain PyTorch: the model, official weights and the tokenizer.

Read this file first. It is an ordinary Llama-2 (arXiv 2307.09288). LoCoCo plugs in at one
place, the cache: the model tells `cache.enter` how many tokens come, and each block hands
q, k and v to `cache.attend`. The cache decides where tokens stand (RoPE) and what is kept.
The KVCache below keeps every entry; the Memory of lococo.py keeps M slots. Equation numbers
are those of the LoCoCo paper. Where its Q, K and V have a column for each token, ours have a
row.

Letters:

    B  texts in a batch
    T  tokens of one call of the model; `segment` is the most that may enter a memory
       together, and "M + T" means such a whole segment (the paper calls it B)
    S  entries in the cache
    M  slots of a memory
    H  query heads
    G  key/value heads
    D  channels of a head
    L  tokens of a whole text; the paper's tables swap L and T
    N  in a compressor: the B * G heads of all texts, which it treats as one batch;
       in the programs: documents that are scored
"""

import copy
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Iterator, NamedTuple

import torch
import torch.nn.functional as F
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.files import FOREIGN, UserError, read_json, read_tensors, read_text, why

if TYPE_CHECKING:
    from support.command_line import Machine


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
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * frequency + (1 - kept) * frequency / self.factor


# The repr of this class is a part of the checksum by which an adapter knows its base
# (lococo.identity). A new field needs `repr=False`, or no stored adapter loads any more.
@dataclass(frozen=True)
class LlamaConfig:
    dim: int
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G; fewer than H is grouped-query attention (70B)
    ffn_dim: int
    vocab_size: int = 32000
    norm_eps: float = 1e-5
    # Pretrained length, in tokens. A base with a `rope_scale` reads context * rope_scale.
    context: int = 4096
    rope_theta: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by this (position interpolation)
    tied: bool = False  # the embeddings are the output matrix, too
    qkv_bias: bool = False  # True for ChatGLM3 (tools/chatglm3.py)
    # The share of a head's channels that are rotated, from the first on; ChatGLM3: 0.5.
    turned: float = 1.0
    llama3_rope: Llama3Rope | None = field(default=None, repr=False)

    def __post_init__(self):
        check_numbers(self)
        if self.head_dim % 2 or self.n_heads % self.n_kv_heads:
            heads = f"{self.n_heads} heads, {self.n_kv_heads} of keys and values"
            raise ValueError(f"dim {self.dim} and {heads}, do not fit together")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads


# No whole number in a configuration may be larger. The longest context today is 10 million.
LARGEST = 2**24


def check_numbers(config: "LlamaConfig | Llama3Rope") -> None:
    """Convert each number to its field's type, so that 10000 and 10000.0 in a file are the
    same model. Raises ValueError if one is of another type, not positive or too large."""
    for f in fields(config):
        value = getattr(config, f.name)
        if f.type in (int, float, bool):
            if f.type(value) != value:
                raise ValueError(f"{f.name} {value!r} is not of type {f.type.__name__}")
            if f.type is not bool and not 0 < value < math.inf:
                raise ValueError(f"{f.name} {value!r} is not positive")
            if f.type is int and value > LARGEST:
                raise ValueError(f"{f.name} {value!r} is larger than {LARGEST:,}")
            object.__setattr__(config, f.name, f.type(value))  # as the class is frozen


def widened(t: Tensor) -> Tensor:
    """t in torch's default dtype, float32, if its own is narrower. bfloat16 is too coarse
    for sums and angles."""
    return t.to(torch.promote_types(t.dtype, torch.get_default_dtype()))


# --- Rotary positions (arXiv 2104.09864) ------------------------------------------------


def rope(positions: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Positions (...) -> cosine and sine of position * theta^(-2i/d) for channel pair i,
    each (..., D/2).

    d = turned * D channels rotate, which is usually all D. Pairs from d/2 on have angle 0.
    Angles are in float32, as bfloat16 cannot tell position 256 from 257.
    """
    d = config.turned * config.head_dim
    twice_i = widened(torch.arange(0, config.head_dim, 2, device=positions.device))
    frequency = (twice_i < d) * config.rope_theta ** (-twice_i / d)
    if config.llama3_rope:
        frequency = config.llama3_rope.slowed(frequency)
    angle = widened(positions)[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pair (i, i + D/2) of x (B, heads, T, D) by its position's angle; cos and
    sin are (T, D/2), or (B, heads, T, D/2). Rotations compose: turning by the angle of p
    and then of q is turning by the angle of p + q."""
    a, b = widened(x).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


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

    Equation (1) multiplies the logits by the mask, which would leave 0 where nothing may be
    seen. Here the mask is added, and makes these logits -inf.
    """
    T, S = q.shape[2], k.shape[2]
    # `is_causal` aligns its mask to the first key, which is right if no entries are older.
    # A single token sees all entries: without a mask PyTorch may take its fast kernel.
    mask = causal_mask(T, S, q) if 1 < T < S else None
    options = dict(is_causal=T == S, enable_gqa=q.shape[1] != k.shape[1])
    return F.scaled_dot_product_attention(q, k, v, mask, **options)


class Entries:
    """The keys that one layer holds, or its values: (B, G, S, D). Others can be appended.

    Without gradients the tensor `buffer` may be larger than what is held, and doubles when
    it is full: torch.cat would copy all entries for each decoded token.
    """

    def __init__(self, held: Tensor | None = None):
        self.buffer = held  # (B, G, S or more, D)
        self.size = 0 if held is None else held.shape[2]  # S

    @property
    def held(self) -> Tensor:
        return self.buffer[:, :, : self.size]

    def append(self, new: Tensor, most: float) -> None:
        """Add new entries (B, G, T, D). The buffer grows up to `most` entries."""
        end = self.size + new.shape[2]
        if self.buffer is None:
            self.buffer = new
        elif torch.is_grad_enabled():  # what is in the graph cannot be written to
            self.buffer = torch.cat((self.held, new), dim=2)
        else:
            if self.buffer.shape[2] < end:
                larger = max(end, min(2 * end, most))
                self.buffer = F.pad(self.held, (0, 0, 0, larger - self.size))
            self.buffer[:, :, self.size : end] = new
        self.size = end

    def detach(self) -> None:
        """Cut the graph. Without one, the buffer stays as it is."""
        if self.buffer is not None and self.buffer.requires_grad:
            self.buffer = self.held.detach()

    def copy(self) -> "Entries":
        """The copy shares the tensor and counts as full, so that its next append makes a
        new tensor."""
        return Entries() if self.buffer is None else Entries(self.held)


class KVCache:
    """The cache of algorithm 1: each layer keeps every key and value, so that it grows with
    the text. It also knows where the entries stand, and rotates keys and queries."""

    def __init__(self, config: LlamaConfig, rope_scale: float | None = None):
        """Positions are divided by `rope_scale`; None takes the checkpoint's own."""
        self.config = config
        self.rope_scale = config.rope_scale if rope_scale is None else rope_scale
        self.seen = 0  # tokens that have entered
        self.capacity = [math.inf] * config.n_layers  # entries that each layer may hold
        self.keys = [Entries() for _ in range(config.n_layers)]  # rotated
        self.values = [Entries() for _ in range(config.n_layers)]
        # Of the tokens that enter now: the position of the first one in each layer, and the
        # cosines and sines for all of them, by the position of the first.
        self.first: list[int] = []
        self.turns: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def size(self) -> int:
        """S, the number of entries that a layer holds now: the first one if they differ."""
        return self.keys[0].size

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held. Their buffers may take as much again."""
        held = [entries.held for entries in self.keys + self.values if entries.size]
        return sum(entries.nbytes for entries in held)

    @property
    def compressed(self) -> bool:
        """Whether a layer holds fewer entries than tokens have entered."""
        return any(keys.size < self.seen for keys in self.keys)

    @property
    def full_nbytes(self) -> int:
        """Bytes that would be held if every token that has entered were kept."""
        held = sum(keys.size for keys in self.keys)
        return self.nbytes // held * len(self.keys) * self.seen

    def copy(self) -> "KVCache":
        """A cache with the same entries. What enters one does not change the other."""
        other = copy.copy(self)
        other.keys = [entries.copy() for entries in self.keys]
        other.values = [entries.copy() for entries in self.values]
        return other

    def enter(self, T: int, device: torch.device | str = "cpu") -> None:
        """Announce T new tokens, before the first layer attends to them."""
        self.first = self.first_positions()
        steps = torch.arange(T, device=device)
        self.turns = {first: self.turn(first + steps) for first in set(self.first)}
        self.seen += T

    def first_positions(self) -> list[int]:
        """The position of the next token in each layer: here its place in the text."""
        return [self.seen] * self.config.n_layers

    def turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """What `rotate` needs for these positions."""
        return rope(positions / self.rope_scale, self.config)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append a layer's new k and v (B, G, T, D), then let each of its queries
        q (B, H, T, D) attend to the older entries and, causally, to the new ones. Neither q
        nor k is rotated yet. Returns what the heads read, (B, H, T, D)."""
        turn = self.turns[self.first[layer]]
        # Algorithm 1, step 4.
        self.keys[layer].append(rotate(k, *turn), self.capacity[layer])
        self.values[layer].append(v, self.capacity[layer])
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
    """x (..., dim) divided by the root of its mean square, times a weight (arXiv 1910.07467).
    It is computed in float32."""

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
    """The four projections. Block uses wq, wk and wv before `cache.attend`, and wo after it."""

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
    """A layer. Its two parts, `project` and `finish`, can run a second time in the backward
    pass. `cache.attend` between them cannot, as it appends to the cache."""

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
        # Activations inside `project` and `finish` are not stored; the backward pass
        # computes them again.
        q, k, v = checkpoint(self.project, x, use_reentrant=False)
        read = cache.attend(self.layer, q, k, v)
        return checkpoint(self.finish, x, read, use_reentrant=False)


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        blocks = (Block(config, layer) for layer in range(config.n_layers))
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        if not config.tied:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    @property
    def dtype(self) -> torch.dtype:
        """That of the base and of what flows through the layers. While an adapter trains,
        embeddings and norms are in float32, and are not asked."""
        return self.layers[0].feed_forward.w1.weight.dtype

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) that follow those in the cache -> the output of the last block,
        normalised, (B, T, dim)."""
        cache = KVCache(self.config) if cache is None else cache
        cache.enter(tokens.shape[1], tokens.device)  # a Memory makes room now
        x = self.tok_embeddings(tokens).to(self.dtype)
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


class Layout(NamedTuple):
    """How the files of a model's directory are read."""

    file: Path  # of the configuration
    read_config: Callable[[Path], LlamaConfig]
    # Yields the name in the file and the tensor of each weight.
    read_weights: Callable[[Path, LlamaConfig], Iterator[tuple[str, Tensor]]]
    name_in_file: Callable[[str], str]  # of a weight, from its name in `Llama`


def layout_of(path: Path) -> Layout:
    """Meta's layout (params.json) or Hugging Face's (config.json). Raises UserError."""
    refuse_missing(path)
    metas, hugging_faces = path / "params.json", path / "config.json"
    if metas.is_file():
        return Layout(metas, meta_config, meta_weights, str)  # our names are Meta's
    if hugging_faces.is_file():
        return Layout(
            hugging_faces, hugging_face_config, hugging_face_weights, hugging_face_name
        )
    none = "there is no model in it, as it has no config.json and no params.json"
    raise UserError(f"{path}: {none}; {WHICH}")


def load_llama(path: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Llama:
    """A model from a directory of either layout, with its weights in `dtype`. Raises
    UserError if a file is missing, damaged or of another model."""
    layout = layout_of(path)
    file = layout.file
    try:
        config = layout.read_config(file)
    except FOREIGN as error:
        raise not_a_llama(file, error) from None
    with torch.device("meta"):  # just shapes
        model = Llama(config)
    ours = {layout.name_in_file(name): name for name in model.state_dict()}
    state = {}
    try:
        for name, tensor in layout.read_weights(path, config):
            check_weight(name, tensor, ours)
            if ours[name] in state:
                raise ValueError(f"{name} is in two files; remove the one that is left over")
            # One tensor is copied at a time, so that the weights are never in memory twice.
            state[ours[name]] = tensor.to(device, dtype, copy=True)
    except ValueError as error:
        raise not_a_llama(file, error) from None
    try:
        model.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:  # a tensor is missing or has another shape
        raise not_a_llama(file, error) from None
    return model


def not_a_llama(file: Path, error: Exception) -> UserError:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return UserError(f"{file} or its weights: not a plain Llama-2: {reason:.250}")


def check_weight(name: str, tensor: Tensor, ours: dict[str, str]) -> None:
    if name not in ours or not tensor.is_floating_point() or not tensor.isfinite().all():
        raise ValueError(f"{name}, {tensor.dtype}: no weight of this model or not finite")


def meta_config(file: Path) -> LlamaConfig:
    params = read_json(file)
    # Llama 3.1 and later scale positions by factors that are not in this file.
    if params.get("use_scaled_rope"):
        raise ValueError("use_scaled_rope is not implemented; take Hugging Face's layout")
    shard = read_tensors(file.parent / "consolidated.00.pth")
    shards = len(list(file.parent.glob("consolidated.*.pth")))
    config = LlamaConfig(
        **{key: params[key] for key in ("dim", "n_layers", "n_heads", "norm_eps")},
        n_kv_heads=params.get("n_kv_heads") or params["n_heads"],
        ffn_dim=shards * len(shard["layers.0.feed_forward.w1.weight"]),
        vocab_size=len(shard["tok_embeddings.weight"]),  # params.json may have -1
        # Meta's files do not name the context. Llama 2 has 4,096 tokens. Llama 1 has 2,048,
        # and its files look the same: take its Hugging Face layout, which names the context.
        context=params.get("max_seq_len", 4096),
        rope_theta=params.get("rope_theta", 10000.0),
    )
    refuse_contradiction(params, shard, config)
    return config


def refuse_contradiction(params: dict, shard: dict[str, Tensor], config: LlamaConfig) -> None:
    """Raises ValueError where params.json says other sizes than the weights have."""
    if params.get("vocab_size", -1) not in (-1, config.vocab_size):
        sizes = f"vocab_size {params['vocab_size']}, but {config.vocab_size} in the weights"
        raise ValueError(sizes)
    if "multiple_of" in params:  # Meta's rule for the feed-forward size
        size = int(8 * config.dim / 3)
        size = int(size * (params.get("ffn_dim_multiplier") or 1))
        size = math.ceil(size / params["multiple_of"]) * params["multiple_of"]
        if size != config.ffn_dim:
            rule = f"multiple_of and ffn_dim_multiplier give {size}"
            missing = "is a file consolidated.NN.pth missing?"
            raise ValueError(f"{rule}, but {config.ffn_dim} in the weights; {missing}")
    pairs = len(shard.get("rope.freqs", ()))
    if pairs and pairs != config.head_dim // 2:
        heads = f"n_heads {config.n_heads} leaves {config.head_dim} channels for a head"
        raise ValueError(f"{heads}, but {2 * pairs} in the weights")


def meta_weights(path: Path, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Each shard consolidated.NN.pth has some rows or columns of a matrix, and all of a
    norm."""
    shards = [read_tensors(file) for file in sorted(path.glob("consolidated.*.pth"))]
    for name in sorted({name for shard in shards for name in shard} - {"rope.freqs"}):
        parts = [shard[name] for shard in shards if name in shard]
        # "wq" of "layers.0.attention.wq.weight"
        last = name.removesuffix(".weight").split(".")[-1]
        try:
            cut = 1 if last in ("tok_embeddings", "wo", "w2") else 0
            tensor = parts[0] if "norm" in last else torch.cat(parts, dim=cut)
            if last in ("wq", "wk"):
                # Meta turns neighbouring channels (2i, 2i + 1), `rotate` (i, i + D/2).
                pairs = tensor.unflatten(0, (-1, config.head_dim // 2, 2))
                tensor = pairs.transpose(1, 2).flatten(0, 2)
        except RuntimeError:
            wrong = f"{name} does not fit the configuration, or its shards"
            raise ValueError(wrong) from None
        yield name, tensor


# The key of LlamaConfig.turned; tools/chatglm3.py writes it.
ROTATED = "lococo_rotated_share"


def hugging_face_config(file: Path) -> LlamaConfig:
    c = read_json(file)
    newer = c.get("rope_parameters") or {}  # newer files keep theta and the scaling in here
    scaling = c.get("rope_scaling") or newer
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    plain = {"model_type": "llama", "hidden_act": "silu", "sliding_window": None,
             "attention_bias": False, "mlp_bias": False, "quantization_config": None,
             "partial_rotary_factor": 1.0}  # fmt: skip
    for key, value in plain.items():
        if c.get(key, value) != value:
            raise ValueError(f"{key} {c[key]} is not implemented")
    if rope_type not in ("default", "linear", "llama3"):
        raise ValueError(f"rope_type {rope_type} is not implemented")
    llama3_rope = None
    if rope_type == "llama3":
        llama3_rope = Llama3Rope(**{f.name: scaling[f.name] for f in fields(Llama3Rope)})
    names = {
        "dim": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "ffn_dim": "intermediate_size",
        "vocab_size": "vocab_size",
        "norm_eps": "rms_norm_eps",
        "context": "max_position_embeddings",
    }
    return LlamaConfig(
        **{ours: c[theirs] for ours, theirs in names.items()},
        n_kv_heads=c.get("num_key_value_heads") or c["num_attention_heads"],
        rope_theta=newer.get("rope_theta", c.get("rope_theta", 10000.0)),
        rope_scale=scaling["factor"] if rope_type == "linear" else 1.0,
        tied=c.get("tie_word_embeddings") or False,
        qkv_bias=c.get("qkv_bias") or False,
        turned=c.get(ROTATED, 1.0),
        llama3_rope=llama3_rope,
    )


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


def weight_files(path: Path) -> list[Path]:
    """The weight files of a directory: those that its index names, or all if it has no
    index."""
    for name, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        files = sorted(path.glob(f"{name}*{ending}"))
        index = path / f"{name}{ending}.index.json"
        if files and index.is_file():
            try:
                named = {path / shard for shard in read_json(index)["weight_map"].values()}
                whole = path / f"{name}{ending}"
                if whole in files and whole not in named:
                    left_over = f"it does not name {whole.name}; remove one of the two"
                    raise ValueError(left_over)
                return sorted(named)
            except FOREIGN as error:
                raise not_a_llama(index, error) from None
        if files:
            return files
    missing = "there is no model*.safetensors and no pytorch_model*.bin in it"
    raise UserError(f"{path}: {missing}")


def hugging_face_weights(path: Path, config: LlamaConfig) -> Iterator[tuple[str, Tensor]]:
    """Rows of q and k are already in the order of `rotate`."""
    for file in weight_files(path):
        for name, tensor in read_tensors(file).items():
            stored_twice = config.tied and name == "lm_head.weight"
            # inv_freq is not a weight: `rope` computes it in float32.
            if not stored_twice and not name.endswith("inv_freq"):
                yield name, tensor


# --- Tokenizer --------------------------------------------------------------------------


class Tokenizer:
    """Text to token ids and back, by the files of a model's directory.

    sentencepiece reads `tokenizer.model` (Llama 2 and its relatives). Where there is none,
    the package tokenizers reads `tokenizer.json` (Llama 3, SmolLM2). What looks like a
    special token in a text, such as "<s>", is plain text.
    """

    def __init__(self, path: Path):
        """`path`: the model's directory; Meta keeps tokenizer.model in its parent."""
        self.file = tokenizer_file(path)
        reader = JsonTokens if self.file.suffix == ".json" else SentencePieceTokens
        # Ids that begin a text, where these are not the BOS alone.
        prefix = path / "prefix.json"
        try:
            self.tokens = reader(self.file)
            self.vocab_size = self.tokens.vocab_size
            self.prefix = read_json(prefix) if prefix.is_file() else [self.tokens.bos]
            refuse_prefix(self.prefix)
        except ValueError as error:
            reason = why(self.file, error)
            sentence = f"{self.file.name} is not a readable tokenizer ({reason})"
            raise UserError(f"{path}: {sentence}") from None
        self.bos = self.prefix[0]  # begins each text
        self.ends = self.tokens.ends  # ids, each of which ends a text
        self.letter = self.tokens.encode("x")[-1:]  # what `piece` puts in front of a token

    def encode(self, text: str) -> list[int]:
        """The ids of a whole text: the prefix (usually the BOS alone), then those of the
        text."""
        # Half of a surrogate pair, which tokenizers refuse, becomes a question mark.
        return self.prefix + self.tokens.encode(text.encode("utf-8", "replace").decode())

    def decode(self, ids: list[int]) -> str:
        return self.tokens.decode(ids)

    def piece(self, i: int) -> str:
        """The text that token i adds, with its leading blank if it has one. A part of a
        character gives U+FFFD, and a token without text gives its name."""
        if i >= self.vocab_size:
            return f"<{i}>"
        added = self.decode([*self.letter, i]).removeprefix(self.decode(self.letter))
        return added or self.tokens.name(i)


def refuse_prefix(prefix: list[int]) -> None:
    """Raises ValueError if these are no ids that can begin a text."""
    ids = isinstance(prefix, list) and prefix
    if not ids or not all(type(i) is int and i >= 0 for i in prefix):
        raise ValueError(f"no ids that begin a text: {prefix!r}")


WHICH = "docs/models.md says which models load, and how to download one"


def refuse_missing(path: Path) -> None:
    """Raises UserError if there is no such model."""
    if not path.is_dir():
        raise UserError(f"{path}: there is no such folder of a model; {WHICH}")


def tokenizer_file(path: Path) -> Path:
    """The tokenizer's file: in the model's directory or, as Meta has it, in the parent
    directory. For "." or a link it may also be the parent of the directory itself."""
    parents = (path.parent, path.resolve().parent)
    places = [path / "tokenizer.model", path / "tokenizer.json"]
    for file in places + [parent / "tokenizer.model" for parent in parents]:
        if file.is_file():
            return file
    refuse_missing(path)
    raise UserError(f"{path}: there is no tokenizer.model and no tokenizer.json in it")


class SentencePieceTokens:
    """A tokenizer.model. Raises ValueError if it cannot be used."""

    def __init__(self, file: Path):
        try:
            self.sp = SentencePieceProcessor(model_file=str(file))
        except (RuntimeError, OSError) as error:
            raise ValueError(error) from None
        self.vocab_size = self.sp.vocab_size()
        self.ends = {self.sp.eos_id()} - {-1}  # -1: there is none
        begins = [self.sp.bos_id()] if self.sp.bos_id() >= 0 else sorted(self.ends)
        if not begins:
            raise ValueError("it names no token that begins or ends a text")
        self.bos = begins[0]
        self.encode = self.sp.encode
        self.decode = self.sp.decode
        self.name = self.sp.id_to_piece


class JsonTokens:
    """A tokenizer.json. Which tokens begin and end a text is taken from the files beside
    it: by name (tokenizer_config.json) or by id (config.json, generation_config.json).
    Where they name none that begins a text, the one with the smallest id that ends a text
    does. Raises ValueError if it cannot be used."""

    def __init__(self, file: Path):
        try:
            from tokenizers import Tokenizer as JsonTokenizer  # not in requirements.txt
        except ImportError:
            package = "one more package is needed: pip install tokenizers"
            raise UserError(f"{file}: to read this tokenizer {package}") from None
        text = read_text(file)
        try:
            self.tokenizer = JsonTokenizer.from_str(text)
        except Exception as error:
            # The package raises plain Exceptions, for which there is no narrower name.
            # Errors of any other type are not about the file, and pass on.
            if type(error) is not Exception:
                raise
            raise ValueError(error) from None
        self.tokenizer.encode_special_tokens = True  # as plain text
        self.tokenizer.no_truncation()  # a file may ask for texts of one length
        self.tokenizer.no_padding()
        self.vocab_size = 1 + max(self.tokenizer.get_vocab(with_added_tokens=True).values())
        self.name = self.tokenizer.id_to_token
        self.ends = set(self.special_ids(file.parent, "eos"))
        begins = self.special_ids(file.parent, "bos") or sorted(self.ends)
        if not begins:
            raise ValueError("no file beside it names a token that begins or ends a text")
        self.bos = begins[0]

    def special_ids(self, folder: Path, role: str) -> list[int]:
        """The ids of role "bos" or "eos" that the files name, the tokenizer's own first."""
        found = []
        for name in ("tokenizer_config.json", "config.json", "generation_config.json"):
            file = folder / name
            content = read_json(file) if file.is_file() else {}
            try:
                token = content.get(f"{role}_token")  # "<s>", or {"content": "<s>", ...}
                if token:
                    text = token["content"] if isinstance(token, dict) else token
                    found.append(self.tokenizer.token_to_id(text))
                ids = content.get(f"{role}_token_id")  # 1, or [1, 2]
            except FOREIGN as error:
                raise ValueError(f"{name} is of another form ({error!r})") from None
            found += ids if isinstance(ids, list) else [ids]
        return [i for i in dict.fromkeys(found) if i is not None]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)


# --- A base model: weights and tokenizer ------------------------------------------------


def load_base(path: Path, machine: "Machine") -> tuple[Llama, Tokenizer]:
    """The model of a directory, and its tokenizer. Raises UserError."""
    model = load_llama(path, machine.dtype, machine.device)
    tokenizer = Tokenizer(path)
    if max(tokenizer.vocab_size - 1, *tokenizer.prefix) >= model.config.vocab_size:
        raise UserError(f"{tokenizer.file}: it has more tokens than the model ({path})")
    return model, tokenizer
