"""lococo.py: methods, memory, heavy hitters, segment loop, positions, LoRA, what trains."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from conftest import meta_state, reference_logits
from official_code import OfficialCompressor, OfficialLoCoCo, OfficialMemory

from lococo import METHODS, POSITIONS, LoCoCo, Memory, interpolation
from lococo import prefill, segment_losses, settings_for
from model import KVCache, Llama, UserError

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
    ("streaming", 512, dict(sinks=None, recent=None), (4, 0, 0, 508)),  # a flag not given
    ("h2o", 512, {}, (0, 256, 0, 256)), ("h2o", 511, {}, (0, 255, 0, 256)),
    ("h2o", 512, dict(sinks=4, heavy=124), (4, 124, 0, 384)), ("lococo", 512, {}, (0, 0, 512, 0)),
    ("lococo", 512, dict(sinks=4, heavy=8, recent=444), (4, 8, 56, 444)),
    ("lococo+sinks", 512, {}, (4, 0, 508, 0)), ("lococo+h2o", 512, {}, (0, 256, 256, 0)),
    ("lococo+window", 128, {}, (4, 0, 64, 60)),
])  # fmt: skip
def test_a_method_is_four_counts(method, mem, changes, counts):
    s = settings(method, mem, **changes)
    assert (s.sinks, s.heavy, s.merged, s.recent) == counts
    assert s.mem == sum(counts)
    assert s.positions == ("slots" if method in ("streaming", "lococo+window") else "interpolated")
    assert settings(method, mem, positions="original").positions == "original"


@pytest.mark.parametrize("method, mem, changes, sentence", [
    ("streaming", 3, {}, "--method streaming --mem 3: "),
    ("streaming", 8, dict(sinks=0, recent=0), "--method streaming --mem 8: "),
    ("h2o", 8, dict(heavy=5, recent=4), "--method h2o --mem 8: "),
    ("lococo", 8, dict(sinks=6, recent=4), "--method lococo --mem 8: "),
    ("lococo", 8, dict(sinks=4, recent=4), "--mem 8: no slot is left to merge into"),
    ("full", 8, dict(sinks=4), "--method full --mem 8: "),
    ("lococo", 8, dict(kernel=4), "--kernel 4: "),
])  # fmt: skip
def test_counts_that_do_not_fit_are_refused(method, mem, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        settings(method, mem, **changes)


# --- Every method against a slow memory ----------------------------------------------------------
# Algorithm 2 in float64 for one key/value head: attention, scores and W (M, S) by loops.


def convolved(compressor, k, v):
    """(6): k and v (S, D) -> logits (filters, S)."""
    weight, bias = compressor.conv.weight.double(), compressor.conv.bias.double()
    return F.conv1d(torch.cat((k, v), 1).T[None], weight, bias, padding=weight.shape[2] // 2)[0]


def paper_rows(compressor, k, v, scores, mixed):
    logits = convolved(compressor, k, v)
    if compressor.normalise == "softmax":
        one_tap, bias = compressor.held.weight[..., 0].double(), compressor.held.bias[:, None]
        logits[:, mixed] = one_tap @ torch.cat((k, v), 1)[mixed].T + bias
        return (3 * logits[0] + logits[1:]).softmax(dim=1)
    w = logits.clamp(min=0) + 1e-9  # with no positive logit, a mean
    return w / w.sum(dim=1, keepdim=True)  # (7)


def official_rows(compressor, k, v, scores, mixed):
    """Of the official code: (1 - g) onehot + g softmax(ReLU)."""
    logits, g = convolved(compressor, k, v), compressor.gate.double()
    w = g * logits.clamp(min=0).softmax(dim=1)
    next_best = sorted(range(len(scores)), key=lambda i: -scores[i])[: len(logits)]
    for row, i in enumerate(sorted(next_best)):
        w[row, i] += 1 - g
    return w


def turned(k, by, lococo):
    """Keys (S, D), each turned on by so many positions, as complex numbers."""
    half = k.shape[1] // 2
    scale = (lococo.settings.mem + lococo.settings.segment) / lococo.model.config.context
    angle = torch.tensor(by).double()[:, None] / scale * 10000 ** (-torch.arange(half) / half)
    pairs = torch.complex(k[:, :half], k[:, half:]) * torch.exp(1j * angle)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def slow_compress(k, v, scores, mixed, lococo, rows):
    """k, v (S, D), scores (S,) and which entries have had a slot that is not a recent one -> those
    of the M slots, and W (M, S)."""
    s, S = lococo.settings, len(k)
    by_score = sorted(range(s.sinks, S - s.recent), key=lambda i: -scores[i])
    kept = [*range(s.sinks), *sorted(by_score[: s.heavy])]
    rest = sorted(by_score[s.heavy :])
    if s.positions == "slots":
        k = turned(k, range(0, -S, -1), lococo)
    W = torch.zeros(s.mem, S, dtype=torch.float64)
    for slot, i in enumerate(kept):
        W[slot, i] = 1
    if s.merged:
        w = rows(lococo.compressors[0], k[rest], v[rest], scores[rest], mixed[rest])
        W[len(kept) : len(kept) + s.merged, rest] = w
    for n in range(1, s.recent + 1):
        W[s.mem - n, S - n] = 1
    k_new = W @ k
    if s.positions == "slots":
        k_new = turned(k_new, range(s.mem), lococo)
    mixed = torch.arange(s.mem) < s.mem - s.recent
    return k_new, W @ v, W @ scores, mixed, W


def slow_memory(lococo, segments, rows):
    """Segments of q (heads that share the key/value head, T, D), k and v (T, D) -> what is held at
    the end, attention received, the last W, and what the heads have read."""
    s, outputs, W = lococo.settings, [], None
    k, v, scores = torch.zeros(0, 8).double(), torch.zeros(0, 8).double(), torch.zeros(0).double()
    mixed = torch.zeros(0).bool()
    for q, k_new, v_new in segments:
        if len(k) + len(k_new) > s.mem + s.segment:
            k, v, scores, mixed, W = slow_compress(k, v, scores, mixed, lococo, rows)
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
    ("lococo", dict(recent=1, kernel=21, normalise="softmax")),
    ("lococo", dict(sinks=1, heavy=2, recent=2, kernel=5, normalise="softmax")),
]


@torch.no_grad()
def check_against_slow_memory(lococo, memory, rows):
    class Watched(memory):
        def compress(self, layer):
            order, w = super().compress(layer)
            self.W = self.mixing_matrix(order, w)
            return order, w

    cache = lococo.cache(Watched)
    segments, outputs = [], []
    for T in (6, 6, 6, 2, 6, 1, 6, 6):
        k, v = torch.randn(2, 2, T, 8), torch.randn(2, 2, T, 8)
        q = 2 * k.repeat_interleave(2, dim=1) + torch.randn(2, 4, T, 8)  # new entries are heavy too
        segments.append([q, k, v])
        cache.enter(T)
        outputs.append(cache.attend(0, *segments[-1]))
    read = torch.cat(outputs, dim=2).unflatten(1, (2, 2))  # (B, G, H/G, L, D)
    for b in range(2):
        for g in range(2):
            own = [(q[b, 2 * g : 2 * g + 2], k[b, g], v[b, g]) for q, k, v in segments]
            ours = cache.keys[0], cache.values[0], cache.W, cache.scores[0], read
            for fast, slow in zip(ours, slow_memory(lococo, own, rows)):
                if fast is not None:  # there are scores only for heavy hitters
                    assert torch.allclose(fast[b, g].double(), slow, atol=1e-4)


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("method, changes", VARIANTS)
def test_every_method_equals_a_slow_memory(config, method, changes, positions):
    """Segments of uneven sizes, grouped queries, positions by slot that are halved."""
    model = Llama(replace(config, n_layers=1, context=7))
    lococo = LoCoCo(model, settings(method, positions=positions, **changes))
    for p in lococo.compressors.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    check_against_slow_memory(lococo, Memory, paper_rows)


# --- The official code's memory ------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [3, 21])
@pytest.mark.parametrize("gate", [0.0, 0.5, 1.2])
def test_the_official_codes_memory_equals_its_published_formula(config, gate, kernel):
    """Memory is [heavy hitters in time order | mixed]; scores are those of the last forward."""
    model = Llama(replace(config, n_layers=1))
    lococo = OfficialLoCoCo(model, settings("lococo+h2o", kernel=kernel, positions="original"))
    with torch.no_grad():
        assert lococo.compressors[0].gate == 0.5
        lococo.compressors[0].gate.fill_(gate)
        lococo.compressors[0].conv.weight *= 0.3  # else rounding decides between logits of 50
    check_against_slow_memory(lococo, OfficialMemory, official_rows)


def test_the_official_code_with_a_closed_gate_is_eviction(model):
    """g = 0: the M heaviest entries stay as they are."""

    class Eviction(OfficialMemory):
        order = Memory.order  # there is no compressor

    evicting = LoCoCo(model, settings("h2o", heavy=8, recent=0, positions="original"))
    expected = logits_of(model, evicting.cache(Eviction))
    lococo = OfficialLoCoCo(model, settings("lococo+h2o", positions="original"))
    for compressor in lococo.compressors:
        compressor.gate.data.fill_(0.0)
    assert torch.allclose(logits_of(model, lococo.cache()), expected, atol=1e-4)


def test_the_official_codes_gate_learns():
    """K' goes in a straight line from g = 0 to g = 1."""
    compressor, sums = OfficialCompressor(8, 4, 3), {}
    k, v, compressor.scores = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.rand(1, 2, 9)
    for g in (0.0, 1.0, 0.5):
        compressor.gate.data.fill_(g)
        sums[g] = compressor(k, v, None)[0].sum()
    sums[0.5].backward()
    assert torch.allclose(compressor.gate.grad, sums[1.0] - sums[0.0], atol=1e-4)


