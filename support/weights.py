"""Official checkpoints: what their configurations say, and the tensors in their files.

model.load_llama makes a Llama of both. A directory has one of two layouts: Meta's
(params.json and consolidated.NN.pth) or Hugging Face's (config.json and safetensors or
.bin files). What cannot be a plain Llama-2 is refused.
"""

import math
import re
from contextlib import contextmanager
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Iterable, Iterator

import torch
from torch import Tensor

from support.files import FOREIGN, WHICH_MODELS, UserError
from support.files import read_given, read_json, read_tensors, refuse_missing_model


@contextmanager
def blamed_on(file: Path, *errors: type[Exception]) -> Iterator[None]:
    """An error of these types within the block becomes a UserError that names the file."""
    try:
        yield
    except errors as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        sentence = f"{file} or its weights: not a plain Llama-2: {reason:.250}"
        raise UserError(sentence) from None


# --- Configurations ---------------------------------------------------------------------


# No whole number in a configuration may be larger. The longest context today is 10 million.
LARGEST = 2**24


def check_numbers(config) -> None:
    """Convert each number of a LlamaConfig or a Llama3Rope to its field's type, so that
    10000 and 10000.0 in a file are the same model. Raises ValueError if one is of another
    type, not positive and finite, or too large."""
    for f in fields_of(config):
        value = getattr(config, f.name)
        if f.type in (int, float, bool):
            if f.type(value) != value:
                raise ValueError(f"{f.name} {value!r} is not of type {f.type.__name__}")
            if f.type is not bool and not 0 < value < math.inf:
                raise ValueError(f"{f.name} {value!r} is not positive and finite")
            if f.type is int and value > LARGEST:
                raise ValueError(f"{f.name} {value!r} is larger than {LARGEST:,}")
            object.__setattr__(config, f.name, f.type(value))  # as the class is frozen


def config_file(path: Path) -> Path:
    """The configuration of a model: params.json or config.json. Raises UserError."""
    refuse_missing_model(path)
    if (path / "adapter_config.json").is_file():
        merge = "merge it into its base by peft's merge_and_unload, and give that folder"
        raise UserError(f"{path}: it has an adapter of peft, which is not read; {merge}")
    meta, hugging_face = path / "params.json", path / "config.json"
    # Other programs have a params.json, too. Meta's lies beside its weights.
    if hugging_face.is_file() and not meta_files(path):
        return hugging_face
    if meta.is_file():
        return meta
    none = "there is no model in it, as it has no config.json and no params.json"
    raise UserError(f"{path}: {none}; {WHICH_MODELS}")


# The keys that a params.json may have. The sizes of the feed-forward layer are read off the
# weights.
META_KEYS = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "norm_eps", "rope_theta",
    "max_seq_len", "max_batch_size", "multiple_of", "ffn_dim_multiplier", "use_scaled_rope",
}


def meta_fields(file: Path) -> dict:
    """The fields of a LlamaConfig from a params.json and the first shard beside it. What is
    wrong in the file raises one of FOREIGN."""
    params = read_given(file)
    # Llama 3.1 and later scale positions by factors that are not in this file.
    if params.get("use_scaled_rope"):
        raise ValueError("use_scaled_rope is not implemented; take Hugging Face's layout")
    unknown = sorted(params.keys() - META_KEYS)
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: not implemented")
    shard = read_tensors(file.parent / "consolidated.00.pth")
    shards = len(meta_files(file.parent))
    fields = {key: params[key] for key in ("dim", "n_layers", "n_heads", "norm_eps")}
    fields["n_kv_heads"] = params.get("n_kv_heads", params["n_heads"])
    fields["ffn_dim"] = shards * len(shard["layers.0.feed_forward.w1.weight"])
    fields["vocab_size"] = len(shard["tok_embeddings.weight"])  # params.json may have -1
    # Meta's files do not name the context. Llama 2 has 4,096 tokens. Llama 1 has 2,048, and
    # its files look the same: take its Hugging Face layout, which names the context.
    fields["context"] = params.get("max_seq_len", 4096)
    fields["rope_theta"] = params.get("rope_theta", 10000.0)
    refuse_contradiction(params, shard, fields)
    return fields


