"""lococo.py: methods, compressors, memory, budgets, positions, LoRA."""

from copy import deepcopy
from dataclasses import replace
from itertools import product

import pytest
import torch
from conftest import same, settings
from reference import slow_memory

from lococo import COMPRESSORS, KINDS, METHODS, AdaptedLlama, Compressor, Memory
from lococo import position_divisor, merge, segment_losses
from model import Entries, Llama, rope, rotate
from support.ours.bits import PackedEntries, pack, unpack
from support.ours.published import ExpectedAttention
from support.ours.budgets import parts_of, with_slots
from support.checks import check_rows
from support.files import UserError
from support.programs.settings import resized, untrained

TOKENS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def logits_of(model, cache, tokens=TOKENS, segment=6):
    return torch.cat([model(x, cache) for x in tokens.split(segment, dim=1)], dim=1)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def base_dtype(request):
    yield request.param
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


@pytest.mark.parametrize("method, lora_rank", [
    ("full", 0), ("h2o", 0), ("learned", 0), ("lococo-code", 2), ("lococo+h2o", 2)])
def test_defaults_of_the_process_change_nothing(model, base_dtype, method, lora_rank):
    """A notebook may have called torch.set_default_dtype or torch.set_default_device. Losses and
    gradients are those of a process that has not, also at positions that bfloat16 rounds."""
    found = []
    for dtype, device in ((torch.float32, "cpu"), (torch.bfloat16, "meta")):
        torch.set_default_dtype(dtype)
        torch.set_default_device(device)
        base = deepcopy(model).to(base_dtype)
        adapted = AdaptedLlama(base, settings(method, lora_rank=lora_rank, positions="text"))
        generator = torch.Generator("cpu").manual_seed(0)
        for p in adapted.trained().values():  # the same in both
            assert p.dtype == torch.float32
            p.data = torch.randn(p.shape, generator=generator, device="cpu", dtype=p.dtype) / 8
        cache = adapted.cache()
        cache.seen = 500
        losses = torch.cat([n for n, _ in segment_losses(adapted.model, TOKENS, cache, 6)], dim=1)
        if losses.requires_grad:  # nothing has a gradient through a learned score
            losses.sum().backward()
        assert losses.dtype == torch.float32
        grads = [p.grad for p in adapted.trained().values() if p.grad is not None]
        found.append([losses, *grads])
    assert all(map(torch.equal, *found))


# --- Methods ----------------------------------------------------------------------------


@pytest.mark.parametrize("method, mem, changes, counts", [  # sinks, heavy, merged, recent
    ("full", 512, {}, (0, 0, 0, 0)), ("streaming", 512, {}, (4, 0, 0, 508)),
    ("streaming", 512, dict(sinks=8, recent=0), (8, 0, 0, 0)),  # the paper's StreamingLLM
    ("h2o", 511, dict(sinks=None), (0, 255, 0, 256)),  # a flag that is not given
    ("h2o+forget", 512, {}, (0, 320, 0, 192)),
    ("lococo+h2o", 512, {}, (0, 256, 256, 0)),
    ("lococo+sinks", 512, {}, (4, 0, 508, 0)), ("learned", 64, {}, (0, 40, 0, 24)),
    ("snapkv", 512, {}, (0, 320, 0, 192)), ("duo-attention", 512, {}, (4, 0, 0, 508)),
    ("lococo-code", 512, {}, (0, 256, 256, 0)), ("h2o-code", 512, {}, (0, 512, 0, 0))])
def test_a_method_is_four_counts(method, mem, changes, counts):
    s = settings(method, mem, **changes)
    assert (s.sinks, s.heavy, s.merged, s.recent, s.mem) == (*counts, sum(counts))
    assert s.positions == ("slots" if method == "streaming" else "text")
    names = {"learned": "learned", "lococo-code": "official"}
    assert s.compressor == names.get(method, "paper")
    forget = {"h2o+forget": 0.75, "learned": 0.75, "h2o-code": 0, "lococo-code": 0}
    forget["snapkv"] = 0
    assert s.forget == forget.get(method, 1)


