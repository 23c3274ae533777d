"""tools/budgets.py and field_budgets.py: needs, and slots. tools/oracle.py: what it keeps.
tools/needle.py: what is found and what is not. tools/fit_scores.py: what attention comes."""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path

import bench
import budgets
import field_budgets
import fit_scores
import needle
import numpy as np
import oracle
import pytest
import torch
from conftest import settings

from generate import prefill
from lococo import AdaptedLlama
from model import KVCache, load_llama, rope, rotate
from support.command_line import TINY
from support.files import UserError, read_json
from support.programs.adapter import load_adapter
from support.programs.settings import make_settings


def test_needs_become_budgets():
    """Least 6 of 16, which leaves 40. The weights are 1, 2 and 3: 6.7, 13.3 and 20."""
    needs = np.array([[-1.0, 1.0], [4.0, 9.0]])
    assert budgets.shared_out(needs, 16) == [[6, 12], [19, 27]]
    assert sum(budgets.shared_out(np.array([[0.3, 0.1, 0.1]]), 15)[0]) == 45


def test_a_need_is_what_the_loss_falls_by_with_a_gate(in_float64, model):
    """The gates open from a memory to a full cache. They change only what the third segment
    reads, so that the gradient is whole."""
    s, tokens = settings("h2o", 8, 8), torch.randint(0, 64, (1, 25))
    mask = torch.arange(24)[None] % 3 == 0
    needs = budgets.measure_needs(model, s, tokens, mask)

    def loss_of(cache):
        nats = torch.cat([n for n, _ in budgets.segment_losses(model, tokens, cache, 8)], dim=1)
        return nats[mask].mean().item()

    def loss(gates):
        return loss_of(budgets.GatedMemory(model.config, s, gates))

    assert loss(torch.zeros(2, 2)) == pytest.approx(loss_of(AdaptedLlama(model, s).cache()))
    assert loss(torch.ones(2, 2)) == pytest.approx(loss_of(KVCache(model.config)))
    for layer, head in np.ndindex(2, 2):
        change = torch.zeros(2, 2)
        change[layer, head] = 1e-4
        fall = (loss(0.5 - change) - loss(0.5 + change)) / 2e-4
        assert needs[layer, head] == pytest.approx(fall, abs=1e-6) and abs(fall) > 1e-4


def test_needs_can_be_measured_in_bfloat16(model):
    tokens = torch.randint(0, 64, (1, 25))
    mask = torch.ones(1, 24, dtype=torch.bool)
    needs = [budgets.measure_needs(model.to(dtype), settings("h2o", 8, 8), tokens, mask)
             for dtype in (torch.float32, torch.bfloat16)]
    assert np.corrcoef(needs[0].flat, needs[1].flat)[0, 1] > 0.9


def test_facts_stand_behind_the_first_line_break_after_their_depths():
    """A line ends at each token 9. Of four facts the last does not fit: a text ends with a line."""
    text, told = needle.plant(torch.arange(100) % 10, [[100], [101], [102], [103]], frozenset({9}))
    assert [text.tolist().index(fact) for fact in (100, 101, 102)] == [20, 41, 72]
    assert (told, len(text), text[-1]) == (3, 93, 9)


@torch.no_grad()
@pytest.mark.parametrize("slots", [[8, 8], [4, 12]])
def test_an_oracle_keeps_what_later_segments_read(in_float64, model, monkeypatch, slots):
    """Of 16 entries those that tokens 16 to 31 attend to most: 8 or, with budgets, 4 and 12. In
    the first layer keys and queries are those of full attention."""
    monkeypatch.setattr(oracle, "T", 8)
    tokens, full = torch.randint(0, 64, (1, 32)), oracle.Noted(model.config)
    prefill(model, tokens, full, 8)
    layers = model.config.n_layers
    s = make_settings("h2o", 8, 8, 24, [slots] * layers, heavy=8, recent=0, lora_rank=0)
    memory = AdaptedLlama(model, s).cache(partial(oracle.Oracle, noted=full))
    prefill(model, tokens[:, :24], memory, 8)
    block, turns = model.layers[0], rope(torch.arange(32.0), model.config)
    q, k, _ = block.project(model.tok_embeddings(tokens))
    later = torch.arange(32) > torch.arange(16, 32)[:, None]
    logits = rotate(q, *turns)[0, :, 16:] @ rotate(k, *turns)[0, [0, 0, 1, 1]].mT / 8**0.5
    shares = logits.masked_fill(later, -torch.inf).softmax(dim=-1)
    received = shares.sum(dim=1)[:, :16].view(2, 2, 16).sum(dim=1)
    for head in range(2):
        kept = received[head].sort(descending=True).indices[: slots[head]].sort().values
        [n] = [n for n, part in enumerate(memory.parts) if part.layer == 0 and head in part.heads]
        positions = memory.positions_of(n)[0, memory.parts[n].heads.index(head), : slots[head]]
        assert positions.tolist() == kept.tolist()


