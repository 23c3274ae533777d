"""model.py: the Llama, its cache, the loading of both layouts, tokens; support/files.py: files of
our own."""

import copy
import json
import math
import os
import re
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from reference import meta_state, permute, reference_logits
from safetensors.torch import save_file
from sentencepiece import SentencePieceTrainer

from generate import prefill
from lococo import AdaptedLlama, identity, load_adapter, settings_for
from model import KVCache, Llama, LlamaConfig, Tokenizer, hugging_face_config, hugging_face_name
from model import attention, causal_mask, load_base, load_llama, rope, rotate
from support.command_line import HERE, TINY, Machine
from support.files import UserError, checksum, created, is_out_of_memory, read_file
from support.files import write_file, write_json, write_whole

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


def test_frequencies_of_llama_3(tmp_path):
    """Of Llama 3.2 1B, by the published rule: a wave is longer than 8,192 tokens: divided by 32;
    shorter than a quarter of it: kept; in between: a blend."""
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}  # fmt: skip
    content = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
               "intermediate_size": 8, "vocab_size": 9, "rms_norm_eps": 1e-5,
               "rope_theta": 500000.0,
               "max_position_embeddings": 131072, "rope_scaling": scaling}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    config, expected = hugging_face_config(tmp_path / "config.json"), []
    for i in range(32):
        frequency = 500000.0 ** (-i / 32)
        wave = 2 * math.pi / frequency
        if wave > 8192:
            frequency /= 32
        elif wave > 8192 / 4:
            smooth = (8192 / wave - 1) / (4 - 1)
            frequency = (1 - smooth) * frequency / 32 + smooth * frequency
        expected.append(frequency)
    cos, sin = rope(torch.tensor([1000.0]), config)
    angle = 1000 * torch.tensor(expected, dtype=torch.float64)
    assert torch.allclose(cos[0].double(), angle.cos(), atol=1e-4)
    assert torch.allclose(sin[0].double(), angle.sin(), atol=1e-4)
    short = torch.tensor(expected)
    assert torch.allclose(rope(torch.tensor([1.0]), config)[1][0], short.sin(), rtol=1e-5)


def test_angles_are_float32_far_from_the_start():
    p = torch.arange(0, 4096, 7)
    angle = p.double()[:, None] * 10000.0 ** (-torch.arange(0, 8, 2).double() / 8)
    expected = torch.stack((angle.cos(), angle.sin()))
    assert torch.allclose(torch.stack(rope(p, SMALL)).double(), expected, atol=1e-3)
    x = torch.randn(1, 2, len(p), 8).bfloat16()  # is rounded once
    assert torch.equal(rotate(x, *rope(p, SMALL)), rotate(x.float(), *rope(p, SMALL)).bfloat16())


# --- Loading ----------------------------------------------------------------------------

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


@pytest.mark.parametrize("edit", [lambda s: None, lambda s: s.pop("lm_head.weight")])
def test_tied_embeddings(tmp_path, model, edit):
    """The output matrix is that of the embeddings, whether the file repeats it or not."""
    model.output.weight.data = model.tok_embeddings.weight.data.clone()
    loaded = load_llama(write_model(tmp_path, model, [HF], edit, tie_word_embeddings=True))
    assert torch.equal(loaded(TOKENS), model(TOKENS)) and not hasattr(loaded, "output")


