"""A run that is stopped, killed, starved of disk or fed with not-a-numbers goes on, or ends in a sentence."""

import fcntl
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import eval_ppl
import lococo
import train
from eval_ppl import exit_on_user_error
from lococo import read_file, segment_losses

RUN = "--data text --mem 16 --seq 64 --segment 16 --batch 2 --micro-batch 1 --device cpu --save-every 1 --out run"
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["train", "torch._dynamo"])  # what else takes seconds to start


pytestmark = pytest.mark.usefixtures("own_folders")


def work(folder: Path, words: str, die: str) -> None:
    """A process that trains; `die` is the call in which it kills itself, when the state is written."""
    os.chdir(folder)
    eval_ppl.CACHE = folder / "cache"
    sys.stdout = sys.stderr = open("output", "a")
    sys.argv = ["train.py", *words.split()]
    torch.set_num_threads(1)
    if die:
        setattr(lococo.os, die, lambda *a: os.kill(os.getpid(), signal.SIGKILL))
    exit_on_user_error(train.main)


def begin(folder: Path, words: str, die: str = ""):
    process = PROCESSES.Process(target=work, args=(folder, words, die))
    process.start()
    return process


def finish(folder: Path, words: str) -> int:
    process = begin(folder, words)
    process.join(120)
    return process.exitcode


def state_step(out: str = "run") -> int:
    return read_file(Path(out) / "state.safetensors", "state")[1]["step"]