@pytest.mark.parametrize("method, changes, words", [
    ("nothing", {}, "method nothing: lococo.METHODS has full, "),
    ("lococo", dict(heavy=8, merged=0), "0 sinks, 8 heavy, 0 merged, 0 recent slots do not fit"),
    ("h2o", dict(heavy=9, recent=0), "9 heavy"), ("h2o", dict(heavy=9, recent=-1), "-1 recent"),
    ("h2o", dict(heavy=0, recent=0), "do not fit; change mem")])
def test_counts_that_do_not_fit_are_refused(method, changes, words):
    with pytest.raises(UserError, match=words):
        settings(method, 8, **changes)


# --- Compressors ------------------------------------------------------------------------


@pytest.mark.parametrize("wrong, words", [
    (lambda self, entries, *_: torch.ones(2, 2, 11) / 11, r"shape \(2, 2, 11\) instead of \(2, 3,"),
    # A softmax over the slots.
    (lambda self, entries, *_: self.conv(entries).softmax(1), "the rows of w sum to .* instead of 1"),
])
def test_a_wrong_compressor_is_named(monkeypatch, wrong, words):
    monkeypatch.setattr(Compressor, "weights", wrong)
    with pytest.raises(UserError, match=f"Compressor.weights: .*{words}"):
        check_rows(Compressor(4, 3, 5, 1.0), 4, True, torch.zeros(0))


def test_without_heavy_slots_a_compressor_gets_no_attention(model):
    """One that needs it fails when it is made, and not at the first compression."""
    AdaptedLlama(model, settings("lococo-code"))
    with pytest.raises(AttributeError, match="NoneType"):
        AdaptedLlama(model, settings("lococo", compressor="official"))


@pytest.mark.parametrize("name", ["paper", "official"])
def test_a_compressor_computes_in_float32_where_the_model_does_not(name):
    """Logits reach 900, where numbers in bfloat16 are 4 apart. Autocast, which computes in bfloat16,
    changes nothing."""
    compressor = COMPRESSORS[name](4, 3, 5, 1.0)
    compressor.conv.weight.data *= 100
    entries = torch.randn(2, 2, 9, 8).bfloat16()
    scores = torch.rand(2, 2, 9)
    plain = merge(compressor, entries, scores)
    with torch.autocast("cpu", torch.bfloat16):
        cast = merge(compressor, entries, scores)
    assert plain[0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(plain, cast))
    wide, _ = merge(compressor, entries.float(), scores)
    assert torch.equal(plain[0], wide.bfloat16())  # keys and values are rounded once


# --- Memory -----------------------------------------------------------------------------


# Without the rows of tools/tables.py, which another test may have added.
# TOVA regards all heads of a layer, which the slow memory does not know.
OTHERS = ("lococo+h2o-", "lococo-code-closed", "tova")
OWN = [m for m in METHODS if METHODS[m](8) and not m.startswith(OTHERS)]
VARIANTS = [(method, {}) for method in OWN] + [
    ("streaming", dict(sinks=3, recent=0)),
    ("lococo", dict(sinks=1, heavy=2, merged=3, recent=2)),
    ("lococo", dict(heavy=2, merged=4, recent=2, forget=0.3)),
    ("h2o", dict(budgets=[[4, 12], [12, 4]])),
    ("learned", dict(budgets=[[5, 9], [5, 13]])),
]