def test_a_decoded_token_needs_no_mask(monkeypatch):
    """It sees all entries, and PyTorch's fast kernels take no mask."""
    usual, masks = F.scaled_dot_product_attention, []

    def watched(q, k, v, mask, **options):
        masks.append(mask)
        return usual(q, k, v, mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    q, (k, v) = torch.randn(1, 2, 3, 4), torch.randn(2, 1, 2, 5, 4)
    last = attention(q[:, :, 2:], k, v)
    three = attention(q, k, v)
    assert masks[0] is None and masks[1] is not None
    torch.testing.assert_close(last, three[:, :, 2:])


def test_the_perplexity_of_the_embedded_model():
    """Of the first 512 tokens of the prompt. A change of the model shows here."""
    model, tokenizer = load_base(TINY, Machine("cpu", torch.float32))
    ids = tokenizer.encode((HERE / "assets" / "prompt.txt").read_text())[:512]
    tokens = torch.tensor(ids)
    with torch.no_grad():
        logits = model(tokens[None])[0]
    assert F.cross_entropy(logits[:-1], tokens[1:]).exp().item() == pytest.approx(41.9965, rel=1e-4)


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
            places.add(full.keys[0].buffer.data_ptr())
            assert memory.keys[0].buffer.nbytes <= 4 * 2 * 8 * 14
    assert len(places) <= 5  # for 1, 4, 10, 22, 46


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("method", ["full", "h2o"])
def test_a_copied_cache_leaves_the_original_as_it_is(model, method, gradients):
    """Both go on with other tokens: each gives what it gives where there is no other."""
    adapted = AdaptedLlama(model, settings_for(method, 8, 6, 40))
    ends = (TOKENS, TOKENS.flip(1))
    expected = []
    for end in ends:
        cache = adapted.cache()
        expected.append([model(x, cache) for x in (*TOKENS.split(4, dim=1), *end.split(3, dim=1))])
    with torch.set_grad_enabled(gradients):
        cache = adapted.cache()
        for x in TOKENS.split(4, dim=1):
            model(x, cache)
        copied = cache.copy()
        for n in range(4):  # in turns, so that a room they shared would be overwritten
            for which, end, logits in zip((cache, copied), ends, expected):
                found = model(end.split(3, dim=1)[n], which)
                assert torch.allclose(found, logits[3 + n], atol=1e-5)


def test_metas_layout_as_the_70b_has_it(tmp_path, tokenizer):
    """Eight shards with a key/value head in each, a vocabulary of -1, and the tokenizer one level
    up."""
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.file.read_bytes())
    model = Llama(LlamaConfig(64, 1, 16, 8, ffn_dim=224, vocab_size=2048))
    path = write_model(
        tmp_path / "70B", model, META, rope_theta=1e6, vocab_size=-1, ffn_dim_multiplier=1.3
    )
    load(path, model, rope_theta=1e6)
    assert Tokenizer(path).vocab_size == 2048


