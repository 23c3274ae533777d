"""tools/reproduce.py and tools/cells.py: what a cell is made of, and that no cell is lost."""

import subprocess
import sys
from pathlib import Path

import cells
import pytest
import reproduce
from support.command_line import HERE


@pytest.fixture
def make(own_folders, monkeypatch):
    """Run the program; what trains and scores is noted instead. Returns the stored cells."""
    made = []

    def train(line):
        out = Path(line[line.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "adapter.safetensors").touch()
        made.append(out)

    monkeypatch.setattr(cells.train, "main", train)
    monkeypatch.setattr(reproduce, "score_cell", lambda run, args, machine: {
        "perplexity": 9.0, "512-2,048": 0.5})  # fmt: skip
    monkeypatch.setattr(reproduce, "RESULTS", Path("docs/cells.jsonl").resolve())
    monkeypatch.setattr(reproduce, "RUNS", Path("runs").resolve())

    def call(words):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *words.split()])
        reproduce.main()
        return cells.read(reproduce.RESULTS), made

    return call


def test_a_stored_cell_answers_only_its_own_question(make, monkeypatch, capsys):
    stored, made = make("--only ours --seeds 0 1")
    assert [cell["seed"] for cell in stored] == [0, 1] and len(set(made)) == 2
    assert {"commit", "date", "machine", "sources", "base", "texts"} <= stored[0].keys()
    assert len(make("--only ours --seeds 0 1")[0]) == 2 and len(made) == 2
    assert len(make("--only ours --part choosing")[0]) == 3 and len(made) == 2  # one adapter
    assert len(make("--only ours --steps 7")[0]) == 4 and len(made) == 3
    assert len(make("--only ours --again")[0]) == 5 and len(set(made)) == 4
    monkeypatch.setattr(cells, "SOURCES", cells.SOURCES[:-1])  # as if code had changed
    assert len(make("--only ours")[0]) == 6 and len(set(made)) == 5
    assert capsys.readouterr().out.count("| 9.00, 9.00 | 50, 50 |") == 4  # one for a seed


def test_programs_that_add_cells_at_once_lose_none(tmp_path):
    """Four processes add 50 cells each, of a length that a real one has."""
    file = tmp_path / "cells.jsonl"
    code = "import cells, pathlib\nfor n in range(50): cells.add(pathlib.Path({!r}), {{'n': n, 'who': {},"
    code += " 'nats': [1.23456] * 200}})"
    environment = {"PYTHONPATH": f"{HERE / 'tools'}"}
    running = [subprocess.Popen([sys.executable, "-c", code.format(str(file), who)], env=environment)
               for who in range(4)]  # fmt: skip
    assert [process.wait() for process in running] == [0] * 4
    found = sorted((cell["who"], cell["n"]) for cell in cells.read(file))
    assert found == [(who, n) for who in range(4) for n in range(50)]
