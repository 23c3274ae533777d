"""lococo.py: methods, memory, segment loop, positions, LoRA; and what --show-memory shows."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import budgets
import numpy as np
import pytest
import torch
import official_code  # noqa: F401, it adds a compressor
import variants  # noqa: F401, it adds compressors
from conftest import settings
from reference import by_loop, official_rows, slow_memory

from generate import TracedMemory, describe_slots, prefill
from lococo import KINDS, METHODS, AdaptedLlama, Memory, Settings, interpolation, segment_losses
from lococo import COMPRESSORS, in_layer, settings_for, untrained
from model import Entries, KVCache, Llama, load_base
from support.command_line import TINY, Machine
from support.facts import tell_all
from support.files import UserError
from train import rows_sum_to_1

TOKENS = torch.randint(3, 64, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def logits_of(model, cache, tokens=TOKENS, segment=6):
    return torch.cat([model(x, cache) for x in tokens.split(segment, dim=1)], dim=1)


@pytest.mark.parametrize("method, mem, changes, counts", [  # sinks, heavy, merged, recent
    ("full", 512, {}, (0, 0, 0, 0)), ("streaming", 512, {}, (4, 0, 0, 508)),
    ("streaming", 512, dict(sinks=8, recent=0), (8, 0, 0, 0)),  # the paper's StreamingLLM
    ("h2o", 511, dict(sinks=None), (0, 255, 0, 256)),  # a flag that is not given
    ("lococo", 512, {}, (0, 0, 512, 0)), ("lococo+h2o", 512, {}, (0, 256, 256, 0)),
    ("lococo", 512, dict(sinks=4, heavy=8, recent=444), (4, 8, 56, 444)),
    ("lococo+sinks", 512, {}, (4, 0, 508, 0)), ("lococo+window", 128, {}, (4, 0, 24, 100)),
    ("lococo+window", 64, {}, (4, 0, 16, 44)), ("lococo+h2o+recent", 64, {}, (0, 24, 16, 24)),
    ("lococo+h2o+recent", 66, dict(heavy=8), (0, 8, 32, 26))])  # fmt: skip
def test_a_method_is_four_counts(method, mem, changes, counts):
    s = settings(method, mem, **changes)
    assert (s.sinks, s.heavy, s.merged, s.recent, s.mem) == (*counts, sum(counts))
    row = METHODS[method](mem)
    assert sum(row.get(kind, 0) for kind in KINDS) == mem * (method != "full")
    by_slot = method in ("streaming", "lococo+window")
    assert s.positions == ("slots" if by_slot else "interpolated")
    assert settings(method, mem, positions="original").positions == "original"


VARIANTS = [(method, {}) for method in METHODS if METHODS[method](8)] + [
    ("streaming", dict(sinks=3, recent=0)),
    ("lococo", dict(sinks=1, heavy=2, recent=2)),
    ("lococo", dict(heavy=2, recent=2, forget=0.3)),
    ("lococo+h2o+recent", dict(compressor="scored")),
    ("lococo", dict(recent=2, compressor="scored")),
    ("lococo", dict(recent=1, kernel=21, compressor="facts")),
    ("lococo", dict(sinks=1, heavy=2, recent=2, kernel=5, compressor="facts")),
]


@torch.no_grad()
def check_against_slow_memory(adapted, rows):
    class Watched(Memory):
        def compress(self, layer):
            arranged, w = super().compress(layer)
            self.W = self.mixing_matrix(layer, arranged, w)
            return arranged, w

    cache = adapted.cache(Watched)
    segments, outputs = [], []
    for T in (6, 6, 6, 2, 6, 1, 6, 6):
        k, v = torch.randn(2, 2, 2, T, 8).to(adapted.model.norm.weight.dtype)
        q = 2 * k.repeat_interleave(2, dim=1) + torch.randn(2, 4, T, 8)  # new entries are heavy too
        segments.append([q, k, v])
        seen, first = cache.seen, cache.enter(T)
        assert cache.size + T <= 8 + 6
        assert first == (cache.size if adapted.settings.positions == "slots" else seen)
        outputs.append(cache.attend(0, *segments[-1]))
    read = torch.cat(outputs, dim=2).unflatten(1, (2, 2))  # (B, G, H/G, L, D)
    for b in range(2):
        for g in range(2):
            own = [(q[b, 2 * g : 2 * g + 2], k[b, g], v[b, g]) for q, k, v in segments]
            held = cache.keys[0].held, cache.values[0].held
            ours = *held, cache.W, cache.scores[0], read
            for fast, slow in zip(ours, slow_memory(adapted, own, rows)):
                if fast is not None:  # there are scores only for heavy hitters
                    assert torch.allclose(fast[b, g].double(), slow, atol=1e-4)


@pytest.mark.parametrize("positions", ["slots", "original"])
@pytest.mark.parametrize("method, changes", VARIANTS)
def test_every_method_equals_a_slow_memory(config, in_float64, method, changes, positions):
    """Segments of uneven sizes, grouped queries, positions by slot that are halved. In float64: a
    row that avoids copies makes much of what is rounded."""
    model = Llama(replace(config, n_layers=1, context=7))
    adapted = AdaptedLlama(model, settings(method, positions=positions, **changes))
    for p in adapted.compressors.parameters():
        p.data += 0.3 * torch.randn(p.shape)
    check_against_slow_memory(adapted, by_loop)


@pytest.mark.parametrize("chosen, sentence", [
    ([0, 1, 2], "4 entries in each head"), ([0, 1, 2, -1], "none of the last entries")])
def test_a_wrong_choice_of_the_front_is_noticed(model, monkeypatch, chosen, sentence):
    """H2O with four heavy and four recent slots."""

    def choose(memory, layer):
        mask = torch.zeros(memory.keys[layer].held.shape[:3], dtype=torch.bool)
        mask[:, :, chosen] = True
        return mask

    monkeypatch.setattr(Memory, "choose", choose)
    with pytest.raises(AssertionError, match=sentence):
        logits_of(model, AdaptedLlama(model, settings("h2o")).cache())


# --- Budgets of layers ------------------------------------------------------------------


def test_a_budget_has_the_kinds_of_slots_in_proportion():
    s = settings("lococo+h2o+recent", 64, budgets=[40, 96, 56])
    assert [in_layer(s, n).mem for n in range(3)] == s.budgets and s.mem == 64
    counts = [[getattr(in_layer(s, n), kind) for kind in KINDS] for n in range(3)]
    assert counts == [[0, 15, 10, 15], [0, 36, 24, 36], [0, 21, 14, 21]]
    s = settings("streaming", 10, positions="original", budgets=[9, 11])
    assert [(in_layer(s, n).sinks, in_layer(s, n).recent) for n in (0, 1)] == [(4, 5), (4, 7)]
    s = settings("lococo+h2o", 8, budgets=[7, 9])
    counts = [[getattr(in_layer(s, n), kind) for kind in KINDS] for n in range(2)]
    assert counts == [[0, 4, 3, 0], [0, 5, 4, 0]]  # 3.5 and 4.5; no recent slots where none were


def test_every_layer_keeps_all_sinks():
    """What is left of a budget is divided. A budget that the sinks fill is refused."""
    s = settings_for("lococo+sinks", 16, 8, 64, heavy=4, lora_rank=0, budgets=[8, 24])
    kinds = [[getattr(in_layer(s, layer), kind) for kind in KINDS] for layer in (0, 1)]
    assert kinds == [[4, 1, 3, 0], [4, 6, 14, 0]]
    with pytest.raises(UserError, match="4 slots are too few for h2o"):
        settings_for("h2o", 16, 8, 64, sinks=4, heavy=4, lora_rank=0, budgets=[4, 28])


def test_each_layer_has_its_budget(model):
    """Two layers of 12 and 20 slots. The first one's input does not depend on the second, so that
    it holds what a memory of 12 slots holds. The second compresses later, and holds 20 then."""
    both = AdaptedLlama(model, settings("h2o", 16, budgets=[12, 20])).cache()
    small = AdaptedLlama(model, settings("h2o", 12)).cache()
    sizes = []
    for x in TOKENS[:, :30].split(6, dim=1):
        model(x, both)
        model(x, small)
        sizes.append([keys.size for keys in both.keys])
    assert sizes == [[6, 6], [12, 12], [18, 18], [18, 24], [18, 26]]
    assert torch.equal(both.keys[0].held, small.keys[0].held)
    assert torch.equal(both.scores[0], small.scores[0])
    whole = KVCache(model.config)
    model(TOKENS[:, :30], whole)
    assert both.full_nbytes == whole.full_nbytes == whole.nbytes > both.nbytes


@pytest.mark.parametrize("method", ["h2o", "lococo+h2o+recent"])
def test_equal_budgets_change_nothing(model, method):
    torch.manual_seed(1)
    plain = AdaptedLlama(model, settings(method)).cache()
    torch.manual_seed(1)
    budgeted = AdaptedLlama(model, settings(method, budgets=[8, 8])).cache()
    assert torch.equal(logits_of(model, plain), logits_of(model, budgeted))


@pytest.mark.parametrize("method, slots, words", [
    ("h2o", [8, 9], "their mean is 8.5, but it must be 8"),
    ("h2o", [6, 8, 10], "there are 3 numbers for 2 layers"),
    ("h2o", [2, 14], "2 slots are too few"),
    ("lococo+h2o+recent", [3, 13], "3 slots are too few"),
    ("streaming", [6, 10], "add --positions interpolated"),
    ("full", [6, 10], "keeps everything and has no slots")])  # fmt: skip
def test_budgets_that_do_not_suit_are_refused(model, method, slots, words):
    with pytest.raises(UserError, match=words):
        AdaptedLlama(model, settings(method, budgets=slots))


def test_which_layers_need_more_slots(run):
    """The program's needs are differences of losses that are computed here by other means."""
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(40))
    Path("text.txt").write_text(text)
    words = "--data text.txt --mem 16 --length 96 --positions original"
    code, _, err = run(budgets, words.replace("original", "slots"))
    assert code == 2 and "budgets cannot have positions by slot" in err
    code, _, err = run(budgets, words.replace("96", "32"))
    assert code == 2 and "tokens hold it, so that nothing is compressed; take a larger" in err
    code, out, _ = run(budgets, words)
    needs = [float(line.split()[2]) for line in out.splitlines()[:-1]]
    found = [int(word) for word in out.splitlines()[-1].split()[1:]]
    assert code == 0 and len(found) == len(needs) == 4 and sum(found) == 4 * 16
    assert found == budgets.shared_out(np.array(needs), 16)

    tiny, tokenizer = load_base(TINY)
    ids = torch.tensor([tokenizer.encode(text)[:96]])

    def loss(counts):
        s = settings("h2o", 16, 16, 96, positions="original")
        cache = AdaptedLlama(tiny, replace(s, budgets=counts)).cache()
        with torch.no_grad():
            logits = logits_of(tiny, cache, ids[:, :-1], 16)
        return torch.nn.functional.cross_entropy(logits[0], ids[0, 1:]).item()

    gain = loss([16] * 4) - loss([16, 16, 96, 16])
    assert needs[2] == pytest.approx(gain, abs=1e-4)


