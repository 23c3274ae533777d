"""generate.py --show-memory: what it says of the slots is what they hold."""

import re

import pytest
import torch

from eval_ppl import TINY
from generate import Trace, describe_kept, describe_slots, quoted
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
    assert torch.allclose(trace.shares.sum(1), torch.ones(13), atol=0.02)  # less what was too small to follow
    assert torch.allclose(trace.shares @ keys[trace.tokens], trace.keys[layer][0, head], atol=0.05)
    assert torch.allclose(trace.shares @ values[trace.tokens], trace.values[layer][0, head], atol=0.05)
    kept = trace.settings.sinks + trace.settings.recent
    assert int((trace.shares == 1).sum()) >= 5 + kept


def test_following_does_not_change_what_is_followed(model):
    tokens = torch.randint(0, 64, (1, 45))
    lococo = LoCoCo(model, Settings.of("lococo", 8, 8, 64, kernel=3, lora_rank=0))
    plain = prefill(model, tokens, lococo.cache(), 8)
    assert torch.equal(prefill(model, tokens, Trace(lococo, 1, 0), 8), plain)


@pytest.mark.parametrize("method, changes", [*COUNTS, ("lococo+sinks", {})])
def test_what_is_shown_fits_a_terminal_and_names_the_tokens(tokenizer, method, changes):
    model = Llama.from_pretrained(TINY)
    lococo = LoCoCo(model, Settings.of(method, 16, 16, 128, lora_rank=0, **changes))
    ids = tokenizer.encode("".join(f"def f{i}(x):\n    return x + '…{i}'\n" for i in range(9)))
    trace = Trace(lococo, 0, 1)
    prefill(model, torch.tensor([ids]), trace, 16)
    lines = list(describe_slots(trace, ids, tokenizer))
    assert all(len(line) <= 80 and "\n" not in line for line in lines)
    s = lococo.settings
    shown = re.findall(r"^slots (\d+)-(\d+), (\w+)", "\n".join(lines), re.M)
    assert [kind for *_, kind in shown] == [kind for kind in ("sinks", "heavy", "merged", "recent") if getattr(s, kind)]
    assert int(shown[-1][1]) == s.mem - 1
    if s.recent:
        first = len(ids) - (trace.held - s.mem) - s.recent
        assert any(line.strip().startswith(f"{first}-{first + s.recent - 1} ") for line in lines)
    parts = [int(n) for n in re.findall(r"(\d+) (?:tokens|are as|part|gone)", lines[-1])]
    assert parts[0] == sum(parts[1:]) == len(ids) - (trace.held - s.mem)
    if s.merged:
        slot = s.sinks + s.heavy
        share, where = trace.shares[slot].max(dim=0)
        (line,) = (line for line in lines if line.startswith(f"{slot:>4} "))
        assert f"{share:.2f} {quoted(tokenizer.piece(ids[trace.tokens[where]]), 7)}" in line


def test_kept_tokens_are_shown_as_runs(tokenizer):
    ids = tokenizer.encode("def f(x):\n    return x\n")
    text = " ".join(describe_kept([0, 1, 2, 5], ids, tokenizer))
    assert text.split(", ")[0].strip().startswith('0-2 "<s> def') and text.split(", ")[1].startswith("5 ")
    assert describe_kept([], ids, tokenizer) == []
    assert quoted("a\n", 7) == '"a\\n"' and quoted("abcdefgh", 7) == '"ab…gh"'
