"""train.py: the gradient of a step; runs that are stopped or killed and go on; two processes."""

import copy
import json
import os
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save

import support.processes
import support.text
import train
from lococo import AdaptedLlama, segment_losses, settings_for
from support.command_line import HERE, TINY, Machine
from support.files import UserError, read_file
from support.processes import noted_signals
from support.run_folder import claim
from support.text import token_streams

SMALL = "--data text --mem 16 --batch 2 --micro-batch 1 --device cpu"
RUN = f"{SMALL} --recipe embedded --seq 64 --score-tokens 1 --steps 4 --out run --save-every"
STATE = Path("run/state.safetensors")
CHANGED = "--resume run: its {} changed since it began; give what it had, or start a new run"


@pytest.mark.parametrize("weight, told, bptt", [(7.5, 1, 2), (7.5, 1, 1), (1.0, 1, 2), (7.5, 0, 2)])
def test_the_weight_of_answers(in_float64, model, weight, told, bptt):
    """A step's loss and gradient, in float64, are those of single nats. In the convolutions'
    gradient those of answers count `weight` times: here a third of the passes does for all."""
    adapted = AdaptedLlama(model, settings_for("lococo", 8, 6, 40, kernel=3, lora_rank=2))
    tokens, ago = torch.randint(3, 64, (2, 41)), torch.zeros(2, 41, dtype=torch.int64)
    ago[:, [1, 12, 13, 30, 40]] = told * torch.randint(1, 30, (2, 5))
    config = train.TrainConfig(
        batch=2, micro_batch=1, seq=41, segment=6, bptt=bptt, answer_weight=weight
    )
    machine = Machine("cpu", torch.float32)  # no autocast
    rows = [(tokens[n], ago[n]) for n in (0, 1)] * 3  # the same two texts in each of three steps
    draw = rows.__getitem__
    losses = [train.gradients(adapted, draw, config, machine, step) for step in range(3)]
    found, plain, weighted = {n: p.grad / 3 for n, p in adapted.trained().items()}, 0.0, 0.0
    for n in range(2):
        cache = adapted.cache()
        for start, segment in zip(range(0, 40, 6), tokens[n : n + 1, :40].split(6, dim=1)):
            p = model(segment, cache)[0].softmax(dim=-1)
            for t, row in enumerate(p, start=start + 1):
                nats = -row[tokens[n, t]].log() / 80
                plain = plain + nats
                weighted = weighted + (weight if ago[n, t] > 0 else 1.0) * nats
            if start // 6 % bptt == bptt - 1:  # gradients reach back over so many segments
                cache.detach()
    assert sum(losses) / 3 == pytest.approx(plain.item(), rel=1e-9)
    for parameters, total in ((adapted.compressors, weighted), (adapted.model, plain)):
        adapted.zero_grad()
        total.backward(retain_graph=True)
        trained = {n: p for n, p in adapted.trained().items() if p in set(parameters.parameters())}
        assert trained and all(torch.allclose(found[n], p.grad) for n, p in trained.items())


@pytest.mark.parametrize("step", range(3))
def test_the_gradient_does_not_depend_on_the_micro_batch(in_float64, model, step):
    adapted = AdaptedLlama(model, settings_for("lococo", 8, 6, 40, kernel=3, lora_rank=2))
    tokens, answers = torch.randint(3, 64, (4, 41)), torch.rand(4, 41) < 0.2
    draw = [*zip(tokens, answers.long())] * 3
    found = []
    for micro_batch in (1, 2, 4):
        config = train.TrainConfig(
            batch=4, micro_batch=micro_batch, seq=41, segment=6, bptt=2, answer_weight=7.5
        )
        adapted.zero_grad()
        machine = Machine("cpu", torch.float32)  # no autocast
        train.gradients(adapted, draw.__getitem__, config, machine, step)
        found.append([p.grad for p in adapted.trained().values()])
    one, *others = found
    assert one[0].abs().max() > 0
    assert all(torch.allclose(a, b) for other in others for a, b in zip(one, other))