def test_which_layers_recalling_facts_needs(run):
    """A need is what the answers lose if one layer has few slots while all others keep everything.
    Only answers whose facts were told more than M + T = 32 tokens ago count."""
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(60))
    Path("text.txt").write_text(text)
    words = "--data text.txt --mem 16 --length 256 --positions original --recall"
    code, out, _ = run(budgets, words)
    lines = out.splitlines()
    needs = [float(line.split()[2]) for line in lines[1:-1]]
    assert code == 0 and len(needs) == 4 and "if it alone has 6 slots" in lines[1]

    tiny, tokenizer = load_base(TINY)
    ids = torch.tensor([tokenizer.encode(text)[:256]])
    told, ago = tell_all(ids, "training", tokenizer)
    assert lines[0] == f"{(ago > 32).sum()} answers" and (ago > 32).sum() > 1

    def loss(counts):
        s = settings("h2o", 16, 16, 256, positions="original")
        cache = AdaptedLlama(tiny, replace(s, budgets=counts)).cache()
        with torch.no_grad():
            logits = logits_of(tiny, cache, told[:, :-1], 16)
        nats = torch.nn.functional.cross_entropy(logits[0], told[0, 1:], reduction="none")
        return nats[ago[0] > 32].mean().item()

    assert needs[1] == pytest.approx(loss([256, 6, 256, 256]) - loss([256] * 4), abs=1e-4)
    code, _, err = run(budgets, words.replace("256", "33"))
    assert code == 2 and "no fact is told again more than 32 tokens later" in err