def same_adapters(a: str, b: str) -> bool:
    a, b = (load_file(f"{name}/adapter.safetensors") for name in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_killed_at_any_moment_and_resumed_ends_with_the_same_adapter(tmp_path):
    words, dice = f"{RUN} --steps 30", random.Random(0)
    assert finish(tmp_path, words) == 0
    shutil.move("run", "whole")
    deaths = {"by the clock": 0, "fsync": 0, "replace": 0}
    for n in range(20):
        resumes = Path("run/state.safetensors").is_file()
        die = ("", "fsync", "", "replace")[n % 4]
        process = begin(tmp_path, "--resume run --save-every 1" if resumes else words, die)
        process.join(60 if die else dice.uniform(0.2, 0.7))
        process.kill()
        process.join()
        if Path("run/adapter.safetensors").is_file() and not Path("run/state.safetensors").is_file():
            shutil.rmtree("run")  # it was done already: begin again
        else:
            assert process.exitcode == -signal.SIGKILL, Path("output").read_text()[-2000:]
            deaths[die or "by the clock"] += 1
    assert sum(deaths.values()) >= 18 and min(deaths.values()) >= 4, deaths
    assert finish(tmp_path, "--resume run" if Path("run/state.safetensors").is_file() else words) == 0
    assert same_adapters("run", "whole")
    steps = [json.loads(line)["step"] for line in Path("run/log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 31))
    assert sorted(os.listdir("run")) == ["adapter.safetensors", "log.jsonl"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_what_is_done_and_says_how_to_go_on(tmp_path, number):
    words = RUN.replace("--save-every 1", "--save-every 1000") + " --steps 16"
    assert finish(tmp_path, words) == 0
    shutil.move("run", "whole")
    process = begin(tmp_path, words)
    while not (Path("run/log.jsonl").is_file() and Path("run/log.jsonl").read_text().count("\n") > 2):
        time.sleep(0.01)
        assert process.is_alive()
    os.kill(process.pid, number)
    process.join(60)
    assert process.exitcode == 128 + number
    assert "train.py --resume run" in Path("output").read_text() and "Traceback" not in Path("output").read_text()
    assert 2 < state_step() < 16
    assert finish(tmp_path, "--resume run") == 0
    assert same_adapters("run", "whole")


@pytest.fixture
def run(monkeypatch, capsys):
    def call(words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        try:
            exit_on_user_error(train.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, capsys.readouterr().err

    return call


def poisoned(monkeypatch, steps: set[int], kind: str):
    """Losses, or their gradients alone, are not numbers in these steps."""
    calls = iter(range(10**6))

    def losses(*args):
        step = next(calls) // 2  # two sequences a step
        for x in segment_losses(*args):
            if step in steps and kind == "gradient":
                x = x + (x - x.detach()).sqrt() * 0  # 0, whose derivative is infinite times 0
            yield x * float("nan") if step in steps and kind == "loss" else x

    monkeypatch.setattr(train, "segment_losses", losses)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_a_step_that_is_not_a_number_is_left_out(run, monkeypatch, kind):
    values = []

    def note(file, what, tensors, **about):
        values.append({name: t.clone() for name, t in tensors.items()})
        lococo.write_file(file, what, tensors, **about)

    monkeypatch.setattr(train, "write_file", note)
    poisoned(monkeypatch, {1, 2, 4}, kind)
    code, _ = run(f"{RUN} --steps 6")
    assert code == 0 and len(values) == 1 + 3  # at the start and after steps 0, 3 and 5
    assert all(bool(t.isfinite().all()) for state in values for t in state.values() if t.is_floating_point())
    assert [float(state["step.norm.weight"]) for state in values[1:]] == [1, 2, 3]
    assert load_file("run/adapter.safetensors").keys() and len(Path("run/log.jsonl").read_text().splitlines()) == 6


def test_three_such_steps_in_a_row_end_the_run_and_its_state_is_whole(run, monkeypatch):
    poisoned(monkeypatch, {2, 3, 4}, "loss")
    code, err = run(f"{RUN} --steps 9")
    assert code == 2 and "step 5: the loss is nan" in err and "Traceback" not in err
    assert state_step() == 2 and not Path("run/adapter.safetensors").exists()
    monkeypatch.undo()


@pytest.mark.parametrize("what", ["vanished", "full"])
def test_a_disk_that_fails_is_one_sentence(run, monkeypatch, what):
    """The directory goes, or the disk is full, when the state of step 2 is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fail(file, kind, tensors, **about):
        if about.get("step") == 2 and what == "vanished":
            shutil.rmtree("run")
        if about.get("step") == 2 and what == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        lococo.write_file(file, kind, tensors, **about)

    monkeypatch.setattr(train, "write_file", fail)
    try:
        code, err = run(f"{RUN} --steps 4")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2 and "run/state.safetensors: cannot be written" in err and "Traceback" not in err
    if what == "full":
        assert state_step() == 1 and not list(Path("run").glob("*.part"))


@pytest.fixture
def stopped(run, monkeypatch):
    """A run that ended after its second step."""
    poisoned(monkeypatch, {2, 3, 4}, "loss")
    assert run(f"{RUN} --steps 9")[0] == 2
    monkeypatch.setattr(train, "segment_losses", segment_losses)


def test_resuming_takes_the_flags_of_the_run_and_refuses_others(run, stopped, tmp_path):
    for words, sentence in (("--steps 10", "--steps 10: the run to resume has 9"),
                            ("--mem 32", "--mem 32: the run to resume has 16"),
                            ("--method h2o", "--method h2o: the run to resume has lococo"),
                            ("--data other", f"--data ['{tmp_path}/other']: the run to resume has ['{tmp_path}/text']"),
                            ("--out elsewhere", "--out elsewhere: --resume goes on in run")):  # fmt: skip
        code, err = run(f"--resume run {words}")
        assert code == 2 and sentence in err, err
    assert run("--resume nowhere") == (2, "train.py: --resume nowhere: there is no state.safetensors of a run\n")
    other = (tmp_path / "text" / "0.py").read_text().replace("+ 7", "+ 8")  # as many tokens
    (tmp_path / "text" / "0.py").write_text(other)
    assert "the text to train on has changed" in run("--resume run")[1]


def test_a_resumed_run_may_be_told_what_it_knows_already_and_ends(run, stopped, tmp_path, monkeypatch):
    assert read_file(Path("run/state.safetensors"), "state")[1]["flags"]["save_every"] == 1
    assert run(f"--steps 9 --micro-batch 2 --recompute --save-every 3 {RUN.split('--micro')[0]} --resume run")[0] == 0
    code, err = run("--resume run")
    assert code == 2 and "--resume run: this run is finished" in err
    assert len(Path("run/log.jsonl").read_text().splitlines()) == 9


def test_a_run_is_resumed_from_any_directory(run, stopped, tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run("--resume ../run")[0] == 0


def test_a_run_belongs_to_one_process(run, stopped):
    with open("run/log.jsonl") as log:
        fcntl.flock(log, fcntl.LOCK_SH)  # which a shared lock of the run would bear
        code, err = run("--resume run")
        assert code == 2 and "run: another process is at work on this run" in err
    Path("taken").mkdir()
    with open("taken/log.jsonl", "w") as log:  # as of a run that has begun since this one looked
        fcntl.flock(log, fcntl.LOCK_SH)  # which a shared lock of the run would bear
        code, err = run(RUN.replace("--out run", "--out taken"))
        assert code == 2 and "taken: another process is at work on this run" in err


def test_a_damaged_state_is_refused(run, stopped):
    file = Path("run/state.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    code, err = run("--resume run")
    assert code == 2 and "state.safetensors: not a file of this program, or damaged" in err