def test_backward_passes_run_outside_autocast(model, monkeypatch):
    """As PyTorch advises; the forward passes are in it."""
    adapted = AdaptedLlama(model, settings_for("lococo", 8, 6, 40, kernel=3, lora_rank=2))
    config = train.TrainConfig(batch=1, seq=40, segment=6, answer_weight=2.0)
    text = torch.randint(3, 64, (40,)), torch.ones(40, dtype=torch.int64)
    found = {"forward": set(), "backward": set()}

    def watch(module, name, kind):
        usual = getattr(module, name)

        def watched(*args, **kwargs):
            found[kind].add(torch.is_autocast_enabled("cpu"))
            return usual(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)

    watch(torch.Tensor, "backward", "backward")
    watch(model, "forward", "forward")
    train.gradients(adapted, lambda i: text, config, Machine("cpu", torch.bfloat16), step=0)
    assert found == {"forward": {True}, "backward": {False}}


@pytest.mark.parametrize("L", [3, 8, 10, 21])
def test_which_keys_longlora_sees_while_it_trains(config, L):
    """A query that weights all alike reads the mean of the keys' numbers that its head may see."""
    q, v = torch.zeros(1, 4, L, L), torch.eye(L).expand(1, 2, L, L)
    cache = train.ShiftedGroups(config)
    seen = cache.attend(0, q, torch.randn(1, 2, L, L), v)[0] > 0  # head, query, key
    quarter = -(-L // 4)
    for head in range(4):
        moved = quarter // 2 if head >= 2 else 0
        for t in range(L):
            for key in range(L):
                together = (t - moved) // quarter == (key - moved) // quarter
                assert seen[head, t, key] == (together and key <= t), (head, t, key)


@pytest.fixture
def trained(run):
    """Run train.py by a line."""
    return partial(run, train)


@pytest.fixture(scope="module")
def undisturbed():
    """Keeps the adapter of an undisturbed run for all tests of this file."""
    return {}


@pytest.fixture
def ends_well(trained, undisturbed):
    """Says whether an adapter has the very bytes of that of a run which nothing disturbs."""
    if not undisturbed:
        assert trained(f"{RUN} 9 --out whole")[0] == 0
        undisturbed["adapter"] = Path("whole/adapter.safetensors").read_bytes()

    def check(out="run"):
        log = {json.loads(line)["step"] for line in open(f"{out}/log.jsonl")}
        adapter = Path(out, "adapter.safetensors").read_bytes()
        return log == {1, 2, 3, 4} and adapter == undisturbed["adapter"]

    return check


def test_a_folder_has_one_run(own_folders):
    """Each run without --out gets a folder of its own, which a lock takes. That of a run which
    never began is taken again. With --out, or --resume, the second one is refused."""
    usual, held = Path("runs/usual"), []
    for name in ("usual", "usual-2", "usual-3"):
        folder, log = claim("", usual, None)
        held.append(log)
        assert folder == Path("runs", name)
    held[1].close()
    assert claim("", usual, None)[0] == Path("runs/usual-2")
    held[0].write("a step\n")
    held[0].close()
    assert claim("", usual, None)[0] == Path("runs/usual-2")
    with claim("run", usual, None)[1]:
        for steps, remedy in ((None, "name a new --out"), (3, "wait until it ends")):
            sentence = f"^run: another process trains in this folder; {remedy}$"
            with pytest.raises(UserError, match=sentence):
                claim("run", usual, steps)
    STATE.touch()
    with pytest.raises(UserError, match="has trained in this folder meanwhile; name a new --out"):
        claim("run", usual, None)
    claim("run", usual, 3)[1].close()


def test_the_log_has_the_norms_and_says_which_model_it_is_of(trained):
    """The losses are of the model before --sharper. That one is saved and scored, as the program
    says. A group that is not there has no norm."""
    code, out, _ = trained(f"{RUN} 9 --lora-rank 0")
    assert code == 0
    lines = [json.loads(line) for line in open("run/log.jsonl")]
    assert all(len(line["gradient norms"]) == 1 for line in lines)
    assert all(line["gradient norms"][0] > 0 for line in lines[1:])
    assert "the compressors' parameters are multiplied by 16 now (--sharper)" in out
    assert all(line["sharper after training"] == 16 for line in lines)
    files = [Path("run", f"{name}.safetensors") for name in ("adapter", "state")]
    saved, state = (read_file(file)[0] for file in files)
    for name, tensor in saved.items():
        torch.testing.assert_close(tensor, 16 * state[f"value {name}"])


def test_a_frozen_base_keeps_every_bit(model, tokenizer):
    """With rank 0 the convolutions alone train."""
    before = copy.deepcopy(model.state_dict())
    adapted = AdaptedLlama(model, settings_for("lococo", 8, 6, 40, kernel=3, lora_rank=0))
    filters = [p.clone() for p in adapted.compressors.parameters()]
    text = torch.randint(3, 64, (40,)), torch.zeros(40, dtype=torch.int64)
    config = train.TrainConfig(batch=1, seq=40, segment=6, lora_rank=0)
    optimizer = train.make_optimizer(adapted, config)
    train.gradients(adapted, lambda i: text, config, Machine("cpu", torch.float32), step=0)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    optimizer.step()
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(map(torch.equal, filters, adapted.compressors.parameters()))


def test_after_a_crash_the_log_has_each_step_once(trained, ends_well):
    """Two steps were taken after the last state, and half a line was written."""
    assert trained(f"{RUN} 9 --steps 2")[0] == 0
    old = STATE.read_bytes()
    assert trained("--resume run --steps 4")[0] == 0
    whole = Path("run/log.jsonl").read_text()
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [1, 2, 3, 4]
    STATE.write_bytes(old)
    Path("run/log.jsonl").write_text(whole + '{"step": 5')
    assert trained("--resume run --steps 4")[0] == 0
    assert Path("run/log.jsonl").read_text() == whole


def test_a_log_that_others_have_changed(trained, ends_well):
    """With the line breaks of Windows no line is cut; what is no log is not thrown away."""
    assert trained(f"{RUN} 9")[0] == 0
    log = Path("run/log.jsonl")
    windows = log.read_bytes().replace(b"\n", b"\r\n")
    log.write_bytes(windows)
    assert trained("--resume run")[0] == 0 and log.read_bytes() == windows
    for content in (b"mine\n" + windows, windows + b"\0\0\n", windows + b"\xff\n", b"[1]\n"):
        log.write_bytes(content)
        code, _, err = trained("--resume run")
        assert code == 2 and err.startswith("train.py: run/log.jsonl: damaged ("), err
        assert err.count("\n") == 1 and log.read_bytes() == content


OTHERS = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


@pytest.mark.parametrize("variables, sentence", [
    ({"RANK": ""}, None), ({"RANK": "0", "WORLD_SIZE": "1"}, None), ({"LOCAL_RANK": "1"}, None),
    ({"MASTER_PORT": "tcp://10.0.0.1:80"}, None),  # as Docker sets it for a service "master"
    ({"WORLD_SIZE": "2"},
     "RANK is 0 and WORLD_SIZE is 2, but RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT is not set"),
    ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "", "MASTER_PORT": "1"},
     "RANK is 1 and WORLD_SIZE is 2, but LOCAL_RANK, MASTER_ADDR is not set"),
    ({"RANK": "abc"}, "RANK is 'abc' in the environment, not a number; start many processes by"),
    ({"RANK": "0", "WORLD_SIZE": "2.5"}, "WORLD_SIZE is '2.5' in the environment, not a number"),
    (OTHERS | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' in the env"),
    (OTHERS | {"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE is 2, which leaves no"),
    (OTHERS | {"RANK": "0", "WORLD_SIZE": "0"}, "RANK is 0 and WORLD_SIZE is 0, which leaves no"),
])  # fmt: skip
def test_what_a_job_leaves_in_the_environment(variables, sentence, monkeypatch, capsys):
    """All of torchrun's variables, or none that says that there are many processes."""
    for name in support.processes.TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name in ("processes", "run_folder"):  # they read the variables once
        monkeypatch.delitem(sys.modules, f"support.{name}")
        monkeypatch.setattr(support, name, getattr(support, name))  # as it is after this test
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(train.__file__, run_name="__main__")
    out, err = capsys.readouterr()
    if sentence is None:
        assert end.value.code == 0 and "--mem M" in out, err
    else:
        assert end.value.code == 2 and err.startswith(f"train.py: {sentence}")
        assert err.count("\n") == 1 and out == ""


def test_a_port_that_does_not_exist(monkeypatch):
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999999"}
    for name, text in (OTHERS | variables).items():
        monkeypatch.setenv(name, text)
    place = "MASTER_ADDR=localhost MASTER_PORT=99999999"
    sentence = f"^the processes do not meet at {place}; start them by torchrun"
    with pytest.raises(UserError, match=sentence):
        support.processes.join()


def before_step(patch, n, then):
    """Something happens before the gradients of step n, counted from 1."""
    usual = train.gradients

    def gradients(adapted, draw, config, machine, step, done):
        if step + 1 == n:
            then()
        return usual(adapted, draw, config, machine, step, done)

    patch.setattr(train, "gradients", gradients)


@pytest.mark.parametrize("step, number", [(1, signal.SIGINT), (4, signal.SIGTERM)])
def test_a_signal_lets_the_step_end(trained, ends_well, monkeypatch, step, number):
    """What it says at once may have nowhere to go, as the terminal is gone."""
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    before_step(monkeypatch, step, lambda: os.kill(os.getpid(), number))
    said = Mock(side_effect=OSError(5, "Input/output error"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", said)
        code, out, err = trained(f"{RUN} 9")
    sentence = b"\nthis step is finished first; a second signal ends at once\n"
    said.assert_called_once_with(2, sentence)
    assert code == 128 + number and f"python {train.__file__} --resume run\n" in out, err
    assert handlers == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    assert read_file(STATE)[1]["step"] == step == len(open("run/log.jsonl").readlines())
    assert not Path("run/adapter.safetensors").exists()
    assert trained("--resume run")[0] == 0 and ends_well()


def test_a_second_signal_ends_at_once_whichever_it_is():
    with noted_signals() as noted:
        os.kill(os.getpid(), signal.SIGTERM)
        assert noted == [signal.SIGTERM]
        for number in (signal.SIGINT, signal.SIGTERM):
            assert signal.getsignal(number) == signal.SIG_DFL


def test_a_signal_while_the_last_state_is_written(trained, ends_well, monkeypatch):
    """The run ends, and goes on with scoring."""
    usual = train.save_state

    def save(adapted, optimizer, file, record, step):
        usual(adapted, optimizer, file, record, step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(train, "save_state", save)
        code, out, err = trained(f"{RUN} 9")
    assert code == 128 + signal.SIGTERM, err
    assert f"stopped; to go on: python {train.__file__} --resume run\n" in out
    assert not Path("run/adapter.safetensors").exists()
    assert trained("--resume run")[0] == 0 and ends_well()


def test_a_hint_is_what_a_shell_takes(own_folders, monkeypatch, capsys):
    before_step(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(SystemExit):
        train.main([*f"{SMALL} --seq 96 --score-tokens 0 --out".split(), "my run's"])
    hint = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(hint.split("to go on: ")[1])[-2:] == ["--resume", "my run's"]
    assert Path("my run's/state.safetensors").exists()


# Three runs that kill themselves: in a step, and when the third state is written, then named.
KILLED = """
import os, sys
import train
for module, name in ((train, "gradients"), (os, "fsync"), (os, "replace")):
    if os.fork() == 0:
        sys.argv += ["--out", name]
        usual, last = getattr(module, name), iter((False, False, True))
        setattr(module, name, lambda *a: os.kill(os.getpid(), 9) if next(last) else usual(*a))
        train.main()
        os._exit(0)
for run in range(3):
    print(os.WTERMSIG(os.wait()[1]))
"""


def test_a_killed_run_goes_on_from_its_last_whole_state(trained, ends_well, tokenizer):
    token_streams([Path("text")], tokenizer)  # so that the runs write no tokens
    paths = {"PYTHONPATH": str(HERE), "LOCOCO_CACHE": support.text.CACHE}
    line = [sys.executable, "-c", KILLED, *f"{RUN} 1".split()]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | paths)
    assert [line for line in done.stdout.splitlines() if line.isdigit()] == ["9"] * 3, done.stderr
    for out, step in (("gradients", 2), ("fsync", 1), ("replace", 1)):
        assert len([*Path(out).glob("state.safetensors.*.part")]) == (out != "gradients")
        assert read_file(Path(out, "state.safetensors"))[1]["step"] == step
        assert trained(f"--resume {out} --save-every 3")[0] == 0 and ends_well(out)
        assert not [*Path(out).glob("*.part")]
    assert trained("--resume replace")[0] == 0 and ends_well("replace")  # a run that has ended


def test_a_gradient_that_is_not_finite_ends_the_run(trained, ends_well, monkeypatch):
    def poisoned(*args):
        return ((x * torch.nan, right) for x, right in segment_losses(*args))

    with monkeypatch.context() as patch:
        before_step(patch, 4, lambda: patch.setattr(train, "segment_losses", poisoned))
        code, out, err = trained(f"{RUN} 3")
    assert code == 2 and any(x.startswith("train.py: step 4: a grad") for x in err.splitlines())
    state, about = read_file(STATE)
    assert about["step"] == 3 and all(t.isfinite().all() for t in state.values())
    assert trained("--resume run")[0] == 0 and ends_well()


@pytest.fixture
def stopped(trained, monkeypatch):
    """Run train.py by a line, beside the folder `run` of a run that was stopped in the second of
    its four steps. Its model is in the folder `base`."""
    shutil.copytree(TINY, "base", ignore=shutil.ignore_patterns("adapter*"))
    before_step(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert trained(f"{RUN} 9 --model base")[0] == 130
    return trained


def test_flags_that_a_resumed_run_refuses(stopped):
    kept = "a run that is resumed keeps its own; start a new run for another"
    for words in ("--mem 32", "--seq 128", "--method h2o", "--lora-rank 0", "--recipe paper",
                  "--budgets 16 16"):
        code, _, err = stopped(f"--resume run {words}")
        assert (code, err) == (2, f"train.py: {words}: {kept}\n")
    for words, sentence in (("--save-every 0", ""), ("--steps 1", "this run is at step 2"),
                            ("--out other", "a run that is resumed keeps its folder"),
                            ("--held-out text", "this run began without it, and holds out")):
        code, _, err = stopped(f"--resume run {words}")
        assert code == 2 and err.startswith(f"train.py: {words}: {sentence}"), err


def test_a_resumed_run_refuses_what_has_changed(stopped, monkeypatch):
    """Another base, other texts in the same files or in others, and a damaged state."""
    base, text, state = Path("base/model.safetensors"), Path("text/0.py"), STATE.read_bytes()
    other_base = save({name: w * 1.1 for name, w in load_file(base).items()}, {"format": "pt"})
    other_text = text.read_bytes().replace(b"+ 7", b"+ 8")  # as many tokens
    for file, content, sentence in (
        (base, other_base, CHANGED.format("model")), (text, other_text, CHANGED.format("text")),
        (STATE, state[:-5] + b"\x77" + state[-4:], "run/state.safetensors: damaged"),
    ):
        before = file.read_bytes()
        file.write_bytes(content)
        code, _, err = stopped("--resume run")
        file.write_bytes(before)
        assert (code, err.count("\n")) == (2, 1) and sentence in err, err
    shutil.copytree("text", "other")
    for file in Path("other").glob("*.py"):
        file.write_text("# other\n" + file.read_text())
    monkeypatch.setattr(train, "score", None)  # it is refused before anything is scored
    code, _, err = stopped("--resume run --data other")
    assert code == 2 and CHANGED.format("text") in err, err


def test_flags_that_a_resumed_run_takes(stopped):
    """It says what they change. Where none is given it has its own."""
    words = "--micro-batch 2 --recompute --data text --steps 3 --seed 5"
    words += " --mem 16 --recent 8 --positions slots --recipe embedded"  # these are its own
    code, out, _ = stopped(f"--resume run {words}")
    assert code == 0 and "--steps 3 instead of 4: from here on the rates fall to 0 at step 3" in out
    assert "--seed 5 instead of 0: sequences are dealt out otherwise from here on" in out
    about = read_file(STATE)[1]
    assert about["step"] == about["config"]["steps"] == 3 and about["config"]["micro_batch"] == 2


# train.py as each process runs it. The second process has other random numbers. Each keeps the
# gradients of each step, and where STOP is set the second is asked to end in the second step.
PROCESS = """
import os, signal
import torch, train
usual, steps, rank = train.gradients, [], os.environ["RANK"]

def note(adapted, *rest):
    loss = usual(adapted, *rest)
    steps.append([p.grad.clone() for p in adapted.trained().values()])
    torch.save(steps, f"gradients-{rank}.pt")
    if "STOP" in os.environ and rank == "1" and len(steps) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss

def with_other_numbers(*args):
    adapted = train.lococo_model(*args)
    if rank == "1":
        for p in adapted.trained().values():
            p.data += 1
    return adapted

train.gradients = note
train.lococo_model, train.AdaptedLlama = train.AdaptedLlama, with_other_numbers
train.run_program(train.main)
"""
THREE = f"{SMALL} --seq 96 --batch 3 --bptt 2 --steps 3 --answer-weight 5 --save-every 9"
THREE += " --score-tokens 100 --out"


def torchrun(line, **environment):
    """Start two processes with a command line, and wait for both."""
    environment |= {"PYTHONPATH": str(HERE), "LOCOCO_CACHE": support.text.CACHE}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    about = dict(capture_output=True, text=True, env=os.environ | environment, timeout=200)
    return subprocess.run([*launch, "process.py", *line.split()], **about)


def test_what_process_0_has_to_do_is_done_when_another_dies_at_its_end(own_folders):
    """The other one aborts while it ends; torchrun ends all then. Process 0 scores slowly after
    training. Without --out both know the folder of the run."""
    dying = "from pathlib import Path\ntrain.HERE = Path.cwd()\n"
    dying += "import time\nif rank == '1': os._exit = lambda code: os.abort()\n"
    dying += "usual_score = train.score\n"
    dying += "train.score = lambda *args: time.sleep(len(steps)) or usual_score(*args)\n"
    start, end = PROCESS.split("train.run_program")
    Path("process.py").write_text(f"{start}{dying}train.run_program{end}")
    done = torchrun(THREE.removesuffix("--out") + "--steps 1")
    assert done.returncode and done.stdout.count(", after training") == 1, done.stderr
    adapter = "runs/lococo+window-mem16-seq96/adapter.safetensors"
    assert f"adapter: {adapter}" in done.stdout and Path(adapter).exists()


def test_two_processes_train_as_one(trained, monkeypatch):
    """They start from the parameters of the first one. Stopped in the second step, they go on with
    --resume. A mistake is one sentence."""
    usual, steps = train.gradients, []

    def noted(adapted, *rest):
        loss = usual(adapted, *rest)
        steps.append([p.grad.clone() for p in adapted.trained().values()])
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(train, "gradients", noted)
        assert trained(f"{THREE} one")[0] == 0
    Path("process.py").write_text(PROCESS)
    stopped = torchrun(f"{THREE} two", STOP="1")
    again = "train.py --resume two (by torchrun, as before)\n"
    assert stopped.stdout.count(again) == 1, stopped.stderr
    assert read_file(Path("two/state.safetensors"))[1]["step"] == 2
    for rank in range(2):
        gradients = torch.load(f"gradients-{rank}.pt")
        pairs = zip(gradients[0], steps[0], strict=True)
        assert len(gradients) == 2
        assert all(torch.allclose(a, b, rtol=0, atol=1e-6) for a, b in pairs)

    done = torchrun("--resume two")
    assert done.returncode == 0, done.stderr
    assert [done.stdout.count(word) for word in ("recipe", "text:", "adapter: two")] == [1, 1, 1]
    assert sorted(path.name for path in Path().glob("two/*")) == sorted(os.listdir("one"))
    logs = [[json.loads(line)["loss"] for line in open(f"{n}/log.jsonl")] for n in ("one", "two")]
    assert logs[1] == pytest.approx(logs[0], rel=1e-4) and len(logs[0]) == 3
    scores = [read_file(Path(n, "state.safetensors"))[1]["scores"] for n in ("one", "two")]
    assert scores[0] and scores[0] == scores[1]
    wrong = torchrun(f"{THREE} two")
    said = [line for line in wrong.stderr.splitlines() if "process.py: " in line]
    assert wrong.returncode and len(said) == 1 and "--out two: it is there" in said[0], wrong.stderr
