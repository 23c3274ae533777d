"""train.py as a user runs it: what it prints, writes and refuses."""

import json
import math
import os
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import cells, nats_by_hand
from safetensors.torch import load_file

import eval_ppl
import train
from lococo import segment_losses
from model import load_llama
from support.programs.adapter import load_adapter
from support.command_line import TINY
from support.programs.settings import untrained
from support.text import part_of, pieces, token_streams

LINE = "--data text --mem 16 --segment 16 --seq 96 --lora-rank 8 --batch 2 --micro-batch 1 --steps 2"
LINE += " --out run"


@pytest.mark.parametrize("words", [
    "lococo-code --lora-rank 0", "lococo+h2o --dtype bfloat16", "lococo --dtype float16"])
def test_methods_train_and_are_read_back(run, tokenizer, words):
    """Two steps reach each tensor: AdamW has a first moment of it. With rank 0, the paper's
    inference mode, they are the compressors' alone. What trains is float32 in any case. The table
    has what the adapter and H2O reach."""
    code, out, err = run(train, f"{LINE} --score-tokens 96 --method {words}")
    method, half = words.split()[0], "float16" in words
    assert code == 0 and "; 1 to score" in out, err
    assert sorted(os.listdir("run")) == ["adapter.safetensors", "log.jsonl", "state.safetensors"]
    tensors, state = (load_file(f"run/{kind}.safetensors") for kind in ("adapter", "state"))
    texts = tensors.pop("fingerprints of the texts")
    assert len(texts) == len(texts.unique()) >= 50  # at least one of each document that trained
    for name, t in tensors.items():
        assert t.dtype == torch.float32 and torch.equal(t, state[f"value {name}"])
        assert state[f"exp_avg {name}"].any() and len(state) == 4 * len(tensors)
    found = {part: any(part in n for n in tensors) for part in ("compr", "lora", "embed", "norm")}
    assert found == dict.fromkeys(found, "rank" not in words) | {"compr": True}
    streams = token_streams([Path("text")], tokenizer)
    rows = pieces(streams["held-out"], tokenizer.bos, 96, 1)
    h2o = untrained(load_llama(TINY), "h2o", 16, 16)
    models = {"base, h2o M=16": h2o}
    models[f"{method}, after training"] = load_adapter(Path("run"), load_llama(TINY))
    for name, adapted in models.items():
        expected = math.exp(nats_by_hand(adapted, rows).mean())
        assert float(cells(out)[name][0]) == pytest.approx(expected, abs=0.2 if half else 6e-4)


def test_the_table_has_what_is_recalled(run):
    """As eval_ppl.py measures it on the same text."""
    code, out, err = run(train, f"{LINE} --seq 300 --score-tokens 300 --method h2o --facts 2")
    assert code == 0, err
    trained = cells(out)["h2o, after training"][-1]
    line = "run --recall --data text --part held-out --lengths 300 --documents 1"
    assert trained == cells(run(eval_ppl, line)[1])["told ago 32-300"][-1] != "-"


@pytest.mark.parametrize("renamed, first_row", [("own.jsonl", 2), ("later.jsonl", 0)])
def test_what_trained_is_not_scored_under_another_name(run, renamed, first_row):
    """Rows that are removed, or a file that is renamed, give documents other names, so that others
    are held out. Those that trained are left out."""
    rows = [json.dumps({"text": f"{n} {'some words ' * 30}"}) for n in range(60)]
    Path("own.jsonl").write_text("\n".join(rows))
    words = "--data own.jsonl --mem 16 --seq 64 --steps 1 --batch 1 --score-tokens 0 --facts 0"
    assert run(train, f"{words} --out run")[0] == 0
    trained = {n for n in range(60) if part_of(f"own.jsonl:{n + 1}") == "training"}
    Path("own.jsonl").unlink()
    Path(renamed).write_text("\n".join(rows[first_row:]))
    held_out = {n for n in range(first_row, 60)
                if part_of(f"{renamed}:{n + 1 - first_row}") == "held-out"}
    left = held_out - trained
    for words in ("", "--part held-out"):
        line = f"run --data {renamed} --lengths 64 --documents 99 {words}"
        code, out, err = run(eval_ppl, line)
        assert code == 0 and left and f"pieces of texts (held-out): {len(left)} of 64" in out, err


