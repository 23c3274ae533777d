"""model.py: the Llama and its cache; adapters in files."""

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import refusal, same
from reference import meta_state, reference_logits

from generate import prefill
from lococo import AdaptedLlama, identity, load_adapter, settings_for
from model import KVCache, LlamaConfig, attention, causal_mask, load_base, read_config, rope, rotate
from support.command_line import HERE, TINY
from support.files import write_file

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
    config, expected = read_config(tmp_path / "config.json"), []
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
    model, tokenizer = load_base(TINY)
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


def test_the_mask_has_the_dtype_and_the_device_of_the_queries():
    like = torch.empty(0, dtype=torch.bfloat16, device="meta")
    mask = causal_mask(3, 5, like)
    assert (mask.dtype, mask.device) == (like.dtype, like.device)


# --- Adapters ---------------------------------------------------------------------------

LORA_A = "model.layers.0.attention.wq.lora_a"


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
        refusal(load_adapter, tmp_path, "for another base", args=(other,))
    about = identity(adapted)
    (tmp_path / "other").mkdir()
    about["settings"] |= {"budgets": 3 * [adapted.settings.mem], "positions": "original"}
    write_file(tmp_path / "other" / "adapter.safetensors", adapted.trained(), **about)
    refusal(load_adapter, tmp_path / "other", "for another base", args=(base,))
    (tmp_path / "other" / "adapter.safetensors").rename(tmp_path / "other" / "state.safetensors")
    refusal(load_adapter, tmp_path / "other",
            "this run has not ended; to go on: python train.py --resume", args=(base,))  # fmt: skip
    loaded = load_adapter(tmp_path, base)
    assert loaded.settings == adapted.settings
    assert torch.equal(*(prefill(m.model, tokens, m.cache(), 8) for m in (adapted, loaded)))
    half = load_adapter(tmp_path, rounded.bfloat16())
    assert half.model.tok_embeddings.weight.dtype == torch.bfloat16
    half.model.tok_embeddings.weight.data = adapted.model.tok_embeddings.weight
    assert same(half.trained(), adapted.trained())


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
    refusal(load_adapter, tmp_path, f"its {kind} 'magic' is unknown", args=(model,))


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
    refusal(load_adapter, tmp_path, "its adapter is ", "another version", args=(base,))