def test_needs_become_budgets():
    """Least 6 of 16. The weights are 1 and 2^0.7 = 1.62: the other 30 slots are 11.4 and 18.6."""
    assert budgets.shared_out(np.array([-1.0, 1.0, 2.0]), 16) == [4, 16, 28]
    assert sum(budgets.shared_out(np.array([0.3, 0.1, 0.1]), 15)) == 45
    assert budgets.shared_out(np.array([-1.0, 0.0, 2.0]), 8) == [4, 4, 16]  # --budgets takes 4 on


# --- What the official code does, positions, losses, LoRA -------------------------------


@pytest.mark.parametrize("kernel", [3, 21])
@pytest.mark.parametrize("gate", [0.0, 0.5, 1.2])
def test_the_official_codes_memory_equals_its_published_formula(config, gate, kernel):
    """Memory is [heavy hitters in time order | mixed]; scores are those of the last forward."""
    model = Llama(replace(config, n_layers=1))
    changes = dict(compressor="official", forget=0.0, positions="original")
    adapted = AdaptedLlama(model, settings("lococo+h2o", kernel=kernel, **changes))
    with torch.no_grad():
        assert adapted.compressors[0].gate == 0.5
        adapted.compressors[0].gate.fill_(gate)
        adapted.compressors[0].conv.bias.normal_()
        adapted.compressors[0].conv.weight *= 0.3  # else rounding decides between logits of 50
    check_against_slow_memory(adapted, official_rows)


