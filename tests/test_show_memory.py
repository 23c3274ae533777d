"""generate.py --show-memory: what it says of the slots is what they hold."""

import re

import pytest
import torch

from eval_ppl import TINY
from generate import Trace, describe_slots, quoted
from lococo import LoCoCo, Settings, prefill
from model import Llama

COUNTS = [
    ("streaming", {}),
    ("h2o", {}),
    ("lococo", {}),
    ("lococo+h2o", dict(normalise="softmax-relu", blend=0.5, score="last")),
    ("lococo", dict(sinks=2, recent=4, filters=1, normalise="softmax")),
]


def traced(model, method, changes, layer, head, tokens, T=8):
    torch.manual_seed(1)
    lococo = LoCoCo(model, Settings.of(method, 8, T, 64, positions="original", kernel=3, lora_rank=0, **changes))
    trace, entered = Trace(lococo, layer, head), []
    inner = trace.update

    def update(n, k, v):
        if n == layer:
            entered.append((k[0, head].clone(), v[0, head].clone()))
        return inner(n, k, v)

    trace.update = update
    prefill(model, tokens[None], trace, T)
    return trace, *(torch.cat(x) for x in zip(*entered))


@pytest.mark.parametrize("layer, head", [(0, 0), (1, 1)])
@pytest.mark.parametrize("method, changes", COUNTS)
def test_every_entry_is_the_mixture_of_tokens_that_is_shown(model, method, changes, layer, head):
    """Keys keep their positions here, so an entry's key and value must both be that mixture of the tokens' own."""
    tokens = torch.randint(0, 64, (45,))
    trace, keys, values = traced(model, method, changes, layer, head, tokens)
    assert trace.shares.shape == (13, len(trace.tokens))  # 8 slots and the 5 tokens of the last segment
    assert torch.allclose(trace.shares.sum(1), torch.ones(13), atol=1e-4)  # less what was too small to follow
    assert torch.allclose(trace.shares @ keys[trace.tokens], trace.keys[layer][0, head], atol=1e-4)
    assert torch.allclose(trace.shares @ values[trace.tokens], trace.values[layer][0, head], atol=1e-4)
    assert bool((trace.shares.amax(dim=0) > 0).all())  # what is gone is not carried along
    kept = trace.settings.sinks + trace.settings.recent
    assert int((trace.shares == 1).sum()) >= 5 + kept


def test_settling_between_prompts_keeps_no_graph(model):
    lococo = LoCoCo(model, Settings.of("lococo", 8, 8, 64, kernel=3, lora_rank=0))
    memory = lococo.cache()
    prefill(model, torch.randint(0, 64, (1, 14)), memory, 8)
    memory.settle()
    assert memory.held == 8 and not any(t.requires_grad for t in memory.keys + memory.values)


def test_following_does_not_change_what_is_followed(model):
    tokens = torch.randint(0, 64, (1, 45))
    lococo = LoCoCo(model, Settings.of("lococo", 8, 8, 64, kernel=3, lora_rank=0))
    plain = prefill(model, tokens, lococo.cache(), 8)
    assert torch.equal(prefill(model, tokens, Trace(lococo, 1, 0), 8), plain)


def test_what_is_shown_is_what_is_held(model, tokenizer):
    """Shares written by hand; the whole text. Slots 0-1 sinks, 2-3 heavy, 4-6 merged, 7-8 recent, one segment entry."""
    ids = [1] + tokenizer.encode("def f(x):\n    return [x]", bos=False)
    lococo = LoCoCo(model, Settings.of("lococo", 9, 4, 64, sinks=2, heavy=2, recent=2, kernel=3, lora_rank=0))
    trace = Trace(lococo, 1, 0)
    trace.tokens = torch.tensor([0, 1, 2, 3, 5, 6, 7, 8, 9, len(ids) - 1])
    rows = {0: {0: 1}, 1: {1: 1}, 2: {3: 1}, 3: {2: 0.5, 3: 0.25, 4: 0.25}, 4: {4: 0.9999}, 5: {5: 0.8, 4: 0.2},
            6: {6: 0.04, 4: 0.9, 5: 0.06}, 7: {7: 1}, 8: {8: 1}, 9: {9: 1}}  # fmt: skip
    trace.shares = torch.zeros(10, 10)
    for slot, shares in rows.items():
        for token, share in shares.items():
            trace.shares[slot, token] = share
    t = [quoted(tokenizer.piece(i), 9) for i in ids]
    expected = f"""\
layer 1, head 0: 10 entries after {len(ids)} tokens, 1 not yet compressed
slots 0-1, sinks
     0-1 {quoted("".join(map(tokenizer.piece, ids[:2])), 55)}
slots 2-3, heavy
     3 {t[3]}
   3 ██·· 0.50 {t[2]:<9} 2      █··· 0.25 {t[3]:<9} 3      others 0.25
slots 4-6, merged: share, token, position
   4 ████ 1.00 {t[5]:<9} 5
   5 ███· 0.80 {t[6]:<9} 6      █··· 0.20 {t[5]:<9} 5
   6 ████ 0.90 {t[5]:<9} 5      ···· 0.06 {t[6]:<9} 6      others 0.04
slots 7-8, recent
     8-9 {quoted("".join(map(tokenizer.piece, ids[8:10])), 55)}
of {len(ids) - 1} tokens 6 are whole, 3 part of a mixture, {len(ids) - 10} gone"""
    assert "\n".join(describe_slots(trace, ids, tokenizer)) == expected


@pytest.mark.parametrize("method, changes", [*COUNTS, ("lococo+sinks", {})])
def test_what_is_shown_fits_a_terminal(tokenizer, method, changes):
    model = Llama.from_pretrained(TINY)
    lococo = LoCoCo(model, Settings.of(method, 16, 16, 128, lora_rank=0, **changes))
    ids = tokenizer.encode("".join(f"def f{i}(x):\n    return x + '…{i}'\n" for i in range(9)))
    trace = Trace(lococo, 0, 1)
    prefill(model, torch.tensor([ids]), trace, 16)
    lines = list(describe_slots(trace, ids, tokenizer))
    assert all(len(line) <= 80 and line.isprintable() for line in lines)
    parts = [int(n) for n in re.findall(r"(\d+) (?:tokens|are whole|part|gone)", lines[-1])]
    slots = trace.shares[:16]
    whole = int((slots > 0.999).any(0).sum())
    assert parts == [len(ids) - trace.held + 16, whole, int((slots.sum(0) >= 0.01).sum()) - whole, parts[3]]
    assert parts[3] == parts[0] - parts[1] - parts[2] >= 0


def test_quoted_keeps_to_one_line_and_its_length():
    assert quoted("a\n", 7) == '"a\\n"' and quoted("abcdefgh", 7) == '"ab…gh"' and quoted("abcde", 7) == '"abcde"'
    for text in ("\x1b[0m" * 5, "\u2028\x7f" * 9, "\n" * 20, "\t", "", "word " * 20):
        for most in (7, 9, 55):
            assert len(quoted(text, most)) <= most and quoted(text, most).isprintable()
    assert quoted("\x1b[0m and on", 9) == '"…on"' or "x1b" in quoted("\x1b[0m and on", 12)
