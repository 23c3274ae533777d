"""model.py: the Llama, its cache, the loading of both layouts, the tokenizer."""

import ctypes
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import meta_state, permute, reference_logits
from safetensors.torch import save_file

from generate import Tokenizer, settings_for
from lococo import AdaptedLlama
from model import (
    KVCache, Llama, LlamaConfig, UserError, hugging_face_name,
    load_llama, rope, rotate)  # fmt: skip

TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7, 7, 5, 9, 60, 12]])
SMALL = LlamaConfig(32, 2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, context=64)


@pytest.mark.parametrize("cuts, gradients", [
    ((12,), True), ((5, 7), True), ((5, 6, 1), False), ((1,) * 12, False)])  # fmt: skip
@pytest.mark.parametrize("config", [
    SMALL, replace(SMALL, n_kv_heads=4),
    replace(SMALL, n_kv_heads=1, rope_scale=2.5, rope_theta=100.0, norm_eps=0.1)])  # fmt: skip
def test_logits_equal_a_llama_written_a_second_time(model, cuts, gradients):
    """Read at once, and in pieces with a cache."""
    state, cache = meta_state(model), KVCache(model.config)
    rows = torch.cat((TOKENS, TOKENS.flip(1)))
    expected = torch.stack([reference_logits(state, model.config, row) for row in rows])
    with torch.set_grad_enabled(gradients):
        pieces = [model(piece, cache) for piece in rows.split(cuts, dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1).double(), expected, atol=1e-4)
    assert cache.size == cache.seen == 12
    assert cache.nbytes == 2 * 12 * 2 * 2 * model.config.n_kv_heads * 8 * 4  # k and v, D, bytes


def test_angles_are_float32_far_from_the_start():
    p = torch.arange(0, 4096, 7)
    angle = p.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    expected = torch.stack((angle.cos(), angle.sin()))
    assert torch.allclose(torch.stack(rope(p, SMALL)).double(), expected, atol=1e-3)
    x = torch.randn(1, 2, len(p), 8).bfloat16()  # is rounded once
    assert torch.equal(rotate(x, *rope(p, SMALL)), rotate(x.float(), *rope(p, SMALL)).bfloat16())


# --- Loading -------------------------------------------------------------------------------------

META = [f"consolidated.{n:02}.pth" for n in range(8)]
HF, BIN = "model.safetensors", "pytorch_model.bin"
SHARDS, BINS = ["model-1.safetensors", "model-2.safetensors"], ["pytorch_model-1.bin", BIN]
WQ, Q_PROJ = "layers.0.attention.wq.weight", "model.layers.0.self_attn.q_proj.weight"


def write_model(path, model, files, edit=lambda state: None, **changes) -> Path:
    """As Meta does if `files` are consolidated.NN.pth, cut as by its model parallelism, and else as
    Hugging Face does. `edit` changes what the last file has, `changes` the configuration."""
    c, meta = model.config, files[0] in META
    if meta:
        keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "vocab_size")
        about = {key: getattr(c, key) for key in keys} | {"multiple_of": 32}
    else:
        about = dict(
            model_type="llama", hidden_act="silu", hidden_size=c.dim, intermediate_size=c.ffn_dim,
            num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, vocab_size=c.vocab_size,
            num_key_value_heads=c.n_kv_heads, rms_norm_eps=c.norm_eps, tie_word_embeddings=False,
            max_position_embeddings=c.context)  # fmt: skip
    path.mkdir(exist_ok=True)
    (path / ("params.json" if meta else "config.json")).write_text(json.dumps(about | changes))
    ignored = "rope.freqs" if meta else "model.layers.0.self_attn.rotary_emb.inv_freq"
    states = [{ignored: torch.zeros(4)} for _ in files]
    for n, (name, w) in enumerate(meta_state(model).items()):
        kind = name.split(".")[-2]
        if meta:
            parts = w.chunk(len(files), dim=int(kind in ("tok_embeddings", "wo", "w2")))
            for state, part in zip(states, [w] * len(files) if "norm" in kind else parts):
                state[name] = part.clone()
        else:
            heads = {"wq": c.n_heads, "wk": c.n_kv_heads}.get(kind)
            states[n % len(files)][hugging_face_name(name)] = permute(w, heads) if heads else w
    edit(states[-1])
    for file, state in zip(files, states):
        (save_file if file.endswith("safetensors") else torch.save)(state, path / file)
    return path


