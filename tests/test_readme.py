"""What the README says exists, and every command in it runs as printed, with small stand-ins for models and texts."""

import json
import math
import re
import runpy
import shlex
import shutil
import statistics
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_model import write_hugging_face, write_meta

import eval_ppl
import generate
import train
from eval_ppl import HERE, TINY, exit_on_user_error
from lococo import LoCoCo, Settings
from model import Llama, LlamaConfig

README = (HERE / "README.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.M | re.S)
COMMANDS = [line.split("  #")[0].strip() for block in BLOCKS for line in block.splitlines()
            if re.match(r"(python|torchrun|pip) ", line)]  # fmt: skip
INLINE = {" ".join(command.split()) for command in re.findall(r"`(python\s[^`]+)`", README)}
COMMANDS += sorted(command for command in INLINE if " both " not in command)  # which an exercise adds
PROGRAMS = {"train.py": train, "generate.py": generate, "eval_ppl.py": eval_ppl}


def resolve(name: str):
    module, *path = name.split(".")
    thing = import_module(module)
    for part in path:
        thing = getattr(thing, part)
    return thing


def test_the_table_from_paper_to_code_names_what_exists():
    table = README.split("| paper | here |")[1].split("\n\n")[0]
    names = re.findall(r"`([\w.]+)`", table)
    assert len(names) > 20
    for name in names:
        resolve(name)
    for equation in ("equations 1, 2", "equations 3 to 5", "equation 6", "equation 7", "equation 8", "algorithm 1",
                     "algorithm 2", "section 3.2", "section 3.3", "section 4.1"):  # fmt: skip
        assert equation in table, equation


def test_links_lead_somewhere():
    for file in ("README.md", "tests/results.md"):
        text, place = (HERE / file).read_text(), (HERE / file).parent
        for label, target in re.findall(r"\[([^\]\n]*)\]\(([^)]+)\)", text):
            if target.startswith("http"):
                continue
            assert (place / target).is_file(), target
            if target.endswith(".py"):
                for name in re.findall(r"`([\w.]+)`", label):
                    resolve(f"{Path(target).stem}.{name}")


def test_the_changes_of_the_exercises_run(monkeypatch):
    """Each `line` that "becomes" another is there; the module with the other in its place works on a small model."""
    exercises = " ".join(README.split("## Exercises")[1].split("\n## ")[0].split())
    changes = re.findall(r"\(([\w.]+)\): `([^`]+)` becomes `([^`]+)`", exercises)
    again = re.search(r"The same line becomes `([^`]+)`", exercises)
    changes.append((*changes[2][:2], again[1]))
    row = re.search(r"\(([\w.]+)\): `([^`]+)` gets a line above it, `([^`]+)`", exercises)
    changes.append((row[1], row[2], f"{row[3]}\n    {row[2]}"))
    assert len(changes) == 8
    for name, old, new in changes:
        resolve(name)
        file = name.split(".")[0]
        source = (HERE / f"{file}.py").read_text()
        assert source.count(old) == (2 if ".compress(" in old else 1), old
        if name.endswith("forward"):  # the exercise with three places
            line = "self.convs = nn.ModuleList((nn.Conv1d(channels, filters, kernel, padding=kernel // 2),))"
            assert line in source
            both = line.replace("((nn.Conv1d", "(nn.Conv1d").replace("2),))", "2) for _ in range(2))")
            source = source.replace(line, both)
            source = source.replace("for conv in self.convs[1:]:", "for conv in ():")
        source = source.replace(old, new, 1)
        modules = {}
        for module in ("model", "lococo"):
            modules[module] = ModuleType(module)
            with monkeypatch.context() as patch:
                patch.setitem(sys.modules, module, modules[module])
                patch.setitem(sys.modules, "model", modules["model"])
                text = source if module == file else (HERE / f"{module}.py").read_text()
                exec(compile(text, name, "exec"), modules[module].__dict__)
        model, lococo = modules["model"], modules["lococo"]
        llama = model.Llama(model.LlamaConfig(dim=32, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=64, vocab_size=64))
        for method in ("h2o", "lococo", *({"both"} & set(lococo.METHODS))):
            counts = {} if method == "h2o" else dict(sinks=2, heavy=0 if method == "lococo" else 8, recent=8)
            method = lococo.LoCoCo(llama, lococo.Settings.of(method, 32, 8, 64, **counts))
            method.start_training()
            tokens = torch.randint(0, 64, (1, 64))
            for losses in lococo.segment_losses(llama, tokens, method.cache(), 8):
                assert losses.isfinite().all()
                losses.sum().backward()
            method.remove()


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A directory as a reader's: the repository with a much smaller model, a library, Llamas, books and a run."""
    home = tmp_path_factory.mktemp("house")
    torch.manual_seed(0)
    sizes = dict(dim=32, n_heads=2, n_kv_heads=2, ffn_dim=96, vocab_size=2048)
    llama, model = Llama(LlamaConfig(n_layers=1, **sizes)), Llama(LlamaConfig(n_layers=3, context=1024, **sizes))
    for folder in (write_meta(home / "Llama-2-7b", llama, 1), write_hugging_face(home / "Llama-2-7b-hf", llama),
                   write_hugging_face(home / "tiny", model)):  # fmt: skip
        shutil.copy(TINY / "tokenizer.model", folder)
    LoCoCo(model, Settings.of("lococo", 128, 128, 2048, sinks=4, recent=108)).save(home / "tiny/adapter.safetensors")
    (home / "assets").mkdir()
    for file in ("requirements.txt", "assets/prompt.txt"):
        shutil.copy(HERE / file, home / file)
    text = "".join(f"def f{n}(x):\n    return x + {n}\n" for n in range(900))  # more than 8,192 tokens
    for folder in ("library", "RedPajama"):
        (home / folder).mkdir()
        for n in range(40):
            (home / folder / f"{n}.txt").write_text(text * (5 if folder == "RedPajama" and n % 8 == 0 else 1))
    for name in ("book.txt", "question.txt"):
        (home / name).write_text(text[:3000])
    return home


def test_every_command_runs_as_printed(house, monkeypatch, capsys):
    """In the order of the page, in one process; one training step, and two short documents to score, for the many that
    are usual. What has a test of its own, or takes hours, must at least know its flags."""
    monkeypatch.chdir(house)
    monkeypatch.setattr(eval_ppl, "CACHE", house / "cache")
    monkeypatch.setattr(eval_ppl, "default_files", lambda: sorted((house / "library").iterdir()))
    monkeypatch.setattr(train, "HERE", house)
    monkeypatch.setattr(train, "EVALUATED", 1)
    for module in PROGRAMS.values():
        monkeypatch.setattr(module, "TINY", house / "tiny", raising=False)
    monkeypatch.setattr(eval_ppl, "parse", shorter(eval_ppl.parse, lengths=[64, 1024], documents=2))
    monkeypatch.setattr(train, "parse", shorter(train.parse, steps=1))
    for name in ("batch", "micro_batch"):
        monkeypatch.setitem(train.RECIPES, name, (1, 1))
    done = []
    for command in COMMANDS:
        words = shlex.split(command)
        if words[0] == "python" and words[1] in PROGRAMS:
            if "--resume" in words:  # as if it had been stopped before its last step
                shutil.copy(house / "state", house / words[-1] / "state.safetensors")
            monkeypatch.setattr(sys, "argv", words[1:])
            with monkeypatch.context() as patch:
                if words[1] == "train.py":
                    keep_the_state(patch, house / "state")
                exit_on_user_error(PROGRAMS[words[1]].main)
            done.append(words[1])
        elif words[0] == "torchrun":
            assert words[1:3] == ["--nproc_per_node=4", "train.py"]
            monkeypatch.setattr(sys, "argv", words[2:])
            train.parse()
        elif words[1] == "-c":
            compile(words[2], command, "exec")
        elif words[:2] == ["python", "-m"] or words[0] == "pip":
            assert words[-1] in (HERE / ".ci/run").read_text(), command
        else:
            monkeypatch.setattr(sys, "argv", [words[1], "--help"])
            capsys.readouterr()
            with pytest.raises(SystemExit, match="^0$"):
                runpy.run_path(str(HERE / words[1]), run_name="__main__")
            shown = capsys.readouterr().out
            assert all(word in shown for word in words if word.startswith("--")), command
    assert {program: done.count(program) for program in PROGRAMS} == {"train.py": 8, "generate.py": 8, "eval_ppl.py": 5}


def shorter(parse, **less):
    def parsed():
        args = parse()
        vars(args).update({name: value for name, value in less.items() if getattr(args, name)})
        return args

    return parsed


def keep_the_state(patch, file: Path) -> None:
    """A run removes its state when it is done; the README's --resume wants one."""
    inner = Path.unlink

    def unlink(path, *args, **kwargs):
        if path.name == "state.safetensors" and path.is_file():
            shutil.copy(path, file)
        inner(path, *args, **kwargs)

    patch.setattr(Path, "unlink", unlink)


def test_the_problem_as_one_number():
    assert 2 * 32 * 4096 * 32768 * 2 == 17_179_869_184 and "**17.2 GB**" in README
    assert 2 * 32 * 4096 * 512 * 2 == 268_435_456 and "512 of them 0.27 GB" in " ".join(README.split())


def test_the_readmes_results_are_those_that_were_measured():
    cells = json.loads((HERE / "tests/reproduce.json").read_text())["cells"]
    table = README.split("| full attention |")[1].split("\n\n")[0]
    rows = dict(line.strip("| ").split(" | ")[::2] for line in ("| full attention |" + table).splitlines())

    def nats(name: str, length: int = 2048, seeds=(0, 1, 2)) -> list[float]:
        return [math.log(cells[f"{name}-{length}-m128-t128-s{s}-100"]["perplexity"][str(length)]) for s in seeds]

    full, recipe, h2o = "methodfull-positionsoriginal", "methodlococo", "methodh2o-positionsslots"
    three = {"full attention": full, "LoCoCo, the recipe: 4 sinks + 16 merged + 108 recent": recipe,
             "window of equal memory: 4 sinks + 124 recent": "methodstreaming",
             "H2O: half heavy, half recent": h2o}  # fmt: skip
    for row, name in three.items():
        expected = f"{statistics.mean(nats(name)):.4f} ± {statistics.stdev(nats(name)):.4f} (three seeds"
        assert rows.pop(row).startswith(expected), (row, expected)
    one = {"the same, a filter for each slot": "methodlococo-filters0",
           "the same, a filter for each slot, depthwise": "methodlococo-filters0-depthwise",
           "all but 4 sinks merged, one filter": "methodlococo-recent0",
           "all but 4 sinks merged, a filter for each slot": "methodlococo-recent0-filters0",
           "all but 4 sinks merged, a filter for each slot, depthwise": "methodlococo-recent0-filters0-depthwise",
           "LoCoCo + H2O, the paper's form: half heavy, half merged":
               "methodlococo+h2o-positionsslots-filters0-normalisesum",
           "8 sinks, then the segment": "methodstreaming-sinks8-recent0"}  # fmt: skip
    for row, name in one.items():
        assert rows.pop(row) == f"{nats(name, seeds=[0])[0]:.4f} (seed 0)", row
    closed = []
    for length in (2048, 4096, 8192):
        f, r, h = (statistics.mean(nats(name, length)) for name in (full, recipe, h2o))
        closed.append(round(100 * (h - r) / (h - f)))
    expected = "{} % (the recipe; {} % at 4,096, {} % at 8,192)".format(*closed)
    assert rows.pop("share of H2O's gap to full attention that is closed") == expected and not rows


def test_the_page_is_finished_and_its_picture_of_w_can_be_measured(tokenizer):
    assert "@@" not in README
    import pictures

    measured = json.loads((HERE / "assets/measured.json").read_text())
    ids = tokenizer.encode("def f(x):\n    return x + 1\n" * 300)[:2048]
    picture = pictures.mixing(Llama.from_pretrained(TINY), tokenizer, torch.tensor([ids]))
    for found in (picture, measured["mixing"]):
        w = torch.tensor(found["w"])
        assert w.shape == (4, 16, 144) == (4, 16, len(found["entries"])) and (w.sum(-1) - 1).abs().max() < 0.05