def test_budgets_of_a_base_say_how_they_were_measured(run):
    """The embedded base has a context of 1,024 tokens, and four layers of two heads."""
    code, out, err = run(budgets, f"--data {argparse.__file__} --documents 1 --out heads.json")
    assert code == 0, err
    stored = read_json(Path("heads.json"))
    sizes = {name: stored[name] for name in ("method", "mem", "length", "documents")}
    assert sizes == {"method": "h2o+forget", "mem": 256, "length": 1024, "documents": 1}
    assert np.shape(stored["budgets"]) == (4, 2) and np.sum(stored["budgets"]) == 8 * 256
    assert np.min(stored["budgets"]) >= 96 and f"budgets {stored['budgets'][0]}" in out
    # Another rule than H2O's is not measured.
    code, _, err = run(budgets, f"--data {argparse.__file__} --method keydiff")
    assert code == 2 and "--method keydiff: take h2o, h2o+forget or streaming" in err


def test_budgets_are_those_of_the_rows_that_can_have_them(model):
    """Of tools/bench.py: rows with heavy and without merged slots."""
    rows = ["streaming", "h2o", "lococo", "lococo+h2o"]
    sizes = dict(mem=[16], segment=[8], seq=64, bits=0, budgets=[[1, 3], [2, 2]])
    made = bench.make_all(model, argparse.Namespace(rows=rows, **sizes))
    slots = {name.split(",")[0]: adapted.settings.budgets for name, adapted in made.items()}
    budgets = [[8, 24], [16, 16]]
    assert slots == {"streaming": [], "h2o": budgets, "lococo": [], "lococo+h2o": []}


def test_budgets_of_other_papers(tmp_path, monkeypatch):
    """Four layers of three heads, with 896 slots on average: one head can hold all."""
    monkeypatch.setattr(field_budgets, "RETRIEVAL_HEADS", 1)
    needs = [[8, 7], [6, 5], [4, 3], [2, 9]]
    measured = {"needs": [[*row, 0] for row in needs], "budgets": [[1, 3, 4]] * 4}
    (tmp_path / "heads.json").write_text(json.dumps(measured))
    monkeypatch.setattr("sys.argv", ["field_budgets.py", str(tmp_path / "heads.json")])
    field_budgets.main()
    pyramid, duo, layers = (read_json(tmp_path / f"heads-{name}.json")["budgets"]
                            for name in ("pyramid", "duo", "layers"))
    assert pyramid == [[1748] * 3, [1180] * 3, [612] * 3, [44] * 3]
    assert duo == [[244] * 3] * 3 + [[244, 8064, 244]]
    assert layers == [[336, 1008, 1344]] * 4
    with pytest.raises(UserError, match="config.json: it has no needs and budgets of more than 1"):
        field_budgets.read_measured(TINY / "config.json")


def test_a_window_finds_what_it_holds_and_a_learned_score_finds_all(run):
    """Of the embedded model and its adapter, with 128 slots and a text of 700 tokens."""
    words = f"{TINY} --method streaming --mem 128 --lengths 700 --documents 2"
    text = f"--data {argparse.__file__} --part all"
    code, out, err = run(needle, f"{words} {text} --json found.json")
    found = json.loads(Path("found.json").read_text())["found"]
    full, window, learned = (shares["700"] for shares in found.values())
    assert code == 0 and len(full) == 9 and np.mean(full) > 0.8, err
    assert not any(window[:4]) and np.mean(learned) > 0.7
    assert f" 700 tokens  {window[0]:5.2f}" in out
    # What is in the file is not measured again, and must be of the same texts.
    code, out, err = run(needle, f"{words} {text} --json found.json")
    assert code == 0 and "700 tokens" not in out.split("pieces of texts")[1].partition("\n")[2]
    few = f"{TINY} --bits 4 --method full --lengths 700 --documents 2 {text} --json found.json"
    assert run(needle, few)[0] == 0  # the same adapter in 4 bits has a panel of its own
    *_, name = json.loads(Path("found.json").read_text())["found"]
    assert name.endswith("tiny bits=4")
    code, _, err = run(needle, f"{words} {text} --json found.json --documents 1")
    assert code == 2 and "found.json: it has other texts" in err


