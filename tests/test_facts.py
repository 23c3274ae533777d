"""Facts in a text: how they are told, and what --answer-weight trains on. How they are recalled is
in test_programs.py."""

import re
from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import names_in

import train
from eval_ppl import PARTS, tell
from generate import Machine, settings_for
from lococo import AdaptedLlama

TEXT = "".join(f"def f{i}(x, y):\n    # one word\n\n    return {i} + x[y]\n" for i in range(200))


@pytest.mark.parametrize("L, facts, seed, i", [(2048, 8, 0, 0), (1500, 1, 3, 7), (700, 40, 1, 2)])
def test_facts_are_lines_of_their_own(tokenizer, L, facts, seed, i):
    """The tokens are those that the tokenizer has for the text that is read."""
    text = torch.tensor(tokenizer.encode(TEXT)[:L])
    told, ago = tell(text, facts, "training", seed, i, tokenizer)
    ids, written = told.tolist(), tokenizer.sp.decode(told.tolist())
    assert len(ids) == len(ago) == L and tokenizer.encode(written) == ids
    lines = written.splitlines(keepends=True)
    assert TEXT.startswith("".join(line for line in lines if line[0] != "@"))
    found = [line for line in lines[:-1] if line[0] == "@"]
    assert all(re.fullmatch("@( [a-z]{3,}){2} = [a-z]{3,}\n", line) for line in found)
    assert len(found) > len(set(found)) == len(names_in(told, tokenizer)) == facts
    for t, n in enumerate(ago.tolist()):
        line = tokenizer.sp.id_to_piece(ids[max(0, t - 4) : t])
        asked = len(line) == 4 and line[0] == "@"  # "@", a name of two words and "="
        earlier = [m for m in range(4, t) if asked and ids[m - 4 : m] == ids[t - 4 : t]]
        assert n == (t - earlier[-1] if earlier else 0)


def test_what_is_told_depends_on_the_text_the_seed_and_the_number(tokenizer):
    text = torch.tensor(tokenizer.encode(TEXT)[:900])
    before, (told, ago) = text.clone(), tell(text, 8, "training", 5, 2, tokenizer)
    for seed, i, alike in ((5, 2, True), (5, 3, False), (6, 2, False)):
        np.random.seed(i)
        again, ago_again = tell(text, 8, "training", seed, i, tokenizer)
        assert torch.equal(told, again) == torch.equal(ago, ago_again) == alike
    assert torch.equal(text, before)
    for facts, unchanged in ((0, text), (40, text[text != tokenizer.encode("x\n")[-1]])):
        told, ago = tell(unchanged, facts, "training", 5, 2, tokenizer)
        assert torch.equal(told, unchanged) and not ago.any()
    told, ago = tell(text[:40], 3000, "training", 5, 2, tokenizer)  # one for six tokens, once
    assert torch.equal(told, tell(text[:40], 6, "training", 5, 2, tokenizer)[0])
    assert len(names_in(told, tokenizer)) > 1 and len(told) == len(ago) == 40 and not ago.any()


def test_when_facts_are_told_and_by_which_names(tokenizer):
    """Into empty lines: first anywhere in their first half, then after gaps of 64 to L. Of those up
    to L / 2, none of which is cut off, half are below 256. Each part has its own names."""
    *_, line_break, at = tokenizer.encode("x\n@")
    empty, firsts, gaps, names = torch.full((2048,), line_break), [], [], []
    for i in range(300):
        told, _ = tell(empty, 1, "training", 0, i, tokenizer)
        first, *others = (told == at).nonzero()[:, 0].tolist()
        firsts.append(first)
        gaps += [n - first for n in others[:1] if n - first <= 1024]
    assert max(firsts) <= 1025 and 0.4 < np.mean(np.less(firsts, 512)) < 0.6
    assert min(gaps) >= 63 and 0.4 < np.mean(np.less(gaps, 256)) < 0.6
    for part in PARTS:
        drawn = [names_in(tell(empty, 90, part, i, i, tokenizer)[0], tokenizer) for i in range(8)]
        names.append(set.union(*drawn))
    assert sum(map(len, names)) == len(set.union(*names)) and min(map(len, names)) > 500


@pytest.mark.parametrize("weight, told, bptt", [(7.5, 1, 2), (7.5, 1, 1), (1.0, 1, 2), (7.5, 0, 2)])
def test_the_weight_of_answers(model, monkeypatch, weight, told, bptt):
    """A step's loss and gradient, in float64, are those of single nats. In the convolutions'
    gradient those of answers count `weight` times: here a third of the passes does for all."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    adapted = AdaptedLlama(model, settings_for("lococo", 8, 6, 40, kernel=3, lora_rank=2)).double()
    tokens, ago = torch.randint(3, 64, (2, 41)), torch.zeros(2, 41, dtype=torch.int64)
    ago[:, [1, 12, 13, 30, 40]] = told * torch.randint(1, 30, (2, 5))
    args = Namespace(batch=2, micro_batch=1, seq=41, segment=6, bptt=bptt, answer_weight=weight)
    machine = Machine("cpu", torch.float32)  # no autocast
    rows = [(tokens[n], ago[n]) for n in (0, 0, 1, 0, 1, 1)]  # two texts, in turn, in three steps
    losses = [train.gradients(adapted, rows.__getitem__, args, machine, step) for step in range(3)]
    found, plain, weighted = {n: p.grad / 3 for n, p in adapted.trained().items()}, 0.0, 0.0
    for n in range(2):
        cache = adapted.cache()
        for start, segment in zip(range(0, 40, 6), tokens[n : n + 1, :40].split(6, dim=1)):
            p = model(segment, cache)[0].softmax(dim=-1)
            for t, row in enumerate(p, start=start + 1):
                nats = -row[tokens[n, t]].log() / 80
                plain = plain + nats
                weighted = weighted + (weight if ago[n, t] > 0 else 1.0) * nats
            if start // 6 % bptt == bptt - 1:  # gradients reach back over so many segments
                cache.detach()
    assert sum(losses) / 3 == pytest.approx(plain.item(), rel=1e-9)
    for parameters, total in ((adapted.compressors, weighted), (adapted.model, plain)):
        adapted.zero_grad()
        total.backward(retain_graph=True)
        trained = {n: p for n, p in adapted.trained().items() if p in set(parameters.parameters())}
        assert trained and all(torch.allclose(found[n], p.grad) for n, p in trained.items())
