"""torchrun: two processes train as one does, with three sequences a step and five to score."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eval_ppl
import train
from generate import HERE, read_file

RUN = "--data text --mem 16 --seq 64 --batch 3 --micro-batch 1 --bptt 2 --steps 3 --device cpu"
RUN += " --score-documents 5 --out"

# What a process runs: train.py, which notes the gradients of each step. In the second one the first
# process ends torchrun, as a cluster does, and waits until it is itself asked to end. The other
# process does not listen: it must learn of it from the first.
PROCESS = """
import os, signal, time
import torch, generate, train
clip, steps, rank = torch.nn.utils.clip_grad_norm_, [], os.environ["RANK"]

def note(parameters, most):
    parameters = list(parameters)
    steps.append([p.grad.clone() for p in parameters])
    torch.save(steps, f"gradients-{rank}.pt")
    if "STOP" in os.environ and rank == "1":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif "STOP" in os.environ and len(steps) == 2:
        os.kill(os.getppid(), signal.SIGTERM)
        while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
            time.sleep(0.01)
    return clip(parameters, most)

torch.nn.utils.clip_grad_norm_ = note
try:
    generate.run_program(train.main)
except SystemExit as stop:
    open(f"code-{rank}", "w").write(str(stop.code))
    raise
"""


def torchrun(words, **environment):
    environment |= {"PYTHONPATH": str(HERE), "LOCOCO_CACHE": eval_ppl.CACHE, "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "process.py"]
    return subprocess.run([sys.executable, *launch, *words.split()], capture_output=True, text=True,
                          timeout=200, env=os.environ | environment)  # fmt: skip


def printed(out):
    return [float(line.split()[-1]) for line in out.splitlines() if line.startswith("  ")]


def test_two_processes_train_as_one(own_folders, monkeypatch, capsys):
    """They are stopped in the second step, and go on with --resume."""
    steps, clip = [], torch.nn.utils.clip_grad_norm_

    def note(parameters, most):
        parameters = list(parameters)
        steps.append([p.grad.clone() for p in parameters])
        return clip(parameters, most)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", note)
        patch.setattr(sys, "argv", ["train.py", *f"{RUN} one".split()])
        train.main()
    one = capsys.readouterr().out
    Path("process.py").write_text(PROCESS)
    stopped = torchrun(f"{RUN} two", STOP="1")
    assert stopped.stdout.count("python train.py --resume two\n") == 1, stopped.stderr
    assert read_file(Path("two/state.safetensors"))[1]["step"] == 2
    for rank in range(2):
        assert Path(f"code-{rank}").read_text() == "143"
        gradients = torch.load(f"gradients-{rank}.pt")[0]
        assert len(gradients) == len(steps[0])
        assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(gradients, steps[0]))

    done = torchrun("--resume two")
    assert done.returncode == 0, done.stderr
    for word in ("recipe", "text:", "parameters train", "adapter: two"):
        assert done.stdout.count(word) == 1
    assert printed(done.stdout) == pytest.approx(printed(one), rel=1e-3) and len(printed(one)) == 3
    logs = [[json.loads(line)["loss"] for line in open(f"{n}/log.jsonl")] for n in ("one", "two")]
    assert logs[1] == pytest.approx(logs[0], rel=1e-4) and len(logs[0]) == 3
