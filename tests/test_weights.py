"""model.load_llama and support/weights.py: checkpoints of both layouts, and what is refused."""

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import refusal
from reference import meta_state, permute
from safetensors.torch import save_file

from model import Llama, LlamaConfig, hugging_face_name, load_base, load_llama
from support.command_line import TINY

TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7, 7, 5, 9, 60, 12]])
META = [f"consolidated.{n:02}.pth" for n in range(8)]
HF, BIN = "model.safetensors", "pytorch_model.bin"
SHARDS, BINS = ["model-1.safetensors", "model-2.safetensors"], ["pytorch_model-1.bin", BIN]
WQ, Q_PROJ = "layers.0.attention.wq.weight", "model.layers.0.self_attn.q_proj.weight"

# --- Checkpoints, written as Meta and Hugging Face do -----------------------------------


def configuration(c: LlamaConfig, meta: bool) -> dict:
    if meta:
        keys = ("dim", "n_layers", "n_heads", "n_kv_heads", "norm_eps", "vocab_size")
        return {key: getattr(c, key) for key in keys}
    return dict(
        model_type="llama", hidden_act="silu", hidden_size=c.dim, vocab_size=c.vocab_size,
        intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers, rms_norm_eps=c.norm_eps,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads,
        tie_word_embeddings=False, max_position_embeddings=c.context,
    )


