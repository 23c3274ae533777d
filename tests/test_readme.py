"""What the README says exists: sizes, names, equations beside their lines, commands, exercises."""

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import bench
import eval_ppl
import generate
import numpy as np
import pytest
import reproduce
import torch
import train
from conftest import changed
from lococo import METHODS
from support.command_line import HERE

README = (HERE / "README.md").read_text()
ONE_LINE = " ".join(README.split())
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if "python " in line[:7]]
COMMANDS += re.findall(r"`(python [^`]+\.py[^`]*)`", ONE_LINE)
PROGRAMS = {"train.py": train, "generate.py": generate, "eval_ppl.py": eval_ppl}
FIVE = {"model.py", "lococo.py", "generate.py", "eval_ppl.py", "train.py"}


def resolve(name: str):
    module, *path = name.split(".")
    thing = import_module(module)
    for part in path:
        thing = getattr(thing, part)
    return thing


def test_the_five_files_stand_alone_at_the_top_level():
    assert {file.name for file in HERE.glob("*.py")} == FIVE


def test_the_equations_stand_beside_lines_that_exist():
    table = README.split("| paper | code |")[1].split("\n\n")[0]
    for number in range(1, 8):
        assert f"({number})" in table, number
    sources = [(HERE / file).read_text() for file in FIVE]
    for code in re.findall(r"`([^`]+)`", table):
        if re.fullmatch(r"[\w.]+", code):
            resolve(code)
        else:
            assert sum(text.count(code) for text in sources) == 1, code


def test_the_table_of_methods_is_that_of_the_code():
    table = README.split("| `--method` |")[1].split("\n\n")[0]
    assert set(re.findall(r"^\| `([\w+]+)`", table, re.M)) == set(METHODS)


def test_the_table_of_results_is_made_of_the_figures():
    cells = reproduce.read()
    for file in reproduce.FILES:
        text = file.read_text("utf-8")
        assert reproduce.with_tables(text, cells) == text
        assert text.count("<!-- tools/reproduce.py: ") == text.count("<!-- end -->")
    assert all(re.fullmatch(r"[0-9a-f]{7,}", cell["commit"]) for cell in cells.values())


def test_links_lead_somewhere():
    for file in ("README.md", "docs/notebook.md"):
        text, place = (HERE / file).read_text(), (HERE / file).parent
        for target in re.findall(r"\]\(([^)]+)\)", text):
            assert target.startswith("http") or (place / target).is_file(), target


@pytest.mark.parametrize("command", sorted(set(COMMANDS)))
def test_commands_are_understood(command, monkeypatch):
    """By the program's own parser; what they do is tested where the programs are."""
    words = shlex.split(command.split("  #")[0].split(" < ")[0])[1:]
    if words[0] == "-m" or words[0].startswith("tools/"):
        assert words[0] == "-m" or Path(HERE / words[0]).is_file()
        return
    if "both" in words:  # the method that an exercise adds
        words[words.index("both")] = "h2o"
    if "--resume" in words:
        monkeypatch.setattr(sys, "argv", ["train.py"])
        stored = train.parse()[2]
        monkeypatch.setattr(train, "read_file", lambda file: ({}, stored))
    monkeypatch.setattr(sys, "argv", words)
    PROGRAMS[words[0]].parse()


@pytest.mark.parametrize("flags", ["", "--method streaming --mem 128",
                                   "--method h2o --mem 128 --positions slots"])  # fmt: skip
def test_the_first_commands(run, flags):
    """A trained memory recalls the three facts of assets/prompt.txt; a window and H2O none."""
    text = (HERE / "assets" / "prompt.txt").read_text()
    facts = re.findall(r"^@ (\w+ \w+) = (\w+)$", text, re.M)
    assert len(facts) == 3 and text.endswith(f"\n@ {facts[0][0]} =")
    assert f"--prompt assets/prompt.txt {flags}" in ONE_LINE
    for name, word in facts:
        Path("ask.txt").write_text(f"{text.removesuffix(facts[0][0] + ' =')}{name} =")
        _, out, err = run(generate, f"--prompt ask.txt --temperature 0 --max-new-tokens 1 {flags}")
        assert " 128 slots; " in err and (out.strip() == word) == (flags == "")


