"""torchrun, on one machine: whatever the number of processes, a step, a run and a table are the same."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from eval_ppl import HERE
from lococo import read_file
from model import UserError
from train import check_shard

# What a process runs: a program, that notes the gradients of each step, or kills itself at the second step.
PROCESS = f"""
import os, signal, sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
import torch, eval_ppl, lococo, train
eval_ppl.CACHE, clip, steps = Path("cache"), torch.nn.utils.clip_grad_norm_, []

def note(parameters, most):
    steps.append(torch.cat([lococo.whole(p.grad).flatten() for p in parameters]))
    torch.save(steps, f"gradients-{{os.environ.get('RANK', 0)}}.pt")
    if len(steps) == 2 and os.environ.get("RANK") == os.environ.get("DIES", "none"):
        os.kill(os.getpid(), getattr(signal, os.environ["OF"]))
    return clip(parameters, most)

models, shard = [], train.shard
torch.nn.utils.clip_grad_norm_, train.shard = note, lambda whole, args: models.append(whole) or shard(whole, args)
torch.set_num_threads(1)
program = {{"train.py": train, "eval_ppl.py": eval_ppl}}[sys.argv[1]]
sys.argv = sys.argv[1:]
eval_ppl.exit_on_user_error(program.main)
for whole in models:
    parts = [p for module in (whole.model, whole.compressors) for p in module.parameters()]
    Path("local" + os.environ["RANK"]).write_text(str(sum(p.to_local().numel() for p in parts)))
"""


@pytest.fixture
def start(own_folders):
    """Run a program in so many processes."""
    Path("process.py").write_text(PROCESS)

    def call(number: int, words: str, **environment):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(number)]
        command = [sys.executable, *(launch if number > 1 else []), "process.py", *words.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environment})

    return call


def test_processes_share_out_a_step_and_an_evaluation(start):
    """Batches of 4 over 1, 2 and 3 processes: the same gradients, losses, perplexities, one set of files."""
    words = "train.py --data text --mem 16 --segment 16 --seq 64 --batch 4 --micro-batch 2 --steps 2 --device cpu --out"
    gradients, printed, logs = {}, {}, {}
    for number in (1, 2, 3):
        done = start(number, f"{words} run{number}")
        assert done.returncode == 0, done.stderr
        gradients[number] = [torch.load(f"gradients-{rank}.pt") for rank in range(number)]
        printed[number] = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
        logs[number] = [json.loads(line)["loss"] for line in Path(f"run{number}/log.jsonl").read_text().splitlines()]
        assert sorted(os.listdir(f"run{number}")) == ["adapter.safetensors", "log.jsonl"]
        assert done.stderr.count("training:") > 0 and done.stdout.count("adapter:") == 1
    for number in (2, 3):
        assert printed[number] == printed[1] and logs[number] == pytest.approx(logs[1], rel=1e-5)
        for own in gradients[number]:
            assert torch.allclose(own[0], gradients[1][0][0], atol=1e-6)

    words = "eval_ppl.py run1 --data text --lengths 64 96 --documents 7 --by-position --micro-batch 2 --json"
    for number in (1, 2):
        done = start(number, f"{words} table{number}")
        assert done.returncode == 0, done.stderr
    one, two = (json.loads(Path(f"table{number}").read_text()) for number in (1, 2))
    assert one["by_position"] == two["by_position"]
    assert [row["perplexity"] for row in one["rows"]] == [row["perplexity"] for row in two["rows"]]


def test_a_model_in_parts_trains_as_a_whole_one(start):
    """Half of every tensor in each of two processes, asked to stop on the way: the same gradients, run and file."""
    words = "train.py --data text --mem 16 --segment 16 --seq 64 --batch 4 --micro-batch 1 --bptt 2 --steps 4"
    words += " --device cpu --normalise sum"  # with a step that is computed again in the backward pass
    assert start(1, f"{words} --out run1 --recompute").returncode == 0
    expected = torch.load("gradients-0.pt")[0]
    done = start(2, f"{words} --out run2 --recompute --shard", DIES="1", OF="SIGTERM")
    assert done.returncode != 0 and "torchrun --nproc_per_node=2 train.py --resume run2" in done.stderr, done.stderr
    assert read_file(Path("run2/state.safetensors"), "state")[1]["step"] == 2
    assert torch.allclose(torch.load("gradients-1.pt")[0], expected, atol=1e-6)
    done = start(2, "train.py --device cpu --resume run2")
    assert done.returncode == 0, done.stderr
    losses, tensors, metadata = [], [], []
    for number in (1, 2):
        losses.append([json.loads(line)["loss"] for line in Path(f"run{number}/log.jsonl").read_text().splitlines()])
        with safe_open(f"run{number}/adapter.safetensors", "pt") as file:
            tensors.append({name: file.get_tensor(name) for name in file.keys()})
            metadata.append({**json.loads(file.metadata()["lococo"]), "sha256": ""})
    assert losses[1] == pytest.approx(losses[0], rel=1e-4) and metadata[0] == metadata[1]
    assert tensors[0].keys() == tensors[1].keys()
    for name, t in tensors[0].items():  # a bias is the same for a whole softmax: its gradient is rounding
        assert torch.allclose(t, tensors[1][name], atol=1e-3) or name.endswith("convs.0.bias"), name
    trained = sum(t.numel() for t in tensors[0].values()) - 2048 * 128 - 9 * 128
    parts = [int(Path(f"local{rank}").read_text()) for rank in (0, 1)]
    assert sum(parts) == 1_315_968 + trained and abs(parts[0] - parts[1]) < 0.01 * sum(parts)
    done = start(2, f"{words} --out run1")
    assert done.stderr.count("train.py: --out run1 holds another run") == 1 and "RuntimeError" not in done.stderr


def test_a_model_in_parts_needs_as_many_sequences_in_each_process():
    args = argparse.Namespace(batch=6, micro_batch=2)
    check_shard(args, 3)
    with pytest.raises(UserError, match="--batch 6 must be a multiple of --micro-batch 2 times the 2 processes"):
        check_shard(args, 2)
    with pytest.raises(UserError, match="start several with torchrun"):
        check_shard(args, 1)


def test_a_process_that_dies_ends_all_of_them_with_an_error(start):
    words = "train.py --data text --mem 16 --segment 16 --seq 64 --batch 4 --steps 100000 --device cpu --out run"
    done = start(2, words, DIES="1", OF="SIGKILL")  # within the minute that `start` allows
    assert done.returncode != 0 and "SIGKILL" in done.stderr
    assert not Path("run/adapter.safetensors").exists()
