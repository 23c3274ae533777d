"""What README.md and docs/ say exists: equations beside their lines, names, links, commands, code.

docs/notebook.md is a log: of it only tables and links are tested."""

import argparse
import re
import shlex
import sys
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import ModuleType

import bench
import cells
import generate
import numpy as np
import pytest
import reproduce
import torch
import train
from conftest import changed
from lococo import METHODS, Compressor
from support.command_line import HERE
from support.facts import fact_tokens

README = HERE / "README.md"
DOCS = HERE / "docs"
PAGES = [README, *sorted(page for page in DOCS.glob("*.md") if page.name != "notebook.md")]
FIVE = {"model.py", "lococo.py", "generate.py", "eval_ppl.py", "train.py"}


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page that are in this language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """Commands that run a program: lines of blocks without a language, and `python ...` in
    prose."""
    lines = "".join(blocks(page)).replace("\\\n", " ").splitlines()
    found = [line for line in lines if line.startswith(("python ", "torchrun "))]
    prose = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.M | re.S)
    found += re.findall(r"`(python [^`]+\.py[^`]*)`", " ".join(prose.split()))
    return [" ".join(line.split("  #")[0].split()) for line in found]


COMMANDS = sorted({command for page in PAGES for command in commands(page)})

# --- Equations and methods --------------------------------------------------------------


def resolve(name: str):
    module, *path = name.split(".")
    thing = import_module(module)
    for part in path:
        thing = getattr(thing, part)
    return thing


def test_the_five_files_stand_alone_at_the_top_level():
    assert {file.name for file in HERE.glob("*.py")} == FIVE


def test_nothing_imports_what_is_built_on_it():
    """support/ imports none of the five files (types apart), and each of these only earlier ones in
    the order of reading. tools/ and tests/ may import all."""
    order = ["model", "lococo", "generate", "eval_ppl", "train"]
    for file in (*HERE.glob("*.py"), *(HERE / "support").glob("*.py")):
        place = order.index(file.stem) if file.stem in order else 0
        for line in file.read_text("utf-8").splitlines():  # those at its left edge
            found = re.match(r"(?:from|import) (\w+)", line)
            if found and found.group(1) in [*order, "tools", "tests"]:
                assert found.group(1) in order[:place], f"{file.name}: {line}"


def test_the_equations_stand_beside_lines_that_exist():
    table = (DOCS / "paper-to-code.md").read_text().split("| paper | code |")[1].split("\n\n")[0]
    for number in range(1, 8):
        assert f"({number})" in table, number
    sources = [(HERE / file).read_text() for file in FIVE]
    for code in re.findall(r"`([^`]+)`", table):
        if re.fullmatch(r"[\w.]+", code):
            resolve(code)
        else:
            assert sum(text.count(code) for text in sources) == 1, code


def test_the_table_of_methods_names_methods():
    table = (DOCS / "paper-to-code.md").read_text().split("| `--method` |")[1].split("\n\n")[0]
    named = set(re.findall(r"^\| `([\w+]+)`", table, re.M))
    assert {"full", "streaming", "h2o", "lococo"} <= named <= set(METHODS)


def test_the_ten_lines_are_the_papers_compressor():
    """The code in README.md computes what lococo.Compressor computes with the same filters."""
    code = next(block for block in blocks(README, "python") if "Conv1d" in block)
    names = {}
    exec(code, names)
    compressor = Compressor(names["D"], names["M"], kernel=21)
    compressor.conv.load_state_dict(names["conv"].state_dict())
    k, v = names["K"][None, None], names["V"][None, None]
    k_new, v_new, w = compressor(k, v, torch.zeros(1, 1, names["S"], dtype=torch.bool), None)
    torch.testing.assert_close(names["K_new"], k_new[0, 0])
    torch.testing.assert_close(names["V_new"], v_new[0, 0])
    torch.testing.assert_close(names["w"], w[0, 0])


# --- Tables -----------------------------------------------------------------------------


def test_the_tables_are_made_of_the_figures():
    stored = cells.read(reproduce.RESULTS)
    for file in reproduce.FILES:
        text = file.read_text("utf-8")
        assert "<!-- tools/reproduce.py: " in text
        assert cells.with_tables(text, "reproduce.py", reproduce.tables(stored)) == text
        assert text.count("<!-- tools/") == text.count("<!-- end -->")
    for page in {*PAGES} - {*reproduce.FILES}:  # a table there would never be made anew
        assert "<!-- tools/reproduce.py: " not in page.read_text("utf-8"), page
    assert all(re.fullmatch(r"[0-9a-f]{7,}\+?", cell["commit"]) for cell in stored)


def test_the_words_of_facts_are_those_of_the_tokenizer(tokenizer):
    words = sorted(tokenizer.piece(i)[1:] for i in fact_tokens(tokenizer).words)
    page = " ".join((DOCS / "facts.md").read_text().split())
    assert f" {', '.join(words)}. " in page and f"has {len(words)} such words" in page


