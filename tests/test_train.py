"""train.py: the gradient of a step, runs that are stopped and go on, and two
processes."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import support.text
import train
from lococo import AdaptedLlama, segment_losses
from model import KVCache
from support.command_line import HERE, Machine
from support.files import UserError, read_file
from support.programs.longlora import ShiftedGroups
from support.programs.run_folder import State, make_folder, refuse_used
from support.programs.settings import make_settings
from support.text import Texts

SMALL = "--data text --lora-rank 8 --facts 8 --mem 16 --seq 64 --batch 3 --micro-batch 1 --steps 3"
RUN = f"{SMALL} --device cpu --score-tokens 1 --out run"
STATE = Path("run/state.safetensors")
CPU = Machine("cpu", torch.float32)  # without autocast


# --- One step ---------------------------------------------------------------------------


@pytest.mark.parametrize("bptt, micro_batch", [(2, 1), (1, 2)])
def test_the_gradient_of_a_step(in_float64, model, bptt, micro_batch):
    """A step's loss and gradient are those of single nats, in float64."""
    adapted = AdaptedLlama(model, make_settings("lococo", 8, 6, 41, kernel=3, lora_rank=2))
    tokens, expected = torch.randint(3, 64, (2, 41)), 0.0
    sizes = dict(batch=2, micro_batch=micro_batch, seq=41, segment=6, bptt=bptt)
    config = train.TrainConfig("paper", **sizes)
    bar = Mock()
    loss = train.gradients(adapted, [*tokens], config, CPU, bar)
    assert sum(call.args[0] for call in bar.update.call_args_list) == tokens[:, 1:].numel()
    found = {name: p.grad.clone() for name, p in adapted.trained().items()}
    for n in range(2):
        cache = adapted.cache()
        for start, segment in zip(range(0, 40, 6), tokens[n : n + 1, :40].split(6, dim=1)):
            p = adapted.model(segment, cache)[0].softmax(dim=-1)
            for t, row in enumerate(p, start=start + 1):
                expected = expected - row[tokens[n, t]].log() / 80
            if start // 6 % bptt == bptt - 1:  # gradients reach back over so many segments
                cache.detach()
    assert loss == pytest.approx(expected.item(), rel=1e-9)
    adapted.zero_grad()
    expected.backward()
    assert found and all(torch.allclose(found[n], p.grad) for n, p in adapted.trained().items())