def test_the_changes_of_the_exercises_run():
    """Each line that "becomes" another is there once; with the other in its place, a small model
    has finite losses and gradients, other than before."""
    text = ONE_LINE.split("## Exercises")[1].split(" ## ")[0]
    changes = re.findall(r"\((\w+)\.[\w.]+\): `([^`]+)` becomes `([^`]+)`", text)
    module, line, row = re.search(
        r"\((\w+)\.METHODS\): `([^`]+)` gets a line above it, `([^`]+)`", text
    ).groups()
    changes.append((module, line, f"{row}\n    {line}"))
    assert len(changes) == 1 + text.count("becomes") > 2
    sources = {name: (HERE / f"{name}.py").read_text() for name in ("model", "lococo")}
    before = losses_of(changed(sources))
    for module, old, new in changes:
        assert sources[module].count(old) == 1, old
        after = losses_of(changed(sources | {module: sources[module].replace(old, new)}))
        assert after.isfinite().all() and not torch.equal(before, after), new


def losses_of(modules: dict[str, ModuleType]) -> torch.Tensor:
    torch.manual_seed(0)
    model, lococo = modules["model"], modules["lococo"]
    config = model.LlamaConfig(32, 1, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=64)
    llama = model.Llama(config)
    tokens, losses = torch.randint(0, 64, (1, 96)), []
    for method in ("h2o", "lococo+window", *({"both"} & set(lococo.METHODS))):
        changes = dict(compressor="facts", positions="slots", kernel=3, lora_rank=0)
        torch.manual_seed(1)
        settings = lococo.Settings(method, 8, 96, **lococo.METHODS[method](32) | changes)
        dropped_in = lococo.AdaptedLlama(llama, settings)
        for nats, _ in lococo.segment_losses(llama, tokens, dropped_in.cache(), 8):
            losses.append(nats.sum().detach())
            if nats.requires_grad:
                nats.sum().backward()
        losses += [p.grad.norm() for p in dropped_in.parameters() if p.grad is not None]
    return torch.stack(losses)


def test_nats_above_the_window():
    """Two documents, two seeds: ours is 1 and 3 above, H2O 1 below, full attention 4 below."""
    nats = {("window", 0): [5, 6], ("window", 1): [6, 5], ("full", 0): [1, 2], ("full", 1): [2, 1]}
    nats |= {("ours", 0): [6, 8], ("ours", 1): [7, 9], ("h2o", 0): [4.5, 4.5]}
    same, cells = {"model": "one", "seq": 9, "steps": 7, "mem": 4, "facts": 0}, {}
    for (row, seed), values in nats.items():
        cells[row, seed] = same | {"row": row, "seed": seed, "nats": values}
    table = reproduce.plain_table(cells, 9, 7, ["window", "ours", "h2o", "official h2o"], "one")
    assert [line.split("|")[2].strip() for line in table.splitlines()[2:]] == [
        f"{np.exp(5.5):.3f}", "+2.0000 ± 1.0000", "-1.0000 ± 0.0000 (25 %)", "-"]  # fmt: skip


def test_every_row_of_the_benchmark_has_figures(monkeypatch, capsys):
    """A column has values, and how many times the window's these are. The last two, memory of
    training, do not grow with the sequence. Nothing is timed here."""
    words = "--dim 64 --layers 1 --heads 2 --ffn 128 --vocab 64 --mem 16 --segment 16 --rounds 1"
    words += " --bptt 1 --seq 128 --long 512 --contexts 64 256"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    bench.main()
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == list(bench.ROWS) and rows["full"][10:] == ["-", "-"]
    rows["full"][10:] = rows["window"][10:]
    table = {name: [*map(float, row)] for name, row in rows.items()}
    for name, row in table.items():
        expected = [value / window for value, window in zip(row[::2], table["window"][::2])]
        assert min(row) > 0 and row[1::2] == pytest.approx(expected, 0.01, 0.006)
        assert name == "full" or row[10] == pytest.approx(row[8], rel=0.05)