# --- Links and lines --------------------------------------------------------------------


def headings(page: Path) -> set[str]:
    """As GitHub names them in a link."""
    found = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [*PAGES, DOCS / "notebook.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert file.is_file(), target
        assert not heading or heading in headings(file), target


def test_every_page_is_linked_and_the_readme_fits_a_terminal():
    text = README.read_text("utf-8")
    for page in DOCS.glob("*.md"):
        assert f"(docs/{page.name})" in text, page
    lines = [line for line in text.splitlines() if not line.startswith("|")]  # tables may be wide
    assert max(map(len, lines)) <= 100


# --- Commands and code ------------------------------------------------------------------


class Understood(Exception):
    pass


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_understood(command, monkeypatch, tmp_path):
    """By the program's own parser; what they do is tested where the programs are."""
    words = shlex.split(command)
    if words[1] == "-m":
        return
    while not words[0].endswith(".py"):  # python, torchrun and its flags
        del words[0]
    # A method and a compressor that a reader adds.
    words = [{"both": "h2o", "mine": "facts"}.get(word, word) for word in words]
    if "--out" in words:  # a reader may have made this run already
        words[words.index("--out") + 1] = str(tmp_path / "new")
    if "--resume" in words:
        (tmp_path / "state.safetensors").touch()
        words[words.index("--resume") + 1] = str(tmp_path)
    program = HERE / words[0]
    if "matplotlib" in program.read_text():  # not in requirements.txt
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    config, _, record = train.parse()
    stored = asdict(record) | {"config": asdict(config), "owner": {"settings": {}}}
    monkeypatch.setattr(train, "read_file", lambda file: ({}, stored))  # for --resume
    monkeypatch.setattr(sys, "argv", words)
    module = import_module(program.stem)
    if hasattr(module, "parse"):
        module.parse()
    elif "argparse" in program.read_text():  # the parser is in `main`: end there
        parse_args = argparse.ArgumentParser.parse_args

        def parse_and_stop(parser: argparse.ArgumentParser):
            parse_args(parser)
            raise Understood

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        with pytest.raises(Understood):
            module.main()


@pytest.mark.parametrize("flags", ["", "--method streaming --mem 128",
                                   "--method h2o --mem 128 --positions slots"])  # fmt: skip
def test_the_first_commands(run, flags):
    """A trained memory recalls the three facts of assets/prompt.txt; a window and H2O none. What
    README.md says that a command prints, it prints."""
    text = (HERE / "assets" / "prompt.txt").read_text()
    facts = re.findall(r"^@ (\w+ \w+) = (\w+)$", text, re.M)
    assert len(facts) == 3 and text.endswith(f"\n@ {facts[0][0]} =")
    line = f"--prompt assets/prompt.txt {flags} --temperature 0 --max-new-tokens 1"
    assert f"python generate.py {' '.join(line.split())}" in commands(README)
    block = next(block for block in blocks(README) if "assets/prompt.txt" in block)
    shown = re.findall(r"^# prints: (\w+)$", block, re.M)
    for number, (name, word) in enumerate(facts):
        Path("ask.txt").write_text(f"{text.removesuffix(facts[0][0] + ' =')}{name} =")
        _, out, err = run(generate, f"--prompt ask.txt --temperature 0 --max-new-tokens 1 {flags}")
        assert " 128 slots; " in err and (out.strip() == word) == (flags == "")
        if number == 0:
            assert out.strip() in shown


def test_a_fact_of_your_own(run):
    """README.md puts one in front of the prompt and asks for it."""
    block = next(block for block in blocks(README) if "own.txt" in block)
    first, between, last = re.search(r"echo '(.*)'; cat (\S+); printf '(.*)'\)", block).groups()
    middle = (HERE / between).read_text()
    Path("own.txt").write_text(f"{first}\n{middle}" + last.replace("\\n", "\n"))
    line = next(line for line in block.splitlines() if line.startswith("python generate.py"))
    _, out, _ = run(generate, line.removeprefix("python generate.py"))
    assert f"# prints: {out.strip()}" == block.splitlines()[-1]


def test_the_python_example_runs(capsys, monkeypatch):
    monkeypatch.chdir(HERE)
    code = next(block for block in blocks(README, "python") if "load_adapter" in block)
    exec(code, {})
    expected = code.rstrip().rsplit("# ", 1)[1]
    assert capsys.readouterr().out.strip() == expected


# --- Exercises --------------------------------------------------------------------------


def test_the_changes_of_the_exercises_run():
    """The lines that a change removes are there once; with the others in their place, a small model
    has finite losses and gradients, other than before."""
    sources = {name: (HERE / f"{name}.py").read_text() for name in ("model", "lococo")}
    before = losses_of(changed(sources))
    changes = blocks(DOCS / "exercises.md", "diff")
    assert changes
    for change in changes:
        lines = change.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        assert sources["lococo"].count(old) == 1, old
        after = losses_of(changed(sources | {"lococo": sources["lococo"].replace(old, new)}))
        assert after.isfinite().all() and not torch.equal(before, after), new


def losses_of(modules: dict[str, ModuleType]) -> torch.Tensor:
    torch.manual_seed(0)
    model, lococo = modules["model"], modules["lococo"]
    config = model.LlamaConfig(32, 1, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=64)
    llama = model.Llama(config)
    tokens, losses = torch.randint(0, 64, (1, 96)), []
    for method in lococo.METHODS:  # the other tests have every method with 8 slots
        lococo.settings_for(method, 8, 6, 40)
    for method in ("h2o", "lococo+window", *({"both"} & set(lococo.METHODS))):
        own = "mine" if "mine" in lococo.COMPRESSORS else "facts"
        changes = dict(compressor=own, positions="slots", kernel=3, lora_rank=0)
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
    same = {"model": "one", "seq": 9, "steps": 7, "mem": 4, "facts": 0}
    stored = [same | {"row": row, "seed": seed, "nats": nats[row, seed]} for row, seed in nats]
    stored.insert(0, stored[0] | {"nats": [99, 99]})  # made before, and again since
    table = reproduce.plain_table(stored, 9, 7, ["window", "ours", "h2o", "official h2o"], "one")
    assert [line.split("|")[2].strip() for line in table.splitlines()[2:]] == [
        f"{np.exp(5.5):.3f}", "+2.0000 ± 1.0000", "-1.0000 ± 0.0000 (25 %)", "-"]  # fmt: skip


def test_the_comparison_with_the_official_h2o():
    """Two documents. The official code is 1 and 2 above with seed 0, and 1 above with seed 1. It
    has no partner with seed 2; other flags and other rows make other tables."""
    same = {"model": "tiny", "mem": 512, "seq": 4096, "steps": 160, "facts": 0, "extra": ""}
    nats = [("official h2o", 0, [1, 3]), ("official h2o", 1, [2, 3]), ("official code", 0, [2, 5]),
            ("official code", 1, [3, 4]), ("official code", 2, [9, 9]), ("full", 0, [1, 1])]
    stored = [same | {"row": row, "seed": seed, "nats": values} for row, seed, values in nats]
    stored.append(stored[2] | {"extra": "--lr 3e-4", "nats": [8, 8]})
    table = reproduce.comparison(stored).splitlines()[2:]
    assert [[cell.strip() for cell in line.split("|")[2:4]] for line in table] == [
        [f"{np.exp(3.5):.3f}, {np.exp(3.5):.3f}", "+1.2500 ± 0.2500"],
        [f"{np.exp(2):.3f}, {np.exp(2.5):.3f}", ""]]  # fmt: skip


def test_the_benchmark_reads_as_a_loaded_adapter_does(monkeypatch, capsys):
    """With LoRA of the rank that is asked for, and embeddings in the base's dtype."""
    words = "--dim 64 --layers 1 --heads 2 --ffn 128 --vocab 64 --mem 16 --segment 16 --rounds 1"
    words += " --bptt 1 --seq 64 --dtype bfloat16 --rows window --parts train prefill"
    found = {}

    def watch(name, usual):
        def watched(adapted, options):
            dtype = adapted.model.tok_embeddings.weight.dtype
            found.setdefault(name, set()).add((dtype, adapted.settings.lora_rank))
            return usual(adapted, options)

        monkeypatch.setattr(bench, name, watched)

    watch("train_time", bench.train_time)
    watch("prefill_time", bench.prefill_time)
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split(), "--lora-rank", "2"])
    bench.main()
    expected = {"train_time": {(torch.float32, 2)}, "prefill_time": {(torch.bfloat16, 2)}}
    assert found == expected
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split(), "--lora-rank", "0"])
    with pytest.raises(SystemExit) as error:
        bench.main()
    assert error.value.code == 2 and "nothing to train" in capsys.readouterr().err


def test_every_row_of_the_benchmark_has_figures(monkeypatch, capsys):
    """A column has values, and how many times the window's these are. The second and third, memory
    of training, do not grow with the sequence. Nothing is timed here."""
    words = "--dim 64 --layers 1 --heads 2 --ffn 128 --vocab 64 --mem 16 --segment 16 --rounds 1"
    words += " --bptt 1 --seq 64 --long 256 --contexts 64 128"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    bench.main()
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:]}
    assert list(rows) == list(bench.ROWS) and rows["full"][4:6] == ["-", "-"]
    rows["full"][4:6] = rows["window"][4:6]
    table = {name: [*map(float, row)] for name, row in rows.items()}
    for name, row in table.items():
        expected = [value / window for value, window in zip(row[::2], table["window"][::2])]
        assert min(row) > 0 and row[1::2] == pytest.approx(expected, 0.01, 0.006)
        assert name == "full" or row[4] == pytest.approx(row[2], rel=0.05)