@pytest.mark.parametrize("L", [3, 8, 21])
def test_which_keys_longlora_sees_while_it_trains(config, L):
    """A query of zeros reads the mean of the keys' numbers that its head may see."""
    q, v = torch.zeros(1, 4, L, L), torch.eye(L).expand(1, 2, L, L)
    cache = ShiftedGroups(config)
    cache.keys[0].append(torch.randn(1, 2, L, L))
    cache.values[0].append(v)
    seen = cache.read(0, q)[0] > 0  # head, query, key
    quarter = -(-L // 4)
    for head in range(4):
        moved = quarter // 2 if head >= 2 else 0
        for t in range(L):
            for key in range(L):
                together = (t - moved) // quarter == (key - moved) // quarter
                assert seen[head, t, key] == (together and key <= t), (head, t, key)


@pytest.mark.parametrize("method, cache", [("full", KVCache), ("longlora", ShiftedGroups)])
def test_methods_without_segments_have_a_gradient_through_the_whole_sequence(
    in_float64, model, method, cache
):
    """Although a segment has 6 tokens: it is that of one loss of all tokens."""
    adapted = AdaptedLlama(model, make_settings(method, 8, 6, 41, lora_rank=2))
    tokens = torch.randint(3, 64, (1, 41))
    config = train.TrainConfig("paper", batch=1, seq=41, segment=6)
    train.gradients(adapted, [*tokens], config, CPU, Mock())
    found = [p.grad.clone() for p in adapted.trained().values()]
    adapted.zero_grad()
    p = adapted.model(tokens[:, :-1], cache(model.config))[0].log_softmax(dim=-1)
    (-p[torch.arange(40), tokens[0, 1:]].mean()).backward()
    for grad, p in zip(found, adapted.trained().values(), strict=True):
        torch.testing.assert_close(grad, p.grad)


def test_rates_fall_and_gradients_are_clipped(model, monkeypatch, tmp_path):
    """While a gradient stays the same, AdamW moves each number by the rate: by the whole one
    in the first step, and by half of it in the second. The second gradient of the
    convolutions is 1,000 times as large; clipping each group by itself makes it the same."""
    adapted = AdaptedLlama(model, make_settings("lococo", 8, 6, 41, kernel=3, lora_rank=2))
    sizes = dict(steps=2, lr=0.01, conv_lr=0.1, batch=1, seq=41)
    config = train.TrainConfig("paper", **sizes, out=str(tmp_path))
    steps = count()

    def large(adapted, *_):
        step = next(steps)
        for name, p in adapted.trained().items():
            larger = step == 1 and name.startswith("compressors")
            p.grad = torch.full_like(p, 1000.0 if larger else 1.0)
        return 0.0

    monkeypatch.setattr(train, "gradients", large)
    before = {name: p.detach().clone() for name, p in adapted.trained().items()}
    texts = Texts(np.arange(41), set(), [], torch.empty(0, 41), "")
    setup = train.Setup(config, CPU, model, None, texts)
    optimizer = train.make_optimizer(adapted, config)
    assert train.train(setup, adapted, optimizer, State(0, {}, {}, {}, {})) == 0
    for name, p in adapted.trained().items():
        rate = 0.1 if name.startswith("compressors") else 0.01
        torch.testing.assert_close(before[name] - p, torch.full_like(p, 1.5 * rate))


# --- Runs -------------------------------------------------------------------------------


def test_a_folder_has_one_run(own_folders):
    """Each run without --out gets one of its own. A folder with files is only for --resume."""
    for name in ("usual", "usual-2"):
        assert make_folder("", Path("runs/usual")) == Path("runs", name)
    for _ in range(2):  # the second time as after Ctrl-C
        refuse_used("run")
        assert make_folder("run", Path("other")) == Path("run")
    STATE.touch()
    with pytest.raises(UserError, match="^--out run: it has files already; name a new folder"):
        refuse_used("run")


UNDISTURBED = {}  # the files of a run that nothing disturbs, by name


@pytest.fixture
def whole(run):
    """These files. The first test that asks for them makes them."""
    if not UNDISTURBED:
        assert run(train, f"{RUN} --out whole")[0] == 0
        UNDISTURBED.update({f.name: f.read_bytes() for f in Path("whole").iterdir()})
        shutil.rmtree("whole")
    return UNDISTURBED


def ends_as(whole: dict[str, bytes]) -> bool:
    """Whether the run has the very adapter and log of an undisturbed one."""
    names = ("adapter.safetensors", "log.jsonl")
    return all(Path("run", name).read_bytes() == whole[name] for name in names)


def before_step(patch, n, then):
    """Something happens before the gradients of step n, counted from 1."""
    usual, steps = train.gradients, count(1)

    def gradients(*args):
        if next(steps) == n:
            then()
        return usual(*args)

    patch.setattr(train, "gradients", gradients)


def test_a_killed_run_goes_on_from_its_last_whole_state(run, whole):
    """It kills itself when its third state is written, but is not yet in its place."""
    child = os.fork()
    if child == 0:
        usual, last = os.replace, iter((False, False, True))
        os.replace = lambda *a: os.kill(os.getpid(), 9) if next(last) else usual(*a)
        run(train, RUN)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
    assert len([*Path("run").glob("*.part")]) == 1
    assert read_file(STATE)[1]["step"] == 1 and len(open("run/log.jsonl").readlines()) == 2
    with open("run/log.jsonl", "a") as log:
        log.write('{"step": 3, "lo')
    code, _, err = run(train, "--resume run")
    assert code == 0 and ends_as(whole), err
    assert not [*Path("run").glob("*.part")]
    assert run(train, "--resume run")[0] == 0 and ends_as(whole)  # it had ended


def test_a_signal_lets_the_step_end(run, whole, monkeypatch):
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        before_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        code, out, err = run(train, RUN)
    assert code == 143 and f"python {train.__file__} --resume run\n" in out, err
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert read_file(STATE)[1]["step"] == 2 == len(open("run/log.jsonl").readlines())
    assert not Path("run/adapter.safetensors").exists()
    assert run(train, "--resume run")[0] == 0 and ends_as(whole)


def test_a_gradient_that_is_not_finite_ends_the_run(run, monkeypatch):
    def poisoned(*args):
        return ((nats * torch.nan, logits) for nats, logits in segment_losses(*args))

    with monkeypatch.context() as patch:
        before_step(patch, 2, lambda: patch.setattr(train, "segment_losses", poisoned))
        code, out, err = run(train, RUN)
    assert code == 2 and "\ntrain.py: step 2: a gradient is not finite; lower --lr" in err
    state, about = read_file(STATE)
    assert about["step"] == 1 and all(t.isfinite().all() for t in state.values())


def test_what_a_resumed_run_refuses_and_takes(run):
    """It takes more steps, and the same text in another place."""
    text = Path("text/0.py")
    same = text.read_text()
    assert run(train, f"{RUN} --steps 2 --lora-rank 0")[0] == 0
    text.write_text("x = 1")
    for words, sentence in (
        ("--lr 1", "--lr: a run that is resumed keeps its own; beside --resume"),
        ("--steps 1", "--steps 1: this run is at step 2; it cannot have fewer"),
        ("--resume text", "--resume text: there is no run to go on with"),
        ("--steps 3", "--resume run: its text changed since it began; give what it had, or"),
    ):
        code, _, err = run(train, f"--resume run {words}")
        assert (code, err.count("\n")) == (2, 1) and sentence in err, err
    text.write_text(same)
    log = Path("run/log.jsonl")
    log.write_bytes(log.read_bytes()[:-5])  # as after a power cut
    Path("text").rename("texts")
    code, _, err = run(train, "--resume run --steps 3 --data texts")
    Path("texts").rename("text")
    config = read_file(STATE)[1]["config"]
    assert (code, config["steps"], config["dtype"]) == (0, 3, "float32"), err
    assert [json.loads(line)["step"] for line in open(log)] == [1, 3]
    log.write_bytes(log.read_bytes().rstrip())  # as an editor may leave it
    code, _, err = run(train, "--resume run --steps 4 --data text")
    assert code == 0 and [json.loads(line)["step"] for line in open(log)] == [1, 3, 4], err


# --- Many processes ---------------------------------------------------------------------


def test_two_processes_train_as_one(own_folders, whole):
    """Three sequences are dealt out to two processes, with the variables that torchrun sets. The
    log has the losses and norms of one process. What process 0 has to do at the end is done once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    variables = {"PYTHONPATH": str(HERE), "LOCOCO_CACHE": support.text.CACHE}
    variables |= {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, train.__file__, *RUN.split()], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | variables | {"RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in "01"
    ]
    ended = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    (out, _), (other, _) = ended
    assert not other
    assert [out.count(word) for word in ("recipe", "text:", "adapter: run")] == [1] * 3
    logs = Path("run/log.jsonl").read_text(), whole["log.jsonl"].decode()
    logs = [[json.loads(line) for line in log.splitlines()] for log in logs]
    assert len(logs[0]) == 3
    for two, one in zip(*logs):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
        assert two["gradient norms"] == pytest.approx(one["gradient norms"], rel=1e-3)
    assert sorted(os.listdir("run")) == sorted(whole)
