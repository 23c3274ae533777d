"""Llama-2 in plain PyTorch: the model, its tokenizer, and the loading of official weights.

Read this file first: it is an ordinary Llama-2 and knows nothing of LoCoCo. The method plugs into one
seam, the cache: attention hands its queries, keys and values to `cache.attend`. `KVCache` below keeps every key and
value and attends to all of them; the compressed memory of lococo.py keeps M slots instead.

Source: Llama 2 (arXiv 2307.09288) and the layout of Meta's and Hugging Face's checkpoints.
Left out on purpose: other architectures, other position schemes, quantisation, padding inside a batch.

Letters, in all files: B batch, T tokens that enter together (a segment), S cached entries, M memory slots,
H query heads, G key/value heads, D head dimension, L whole sequence, V vocabulary.
"""

import json
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

import torch
import torch.nn.functional as F
from safetensors import safe_open
from sentencepiece import SentencePieceProcessor
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class UserError(ValueError):
    """Something the user can mend; the programs print its sentence and exit with code 2."""


def _positive(value) -> bool:
    return isinstance(value, (int, float)) and 0 < value < float("inf")


# --- Configuration -------------------------------------------------------------------------------------------


@dataclass
class LlamaConfig:
    dim: int
    n_layers: int
    n_heads: int  # H
    n_kv_heads: int  # G; fewer than H is grouped-query attention (70B)
    ffn_dim: int
    vocab_size: int = 32000  # V
    norm_eps: float = 1e-5
    context: int = 4096  # pretrained length, in tokens
    rope_theta: float = 10000.0
    rope_scale: float = 1.0  # positions are divided by this (linear interpolation, arXiv 2306.15595)
    tied: bool = False  # the output layer is the embedding table

    def __post_init__(self):
        sizes = (self.dim, self.n_layers, self.n_heads, self.n_kv_heads, self.ffn_dim, self.vocab_size, self.context)
        numbers = (self.norm_eps, self.rope_theta, self.rope_scale)
        if not all(isinstance(n, int) and 0 < n < 2**28 for n in sizes) or not all(_positive(n) for n in numbers):
            raise UserError(f"sizes must be whole numbers from 1 to 2^28, eps, theta and scale positive: {self}")
        if self.dim % (2 * self.n_heads) or self.n_heads % self.n_kv_heads:
            raise UserError(f"dim must be an even multiple of n_heads, n_heads a multiple of n_kv_heads: {self}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @staticmethod
    def preset(name: str) -> "LlamaConfig":
        """Sizes by name: tiny (the embedded model), 7B, 13B, 70B."""
        if name not in PRESETS:
            raise UserError(f"unknown preset {name!r}; there are {', '.join(PRESETS)}")
        return LlamaConfig(**PRESETS[name])


PRESETS = {
    # Slow rotations, so that half of a head's 64 channels can match tokens 1,000 positions apart.
    "tiny": dict(dim=128, n_layers=4, n_heads=2, n_kv_heads=2, ffn_dim=344, vocab_size=2048, context=1024,
                 rope_theta=1e6),
    "7B": dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "13B": dict(dim=5120, n_layers=40, n_heads=40, n_kv_heads=40, ffn_dim=13824),
    "70B": dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672),
}  # fmt: skip


# --- Rotary positions ----------------------------------------------------------------------------------------


