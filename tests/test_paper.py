"""Tests that teach: what the paper says, computed a second time in the plainest way (in
reference.py). Equations and algorithms have the paper's numbers, letters are those of model.py."""

from dataclasses import replace

import pytest
import torch
from reference import by_loop, meta_state, reference_logits

from lococo import METHODS, AdaptedLlama, Compressor, FactCompressor, ScoredCompressor
from lococo import segment_losses, settings_for
from support.command_line import POSITIONS

TOKENS = torch.randint(3, 64, (1, 181), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kernel", [1, 3, 21])
@pytest.mark.parametrize("kind", [Compressor, FactCompressor, ScoredCompressor])
def test_compressor_equals_a_loop_over_the_equations(kind, kernel):
    torch.manual_seed(0)
    compressor = kind(4, 5, kernel)
    for p in compressor.parameters():
        torch.nn.init.normal_(p, std=0.3)
    k, v = torch.randn(2, 2, 3, 12, 4)
    from_slot = torch.rand(2, 3, 12) < 0.4
    scores = torch.rand(2, 3, 12)
    k_new, v_new, w = compressor(k, v, from_slot, scores)  # (B, G, slots, D)
    assert torch.allclose(w.sum(dim=-1), torch.ones(2, 3, 5)) and (w >= 0).all()
    for b in range(2):
        for head in range(3):
            head_of = [t[b, head] for t in (k, v, from_slot, scores)]
            W = by_loop(compressor, 5, *head_of)
            assert torch.allclose(w[b, head].double(), W, atol=1e-4)
            for i in range(5):
                for new, old in ((k_new, k), (v_new, v)):  # (4) and (5)
                    mixed = sum(W[i, j] * old[b, head, j].double() for j in range(12))
                    assert torch.allclose(new[b, head, i].double(), mixed, atol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("method", METHODS)
def test_segments_equal_the_whole_while_nothing_is_compressed(model, method, positions):
    """Algorithm 1: with a slot for each token, the logits are those of attention (1) over all."""
    weights, settings = meta_state(model), settings_for(method, 40, 6, 128, positions=positions)
    cache = AdaptedLlama(model, settings).cache()
    logits = torch.cat([model(x, cache) for x in TOKENS[:, :40].split(6, dim=1)], dim=1)
    by_slot = positions == "slots" and settings.mem
    scale = 1.0 if by_slot or positions == "original" else 2.0  # 128 tokens into a context of 64
    config = replace(model.config, rope_scale=scale)
    expected = reference_logits(weights, config, TOKENS[0, :40])
    assert torch.allclose(logits[0].double(), expected, atol=1e-4)


def test_how_compressors_start():
    """The paper's has its 22 million weights; in ours neighbours hardly count."""
    assert 32 * Compressor(128, 128, 21).conv.weight.numel() == 22_020_096
    sizes = FactCompressor(64, 16, 5).conv.weight.abs().mean(dim=(0, 1))
    assert sizes.argmax() == 2 and sizes.sum() < 1.2 * sizes.max()


@pytest.mark.parametrize("bptt", [1, 5])
def test_a_segments_loss_trains_the_compression_before_it(in_float64, model, bptt):
    """The loss of the fifth segment. With bptt = 1 its gradient is the numerical derivative while
    the memory after four segments is held fixed; with bptt = 5 nothing is fixed."""
    adapted, tokens = AdaptedLlama(model, settings_for("lococo", 8, 6, 40)), TOKENS[:, :31]
    pieces = segment_losses(model, tokens, adapted.cache(), 6, bptt)
    losses = torch.cat([nats for nats, _ in pieces], dim=1)
    losses[:, 24:].sum().backward()

    start = adapted.cache()
    if bptt == 1:
        for segment in tokens[:, :24].split(6, dim=1):
            model(segment, start)

    def loss():
        cache = start.copy()
        *_, (nats, _) = segment_losses(model, tokens[:, start.seen :], cache, 6)
        return nats.sum().item()

    for compressor in adapted.compressors:
        weight, gradient = compressor.conv.weight.data.view(-1), compressor.conv.weight.grad
        for n in gradient.abs().view(-1).topk(3).indices:
            value, h = weight[n].item(), 1e-5
            weight[n] = value + h
            above = loss()
            weight[n] = value - h
            slope = (above - loss()) / (2 * h)
            weight[n] = value
            assert gradient.view(-1)[n].item() == pytest.approx(slope, rel=1e-5)
