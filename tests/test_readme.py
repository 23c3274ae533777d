"""What README.md and docs/ say exists: equations beside their lines, names, links, commands, code."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pydoc import locate
from types import ModuleType

import generate
import pytest
import tables
import torch

from lococo import Compressor, merge
from model import Llama
from support.command_line import HERE

README = HERE / "README.md"
DOCS = HERE / "docs"
PAGES = [README, *sorted(DOCS.glob("*.md")), *(HERE / "adapters").glob("*/README.md")]


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that are in this language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """Lines that run a program, in blocks without a language."""
    lines = "".join(blocks(page)).replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith(("python ", "torchrun "))]
    return [" ".join(line.split("  #")[0].split()) for line in found]


COMMANDS = sorted({command for page in PAGES for command in commands(page)})

# --- Equations and methods --------------------------------------------------------------


def test_the_equations_stand_beside_lines_that_exist():
    table = (DOCS / "paper-to-code.md").read_text().split("| paper | code |")[1].split("\n\n")[0]
    for number in range(1, 8):
        assert f"({number})" in table, number
    files = [HERE / "model.py", HERE / "lococo.py", *(HERE / "support" / "ours").glob("*.py")]
    sources = [file.read_text() for file in files]
    for code in re.findall(r"`([^`]+)`", table):
        if re.fullmatch(r"[\w.]+", code):
            assert locate(code) is not None, code
        else:
            assert sum(text.count(code) for text in sources) == 1, code


def test_the_ten_lines_are_the_papers_compressor():
    """The code in README.md computes what lococo.py computes with the same filters."""
    names = {}
    exec(blocks(README, "python")[0], names)
    compressor = Compressor(names["D"], names["M"], kernel=21, start=1.0)
    compressor.conv.load_state_dict(names["conv"].state_dict())
    k, v = names["K"][None, None], names["V"][None, None]
    mixed, w = merge(compressor, torch.cat((k, v), dim=-1), None)
    k_new, v_new = mixed.chunk(2, dim=-1)
    torch.testing.assert_close(names["K_new"], k_new[0, 0])
    torch.testing.assert_close(names["V_new"], v_new[0, 0])
    torch.testing.assert_close(names["w"], w[0, 0])


# --- Tables, words, links ---------------------------------------------------------------


def test_the_tables_are_made_of_the_figures():
    made = tables.all_tables(tables.stored_cells())
    for page in PAGES:
        text = page.read_text("utf-8")
        for name, table in re.findall(r"<!-- tools/tables.py: ([^\n]*) -->\n(.*?)<!-- end -->", text, re.S):
            assert table == made[name], f"{name}: python tools/tables.py --write"


def headings(page: Path) -> set[str]:
    """As GitHub names them in a link."""
    found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        assert not heading or heading in headings(file), target


# --- Commands and code ------------------------------------------------------------------


class Understood(Exception):
    pass


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, monkeypatch, tmp_path):
    """By the program's own parser; what they do is tested where the programs are. The folder
    has none of the files that they would write: a reader may have made them already."""
    monkeypatch.chdir(tmp_path)
    Path("adapters").symlink_to(HERE / "adapters")
    if "--budgets budgets.json" in command:  # which the command before has written
        Path("budgets.json").symlink_to(HERE / "adapters/smollm2-135m/budgets.json")
    words = shlex.split(command)
    while not words[0].endswith(".py"):  # python, torchrun and its flags
        del words[0]
    # Methods that a reader adds.
    words = [{"both": "h2o", "mine": "lococo+h2o"}.get(word, word) for word in words]
    program = HERE / words[0]
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, line=None):
        parse_args(parser, line)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(Understood):
        import_module(program.stem).main()


def test_what_the_first_commands_print(run):
    """README.md says it in the line after a command. One more line of the shell writes a text."""
    Path("assets").symlink_to(HERE / "assets")
    found = [block for block in blocks(README) if "# prints: " in block]
    lines = "".join(found).replace("\\\n", " ").splitlines()
    for line, after in zip(lines, lines[1:]):
        shown = re.match(r"# .*prints: (\w+)", after)
        if line.startswith("("):
            subprocess.run(["bash", "-c", line], check=True)
        if shown:
            _, out, _ = run(generate, line.removeprefix("python generate.py"))
            assert out.strip() == shown[1], line
    assert Path("own.txt").exists()


def test_the_changes_of_the_exercises_run(model, monkeypatch):
    """The lines that a change removes are there once; with the others in their place, a
    small model has finite losses and gradients, other than before. The last exercise is one
    more file."""
    source = {"lococo": (HERE / "lococo.py").read_text()}
    [own] = blocks(DOCS / "exercises.md", "python")
    changed = [source | {"support.ours.mine": own}]
    for change in blocks(DOCS / "exercises.md", "diff"):
        lines = change.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert source["lococo"].count(old) == 1, old
        changed.append({"lococo": source["lococo"].replace(old, new)})
    assert len(changed) > 3
    before = losses_of(source, model, monkeypatch)
    for sources in changed:
        after = losses_of(sources, model, monkeypatch)
        assert after.isfinite().all() and not torch.equal(before, after), sources


def losses_of(sources: dict[str, str], model: Llama, monkeypatch) -> torch.Tensor:
    """What modules of these texts compute with H2O, with LoCoCo, and with a
    method that was added: losses, and norms of gradients."""
    with monkeypatch.context() as patch:
        for name, text in sources.items():  # each imports those before it
            module = ModuleType(name)
            patch.setitem(sys.modules, name, module)
            exec(text, module.__dict__)
        lococo = sys.modules["lococo"]
    tokens = torch.arange(96)[None] * 7 % 64
    losses = []
    for method in ("h2o", "lococo+h2o", *sorted({"both", "mine"} & set(lococo.METHODS))):
        changes = dict(positions="slots", lora_rank=0)
        torch.manual_seed(1)
        settings = lococo.Settings(method, 8, 96, **lococo.METHODS[method](32) | changes)
        adapted = lococo.AdaptedLlama(model, settings)
        cache = adapted.cache()
        for nats, _ in lococo.segment_losses(adapted.model, tokens, cache, 8):
            losses.append(nats.sum().detach())
            if nats.requires_grad:
                nats.sum().backward()
            cache.detach()
        losses += [p.grad.norm() for p in adapted.parameters() if p.grad is not None]
    return torch.stack(losses)


def test_lococo_is_the_paper_alone():
    """It neither imports nor names what is in support/ours/, its rows or its words."""
    text = (HERE / "lococo.py").read_text()
    words = set(re.findall(r"[a-z_]+", text.lower()))
    names = {file.stem for file in (HERE / "support" / "ours").glob("[a-z]*.py")}
    assert not words & (names | {"ours", "budget", "part", "parts"})
    alone = ModuleType("alone")
    exec(text, alone.__dict__)
    rows = [*alone.METHODS, *alone.COMPRESSORS, *alone.MEMORIES]
    paper = "full longlora streaming h2o lococo lococo+sinks lococo+h2o paper paper"
    assert rows == paper.split()


# --- Python -----------------------------------------------------------------------------


def test_the_program_that_made_tiny_starts(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--help"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(HERE / "tiny" / "pretrain.py"), run_name="__main__")
    assert stop.value.code == 0 and "usage: pretrain.py" in capsys.readouterr().out


def test_the_example_in_python_runs(own_folders, capsys):
    """From another folder, and on tiny/."""
    Path("book.txt").write_text("def f(x):\n    return x + 1\n" * 40)
    [code] = blocks(DOCS / "models.md", "python")
    code = code.replace("/home/me/lococo", str(HERE)).replace("SmolLM2-135M", "tiny")
    code = code.replace('"adapters" / "smollm2-135m" / "learned"', '"tiny"')
    code = code.replace("In short,", "def f(x):")
    exec(code, {})
    assert "return x + 1" in capsys.readouterr().out