def load(path, model, **expected) -> Llama:
    """Loaded to the bit; `expected` are fields of the configuration."""
    loaded = load_llama(path)
    state = loaded.state_dict()
    assert all(torch.equal(state.pop(name), p) for name, p in model.state_dict().items())
    assert not state and {key: getattr(loaded.config, key) for key in expected} == expected
    return loaded


@pytest.mark.parametrize("files", [META[:1], META[:2], [HF], SHARDS, [BIN], BINS], ids=str)
def test_both_layouts(tmp_path, model, files):
    context = 4096 if files[0] in META else 64  # Meta's configuration does not say it
    loaded = load(write_model(tmp_path, model, files), model, context=context, rope_theta=10000.0)
    assert torch.equal(loaded(TOKENS), model(TOKENS))
    half = load_llama(tmp_path, torch.bfloat16)
    assert half(TOKENS).dtype == torch.float32
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(half.parameters(), model.parameters()))


@pytest.mark.parametrize("stored_twice", [False, True])
def test_tied_embeddings(tmp_path, model, stored_twice):
    """The output matrix is that of the embeddings, whether the file repeats it or not."""
    model.output.weight.data = model.tok_embeddings.weight.data.clone()

    def edit(state):
        if not stored_twice:
            del state["lm_head.weight"]

    loaded = load_llama(write_model(tmp_path, model, [HF], edit, tie_word_embeddings=True))
    assert torch.equal(loaded(TOKENS), model(TOKENS)) and not hasattr(loaded, "output")


def test_a_cache_grows_in_place_without_gradients(model):
    """A decoded token moves nothing that is held, but where the buffer doubles. That of a memory
    takes no more room than M + T entries of 2 heads of 8 channels."""
    full, memory = KVCache(model.config), AdaptedLlama(model, settings_for("h2o", 8, 6, 40)).cache()
    places = set()
    with torch.no_grad():
        for t in range(40):
            for cache in (full, memory):
                model(TOKENS[:, :1] + t, cache)
                cache.detach()  # as where a text is scored
            places.add(full.keys[0].data_ptr())
            assert memory.keys[0].untyped_storage().nbytes() <= 4 * 2 * 8 * 14
    assert len(places) <= 6  # 1, 4, 10 .. 94


def test_metas_layout_as_the_70b_has_it(tmp_path, tokenizer):
    """Eight shards with a key/value head in each, a vocabulary of -1, and the tokenizer one level
    up."""
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.file.read_bytes())
    model = Llama(LlamaConfig(64, 1, 16, 8, ffn_dim=224, vocab_size=2048))
    path = write_model(tmp_path / "70B", model, META, rope_theta=1e6, vocab_size=-1)
    load(path, model, rope_theta=1e6)
    assert Tokenizer(path).vocab_size == 2048


@pytest.mark.parametrize("changes, expected", [
    ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scale": 1.0}),
    ({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0}},
     {"rope_scale": 8.0, "rope_theta": 9.0}),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_scale": 4.0}),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_scale": 2.0}),
])  # fmt: skip
def test_settings_of_hugging_face(tmp_path, changes, expected):
    model = Llama(replace(SMALL, **expected))
    load(write_model(tmp_path, model, [HF], **changes), model, **expected)


def refusal(path, *parts: str) -> str:
    """The sentence by which a model is refused: a short line that names it and has all `parts`."""
    with pytest.raises(UserError) as caught:
        load_llama(path)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence.replace(str(path.parent), "")) < 350
    assert all(part in sentence for part in (str(path), *parts)), sentence
    return sentence


@pytest.mark.parametrize("key, value, sentence", [
    ("model_type", "mistral", "model_type mistral"), ("hidden_act", "gelu", "hidden_act gelu"),
    ("sliding_window", 4096, "sliding_window 4096"), ("mlp_bias", True, "mlp_bias True"),
    ("attention_bias", True, "attention_bias True"),
    ("rope_scaling", {"type": "yarn"}, "yarn"), ("rope_parameters", {"rope_type": "x"}, "type x"),
    ("quantization_config", {"bits": 4}, "quantization_config"), ("hidden_size", 2**70, "Overflow"),
    ("num_hidden_layers", None, "NoneType"),
])  # fmt: skip
def test_what_is_not_this_llama_is_refused_by_name(tmp_path, model, key, value, sentence):
    refusal(write_model(tmp_path, model, [HF], **{key: value}), sentence)


