"""LoCoCo: a long context in a fixed number of key/value slots, by a small convolution (arXiv 2406.05317).

In the paper's order: what a memory keeps (the table of methods), the compressor (section 3.2), the memory,
the segment loop (section 3.3), position interpolation, LoRA, what trains, and the adapter file.
Letters as in model.py. Left out on purpose: heavy hitters (H2O) and everything distributed.

Where the paper and its own code (VITA-Group/LoCoCo) differ, this follows the paper: weights are ReLU / sum (equation
8; the code's softmax of the ReLU is a setting, which the embedded recipe takes), there is no learnt blend with kept
tokens, and the first segment's keys and values keep their gradient. Compression is lazy, as in the code; unlike
there, decoding compresses only when a whole segment has gathered: at every token it would cost many times the model.
"""

import hashlib
import json
import math
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Iterator, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from model import KVCache, Llama, LlamaConfig, UserError, rope, rotate

# --- Methods -------------------------------------------------------------------------------------------------

ALL = "all"  # every token there is
REST = "rest"  # as many as there is room for


class Method(NamedTuple):
    """What a memory of M slots holds, oldest first: [sinks | merged | recent]. All else is dropped."""

    sinks: int | str  # the first tokens, kept as they are
    recent: int | str  # the last tokens, kept as they are
    merge: bool  # the convolution mixes what is between them into the remaining slots
    positions: str  # "interpolated" (original ones, divided by a factor) or "slots" (the place in the cache)


METHODS = {
    #                   sinks recent  merge  positions
    "full": Method(       ALL,     0, False, "interpolated"),
    "streaming": Method(    4,  REST, False, "slots"),
    "lococo": Method(       0,     0, True,  "interpolated"),
}  # fmt: skip
POSITIONS = ("interpolated", "slots")
NORMALISE = ("sum", "softmax")  # how logits become weights: the paper's equation 8, and the official code


@dataclass(frozen=True)
class Settings:
    """All that a trained adapter depends on, stored in its file. Make one with `Settings.of`."""

    method: str
    mem: int | None  # M, slots per layer and key/value head; None: no limit
    sinks: int
    merged: int  # slots that the convolution fills
    recent: int
    positions: str
    segment: int  # T
    length: int  # L that it is trained for, in tokens
    kernel: int
    normalise: str
    lora_rank: int
    lora_alpha: int = 16

    @staticmethod
    def of(method: str, mem: int, segment: int, length: int, sinks: int | None = None, recent: int | None = None,
           positions: str | None = None, kernel: int = 21, normalise: str = "sum", lora_rank: int = 8,
           ) -> "Settings":  # fmt: skip
        """A row of METHODS, with counts and positions that are given in place of its own.

        What eviction does not keep takes no slot: `streaming` with 8 sinks and nothing recent has M = 8.
        Raises UserError for what makes no sense.
        """
        if method not in METHODS:
            raise UserError(f"unknown method {method!r}; there are {', '.join(METHODS)}")
        row = METHODS[method]
        positions = positions or row.positions
        if positions not in POSITIONS:
            raise UserError(f"unknown positions {positions!r}; there are {', '.join(POSITIONS)}")
        if normalise not in NORMALISE:
            raise UserError(f"unknown normalise {normalise!r}; there are {', '.join(NORMALISE)}")
        for name, value, least in (("mem", mem, 1), ("segment", segment, 1), ("seq", length, 2), ("sinks", sinks, 0),
                                   ("recent", recent, 0), ("lora-rank", lora_rank, 0)):  # fmt: skip
            if value is not None and value < least:
                raise UserError(f"--{name} {value}: at least {least} is needed")
        if length < segment:
            raise UserError(f"--seq {length} is shorter than one segment; --segment is {segment}")
        if kernel < 1 or kernel % 2 == 0:
            raise UserError(f"--kernel {kernel}: an odd size is needed, so that it is centred on an entry")
        if row.sinks == ALL:
            if sinks or recent:
                raise UserError(f"--method {method} keeps everything: --sinks and --recent do not go with it")
            return Settings(method, None, 0, 0, 0, positions, segment, length, kernel, normalise, lora_rank)
        sinks = row.sinks if sinks is None else sinks
        recent = row.recent if recent is None else recent
        recent = max(mem - sinks, 0) if recent == REST else recent
        room = mem - sinks - recent
        if room < row.merge:
            left = " with a slot left to merge into" if row.merge else ""
            raise UserError(f"--sinks {sinks} and --recent {recent} do not fit into --mem {mem}{left}")
        merged = room if row.merge else 0
        return Settings(method, sinks + merged + recent, sinks, merged, recent, positions, segment, length, kernel,
                        normalise, lora_rank)  # fmt: skip