@torch.no_grad()
@pytest.mark.parametrize("positions, context", [("slots", 7), ("text", 64), ("text", 8)])
@pytest.mark.parametrize("method, changes", VARIANTS)
def test_every_method_equals_a_slow_memory(
    config, in_float64, monkeypatch, method, changes, positions, context
):
    """The second layer, with segments of uneven sizes and grouped queries. With budgets each
    of the two key/value heads is a part, and they are compressed at different times. In a context
    of 8 tokens old entries are moved up."""
    if method in ("learned", "expected-attention") and positions == "slots":
        pytest.skip("its scores need positions of the text")
    monkeypatch.setattr(ExpectedAttention, "LAST", 8)
    model = Llama(replace(config, context=context))
    adapted = AdaptedLlama(model, settings(method, positions=positions, **changes)).eval()
    for p in adapted.compressors.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    cache = adapted.cache()
    parts = parts_of(model.config, adapted.settings)
    segments, outputs = [], []
    for T in (6, 6, 2, 3, 6, 1, 6, 6):
        k, v = torch.randn(2, 2, 2, T, 8)
        q = 2 * k.repeat_interleave(2, dim=1) + torch.randn(2, 4, T, 8)  # new entries are heavy too
        segments.append([q, k, v])
        cache.make_room(2, T)
        cache.seen += T
        cache.attend(0, q, k, v)
        outputs.append(cache.attend(1, q, k, v))
        assert all(k.size <= p.settings.capacity for k, p in zip(cache.keys, parts, strict=True))
    assert cache.full_nbytes == 2 * 2 * 2 * 2 * 36 * 8 * 8  # layers, k and v, B, G, tokens, D, bytes
    read = torch.cat(outputs, dim=2).unflatten(1, (2, 2))  # (B, G, H/G, L, D)
    of_layer = [(n, part) for n, part in enumerate(parts) if part.layer == 1]
    for b, (n, part) in product(range(2), of_layer):
        held = cache.rotated_keys(n), cache.values[n].held, cache.received[n], read[:, part.heads]
        for i, g in enumerate(part.heads):
            own = [(q[b, 2 * g : 2 * g + 2], k[b, g], v[b, g]) for q, k, v in segments]
            for fast, slow in zip(held, slow_memory(adapted, part.settings, own)):
                if fast is not None:  # not every method counts attention
                    assert torch.allclose(fast[b, i], slow, atol=1e-4)


def test_tova_counts_the_last_query_of_all_heads(config):
    cache = AdaptedLlama(Llama(config), settings("tova")).cache()
    attention = torch.rand(2, 2, 6, 9)  # of two query heads, three tokens and nine entries
    counted = cache.received_after(0, attention, 2)
    expected = sum(attention[:, g, row] for g in (0, 1) for row in (2, 5)) / 4
    assert counted.shape == (2, 2, 9) and torch.allclose(counted, expected[:, None])


@torch.no_grad()
def test_a_rule_that_reads_queries_is_copied_and_saved(model):
    adapted = AdaptedLlama(model, settings("expected-attention"))
    cache, restored = adapted.cache(), adapted.cache()
    logits_of(model, cache)
    assert cache.received == [None] * len(cache.keys)  # it needs no attention
    copied = cache.copy()
    logits_of(model, cache, TOKENS.flip(1))  # it does not change the copy
    for n in range(len(copied.keys)):
        restored.restore(n, copied.stored(n))
    restored.seen, restored.lowest = copied.seen, copied.lowest
    expected = logits_of(model, copied.copy())
    assert torch.equal(logits_of(model, restored), expected)
    assert torch.equal(logits_of(model, copied), expected)


@pytest.mark.parametrize("D, block", [(64, 32), (48, 16), (100, 4), (8, 8)])
@pytest.mark.parametrize("bits, error", [(8, 1 / 128), (4, 1 / 8)])
def test_packed_numbers_are_near_and_are_packed_again_exactly(bits, error, D, block):
    """The largest of a block's channels is 64 to 127 steps (4 to 7 with 4 bits), so that a number is off by
    half a step at most, and the largest ones by one; in bfloat16, too."""
    x = torch.randn(2, 3, 5, D) * 10.0 ** torch.randint(-3, 3, (2, 3, 5, 1))
    x[0, 0, 0] = 0
    numbers, exponents = pack(x, bits)
    assert numbers.nbytes == x.numel() * bits // 8 and exponents.nbytes == x.numel() // block
    near = unpack(numbers, exponents, bits, x)
    largest = x.unflatten(-1, (-1, block)).abs().amax(dim=-1)
    assert ((near - x).unflatten(-1, (-1, block)).abs().amax(dim=-1) <= error * largest).all()
    again = unpack(numbers, exponents, bits, x.bfloat16())
    assert torch.equal(pack(again, bits)[0], numbers) and torch.equal(again.float(), near)


@torch.no_grad()
def test_new_entries_are_packed_when_it_is_said():
    first, second = torch.randn(2, 1, 2, 5, 32)
    entries = PackedEntries(pack(first, 8), Entries(first[:, :, :0]), 8)
    entries.append(second)
    entries.detach()  # changes no number
    copied = entries.copy()
    assert torch.equal(entries.held[:, :, 5:], second) and entries.new.size == 5
    entries.pack_new()
    expected = torch.cat([unpack(*pack(x, 8), 8, x) for x in (first, second)], dim=2)
    assert torch.equal(entries.held, expected) and (entries.size, entries.new.size) == (10, 0)
    assert torch.equal(copied.held[:, :, 5:], second) and entries.nbytes < copied.nbytes