def refuse_contradiction(params: dict, shard: dict[str, Tensor], fields: dict) -> None:
    """Raises ValueError where params.json says other sizes than the weights have."""
    if params.get("vocab_size", -1) not in (-1, fields["vocab_size"]):
        sizes = f"vocab_size {params['vocab_size']}, but {fields['vocab_size']}"
        raise ValueError(f"{sizes} in the weights")
    head_dim = params["dim"] // params["n_heads"]
    pairs = len(shard.get("rope.freqs", ()))
    if pairs and pairs != head_dim // 2:
        heads = f"n_heads {params['n_heads']} leaves {head_dim} channels for a head"
        raise ValueError(f"{heads}, but {2 * pairs} in the weights")


# A config.json may have these keys with these values only. Others are not implemented.
PLAIN = {
    "model_type": "llama",
    "hidden_act": "silu",
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
}
# The fields of a LlamaConfig that must be in a config.json, and their names there.
NAMES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "context": "max_position_embeddings",
}
LLAMA3_ROPE = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
)
ROTATED = "lococo_rotated_share"  # LlamaConfig.turned; tools/chatglm3.py writes this key


def hugging_face_fields(content: dict) -> dict:
    """The fields of a LlamaConfig from a config.json as `read_given` returns it. What is
    wrong in it raises one of FOREIGN. `llama3_rope`, if it is there, is a dict of its own
    fields."""
    for key, value in PLAIN.items():
        if content.get(key, value) != value:
            raise ValueError(f"{key} {content[key]} is not implemented")
    fields = {ours: content[theirs] for ours, theirs in NAMES.items()}
    fields["n_kv_heads"] = content.get("num_key_value_heads", fields["n_heads"])
    fields["tied"] = content.get("tie_word_embeddings", False)
    fields["qkv_bias"] = content.get("qkv_bias", False)
    fields["turned"] = content.get(ROTATED, 1.0)
    if content.get("head_dim", 0) not in (0, fields["dim"] / fields["n_heads"]):
        raise ValueError(f"head_dim {content['head_dim']}, which is not dim / heads")
    return fields | position_fields(content)


# Keys that each type of positions may have, and keys that any type may have.
ROPE_KEYS = {
    "default": (),
    "linear": ("factor", "original_max_position_embeddings"),
    "llama3": LLAMA3_ROPE,
}
OF_ANY_ROPE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def position_fields(content: dict) -> dict:
    """Of these fields those that say how positions become angles."""
    # Newer files keep theta and scaling in rope_parameters.
    newer, older = content.get("rope_parameters", {}), content.get("rope_scaling", {})
    if any(newer[key] != older[key] for key in newer.keys() & older.keys()):
        raise ValueError("rope_parameters and rope_scaling contradict each other")
    scaling = {"rope_theta": content.get("rope_theta", 10000.0)} | newer | older
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("type", rope_type) != rope_type:
        raise ValueError(f"type {scaling['type']} and rope_type {rope_type} contradict each other")
    if rope_type not in ROPE_KEYS:
        raise ValueError(f"rope_type {rope_type} is not implemented")
    unknown = scaling.keys() - OF_ANY_ROPE - {*ROPE_KEYS[rope_type]}
    if unknown:
        found = f"rope_scaling has {', '.join(sorted(unknown))}"
        raise ValueError(f"{found}, which rope_type {rope_type} does not use")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not implemented")

    fields = {"rope_theta": scaling["rope_theta"]}
    if rope_type == "linear":
        fields["rope_scale"] = scaling["factor"]
        original = "original_max_position_embeddings"
        fields |= {"context": scaling[original]} if original in scaling else {}
    elif rope_type == "llama3":
        fields["llama3_rope"] = {key: scaling[key] for key in LLAMA3_ROPE}
    return fields


# --- Tensors ----------------------------------------------------------------------------

# Types of numbers in weights. Others are those of quantized weights.
READ = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def weight_files(file: Path, n_layers: int) -> list[Path]:
    """The weight files beside a configuration. Raises UserError if they have another number
    of layers than it says."""
    is_meta = file.name == "params.json"
    files = meta_files(file.parent) if is_meta else hugging_face_files(file.parent)
    refuse_other_depth(file, files, n_layers)
    return files