# --- Compressor (section 3.2) --------------------------------------------------------------------------------


class Compressor(nn.Module):
    """Equations 6 to 8: one convolution over the cache says how S entries mix into a few slots.

    Its input has 2D channels, an entry's key and value; its output one channel per slot. All heads of a layer
    share the kernel. 2D * slots * kernel weights: 22.0 M in 32 layers of 7B at 128 slots and kernel 21.
    """

    def __init__(self, head_dim: int, slots: int, kernel: int, normalise: str = "sum"):
        super().__init__()
        self.normalise = normalise
        self.conv = nn.Conv1d(2 * head_dim, slots, kernel, padding=kernel // 2)
        # As the official code. With softmax every slot then starts as little more than one entry, chosen at random.
        nn.init.normal_(self.conv.weight)

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        """Keys and values (B, G, S, D) -> mixing weights W (B, G, slots, S); every row sums to 1."""
        B, G, S, _ = k.shape
        x = torch.cat((k, v), dim=-1).flatten(0, 1).transpose(1, 2)  # (B G, 2D, S): heads join the batch
        logits = F.relu(self.conv(x)).float().view(B, G, -1, S)
        if self.normalise == "softmax":  # zeros keep a weight of exp(0)
            return logits.softmax(dim=-1)
        w = logits + 1e-9  # a slot whose logits are all negative becomes a plain mean
        return w / w.sum(dim=-1, keepdim=True)


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

    def begin(self, T: int) -> int:
        s = self.settings
        if T > s.segment:
            raise UserError(f"{T} tokens at once, but a segment has {s.segment}: see segment_losses and prefill")
        self.make_room = self.held + T > s.mem + s.segment
        place = s.mem if self.make_room else self.held
        start = super().begin(T)
        return place if s.positions == "slots" else start

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self.make_room:
            self.keys[layer], self.values[layer] = self.compress(layer, self.keys[layer], self.values[layer])
        return super().update(layer, k, v)

    def compress(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's keys and values (B, G, S, D) -> (B, G, M, D)."""
        s, S = self.settings, k.shape[2]
        parts = (s.sinks, S - s.sinks - s.recent, s.recent)
        k_sinks, k_rest, k_recent = k.split(parts, dim=2)
        v_sinks, v_rest, v_recent = v.split(parts, dim=2)
        in_slots = s.positions == "slots"
        if in_slots:  # sinks stay where they are, recent entries move down, the rest is mixed unrotated
            k_rest = self.turn(k_rest, -torch.arange(s.sinks, S - s.recent))
            k_recent = self.turn(k_recent, torch.tensor([s.mem - S]))
        if s.merged:
            w = self.compressors[layer](k_rest, v_rest).type_as(v)  # (B, G, merged, rest)
            k_rest, v_rest = w @ k_rest, w @ v_rest
        else:
            k_rest, v_rest = k_rest[:, :, :0], v_rest[:, :, :0]
        if in_slots:
            k_rest = self.turn(k_rest, torch.arange(s.sinks, s.sinks + s.merged))
        return torch.cat((k_sinks, k_rest, k_recent), dim=2), torch.cat((v_sinks, v_rest, v_recent), dim=2)

    def turn(self, k: Tensor, by: Tensor) -> Tensor:
        """Move keys (B, G, S, D) by so many positions, (S,) or (1,): rotations compose."""
        return rotate(k, *rope(by.to(k.device), self.config))


# --- Segment loop (section 3.3) ------------------------------------------------------------------------------


def segment_losses(model: Llama, tokens: Tensor, cache: KVCache, segment: int) -> Iterator[Tensor]:
    """Negative log-likelihood, summed, of each segment of tokens (B, L); every token after the first is scored.

    The target of a segment's last token is the first one of the next, so nothing is lost at the seams. Call
    backward on a loss before asking for the next: its graph reaches back to this segment's compression only.
    """
    for x, y in zip(tokens[:, :-1].split(segment, dim=1), tokens[:, 1:].split(segment, dim=1)):
        yield F.cross_entropy(model(x, cache).flatten(0, 1), y.flatten(), reduction="sum")


@torch.no_grad()
def prefill(model: Llama, tokens: Tensor, cache: KVCache, segment: int) -> Tensor:
    """Read tokens (B, L) into the cache segment by segment; float32 logits (B, V) of what comes next."""
    for x in tokens.split(segment, dim=1):
        h = model.hidden(x, cache)
    return model.output(h[:, -1]).float()


# --- Position interpolation (arXiv 2306.15595) ---------------------------------------------------------------


def interpolation(config: LlamaConfig, settings: Settings) -> float:
    """The factor s by which positions are divided, so that the farthest one in use is inside the pretrained context.

    Original positions reach L; positions by slot never exceed M + T, whatever L.
    """
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


def fingerprint(model: Llama) -> str:
    """A name for a base model: its configuration and 64 values of each tensor, whatever dtype it is loaded in."""
    digest = hashlib.sha256(repr(model.config).encode())
    for name, p in model.named_parameters():
        sample = p.detach().flatten()[:: max(1, p.numel() // 64)][:64].to("cpu", torch.bfloat16)
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
        model.config = replace(model.config, rope_scale=interpolation(model.config, settings))
        device = model.norm.weight.device
        self.compressors = nn.ModuleList(
            Compressor(model.config.head_dim, settings.merged, settings.kernel, settings.normalise).to(device)
            for _ in range(model.config.n_layers if settings.merged else 0)
        )
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
        """What trains and what an adapter file holds: group -> name -> parameter.

        Without LoRA (the paper's inference mode) these are the compressors alone: the base stays as it is.
        """
        groups = {"compressors": {f"compressors.{n}": p for n, p in self.compressors.named_parameters()}}
        if self.settings.lora_rank:
            named = dict(self.model.named_parameters())
            groups["LoRA"] = {n: p for n, p in named.items() if "lora_" in n}
            groups["embeddings"] = {n: p for n, p in named.items() if n.startswith("tok_embeddings")}
            groups["norms"] = {n: p for n, p in named.items() if "norm" in n}
        return {group: tensors for group, tensors in groups.items() if tensors}

    def start_training(self) -> None:
        """Freeze the base, all but `groups`."""
        self.model.requires_grad_(False)
        for tensors in self.groups().values():
            for p in tensors.values():
                p.requires_grad_(True)

    def remove(self) -> Llama:
        """Take compressors, LoRA, interpolation and tuned tensors out again: the base, to the bit."""
        if self.settings.lora_rank:
            remove_lora(self.model, merge=False)
        for name, value in self.originals.items():
            self.model.get_parameter(name).data = value
        self.model.config = self.base_config
        return self.model

    # An adapter file: the tensors of `groups`, and as metadata the settings, the base's fingerprint and a checksum.

    def save(self, file: Path) -> None:
        """Write beside, sync, rename: `file` is either the old one or the new one, never half of it."""
        tensors = {n: p.detach().cpu().contiguous() for group in self.groups().values() for n, p in group.items()}
        about = {"settings": asdict(self.settings), "base": self.base, "sha256": checksum(tensors, self.settings)}
        part = file.with_suffix(".part")
        with open(part, "wb") as out:
            out.write(save(tensors, metadata={"format": "pt", "lococo": json.dumps(about)}))
            out.flush()
            os.fsync(out.fileno())
        os.replace(part, file)

    @staticmethod
    def load(path: str | Path, model: Llama, **expected) -> "LoCoCo":
        """Put the adapter of a run directory (or file) onto its base; `expected` settings must be the file's."""
        file = adapter_file(path)
        settings, about = adapter_settings(file)
        for key, value in expected.items():
            if getattr(settings, key) != value:
                raise UserError(f"{file}: trained with {key} {getattr(settings, key)}, not {value}")
        if about["base"] != fingerprint(model):
            raise UserError(f"{file}: made for another base model (fingerprint {about['base']}, "
                            f"this model has {fingerprint(model)})")  # fmt: skip
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
        if checksum(tensors, settings) != about["sha256"]:
            raise UserError(f"{file}: damaged (the checksum does not match)")
        lococo = LoCoCo(model, settings)
        with torch.no_grad():
            for group in lococo.groups().values():
                for name, p in group.items():
                    assert p.shape == tensors[name].shape  # settings and tensors are those that `save` wrote
                    p.copy_(tensors[name])
        return lococo


def adapter_file(path: str | Path) -> Path:
    file = Path(path) / "adapter.safetensors" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise UserError(f"{path}: no adapter there (a run directory of train.py holds adapter.safetensors)")
    return file


def adapter_settings(file: Path) -> tuple[Settings, dict]:
    """What an adapter file says of itself: (its settings, its metadata)."""
    try:
        with safe_open(file, framework="pt") as handle:
            about = json.loads(handle.metadata()["lococo"])
        return Settings(**about["settings"]), {key: about[key] for key in ("base", "sha256")}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: not an adapter of this program, or damaged ({error})") from None


def checksum(tensors: dict[str, Tensor], settings: Settings) -> str:
    digest = hashlib.sha256(repr(settings).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
