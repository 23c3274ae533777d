"""tools/budgets.py and tools/bench.py: what they measure, computed by other means."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import bench
import budgets
import needle
import numpy as np
import pytest
import torch
from conftest import settings
from lococo import AdaptedLlama
from model import load_base
from support.command_line import TINY, budgets_file
from support.facts import tell_all

WORDS = "--data text.txt --mem 16 --positions text"


def loss(model, budgets, tokens, mask):
    """Of H2O with these slots in each layer, token by token."""
    s = settings("h2o", 16, 16, tokens.shape[1])
    cache = AdaptedLlama(model, replace(s, budgets=budgets)).eval().cache()
    with torch.no_grad():
        pieces = [model(x, cache)[0] for x in tokens[:, :-1].split(16, dim=1)]
    nats = torch.nn.functional.cross_entropy(torch.cat(pieces), tokens[0, 1:], reduction="none")
    return nats[mask].mean().item()


def read(lines):
    """The needs that the program prints, and the budgets."""
    needs = [float(line.split()[2]) for line in lines if line.startswith("layer")]
    return needs, [int(word) for word in lines[-1].split()[1:]]


def test_which_layers_need_more_slots(run):
    """The program's needs are differences of losses that are computed here."""
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(40))
    Path("text.txt").write_text(text)
    code, _, err = run(budgets, f"{WORDS} --length 32")
    assert code == 2 and "tokens hold it, so that nothing is compressed; take a larger" in err
    code, out, _ = run(budgets, f"{WORDS} --length 96 --out budgets.json")
    needs, found = read(out.splitlines())
    assert code == 0 and len(found) == len(needs) == 4 and sum(found) == 4 * 16
    assert found == budgets.shared_out(np.array(needs), 16)
    written = json.loads(Path("budgets.json").read_text())
    assert written["budgets"] == found and "--length 96" in written["made by"]
    assert budgets_file("budgets.json") == found  # as --budgets reads it

    tiny, tokenizer = load_base(TINY)
    ids = torch.tensor([tokenizer.encode(text)[:96]])
    every = torch.ones(95, dtype=torch.bool)
    gain = loss(tiny, [16] * 4, ids, every) - loss(tiny, [16, 16, 96, 16], ids, every)
    assert needs[2] == pytest.approx(gain, abs=1e-4)


def test_which_layers_recalling_facts_needs(run):
    """A need is what the answers lose if one layer has few slots while all others keep
    everything. Only answers whose facts were told more than M + T = 32 tokens ago count."""
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(60))
    Path("text.txt").write_text(text)
    code, out, _ = run(budgets, f"{WORDS} --length 256 --recall")
    lines = out.splitlines()
    needs, _ = read(lines)
    assert code == 0 and len(needs) == 4 and "if it alone has 6 slots" in lines[1]

    tiny, tokenizer = load_base(TINY)
    ids = torch.tensor([tokenizer.encode(text)[:256]])
    told, ago = tell_all(ids, "training", tokenizer)
    far = ago[0] > 32
    assert lines[0] == f"{far.sum()} answers" and far.sum() > 1
    lost = loss(tiny, [256, 6, 256, 256], told, far) - loss(tiny, [256] * 4, told, far)
    assert needs[1] == pytest.approx(lost, abs=1e-4)


def test_needs_become_budgets():
    """Least 6 of 16. The weights are 1 and 2^0.7 = 1.62: the other 30 slots are 11.4 and
    18.6."""
    assert budgets.shared_out(np.array([-1.0, 1.0, 2.0]), 16) == [4, 16, 28]
    assert sum(budgets.shared_out(np.array([0.3, 0.1, 0.1]), 15)) == 45
    assert budgets.shared_out(np.array([-1.0, 0.0, 2.0]), 8) == [4, 4, 16]


# --- tools/bench.py ---------------------------------------------------------------------

SMALL = "--dim 64 --layers 1 --heads 2 --ffn 128 --vocab 64 --mem 16 --segment 16 --rounds 1 "
SMALL += "--bptt 1 --seq 64"


def test_the_memory_of_training_does_not_grow_with_the_sequence(monkeypatch, capsys):
    """The second and third column. Behind each value stands how many times the window's that is.
    Nothing is timed here."""
    words = f"{SMALL} --rows full selection --parts memory compress --long 256"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    bench.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert [*rows] == ["full", "window", "selection"] and rows["full"][2:] == ["-"] * 4
    window, ours = ([float(figure) for figure in rows[name]] for name in ("window", "selection"))
    for row in (window, ours):
        assert min(row) > 0 and row[2] == pytest.approx(row[0], rel=0.05)
        times = [a / b for a, b in zip(row[::2], window[::2])]
        assert row[1::2] == pytest.approx(times, 0.01, 0.006)


# --- tools/needle.py --------------------------------------------------------------------


def test_needles_are_planted_at_their_depths():
    """Two lines, due at a quarter and three quarters of 12 tokens, behind a break (here 0)."""
    tokens = torch.tensor([5, 0, 5, 5, 0, 5, 5, 5, 5, 0, 5, 5])
    text, told = needle.plant(tokens, [[7, 0], [8, 0]], frozenset([0]))
    assert text.tolist() == [5, 0, 5, 5, 0, 7, 0, 5, 5, 5, 5, 0] and told == 1  # 8 is too late
    tokens = torch.tensor([5, 0, 0, 5, 5, 5, 5, 0, 5, 5, 5, 5])
    text, told = needle.plant(tokens, [[7, 0], [8, 0]], frozenset([0]))
    assert told == 2 and text.tolist() == [5, 0, 0, 7, 0, 5, 5, 5, 5, 0, 8, 0]


def test_a_window_finds_what_it_holds_and_ours_finds_all(run):
    """Of the embedded model and its adapter, with 128 slots and a text of 700 tokens."""
    words = f"{TINY} --method streaming --mem 128 --positions slots --lengths 700 --documents 2"
    code, out, err = run(needle, f"{words} --json found.json")
    found = json.loads(Path("found.json").read_text())["found"]
    full, window, ours = (shares["700"] for shares in found.values())
    assert code == 0 and len(full) == 9 and np.mean(full) > 0.8, err
    assert not any(window[:4]) and np.mean(ours) > 0.7
    assert f" 700 tokens  {window[0]:5.2f}" in out
