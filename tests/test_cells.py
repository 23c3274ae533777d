"""tools/cells.py, and tools/reproduce.py with it: what names a cell, and how it is kept."""

import subprocess
import sys
from pathlib import Path

import cells
import pytest
import real_llama
import reproduce
from support.command_line import HERE, TINY
from support.files import UserError, read_text


@pytest.fixture
def make(own_folders, monkeypatch, capsys):
    """Run reproduce.py on tiny/ with a small text; returns the stored cells."""
    rows = [f'{{"text": "{n} {"a cat and a dog went to the park " * 20}"}}\n' for n in range(60)]
    Path("prose.jsonl").write_text("".join(rows))
    monkeypatch.setattr(reproduce, "RESULTS", Path("docs/cells.jsonl").resolve())
    monkeypatch.setattr(reproduce, "RUNS", Path("runs").resolve())
    monkeypatch.setattr(cells.train, "sequences_of", lambda seq: 4)  # of a step

    def call(words, data="prose.jsonl"):
        line = f"reproduce.py --model {TINY} --data {data} --mem 16 --seq 64 --steps 1 {words}"
        monkeypatch.setattr(sys, "argv", line.split())
        reproduce.main()
        capsys.readouterr()
        return cells.read(reproduce.RESULTS)

    return call


def test_a_stored_figure_answers_only_the_question_that_made_it(make, monkeypatch):
    """Not one of other flags or of another text. With --again the same is trained again."""
    first = make("--only ours")[0]
    assert first["date"] and first["commit"] and len(first["nats"]) > 1
    flags = (reproduce.PLAIN["ours"][0], f"{reproduce.OURS} --conv-lr 1e-1")
    with monkeypatch.context() as patch:
        patch.setitem(reproduce.PLAIN, "ours", flags)
        second = make("--only ours")[1]
    Path("other.jsonl").write_text(Path("prose.jsonl").read_text().replace("cat", "cow"))
    third = make("--only ours", data="other.jsonl")[2]
    assert len({cell["perplexity"] for cell in (first, second, third)}) == 3
    assert len([*Path("runs").iterdir()]) == 3
    again = make("--only ours --again")
    assert len(again) == 4 and again[3]["nats"] == first["nats"]
    assert len([*Path("runs").iterdir()]) == 4


def test_a_base_is_all_files_that_are_read(tmp_path):
    """Another tokenizer, or other weights in any layout, make another base; an adapter does not."""
    found = []
    for name in ("tokenizer.model", "pytorch_model.bin", "consolidated.00.pth", "model.safetensors",
                 "params.json", "adapter.safetensors"):  # fmt: skip
        (tmp_path / name).write_text("something")
        found.append(cells.checksum_of_base(tmp_path))
    assert len(set(found)) == 5 and found[-1] == found[-2]


def test_texts_are_known_by_names_and_borders(tmp_path):
    """A name decides which part a text belongs to."""
    found = []
    three = ({"a": "ab", "b": "c"}, {"a": "a", "b": "bc"}, {"c": "ab", "b": "c"})
    for number, texts in enumerate(three):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_text(text)
        found.append(cells.checksum_of_files(folder / name for name in texts))
    assert len(set(found)) == 3


