"""lococo.py: methods, memory, heavy hitters, segment loop, positions, LoRA, what trains."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from official_code import OfficialLoCoCo, OfficialMemory
from test_paper import by_loop

from generate import POSITIONS, prefill, settings_for
from lococo import METHODS, AdaptedLlama, Memory, interpolation, segment_losses
from model import Llama

TOKENS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def settings(method="lococo", mem=8, segment=6, length=40, **changes):
    return settings_for(method, mem, segment, length, **{"kernel": 3, "lora_rank": 0} | changes)


def logits_of(model, cache, tokens=TOKENS, segment=6):
    return torch.cat([model(x, cache) for x in tokens.split(segment, dim=1)], dim=1)


# --- Methods -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method, mem, changes, counts", [  # sinks, heavy, merged, recent
    ("full", 512, {}, (0, 0, 0, 0)), ("streaming", 512, {}, (4, 0, 0, 508)),
    ("streaming", 512, dict(sinks=8, recent=0), (8, 0, 0, 0)),  # the paper's StreamingLLM
    ("h2o", 511, dict(sinks=None), (0, 255, 0, 256)),  # a flag that is not given
    ("h2o", 512, dict(sinks=4, heavy=124), (4, 124, 0, 384)), ("lococo", 512, {}, (0, 0, 512, 0)),
    ("lococo", 512, dict(sinks=4, heavy=8, recent=444), (4, 8, 56, 444)),
    ("lococo+sinks", 512, {}, (4, 0, 508, 0)), ("lococo+h2o", 512, {}, (0, 256, 256, 0)),
    ("lococo+window", 128, {}, (4, 0, 24, 100)),
])  # fmt: skip
def test_a_method_is_four_counts(method, mem, changes, counts):
    s = settings(method, mem, **changes)
    assert (s.sinks, s.heavy, s.merged, s.recent) == counts
    assert s.mem == sum(counts)
    assert s.positions == ("slots" if method in ("streaming", "lococo+window") else "interpolated")
    assert settings(method, mem, positions="original").positions == "original"


# --- Every method against a slow memory ----------------------------------------------------------
# Algorithm 2 in float64 for one key/value head: attention, scores and W (M, S) by loops.


def official_rows(compressor, slots, k, v, mixed, scores):
    """Of the official code: (1 - g) onehot + g softmax(ReLU)."""
    weight, bias, g = (p.double() for p in (*compressor.conv.parameters(), compressor.gate))
    entries = torch.cat((k, v), dim=1).T[None]
    logits = F.conv1d(entries, weight, bias, padding=weight.shape[2] // 2)[0]  # (6)
    w = g * logits.clamp(min=0).softmax(dim=1)
    next_best = sorted(range(len(scores)), key=lambda i: -scores[i])[: len(logits)]
    for row, i in enumerate(sorted(next_best)):
        w[row, i] += 1 - g
    return w


def turned(k, by, adapted):
    """Keys (S, D), each turned on by so many positions, as complex numbers."""
    half = k.shape[1] // 2
    scale = (adapted.settings.mem + adapted.settings.segment) / adapted.model.config.context
    angle = torch.tensor(by).double()[:, None] / scale * 10000 ** (-torch.arange(half) / half)
    pairs = torch.complex(k[:, :half], k[:, half:]) * torch.exp(1j * angle)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def slow_compress(k, v, scores, mixed, adapted, rows):
    """k, v (S, D), scores (S,) and which entries have had a slot that is not a recent one -> those
    of the M slots, and W (M, S)."""
    s, S = adapted.settings, len(k)
    by_score = sorted(range(s.sinks, S - s.recent), key=lambda i: -scores[i])
    kept = [*range(s.sinks), *sorted(by_score[: s.heavy])]
    rest = sorted(by_score[s.heavy :])
    if s.positions == "slots":
        k = turned(k, range(0, -S, -1), adapted)
    W = torch.zeros(s.mem, S, dtype=torch.float64)
    for slot, i in enumerate(kept):
        W[slot, i] = 1
    if s.merged:
        args = adapted.compressors[0], s.merged, k[rest], v[rest], mixed[rest]
        W[len(kept) : len(kept) + s.merged, rest] = rows(*args, scores[rest])
    for n in range(1, s.recent + 1):
        W[s.mem - n, S - n] = 1
    k_new = W @ k
    if s.positions == "slots":
        k_new = turned(k_new, range(s.mem), adapted)
    mixed = torch.arange(s.mem) < s.mem - s.recent
    return k_new, W @ v, W @ scores, mixed, W


def slow_memory(adapted, segments, rows):
    """Segments of q (heads that share the key/value head, T, D), k and v (T, D) -> what is held at
    the end, attention received, the last W, and what the heads have read."""
    s, outputs, W = adapted.settings, [], None
    k, v, scores = torch.zeros(0, 8).double(), torch.zeros(0, 8).double(), torch.zeros(0).double()
    mixed = torch.zeros(0).bool()
    for q, k_new, v_new in segments:
        if len(k) + len(k_new) > s.mem + s.segment:
            k, v, scores, mixed, W = slow_compress(k, v, scores, mixed, adapted, rows)
        k, v = torch.cat((k, k_new.double())), torch.cat((v, v_new.double()))
        kept_scores = 0 * scores if rows is official_rows else scores  # there: of the last forward
        scores = F.pad(kept_scores, (0, len(k_new)))
        mixed = torch.cat((mixed, torch.zeros(len(k_new)).bool()))
        out = torch.zeros_like(q).double()
        for t in range(len(k_new)):
            n = len(k) - len(k_new) + t + 1  # entries that query t may see
            for head in range(len(q)):
                p = (k[:n] @ q[head, t].double() / 8**0.5).softmax(dim=0)  # (1)
                scores[:n] += p / len(q)
                out[head, t] = p @ v[:n]
        outputs.append(out)
    return k, v, W, scores, torch.cat(outputs, dim=1)


VARIANTS = [(method, {}) for method in METHODS if METHODS[method](8)] + [
    ("streaming", dict(sinks=3, recent=0)),
    ("lococo", dict(sinks=1, heavy=2, recent=2)),
    ("lococo", dict(recent=1, kernel=21, compressor="facts")),
    ("lococo", dict(sinks=1, heavy=2, recent=2, kernel=5, compressor="facts")),
]


@torch.no_grad()
def check_against_slow_memory(adapted, memory, rows):
    class Watched(memory):
        def compress(self, layer):
            arranged, w = super().compress(layer)
            self.W = self.mixing_matrix(arranged, w)
            return arranged, w

    cache = adapted.cache(Watched)
    segments, outputs = [], []
    for T in (6, 6, 6, 2, 6, 1, 6, 6):
        k, v = torch.randn(2, 2, 2, T, 8).to(adapted.model.norm.weight.dtype)
        q = 2 * k.repeat_interleave(2, dim=1) + torch.randn(2, 4, T, 8)  # new entries are heavy too
        segments.append([q, k, v])
        cache.enter(T)
        outputs.append(cache.attend(0, *segments[-1]))
        assert cache.size <= 8 + 6
    read = torch.cat(outputs, dim=2).unflatten(1, (2, 2))  # (B, G, H/G, L, D)
    for b in range(2):
        for g in range(2):
            own = [(q[b, 2 * g : 2 * g + 2], k[b, g], v[b, g]) for q, k, v in segments]
            ours = cache.keys[0], cache.values[0], cache.W, cache.scores[0], read
            for fast, slow in zip(ours, slow_memory(adapted, own, rows)):
                if fast is not None:  # there are scores only for heavy hitters
                    assert torch.allclose(fast[b, g].double(), slow, atol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("method, changes", VARIANTS)
def test_every_method_equals_a_slow_memory(config, monkeypatch, method, changes, positions):
    """Segments of uneven sizes, grouped queries, positions by slot that are halved. In float64: a
    row that avoids copies makes much of what is rounded."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    model = Llama(replace(config, n_layers=1, context=7))
    adapted = AdaptedLlama(model, settings(method, positions=positions, **changes))
    for p in adapted.compressors.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    check_against_slow_memory(adapted.double(), Memory, by_loop)


