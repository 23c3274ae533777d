"""train.py --resume: a run that is stopped, killed or fed with what is not a number goes on."""

import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import eval_ppl
import generate
import train
from generate import TINY, read_file
from lococo import segment_losses

SMALL = "--data text --mem 16 --seq 64 --batch 2 --micro-batch 1 --device cpu --score-documents 1"
RUN = f"{SMALL} --recipe embedded --steps 4 --out run --save-every"
STATE = Path("run/state.safetensors")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["train"])  # what takes seconds to start


@pytest.fixture(autouse=True)
def run(own_folders, monkeypatch, capsys):
    """Run train.py with a command line; returns (exit code, stdout, stderr)."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes below: the order of sums is in the bits

    def call(words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        code = 0
        try:
            generate.run_program(train.main)
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    yield call
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def ends_well(run, kept={}):  # noqa: B006
    """Says whether the adapter is, to the bit, that of a run which nothing disturbs."""
    if not kept:
        assert run(f"{RUN} 1000")[0] == 0
        kept.update(load_file("run/adapter.safetensors"))
        shutil.rmtree("run")

    def check():
        adapter = load_file("run/adapter.safetensors")
        log = [json.loads(line)["step"] for line in open("run/log.jsonl")]
        return all(torch.equal(adapter[n], t) for n, t in kept.items()) and {*log} == {1, 2, 3, 4}

    return check


def at_call(n, function, then):
    """The function, but in its n-th call something happens first."""
    calls = []

    def changed(*args):
        calls.append(args)
        if len(calls) == n:
            then()
        return function(*args)

    return changed


@pytest.mark.parametrize("step, number", zip((1, 2, 3, 4), 2 * (signal.SIGINT, signal.SIGTERM)))
def test_a_signal_lets_the_step_end(run, ends_well, monkeypatch, step, number):
    stop = at_call(step, train.gradients, lambda: os.kill(os.getpid(), number))
    monkeypatch.setattr(train, "gradients", stop)
    code, out, err = run(f"{RUN} 1000")
    assert code == 128 + number and "python train.py --resume run\n" in out, err
    assert read_file(STATE)[1]["step"] == step == len(open("run/log.jsonl").readlines())
    assert not Path("run/adapter.safetensors").exists()
    assert run("--resume run")[0] == 0 and ends_well()


def work(folder, module, name, call):
    """A process that trains and kills itself."""
    os.chdir(folder)
    eval_ppl.CACHE = str(folder / "cache")
    sys.stdout = sys.stderr = open("output", "w")
    sys.argv = ["train.py", *f"{RUN} 1".split()]
    torch.set_num_threads(1)
    module = {"train": train, "os": os}[module]
    kill = at_call(call, getattr(module, name), lambda: os.kill(os.getpid(), signal.SIGKILL))
    setattr(module, name, kill)
    train.main()


@pytest.mark.parametrize("module, name, call, step",
                         [("train", "gradients", 3, 2), ("os", "fsync", 4, 1), ("os", "replace", 4, 1)])
def test_a_killed_run_goes_on_from_its_last_whole_state(run, ends_well, tmp_path, module, name, call, step):
    """The files that are written first: the tokens, the state of the start, and one a step."""
    process = PROCESSES.Process(target=work, args=(tmp_path, module, name, call))
    process.start()
    process.join(100)
    assert process.exitcode == -signal.SIGKILL, Path("output").read_text()
    assert Path("run/state.safetensors.part").exists() == (module == "os")
    assert read_file(STATE)[1]["step"] == step
    assert run("--resume run")[0] == 0 and ends_well()
    assert sorted(os.listdir("run")) == ["adapter.safetensors", "log.jsonl", "state.safetensors"]
    assert run("--resume run")[0] == 0 and ends_well()  # of a run that has ended, too


def test_a_gradient_that_is_not_finite_ends_the_run(run, ends_well, monkeypatch):
    def poisoned(*args):
        return (x * torch.nan for x in segment_losses(*args))

    poison = at_call(3, train.gradients, lambda: setattr(train, "segment_losses", poisoned))
    monkeypatch.setattr(train, "gradients", poison)
    code, out, err = run(f"{RUN} 1")
    monkeypatch.setattr(train, "segment_losses", segment_losses)
    assert code == 2 and "Traceback" not in err
    assert any(line.startswith("train.py: step 3: the gradient is") for line in err.splitlines())
    state, about = read_file(STATE)
    assert about["step"] == 2 and all(t.isfinite().all() for t in state.values())
    assert run("--resume run")[0] == 0 and ends_well()


def test_what_a_resumed_run_takes_and_refuses(run, ends_well, monkeypatch):
    """Its own arguments, and the few of MAY_CHANGE; nothing that has changed or is damaged."""
    shutil.copytree(TINY, "base", ignore=shutil.ignore_patterns("adapter*"))
    stop = at_call(2, train.gradients, lambda: os.kill(os.getpid(), signal.SIGINT))
    monkeypatch.setattr(train, "gradients", stop)
    assert run(f"{RUN} 1000 --model base")[0] == 130
    for words in ("--mem 32", "--steps 9", "--method h2o", "--data base", "--seed 1", "--seq 65",
                  "--conv-lr 0.5", "--lora-rank 0", "--micro-batch -1", "--save-every 0"):  # fmt: skip
        code, out, err = run(f"--resume run {words}")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"train.py: {words.split()[0]}"), err

    state, weights = STATE.read_bytes(), load_file("base/model.safetensors")
    name, changed = "model.layers.1.mlp.gate_proj.weight", "the model or the text has changed since"
    other = save(weights | {name: weights[name] * 1.1}, {"format": "pt"})
    text = Path("text/0.py").read_bytes().replace(b"+ 7", b"+ 8")  # as many tokens
    for file, content, sentence in (
        (Path("base/model.safetensors"), other, changed), (Path("text/0.py"), text, changed),
        (STATE, state[:-1], "state"), (STATE, state[: len(state) // 2], "state"), (STATE, b"", "state"),
        (STATE, state[:-5] + b"\x77" + state[-4:], "state.safetensors: damaged"),
    ):
        before = file.read_bytes()
        file.write_bytes(content)
        code, _, err = run("--resume run")
        assert (code, err.count("\n")) == (2, 1) and sentence in err, err
        file.write_bytes(before)
    assert run("--resume run --save-every 3 --data text --model base --mem 16")[0] == 0
    assert ends_well()
    assert run("--resume run --micro-batch 2 --recompute")[0] == 0


def test_a_run_never_writes_into_a_directory_that_exists(run, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "HERE", tmp_path)
    for end in ("", "-2", "-3"):
        out = run(f"{SMALL} --steps 1")[1]
        assert f"adapter: runs/lococo+window-mem16-seq64{end}/adapter.safetensors" in out
    monkeypatch.setattr(train, "load_base", None)  # it is refused before any work
    code, out, err = run(f"{SMALL} --steps 1 --out runs")
    assert (code, out, err.count("\n")) == (2, "", 1) and "runs" in err