@pytest.mark.parametrize("changes, expected", [
    ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scale": 1.0}),
    ({"rope_parameters": {"rope_type": "linear", "factor": 8.0, "rope_theta": 9.0}},
     {"rope_scale": 8.0, "rope_theta": 9.0}),
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_scale": 4.0}),
    ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_scale": 2.0})])  # fmt: skip
def test_settings_of_hugging_face(tmp_path, changes, expected):
    model = Llama(replace(SMALL, **expected))
    load(write_model(tmp_path, model, [HF], **changes), model, **expected)


def refusal(path, *parts: str, call=load_llama, args=()) -> None:
    """It is refused by a short line that names it and has all `parts`."""
    with pytest.raises(UserError) as caught:
        call(path, *args)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence.replace(str(path.parent), "")) < 350
    assert all(part in sentence for part in (str(path), *parts)), sentence


@pytest.mark.parametrize("key, value, sentence", [
    ("model_type", "mistral", "model_type mistral"), ("hidden_act", "gelu", "hidden_act gelu"),
    ("sliding_window", 4096, "sliding_window 4096"), ("mlp_bias", True, "mlp_bias True"),
    ("attention_bias", True, "attention_bias True"),
    ("rope_scaling", {"type": "yarn"}, "yarn"), ("rope_parameters", {"rope_type": "x"}, "type x"),
    ("quantization_config", {"bits": 4}, "quantization_config"), ("hidden_size", 2**70, "larger"),
    ("num_hidden_layers", None, "NoneType")])  # fmt: skip
def test_what_is_not_this_llama_is_refused_by_name(tmp_path, model, key, value, sentence):
    refusal(write_model(tmp_path, model, [HF], **{key: value}), sentence)


@pytest.mark.parametrize("changes, sentence", [
    ({"vocab_size": 50}, "vocab_size 50, but 64 in the weights"),
    ({"multiple_of": 256}, "multiple_of and ffn_dim_multiplier give 256, but 96 in the weights"),
    ({"ffn_dim_multiplier": 3.0}, "give 256, but 96 in the weights"),
    ({"n_heads": 8}, "n_heads 8 leaves 4 channels for a head, but 8 in the weights")])
def test_a_params_json_that_contradicts_its_weights(tmp_path, model, changes, sentence):
    refusal(write_model(tmp_path, model, META[:1], **changes), sentence)


def test_missing_configurations_and_shards_are_noticed(tmp_path, model):
    refusal(tmp_path, "it has no config.json and no params.json; docs/models.md says")
    for files, lost, *parts in ((SHARDS, 0, "Missing", "tok_embeddings.weight"),
                                (META[:2], 0, "consolidated.00.pth: cannot be read"),
                                (META[:2], 1, "is a file consolidated.NN.pth missing")):
        (write_model(tmp_path, model, files) / files[lost]).unlink()
        refusal(tmp_path, *parts)
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


@pytest.mark.parametrize("error", [
    AttributeError("a bug of ours"), TypeError("another"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")])
def test_what_is_not_the_files_fault_is_not_called_so(tmp_path, model, monkeypatch, error):
    """While the model is made and weights are copied, a bug is a traceback, and a full memory is
    told as such."""
    write_model(tmp_path, model, [HF])
    for place in ("model.check_weight", "model.FeedForward.__init__"):
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=error))
            with pytest.raises(type(error)) as raised:
                load_llama(tmp_path)
            assert raised.value is error
    assert is_out_of_memory(error) == isinstance(error, RuntimeError)


def test_what_an_index_does_not_name_is_not_loaded(tmp_path, model):
    """Such as a shard of an older save. Without an index a tensor that is there twice is refused,
    and so is a whole file beside an index of others."""
    for files, index in ((SHARDS, HF), (BINS[:1], BIN)):
        path = write_model(tmp_path / index, model, files)
        (save_file if index == HF else torch.save)(
            {Q_PROJ: torch.ones(32, 32)}, path / files[0].replace("1", "3"))  # fmt: skip
        refusal(path, f"{Q_PROJ} is in two files")
        names = {f"tensor {n}": file for n, file in enumerate(files)}
        (path / f"{index}.index.json").write_text(json.dumps({"weight_map": names}))
        load(path, model)
    save_file({}, tmp_path / HF / HF)
    refusal(tmp_path / HF, "it does not name model.safetensors; remove one")
    (tmp_path / HF / f"{HF}.index.json").write_text("{}")
    refusal(tmp_path / HF, "index.json", "weight_map")


@pytest.mark.parametrize("changes", [
    {"rope_theta": 10000}, {"rope_theta": 10000.0}, {"hidden_size": 32.0, "rms_norm_eps": 1e-5}])
def test_a_number_is_the_same_however_it_is_written(tmp_path, model, changes):
    """The configuration's repr, by which an adapter knows its base, is the same."""
    found = load_llama(write_model(tmp_path, model, [HF], **changes)).config
    assert repr(found) == repr(model.config)
    stretched = {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 32.0}  # fmt: skip
    scaled = [stretched | {"factor": factor} for factor in (8, 8.0)]
    both = [load_llama(write_model(tmp_path, model, [HF], rope_scaling=s)).config for s in scaled]
    assert repr(both[0].llama3_rope) == repr(both[1].llama3_rope)


@pytest.mark.parametrize("changes, sentence", [
    ({"hidden_size": 32.5}, "dim 32.5 is not of type int"),
    ({"tie_word_embeddings": "false"}, "tied 'false' is not of type bool"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1,
                       "high_freq_factor": 4, "original_max_position_embeddings": 32}},
     "factor '8' is not of type float"),
    ({"max_position_embeddings": 0}, "context 0 is not positive"),
    ({"rms_norm_eps": -1e-5}, "norm_eps -1e-05 is not positive"),
    ({"rope_theta": math.inf}, "rope_theta inf is not positive"),
    ({"num_hidden_layers": 0}, "n_layers 0 is not positive"),
    ({"intermediate_size": 2**60}, f"ffn_dim {2**60} is larger than 16,777,216"),
    ({"num_attention_heads": 32, "num_key_value_heads": 16}, "32 heads, 16 of keys and values, do"),
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 heads, 3 of keys and values, do not"),
])  # fmt: skip
def test_numbers_that_make_no_llama(tmp_path, model, changes, sentence):
    """They are refused when they are read, not when they have made other figures."""
    refusal(write_model(tmp_path, model, [HF], **changes), "not a plain Llama-2", sentence)