@torch.no_grad()
@pytest.mark.parametrize("changes", [
    {}, dict(positions="slots"), dict(budgets=[[4, 12], [12, 4]])])
def test_a_memory_of_few_bits(model, changes):
    """It reads nearly what the memory of all bits reads, in fewer bytes. What is saved goes on to the
    bit."""
    whole = AdaptedLlama(model, settings("h2o", **changes))
    few = AdaptedLlama(model, replace(whole.settings, bits=8))
    caches = whole.cache(), few.cache()
    outputs = [logits_of(model, cache) for cache in caches]
    assert 0 < (outputs[0] - outputs[1]).abs().mean() < 0.05 < outputs[0].std()
    assert caches[1].nbytes < 0.7 * caches[0].nbytes  # blocks have 8 channels here
    # Also heads with fewer slots than a segment has tokens.
    assert all(isinstance(keys, PackedEntries) for keys in caches[1].keys)
    large = AdaptedLlama(model, replace(settings("h2o", 30), bits=8)).cache()
    logits_of(model, large, TOKENS[:, :24])  # all but the last segment is packed before M slots are full
    assert (large.keys[0].packed[0].shape[2], large.keys[0].new.size) == (18, 6)
    other = few.cache()
    for n in range(len(other.keys)):
        other.restore(n, caches[1].copy().stored(n))
    other.seen, other.lowest = caches[1].seen, caches[1].lowest
    assert torch.equal(*(logits_of(model, cache) for cache in (caches[1], other)))


@torch.no_grad()
def test_keys_by_slot_are_rounded_once(config):
    """After 200 compressions in bfloat16 a kept key is the one that entered, rotated once."""
    model = Llama(replace(config, n_layers=1)).bfloat16()
    cache = AdaptedLlama(model, settings("h2o", positions="slots")).cache()
    entered = []
    for _ in range(203):
        q, k, v = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
        entered.append(k.bfloat16())
        cache.make_room(1, 6)
        cache.seen += 6
        cache.attend(0, q.bfloat16(), entered[-1], v.bfloat16())
    entered = torch.cat(entered, dim=2)
    exact = rotate(cache.keys[0].held.double(), *rope(torch.arange(14.0).double(), config))
    assert torch.equal(cache.rotated_keys(0), exact.bfloat16())
    same = (cache.keys[0].held[:, :, :, None] == entered[:, :, None]).all(dim=4)
    assert same.any(dim=3).all()


def test_a_rule_that_reads_positions_needs_those_of_the_text(model):
    cache = AdaptedLlama(model, settings("expected-attention", positions="slots")).cache()
    with pytest.raises(AssertionError, match="needs positions of the text"):
        model(torch.zeros(1, 4, dtype=torch.int64), cache)


@pytest.mark.parametrize("chosen, sentence", [
    ([0, 1, 2], "4 entries in each head"), ([0, 1, 2, -1], "none of the last entries")])
def test_a_wrong_choice_of_what_is_pinned_is_noticed(model, monkeypatch, chosen, sentence):
    """H2O with four heavy and four recent slots."""

    def choose(memory, layer, k, v, scores):
        mask = torch.zeros(k.shape[:3], dtype=torch.bool)
        mask[:, :, chosen] = True
        return mask

    monkeypatch.setattr(Memory, "choose", choose)
    with pytest.raises(AssertionError, match=sentence):
        logits_of(model, AdaptedLlama(model, settings("h2o")).cache())


@pytest.mark.parametrize("method, changes", [
    ("full", {}), ("streaming", {}), ("h2o", {}), ("h2o", {"budgets": [[4, 12], [12, 4]]})])
def test_what_cannot_enter_is_refused(model, method, changes):
    """By the same sentence for every method, before anything changes."""
    adapted = AdaptedLlama(model, settings(method, **changes))
    model = adapted.model
    with torch.no_grad():
        expected, cache = logits_of(model, adapted.cache()), adapted.cache()
        first = logits_of(model, cache, TOKENS[:, :24])
        for tokens, sentence in ((TOKENS[:1, :3], "a batch of 1 enters a cache for a batch of 2; each batch needs"),
                                 (TOKENS[:, :0], "no tokens enter the cache: give at least one")):
            with pytest.raises(UserError, match=sentence):
                model(tokens, cache)
        with pytest.raises(IndexError):  # no such token
            model(TOKENS[:, :1] + 64, cache)
        rest = logits_of(model, cache, TOKENS[:, 24:])
        assert torch.equal(torch.cat((first, rest), dim=1), expected)
        assert model(TOKENS[:, :1], cache).isfinite().all()


