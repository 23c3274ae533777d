"""chatglm3.py and llama2c.py: checkpoints in official layouts, written here, become Llamas."""

import json
import struct
from pathlib import Path

import chatglm3
import llama2c
import pytest
import torch
from reference import meta_state, reference_logits

from generate import as_text
from model import Llama, LlamaConfig, load_llama
from support.command_line import TINY
from support.files import UserError
from support.tokenizer import Tokenizer

CONFIG = dict(model_type="chatglm", rmsnorm=True, add_bias_linear=False, add_qkv_bias=True,
              num_layers=2, hidden_size=64, num_attention_heads=4, multi_query_group_num=2,
              ffn_hidden_size=48, padded_vocab_size=2064, seq_length=256, layernorm_epsilon=1e-5,
              rope_ratio=0.001)  # so small that every channel that is turned shows
OURS = LlamaConfig(64, 2, 4, 2, 48, 2064, rope_theta=10.0, qkv_bias=True, turned=0.5)


def random_weights() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """In the official layout, whose neighbouring channels turn together; in Meta's, whose do so
    too: q, k and v are apart there, and the gate of the feed-forward layer and what it opens."""
    torch.manual_seed(0)
    model = Llama(OURS)
    for p in model.parameters():
        p.data.normal_(std=0.3)
    w = meta_state(model)
    official = {"embedding.word_embeddings.weight": w["tok_embeddings.weight"],
                "output_layer.weight": w["output.weight"], "rotary_pos_emb.inv_freq": torch.ones(4),
                "encoder.final_layernorm.weight": w["norm.weight"]}
    for n in range(2):
        x, a, f = f"encoder.layers.{n}.", f"layers.{n}.attention", f"layers.{n}.feed_forward"
        for kind in ("weight", "bias"):
            qkv = torch.cat([w[f"{a}.w{letter}.{kind}"] for letter in "qkv"])
            official[f"{x}self_attention.query_key_value.{kind}"] = qkv
        gate_and_up = torch.cat((w[f"{f}.w1.weight"], w[f"{f}.w3.weight"]))
        official |= {f"{x}self_attention.dense.weight": w[f"{a}.wo.weight"],
                     f"{x}mlp.dense_h_to_4h.weight": gate_and_up,
                     f"{x}mlp.dense_4h_to_h.weight": w[f"{f}.w2.weight"],
                     f"{x}input_layernorm.weight": w[f"{a}_norm.weight"],
                     f"{x}post_attention_layernorm.weight": w[f"layers.{n}.ffn_norm.weight"],
                     }
    return {f"transformer.{name}": t for name, t in official.items()}, w


def write(folder: Path, weights) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.model").write_bytes((TINY / "tokenizer.model").read_bytes())
    names = sorted(weights)
    for n, some in enumerate((names[::2], names[1::2])):
        torch.save({name: weights[name] for name in some}, folder / f"pytorch_model-{n}.bin")


def test_it_computes_what_chatglm3_does(tmp_path):
    (official, meta), ids = random_weights(), torch.randint(0, 2064, (12,))
    write(tmp_path / "official", official)
    chatglm3.convert(tmp_path / "official", tmp_path / "out")
    model, tokenizer = load_llama(tmp_path / "out"), Tokenizer(tmp_path / "out")
    expected = reference_logits(meta, OURS, ids)
    assert torch.allclose(model(ids[None])[0].double(), expected, atol=1e-3)
    assert model.config.context == 256
    encoded = tokenizer.encode("def")  # [gMASK] and sop come after the words
    assert encoded == [2049, 2051, *Tokenizer(TINY).encode("def")[1:]]
    assert [tokenizer.piece(i) for i in encoded] == ["<2049>", "<2051>", " def"]
    assert "".join(as_text(iter(encoded[2:]), tokenizer, encoded)) == " def"


def test_a_configuration_that_is_not_of_chatglm3_is_refused(tmp_path):
    write(tmp_path / "official", {})
    (tmp_path / "official" / "config.json").write_text(json.dumps(CONFIG | {"rmsnorm": False}))
    with pytest.raises(UserError, match="official/config.json.*not that of ChatGLM3"):
        chatglm3.convert(tmp_path / "official", tmp_path / "out")


def test_a_checkpoint_of_llama2c_becomes_a_llama(tmp_path):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(32, 2, 4, n_kv_heads=2, ffn_dim=96, vocab_size=60, context=48))
    file, state = tmp_path / "a.bin", meta_state(model)
    written = struct.pack("7i", 32, 96, 2, 4, 2, -60, 48)  # the embeddings are not the output
    kinds = "attention_norm attention.wq attention.wk attention.wv attention.wo ffn_norm"
    kinds += " feed_forward.w1 feed_forward.w2 feed_forward.w3"
    names = [f"layers.{n}.{kind}" for kind in kinds.split() for n in range(2)]
    tensors = [state[f"{name}.weight"] for name in ("tok_embeddings", *names, "norm")]
    tensors += [torch.randn(2, 48, 4), state["output.weight"]]
    for tensor in tensors:
        written += tensor.numpy().tobytes()
    file.write_bytes(written)
    llama2c.convert(file, tmp_path)
    loaded = load_llama(tmp_path)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    for wrong in (b"plain text " * 8, written[:-4]):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match="a.bin: not in llama2.c's first format"):
            llama2c.convert(file, tmp_path)