def test_a_broken_file_is_the_one_that_is_named(tmp_path, tokenizer):
    shutil.copy(tokenizer.file, tmp_path)
    (tmp_path / "config.json").write_text('{"dim": ')
    refusal(tmp_path, "config.json: cannot be read as JSON (JSONDecodeError: Expecting value")
    for content, sentence in (
        ("[1,", "prefix.json: cannot be read as JSON"), ("[" * 99999, "prefix.json: cannot be"),
        ('"abc"', "no ids that begin a text: 'abc'"), ("[-1]", "no ids that begin a text: [-1]"),
        ("[]", "tokenizer.model is not a readable tokenizer"),
    ):  # fmt: skip
        (tmp_path / "prefix.json").write_text(content)
        refusal(tmp_path, sentence, call=Tokenizer)


def test_what_begins_a_text_is_in_the_model(tmp_path):
    """An id above all of its embeddings would be an IndexError."""
    shutil.copytree(TINY, tmp_path / "base")
    (tmp_path / "base" / "prefix.json").write_text("[1, 2048]")
    machine = Machine("cpu", torch.float32)
    refusal(tmp_path / "base", "it has more tokens than the model", call=load_base, args=(machine,))


def test_a_folder_without_weights(tmp_path, model):
    path = write_model(tmp_path, model, [HF])
    (path / f"{HF}").unlink()
    refusal(path, "there is no model*.safetensors and no pytorch_model*.bin in it")


@pytest.mark.parametrize("files", [META[:1], [HF]], ids=str)
def test_a_byte_order_mark_is_not_read(tmp_path, model, files):
    path = write_model(tmp_path, model, files)
    for file in path.glob("*.json"):
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    load(path, model)


def test_metas_tokenizer_is_found_from_everywhere(tmp_path, tokenizer, monkeypatch):
    """By a link to the model's directory, and from inside it."""
    (tmp_path / "llama" / "7B").mkdir(parents=True)
    (tmp_path / "llama" / "tokenizer.model").write_bytes(tokenizer.file.read_bytes())
    (tmp_path / "link").symlink_to("llama/7B")
    assert Tokenizer(tmp_path / "link").encode("x") == tokenizer.encode("x")
    monkeypatch.chdir(tmp_path / "llama" / "7B")
    assert Tokenizer(Path(".")).encode("x") == tokenizer.encode("x")


@pytest.mark.parametrize("bos, eos, begins", [(1, 2, 1), (-1, 1, 1), (-1, -1, None)])
def test_a_tokenizer_without_a_token_that_begins_a_text(tmp_path, bos, eos, begins):
    """The end of a text begins the next one. A tokenizer with neither is refused."""
    (tmp_path / "text").write_text("the cat sat on the mat and ran\n" * 20)
    SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=24,
        model_type="bpe", bos_id=bos, eos_id=eos, minloglevel=2)  # fmt: skip
    if begins is None:
        refusal(tmp_path, "no token that begins or ends a text", call=Tokenizer)
    else:
        found = Tokenizer(tmp_path)
        assert (found.bos, found.prefix, found.ends) == (begins, [begins], {eos})