@pytest.fixture
def make_quickly(own_folders, monkeypatch):
    """Run the program; what trains and scores is noted instead. Returns the stored cells."""
    made = []

    def train(line):
        out = Path(line[line.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "adapter.safetensors").touch()
        made.append(out)

    monkeypatch.setattr(cells.train, "main", train)
    monkeypatch.setattr(reproduce, "texts_to_score", lambda args, tokenizer: None)
    monkeypatch.setattr(reproduce, "score_cell", lambda run, args, machine: {
        "perplexity": 9.0, "512-2,048": 0.5})  # fmt: skip
    monkeypatch.setattr(reproduce, "RESULTS", Path("docs/cells.jsonl").resolve())
    monkeypatch.setattr(reproduce, "RUNS", Path("runs").resolve())

    def call(words):
        monkeypatch.setattr(sys, "argv", ["reproduce.py", *words.split()])
        reproduce.main()
        return cells.read(reproduce.RESULTS), made

    return call


def test_a_stored_cell_is_not_made_again(make_quickly, monkeypatch, capsys):
    stored, made = make_quickly("--only ours --seeds 0 1")
    assert [cell["seed"] for cell in stored] == [0, 1] and len(set(made)) == 2
    assert {"commit", "date", "machine", "sources", "base", "texts"} <= stored[0].keys()
    assert len(make_quickly("--only ours --seeds 0 1")[0]) == 2 and len(made) == 2
    # Another part is scored with the same adapter.
    assert len(make_quickly("--only ours --part choosing")[0]) == 3 and len(made) == 2
    assert len(make_quickly("--only ours --steps 7")[0]) == 4 and len(made) == 3
    assert len(make_quickly("--only ours --again")[0]) == 5 and len(set(made)) == 4
    monkeypatch.setattr(cells, "SOURCES", cells.SOURCES[:-1])  # as if code had changed
    assert len(make_quickly("--only ours")[0]) == 6 and len(set(made)) == 5
    assert capsys.readouterr().out.count("| 9.00, 9.00 | 50, 50 |") == 4  # one for a seed


def test_texts_that_cannot_be_scored_are_refused_before_training(make):
    """One document is one part, the training part."""
    Path("one.txt").write_text("a cat and a dog went to the park " * 60)
    with pytest.raises(UserError, match=r"--seq 64: the documents that do not train .* 0 tokens"):
        make("--only window", data="one.txt")
    assert not Path("runs").exists()


def test_a_base_of_ones_own_has_a_text_of_ones_own(make_quickly, capsys):
    with pytest.raises(SystemExit):
        make_quickly("--model mine --only window")
    assert "mine: name the text, too, by --data" in capsys.readouterr().err


def test_a_table_of_facts_without_answers(make_quickly, monkeypatch):
    """In a short text no fact is told again so late. The cell is stored, and its table printed."""
    none = {"perplexity": 9.0, "512-2,048": None}
    monkeypatch.setattr(reproduce, "score_cell", lambda *args: none)
    stored, _ = make_quickly("--only ours --seq 50")
    about = {"mem": 128, "seq": 50, "steps": 400, "part": "held-out"}
    assert reproduce.facts_table(stored, **about).endswith("**ours** | 9.00 | - |\n")


def test_programs_that_add_cells_at_once_lose_none(tmp_path):
    """Two processes add 50 cells each, of a length that a real one has."""
    file = tmp_path / "cells.jsonl"
    code = "import cells, pathlib\nfor n in range(50): "
    code += "cells.add(pathlib.Path({!r}), {{'n': n, 'who': {}, 'nats': [1.23456] * 200}})"
    environment = {"PYTHONPATH": f"{HERE / 'tools'}"}
    running = []
    for who in range(2):
        line = [sys.executable, "-c", code.format(str(file), who)]
        running.append(subprocess.Popen(line, env=environment))
    assert [process.wait() for process in running] == [0] * 2
    found = sorted((cell["who"], cell["n"]) for cell in cells.read(file))
    assert found == [(who, n) for who in range(2) for n in range(50)]


def test_cells_from_before_there_were_checksums_are_only_printed(make):
    old = make("--only window")[0]
    cells.write_text(reproduce.RESULTS, cells.as_json(old | {"sources": None, "nats": [9]}) + "\n")
    assert "8103.084" in reproduce.plain_table(cells.read(reproduce.RESULTS), 64, 1, model="tiny")
    stored = make("--only window")
    assert len(stored) == 2 and stored[1]["nats"] == old["nats"]
    assert "8103.084" not in reproduce.plain_table(stored, 64, 1, model="tiny")


def test_the_sources_are_all_that_a_program_imports():
    """Of this project, but for cells.py, which computes no figure."""
    code = "import sys; sys.path[:0] = ['.', 'tools']; import {}; print(*filter(None, (getattr("
    code += "module, '__file__', None) for module in [*sys.modules.values()])), sep='\\n')"
    running = {}
    for tool in (reproduce, real_llama):
        line = [sys.executable, "-c", code.format(Path(tool.TOOL).stem)]
        running[tool.TOOL] = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=HERE)
    places = (HERE, HERE / "support", HERE / "tools")  # not a virtual environment in the folder
    for tool, process in running.items():
        files = {Path(name) for name in process.communicate()[0].splitlines()}
        own = {str(file.relative_to(HERE)) for file in files if file.parent in places}
        named = {*cells.SOURCES, f"tools/{tool}"}
        assert own - {"support/__init__.py", "tools/cells.py"} == named


def test_a_full_disk_leaves_the_cells_that_are_there(tmp_path, monkeypatch):
    file = tmp_path / "cells.jsonl"
    cells.add(file, {"n": 0, "nats": float("nan")})

    def disk_is_full(self, text, encoding):
        self.write_bytes(text.encode()[: len(text) - 5])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", disk_is_full)
        with pytest.raises(UserError, match="cells.jsonl: cannot be written .*No space left"):
            cells.add(file, {"n": 1})
    assert read_text(file) == '{"n": 0, "nats": null}\n'
    file.write_text(read_text(file) + '{"n": 1')  # as older versions left it there
    with pytest.raises(UserError, match="cells.jsonl, line 2: "):
        cells.read(file)


def test_a_commit_says_whether_the_tree_has_changed(tmp_path, monkeypatch):
    """The cells themselves do not count, whichever program makes them."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "docs").mkdir()
    (tmp_path / "lococo.py").write_text("as committed")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setattr(cells, "HERE", tmp_path)
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    (tmp_path / "docs" / "results.jsonl").write_text("{}\n")
    assert cells.origin()["commit"] == head.stdout.strip()
    (tmp_path / "lococo.py").write_text("another compressor")
    assert cells.origin()["commit"] == head.stdout.strip() + "+"
