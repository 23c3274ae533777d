"""tools/budgets.py: from needs to slots. tools/needle.py: what is found and what is not."""

import argparse
import json
from pathlib import Path

import budgets
import needle
import numpy as np

from support.command_line import TINY


def test_needs_become_budgets():
    """Least 6 of 16. The weights are 1 and 2^0.7 = 1.62: the other 30 slots are 11.4 and
    18.6."""
    assert budgets.shared_out(np.array([-1.0, 1.0, 2.0]), 16) == [4, 16, 28]
    assert sum(budgets.shared_out(np.array([0.3, 0.1, 0.1]), 15)) == 45
    assert budgets.shared_out(np.array([-1.0, 0.0, 2.0]), 8) == [4, 4, 16]


def test_a_window_finds_what_it_holds_and_ours_finds_all(run):
    """Of the embedded model and its adapter, with 128 slots and a text of 700 tokens."""
    words = f"{TINY} --method streaming --mem 128 --positions slots --lengths 700 --documents 2"
    text = f"--data {argparse.__file__} --part all"
    code, out, err = run(needle, f"{words} {text} --json found.json")
    found = json.loads(Path("found.json").read_text())["found"]
    full, window, ours = (shares["700"] for shares in found.values())
    assert code == 0 and len(full) == 9 and np.mean(full) > 0.8, err
    assert not any(window[:4]) and np.mean(ours) > 0.7
    assert f" 700 tokens  {window[0]:5.2f}" in out
    # What is in the file is not measured again, and must be of the same texts.
    code, out, err = run(needle, f"{words} {text} --json found.json")
    assert code == 0 and "700 tokens" not in out.split("pieces of texts")[1].partition("\n")[2]
    code, _, err = run(needle, f"{words} {text} --json found.json --documents 1")
    assert code == 2 and "found.json: it has other texts" in err