class Intruder:
    """Makes a directory where it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("made",)


@pytest.mark.parametrize("name", [META[0], HF, BIN])
def test_files_that_are_damaged_or_no_weights_are_named(tmp_path, model, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_model(tmp_path, model, [name]) / name
    whole = file.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    for content in (b"", b"plain text " * 50, b"\xff" * 500, whole[:4], whole[:100], whole[:-1],
                    Intruder(), 3, pointer):  # fmt: skip
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save({WQ: content}, file)
        reason = "run: git lfs pull" if content is pointer else "Error: "
        refusal(tmp_path, f"{name}: cannot be read as weights (", reason)
    assert not Path("made").exists()


def test_a_text_comes_back_and_bos_is_only_at_its_start(tmp_path, tokenizer):
    for text in ("def f(x):\n    return x\n", "  two  spaces ", "<s> a </s>", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and not {1, 2} & set(ids[1:])
        assert tokenizer.decode(ids) == text and tokenizer.tokens.encode(text) == ids[1:]
    for content in (b"", tokenizer.file.read_bytes()[:1000]):
        (tmp_path / "tokenizer.model").write_bytes(content)
        refusal(tmp_path / "7B", "tokenizer.model is not a readable tokenizer", call=Tokenizer)


TENSORS = {
    "a.b": torch.randn(3, 5), "steps": torch.tensor(7.0), "none": torch.empty(0, 3),
    "half": torch.randn(4, 3).bfloat16().T, "every other": torch.arange(9)[::2],
    "ids": torch.arange(6, dtype=torch.int32),
}  # fmt: skip
ABOUT = {"step": 3, "words": "na\u00efve", "a": [None, 0.1]}
LORA_A = "model.layers.0.attention.wq.lora_a"


def same(a: dict, b: dict) -> bool:
    alike = (t.dtype == b[name].dtype and torch.equal(t, b[name]) for name, t in a.items())
    return a.keys() == b.keys() and all(alike)


def test_a_changed_byte_is_noticed(tmp_path):
    """A bit is flipped in each byte of the header, of what is said and of each tensor, and the file
    is cut off in many places. What is read all the same is what was written."""
    file, read = tmp_path / "file", 0
    write_file(file, {"another": torch.ones(3)})  # is replaced
    write_file(file, TENSORS, **ABOUT)
    whole = file.read_bytes()
    changed = [whole[:at] for at in range(0, len(whole), 9)]
    for at, byte in enumerate(whole):
        changed.append(whole[:at] + bytes([byte ^ 1 << at % 8]) + whole[at + 1 :])
    for content in [whole, *changed]:
        file.write_bytes(content)
        try:
            tensors, found = read_file(file)
            assert same(tensors, TENSORS) and found == ABOUT
            read += 1
        except UserError as error:
            assert str(error).startswith(f"{file}: ") and str(error).isprintable()
    assert 1 <= read < 10  # the whole, and changes of its padding
    zeros = torch.zeros(2, 3)
    alike = (zeros, zeros.T, zeros.flatten(), zeros.int())  # the same bytes
    assert len({checksum({"a": t}, "") for t in alike}) == 4


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}, {"content": "{}"}])
def test_files_of_other_programs_are_refused(tmp_path, metadata):
    save_file({"a": torch.ones(3)}, tmp_path / "file", metadata)
    refusal(tmp_path / "file", "damaged or another version's", call=read_file)


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    file, folder = tmp_path / "file", tmp_path / "folder"
    folder.mkdir()
    write_file(file, TENSORS)
    for place in (folder, tmp_path / "gone" / "file"):
        refusal(place, "cannot be written (", call=write_file, args=({},))

    def disk_is_full(tensors, path, metadata):
        path.write_bytes(b"the first half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("support.files.save_file", disk_is_full)
    refusal(file, "No space left on device", call=write_file, args=({},))
    assert same(read_file(file)[0], TENSORS) and sorted(tmp_path.iterdir()) == [file, folder]


def test_json_is_written_whole_and_is_json(tmp_path, monkeypatch):
    """Other languages' readers refuse Infinity and NaN. A full disk leaves the old file."""
    file = tmp_path / "figures.json"
    write_json(file, {"perplexity": {512: math.inf}, "nats": [1.5, math.nan, -math.inf]})
    text = file.read_text()
    assert json.loads(text) == {"perplexity": {"512": None}, "nats": [1.5, None, None]}

    def disk_is_full(self, text, encoding):
        self.write_bytes(b"the first half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", disk_is_full)
        refusal(file, "No space left on device", call=write_json, args=({},))
    assert [*tmp_path.iterdir()] == [file] and file.read_text() == text


