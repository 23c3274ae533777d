"""LongLoRA's attention while it trains; and torchrun: two processes train as one does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eval_ppl
import train
from generate import HERE
from model import read_file


@pytest.mark.parametrize("L", [3, 8, 10, 21])
def test_which_keys_longlora_sees_while_it_trains(L):
    """A query that weights all alike reads the mean of the keys' numbers that its head may see."""
    q, v = torch.zeros(1, 4, L, L), torch.eye(L).expand(1, 2, L, L)
    seen = train.shifted_groups(0, q, torch.randn(1, 2, L, L), v)[0] > 0  # head, query, key
    quarter = -(-L // 4)
    for head in range(4):
        moved = quarter // 2 if head >= 2 else 0
        for t in range(L):
            for key in range(L):
                together = (t - moved) // quarter == (key - moved) // quarter
                assert seen[head, t, key] == (together and key <= t), (head, t, key)


RUN = "--data text --mem 16 --seq 192 --batch 3 --micro-batch 1 --bptt 2 --steps 3 --device cpu"
RUN += " --answer-weight 5 --save-every 9 --score-tokens 200 --out"

# train.py as each process runs it. It keeps the gradients of each step, and where STOP is set the
# second process is asked to end in the second step.
PROCESS = """
import os, signal
import torch, generate, train
usual, steps, rank = train.gradients, [], os.environ["RANK"]

def note(adapted, *rest):
    loss = usual(adapted, *rest)
    steps.append([p.grad.clone() for p in adapted.trained().values()])
    torch.save(steps, f"gradients-{rank}.pt")
    if "STOP" in os.environ and rank == "1" and len(steps) == 2:
        os.kill(os.getpid(), signal.SIGTERM)
    return loss

train.gradients = note
generate.run_program(train.main)
"""


def torchrun(words, **environment):
    environment |= {"PYTHONPATH": str(HERE), "LOCOCO_CACHE": eval_ppl.CACHE, "OMP_NUM_THREADS": "1"}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "process.py"]
    return subprocess.run([sys.executable, *launch, *words.split()], capture_output=True, text=True,
                          timeout=200, env=os.environ | environment)  # fmt: skip


def test_two_processes_train_as_one(run, monkeypatch):
    """Stopped in the second step, they go on with --resume. Any mistake is one sentence."""
    usual, steps = train.gradients, []

    def note(adapted, *rest):
        loss = usual(adapted, *rest)
        steps.append([p.grad.clone() for p in adapted.trained().values()])
        return loss

    monkeypatch.setattr(train, "gradients", note)
    assert run(train, f"{RUN} one")[0] == 0
    Path("process.py").write_text(PROCESS)
    stopped = torchrun(f"{RUN} two", STOP="1")
    assert stopped.stdout.count("python train.py --resume two\n") == 1, stopped.stderr
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
    for words, sentence in ((f"{RUN} two", "--out two: it is there"),
                            (f"{RUN} three --lr 2e9 --conv-lr 2e9", "a gradient is not fin"),
                            ("--resume two --mem 32", "its model, text, method")):  # fmt: skip
        wrong = torchrun(words)
        said = [line for line in wrong.stderr.splitlines() if "process.py: " in line]
        assert wrong.returncode and len(said) == 1 and sentence in said[0], wrong.stderr