def test_missing_configurations_and_shards_are_noticed(tmp_path, model):
    with pytest.raises(FileNotFoundError, match="config.json"):  # neither layout
        load_llama(tmp_path)
    write_model(tmp_path, model, SHARDS)
    (tmp_path / SHARDS[0]).unlink()
    refusal(tmp_path, "Missing", "tok_embeddings.weight")
    write_model(tmp_path, model, META[:2])
    (tmp_path / META[1]).unlink()
    refusal(tmp_path, "size mismatch", "[64, 16]", "[64, 32]")
    write_model(tmp_path, model, META[:2], lambda s: s.update({WQ: s[WQ][:, 1:].clone()}))
    refusal(tmp_path, f"{WQ} does not fit")  # of one shard what the other has


@pytest.mark.parametrize("fault, named", [
    (lambda s, q: s.pop(q), "wq.weight"), (lambda s, q: s.update(surplus=s[q] + 1), "surplus"),
    (lambda s, q: s.update({q: s[q].to(torch.int8)}), "int8"),
    (lambda s, q: s.update({q: s[q][2:].clone()}), "wq.weight"),
    (lambda s, q: s.update({q: s[q][:, 1:].clone()}), "wq.weight")])  # fmt: skip
@pytest.mark.parametrize("files", [META[:1], [HF], [BIN]], ids=str)
def test_a_wrong_tensor_is_named(tmp_path, model, files, fault, named):
    q = WQ if files[0] in META else Q_PROJ
    refusal(write_model(tmp_path, model, files, lambda state: fault(state, q)), named)


class Intruder:
    """Makes a directory where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("name", [META[0], HF, BIN])
def test_files_that_are_damaged_or_no_weights_are_named(tmp_path, model, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_model(tmp_path, model, [name]) / name
    whole = file.read_bytes()
    for content in (b"", b"plain text " * 50, b"\x00" * 500, b"\xff" * 500, b"PK\x03\x04" * 50,
                    whole[:4], whole[:100], whole[: len(whole) // 2], whole[:-1],
                    Intruder(), 3, {WQ: torch.ones(1)}):  # fmt: skip
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save({WQ: content}, file)
        refusal(tmp_path, f"{name}: cannot be read as weights")
    assert not Path("made").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status is Linux's")
@pytest.mark.parametrize("files", [META[:2], [HF], [BIN]], ids=str)
def test_loading_holds_about_one_copy_of_the_weights(tmp_path, files, monkeypatch):
    """In memory that is the process's alone: a file that is mapped into it does not count."""
    model = Llama(LlamaConfig(256, 4, 8, 8, ffn_dim=768, vocab_size=1024))
    path = write_model(tmp_path, model, files, multiple_of=256)
    load_llama(path)  # the first time imports much of torch
    inner, seen = torch.Tensor.to, []

    def to(*args, **more):
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back to the system
        status = Path("/proc/self/status").read_text()
        seen.append(1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1]))
        return inner(*args, **more)

    monkeypatch.setattr(torch.Tensor, "to", to)
    TOKENS.to("cpu")  # looks before the loading
    loaded = load_llama(path)
    TOKENS.to("cpu")
    assert 0.95 < (max(seen) - seen[0]) / sum(p.nbytes for p in loaded.parameters()) < 1.3


def test_a_text_comes_back_and_bos_is_only_at_its_start(tokenizer):
    for text in ("def f(x):\n    return x\n", "  two  spaces ", "<s> a </s>", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and not {1, 2} & set(ids[1:])
        assert tokenizer.sp.decode(ids) == text and tokenizer.sp.encode(text) == ids[1:]


def test_a_tokenizer_that_is_missing_or_damaged_is_named(tmp_path, tokenizer):
    for content in (None, tokenizer.file.read_bytes()[:1000]):
        if content:
            (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(UserError, match="7B: no readable tokenizer.model"):
            Tokenizer(tmp_path / "7B")
