"""Tests that teach: what the paper says, computed a second time in the plainest way (in
reference.py). Equations and algorithms have the paper's numbers, letters are those of model.py."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import settings
from reference import by_loop, meta_state, reference_logits

from lococo import METHODS, AdaptedLlama, Compressor, merge, segment_losses
from support.ours.official_code import OfficialCompressor

TOKENS = torch.randint(3, 64, (1, 181), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernel", [1, 3, 21])
@pytest.mark.parametrize("kind", [Compressor, OfficialCompressor])
def test_compressors_equal_a_loop_over_the_equations(in_float64, kind, kernel):
    torch.manual_seed(0)
    compressor = kind(4, 5, kernel, 1.0)
    for p in compressor.parameters():
        torch.nn.init.normal_(p, std=0.3)
    k, v = torch.randn(2, 2, 3, 12, 4)
    scores = torch.rand(2, 3, 12)
    mixed, w = merge(compressor, torch.cat((k, v), dim=-1), scores)
    k_new, v_new = mixed.chunk(2, dim=-1)
    assert torch.allclose(w.sum(dim=-1), torch.ones(2, 3, 5))
    for text in range(2):
        for head in range(3):
            W = by_loop(compressor, *(t[text, head] for t in (k, v, scores)))
            assert torch.allclose(w[text, head], W, atol=1e-4)
            for i in range(5):
                for new, old in ((k_new, k), (v_new, v)):  # (4) and (5)
                    mixed = sum(W[i, j] * old[text, head, j] for j in range(12))
                    assert torch.allclose(new[text, head, i], mixed, atol=1e-4)


@pytest.mark.parametrize("method, positions", [
    *product(["full", "lococo", "h2o"], ["text", "slots"]), ("expected-attention", "text")])
def test_segments_equal_the_whole_while_nothing_is_compressed(model, method, positions):
    """Algorithm 1: with a slot for each token, the logits are those of attention (1) over all."""
    weights = meta_state(model)
    changes = dict(positions=positions, lora_rank=2)  # which changes nothing at its start
    cache = AdaptedLlama(model, settings(method, 40, 6, 128, **changes)).cache()
    logits = torch.cat([model(x, cache) for x in TOKENS[:, :40].split(6, dim=1)], dim=1)
    by_slot = positions == "slots" and METHODS[method](40)
    scale = 1.0 if by_slot else 2.0  # 128 tokens into a context of 64
    config = replace(model.config, rope_scale=scale)
    expected = reference_logits(weights, config, TOKENS[0, :40])
    assert torch.allclose(logits[0].double(), expected, atol=1e-4)


@pytest.mark.parametrize("method, segments, positions", [
    ("lococo", 1, "text"), ("lococo", 5, "slots"), ("lococo-code", 1, "slots")])
def test_a_segments_loss_trains_the_compression_before_it(
    in_float64, model, method, segments, positions
):
    """The loss of the fifth segment. Through one segment its gradient is the numerical derivative
    while the memory after four segments is held fixed; through five nothing is fixed. (The attention
    received is a constant, so that `lococo-code` would have another one through five segments.)"""
    adapted = AdaptedLlama(model, settings(method, positions=positions))
    tokens = TOKENS[:, :31]
    cache = adapted.cache()
    for nats, _ in segment_losses(model, tokens, cache, 6):
        loss = nats.sum()
        if segments == 1 and cache.seen < 30:
            cache.detach()
    loss.backward()

    start = adapted.cache()
    if segments == 1:
        with torch.no_grad():
            for segment in tokens[:, :24].split(6, dim=1):
                model(segment, start)

    @torch.no_grad()
    def last_loss():
        cache = start.copy()
        *_, (nats, _) = segment_losses(model, tokens[:, start.seen :], cache, 6)
        return nats.sum().item()

    for compressor in adapted.compressors:
        weight, gradient = compressor.conv.weight.data.view(-1), compressor.conv.weight.grad
        for n in gradient.abs().view(-1).topk(3).indices:
            value, h = weight[n].item(), 1e-5
            weight[n] = value + h
            above = last_loss()
            weight[n] = value - h
            slope = (above - last_loss()) / (2 * h)
            weight[n] = value
            assert gradient.view(-1)[n].item() == pytest.approx(slope, rel=1e-4)