def test_weights_of_another_shape_are_named(monkeypatch):
    """A compressor of one's own returns two rows in place of three."""
    compressor = COMPRESSORS["paper"](4, 3, 5)
    monkeypatch.setattr(type(compressor), "weights", lambda *args: torch.ones(4, 2, 9))
    k, v = torch.randn(2, 2, 2, 9, 4)
    sentence = r"Compressor.weights: \(4, 2, 9\) instead of \(4, 3, 9\)"
    with pytest.raises(AssertionError, match=sentence):
        compressor(k, v, torch.zeros(2, 2, 9, dtype=torch.bool), None)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_a_compressor_computes_in_float32_where_the_model_does_not(name):
    """Its logits reach 900, where numbers in bfloat16 are 4 apart, so that a slot would take
    another entry. Autocast, which computes in bfloat16, changes nothing."""
    compressor = COMPRESSORS[name](4, 3, 5)
    compressor.sharpen(100.0)
    k, v = torch.randn(2, 2, 2, 9, 4).bfloat16()
    from_slot, scores = torch.rand(2, 2, 9) < 0.5, torch.rand(2, 2, 9)
    plain = compressor(k, v, from_slot, scores)
    with torch.autocast("cpu", torch.bfloat16):
        cast = compressor(k, v, from_slot, scores)
    assert plain[0].dtype == torch.bfloat16
    assert all(torch.equal(one, other) for one, other in zip(plain, cast))


@pytest.mark.parametrize("name, taken", [
    ("facts", [0, 2]), ("scored", [0, 2]), ("scored-top-k", [0, 1]),
])  # fmt: skip
def test_two_slots_do_not_take_copies(name, taken):
    """Of A, A' (nearly A) and B, in this order of relevance, they hold A and B. A plain top-k
    takes A and A'."""
    compressor = COMPRESSORS[name](2, 2, 1)
    with torch.no_grad():
        for p in compressor.parameters():
            p.zero_()
        compressor.common[0, 0] = 10.0  # the first channel says how relevant an entry is
    entries = torch.tensor([[3.0, 1.0, 0, 0], [2.9, 1.0, 0, 0], [1.0, -5.0, 2.0, 0]])  # A, A', B
    k, v = entries.view(1, 1, 3, 4).split(2, dim=3)
    k_new, v_new, w = compressor(k, v, torch.zeros(1, 1, 3, dtype=torch.bool), torch.ones(1, 1, 3))
    held = torch.cat((k_new, v_new), dim=3)[0, 0]
    torch.testing.assert_close(held, entries[taken], atol=0.2, rtol=0)
    # Without a penalty the second slot would hold what the first one holds.
    assert w[0, 0, 1, taken[1]] > 0.99


@pytest.mark.parametrize("method", METHODS)
def test_later_tokens_leave_earlier_logits_as_they_are(model, method):
    """Within a segment, and with compressions in between."""
    adapted = AdaptedLlama(model, settings(method))
    others = TOKENS.clone()
    others[:, 27:] = TOKENS[:, 27:].flip(1)
    with torch.no_grad():
        before = logits_of(model, adapted.cache())
        after = logits_of(model, adapted.cache(), others)
    assert torch.equal(before[:, :27], after[:, :27])
    assert not torch.allclose(before[:, 27:], after[:, 27:])