# --- The official code's memory ------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [3, 21])
@pytest.mark.parametrize("gate", [0.0, 0.5, 1.2])
def test_the_official_codes_memory_equals_its_published_formula(config, gate, kernel):
    """Memory is [heavy hitters in time order | mixed]; scores are those of the last forward."""
    model = Llama(replace(config, n_layers=1))
    adapted = OfficialLoCoCo(model, settings("lococo+h2o", kernel=kernel, positions="original"))
    with torch.no_grad():
        assert adapted.compressors[0].gate == 0.5
        adapted.compressors[0].gate.fill_(gate)
        adapted.compressors[0].conv.bias.normal_()
        adapted.compressors[0].conv.weight *= 0.3  # else rounding decides between logits of 50
    check_against_slow_memory(adapted, OfficialMemory, official_rows)


@pytest.mark.parametrize("rope_scale, changes, factor", [  # the pretrained context is 64
    (1.0, dict(length=256), 4.0), (1.0, dict(length=32), 1.0),  # never below 1
    (1.0, dict(length=256, positions="slots"), 1.0),  # slots end at M + T = 14, whatever L
    (1.0, dict(length=2048, mem=122, positions="slots"), 2.0),  # M + T = 128
    (1.0, dict(length=64, mem=122, positions="slots"), 1.0),  # but L is not above 64
    (3.0, dict(length=256), 4.0), (3.0, dict(length=128), 3.0),  # a checkpoint interpolated by 3
    (3.0, dict(length=256, positions="original"), 3.0)])  # fmt: skip
