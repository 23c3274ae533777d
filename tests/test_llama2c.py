"""llama2c.py: a checkpoint that is written here, as llama2.c's export.py writes it, is read back."""

import struct

import llama2c
import pytest
import torch
from conftest import meta_state

from model import Llama, LlamaConfig, UserError, load_llama


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_becomes_a_llama(tmp_path, tied):
    torch.manual_seed(0)
    model = Llama(LlamaConfig(32, 2, 4, n_kv_heads=2, ffn_dim=96, vocab_size=60, context=48))
    if tied:
        model.output.weight = model.tok_embeddings.weight
    file, state = tmp_path / "a.bin", meta_state(model)
    written = struct.pack("7i", 32, 96, 2, 4, 2, 60 if tied else -60, 48)
    kinds = "attention_norm attention.wq attention.wk attention.wv attention.wo ffn_norm"
    kinds += " feed_forward.w1 feed_forward.w2 feed_forward.w3"
    names = [f"layers.{n}.{kind}" for kind in kinds.split() for n in range(2)]
    tensors = [state[f"{name}.weight"] for name in ("tok_embeddings", *names, "norm")]
    tensors += [torch.randn(2, 48, 4)] + [state["output.weight"]] * (not tied)
    for tensor in tensors:
        written += tensor.numpy().tobytes()
    file.write_bytes(written)
    llama2c.convert(file, tmp_path)
    loaded = load_llama(tmp_path)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    for wrong in (b"", b"plain text " * 8, written[:-4], written + bytes(4), written[:30]):
        file.write_bytes(wrong)
        with pytest.raises(UserError, match="a.bin: not in llama2.c's first format"):
            llama2c.convert(file, tmp_path)
