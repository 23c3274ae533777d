"""ChatGLM3-6B-32k, the other model of the paper (its table 1), in Llama's Hugging Face layout.

    python tools/chatglm3.py CHATGLM3_DIR OUT
    python train.py --model OUT --recipe paper --data RedPajama/ --seq 32768

It is a Llama with a bias on q, k and v, and half of a head's channels turned. One shard after the
other is read and written; config.json comes last."""

import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from model import Llama, LlamaConfig, hugging_face_name, neighbours_to_halves
from support.command_line import PlainParser, run_program
from support.files import (
    FOREIGN, UserError, read_given, read_tensors, write_json, write_whole,
)
from support.tokenizer import Tokenizer
from support.weights import (
    ROTATED, blamed_on, hugging_face_fields, refuse_other_depth,
)

NAMES = {  # theirs, without "transformer.": ours, the rows that it is cut into
    "embedding.word_embeddings": ["model.embed_tokens"],
    "encoder.layers.*.input_layernorm": ["model.layers.*.input_layernorm"],
    "encoder.layers.*.self_attention.query_key_value": [
        f"model.layers.*.self_attn.{letter}_proj" for letter in "qkv"],
    "encoder.layers.*.self_attention.dense": ["model.layers.*.self_attn.o_proj"],
    "encoder.layers.*.post_attention_layernorm": ["model.layers.*.post_attention_layernorm"],
    "encoder.layers.*.mlp.dense_h_to_4h": [f"model.layers.*.mlp.{x}_proj" for x in ("gate", "up")],
    "encoder.layers.*.mlp.dense_4h_to_h": ["model.layers.*.mlp.down_proj"],
    "encoder.final_layernorm": ["model.norm"], "output_layer": ["lm_head"],
}


def converted(c: dict) -> dict:
    """The config.json of a Llama from that of ChatGLM3."""
    for key, value in {"model_type": "chatglm", "rmsnorm": True, "add_bias_linear": False}.items():
        if c[key] != value:
            raise ValueError(f"{key} is {c[key]}")
    theirs = {"hidden_size": "hidden_size", "num_hidden_layers": "num_layers",
              "num_attention_heads": "num_attention_heads", "intermediate_size": "ffn_hidden_size",
              "num_key_value_heads": "multi_query_group_num", "vocab_size": "padded_vocab_size",
              "rms_norm_eps": "layernorm_epsilon", "max_position_embeddings": "seq_length",
              "qkv_bias": "add_qkv_bias"}
    own = {"model_type": "llama", "hidden_act": "silu", ROTATED: 0.5,
           "rope_theta": 10000.0 * c.get("rope_ratio", 1)}
    return own | {key: c[name] for key, name in theirs.items()}


def model_for(path: Path, shards: list[Path], out: Path) -> Llama:
    """The model without numbers. Its config.json is in out/about.json until all is written, so that
    no program takes half a model for a whole one."""
    file = path / "config.json"
    try:
        content = converted(read_given(file))
    except FOREIGN as error:
        raise UserError(f"{file}: not that of ChatGLM3 ({error!r})") from None
    with blamed_on(file, *FOREIGN):
        config = LlamaConfig(**hugging_face_fields(content))
    refuse_other_depth(file, shards, config.n_layers)
    killed = (out / "about.json").exists()  # a conversion that did not end: this one begins again
    out.mkdir(parents=True, exist_ok=killed)
    write_json(out / "about.json", content)
    with torch.device("meta"):
        return Llama(config)


def our_names(name: str) -> list[str]:
    """The tensors that a tensor of ChatGLM3 becomes; none if it is unknown."""
    layer = "".join(re.findall(r"\.layers\.(\d+)\.", name))
    kind, _, end = re.sub(r"\.\d+\.", ".*.", name).partition(".")[2].rpartition(".")
    return [f"{new}.{end}".replace("*", layer) for new in NAMES.get(kind, [])]


def convert_shard(shard: Path, left: dict[str, torch.Size], D: int) -> dict[str, Tensor]:
    """The tensors of a file. Takes them out of `left`, which has the shapes of those to come."""
    tensors = {}
    for name, tensor in read_tensors(shard).items():
        if "rotary_pos_emb" in name:  # `rope` has it in float32
            continue
        ours = our_names(name)
        if not ours or not left.keys() >= {*ours}:
            raise UserError(f"{shard}: {name}: no tensor of this model")
        rows = [left.pop(new)[0] for new in ours]
        if sum(rows) != len(tensor):
            raise UserError(f"{shard}: {name}: {tuple(tensor.shape)} does not fit config.json")
        for new, part in zip(ours, tensor.split(rows)):
            if "q_proj" in new or "k_proj" in new:  # neighbours turn together there
                part = neighbours_to_halves(part, D)
            tensors[new] = part.contiguous()
    return tensors


def convert(path: Path, out: Path) -> None:
    shards = sorted(path.glob("pytorch_model-*.bin")) or sorted(path.glob("*.safetensors"))
    model = model_for(path, shards, out)
    shutil.copy(path / "tokenizer.model", out)
    left = {hugging_face_name(name): p.shape for name, p in model.state_dict().items()}
    for shard in shards:
        tensors = convert_shard(shard, left, model.config.head_dim)
        write_whole(out / f"model-{shard.stem}.safetensors", partial(save_file, tensors))
    if left:
        raise UserError(f"{path}: there is no tensor for {', '.join(left)}"[:250])
    words = Tokenizer(out).vocab_size  # after these: [MASK], [gMASK], [sMASK], sop
    write_json(out / "prefix.json", [words + 1, words + 3])  # a prompt's [gMASK] sop
    os.replace(out / "about.json", out / "config.json")


if __name__ == "__main__":
    parser = PlainParser(__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    run_program(lambda: convert(options.path, options.out))
