"""chatglm3.py: a checkpoint in the official layout, and the model written a second time."""

import json
from pathlib import Path

import chatglm3
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from generate import TINY, Tokenizer, as_text
from model import UserError, load_llama

CONFIG = dict(model_type="chatglm", rmsnorm=True, add_bias_linear=False, add_qkv_bias=True,
              num_layers=2, hidden_size=64, num_attention_heads=4, multi_query_group_num=2,
              ffn_hidden_size=48, padded_vocab_size=2064, seq_length=256, layernorm_epsilon=1e-5,
              rope_ratio=0.001)  # so small that every channel that is turned shows  # fmt: skip
DENSE = "transformer.encoder.layers.1.self_attention.dense.weight"


def random_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ends = "embedding.word_embeddings.weight", "output_layer.weight"
    shapes = dict.fromkeys(ends, (2064, 64)) | {"encoder.final_layernorm.weight": (64,)}
    for layer in ("encoder.layers.0.", "encoder.layers.1."):
        attention, mlp = f"{layer}self_attention.", f"{layer}mlp."
        shapes |= {f"{attention}query_key_value.weight": (64 + 2 * 32, 64),
                   f"{attention}query_key_value.bias": (64 + 2 * 32,),
                   f"{attention}dense.weight": (64, 64), f"{mlp}dense_h_to_4h.weight": (96, 64),
                   f"{mlp}dense_4h_to_h.weight": (64, 48), f"{layer}input_layernorm.weight": (64,),
                   f"{layer}post_attention_layernorm.weight": (64,)}  # fmt: skip
    made = {f"transformer.{name}": 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    return made | {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}


def turned(x):
    """(T, 16): the first 8 channels in neighbouring pairs, as complex numbers."""
    frequency = (10000.0 * CONFIG["rope_ratio"]) ** (-torch.arange(0, 8, 2).double() / 8)
    turn = torch.polar(torch.ones(4).double(), frequency)
    pairs = torch.view_as_complex(x[:, :8].reshape(len(x), 4, 2).contiguous())
    powers = torch.stack([turn**t for t in range(len(x))])
    return torch.cat((torch.view_as_real(pairs * powers).flatten(1), x[:, 8:]), dim=1)


def chatglm(weights, ids):
    """Logits of ids (T,), in float64."""
    w = {name.removeprefix("transformer."): t.double() for name, t in weights.items()}

    def norm(x, name):
        return x / (x.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"]

    x = w["embedding.word_embeddings.weight"][ids]
    for n in range(2):
        layer = f"encoder.layers.{n}."
        qkv = f"{layer}self_attention.query_key_value"
        fused = norm(x, f"{layer}input_layernorm") @ w[f"{qkv}.weight"].T + w[f"{qkv}.bias"]
        heads = [fused[:, 16 * i : 16 * i + 16] for i in range(8)]  # 4 of q, 2 of k, 2 of v
        read = []
        for head in range(4):
            q, k, v = turned(heads[head]), turned(heads[4 + head // 2]), heads[6 + head // 2]
            rows = [(k[: t + 1] @ q[t] / 4).softmax(0) @ v[: t + 1] for t in range(len(ids))]
            read.append(torch.stack(rows))
        x = x + torch.cat(read, dim=1) @ w[f"{layer}self_attention.dense.weight"].T
        h = norm(x, f"{layer}post_attention_layernorm") @ w[f"{layer}mlp.dense_h_to_4h.weight"].T
        x = x + F.silu(h[:, :48]) * h[:, 48:] @ w[f"{layer}mlp.dense_4h_to_h.weight"].T
    return norm(x, "encoder.final_layernorm") @ w["output_layer.weight"].T


def write(folder: Path, weights, kind="bin") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.model").write_bytes((TINY / "tokenizer.model").read_bytes())
    names = sorted(weights)
    for n, some in enumerate((names[::2], names[1::2])):
        shard, file = {name: weights[name] for name in some}, folder / f"pytorch_model-{n}.{kind}"
        (torch.save if kind == "bin" else save_file)(shard, file)


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_it_computes_what_chatglm3_does(tmp_path, kind):
    weights, ids = random_weights(), torch.randint(0, 2064, (12,))
    write(tmp_path / "official", weights, kind)
    chatglm3.convert(tmp_path / "official", tmp_path / "out")
    model, tokenizer = load_llama(tmp_path / "out"), Tokenizer(tmp_path / "out")
    assert torch.allclose(model(ids[None])[0].double(), chatglm(weights, ids), atol=1e-3)
    assert model.config.context == 256
    encoded = tokenizer.encode("def")  # [gMASK] and sop come after the words
    assert encoded == [2049, 2051, *Tokenizer(TINY).encode("def")[1:]]
    assert [tokenizer.piece(i) for i in encoded] == ["<2049>", "<2051>", "\u2581def"]
    assert "".join(as_text(iter(encoded[2:]), tokenizer, encoded)) == " def"
    (tmp_path / "out" / "prefix.json").write_text("[2049")
    with pytest.raises(UserError, match="out: no readable tokenizer.model"):
        Tokenizer(tmp_path / "out")


@pytest.mark.parametrize("change, named", [
    (lambda w: w.pop(DENSE), "layers.1.self_attn.o_proj"),
    (lambda w: w.update({"transformer.more.weight": w[DENSE]}), "more.weight: no tensor"),
    (lambda w: w.update({DENSE: w[DENSE][1:].clone()}), "dense.weight: (63, 64) does not fit"),
    (lambda w: w.update({DENSE.replace("1", "2"): w[DENSE]}), "layers.2.self_attention.dense"),
])  # fmt: skip
def test_a_wrong_tensor_is_named(tmp_path, change, named):
    weights = random_weights()
    change(weights)
    write(tmp_path / "official", weights)
    with pytest.raises(UserError, match=named.replace("(", r"\(").replace(")", r"\)")):
        chatglm3.convert(tmp_path / "official", tmp_path / "out")
    assert not (tmp_path / "out" / "config.json").exists()
