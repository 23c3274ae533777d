"""Files that are damaged, cut short or cannot be written: a sentence, never another model, never half a file."""

import json
import os
import resource

import pytest
import torch
from conftest import meta_state
from safetensors.torch import save_file

from lococo import read_file, write_file
from model import Llama, Tokenizer, UserError, hugging_face_name

TRIALS = 1000


def damaged(whole: bytes, seed: int):
    """TRIALS copies: a bit of a byte flipped, most in the first 2,000 bytes, where a header is, or the end cut off."""
    g = torch.Generator().manual_seed(seed)

    def below(n: int) -> int:
        return int(torch.randint(n, (), generator=g))

    for trial in range(TRIALS):
        at = below(len(whole) if trial % 2 else min(len(whole), 2000))
        if trial % 5 == 0:
            yield whole[:at]
        else:
            yield whole[:at] + bytes([whole[at] ^ 1 << below(8)]) + whole[at + 1 :]


@pytest.mark.parametrize("kind", ["adapter", "state", "memory"])
def test_a_changed_byte_is_always_noticed(tmp_path, kind):
    file = tmp_path / "some.safetensors"
    tensors = {"a": torch.randn(7, 5), "b.c": torch.arange(9), "d": torch.tensor(2.0, dtype=torch.bfloat16)}
    write_file(file, kind, tensors, step=3, words="\u00e9")
    back, about = read_file(file, kind)
    assert all(torch.equal(back[name], t) for name, t in tensors.items()) and len(back) == 3
    assert about["step"] == 3 and about["words"] == "\u00e9"
    whole = file.read_bytes()
    for content in damaged(whole, 0):
        file.write_bytes(content)
        with pytest.raises(UserError, match="some.safetensors: not a file of this program, or damaged"):
            read_file(file, kind)
    file.write_bytes(whole)
    with pytest.raises(UserError, match=f"of kind {kind}, not recipe"):
        read_file(file, "recipe")


def test_what_cannot_be_written_leaves_what_was_there(tmp_path):
    file = tmp_path / "some.safetensors"
    write_file(file, "state", {"a": torch.ones(10)})
    whole = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as a disk that is full
    try:
        with pytest.raises(UserError, match="some.safetensors: cannot be written .File too large.; what was there"):
            write_file(file, "state", {"a": torch.zeros(1000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == whole and os.listdir(tmp_path) == ["some.safetensors"]
    with pytest.raises(UserError, match="cannot be written .No such file or directory.;"):
        write_file(tmp_path / "gone" / "some.safetensors", "state", {"a": torch.zeros(1000)})


def hugging_face(path, model):
    c = model.config
    (path / "config.json").write_text(json.dumps(dict(
        model_type="llama", hidden_size=c.dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, intermediate_size=c.ffn_dim, vocab_size=c.vocab_size,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.context)))  # fmt: skip
    save_file({hugging_face_name(n): p.detach() for n, p in model.named_parameters()}, path / "model.safetensors")


def meta(path, model):
    c = model.config
    (path / "params.json").write_text(json.dumps(dict(
        dim=c.dim, n_layers=c.n_layers, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, multiple_of=32, norm_eps=1e-5,
        vocab_size=c.vocab_size)))  # fmt: skip
    torch.save(meta_state(model), path / "consolidated.00.pth")


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("layout, name", [(hugging_face, "model.safetensors"), (hugging_face, "config.json"),
                                          (meta, "consolidated.00.pth"), (meta, "params.json")])  # fmt: skip
def test_a_damaged_checkpoint_is_loaded_or_refused(tmp_path, model, layout, name):
    """It has no checksum of its own, so a changed weight may pass; a crash, a hang or another error may not."""
    layout(tmp_path, model)
    refused = 0
    whole = (tmp_path / name).read_bytes()
    for content in damaged(whole, 1):
        (tmp_path / name).write_bytes(content)
        try:
            Llama.from_pretrained(tmp_path)
        except UserError as error:
            assert str(tmp_path) in str(error) or "sizes must be" in str(error) or "multiple" in str(error)
            refused += 1
    assert refused > TRIALS // 5


@pytest.mark.parametrize("key, value, sentence", [
    ("hidden_size", 2**27, "parameters, the files have"), ("vocab_size", 2**27, "parameters, the files have"),
    ("num_hidden_layers", 2**27, "134217728 layers, the files"), ("intermediate_size", 10**30, "whole numbers from 1"),
])  # fmt: skip
def test_a_configuration_that_claims_a_huge_model_takes_no_memory(tmp_path, model, key, value, sentence):
    hugging_face(tmp_path, model)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (64 << 30, limits[1]))  # 2^27 embeddings alone take 17 GB, a layer 2^56
    try:
        with pytest.raises(UserError, match=sentence):
            Llama.from_pretrained(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_damaged_tokenizer_is_loaded_or_refused(tmp_path, tokenizer):
    whole = tokenizer.file.read_bytes()
    refused = 0
    for content in damaged(whole, 2):
        (tmp_path / "tokenizer.model").write_bytes(content)
        try:
            Tokenizer(tmp_path).encode("def f(x):")
        except UserError as error:
            assert "tokenizer.model" in str(error)
            refused += 1
    assert refused > TRIALS // 10


def test_equal_contents_make_equal_files(tmp_path):
    """safetensors writes its header in any order; a file's checksum is its name to others."""
    for n in range(8):
        write_file(tmp_path / str(n), "adapter", {name: torch.ones(3) for name in "abcdefgh"}, settings={}, base="x")
    assert len({(tmp_path / str(n)).read_bytes() for n in range(8)}) == 1