def refuse_other_depth(file: Path, files: list[Path], n_layers: int) -> None:
    """Raises UserError if the names in weight files are not those of so many layers. This
    is asked before a model is built, as a configuration may say a million."""
    names = " ".join(name for each in files for name in read_tensors(each))
    stored = len({*re.findall(r"\blayers\.(\d+)\.", names)})
    with blamed_on(file, ValueError):
        if stored != n_layers:
            missing = "is a file of weights missing?"
            raise ValueError(f"{n_layers:,} layers, but {stored:,} in the weights; {missing}")


def meta_files(path: Path) -> list[Path]:
    return sorted(path.glob("consolidated.*.pth"))


def meta_shards(files: list[Path]) -> Iterator[tuple[str, list[Tensor]]]:
    """The name of each weight in Meta's files, and the part of it that each file has.
    Raises ValueError if the parts cannot be joined."""
    shards = [read_tensors(file) for file in files]
    names = {name for shard in shards for name in shard}
    for name in sorted(names - {"rope.freqs"}):  # no weight: `model.rope` computes it
        parts = [shard[name] for shard in shards if name in shard]
        if parts[0].dim() == 0 or len({part.shape for part in parts}) > 1:
            raise ValueError(f"{name} does not fit: its parts are not of one shape")
        yield name, parts


EMBEDDINGS, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"


def has_own_output(parts: Iterable[dict[str, Tensor]]) -> bool:
    """Whether Hugging Face's files have an output matrix with other numbers than those of
    the embeddings, such as that of a fine-tuned model, whatever the configuration
    says."""
    found = {}
    for part in parts:
        found |= {name: part[name] for name in (EMBEDDINGS, OUTPUT) if name in part}
    if len(found) < 2:
        return False
    if any(tensor.dtype not in READ for tensor in found.values()):
        return True  # `checked` will refuse the type of its numbers
    return not torch.equal(found[EMBEDDINGS], found[OUTPUT])


def hugging_face_weights(
    parts: Iterable[dict[str, Tensor]], tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """The name of each weight in Hugging Face's files, and its tensor. `tied`: the output
    matrix is that of the embeddings, so that one in a file is left out."""
    for part in parts:
        for name, tensor in part.items():
            stored_twice = tied and name == OUTPUT
            # inv_freq is no weight: `model.rope` computes it in float32.
            if not stored_twice and not name.endswith("inv_freq"):
                yield name, tensor


def hugging_face_files(path: Path) -> list[Path]:
    """The weight files of a directory: those that its index names, or all if it has no
    index."""
    for name, ending in (("model", ".safetensors"), ("pytorch_model", ".bin")):
        files = sorted(path.glob(f"{name}*{ending}"))
        index = path / f"{name}{ending}.index.json"
        if files and index.is_file():
            return files_of_index(index)
        if files:
            return files
    missing = "there is no model*.safetensors and no pytorch_model*.bin in it"
    raise UserError(f"{path}: {missing}")


def files_of_index(index: Path) -> list[Path]:
    """The files that an index names. What else lies beside them may be of an older save."""
    with blamed_on(index, *FOREIGN):
        files = set(read_json(index)["weight_map"].values())
        for file in files:
            if Path(file).is_absolute() or ".." in Path(file).parts:
                raise ValueError(f"it names {file}, which is outside its folder")
        named = {index.parent / file for file in files}
        whole = index.with_name(index.name.removesuffix(".index.json"))
        if whole.is_file() and whole not in named:
            raise UserError(f"{index}: it does not name {whole.name}; remove one of the two")
        return sorted(named)


def checked(
    stored: Iterable[tuple[str, Tensor]], expected: dict[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Hand on the tensors of a model's files by name. Raises ValueError if they are not
    those that are expected, by name and shape."""
    left = dict(expected)
    for name, tensor in stored:
        if name not in expected:
            raise ValueError(f"{name} is no weight of this model")
        if name not in left:
            raise ValueError(f"{name} is in two files; remove the one that is left over")
        shape = left.pop(name)
        if tensor.shape != shape:
            shapes = f"{tuple(tensor.shape)}, and the configuration says {tuple(shape)}"
            cause = "it is of another model, or a file of weights is missing"
            raise ValueError(f"the shape of {name} is {shapes}; {cause}")
        if tensor.dtype not in READ:
            types = ", ".join(f"{dtype}".removeprefix("torch.") for dtype in READ)
            raise ValueError(f"{name} has numbers of type {tensor.dtype}; take {types}")
        yield name, tensor
    if left:
        raise ValueError(f"missing: {', '.join(left)}")
