"""lococo.py: compressor, memory, segment loop, LoRA, what trains, the adapter file, perplexity."""

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import meta_state, reference_logits

from eval_ppl import perplexity
from lococo import (
    METHODS, NORMALISE, Compressor, LoCoCo, LoRALinear, Settings, fingerprint, interpolation, prefill, remove_lora,
    segment_losses,
)  # fmt: skip
from model import KVCache, Llama, LlamaConfig, UserError, rope, rotate

torch.manual_seed(1)
TOKENS = torch.randint(3, 64, (2, 40))
FRAMES = ("interpolated", "slots")


def settings(method="lococo", mem=8, segment=6, length=40, **changes):
    return Settings.of(method, mem, segment, length, **({"kernel": 3, "lora_rank": 0} | changes))


# --- Methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice, counts",  # (M, sinks, merged, recent)
    [
        (dict(method="full"), (None, 0, 0, 0)),
        (dict(method="streaming", mem=512), (512, 4, 0, 508)),
        (dict(method="streaming", mem=512, sinks=8, recent=0), (8, 8, 0, 0)),  # the paper's StreamingLLM
        (dict(method="lococo", mem=512), (512, 0, 512, 0)),
        (dict(method="lococo", mem=512, sinks=4, recent=444), (512, 4, 64, 444)),
    ],
)
def test_every_method_is_three_counts(choice, counts):
    s = settings(**choice)
    assert (s.mem, s.sinks, s.merged, s.recent) == counts


@pytest.mark.parametrize(
    "choice, sentence",
    [
        (dict(method="h3o"), "'h3o'; there are full, streaming, lococo"),
        (dict(mem=0), "--mem 0: at least 1"),
        (dict(mem=-5), "--mem -5: at least 1"),
        (dict(kernel=4), "--kernel 4: an odd size"),
        (dict(length=5), "--seq 5 is shorter than one segment; --segment is 6"),
        (dict(positions="absolute"), "'absolute'; there are interpolated, slots"),
        (dict(normalise="max"), "'max'; there are sum, softmax"),
        (dict(sinks=4, recent=4), "--sinks 4 and --recent 4 do not fit into --mem 8"),
        (dict(sinks=-1), "--sinks -1"),
        (dict(lora_rank=-1), "--lora-rank -1"),
        (dict(method="full", sinks=4), "--method full keeps everything"),
        (dict(length=1, segment=1), "--seq 1: at least 2"),
        (dict(method="streaming", mem=3), "--sinks 4 and --recent 0 do not fit into --mem 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused(choice, sentence):
    with pytest.raises(UserError, match=sentence):
        settings(**choice)


# --- Compressor ----------------------------------------------------------------------------------------------


def mixing_weights_by_hand(compressor: Compressor, k, v):
    """Equations 6 to 8 in float64, one number at a time: k, v (S, D) of one head -> W (slots, S)."""
    x = torch.cat((k, v), 1).double()
    weight, bias = compressor.conv.weight.double(), compressor.conv.bias.double()
    slots, channels, kernel = weight.shape
    w = torch.zeros(slots, len(x), dtype=torch.float64)
    for m in range(slots):
        for s in range(len(x)):
            logit = bias[m]
            for tap in range(kernel):
                at = s + tap - kernel // 2
                if 0 <= at < len(x):
                    logit = logit + (weight[m, :, tap] * x[at]).sum()
            w[m, s] = max(logit, 0.0)
        if compressor.normalise == "softmax":
            w[m] = w[m].exp()
        w[m] /= w[m].sum()
    return w


@pytest.mark.parametrize("normalise", NORMALISE)
@pytest.mark.parametrize("kernel", [1, 3, 21])
def test_compressor_equals_a_loop_over_the_papers_equations(kernel, normalise):
    compressor = Compressor(head_dim=4, slots=5, kernel=kernel, normalise=normalise)
    k, v = torch.randn(2, 3, 17, 4), torch.randn(2, 3, 17, 4)
    w = compressor(k, v)
    assert w.shape == (2, 3, 5, 17)
    assert torch.allclose(w.sum(-1), torch.ones(2, 3, 5)) and bool((w >= 0).all())
    for b in range(2):
        for g in range(3):
            expected = mixing_weights_by_hand(compressor, k[b, g], v[b, g])
            assert torch.allclose(w[b, g].double(), expected, atol=1e-5)


def test_a_slot_with_no_positive_logit_is_a_mean_and_not_nan():
    compressor = Compressor(4, 2, 3)
    torch.nn.init.constant_(compressor.conv.weight, 0.0)
    torch.nn.init.constant_(compressor.conv.bias, -1.0)
    w = compressor(torch.randn(1, 1, 10, 4), torch.randn(1, 1, 10, 4))
    assert torch.allclose(w, torch.full((1, 1, 2, 10), 0.1))


def test_parameter_count_of_the_paper():
    c = LlamaConfig.preset("7B")
    with torch.device("meta"):
        layer = Compressor(c.head_dim, 128, 21)
    assert layer.conv.weight.numel() * c.n_layers == 22_020_096  # "22.0 M"


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
        assert torch.equal(cache.values[0][:, :, : s.sinks], plain.values[0][:, :, : min(t + 1, s.sinks)])
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


def test_slots_are_rotated_with_the_interpolated_angles(model):
    """A recent key that moves down equals one that was rotated for its new slot in the first place."""
    lococo = LoCoCo(model, settings("streaming", mem=122, length=2048))  # factor 2
    k, S = torch.randn(1, 2, 128, 8), 128
    rotated = rotate(k, *rope(torch.arange(S), model.config))
    moved, _ = lococo.cache().compress(0, rotated, k)
    kept = torch.cat((k[:, :, :4], k[:, :, -118:]), 2)
    assert torch.allclose(moved, rotate(kept, *rope(torch.arange(122), model.config)), atol=1e-4)


# --- Segment loop --------------------------------------------------------------------------------------------


def test_segment_losses_score_every_token_after_the_first_once(model):
    cache = KVCache(2)
    total = torch.stack(list(segment_losses(model, TOKENS, cache, segment=7))).sum()
    expected = F.cross_entropy(model(TOKENS)[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten(), reduction="sum")
    assert torch.allclose(total, expected, rtol=1e-5)


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
    first.backward()  # the first segment already trains k and v (the official code detaches them there)
    assert all(bool(block.attention.wv.lora_b.grad.any()) for block in model.layers)
    assert not any(p.grad is not None and p.grad.any() for p in lococo.compressors.parameters())
    for loss in rest:
        loss.backward()
    training = {id(p) for group in lococo.groups().values() for p in group.values()}
    for name, p in [*model.named_parameters(), *lococo.compressors.named_parameters()]:
        if id(p) in training:
            assert name.endswith("lora_a") or bool(p.grad.any()), name  # lora_a waits for lora_b to leave zero
        else:
            assert p.grad is None and not p.requires_grad, name
    assert set(lococo.groups()) == {"compressors", "LoRA", "embeddings", "norms"}


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
            loss = next(losses)
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
                (loss / TOKENS.numel()).backward()
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