def rope(positions: Tensor, config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position / rope_scale * theta^(-2i/D), each (..., D/2), for integer positions (...).

    Always float32: in half precision neighbouring positions beyond a few hundred get the same angle.
    """
    i = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = 1.0 / config.rope_theta ** (i / config.head_dim)
    angle = (positions.float() / config.rope_scale)[..., None] * frequency
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn channel pair (i, i + D/2) of x (B, heads, T, D) by its position's angle; -sin turns it back.

    Rotations compose: turning by the angle of p and then of q is turning by the angle of p + q.
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


# --- Attention and its seam ----------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last T of S entries: q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D)."""
    T, S = q.shape[2], k.shape[2]
    gqa = q.shape[1] != k.shape[1]
    if T in (1, S):
        return F.scaled_dot_product_attention(q, k, v, is_causal=T == S, enable_gqa=gqa)
    # Query t sees all S - T entries of the past and the first t + 1 of its own segment. No T x S matrix is made:
    if q.is_cuda:  # the fused kernels know this mask by name
        from torch.nn.attention.bias import causal_lower_right  # here, as it takes a second to import

        return F.scaled_dot_product_attention(q, k, v, attn_mask=causal_lower_right(T, S), enable_gqa=gqa)
    edge = q.new_zeros(S + T - 1)  # with the last query first, row r sees entry s if r + s < S:
    edge[S:] = -torch.inf
    mask = edge.as_strided((T, S), (1, 1))  # a view whose row r is edge[r : r + S]
    return F.scaled_dot_product_attention(q.flip(2), k, v, attn_mask=mask, enable_gqa=gqa).flip(2)


class KVCache:
    """The plain cache: every layer keeps every key and value, so it grows with the text."""

    def __init__(self, n_layers: int):
        self.seen = 0  # tokens that have entered
        self.keys: list[Tensor | None] = [None] * n_layers  # (B, G, S, D), already rotated
        self.values: list[Tensor | None] = [None] * n_layers
        self.buffers: list[Tensor | None] = [None] * n_layers  # (2, B, G, room, D), which keys and values are views of

    @property
    def held(self) -> int:
        """S, the entries that each layer holds now."""
        return 0 if self.keys[0] is None else self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the entries held; a buffer may have room for more."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values if t is not None)

    def begin(self, T: int) -> int:
        """T new tokens are about to enter: called once, before any layer's `update`; the position of the first."""
        self.seen += T
        return self.seen - T

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the new k, v (B, G, T, D) of a layer; return all that it attends to, (B, G, S + T, D)."""
        return self.write(layer, 0 if self.keys[layer] is None else self.keys[layer].shape[2], k, v)

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put k, v (B, G, N, D) at entry `start` of a layer, in place of what it held from there on; returns all.

        Without gradients this happens in place, in a buffer with room to spare. With gradients new tensors are made:
        the backward pass needs the old ones.
        """
        end = start + k.shape[2]
        if torch.is_grad_enabled():
            self.buffers[layer] = None
            if start:
                k = torch.cat((self.keys[layer][:, :, :start], k), dim=2)
                v = torch.cat((self.values[layer][:, :, :start], v), dim=2)
            self.keys[layer], self.values[layer] = k, v
            return k, v
        buffer = self.buffers[layer]
        if buffer is None or buffer.shape[3] < end:
            B, G, _, D = k.shape
            buffer = self.buffers[layer] = k.new_empty(2, B, G, self.room(end), D)
            if start:
                buffer[0, :, :, :start] = self.keys[layer][:, :, :start]
                buffer[1, :, :, :start] = self.values[layer][:, :, :start]
        buffer[0, :, :, start:end], buffer[1, :, :, start:end] = k, v
        self.keys[layer], self.values[layer] = buffer[:, :, :, :end]  # two along its first axis
        return self.keys[layer], self.values[layer]

    def room(self, entries: int) -> int:
        """Entries in a new buffer: a copy of all once in 1,024 tokens is little beside reading all for each token."""
        return entries + 1024

    def detach(self) -> None:
        """The gradient of what comes later stops here, so that no graph grows with the text."""
        self.keys, self.values = ([t if t is None else t.detach() for t in ts] for ts in (self.keys, self.values))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The seam: a layer's new q (B, H, T, D), k and v (B, G, T, D) -> what its heads read, (B, H, T, D)."""
        return attend(q, *self.update(layer, k, v))

    def fork(self) -> "KVCache":
        """A second cache that goes on from here on its own; what is held so far is shared until either writes."""
        other = copy(self)
        self.buffers, other.buffers = ([None] * len(self.keys) for _ in range(2))  # shared: neither may write there
        other.keys, other.values = list(self.keys), list(self.values)
        return other


# --- The model -----------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return h.type_as(x) * self.weight


class Attention(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.H, self.G, self.D = config.n_heads, config.n_kv_heads, config.head_dim
        self.wq = nn.Linear(config.dim, self.H * self.D, bias=False)
        self.wk = nn.Linear(config.dim, self.G * self.D, bias=False)
        self.wv = nn.Linear(config.dim, self.G * self.D, bias=False)
        self.wo = nn.Linear(self.H * self.D, config.dim, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, T, dim) -> q (B, H, T, D), k and v (B, G, T, D)."""
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.H, self.D).transpose(1, 2)
        k = self.wk(x).view(B, T, self.G, self.D).transpose(1, 2)
        v = self.wv(x).view(B, T, self.G, self.D).transpose(1, 2)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, read: Tensor) -> Tensor:
        """What the heads have read, (B, H, T, D) -> (B, T, dim)."""
        return self.wo(read.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What precedes attention: (B, T, dim) -> q, k, v."""
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after(self, x: Tensor, read: Tensor) -> Tensor:
        """What follows it: x and what the heads have read -> (B, T, dim)."""
        x = x + self.attention.output(read)
        return x + self.feed_forward(self.ffn_norm(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, recompute: bool) -> Tensor:
        before, after = self.before, self.after
        if recompute:  # not attention: run twice, it would enter its keys twice
            before, after = (partial(checkpoint, f, use_reentrant=False) for f in (before, after))
        q, k, v = before(x, cos, sin)
        return after(x, attend(q, k, v) if cache is None else cache.attend(self.layer, q, k, v))


class Llama(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.recompute = False  # activation checkpointing: blocks run again in the backward pass, but for attention
        table = torch.empty(config.vocab_size, config.dim)
        if not table.is_meta:  # where nothing would be drawn, but normal_ imports for a second
            nn.init.normal_(table)
        self.tok_embeddings = nn.Embedding.from_pretrained(table, freeze=False)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight

    def hidden(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids (B, T) -> the last layer's normalised output (B, T, dim); continues from the cache."""
        T = tokens.shape[1]
        start = 0 if cache is None else cache.begin(T)
        cos, sin = rope(torch.arange(start, start + T, device=tokens.device), self.config)
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, cos, sin, cache, self.recompute)
        return self.norm(x)

    def forward(self, tokens: Tensor, cache: KVCache | None = None) -> Tensor:
        """Token ids, int64 (B, T) -> float32 logits (B, T, V); with a cache, continues from it."""
        return self.output(self.hidden(tokens, cache)).float()

    @staticmethod
    def from_pretrained(path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> "Llama":
        """Load a directory in Meta's layout (params.json) or Hugging Face's (config.json), strictly.

        One tensor at a time goes from the file to its place, so there is never a second copy of the weights.
        Raises UserError for a missing, damaged, mis-shaped or surplus tensor and for whatever Llama-2 is not.
        """
        path = Path(path)
        if (path / "params.json").is_file():
            config, read, unread = _open_meta(path)
        elif (path / "config.json").is_file():
            config, read, unread = _open_hugging_face(path)
        else:
            raise UserError(f"{path}: not a model directory (neither Meta's params.json nor a config.json in it)")
        if config.n_layers > len(unread):
            raise UserError(f"{path}: the configuration says {config.n_layers} layers, the files {len(unread)} tensors")
        with torch.device("meta"):  # shapes only: nothing is initialised that will be overwritten
            model = Llama(config)
        size, held = sum(p.numel() for p in model.parameters()), sum(
            file.stat().st_size for file in path.iterdir() if file.is_file())  # fmt: skip
        if size > held:  # before any memory is asked for
            raise UserError(f"{path}: the configuration says {size:,} parameters, the files have {held:,} bytes in all")
        for name, p in list(model.named_parameters()):
            module, _, leaf = name.rpartition(".")
            empty = torch.empty(p.shape, dtype=dtype, device=device)
            setattr(model.get_submodule(module), leaf, nn.Parameter(empty))
        if config.tied:  # the file has one of the two
            model.output.weight = model.tok_embeddings.weight
        for name, p in model.named_parameters():
            tensor = read(name)
            if tensor.shape != p.shape or not tensor.is_floating_point():
                raise UserError(f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, the configuration says "
                                f"{tuple(p.shape)}; a file is missing or belongs to another model")  # fmt: skip
            p.data.copy_(tensor)
        if unread:
            raise UserError(f"{path}: unexpected tensor {min(unread)!r}, {len(unread)} in all: not a plain Llama-2")
        return model


# --- Official weights ----------------------------------------------------------------------------------------
# Each `_open` returns (config, read, unread): read(name) gives the tensor that this file calls `name` (Meta's
# names), unread are the checkpoint's tensors, by its own names, that nobody has asked for yet.


def _json(file: Path, *numbers: str) -> dict:
    """A JSON object in which these keys hold positive numbers."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not valid JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object")
    for key in numbers:
        if not _positive(content.get(key)):
            raise UserError(f"{file}: {key!r} is {'not a positive number' if key in content else 'missing'}")
    return content


def _readers(file: Path) -> dict[str, Callable[[], Tensor]]:
    """The tensors of one weight file, by name, each read from the disk only when called."""
    try:
        if file.suffix == ".safetensors":
            handle = safe_open(file, framework="pt")
            return {name: partial(handle.get_tensor, name) for name in handle.keys()}
        state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        return {name: partial(Tensor.detach, tensor) for name, tensor in state.items()}
    except Exception as error:  # nine kinds came of 3,000 damaged archives, from RuntimeError to AssertionError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{file}: cannot be read as weights, is it truncated? ({reason})") from None


META_CUT_ON_COLUMNS = ("tok_embeddings", "wo", "w2")  # in several shards; norms are whole, the rest cut on rows
META_KEYS = {"dim", "n_layers", "n_heads", "n_kv_heads", "multiple_of", "ffn_dim_multiplier", "norm_eps",
             "vocab_size", "rope_theta", "max_seq_len", "max_batch_size"}  # fmt: skip


def _open_meta(path: Path):
    """params.json and consolidated.NN.pth; nothing records how many shards there should be."""
    file = path / "params.json"
    params = _json(file, "dim", "n_layers", "n_heads", "multiple_of", "norm_eps")
    unknown = {key for key, value in params.items() if value not in (None, False)} - META_KEYS
    if unknown:
        raise UserError(f"{file}: {min(unknown)!r} is not implemented (Llama-2 only)")
    dim, heads, multiple = params["dim"], params["n_heads"], params["multiple_of"]
    shards = [_readers(shard) for shard in sorted(path.glob("consolidated.*.pth"))]
    if not shards:
        raise UserError(f"{path}: no consolidated.NN.pth beside params.json")
    unread = {name for shard in shards for name in shard} - {"rope.freqs"}  # recomputed in float32 by `rope`

    def read(name: str) -> Tensor:
        unread.discard(name)
        if not all(name in shard for shard in shards):
            raise UserError(f"{path}: tensor {name} is missing")
        parts, kind = [shard[name]() for shard in shards], name.split(".")[-2]
        if "norm" in kind:
            return parts[0]
        if len({part.shape for part in parts}) > 1 or parts[0].dim() != 2:
            raise UserError(f"{path}: {name} has shapes {[tuple(part.shape) for part in parts]} in the shards")
        whole = torch.cat(parts, dim=int(kind in META_CUT_ON_COLUMNS))
        # Meta turns neighbouring channels (2i, 2i + 1), this file (i, i + D/2): reorder each head's rows.
        if kind in ("wq", "wk") and len(whole) % config.head_dim == 0:
            return whole.view(-1, config.head_dim // 2, 2, whole.shape[1]).transpose(1, 2).reshape(whole.shape)
        return whole

    ffn = int(int(2 * 4 * dim / 3) * (params.get("ffn_dim_multiplier") or 1))
    vocab = params.get("vocab_size") or -1
    config = LlamaConfig(
        dim, params["n_layers"], heads, params.get("n_kv_heads") or heads, -(-ffn // multiple) * multiple,
        vocab if vocab > 0 else len(read("tok_embeddings.weight")), params["norm_eps"],
        rope_theta=params.get("rope_theta", 10000.0),
    )  # fmt: skip
    return config, read, unread


HUGGING_FACE_NAMES = {
    "tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head", "layers": "model.layers",
    "attention": "self_attn", "wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "o_proj",
    "feed_forward": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj",
    "attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip


def hugging_face_name(name: str) -> str:
    return ".".join(HUGGING_FACE_NAMES.get(part, part) for part in name.split("."))


def _hugging_face_config(file: Path) -> LlamaConfig:
    """config.json -> LlamaConfig; what is not a plain Llama-2 is refused by name."""
    c = _json(file, "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size",
              "rms_norm_eps", "max_position_embeddings")  # fmt: skip
    dim, heads = c["hidden_size"], c["num_attention_heads"]
    ropes = c.get("rope_parameters") or {}  # newer files keep theta and the scaling in here
    scaling = c.get("rope_scaling") or ropes
    if not isinstance(scaling, dict):
        raise UserError(f"{file}: rope_scaling {scaling!r} is not a JSON object")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = {
        "model_type": (c.get("model_type"), ["llama"]),
        "hidden_act": (c.get("hidden_act", "silu"), ["silu"]),
        "rope_type": (kind, ["default", "linear"]),
        "head_dim": (c.get("head_dim") or dim // heads, [dim // heads]),
        **{key: (c.get(key) or None, [None]) for key in
           ("attention_bias", "mlp_bias", "sliding_window", "quantization_config", "partial_rotary_factor")},
    }  # fmt: skip
    for key, (value, allowed) in plain.items():
        if value not in allowed:
            raise UserError(f"{file}: {key} {value!r} is not implemented (Llama-2 has {allowed[-1]!r})")
    if kind == "linear" and not _positive(scaling.get("factor")):
        raise UserError(f"{file}: linear rope_scaling without a 'factor'")
    return LlamaConfig(
        dim, c["num_hidden_layers"], heads, c.get("num_key_value_heads") or heads, c["intermediate_size"],
        c["vocab_size"], c["rms_norm_eps"], c["max_position_embeddings"],
        rope_theta=ropes.get("rope_theta", c.get("rope_theta", 10000.0)),
        rope_scale=scaling["factor"] if kind == "linear" else 1.0, tied=c.get("tie_word_embeddings", False),
    )  # fmt: skip


def _open_hugging_face(path: Path):
    """config.json with model.safetensors or pytorch_model.bin, whole or in the shards of an index."""
    config = _hugging_face_config(path / "config.json")
    for stem in ("model.safetensors", "pytorch_model.bin"):
        if (path / f"{stem}.index.json").is_file():
            weight_map = _json(path / f"{stem}.index.json").get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(f"{path / stem}.index.json: no weight_map in it")
            files = sorted(set(map(str, weight_map.values())))
            break
        if (path / stem).is_file():
            files = [stem]
            break
    else:
        raise UserError(f"{path}: no weights (model.safetensors, pytorch_model.bin or an index of either)")
    readers = {}
    for file in files:
        if Path(file).name != file or not (path / file).is_file():
            raise UserError(f"{path}: the index names {file!r}, which is not a file of this directory")
        readers |= _readers(path / file)

    def read(name: str) -> Tensor:
        name = hugging_face_name(name)
        unread.discard(name)
        if name not in readers:
            raise UserError(f"{path}: tensor {name} is missing")
        return readers[name]()  # rows of q and k are already in the half-split order that `rotate` uses

    unread = {name for name in readers if not name.endswith("inv_freq")}  # recomputed in float32 by `rope`
    if config.tied:
        unread.discard("lm_head.weight")
    return config, read, unread


# --- Tokenizer -----------------------------------------------------------------------------------------------


class Tokenizer:
    """Llama's sentencepiece tokenizer: unk 0, bos 1, eos 2; "<s>" in a text is plain text."""

    def __init__(self, path: str | Path):
        """`path`: tokenizer.model, its directory, or a directory below it (Meta keeps it one level up)."""
        path = Path(path)
        places = [path] if path.is_file() else [path / "tokenizer.model", path.parent / "tokenizer.model"]
        found = [place for place in places if place.is_file()]
        if not found:
            raise UserError(f"{path}: no tokenizer.model there or one level up")
        self.file = found[0]
        try:
            self.sp = SentencePieceProcessor(model_file=str(self.file))
        except (RuntimeError, OSError, ValueError) as error:
            raise UserError(f"{self.file}: not a sentencepiece model, is it truncated? ({error})") from None
        self.bos, self.eos, self.vocab_size = self.sp.bos_id(), self.sp.eos_id(), self.sp.vocab_size()

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [self.bos] * bos + self.sp.encode(text)

    def decode(self, ids: list[int]) -> str:
        return self.sp.decode(ids)

    def piece(self, token: int) -> str:
        """What one token stands for, its first space included; a byte that is part of a character as <0xE2>."""
        piece = self.sp.id_to_piece(token)
        byte = int(piece[3:5], 16) if self.sp.is_byte(token) else 128
        return chr(byte) if byte < 128 else piece.replace("\u2581", " ")
