"""model.py: the Llama and its cache."""

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import settings
from reference import meta_state, reference_logits

from lococo import AdaptedLlama
from model import KVCache, LlamaConfig, read_config, rope

TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7, 7, 5, 9, 60, 12]])
SMALL = LlamaConfig(32, 2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, context=64)


@pytest.mark.parametrize("cuts, gradients", [
    ((12,), True), ((5, 7), True), ((5, 6, 1), False)])
@pytest.mark.parametrize("config", [
    SMALL, replace(SMALL, n_kv_heads=4),
    replace(SMALL, n_kv_heads=1, rope_scale=2.5, rope_theta=100.0, norm_eps=0.1)])
def test_logits_equal_a_llama_written_a_second_time(model, cuts, gradients):
    """Read at once, and in pieces with a cache."""
    state, cache = meta_state(model), KVCache(model.config)
    rows = torch.cat((TOKENS, TOKENS.flip(1)))
    expected = torch.stack([reference_logits(state, model.config, row) for row in rows])
    with torch.set_grad_enabled(gradients):
        pieces = [model(piece, cache) for piece in rows.split(cuts, dim=1)]
    assert torch.allclose(torch.cat(pieces, dim=1).double(), expected, atol=1e-4)
    assert cache.keys[0].size == cache.seen == 12
    assert cache.nbytes == 2 * 12 * 2 * 2 * model.config.n_kv_heads * 8 * 4  # k and v, D, bytes


def test_frequencies_of_llama_3(tmp_path):
    """Of Llama 3.2 1B, by the published rule: a wave is longer than 8,192 tokens: divided by 32;
    shorter than a quarter of it: kept; in between: a blend."""
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_type": "llama3"}
    content = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
               "intermediate_size": 8, "vocab_size": 9, "rms_norm_eps": 1e-5,
               "rope_theta": 500000.0,
               "max_position_embeddings": 131072, "rope_scaling": scaling}
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


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("method, mem", [("full", 8), ("h2o", 8), ("streaming", 12)])
def test_a_copied_cache_leaves_the_original_as_it_is(model, method, mem, gradients):
    """Both go on with other tokens: each gives what it gives where there is no other."""
    adapted = AdaptedLlama(model, settings(method, mem))
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