@pytest.mark.parametrize("name", COMPRESSORS)
def test_rows_that_do_not_sum_to_1_are_noticed(name, monkeypatch):
    """As those of a softmax over the slots."""
    compressor = COMPRESSORS[name](4, 3, 5)
    machine = Machine("cpu", torch.float32)
    assert rows_sum_to_1(compressor, 4, machine)
    softmax = lambda self, entries, *_: self.conv(entries).softmax(dim=1)  # noqa: E731
    monkeypatch.setattr(type(compressor), "weights", softmax)
    assert not rows_sum_to_1(compressor, 4, machine)


@pytest.mark.parametrize("name", COMPRESSORS)
def test_sharper_logits(name):
    """They are 16 times as large. What is no logit, the official code's gate, stays."""
    compressor = COMPRESSORS[name](4, 3, 5).double()
    entries = torch.randn(2, 8, 9, dtype=torch.double)
    from_slot, scores = torch.rand(2, 9) < 0.5, torch.rand(2, 9, dtype=torch.double)

    def logits() -> torch.Tensor:
        if hasattr(compressor, "relevance"):
            return compressor.relevance(entries, from_slot, scores)
        return compressor.conv(entries)

    before, gate = logits(), getattr(compressor, "gate", torch.tensor(0.0)).item()
    compressor.sharpen(16.0)
    torch.testing.assert_close(logits(), 16 * before)
    assert getattr(compressor, "gate", torch.tensor(0.0)).item() == gate


@pytest.mark.parametrize("rope_scale, changes, factor", [  # the pretrained context is 64
    (1.0, dict(length=256), 4.0), (1.0, dict(length=32), 1.0),  # never below 1
    (1.0, dict(length=2048, mem=122, positions="slots"), 2.0),  # slots end at M + T = 128
    (1.0, dict(length=64, mem=122, positions="slots"), 1.0),  # but L is not above 64
    (3.0, dict(length=256), 4.0), (3.0, dict(length=128), 3.0),  # a checkpoint interpolated by 3
    (3.0, dict(length=256, positions="original"), 3.0)])  # fmt: skip
def test_positions_are_divided_to_fit_into_the_context(config, rope_scale, changes, factor):
    model = Llama(replace(config, rope_scale=rope_scale))
    adapted = AdaptedLlama(model, settings(**changes))
    assert interpolation(model.config, adapted.settings) == adapted.cache().rope_scale == factor


@pytest.mark.parametrize("rope_scale", [1.0, 1.1, 4.0])
def test_a_method_without_training_leaves_positions_as_the_base_has_them(config, rope_scale):
    """It is for all texts that such a base can read."""
    model = Llama(replace(config, rope_scale=rope_scale))
    s = untrained(model, "h2o", 16, 16).settings
    assert interpolation(model.config, s) == rope_scale and s.length == int(64 * rope_scale)


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
    assert read.seen == 40 and not read.keys[0].held.requires_grad


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


@pytest.mark.parametrize("tied", [False, True])
def test_an_adapter_on_a_base_in_bfloat16_needs_no_autocast(config, tied):
    """What trains is in float32, with tied embeddings the output's weights, too. It computes as
    under autocast, but for what is rounded."""
    model = Llama(replace(config, tied=tied)).bfloat16()
    adapted = AdaptedLlama(model, settings(lora_rank=2))
    for p in adapted.trained().values():
        p.data += 0.02 * torch.randn(p.shape)
    with torch.no_grad():
        plain = logits_of(model, adapted.cache())
        with torch.autocast("cpu", torch.bfloat16):
            cast = logits_of(model, adapted.cache())
    assert (plain - cast).abs().mean() < 0.02 * cast.abs().mean()


def test_an_adapter_that_has_not_been_trained_changes_nothing_in_bfloat16(model):
    """Its embeddings and norms are in float32. Were what flows through the layers, too, then the
    rows of a table would differ by their numbers."""
    model = model.bfloat16()
    machine = Machine("cpu", torch.bfloat16)
    with machine.precision():
        before = model(TOKENS)
        AdaptedLlama(model, settings(lora_rank=4))
        assert model.norm.weight.dtype == torch.float32
        assert torch.equal(model(TOKENS), before)