def test_ctrl_c_while_a_file_is_written(tmp_path):
    """The old file is there, and no half of a new one."""
    (tmp_path / "file").write_text("old")

    def stopped(beside):
        beside.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(tmp_path / "file", stopped)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]
    assert (tmp_path / "file").read_text() == "old"


def test_all_programs_write_whole_files():
    """What a library writes goes through write_whole, so that a good file is never half a file."""
    calls = r"\.savefig\(|\.save\((?!weights, content\))|\bsave_file\((?!tensors, beside)"
    direct = re.compile(calls + r'|open\((?!os\.devnull)[^)]*"[wa]"')
    sources = [f for place in ("", "support", "tools", "tiny") for f in (HERE / place).glob("*.py")]
    lines = [line for file in sources for line in file.read_text("utf-8").splitlines()]
    assert len(lines) > 3000 and not [line for line in lines if direct.search(line)]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    """As of --json /dev/stdout | less. A name in /dev would be taken by a file, where root may."""
    (tmp_path / "link").symlink_to("figures.json")
    write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "figures.json").read_text() == "[\n 1\n]\n"
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_json(tmp_path / "pipe", [2])
    assert os.read(end, 99) == b"[\n 2\n]\n" and (tmp_path / "pipe").is_fifo()
    os.close(end)


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json", "adapter.safetensors"])
def test_a_pointer_of_git_lfs_is_named(tmp_path, name):
    """As a clone without Git LFS has them in the place of large files."""
    pytest.importorskip("tokenizers")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / name).write_text(pointer)
    read = read_file if "adapter" in name else lambda file: Tokenizer(file.parent)
    with pytest.raises(UserError, match=f"{name}.*run: git lfs pull"):
        read(tmp_path / name)


def test_two_that_write_one_file_do_not_meet(tmp_path, monkeypatch):
    """Another process writes the same file while this one does: the last one is there, whole."""
    usual, file, between = os.fsync, tmp_path / "file", [{"a": torch.zeros(3)}]

    def fsync(*args):
        usual(*args)
        if between:
            write_file(file, between.pop())

    monkeypatch.setattr("os.fsync", fsync)
    write_file(file, {"a": torch.ones(3)})
    assert read_file(file)[0]["a"].tolist() == [1, 1, 1] and [*tmp_path.iterdir()] == [file]


