"""train.py --resume: a run that is stopped, killed or fed with what is not a number goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

import eval_ppl
import train
from generate import HERE, TINY
from lococo import segment_losses
from model import read_file, write_file

SMALL = "--data text --mem 16 --seq 64 --batch 2 --micro-batch 1 --device cpu --score-tokens 1"
RUN = f"{SMALL} --recipe embedded --steps 4 --out run --save-every"
STATE = Path("run/state.safetensors")


@pytest.fixture(autouse=True)
def run(run):
    torch.set_num_threads(1)  # as in the process below: the order of a sum is in its last bits
    return partial(run, train)


@pytest.fixture
def ends_well(run, undisturbed=[]):  # noqa: B006
    """Says whether an adapter has the very bytes of that of a run which nothing disturbs."""
    if not undisturbed:
        assert run(f"{RUN} 9 --out whole")[0] == 0
        undisturbed.append(Path("whole/adapter.safetensors").read_bytes())

    def check(out="run"):
        log = {json.loads(line)["step"] for line in open(f"{out}/log.jsonl")}
        return log == {1, 2, 3, 4} and Path(out, "adapter.safetensors").read_bytes() in undisturbed

    return check


def before_step(patch, n, then):
    """Something happens before the gradients of step n, counted from 1."""
    usual = train.gradients

    def gradients(adapted, draw, args, machine, step, done):
        if step + 1 == n:
            then()
        return usual(adapted, draw, args, machine, step, done)

    patch.setattr(train, "gradients", gradients)


@pytest.mark.parametrize("step", [1, 2, 3, 4])
def test_a_signal_lets_the_step_end(run, ends_well, monkeypatch, step):
    number = (signal.SIGINT, signal.SIGTERM)[step % 2]
    before_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    code, out, err = run(f"{RUN} 9")
    assert code == 128 + number and "python train.py --resume run\n" in out, err
    assert read_file(STATE)[1]["step"] == step == len(open("run/log.jsonl").readlines())
    assert not Path("run/adapter.safetensors").exists()
    assert run("--resume run")[0] == 0 and ends_well()


# Three runs that kill themselves: in a step, and when the third state is written, then named.
KILLED = """
import os, sys
import torch, train
torch.set_num_threads(1)
for module, name in ((train, "gradients"), (os, "fsync"), (os, "replace")):
    if os.fork() == 0:
        sys.argv += ["--out", name]
        usual, last = getattr(module, name), iter((False, False, True))
        setattr(module, name, lambda *a: os.kill(os.getpid(), 9) if next(last) else usual(*a))
        train.main()
    print(os.WTERMSIG(os.wait()[1]))
"""


def test_a_killed_run_goes_on_from_its_last_whole_state(run, ends_well, tokenizer):
    eval_ppl.token_streams([Path("text")], tokenizer)  # so that the runs write no tokens
    paths = {"PYTHONPATH": str(HERE), "LOCOCO_CACHE": eval_ppl.CACHE}
    line = [sys.executable, "-c", KILLED, *f"{RUN} 1".split()]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | paths)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["9"] * 3, done.stderr
    for out, step in (("gradients", 2), ("fsync", 1), ("replace", 1)):
        assert Path(out, "state.safetensors.part").exists() == (out != "gradients")
        assert read_file(Path(out, "state.safetensors"))[1]["step"] == step
        assert run(f"--resume {out} --save-every 3")[0] == 0 and ends_well(out)
    assert run("--resume replace")[0] == 0 and ends_well("replace")  # of a run that has ended, too


def test_a_gradient_that_is_not_finite_ends_the_run(run, ends_well, monkeypatch):
    def poisoned(*args):
        return ((x * torch.nan, right) for x, right in segment_losses(*args))

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        before_step(patch, 3, lambda: patch.setattr(train, "segment_losses", poisoned))
        code, out, err = run(f"{RUN} 1")
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert code == 2 and any(x.startswith("train.py: step 3: a grad") for x in err.splitlines())
    state, about = read_file(STATE)
    assert about["step"] == 2 and all(t.isfinite().all() for t in state.values())
    assert run("--resume run")[0] == 0 and ends_well()


def test_what_a_resumed_run_takes_and_refuses(run, monkeypatch):
    """Its own arguments, where none is given; nothing that has changed or is damaged."""
    shutil.copytree(TINY, "base", ignore=shutil.ignore_patterns("adapter*"))
    before_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(f"{RUN} 9 --model base")[0] == 130
    changed = "--resume run: its model, text, method or version differs"
    for words, sentence in (("--save-every 0", "--save-every 0: "), ("--mem 32", changed),
                            ("--steps 1", "--steps 1: this run is at step 2"),
                            ("--method h2o", changed), ("--lora-rank 0", changed)):
        code, _, err = run(f"--resume run {words}")
        assert code == 2 and err.startswith(f"train.py: {sentence}"), err
    base, text, state = Path("base/model.safetensors"), Path("text/0.py"), STATE.read_bytes()
    other_base = save({name: w * 1.1 for name, w in load_file(base).items()}, {"format": "pt"})
    other_text = text.read_bytes().replace(b"+ 7", b"+ 8")  # as many tokens
    lacking, about = read_file(STATE)
    about["args"].pop("facts")
    write_file(Path("lacking"), lacking, **about)
    for file, content, sentence in (
        (base, other_base, changed), (text, other_text, changed),
        (STATE, state[:-1], "cannot be read"), (STATE, b"", "cannot be read"),
        (STATE, Path("lacking").read_bytes(), "run: made by another version of this program"),
        (STATE, state[:-5] + b"\x77" + state[-4:], "run/state.safetensors: damaged"),
    ):
        before = file.read_bytes()
        file.write_bytes(content)
        code, _, err = run("--resume run")
        file.write_bytes(before)
        assert (code, err.count("\n")) == (2, 1) and sentence in err, err
    assert run("--resume run --micro-batch 2 --recompute --data text --steps 3")[0] == 0
    about = read_file(STATE)[1]
    assert about["step"] == about["args"]["steps"] == 3 and about["args"]["micro_batch"] == 2


def test_a_run_gets_a_directory_of_its_own(run, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "HERE", tmp_path)
    for end in ("", "-2", "-3"):
        out = run(f"{SMALL} --steps 1")[1]
        assert f"adapter: runs/lococo+window-mem16-seq64{end}/adapter.safetensors" in out