def test_positions_are_divided_to_fit_into_the_context(config, rope_scale, changes, factor):
    model = Llama(replace(config, rope_scale=rope_scale))
    adapted = AdaptedLlama(model, settings(**changes))
    assert interpolation(model.config, adapted.settings) == adapted.cache().rope_scale == factor


@pytest.mark.parametrize("bptt, widths", [(1, [6] * 6 + [3]), (2, [12, 12, 12, 3]), (9, [39])])
@pytest.mark.parametrize("method", METHODS)
def test_losses_and_prefill_go_through_the_memory(model, method, bptt, widths):
    """Every token after the first is scored once."""
    cache, tokens = AdaptedLlama(model, settings(method)).cache, TOKENS.clone()
    logits = logits_of(model, cache(), tokens[:, :36])
    tokens[:, 36] = logits[:, -1].argmax(dim=-1)  # so that one is the likeliest
    logits = logits_of(model, cache(), tokens)
    losses, right = zip(*segment_losses(model, tokens, cache(), 6, bptt))
    assert [piece.shape for piece in losses] == [(2, width) for width in widths]
    nats = -logits[:, :-1].log_softmax(dim=-1).gather(2, tokens[:, 1:, None])[..., 0]
    assert torch.allclose(torch.cat(losses, dim=1), nats, atol=1e-4)
    assert torch.equal(torch.cat(right, dim=1), logits[:, :-1].argmax(dim=2) == tokens[:, 1:])
    read = cache()
    assert torch.allclose(prefill(model, tokens, read, 6), logits[:, -1], atol=1e-4)
    assert read.seen == 40 and not read.keys[0].requires_grad


def test_lora_starts_unchanged_and_equals_merged_weights(model):
    before, merged = model(TOKENS), Llama(model.config)
    merged.load_state_dict(model.state_dict())
    AdaptedLlama(model, settings(lora_rank=4))
    assert torch.equal(model(TOKENS), before)
    for block, other in zip(model.layers, merged.layers):
        for name in ("wq", "wk", "wv", "wo"):
            lora = getattr(block.attention, name)
            torch.nn.init.normal_(lora.lora_b, std=0.1)
            getattr(other.attention, name).weight.data += 16 / 4 * lora.lora_b @ lora.lora_a
    assert torch.allclose(model(TOKENS), merged(TOKENS), atol=1e-3)
    assert not torch.allclose(model(TOKENS), before, atol=1e-1)