def parsed(words: str) -> train.TrainConfig:
    return train.parse(words.split())[0]


def test_the_papers_recipes():
    paper, inference = parsed("--recipe paper"), parsed("--recipe paper-inference")
    assert (paper.method, paper.mem, paper.segment, paper.batch) == ("lococo+h2o", 512, 512, 128)
    assert (paper.lr, paper.conv_lr, paper.bptt, paper.facts) == (5e-5, 5e-2, 1, 0)
    memory = paper.settings
    assert (memory.kernel, memory.compressor, memory.lora_rank) == (21, "paper", 8)
    for recipe, length in ((paper, 8192), (inference, 4096)):  # section 3.3: 104 million tokens
        assert recipe.seq == length
        assert recipe.steps * recipe.batch * recipe.seq == pytest.approx(104e6, rel=0.01)
    assert (inference.steps, inference.lora_rank) == (200, 0)  # section 4.1


def test_facts_that_are_scored_are_not_those_that_train(run, tokenizer, monkeypatch):
    """Their names are of two parts, which have none in common."""
    texts = {"training": "", "held-out": ""}

    def noted(tell, part):
        def call(*args):
            told, ago = tell(*args)
            texts[part] += tokenizer.decode(told.flatten().tolist())
            return told, ago

        return call

    monkeypatch.setattr(train, "tell", noted(train.tell, "training"))
    monkeypatch.setattr(train, "tell_all", noted(train.tell_all, "held-out"))
    code, _, err = run(train, f"{LINE} --score-tokens 96 --facts 8")
    assert code == 0, err
    for part, text in texts.items():
        names = re.findall(r"@( \w+ \w+) =", text)
        assert names and all(part_of(name.replace(" ", "\u2581")) == part for name in names)


@pytest.mark.parametrize("text, seq, reason", [
    ("words without an end " * 300, 64, "the texts have no line break"),
    ("a line\n" * 300, 5, "a fact has 6 tokens, which is more than a text of 5"),
    ("a line\n" * 300, 64, "")])
def test_facts_that_cannot_be_written(run, text, seq, reason):
    Path("flat.txt").write_text(text)
    words = f"--data flat.txt --method h2o --lora-rank 8 --mem 4 --seq {seq} --facts 2 --steps 1"
    Path("held.txt").write_text(f"other {text}")
    code, _, err = run(train, f"{words} --batch 1 --held-out held.txt --score-tokens 64 --out run")
    assert code == 0 and err.count(f"note: no facts are written: {reason}") == bool(reason), err


def test_what_the_user_says_wins_over_a_recipe():
    """T is 512 in the paper, whatever M is. In ours it is M."""
    assert parsed("").recipe == "inference"
    assert parsed("--recipe paper --mem 128").segment == 512
    assert parsed("--mem 64").segment == 64
    given = asdict(parsed("--segment 7 --lr 0.5 --conv-lr 0.1 --method lococo")).items()
    assert given >= dict(segment=7, lr=0.5, conv_lr=0.1, method="lococo").items()


def test_recompute_gives_the_same_losses_and_gradients_from_less_memory(run, monkeypatch):
    """What is kept for the backward pass of a whole sequence, with its compressions."""
    found = []

    def measure(setup, adapted, *_):
        kept = {}  # bytes of what is saved, by address

        def pack(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        segment = setup.config.segment
        pieces = segment_losses(adapted.model, setup.draw(0)[None], adapted.cache(), segment)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            losses = torch.cat([nats for nats, _ in pieces], dim=1)
        losses.sum().backward()
        found.append(sum(kept.values()))
        found.append([losses, *(p.grad for p in adapted.trained().values())])

    monkeypatch.setattr(train, "train", measure)
    for flag in ("", "--recompute"):
        words = f"--method lococo --score-tokens 0 --out run{flag} {flag}"
        assert run(train, f"{LINE} {words}")[0] == 0
    usual_bytes, usual, kept_bytes, kept = found
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(usual, kept, strict=True))
    assert kept_bytes < 0.4 * usual_bytes, (kept_bytes, usual_bytes)