def test_a_name_is_taken_once(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"), created(tmp_path / "file"):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(9)  # the signal comes first
    assert not (tmp_path / "file").exists() and signal.getsignal(signal.SIGTERM) == before
    with pytest.raises(ZeroDivisionError), created(tmp_path / "file"):
        refusal(tmp_path / "file", "there is such a file", call=lambda f: created(f).__enter__())
        raise ZeroDivisionError
    assert not (tmp_path / "file").exists()


def adapter(model) -> AdaptedLlama:
    """With random weights."""
    settings = settings_for("lococo", 8, 8, 64, kernel=3, lora_rank=2, compressor="facts")
    adapted = AdaptedLlama(model, settings)
    for p in adapted.trained().values():
        p.data += 0.3 * torch.randn(p.shape)
    return adapted


def test_an_adapter_comes_back_on_its_base_alone(model, tmp_path):
    base, scaled, turned, rounded = (copy.deepcopy(model) for _ in range(4))
    adapted, tokens = adapter(model), torch.arange(60)[None]
    write_file(tmp_path / "adapter.safetensors", adapted.trained(), **identity(adapted))
    scaled.layers[1].feed_forward.w2.weight.data *= 1.1
    turned.config = replace(turned.config, rope_theta=20000.0)
    for other in (scaled, turned):
        refusal(tmp_path, "for another base", call=load_adapter, args=(other,))
    about = identity(adapted)
    (tmp_path / "other").mkdir()
    about["settings"] |= {"budgets": 3 * [adapted.settings.mem], "positions": "original"}
    write_file(tmp_path / "other" / "adapter.safetensors", adapted.trained(), **about)
    refusal(tmp_path / "other", "for another base", call=load_adapter, args=(base,))
    (tmp_path / "other" / "adapter.safetensors").rename(tmp_path / "other" / "state.safetensors")
    refusal(tmp_path / "other", "this run has not ended; to go on: python train.py --resume",
            call=load_adapter, args=(base,))  # fmt: skip
    loaded = load_adapter(tmp_path, base)
    assert loaded.settings == adapted.settings
    assert torch.equal(*(prefill(m.model, tokens, m.cache(), 8) for m in (adapted, loaded)))
    half = load_adapter(tmp_path, rounded.bfloat16())
    assert half.model.tok_embeddings.weight.dtype == torch.bfloat16
    half.model.tok_embeddings.weight.data = adapted.model.tok_embeddings.weight
    assert same(half.trained(), adapted.trained())


def test_the_mask_has_the_dtype_and_the_device_of_the_queries():
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    mask = causal_mask(3, 5, like)
    assert (mask.dtype, mask.device) == (like.dtype, like.device)


def test_a_loaded_adapter_reads_as_in_training_and_converts_no_embeddings(model, tmp_path):
    """Tied embeddings are the output matrix: in float32 each token would convert all of them."""
    model.config = replace(model.config, tied=True)
    model.bfloat16()
    base, tokens = copy.deepcopy(model), torch.arange(60)[None]
    adapted = adapter(model)
    write_file(tmp_path / "adapter.safetensors", adapted.trained(), **identity(adapted))
    loaded = load_adapter(tmp_path, base)
    assert torch.equal(*(prefill(m.model, tokens, m.cache(), 8) for m in (adapted, loaded)))
    assert loaded.model.tok_embeddings.weight.dtype == torch.bfloat16
    others = loaded.trained().keys() - {"model.tok_embeddings.weight"}
    assert same(*({name: m.trained()[name] for name in others} for m in (loaded, adapted)))


@pytest.mark.parametrize("kind", ["compressor", "method"])
def test_an_adapter_with_an_unknown_name_is_refused(model, tmp_path, kind):
    """A program that adds a compressor to COMPRESSORS makes adapters that others cannot read."""
    adapted = adapter(model)
    about = identity(adapted)
    about["settings"][kind] = "magic"
    write_file(tmp_path / "adapter.safetensors", adapted.trained(), **about)
    refusal(tmp_path, f"its {kind} 'magic' is unknown", call=load_adapter, args=(model,))


@pytest.mark.parametrize("change", [
    lambda tensors, about: tensors.update({LORA_A: tensors[LORA_A][:1]}),  # it could broadcast
    lambda tensors, about: tensors.update(more=tensors.pop(LORA_A)),
    lambda tensors, about: about["settings"].update(lora_rank=4),
    lambda tensors, about: about["settings"].pop("method"),
    lambda tensors, about: about.pop("base")])  # fmt: skip
def test_adapters_of_another_version_are_refused(model, tmp_path, change):
    base, adapted = copy.deepcopy(model), adapter(model)
    tensors, about = adapted.trained(), identity(adapted)
    change(tensors, about)
    write_file(tmp_path / "adapter.safetensors", tensors, **about)
    refusal(tmp_path, "its adapter is ", "another version", call=load_adapter, args=(base,))
