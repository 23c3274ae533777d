"""lococo.py: compressor, memory, segment loop, LoRA, what trains, the adapter file, perplexity."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import meta_state, reference_logits, remembered

from eval_ppl import perplexity
from lococo import (
    ALL, METHODS, NORMALISE, Compressor, Fourier, LoCoCo, LoRALinear, Memory, Settings, attention_received, convolve,
    dense, fingerprint, interpolation, prefill, remove_lora, segment_losses,
)  # fmt: skip
from model import KVCache, Llama, LlamaConfig, UserError, rope, rotate
from train import ShiftedGroups

torch.manual_seed(1)
TOKENS = torch.randint(3, 64, (2, 40))
FRAMES = ("interpolated", "original", "slots")


def settings(method="lococo", mem=8, segment=6, length=40, **changes):
    return Settings.of(method, mem, segment, length, **({"kernel": 3, "lora_rank": 0} | changes))


# --- Methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice, counts",  # (M, sinks, heavy, merged, recent)
    [
        (dict(method="full"), (None, 0, 0, 0, 0)),
        (dict(method="streaming", mem=512), (512, 4, 0, 0, 508)),
        (dict(method="streaming", mem=512, sinks=8, recent=0), (8, 8, 0, 0, 0)),  # the paper's StreamingLLM
        (dict(method="h2o", mem=512), (512, 0, 256, 0, 256)),
        (dict(method="h2o", mem=511), (511, 0, 255, 0, 256)),
        (dict(method="h2o", mem=512, sinks=4, heavy=124), (512, 4, 124, 0, 384)),
        (dict(method="lococo", mem=512), (512, 0, 0, 512, 0)),
        (dict(method="lococo", mem=512, sinks=4, recent=444), (512, 4, 0, 64, 444)),
        (dict(method="lococo+sinks", mem=512), (512, 4, 0, 508, 0)),
        (dict(method="lococo+h2o", mem=512), (512, 0, 256, 256, 0)),
        (dict(method="longlora", mem=512), (None, 0, 0, 0, 0)),
    ],
)
def test_every_method_is_three_counts(choice, counts):
    s = settings(**choice)
    assert (s.mem, s.sinks, s.heavy, s.merged, s.recent) == counts


@pytest.mark.parametrize(
    "choice, sentence",
    [
        (dict(method="h3o"), "'h3o'; there are full, streaming, h2o, lococo"),
        (dict(mem=0), "--mem 0: at least 1"),
        (dict(mem=-5), "--mem -5: at least 1"),
        (dict(kernel=4), "--kernel 4: an odd size"),
        (dict(length=5), "--seq 5 is shorter than one segment; --segment is 6"),
        (dict(positions="absolute"), "'absolute'; there are interpolated, original, slots"),
        (dict(normalise="max"), "'max'; there are sum, softmax-relu, softmax"),
        (dict(sinks=4, recent=4), "--sinks 4, --heavy 0, --recent 4 do not fit into --mem 8"),
        (dict(sinks=-1), "--sinks -1"),
        (dict(method="streaming", sinks=0, recent=0), "keeps nothing"),
        (dict(filters=-1), "--filters -1: at least 0"),
        (dict(filters=3), "--filters 3: each fills equally many of the 8 slots"),
        (dict(lora_rank=-1), "--lora-rank -1"),
        (dict(method="full", sinks=4), "--method full keeps everything"),
        (dict(length=1, segment=1), "--seq 1: at least 2"),
        (dict(method="streaming", mem=3), "--sinks 4, --heavy 0, --recent 0 do not fit into --mem 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(choice, sentence):
    with pytest.raises(UserError, match=sentence):
        settings(**choice)


# --- Compressor ----------------------------------------------------------------------------------------------


def mixing_weights_by_hand(compressor: Compressor, k, v):
    """Equations 6 to 8 in float64, one number at a time: k, v (S, D) of one head -> W (slots, S)."""
    x = torch.cat((k, v), 1).double()
    first, last = compressor.convs[0], compressor.convs[-1]
    weight, bias = last.weight.double(), last.bias.double()
    if first is not last:  # depthwise
        bias = bias + weight[:, :, 0] @ first.bias.double()
        weight = weight * first.weight[:, 0].double()
    filters, channels, kernel = weight.shape
    pieces = compressor.slots // filters
    w = torch.zeros(pieces * filters, len(x), dtype=torch.float64)
    for m in range(pieces * filters):
        own = [s for s in range(len(x)) if s * pieces // len(x) == m // filters]
        for s in own:
            logit = bias[m % filters]
            for tap in range(kernel):
                at = s + tap - kernel // 2
                if 0 <= at < len(x):
                    logit = logit + (weight[m % filters, :, tap] * x[at]).sum()
            relu = max(logit, torch.tensor(0.0))
            w[m, s] = {"sum": relu, "softmax-relu": relu.exp(), "softmax": logit.exp()}[compressor.normalise]
        if not w[m].any():
            w[m, own] = 1.0
        w[m] /= w[m].sum()
    return w


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize("kernel, filters, S", [(1, 6, 18), (3, 6, 18), (21, 6, 18), (3, 1, 18), (21, 2, 18),
                                                (3, 1, 20), (3, 2, 16), (3, 1, 6)])  # fmt: skip
def test_compressor_equals_a_loop_over_the_papers_equations(kernel, filters, S, depthwise, normalise):
    """Also with pieces, of equal and of unequal length."""
    compressor = Compressor(4, 6, kernel, normalise, filters=filters, depthwise=depthwise)
    k, v = torch.randn(2, 3, S, 4), torch.randn(2, 3, S, 4)
    k_new, v_new, w = compressor(k, v)
    assert w.shape == (2, 3, 6 // filters, filters, -(-S // (6 // filters)))  # the blocks, not their surroundings
    assert not w.requires_grad
    w = dense(w, S)
    assert w.shape == (2, 3, 6, S)
    assert torch.allclose(k_new, w @ k, atol=1e-5) and torch.allclose(v_new, w @ v, atol=1e-5)
    assert torch.allclose(w.sum(-1), torch.ones(2, 3, 6)) and bool((w >= 0).all())
    for b in range(2):
        for g in range(3):
            expected = mixing_weights_by_hand(compressor, k[b, g], v[b, g])
            assert torch.allclose(w[b, g].double(), expected, atol=1e-5)


@pytest.mark.parametrize("kernel", [1, 3, 21, 61])
@pytest.mark.parametrize("entries", [1, 30, 121])
@pytest.mark.parametrize("filters, groups", [(1, 1), (2, 1), (9, 1), (40, 1), (16, 16)])
def test_every_way_to_convolve_equals_conv1d(filters, groups, entries, kernel):
    """Sums along diagonals (few filters), an image of one row, and by way of the spectrum; with their gradients."""
    conv = torch.nn.Conv1d(16, filters, kernel, padding=kernel // 2, groups=groups)
    x, dy = torch.randn(3, entries, 16), torch.randn(3, filters, entries)

    def outcome(way, dtype):
        entering = x.to(dtype).requires_grad_()
        y = way(conv.to(dtype), entering)
        return [y, *torch.autograd.grad(y, (entering, conv.weight, conv.bias), dy.to(dtype))]

    expected = outcome(lambda conv, x: conv(x.transpose(1, 2)), torch.float64)
    for got, right in zip(outcome(convolve, torch.float32), expected):
        assert torch.allclose(got.double(), right, rtol=1e-5, atol=1e-5 * right.abs().max().item())
    with torch.no_grad():
        assert torch.allclose(convolve(conv, x).double(), expected[0], atol=1e-5)


def test_a_spectrum_rounds_about_as_conv1d_does():
    """Of logits as large as the official start makes them, where softmax is at its most sensitive; and gradients."""
    conv = torch.nn.Conv1d(128, 64, 21, padding=10)
    torch.nn.init.normal_(conv.weight)
    x, dy = torch.randn(4, 192, 128), torch.randn(4, 64, 192)

    def outcome(way, dtype):
        entering = x.to(dtype).requires_grad_()
        y = way(conv.to(dtype), entering)
        return [t.detach().double() for t in (y, *torch.autograd.grad(y, (entering, conv.weight), dy.to(dtype)))]

    def plain(conv, x):
        return conv(x.transpose(1, 2))

    for ours, theirs, exact in zip(*(outcome(*how) for how in ((convolve, torch.float32), (plain, torch.float32),
                                                               (plain, torch.float64)))):  # fmt: skip
        far, near = ((y - exact).square().mean().sqrt() for y in (ours, theirs))
        assert 0 < far < 3 * near < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("kernel", [17, 21, 61])
def test_a_spectrum_takes_no_product_more_than_it_must(kernel):
    frequencies = (Fourier.NEW + kernel - 1) // 2 + 1
    assert [m.shape.index(3 * frequencies - 4) for m in Fourier.matrices(kernel)] == [0, 0, 1]


def test_a_large_entry_costs_its_windows_some_precision_and_no_other():
    """Entry 100 lies in the windows of outputs 64 to 127; the taps of 90 to 110 see it."""
    conv, x = torch.nn.Conv1d(128, 64, 21, padding=10), torch.randn(1, 256, 128)
    x[0, 100] *= 1000
    with torch.no_grad():
        ours = convolve(conv, x)
        exact = conv.double()(x.double().transpose(1, 2))
    off = (ours - exact).abs().amax(dim=(0, 1)) / exact.abs().amax()
    assert 1e-8 < off[64:90].max() < 1e-6 and off[90:128].max() < 1e-6
    assert off[:64].max() < 5e-9 and off[128:].max() < 5e-9


def test_a_spectrum_is_float32_whatever_surrounds_it():
    """A default device elsewhere at its first use, and a backward pass under autocast."""
    conv, x, dy = torch.nn.Conv1d(16, 20, 19, padding=9), torch.randn(2, 40, 16), torch.randn(2, 20, 40)
    with torch.device("meta"):
        y = convolve(conv, x)
    with torch.autocast("cpu", torch.bfloat16):
        (dw,) = torch.autograd.grad(y, conv.weight, dy)
    expected = torch.autograd.grad(conv(x.transpose(1, 2)), conv.weight, dy)[0]
    assert torch.allclose(dw, expected, atol=1e-4)


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("blend", [None, 0.3])
@pytest.mark.parametrize("filters, depthwise", [(18, False), (18, True), (1, False), (2, False)])
def test_gradients_of_all_that_a_compressor_trains(normalise, blend, filters, depthwise):
    """Against float64 and plain autograd, nothing computed twice, W with all of its zeros."""
    ours = Compressor(6, 18, 21, normalise, blend, filters=filters, depthwise=depthwise)
    k, v, score = torch.randn(2, 3, 30, 6), torch.randn(2, 3, 30, 6), torch.rand(2, 3, 30)

    def plain(compressor, k, v):
        y = torch.cat((k, v), -1).flatten(0, 1).transpose(1, 2)
        for conv in compressor.convs:
            y = conv(y)
        y = y.view(2, 3, filters, 30)
        pieces = 18 // filters
        own = torch.arange(30) * pieces // 30 == torch.arange(18)[:, None] // filters  # (slots, S)
        y = y.repeat(1, 1, pieces, 1)
        y = y if normalise == "softmax" else y.relu()
        w = (y + 1e-9) * own if normalise == "sum" else y.exp() * own
        w = w / w.sum(-1, keepdim=True)
        if blend is not None:
            best = score.topk(18).indices.sort().values
            w = (1 - compressor.gate) * F.one_hot(best, 30) + compressor.gate * w
        return w @ k, w @ v

    def gradients(way, compressor, dtype):
        entering = k.to(dtype).requires_grad_(), v.to(dtype).requires_grad_()
        k_new, v_new = way(compressor.to(dtype), *entering)
        loss = (k_new.sin() + v_new.cos()).sum()
        return torch.autograd.grad(loss, (*entering, *compressor.parameters()))

    got = gradients(lambda compressor, k, v: compressor(k, v, score)[:2], ours, torch.float32)
    expected = gradients(plain, ours, torch.float64)
    assert len(got) == 2 + 2 * len(ours.convs) + (blend is not None)
    for a, b in zip(got, expected):
        assert torch.allclose(a.double(), b, rtol=1e-3, atol=1e-4 * max(1, b.abs().max().item()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_bfloat16_many_filters_round_as_conv1d_does(dtype):
    """Under autocast, whatever the entries come in: a spectrum in bfloat16 would be ten times as coarse."""
    conv, x = torch.nn.Conv1d(128, 64, 21, padding=10), torch.randn(4, 192, 128)
    with torch.no_grad():
        exact = conv(x.transpose(1, 2))
        with torch.autocast("cpu", torch.bfloat16):
            ways = convolve(conv, x.to(dtype)), conv(x.to(dtype).transpose(1, 2))
    ours, plain = ((y.float() - exact).square().mean().sqrt() for y in ways)
    assert ways[0].dtype == torch.bfloat16 and ours < 1.5 * plain


@pytest.mark.parametrize("changes", [dict(), dict(normalise="softmax-relu", blend=0.5, score="last"),
                                     dict(normalise="softmax")])  # fmt: skip
def test_the_way_to_convolve_does_not_change_the_logits(model, changes, monkeypatch):
    """By no more than 1e-5, or, where the near one-hot softmax of the official start makes more of the rounding,
    than three times what conv2d differs from conv1d."""
    lococo = LoCoCo(model, settings("lococo", mem=18, kernel=21, positions="original", **changes))

    def logits(way) -> torch.Tensor:
        monkeypatch.setattr("lococo.convolve", way)
        with torch.no_grad():
            return prefill(model, TOKENS, lococo.cache(), 6)

    ours, plain = logits(convolve), logits(lambda conv, x: conv(x.transpose(1, 2)))
    image = logits(lambda conv, x: F.conv2d(x.transpose(1, 2)[:, :, None], conv.weight[:, :, None], conv.bias,
                                            padding=(0, 10))[:, :, 0])  # fmt: skip
    bound = 3 * (image - plain).abs().max().item() if changes.get("normalise") == "softmax-relu" else 1e-5
    assert 0 < (ours - plain).abs().max() <= bound


def test_a_slot_with_no_positive_logit_is_a_mean_and_not_nan():
    compressor = Compressor(4, 2, 3)
    torch.nn.init.constant_(compressor.convs[0].weight, 0.0)
    torch.nn.init.constant_(compressor.convs[0].bias, -1.0)
    _, _, w = compressor(torch.randn(1, 1, 10, 4), torch.randn(1, 1, 10, 4))
    assert torch.allclose(w, torch.full((1, 1, 1, 2, 10), 0.1))


def test_parameter_count_of_the_paper():
    c = LlamaConfig.preset("7B")
    with torch.device("meta"):
        layer = Compressor(c.head_dim, 128, 21)
    assert layer.convs[0].weight.numel() * c.n_layers == 22_020_096  # "22.0 M"


# --- Memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("method", METHODS)
def test_segments_equal_the_whole_when_nothing_is_compressed(model, method, frame):
    lococo = LoCoCo(model, settings(method, mem=40, positions=frame))
    cache = lococo.cache()
    pieces = [model(piece, cache) for piece in TOKENS.split(6, dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), model(TOKENS), atol=1e-4)


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("counts", [{}, dict(sinks=2), dict(sinks=2, recent=3)])
def test_memory_never_exceeds_its_budget_and_keeps_what_it_says(model, counts, frame):
    lococo = LoCoCo(model, settings(positions=frame, **counts))
    s, cache, plain = lococo.settings, lococo.cache(), KVCache(2)
    model(TOKENS, plain)
    for t in range(40):  # token by token, as when decoding: one compression per T new tokens
        before, compressed = cache.held, cache.held == s.mem + s.segment
        model(TOKENS[:, t : t + 1], cache)
        assert cache.held == (s.mem if compressed else before) + 1 <= s.mem + s.segment
        # The first layer's values depend on the tokens alone, so what is kept must equal the full cache's.
        sinks = plain.values[0][:, :, : min(t + 1, s.sinks)]
        assert torch.allclose(cache.values[0][:, :, : s.sinks], sinks, atol=1e-5)
        assert torch.allclose(cache.values[0][:, :, -1], plain.values[0][:, :, t], atol=1e-5)
        if compressed and s.recent:
            kept = cache.values[0][:, :, s.mem - s.recent : s.mem]
            assert torch.allclose(kept, plain.values[0][:, :, t - s.recent : t], atol=1e-5)


@pytest.mark.parametrize("frame", FRAMES)
def test_compression_equals_one_mixing_matrix_of_kept_and_merged_rows(model, frame):
    """K' = W K and V' = W V with W (M, S) written out: one-hot rows for what is kept; keys taken to position 0
    before the product and to their slots after it when positions are slots."""
    lococo = LoCoCo(model, settings(sinks=2, recent=3, positions=frame))
    c, S = model.config, 14
    k, v = torch.randn(1, 2, S, 8), torch.randn(1, 2, S, 8)
    k_new, v_new = lococo.cache().compress(1, k, v)
    raw = rotate(k, *rope(-torch.arange(S), c)) if frame == "slots" else k
    for g in range(2):
        w = torch.zeros(8, S, dtype=torch.float64)
        w[0, 0] = w[1, 1] = w[5, S - 3] = w[6, S - 2] = w[7, S - 1] = 1.0
        w[2:5, 2 : S - 3] = mixing_weights_by_hand(lococo.compressors[1], raw[0, g, 2 : S - 3], v[0, g, 2 : S - 3])
        mixed = (w @ raw[0, g].double()).float()[None, None]
        mixed = rotate(mixed, *rope(torch.arange(8), c)) if frame == "slots" else mixed
        assert torch.allclose(k_new[0, g], mixed[0, 0], atol=1e-5)
        assert torch.allclose(v_new[0, g].double(), w @ v[0, g].double(), atol=1e-5)


def test_streaming_equals_a_fresh_forward_over_what_the_window_keeps():
    """One layer, so that keys depend on their token alone: attending to the memory must equal a plain forward
    over [sinks | recent | segment] read as one text, by the float64 reference."""
    config = LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, context=64)
    model = Llama(config)
    lococo = LoCoCo(model, settings("streaming", mem=8, sinks=3, recent=5))
    cache, tokens = lococo.cache(), TOKENS[:1]
    segments = [model(piece, cache) for piece in tokens.split(6, dim=1)]
    kept = list(range(6))  # which tokens the memory holds, by a plain list
    for n in range(1, 6):
        if len(kept) + 6 > 14:
            kept = kept[:3] + kept[-5:]
        kept += range(6 * n, 6 * n + 6)
        expected = reference_logits(meta_state(model), config, tokens[0, kept])[-6:]
        assert torch.allclose(segments[n][0].double(), expected, atol=1e-4), f"segment {n}"


@pytest.mark.parametrize("method", METHODS)
def test_later_tokens_never_change_earlier_logits(model, method):
    lococo = LoCoCo(model, settings(method, recent=2 if method == "lococo" else None))
    changed = TOKENS.clone()
    changed[:, 21:] = 5
    outputs = []
    for tokens in (TOKENS, changed):
        cache = lococo.cache()
        outputs.append(torch.cat([model(piece, cache) for piece in tokens.split(6, dim=1)], 1))
    assert torch.equal(outputs[0][:, :21], outputs[1][:, :21])
    assert not torch.allclose(outputs[0][:, 21:], outputs[1][:, 21:])


def test_positions_by_slot_stay_below_memory_plus_segment(model):
    lococo = LoCoCo(model, settings("streaming"))
    cache = lococo.cache()
    starts = []
    for t in range(40):
        starts.append(cache.fork().begin(1))
        model(TOKENS[:, t : t + 1], cache)
    assert max(starts) == 8 + 6 - 1 and min(starts[14:]) == 8
    assert model.config.rope_scale == 1.0  # 8 + 6 positions fit into the context of 64


def test_interpolation_factor_is_the_farthest_position_over_the_context(model):
    for changes, factor in ((dict(length=256), 4.0), (dict(length=32), 1.0),  # never below 1
                            (dict(length=256, positions="original"), 1.0),
                            (dict(length=256, positions="slots"), 1.0),  # slots end at M + T = 14, whatever L
                            (dict(mem=122, length=2048, positions="slots"), 2.0),
                            (dict(method="full", length=128), 2.0),
                            (dict(method="full", length=128, positions="slots"), 2.0)):  # fmt: skip
        lococo = LoCoCo(model, settings(**changes))
        assert model.config.rope_scale == interpolation(lococo.base_config, lococo.settings) == factor
        lococo.remove()
    model.config.rope_scale = 3.0  # interpolated already: as its context is 64, it reads 192
    assert interpolation(model.config, settings(length=256)) == 4.0
    assert interpolation(model.config, settings(length=128)) == 3.0
    assert interpolation(model.config, settings(length=256, positions="original")) == 3.0


def test_slots_are_rotated_with_the_interpolated_angles(model):
    """A recent key that moves down equals one that was rotated for its new slot in the first place."""
    lococo = LoCoCo(model, settings("streaming", mem=122, length=2048))  # factor 2
    k, S = torch.randn(1, 2, 128, 8), 128
    rotated = rotate(k, *rope(torch.arange(S), model.config))
    moved, _ = lococo.cache().compress(0, rotated, k)
    kept = torch.cat((k[:, :, :4], k[:, :, -118:]), 2)
    assert torch.allclose(moved, rotate(kept, *rope(torch.arange(122), model.config)), atol=1e-4)


# --- Every method against a slow memory ----------------------------------------------------------------------


def moved(k, by, c):
    """A float64 key (D,) turned by so many positions, as complex numbers."""
    half = c.dim // c.n_heads // 2
    angle = torch.tensor([by / c.rope_scale * c.rope_theta ** (-i / half) for i in range(half)], dtype=torch.float64)
    turned = torch.complex(k[:half], k[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag))


def slow_compress(entries, s, compressor, c):
    """Entries are [k, v, attention received, queries that could see it] of one head, in float64, oldest first."""
    S, slots = len(entries), s.positions == "slots"
    middle = range(s.sinks, S - s.recent)
    rank = {i: entries[i][2] / (entries[i][3] if s.score == "mean" else 1) for i in middle}
    heavy = sorted(sorted(middle, key=rank.get, reverse=True)[: s.heavy])
    rest = [i for i in middle if i not in heavy]
    new = []

    def keep(i):
        k, *others = entries[i]
        new.append([moved(k, len(new) - i, c) if slots else k, *others])

    for i in [*range(s.sinks), *heavy]:
        keep(i)
    if s.merged:
        k = torch.stack([moved(entries[i][0], -i, c) if slots else entries[i][0] for i in rest])
        columns = [k] + [torch.stack([torch.as_tensor(entries[i][n]).double() for i in rest]) for n in (1, 2, 3)]
        w = mixing_weights_by_hand(compressor, k, columns[1])
        if compressor.gate is not None:
            best = sorted(sorted(range(len(rest)), key=lambda j: rank[rest[j]], reverse=True)[: s.merged])
            w = s.blend * w
            for m, j in enumerate(best):
                w[m, j] += 1 - s.blend
        for m in range(s.merged):
            k, *others = [w[m] @ column for column in columns]
            new.append([moved(k, len(new), c) if slots else k, *others])
    for i in range(S - s.recent, S):
        keep(i)
    return new


def slow_memory(s, compressor, c, segments):
    """One key/value head and the query heads that share it: segments of q (heads, T, D), k and v (T, D)."""
    entries = []
    for q, k, v in segments:
        if len(entries) + len(k) > s.mem + s.segment:
            entries = slow_compress(entries, s, compressor, c)
        if s.score == "last":
            entries = [[k_old, v_old, 0.0, 0] for k_old, v_old, *_ in entries]
        entries += [[k_new.double(), v_new.double(), 0.0, 0] for k_new, v_new in zip(k, v)]
        for t in range(len(k)):
            seen = entries[: len(entries) - len(k) + t + 1]
            for entry in seen:
                entry[3] = entry[3] + 1
            for head in q:
                logits = torch.stack([head[t].double() @ entry[0] / head.shape[-1] ** 0.5 for entry in seen])
                for entry, p in zip(seen, logits.softmax(0)):
                    entry[2] = entry[2] + p / len(q)
    return entries


VARIANTS = [
    *[(method, {}) for method in METHODS if METHODS[method].sinks != ALL],
    ("streaming", dict(sinks=3, recent=0)),
    ("h2o", dict(score="mean", sinks=1, heavy=3)),
    ("h2o", dict(score="last")),
    ("lococo", dict(sinks=1, heavy=2, recent=2, score="mean")),
    ("lococo+h2o", dict(normalise="softmax-relu", blend=0.5, score="last")),  # the official code's
    ("lococo", dict(normalise="softmax-relu", blend=1.0, score="last")),
    ("lococo+sinks", dict(blend=0.3, recent=1)),
    ("lococo", dict(normalise="softmax", filters=1, recent=4)),
    ("lococo", dict(filters=3, heavy=2)),
    ("lococo", dict(filters=2, blend=0.4)),
    ("lococo", dict(depthwise=True)),
]


@pytest.mark.parametrize("frame", FRAMES)
@pytest.mark.parametrize("method, changes", VARIANTS)
def test_every_method_equals_a_slow_memory(method, changes, frame):
    """Segments of uneven sizes through grouped-query attention; every entry of every head, and its scores."""
    c = LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, context=64)
    s = settings(method, positions=frame, **changes)
    shape = (8, s.merged, 3, s.normalise, s.blend, s.filters, s.depthwise)
    compressors = torch.nn.ModuleList([Compressor(*shape)] if s.merged else [])
    cache = Memory(c, s, compressors)
    segments = [[torch.randn(2, heads, T, 8) for heads in (4, 2, 2)] for T in (6, 6, 6, 2, 6, 1, 6, 6)]
    for q, k, v in segments:
        cache.begin(q.shape[2])
        cache.attend(0, q, k, v)
    for b in range(2):
        for g in range(2):
            pieces = [(q[b, 2 * g : 2 * g + 2], k[b, g], v[b, g]) for q, k, v in segments]
            entries = slow_memory(s, compressors[0] if s.merged else None, c, pieces)
            k, v, *score = (torch.stack([torch.as_tensor(x).double() for x in column]) for column in zip(*entries))
            assert torch.allclose(cache.keys[0][b, g].double(), k, atol=1e-4)
            assert torch.allclose(cache.values[0][b, g].double(), v, atol=1e-4)
            if s.scored:
                assert torch.allclose(cache.scores[0][b, g].double(), torch.stack(score, -1), atol=1e-4)


@pytest.mark.parametrize("keep", [0, 8])
@pytest.mark.parametrize("kernel", [3, 21])
@pytest.mark.parametrize("gate", [0.5, 1.0])
def test_official_settings_update_the_memory_as_the_official_code_does(keep, kernel, gate):
    """Its update, head by head: the entries of highest score stay, in time order; those after them in score are the
    one-hot rows of W = (1 - g) one-hot + g softmax(ReLU(conv)) over all that did not stay; memory is [kept | mixed]."""
    c = LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=4, ffn_dim=96, vocab_size=64)
    s = settings("lococo+h2o", 16, 24, heavy=keep, kernel=kernel, normalise="softmax-relu", blend=gate, score="last")
    compressor = Compressor(8, s.merged, kernel, "softmax-relu", gate)
    compressor.convs[0].weight.data *= 0.2  # its own start gives logits of 50, which float32 knows to 1e-5 only
    w_ours = []
    compressor.register_forward_hook(lambda module, given, out: w_ours.append(out[2]))
    cache = Memory(c, s, torch.nn.ModuleList([compressor]))
    k, v, score = torch.randn(2, 4, 40, 8), torch.randn(2, 4, 40, 8), torch.rand(2, 4, 40)
    cache.scores[0] = torch.stack((score, torch.ones_like(score)), -1)
    k_ours, v_ours = cache.compress(0, k, v)
    for b in range(2):
        for h in range(4):
            order = score[b, h].argsort(descending=True).tolist()
            kept, rest = sorted(order[:keep]), sorted(order[keep:])
            x = torch.cat((k[b, h, rest], v[b, h, rest]), 1).T
            logits = F.conv1d(x[None], compressor.convs[0].weight, compressor.convs[0].bias, padding=kernel // 2)[0]
            w = gate * logits.clamp(min=0).softmax(-1)
            for row, i in enumerate(sorted(order[keep:16])):
                w[row, rest.index(i)] += 1 - gate
            assert torch.allclose(w_ours[0][b, h], w, atol=1e-5)
            assert torch.allclose(k_ours[b, h], torch.cat((k[b, h, kept], w @ k[b, h, rest])), atol=1e-5)
            assert torch.allclose(v_ours[b, h], torch.cat((v[b, h, kept], w @ v[b, h, rest])), atol=1e-5)


@pytest.mark.parametrize("L", [16, 13, 4, 1])
def test_longlora_attends_within_quarters_half_of_the_heads_shifted(L):
    """Against a loop over heads and queries; nothing later is seen, nor the start by the end."""
    q, k, v = torch.randn(2, 4, L, 8), torch.randn(2, 2, L, 8), torch.randn(2, 2, L, 8)
    out = ShiftedGroups(1).attend(0, q, k, v)
    size = math.ceil(L / 4)
    for b in range(2):
        for h in range(4):
            group = [(t - (size // 2 if h >= 2 else 0)) // size for t in range(L)]
            for t in range(L):
                seen = [s for s in range(t + 1) if group[s] == group[t]]
                p = (k[b, h // 2, seen].double() @ q[b, h, t].double() / 8**0.5).softmax(0)
                assert torch.allclose(out[b, h, t].double(), p @ v[b, h // 2, seen].double(), atol=1e-5)


def test_scores_are_float32_under_autocast():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 14, 8)
    with torch.autocast("cpu", torch.bfloat16):
        low = attention_received(q, k)
    assert torch.equal(low, attention_received(q, k))


@pytest.mark.parametrize("gradients", [False, True])  # with bptt they reach the keys and values too
@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("kernel, depthwise", [(3, False), (21, False), (3, True)])
def test_a_compression_remembers_its_entries_and_one_mixing_matrix(model, kernel, depthwise, normalise, gradients):
    lococo = LoCoCo(model, settings(mem=24, segment=16, kernel=kernel, depthwise=depthwise, normalise=normalise))
    memory, out = lococo.cache(), []
    k, v = (torch.randn(2, 2, 40, 8, requires_grad=gradients) for _ in range(2))
    held = {t.untyped_storage().data_ptr() for t in (k, v, *lococo.compressors.parameters())}
    saved = remembered(lambda: out.append(memory.compress(0, k, v)))
    W, entries = 4 * 2 * 2 * 24 * 40, 4 * 2 * 2 * 40 * 16  # float32 (B, G, M, S) and (B, G, S, 2D)
    saved = sum(size for at, size in saved.items() if at not in held)
    if depthwise:  # between the two convolutions there is one more number for each of the entries
        saved -= entries
        W *= normalise == "softmax"  # else it is computed again from those
    assert saved == W + entries


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_forks_go_on_independently(model, method, gradients):
    """Three branches of one cache, in turns, each with its own text, against a run of its own for each."""
    lococo = LoCoCo(model, settings(method))
    start, tails = TOKENS[:, :16].split(5, dim=1), [((TOKENS[:, 16:] + n) % 64).split(5, dim=1) for n in range(3)]
    with torch.set_grad_enabled(gradients):
        alone = []
        for tail in tails:
            cache = lococo.cache()
            alone.append([model(x, cache) for x in (*start, *tail)][len(start) :])
        cache = lococo.cache()
        for x in start:
            model(x, cache)
        branches = [cache, cache.fork(), cache.fork()]  # the first to write is the one they came from
        turns = [[model(x, branch) for x, branch in zip(xs, branches)] for xs in zip(*tails)]
    for got, expected in zip(zip(*turns), alone):
        assert torch.allclose(torch.cat(got, 1), torch.cat(expected, 1), atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_one_cache_with_and_without_gradients_in_turns(model, method):
    """The same logits as with gradients throughout, and a backward pass at the end finds all it needs unchanged."""
    lococo = LoCoCo(model, settings(method))
    pieces = TOKENS.split(3, dim=1)
    cache, whole = lococo.cache(), lococo.cache()
    losses = []
    for n, x in enumerate(pieces):
        expected = model(x, whole)
        with torch.set_grad_enabled(n % 3 == 1):
            logits = model(x, cache)
        assert torch.allclose(logits, expected, atol=1e-4), n
        if logits.requires_grad:
            losses.append(logits.logsumexp(-1).sum())
    sum(losses).backward()  # raises if something it saved was written over in place


@torch.no_grad()
@pytest.mark.parametrize("method", ["streaming", "lococo"])
def test_decoding_writes_into_one_buffer(model, method):
    cache = LoCoCo(model, settings(method)).cache()
    places = set()
    for t in range(40):
        model(TOKENS[:, t : t + 1], cache)
        places.add(cache.keys[0].data_ptr())
    assert len(places) == 1 and cache.buffers[0].shape[3] == 8 + 6


# --- Segment loop --------------------------------------------------------------------------------------------


def test_segment_losses_score_every_token_after_the_first_once(model):
    cache = KVCache(2)
    losses = torch.cat(list(segment_losses(model, TOKENS, cache, segment=7)), dim=1)
    expected = F.cross_entropy(model(TOKENS)[:, :-1].transpose(1, 2), TOKENS[:, 1:], reduction="none")
    assert torch.allclose(losses, expected, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_perplexity_equals_a_brute_force_loop(model, method):
    lococo = LoCoCo(model, settings(method))
    total = count = 0.0
    for tokens in TOKENS:  # one document and one token at a time, through the same memory
        cache, logits = lococo.cache(), []
        for piece in tokens[None].split(6, dim=1):
            logits += list(model(piece, cache)[0].detach().double())
        for t in range(39):
            total -= float(logits[t].softmax(0)[tokens[t + 1]].log())
            count += 1
    expected = math.exp(total / count)
    assert perplexity(model, lococo.cache, [TOKENS[:1], TOKENS[1:]], 6) == pytest.approx(expected, rel=1e-5)


def test_prefill_gives_the_last_logits(model):
    assert torch.allclose(prefill(model, TOKENS, KVCache(2), 7), model(TOKENS)[:, -1], atol=1e-4)


@pytest.mark.parametrize("frame", FRAMES)
def test_gradients_reach_what_trains_and_nothing_else(model, frame):
    lococo = LoCoCo(model, settings(sinks=1, recent=2, lora_rank=2, positions=frame))
    lococo.start_training()
    first, *rest = segment_losses(model, TOKENS, lococo.cache(), 6)
    first.sum().backward()  # the first segment already trains k and v (the official code detaches them there)
    assert all(bool(block.attention.wv.lora_b.grad.any()) for block in model.layers)
    assert not any(p.grad is not None and p.grad.any() for p in lococo.compressors.parameters())
    for loss in rest:
        loss.sum().backward()
    training = {id(p) for group in lococo.groups().values() for p in group.values()}
    for name, p in [*model.named_parameters(), *lococo.compressors.named_parameters()]:
        if id(p) in training:
            assert name.endswith("lora_a") or bool(p.grad.any()), name  # lora_a waits for lora_b to leave zero
        else:
            assert p.grad is None and not p.requires_grad, name
    assert set(lococo.groups()) == {"compressors", "LoRA", "embeddings", "norms"}


@pytest.mark.parametrize("bptt", [2, 3, 100])
def test_gradients_over_several_segments_equal_one_graph(model, bptt):
    """Against the loss of `bptt` segments written out over a cache whose graph is cut only between such groups."""
    lococo = LoCoCo(model, settings(sinks=1, recent=2, lora_rank=2))
    lococo.start_training()
    parameters = [p for group in lococo.groups().values() for p in group.values()]

    def gradients(losses):
        for loss in losses:
            loss.sum().backward()
        grads = [p.grad.clone() for p in parameters]
        model.zero_grad()
        lococo.compressors.zero_grad()
        return grads

    def by_hand():
        cache, total = lococo.cache(), 0.0
        for n, start in enumerate(range(0, 39, 6)):
            stop = min(start + 6, 39)
            logp = model(TOKENS[:, start:stop], cache).log_softmax(-1)
            total = total - logp.gather(2, TOKENS[:, start + 1 : stop + 1, None]).sum()
            if (n + 1) % bptt == 0 or stop == 39:
                yield total
                total = 0.0
                cache.keys, cache.values = ([t.detach() for t in ts] for ts in (cache.keys, cache.values))

    several = gradients(segment_losses(model, TOKENS, lococo.cache(), 6, bptt))
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(several, gradients(by_hand())))
    one = gradients(segment_losses(model, TOKENS, lococo.cache(), 6))
    assert not all(torch.allclose(a, b, atol=1e-3) for a, b in zip(several, one))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputing_changes_no_gradient_and_remembers_less(model, dtype):
    """Through LoRA, memory and two segments, the base in low precision too."""
    lococo = LoCoCo(model.to(dtype), settings(lora_rank=2))
    lococo.start_training()
    trained = [p for group in lococo.groups().values() for p in group.values()]
    with torch.no_grad():
        [p.normal_(std=0.1) for name, p in lococo.groups()["LoRA"].items()]

    def gradients() -> tuple[list, int]:
        saved = {}
        for p in trained:
            p.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            pieces = segment_losses(model, TOKENS, lococo.cache(), 6, bptt=2)
            while True:
                saved |= remembered(lambda: losses.append(next(pieces, None)))
                if losses[-1] is None:
                    return [p.grad for p in trained], sum(saved.values())
                losses[-1].sum().backward()

    losses = []
    plain, much = gradients()
    model.recompute = True
    again, little = gradients()
    assert all(torch.equal(a, b) for a, b in zip(plain, again)) and little < much


def test_a_segments_graph_does_not_grow_with_the_sequence(model):
    """Bytes saved for backward, segment by segment: flat once the memory is full, whatever the length."""
    lococo = LoCoCo(model, settings(lora_rank=2))
    lococo.start_training()
    saved = []

    def pack(tensor):
        saved[-1] += tensor.numel()
        return tensor

    tokens = torch.randint(3, 64, (1, 6 * 30 + 1))
    losses = segment_losses(model, tokens, lococo.cache(), 6)
    for _ in range(30):
        saved.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = next(losses).sum()
        loss.backward()
    assert saved[5] == saved[20] == saved[-1] == max(saved)


# --- LoRA and the base ---------------------------------------------------------------------------------------


def test_lora_starts_as_the_identity_and_merges_back(model):
    before = model(TOKENS)
    lococo = LoCoCo(model, settings(lora_rank=4))
    assert torch.equal(model(TOKENS), before)
    for group in ("wq", "wk", "wv", "wo"):
        layer = getattr(model.layers[0].attention, group)
        assert isinstance(layer, LoRALinear) and layer.scale == 16 / 4
        torch.nn.init.normal_(layer.lora_b)
    x = torch.randn(3, 32)
    lora = model.layers[0].attention.wk
    by_hand = x.double() @ (lora.base.weight.double() + 4 * lora.lora_b.double() @ lora.lora_a.double()).T
    assert torch.allclose(lora(x).double(), by_hand, atol=1e-4)
    with_lora = model(TOKENS)
    assert not torch.allclose(with_lora, before)
    remove_lora(model, merge=True)
    assert torch.allclose(model(TOKENS), with_lora, atol=1e-3)
    assert lococo.settings.lora_rank == 4 and not any("lora" in name for name, _ in model.named_parameters())


def train_a_little(lococo, steps=3):
    lococo.start_training()
    parameters = [p for group in lococo.groups().values() for p in group.values()]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    for _ in range(steps):
        for loss in segment_losses(lococo.model, TOKENS, lococo.cache(), 6):
            if loss.requires_grad:
                (loss.sum() / TOKENS.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_inference_mode_leaves_the_base_bit_identical(model):
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    logits = model(TOKENS)
    lococo = LoCoCo(model, settings(length=256))
    start = [p.detach().clone() for p in lococo.compressors.parameters()]
    train_a_little(lococo)
    assert all(not torch.equal(a, b) for a, b in zip(start, lococo.compressors.parameters()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(lococo.remove()(TOKENS), logits)


def test_frozen_tensors_stay_when_lora_trains(model):
    lococo = LoCoCo(model, settings(lora_rank=2))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train_a_little(lococo)
    trained = {name for group in lococo.groups().values() for name in group}
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != (name in trained), name


def test_compressors_alone_lower_the_loss(model):
    """Inference mode: whatever is gained comes through the merged slots."""
    lococo = LoCoCo(model, settings(sinks=1, recent=2))
    first = perplexity(model, lococo.cache, [TOKENS], 6)
    train_a_little(lococo, steps=30)
    assert perplexity(model, lococo.cache, [TOKENS], 6) < 0.9 * first


def test_tied_embeddings_of_a_bfloat16_base_train_in_float32_and_stay_tied():
    torch.manual_seed(0)
    model = Llama(LlamaConfig(32, 2, 4, 2, 96, 64, tied=True)).bfloat16()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lococo = LoCoCo(model, settings(lora_rank=2))
    with torch.autocast("cpu", torch.bfloat16):
        train_a_little(lococo)
    assert model.output.weight is model.tok_embeddings.weight and model.output.weight.dtype == torch.float32
    assert not torch.equal(model.output.weight.bfloat16(), before["tok_embeddings.weight"])
    lococo.remove()
    assert model.output.weight is model.tok_embeddings.weight
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_remove_gives_back_the_base_after_lora_too(model):
    before, config = model(TOKENS), model.config
    lococo = LoCoCo(model, settings(lora_rank=2, length=256))
    train_a_little(lococo)
    assert not torch.equal(model(TOKENS), before)
    assert torch.equal(lococo.remove()(TOKENS), before) and model.config == config


# --- Adapter file --------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, model):
    """A trained adapter, and a function that makes its base anew."""
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = model.config
    lococo = LoCoCo(model, settings(lora_rank=2, sinks=1, recent=2, length=256))
    train_a_little(lococo)
    lococo.save(tmp_path / "adapter.safetensors")
    assert [f.name for f in tmp_path.iterdir()] == ["adapter.safetensors"]

    def base():
        fresh = Llama(config)
        fresh.load_state_dict(state)
        return fresh

    return tmp_path, lococo, base


def test_adapter_round_trip(saved):
    path, lococo, base = saved
    loaded = LoCoCo.load(path, base(), mem=8, kernel=3)
    assert loaded.settings == lococo.settings and loaded.model.config.rope_scale == 4.0
    assert perplexity(loaded.model, loaded.cache, [TOKENS], 6) == perplexity(lococo.model, lococo.cache, [TOKENS], 6)


@pytest.mark.parametrize("method, changes", [*VARIANTS, ("full", {}), ("longlora", {})])
def test_every_variant_comes_back_from_its_file(model, tmp_path, method, changes):
    untouched = {name: p.clone() for name, p in model.state_dict().items()}
    lococo = LoCoCo(model, settings(method, lora_rank=2, **changes))
    train_a_little(lococo)
    lococo.save(tmp_path / "adapter.safetensors")
    expected = perplexity(model, lococo.cache, [TOKENS], 6)
    base = Llama(lococo.base_config)
    base.load_state_dict(untouched)
    loaded = LoCoCo.load(tmp_path, base)
    assert loaded.settings == lococo.settings and perplexity(base, loaded.cache, [TOKENS], 6) == expected


def test_adapter_on_the_wrong_base_or_with_other_settings_is_refused(saved, tmp_path):
    path, _, base = saved
    with pytest.raises(UserError, match="trained with mem 8, not 16"):
        LoCoCo.load(path, base(), mem=16)
    with pytest.raises(UserError, match="trained with kernel 3, not 21"):
        LoCoCo.load(path, base(), kernel=21)
    other = base()
    with torch.no_grad():
        other.layers[1].feed_forward.w2.weight.mul_(1.5)
    with pytest.raises(UserError, match="another base model"):
        LoCoCo.load(path, other)
    with pytest.raises(UserError, match="no adapter there"):
        LoCoCo.load(tmp_path / "nowhere", base())


def test_a_damaged_adapter_is_refused_and_leaves_no_trace(saved):
    path, _, base = saved
    file = path / "adapter.safetensors"
    whole = file.read_bytes()
    other_kernel = whole.replace(rb'\"kernel\": 3', rb'\"kernel\": 5')
    assert other_kernel != whole
    flipped = whole[:-9] + bytes([whole[-9] ^ 64]) + whole[-8:]
    damaged = [other_kernel, whole[:-1], whole[: len(whole) // 2], whole[:7], b"", flipped]
    for content in damaged:
        file.write_bytes(content)
        model = base()
        logits = model(TOKENS)
        with pytest.raises(UserError, match="adapter.safetensors: .*damaged"):
            LoCoCo.load(path, model)
        assert torch.equal(model(TOKENS), logits)


def test_fingerprint_does_not_depend_on_dtype_but_on_weights(model):
    with torch.no_grad():  # weights as a checkpoint in half precision has them
        for p in model.parameters():
            p.copy_(p.half())
    name = fingerprint(model)
    assert fingerprint(model.to(torch.bfloat16)) == name
    with torch.no_grad():
        model.output.weight[0, 0] += 1
    assert fingerprint(model) != name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_gpu_equals_cpu(model):
    outputs = []
    for device in ("cpu", "cuda"):
        lococo = LoCoCo(model.to(device), settings(sinks=1, recent=2))
        torch.manual_seed(0)
        for p in lococo.compressors.parameters():
            p.data.copy_(torch.randn(p.shape))
        cache = lococo.cache()
        outputs.append(torch.cat([model(t.to(device), cache).cpu() for t in TOKENS.split(6, dim=1)], 1))
        lococo.remove()
    assert torch.allclose(*outputs, atol=1e-3)