def write_model(path, model, files, edit=lambda state: None, **changes) -> Path:
    """In Meta's layout if `files` are consolidated.NN.pth, cut as by its model parallelism, and
    else in Hugging Face's. `edit` changes what the last file has, `changes` the configuration."""
    c, meta = model.config, files[0] in META
    path.mkdir(exist_ok=True)
    file = path / ("params.json" if meta else "config.json")
    file.write_text(json.dumps(configuration(c, meta) | changes))
    ignored = "rope.freqs" if meta else "model.layers.0.self_attn.rotary_emb.inv_freq"
    states = [{ignored: torch.zeros(c.head_dim // 2)} for _ in files]
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
    """Loaded to the bit. The repr of a configuration, by which an adapter knows its base, is the
    model's but for the `expected` fields."""
    loaded = load_llama(path)
    state = loaded.state_dict()
    assert all(torch.equal(state.pop(name), p) for name, p in model.state_dict().items())
    assert not state and repr(loaded.config) == repr(replace(model.config, **expected))
    return loaded


# --- What is loaded ---------------------------------------------------------------------

UNNAMED = {"context": 4096}  # Meta's configuration does not say it
# As Hugging Face writes what is not given.
NULLS = dict.fromkeys([
    "attention_bias", "mlp_bias", "sliding_window", "partial_rotary_factor", "rope_theta",
    "rope_scaling", "tie_word_embeddings", "qkv_bias"])


@pytest.mark.parametrize("files, changes, expected", [
    (META, {"vocab_size": -1, "ffn_dim_multiplier": 1.1}, UNNAMED),  # as for 70B
    (META[:1], dict.fromkeys(["rope_theta", "max_seq_len", "ffn_dim_multiplier"]), UNNAMED),
    ([HF], NULLS | {"rope_parameters": {"rope_type": None, "rope_theta": None}}, {}),
    (META[:2], {"rope_theta": 1e6, "max_seq_len": 64}, {"rope_theta": 1e6}),
    ([HF], {"rope_theta": 10000, "hidden_size": 32.0}, {}),  # the same numbers
    (SHARDS, {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    (BINS, {"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0}},
     {"rope_scale": 8.0, "rope_theta": 9.0}),
    ([HF], {"head_dim": 8, "rope_theta": 5.0, "rope_scaling": {
        "type": "linear", "factor": 4, "rope_theta": 7, "original_max_position_embeddings": 16}},
     {"rope_scale": 4.0, "rope_theta": 7.0, "context": 16})])
def test_both_layouts(tmp_path, model, files, changes, expected):
    load(write_model(tmp_path, model, files, **changes), model, **expected)
    half = load_llama(tmp_path, torch.bfloat16)
    assert all(torch.equal(p, q.bfloat16()) for p, q in zip(half.parameters(), model.parameters()))


@pytest.mark.parametrize("edit", [lambda s: None, lambda s: s.pop("lm_head.weight")])
def test_tied_embeddings(tmp_path, model, edit):
    """The output matrix is that of the embeddings, whether the file repeats it or not."""
    model.output.weight.data = model.tok_embeddings.weight.data.clone()
    loaded = load_llama(write_model(tmp_path, model, [HF], edit, tie_word_embeddings=True))
    assert torch.equal(loaded(TOKENS), model(TOKENS)) and not hasattr(loaded, "output")


def test_an_output_matrix_that_was_trained_apart(tmp_path, model):
    """It is used, though the configuration says that embeddings and output matrix are one."""
    load(write_model(tmp_path, model, SHARDS, tie_word_embeddings=True), model, tied=False)

    def in_8_bits(state: dict) -> None:
        state["lm_head.weight"] = state["lm_head.weight"].to(torch.int8)

    other = write_model(tmp_path / "other", model, [HF], in_8_bits, tie_word_embeddings=True)
    refusal(load_llama, other, "lm_head.weight", "int8")


def test_what_an_index_does_not_name_is_not_loaded(tmp_path, model):
    """Such as a shard of an older save. Without an index a tensor that is there twice is refused,
    and so is a whole file beside an index of others."""
    write_model(tmp_path, model, SHARDS)
    save_file({Q_PROJ: torch.ones(32, 32)}, tmp_path / "model-3.safetensors")
    refusal(load_llama, tmp_path, f"{Q_PROJ} is in two files")
    (tmp_path / "params.json").write_text("{}")  # of another program
    names = {f"tensor {n}": file for n, file in enumerate(SHARDS)}
    (tmp_path / f"{HF}.index.json").write_text(json.dumps({"weight_map": names}))
    load(tmp_path, model)
    save_file({}, tmp_path / HF)
    refusal(load_llama, tmp_path, f"it does not name {HF}; remove one")
    for outside in ("../other.safetensors", "a/../../b.safetensors", f"{tmp_path.parent}/c"):
        (tmp_path / f"{HF}.index.json").write_text(json.dumps({"weight_map": {"a": outside}}))
        refusal(load_llama, tmp_path, f"{outside}, which is outside its folder")


# --- What is refused --------------------------------------------------------------------


@pytest.mark.parametrize("changes, sentence", [
    ({"model_type": "mistral"}, "model_type mistral is not implemented"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_type yarn is not implemented"),
    ({"rope_scaling": {"factor": 8.0}}, "rope_scaling has factor, which rope_type default does"),
    ({"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "type linear and rope_type llama3"),
    ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "llama3"}},
     "rope_parameters and rope_scaling contradict"),
    ({"rope_theta": 0}, "rope_theta 0 is not positive"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not impl"),
    ({"head_dim": 16}, "head_dim 16, which is not dim / heads"),
    ({"hidden_size": 32.5}, "dim 32.5 is not of type int"),
    ({"num_hidden_layers": 0}, "n_layers 0 is not positive"),
    ({"num_hidden_layers": 3}, "3 layers, but 2 in the weights"),  # a million would take hours
    ({"intermediate_size": 2**60}, f"ffn_dim {2**60} is larger than 16,777,216"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads, 3 of keys and values, do not"),
    ({"hidden_size": 34}, "dim 34 and 4 heads"),
])
def test_a_config_json_that_is_no_llamas(tmp_path, model, changes, sentence):
    """It is refused when it is read, not when it has made other figures."""
    write_model(tmp_path, model, [HF], **changes)
    refusal(load_llama, tmp_path, "config.json", "not a plain Llama-2", sentence)


@pytest.mark.parametrize("changes, sentence", [
    ({"use_scaled_rope": True}, "use_scaled_rope is not implemented"),
    ({"rope_scaling_factor": 8}, "rope_scaling_factor: not implemented"),
    ({"vocab_size": 50}, "vocab_size 50, but 64 in the weights"),
    ({"n_heads": 8}, "n_heads 8 leaves 4 channels for a head, but 8 in the weights")])
def test_a_params_json_that_contradicts_its_weights(tmp_path, model, changes, sentence):
    refusal(load_llama, write_model(tmp_path, model, META[:1], **changes), sentence)


@pytest.mark.parametrize("files, lost, parts", [
    ([HF], "config.json", ["no config.json and no params.json; docs/models.md says"]),
    ([HF], HF, ["there is no model*.safetensors and no pytorch_model*.bin in it"]),
    (SHARDS, SHARDS[0], ["missing", "model.embed_tokens.weight"]),
    (META[:2], META[1], ["a file of weights is missing"])])
def test_a_missing_file(tmp_path, model, files, lost, parts):
    (write_model(tmp_path, model, files) / lost).unlink()
    refusal(load_llama, tmp_path, *parts)


@pytest.mark.parametrize("fault, parts", [
    (lambda s, q: s.pop(q), [Q_PROJ, "missing: "]),
    (lambda s, q: s.update(surplus=s.pop(q)), ["surplus is no weight"]),
    (lambda s, q: s.update({q: s[q].to(torch.int8)}), [Q_PROJ, "int8"]),
    (lambda s, q: s.update({q: s[q].to(torch.float8_e5m2)}), [Q_PROJ, "float8_e5m2"]),
    (lambda s, q: s[q].__setitem__((0, 0), math.nan), [Q_PROJ, "not finite"]),
    (lambda s, q: s.update({q: s[q].double() + 1e99}), [Q_PROJ, "not finite"]),
    (lambda s, q: s.update({q: s[q][:, 1:].clone()}), [Q_PROJ, "(32, 31)", "(32, 32)"]),
])
def test_a_wrong_tensor_is_named(tmp_path, model, fault, parts):
    write_model(tmp_path, model, [HF], lambda state: fault(state, Q_PROJ))
    refusal(load_llama, tmp_path, *parts)


class Intruder:
    """Makes a directory where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("name", [META[0], HF, BIN])
def test_files_that_are_damaged_or_no_weights_are_named(tmp_path, model, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_model(tmp_path, model, [name]) / name
    whole = file.read_bytes()
    for content in (b"plain text " * 50, whole[:-1], Intruder(), 3):
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save({WQ: content}, file)
        refusal(load_llama, tmp_path, f"{name}: cannot be read as weights (", "Error: ")
    assert not Path("made").exists()


def test_an_adapter_of_peft_is_not_left_out_silently(tmp_path, model):
    (write_model(tmp_path, model, [HF]) / "adapter_config.json").write_text("{}")
    refusal(load_llama, tmp_path, "an adapter of peft, which is not read; merge it")


@pytest.mark.parametrize("content, sentence", [
    ("[1, 2048]", "it has more tokens than the model"), ("5", "must be a list of ids"),
    ("[]", "must be a list of ids"), ("[-1]", "has what is no id")])
def test_what_begins_a_text_is_in_the_model(tmp_path, content, sentence):
    """An id above all of its embeddings would be an IndexError."""
    shutil.copytree(TINY, tmp_path / "base")
    (tmp_path / "base" / "prefix.json").write_text(content)
    refusal(load_base, tmp_path / "base", sentence)