@pytest.mark.parametrize("layer, head", [(0, 1), (1, 0)])
@pytest.mark.parametrize("counts", [(4, 0, 0, 4), (0, 4, 0, 4), (0, 0, 8, 0), (2, 2, 3, 1)])
def test_entries_are_the_mixtures_of_tokens_that_are_shown(model, counts, layer, head):
    """Of --show-memory: 8 slots read 40 tokens in segments of 8. After each compression keys and
    values are those that once entered, mixed by the shares; tracing changes nothing."""
    settings, entered, largest = Settings("a method", 8, 64, *counts, "original", kernel=3), [], []

    class Followed(TracedMemory):
        def attend(self, n, q, k, v):
            if n == layer:
                entered.append(torch.cat((k, v), dim=3)[0, head])
            return super().attend(n, q, k, v)

        def compress(self, n):
            arranged, w = super().compress(n)
            if n == layer:
                held = torch.cat((self.keys[n].held, self.values[n].held), dim=3)[0, head]
                shares = self.shares[layer][head]  # (M, N)
                assert torch.allclose(shares @ torch.cat(entered), held, atol=1e-4)
                largest.append(shares.topk(3))
            return arranged, w

    adapted = AdaptedLlama(model, settings)
    cache = adapted.cache(partial(Followed, layers=[layer]))
    logits = [prefill(model, TOKENS[:1], memory, 8) for memory in (cache, adapted.cache())]
    assert torch.equal(*logits)
    assert cache.size == 8 + 8 and cache.seen_at == [16, 24, 32] and [*cache.largest] == [layer]
    for expected, found in zip(largest, cache.largest[layer], strict=True):
        assert torch.equal(expected.values, found.values[head])
        assert torch.equal(expected.indices, found.indices[head])
    assert torch.allclose(cache.shares[layer].sum(dim=2), torch.ones(2, 8), atol=1e-5)


def test_a_copied_traced_memory_leaves_the_original_as_it_is(model):
    adapted = AdaptedLlama(model, settings())
    cache = adapted.cache(partial(TracedMemory, layers=[0, 1]))
    prefill(model, TOKENS[:1, :20], cache, 6)
    seen_at, largest = [*cache.seen_at], len(cache.largest[1])
    prefill(model, TOKENS[:1, 20:], cache.copy(), 6)
    assert cache.seen_at == seen_at and len(cache.largest[1]) == largest > 0


def test_slots_are_described_by_their_largest_shares(model, tokenizer):
    """Shares written by hand: three a slot are shown, from 0.01, and after each compression the
    largest share of the first of them."""
    ids = tokenizer.encode("def f(x):\n    return [x]")
    settings = Settings("a method", 2, 64, 1, 1, 1, 1, kernel=3, lora_rank=0)
    cache = AdaptedLlama(model, settings).cache(partial(TracedMemory, layers=[1]))
    cache.keys[1] = Entries(torch.zeros(1, 2, 6, 8))
    first = "layer 1, head 1: 6 entries after 12 tokens"
    assert list(describe_slots(cache, 1, 1, ids, tokenizer)) == [first]  # all tokens are held
    at_first = torch.zeros(2, 4, len(ids))
    at_first[1, range(4), [0, 3, 3, 2]] = torch.tensor([1, 0.5, 0.3, 0.05])
    shares = torch.zeros(2, 4, len(ids))
    slots, tokens = (0, 1, 2, 2, 2, 2, 3, 3), (0, 3, 2, 4, 6, 7, 8, 7)
    shares[1, slots, tokens] = torch.tensor([1, 1, 0.5, 0.25, 0.2, 0.05, 0.994, 0.006])
    cache.largest = {1: [at_first.topk(3), shares.topk(3)]}
    assert list(describe_slots(cache, 1, 1, ids, tokenizer)) == [
        first, "   0 sinks    ████ 1.00 '<s>'      0      ██",
        "   1 heavy    ████ 1.00 '('        3      ▄█",
        "   2 merged   ██·· 0.50 ' f'       2      █··· 0.25 'x'        4"
        "      █··· 0.20 '\\n'       6       ▄",
        "   3 recent   ████ 0.99 'return'   8       █",
    ]  # fmt: skip