def test_the_error_of_facts_is_over_texts(run, monkeypatch):
    """One text of two has all of its facts, the other none: 0.5 ± 0.5."""
    hits = itertools.cycle(([True] * 9, [False] * 9))
    monkeypatch.setattr(needle, "found", lambda adapted, ids, facts, _: next(hits)[: len(facts)])
    text = f"--data {argparse.__file__} --part all --lengths 700 --documents 2"
    code, out, err = run(needle, f"--method full {text} --json found.json")
    assert code == 0 and out.count("0.50 ± 0.50") == 1, err
    assert json.loads(Path("found.json").read_text())["errors"]["base, full"] == {"700": 0.5}


# --- Scores -----------------------------------------------------------------------------


@torch.no_grad()
def test_what_a_score_learns_is_the_attention_to_come(in_float64, model, monkeypatch):
    """Of sampled entries, by hand from the attention of the whole text in the first layer."""
    for name, value in dict(SEGMENT=8, MOMENTS=1, SAMPLES=5).items():
        monkeypatch.setattr(fit_scores, name, value)
    tokens, noted = torch.randint(0, 64, (1, 40)), fit_scores.Noted(model.config)
    prefill(model, tokens, noted, 8)
    entries, received, age, target = fit_scores.sampled(noted, 0, 0.5, torch.Generator())
    q, k, v = model.layers[0].project(model.tok_embeddings(tokens))
    turns = rope(torch.arange(40.0), model.config)
    logits = rotate(q, *turns)[0] @ rotate(k, *turns)[0, [0, 0, 1, 1]].mT / 8**0.5
    shares = logits.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(dim=-1)
    shares = shares.view(2, 2, 40, 40)  # (G, H/G, T, S)
    for head, n in np.ndindex(2, 5):  # at the end of three segments
        place = 24 - int(age[head, n])
        both = torch.cat((k, v), dim=-1)[0, head, place]
        assert torch.allclose(entries[head, n].double(), both, atol=0.02)  # stored in float16
        own = shares[head, :, :, place]
        in_all = own.mean(dim=0)[24:].sum().item()
        assert target[head, n].tolist() == pytest.approx([in_all, own[:, 24:].max().item()])
        parts = own.mean(dim=0)[:24].view(3, 8).sum(dim=1)
        assert received[head, n].item() == pytest.approx((parts @ torch.tensor([0.25, 0.5, 1.0])).item())


def test_a_score_is_fitted(monkeypatch):
    """Attention that grows with one channel is learned: the scores follow it, each its own."""
    torch.manual_seed(0)
    monkeypatch.setattr(fit_scores, "STEPS", 100)
    monkeypatch.setattr(fit_scores, "RATE", 0.05)
    entries, score = torch.randn(2, 2000, 8), fit_scores.LearnedScore(4)
    target = entries[:, :, [3, 5]].exp() * torch.tensor([1.0, 20.0])[:, None, None]  # heads differ
    received, age = torch.rand(2, 2000), 1.0 + torch.randint(99, (2, 2000))
    fit_scores.fit(score, entries, received, age, target)
    with torch.no_grad():
        found = score(entries, received, age)
    for n, channel in enumerate((3, 5)):
        same = np.corrcoef(found[..., n].flatten(), entries[..., channel].flatten())
        assert same[0, 1] > 0.95
    # What is expected is divided by its mean in each head.
    assert torch.allclose(found.exp().mean(dim=1), torch.ones(2, 2), atol=0.3)


def test_scores_make_an_adapter(run, monkeypatch):
    """It can be read; with --no-facts it is another one."""
    monkeypatch.setattr(fit_scores, "STEPS", 5)
    line = f"--model {TINY} --data {argparse.__file__} --length 1024 --documents 1"
    code, _, err = run(fit_scores, f"{line.replace('1024', '1025')} --out scores")
    assert code == 2 and "--length 1025: full attention would pass the base's context" in err
    code, out, err = run(fit_scores, f"{line} --mem 28 --segment 16 --out scores")
    assert code == 0 and "adapter: scores/adapter.safetensors" in out, err
    base = load_llama(TINY)
    adapted = load_adapter("scores", base)
    assert (adapted.settings.compressor, adapted.settings.mem) == ("learned", 28)
    assert adapted.compressors[0].deviation.max() > 1
    assert run(fit_scores, f"{line} --mem 28 --segment 16 --no-facts --out plain")[0] == 0
    both = [load_adapter(out, base).compressors[0] for out in ("scores", "plain")]
    assert not torch.equal(both[0].mean, both[1].mean)  # of other texts