def test_more_than_a_segment_at_once_is_refused(model):
    with pytest.raises(AssertionError, match="40 tokens at once, but at most 6"):
        model(TOKENS, AdaptedLlama(model, settings("h2o")).cache())


# --- Budgets of heads, and other sizes than those of training --------------------------


def test_a_budget_has_the_kinds_of_slots_in_proportion():
    assert settings("h2o", 64, budgets=[[1], [2]]).budgets == [[42], [86]]  # 42.7 and 85.3
    s = settings("h2o", 64, budgets=[[1, 2, 3], [1, 1, 4]])
    assert s.budgets == [[32, 64, 96], [32, 32, 128]] and s.largest == 128

    def counts(s, *sizes):
        return [[getattr(with_slots(s, M), kind) for kind in KINDS] for M in sizes]

    s = settings("h2o+forget", 64)
    assert counts(s, 40, 96, 56) == [[0, 25, 0, 15], [0, 60, 0, 36], [0, 35, 0, 21]]
    # 3.5 and 4.5; no recent slots where none were.
    assert counts(settings("h2o", 8), 7, 9) == [[0, 4, 0, 3], [0, 5, 0, 4]]
    assert counts(settings("h2o-code", 8), 7, 9) == [[0, 7, 0, 0], [0, 9, 0, 0]]
    s = settings("streaming", 16, heavy=4, recent=8)  # every head has all sinks
    assert counts(s, 8, 24) == [[4, 1, 0, 3], [4, 6, 0, 14]]


def test_what_was_trained_with_m_slots_is_used_with_others():
    trained = settings("h2o+forget", 64, segment=32)
    assert resized(trained, mem=512) == settings("h2o+forget", 512, segment=32)
    packed = resized(trained, bits=8)  # None keeps them, and 0 is none
    assert resized(packed).bits == 8 and resized(packed, bits=0) == trained
    changes = dict(mem=128, segment=64, budgets=[[1], [3]])
    assert resized(trained, **changes) == settings("h2o+forget", **changes)
    assert resized(settings("h2o+forget", 128, budgets=[[2], [6]]), mem=64).budgets == [[32], [96]]
    assert resized(settings("h2o+forget", 128, budgets=[[2], [6]]), budgets=[]) == settings("h2o+forget", 128)
    as_in_the_paper = settings("streaming", 8, sinks=8, recent=0)
    assert resized(as_in_the_paper) == as_in_the_paper
    with pytest.raises(UserError, match="full has no slots to divide"):
        resized(settings("full"), mem=8)
    with pytest.raises(UserError, match="streaming has no slots to divide"):
        resized(as_in_the_paper, mem=512)
    with pytest.raises(UserError, match="--mem 16, lococo: it has a filter for each merged slot"):
        resized(settings("lococo"), mem=16)
    with pytest.raises(UserError, match="--segment 6, lococo: its compressor was trained with 12"):
        resized(settings("lococo", segment=12), segment=6)


@pytest.mark.parametrize("slots, words, changes", [
    ([[6], [8], [10]], "for 3 layers of 1 heads; this base has 2 layers of 2", dict(method="h2o")),
    ([[6, 8, 10], [6, 8, 10]], "for 2 layers of 3 heads; this base has", dict(method="h2o")),
    ([[2], [14]], "2 slots of a head are too few", dict(method="h2o")),
    # The sinks fill them.
    ([[4], [12]], "4 slots of a head are too few", dict(method="streaming")),
    ([[8], [8]], "streaming has no slots to divide", dict(method="streaming", sinks=8, recent=0)),
    ([[4], [12]], "a method with merged slots has as many in each head", dict(method="lococo")),
    ([[6], [10]], "full has no slots to divide", dict(method="full"))])
def test_budgets_that_do_not_suit_are_refused(model, slots, words, changes):
    with pytest.raises(UserError, match=words):
        AdaptedLlama(model, settings(budgets=slots, **changes))