def test_streaming_equals_a_fresh_forward_over_what_the_window_keeps(config):
    """In one layer keys depend on their token alone: a segment must see [sinks | recent | segment]
    as if these were one text."""
    config = replace(config, n_layers=1)
    model = Llama(config)
    cache = LoCoCo(model, settings("streaming", sinks=3)).cache()
    kept = []
    for segment in torch.arange(40).split(6):
        logits = model(TOKENS[:1, segment], cache)
        if len(kept) + len(segment) > 8 + 6:
            kept = kept[:3] + kept[-5:]
        kept += segment.tolist()
        expected = reference_logits(meta_state(model), config, TOKENS[0, kept])
        assert torch.allclose(logits[0].double(), expected[-len(segment) :], atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_later_tokens_never_change_earlier_logits(model, method):
    """To the bit: neither later keys nor later values leak into the segment they are in."""
    changed = TOKENS.clone()
    changed[:, 21:] = 5
    cache = LoCoCo(model, settings(method)).cache
    before, after = logits_of(model, cache()), logits_of(model, cache(), changed)
    assert torch.equal(before[:, :21], after[:, :21])
    assert not torch.allclose(before[:, 21:], after[:, 21:])


@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("method", METHODS)
def test_buffers_without_gradients_change_nothing(model, method, T):
    """The logits with gradients throughout, the logits without, and both in turns: what a backward
    pass needs must not be written over."""
    cache = LoCoCo(model, settings(method, lora_rank=2)).cache
    expected = logits_of(model, cache(), segment=T)
    with torch.no_grad():
        assert torch.allclose(logits_of(model, cache(), segment=T), expected, atol=1e-4)
    in_turns, logits = cache(), []
    for n, x in enumerate(TOKENS.split(T, dim=1)):
        with torch.set_grad_enabled(n % 3 == 1):
            logits.append(model(x, in_turns))
    assert torch.allclose(torch.cat(logits, dim=1), expected, atol=1e-4)
    torch.cat(logits, dim=1).sum().backward()


@pytest.mark.parametrize("method, changes", VARIANTS)
def test_a_memory_under_autocast_is_about_the_same(model, method, changes):
    lococo = LoCoCo(model, settings(method, lora_rank=2, **changes))

    def nats():
        cache, total = lococo.cache(), []
        for losses, _ in segment_losses(model, TOKENS, cache, 6, bptt=2):
            losses.sum().backward()
            total.append(losses.detach())
        return torch.cat(total, dim=1), cache

    expected, _ = nats()
    with torch.autocast("cpu", torch.bfloat16):
        low, cache = nats()
    assert cache.keys[0].dtype == cache.values[0].dtype == torch.bfloat16
    if lococo.settings.heavy:
        assert cache.scores[0].dtype == torch.float32 and not cache.scores[0].requires_grad
    assert 0 < (low - expected).abs().mean() < 0.1 * expected.mean()


@pytest.mark.parametrize("rope_scale, changes, factor", [  # the pretrained context is 64
    (1.0, dict(length=256), 4.0), (1.0, dict(length=32), 1.0),  # never below 1
    (1.0, dict(length=256, positions="original"), 1.0),
    (1.0, dict(length=256, positions="slots"), 1.0),  # slots end at M + T = 14, whatever L
    (1.0, dict(length=2048, mem=122, positions="slots"), 2.0),  # M + T = 128
    (3.0, dict(length=256), 4.0), (3.0, dict(length=128), 3.0),  # a checkpoint interpolated by 3
    (3.0, dict(length=256, positions="original"), 3.0),
])  # fmt: skip
def test_positions_are_divided_to_fit_into_the_context(config, rope_scale, changes, factor):
    model = Llama(replace(config, rope_scale=rope_scale))
    lococo = LoCoCo(model, settings(**changes))
    assert interpolation(model.config, lococo.settings) == lococo.cache().scale == factor


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_token_enters_at_its_position(model, positions):
    class Watched(Memory):
        def enter(self, T):
            starts.append(super().enter(T))
            return starts[-1]

    starts = []
    logits_of(model, LoCoCo(model, settings(positions=positions)).cache(Watched), segment=1)
    by_slot = list(range(14)) + [8 + n % 6 for n in range(26)]
    assert starts == (by_slot if positions == "slots" else list(range(40)))


@pytest.mark.parametrize("bptt, widths", [(1, [7, 7, 7, 7, 7, 4]), (2, [14, 14, 11]), (9, [39])])
def test_every_token_after_the_first_is_scored_once(model, bptt, widths):
    tokens = TOKENS.clone()
    tokens[:, 30] = model(tokens[:, :30])[:, -1].argmax(dim=-1)  # so that one is the likeliest
    losses, right = zip(*segment_losses(model, tokens, KVCache(model.config), 7, bptt))
    assert [piece.shape for piece in losses] == [(2, width) for width in widths]
    logits = model(tokens)[:, :-1].transpose(1, 2)
    expected = F.cross_entropy(logits, tokens[:, 1:], reduction="none")
    assert torch.allclose(torch.cat(losses, dim=1), expected, atol=1e-4)
    assert torch.equal(torch.cat(right, dim=1), logits.argmax(dim=1) == tokens[:, 1:])


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_prefill_go_through_the_memory(model, method):
    cache = LoCoCo(model, settings(method)).cache
    logits = logits_of(model, cache())
    losses = torch.cat([nats for nats, _ in segment_losses(model, TOKENS, cache(), 6)], dim=1)
    nats = -logits[:, :-1].log_softmax(dim=-1).gather(2, TOKENS[:, 1:, None])[..., 0]
    assert torch.allclose(losses, nats, atol=1e-4)
    read = cache()
    assert torch.allclose(prefill(model, TOKENS, read, 6), logits[:, -1], atol=1e-4)
    assert read.seen == 40 and not read.keys[0].requires_grad


def test_lora_starts_unchanged_and_equals_merged_weights(model):
    before, merged = model(TOKENS), Llama(model.config)
    merged.load_state_dict(model.state_dict())
    LoCoCo(model, settings(lora_rank=4))
    assert torch.equal(model(TOKENS), before)
    for block, other in zip(model.layers, merged.layers):
        for name in ("wq", "wk", "wv", "wo"):
            lora = getattr(block.attention, name)
            torch.nn.init.normal_(lora.lora_b, std=0.1)
            getattr(other.attention, name).weight.data += 16 / 4 * lora.lora_b @ lora.lora_a
    assert torch.allclose(model(TOKENS), merged(TOKENS), atol=1e-3)
    assert not torch.allclose(model(TOKENS), before, atol=1e-1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_what_trains_and_what_stays_to_the_bit(config, lora_rank, dtype, tied):
    """Rank 0 is the paper's inference mode. What trains is float32 under a bfloat16 base too."""
    model = Llama(replace(config, tied=tied)).to(dtype)
    lococo = LoCoCo(model, settings(lora_rank=lora_rank, sinks=1, recent=2))
    trained = lococo.trained()
    parts = ("compressors",) + ("lora_a", "lora_b", "tok_embeddings", "norm") * (lora_rank > 0)
    named = dict(lococo.named_parameters())
    assert set(trained) == {name for name in named if any(part in name for part in parts)}
    before = {name: p.detach().clone() for name, p in named.items()}
    for _ in range(2):  # lora_a has no gradient before lora_b has left zero
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            for losses, _ in segment_losses(model, TOKENS, lococo.cache(), 6):
                if losses.requires_grad:
                    losses.sum().backward()
        for p in trained.values():
            p.data -= 1e-2 * p.grad
    for name, p in lococo.named_parameters():
        assert torch.equal(p, before[name]) != (name in trained), name
        assert p.dtype == (torch.float32 if name in trained else dtype)