# --- Positions, LoRA --------------------------------------------------------------------


@pytest.mark.parametrize("rope_scale, changes, factor", [  # the pretrained context is 64
    (1.0, dict(length=256), 4.0), (1.0, dict(length=256, lora_rank=0), 1.0), (1.0, dict(length=32), 1.0),  # never below 1
    (1.0, dict(length=2048, mem=122, positions="slots"), 2.0),  # slots end at M + T = 128
    (1.0, dict(length=64, mem=122, positions="slots"), 1.0),  # but L is not above 64
    # The largest head counts.
    (1.0, dict(method="h2o", length=512, mem=90, positions="slots", budgets=[[58, 58], [122, 122]]), 2.0),
    (3.0, dict(length=256), 4.0), (3.0, dict(length=128), 3.0)])
def test_positions_are_divided_to_fit_into_the_context(config, rope_scale, changes, factor):
    model = Llama(replace(config, rope_scale=rope_scale))
    adapted = AdaptedLlama(model, settings(**{"lora_rank": 2} | changes))
    assert position_divisor(model.config, adapted.settings) == adapted.cache().rope_scale == factor


@pytest.mark.parametrize("rope_scale", [1.0, 1.1, 4.0])
def test_a_method_without_training_leaves_positions_as_the_base_has_them(config, rope_scale):
    """It is for all texts that such a base can read."""
    model = Llama(replace(config, rope_scale=rope_scale))
    s = untrained(model, "h2o", 16, 16).settings
    assert position_divisor(model.config, s) == rope_scale and s.length == int(64 * rope_scale)


def test_lora_starts_unchanged_and_equals_merged_weights(model):
    before, merged = model(TOKENS), Llama(model.config)
    merged.load_state_dict(model.state_dict())
    tuned = AdaptedLlama(model, settings(lora_rank=4)).model
    assert torch.equal(tuned(TOKENS), before)
    for block, other in zip(tuned.layers, merged.layers):
        for name in ("wq", "wk", "wv", "wo"):
            lora = getattr(block.attention, name)
            torch.nn.init.normal_(lora.lora_b, std=0.1)
            getattr(other.attention, name).weight.data += 16 / 4 * lora.lora_b @ lora.lora_a
    assert torch.allclose(tuned(TOKENS), merged(TOKENS), atol=1e-3)
    assert not torch.allclose(tuned(TOKENS), before, atol=1e-1)


def test_a_base_stays_as_it_is(model):
    """Whatever is adapted on it before and after, and trains. Weights that are frozen are in
    memory once."""
    before = {name: t.clone() for name, t in model.state_dict().items()}
    first = AdaptedLlama(model, settings("h2o"))
    expected = logits_of(first.model, first.cache())
    tuned = AdaptedLlama(model, settings(lora_rank=4))
    last = AdaptedLlama(model, settings("h2o"))
    for p in tuned.trained().values():
        p.data += 1
    for adapted in (first, last):
        assert torch.equal(logits_of(adapted.model, adapted.cache()), expected)
    assert same(model.state_dict(), before)
    w1 = tuned.model.layers[1].feed_forward.w1.weight
    assert w1.data_ptr() == model.layers[1].feed_forward.w1.weight.data_ptr()
    with pytest.raises(UserError, match="this model is adapted already"):
        AdaptedLlama(tuned.model, settings("h2o"))


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_a_base_in_bfloat16_needs_no_autocast(config, tied):
    """What trains is in float32, with tied embeddings the output's weights, too. It computes as
    under autocast, but for what is rounded. Before it has trained, it changes nothing: what
    flows through the layers stays in bfloat16."""
    model = Llama(replace(config, tied=tied)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        before = model(TOKENS)
        adapted = AdaptedLlama(model, settings(lora_rank=2))
        model = adapted.model
        assert torch.equal(model(TOKENS), before)
    assert model.norm.weight.dtype == torch.float32
    for p in adapted.trained().values():
        p.data += 0.02 * torch.randn(p.shape)
    with torch.no_grad():
        plain = logits_of(model, adapted.cache())
        with torch.autocast("cpu", torch.bfloat16):
            cast = logits_of(model, adapted.cache())
    assert (plain - cast).abs().mean() < 0.02 * cast.abs().mean()
