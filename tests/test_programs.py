"""generate.py, eval_ppl.py and train.py as a user runs them: what they print, write and refuse."""

import io
import json
import math
import os
import re
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from subprocess import PIPE, Popen
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import FULL, H2O, greedy_by_hand, names_in, nats_by_hand, read_by_hand, remembered
from safetensors.torch import load_file, save_file

import eval_ppl
import generate
import train
from generate import as_text, decode, sample
from lococo import COMPRESSORS, METHODS, AdaptedLlama, Settings, identity, load_adapter
from lococo import segment_losses, settings_for, untrained
from model import load_llama
from support.command_line import HERE, TINY, run_program
from support.facts import tell
from support.files import read_file, write_file
from support.text import PARTS, long_documents, token_streams

LINES = {
    train: "--data text --mem 16 --segment 16 --seq 96 --batch 2 --micro-batch 1 --steps 2 "
           "--out run",
    generate: "--method h2o --mem 16 --prompt text/0.py",
    eval_ppl: "--method h2o --mem 16 --data text --lengths 64",
}
SINKS = "--method h2o --mem 16 --sinks 4"
WINDOW = Settings("streaming", 16, 96, sinks=4, recent=12, positions="slots", lora_rank=0)
MIXED = Settings("lococo+window", 16, 96, 4, 0, 2, 10, "slots", "facts", 3)
H2O_BY_SLOT = Settings("h2o", 16, 96, heavy=8, recent=8, positions="slots", lora_rank=0)
WINDOW_ROW = "base, streaming M=16"
H2O_ROW = "base, h2o M=16 positions=slots"
ENTRY = 2 * 4 * 2 * 64 * 4  # bytes of a key and a value in 4 layers of 2 heads of 64 floats


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A good adapter, each of whose tensors matters, and things that are wrong."""
    torch.manual_seed(0)
    adapted, folder = AdaptedLlama(load_llama(TINY), MIXED), tmp_path_factory.mktemp("stock")
    tensors = {n: p + 0.02 * torch.randn_like(p) for n, p in adapted.trained().items()}
    own = identity(adapted)
    newer = own | {"settings": own["settings"] | {"colour": 1}}
    for name, about in (("adapter", own), ("newer", newer), ("damaged", own)):
        (folder / name).mkdir()
        file = folder / name / "adapter.safetensors"
        write_file(file, tensors, **about)
    file.write_bytes(file.read_bytes()[:-9] + b"\x99" * 9)
    for name, factor in (("other-base", 1.1), ("nan-base", math.nan)):
        shutil.copytree(TINY, folder / name)
        weights = load_file(TINY / "model.safetensors")
        weights["model.layers.2.mlp.up_proj.weight"] *= factor
        save_file(weights, folder / name / "model.safetensors")
    for name in ("latin", "latin.html"):
        (folder / name).write_bytes(b"caf\xe9 au lait")
    return folder


@pytest.fixture(autouse=True)
def stock_at_hand(own_folders, stock):
    for thing in stock.iterdir():
        Path(thing.name).symlink_to(thing)


def tiny(settings: Settings | None) -> AdaptedLlama:
    """The embedded base with a method without training, or with the good adapter."""
    base = load_llama(TINY)
    return AdaptedLlama(base, settings) if settings else load_adapter(Path("adapter"), base)


def cells(out: str) -> dict[str, list[str]]:
    """Of a printed table, the columns of each row by its name."""
    rows = [re.split(" {2,}", line) for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("words", [*METHODS, "lococo --lora-rank 0",
                                   "lococo+h2o --dtype bfloat16 --compressor paper"])  # fmt: skip
def test_every_method_trains_and_is_read_back(run, tokenizer, words):
    """Two steps reach each tensor: AdamW has a first moment of it. With rank 0, the paper's
    inference mode, they are the compressors' alone. What trains is float32 in any case."""
    code, out, err = run(train, f"{LINES[train]} --score-tokens 96 --method {words}")
    method, half = words.split()[0], "--dtype bfloat16" * ("bfloat16" in words)
    assert code == 0 and "1 document to score" in out, err
    assert sorted(os.listdir("run")) == ["adapter.safetensors", "log.jsonl", "state.safetensors"]
    tensors, state = (load_file(f"run/{kind}.safetensors") for kind in ("adapter", "state"))
    for name, t in tensors.items():  # after training rows of facts are made sharper
        factor = 16 if "compressors" in name else 1
        assert t.dtype == torch.float32 and torch.equal(t, factor * state[f"value {name}"])
        assert state[f"exp_avg {name}"].any() and len(state) == 4 * len(tensors)
    found = {part: any(part in n for n in tensors) for part in ("compr", "lora", "embed", "norm")}
    assert found == dict.fromkeys(found, "rank" not in words) | {"compr": "lococo" in method}
    code, _, err = run(generate, f"--prompt text/0.py --adapter run --max-new-tokens 3 {half}")
    assert code == 0 and ("all entries;" if method in ("full", "longlora") else "16 slots;") in err
    streams = token_streams([Path("text")], tokenizer)
    rows = long_documents(streams["held-out"], tokenizer.bos, 96, 1)
    after = load_adapter(Path("run"), load_llama(TINY))
    models = {WINDOW_ROW: tiny(WINDOW), H2O_ROW: tiny(H2O_BY_SLOT)}
    for name, adapted in (models | {f"{method}, after training": after}).items():
        expected = math.exp(nats_by_hand(adapted, rows).mean())
        assert float(cells(out)[name][0]) == pytest.approx(expected, abs=0.2 if half else 6e-4)


def test_recipes(monkeypatch):
    """The paper's for any model but tiny/; what the user says wins."""

    def parsed(words):
        monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
        return asdict(train.parse()[0])

    for words, name in (("--model other", "paper"), ("", "embedded"),
                        ("--model other --recipe paper-inference", "paper-inference")):  # fmt: skip
        recipe = {key: n for key, n in train.RECIPES[name].items() if n is not None}
        defaults = asdict(train.TrainConfig(**recipe))
        same = defaults.keys() - {"model", "segment", "batch", "out", "recipe"}
        found = parsed(words)
        assert found["recipe"] == name and all(found[key] == defaults[key] for key in same)
    paper, inference = (
        train.TrainConfig(**train.RECIPES[name]) for name in ("paper", "paper-inference")
    )
    assert (paper.method, paper.mem, paper.kernel, paper.batch) == ("lococo+h2o", 512, 21, 128)
    assert (paper.lr, paper.conv_lr, paper.compressor, paper.bptt) == (5e-5, 5e-2, "paper", 1)
    assert (paper.seq, inference.seq, paper.facts) == (8192, 4096, 0)
    for recipe in (paper, inference):  # section 3.3: 104 million tokens
        assert recipe.steps * recipe.batch * recipe.seq == pytest.approx(104e6, rel=0.01)
    assert (inference.steps, inference.lora_rank, paper.lora_rank) == (200, 0, 8)  # section 4.1
    batches = [parsed(words)["batch"] for words in ("", "--seq 1000", "--seq 9999", "--batch 7")]
    assert batches == [4096 // 2048, 4, 1, 7]
    # T is 512 in the paper, whatever M is (sections 4.1 and 5.1). In ours it is M.
    recipes = ("--model other", "--model other --recipe paper-inference",
               "--model other --recipe inference", "")  # fmt: skip
    segments = [parsed(f"{words} --mem 128")["segment"] for words in recipes]
    assert segments == [512, 512, 128, 128]
    given = parsed("--kernel 5 --segment 7 --lr 0.5 --compressor paper").items()
    assert given >= dict(kernel=5, segment=7, lr=0.5, compressor="paper").items()


def test_a_text_that_is_all_held_out_is_trained_on_and_not_scored(run):
    Path("1.txt").write_text("one lone file of text\n" * 300)  # a held-out name, by its checksum
    code, out, err = run(train, f"{LINES[train]} --data 1.txt")
    assert code == 0 and "0 documents to score" in out, err
    assert "1 of 64 tokens" in run(eval_ppl, f"{LINES[eval_ppl]} --data 1.txt")[1]


@pytest.mark.parametrize("words, parts", [
    ("--held-out own.jsonl", [*PARTS]), ("--data 1.txt", [*PARTS]), ("", None)])
def test_a_text_is_scored_whole_if_a_run_held_nothing_out(run, words, parts):
    """eval_ppl.py knows the parts that a run was trained on by its adapter."""
    Path("1.txt").write_text("one lone file of text\n" * 300)
    rows = [json.dumps({"text": f"{n} {'some words ' * 60}"}) for n in range(20)]
    Path("own.jsonl").write_text("\n".join(rows))
    code, _, err = run(train, f"{LINES[train]} --score-tokens 0 --steps 1 {words}")
    assert code == 0 and read_file(Path("run/adapter.safetensors"))[1].get("parts") == parts, err
    code, out, err = run(eval_ppl, "run --data own.jsonl --lengths 64 --documents 99")
    whole = parts is not None
    scored = f"(all parts): {len(rows)}" if whole else "(held-out): 2"
    assert code == 0 and f"documents {scored} of 64 tokens" in out, err
    assert ("run: it trained on all of its --data" in err) == whole
    assert ": 20 of 64 tokens" in run(eval_ppl, "--data own.jsonl --lengths 64 --documents 99")[1]


def test_texts_that_are_too_short_to_score_are_counted(run):
    rows = [json.dumps({"text": f"{n} {'some words ' * 60 * (n != 1)}"}) for n in range(3)]
    Path("own.jsonl").write_text("\n".join(rows))
    words = f"{LINES[train]} --score-tokens 960 --steps 1 --held-out own.jsonl"
    assert "2 documents to score, and 1 with fewer than --seq 96 tokens\n" in run(train, words)[1]


def test_a_text_that_would_train_is_not_held_out(run):
    words = f"{LINES[train]} --held-out text/1.py"
    code, _, err = run(train, words)
    assert code == 2 and "--held-out text/1.py: it is among the texts that train" in err
    code, out, _ = run(train, f"{LINES[train]} --data text/2.py text/2.py --steps 1")
    assert code == 0 and "text: 1 document (" in out


def test_a_text_for_choosing_is_trained_on_and_another_one_is_scored(run, tokenizer):
    """If no name falls into the training part, and another one into the part held out."""
    names = {}
    for file in sorted(Path("text").iterdir()):
        streams = token_streams([file], tokenizer)
        names |= {part: (file, len(ids)) for part, ids in streams.items() if len(ids)}
    (chosen, length), (scored, _) = names["choosing"], names["held-out"]
    code, out, err = run(train, f"{LINES[train]} --data {chosen} {scored} --score-tokens 96")
    assert code == 0 and f"1 document ({length:,} tokens) to train on (no name falls" in out, err
    assert "1 document to score" in out and f"{MIXED.method}, after training" in out


def test_the_smallest_window_has_four_slots(run):
    """It stands beside a memory of two."""
    words = f"{LINES[train]} --method streaming --sinks 2 --recent 0 --score-tokens 96"
    code, out, err = run(train, words)
    assert code == 0 and "base, streaming M=4 T=16" in out and "base, h2o M=4" in out, err


def test_what_a_run_says_at_its_start(run, tokenizer, monkeypatch):
    """What it trains on, where the other documents are, and what it sets."""
    code, out, err = run(train, f"{LINES[train]} --score-tokens 200 --conv-lr 0.5")
    assert code == 0, err
    counts = []
    for part, purpose in (("training", "to train on"), ("held-out", "held out"),
                          ("choosing", "for choosing")):  # fmt: skip
        ids = token_streams([Path("text")], tokenizer)[part]
        counts.append(f"{(ids == tokenizer.bos).sum()} documents ({len(ids):,} tokens) {purpose}")
    assert f"text: {', '.join(counts)}\n2 documents to score\n" in out and "run: run\n" in out
    shown = cells(out)
    for name, cell in {
        "": "this run", "method": "lococo+window", "slots M, segment T": "16, 16",
        "tokens of a sequence L": "96", "compressor": "facts, 3 taps", "convolutions' rate": "0.5",
        "text": "8 facts each, weight 20", "LoRA": "rank 8, rate 0.002"}.items():  # fmt: skip
        assert shown[name] == [cell]
    assert shown["steps x sequences"] == ["2 x 2, 1 at once"]
    assert "slots: 4 sinks, 4 merged, 8 recent; positions: slots\n" in out
    assert "these are" not in out and "warning" not in out
    fewer = f"{LINES[train]} --out fewer --score-tokens 0 --method h2o"
    fewer += " --heavy 4 --recent 4"
    assert "these are 8 slots, and not --mem 16\n" in run(train, fewer)[1]

    words = f"{LINES[train]} --score-tokens 200 --seq 192 --steps 1"
    shorter = Path("text/0.py").read_text()[:300]
    for file in Path("text").iterdir():
        file.write_text(shorter)
    code, out, _ = run(train, f"{words} --out long")
    reason = "no document that is held out has --seq 192 tokens"
    assert code == 0
    assert f"0 documents to score: {reason}; others can be named by --held-out" in out
    Path("short.py").write_text(shorter)
    code, _, err = run(train, f"{words} --out own --held-out short.py")
    assert code == 2 and "short.py: " in err and f"{reason}; give longer ones" in err
    code, out, _ = run(
        train, f"{words} --out own --held-out short.py --score-tokens 0"
    )
    assert code == 0 and "1 document (" in out and "tokens) held out\n0 documents" in out


def test_a_real_model_without_a_text_is_told_what_it_trains_on(run, monkeypatch):
    """Python's library is for tiny/. Here a few files stand for it."""
    monkeypatch.setattr("support.text.find_files", lambda paths: sorted(Path("text").iterdir()))
    asked = "no --data: it trains on Python's standard library; name your own text by --data\n"
    shutil.copytree(TINY, "base")
    words = "--mem 16 --segment 16 --seq 96 --batch 1 --steps 1 --score-tokens 0"
    for flags, said in (("", False), ("--model base", True), ("--model base --data text", False)):
        code, out, err = run(train, f"{words} {flags} --out run{len(flags)}")
        assert code == 0 and (asked in out) == said, err
        code, _, err = run(eval_ppl, f"{flags} --method h2o --mem 16 --lengths 64 --documents 1")
        assert code == 0 and ("no --data: it scores Python's standard library" in err) == said, err


@pytest.mark.parametrize("flags, noted", [
    ("h2o full --mem 16 --lengths 33 20 34", "33 20"), ("h2o --mem 16 --lengths 34", None),
    ("h2o --mem 16 --lengths 33 --budgets 24 16 16 8", None),
])  # fmt: skip
def test_scores_without_a_compression_have_a_note(run, flags, noted):
    """The last token of a document is only a target, and does not enter. The full cache never
    compresses."""
    code, _, err = run(eval_ppl, f"--data text --method {flags}")
    notes = re.findall("note: (.*): up to M .* entries nothing is compressed", err)
    assert code == 0 and notes == ([f"base, h2o M=16, --lengths {noted}"] if noted else []), err


def test_ctrl_c_before_the_first_step_and_after_the_last(run, monkeypatch):
    """What is lost, and how to go on."""
    usual, calls = train.score, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) in (2, 6):  # of a run that is scored four times, then of another
            raise KeyboardInterrupt
        return usual(*args)

    monkeypatch.setattr(train, "score", interrupted)
    code, _, err = run(train, f"{LINES[train]} --score-tokens 100")
    assert code == 130 and err.splitlines()[-1].startswith("stopped before the first step: no")
    code, _, err = run(train, "--resume run")
    assert code == 2 and "this run has not begun; give its command again" in err
    Path("run/state.safetensors.0af1.part").touch()  # as if the power had gone at the first state
    code, _, err = run(train, f"{LINES[train]} --score-tokens 100")
    assert code == 130 and f"to go on: python {train.__file__} --resume run" in err.splitlines()[-1]
    code, out, err = run(train, "--resume run")
    assert code == 0 and "lococo+window, after training" in out, err


def test_a_table_has_one_set_of_documents(run, monkeypatch):
    """A run that is resumed with more of them scores its baselines again."""
    code, out, err = run(train, f"{LINES[train]} --score-tokens 100")
    assert code == 0 and "1 held-out document " in out, err
    code, out, err = run(train, "--resume run --score-tokens 200")
    assert code == 0 and "2 held-out documents" in out, err
    assert "all steps are done; the adapter is written and scored again" in out
    assert WINDOW_ROW in cells(out) and "lococo+window, after training" in cells(out)
    assert "lococo+window, before training" not in cells(out)  # these parameters are gone
    with monkeypatch.context() as patch:
        patch.delitem(COMPRESSORS, "facts")
        code, _, err = run(train, "--resume run")
        assert code == 2 and "run: its compressor 'facts' is unknown" in err
    again = cells(run(train, "--resume run --facts 0")[1])  # the documents of the state
    assert again["1 held-out document"] == ["perplexity"] and len(again[H2O_ROW]) == 1
    other = run(train, f"{LINES[train]} --score-tokens 200 --out other")[1]
    for name in (WINDOW_ROW, H2O_ROW):
        assert cells(other)[name] == cells(out)[name]


def test_help_says_what_a_recipe_sets(run):
    table = cells(run(train, "--help")[1])
    assert table[""] == [*train.RECIPES]
    paper = {
        "method": "lococo+h2o", "slots M, segment T": "512, 512",
        "tokens of a sequence L": "8,192", "compressor": "paper, 21 taps",
        "steps x sequences": "100 x 128, 1 at once"}  # fmt: skip
    for name, cell in paper.items():
        assert table[name][0] == cell
    config = train.TrainConfig(**train.RECIPES["embedded"])
    assert table["text"][3] == f"{config.facts} facts each, weight {config.answer_weight:g}"
    assert table["segments of a gradient"][3] == str(config.bptt)


def test_the_table_and_the_loss_by_position(run, tokenizer):
    """The counts that are given are those of the methods: they do not concern the full cache. A
    length is scored once, and so are a method and a run, however they are named."""
    words = f"{Path('adapter').resolve()} --method streaming h2o h2o --mem 16 --sinks 4"
    words += " --data text --part training --documents 3 --lengths 64 300 64"
    words += " --by-position --json figures.json"
    code, out, err = run(eval_ppl, f"adapter {words}")
    figures = json.loads(Path("figures.json").read_text())
    assert code == 0 and "documents (training): 3 of 64 tokens, 3 of 300 tokens" in out, err
    work = re.findall(r"4 models will score ([\d,]+) tokens each in about \d+ minutes?;", err)
    assert work == [f"{3 * (64 + 300):,}"]
    settings = {"base, full": FULL, "base, streaming M=16": WINDOW,
                "base, h2o M=16 sinks=4 recent=4": H2O}  # what H2O has not by itself
    ids = token_streams([Path("text")], tokenizer)["training"]
    texts = [long_documents(ids, tokenizer.bos, L, 3) for L in (64, 300)]
    table, near, far = cells(out), [], []
    for name in (*settings, "adapter"):
        short, long = [nats_by_hand(tiny(settings.get(name)), rows) for rows in texts]
        slots, nbytes, *printed = " ".join(table[name]).replace(",", "").split()
        expected = [math.exp(short.mean()), math.exp(long.mean())]
        assert [float(value) for value in printed] == pytest.approx(expected, abs=6e-4)
        written = figures["methods"][name]["perplexity"].values()
        assert [*written] == pytest.approx(expected, abs=1e-4)
        slots_and_held = ("-", 299) if name == "base, full" else ("16", 16 + 299 % 16)
        assert (slots, int(nbytes) // ENTRY) == slots_and_held
        near.append(long[:, :32].mean())  # a column for each token but the first
        far.append(long[:, 32:].mean())
    for kind, expected in (("0-32", [96, *near]), ("32-300", [801, *far])):
        found = [float(word) for word in table[f"position {kind}"]]
        assert found == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("flags, remedy", [
    ("", ""), ("--method streaming --mem 128", ""),  # positions end at M + T = 256
    # M + T = 2048, the context has 1,024 tokens.
    ("--method streaming --mem 1024", "take a smaller --mem"),
    ("--method full", "--method h2o --mem 512 --positions slots keeps them small"),
    ("--method h2o --mem 128", "--positions slots keeps them small"),
    ("--method h2o --mem 128 --budgets 64 192 64 192", "take --positions slots instead"),
    ("--method h2o --mem 128 --positions slots", ""),
])  # fmt: skip
def test_a_warning_if_positions_pass_the_context(run, flags, remedy):
    """The prompt has about 2,400 tokens."""
    code, _, err = run(generate, f"--prompt {HERE}/assets/prompt.txt --max-new-tokens 1 {flags}")
    assert code == 0 and ("warning" in err) == bool(remedy), err
    assert not remedy or f"and the memory is for 1,024; {remedy}" in err


@pytest.mark.parametrize("changes, ending", [
    ({}, ""), ({"heavy": 4, "forget": 0.5}, " heavy=4 recent=12 forget=0.5"),
    ({"positions": "slots"}, " positions=slots"), ({"budgets": [12, 20]}, " budgets")])
def test_a_row_is_named_by_all_that_differs(changes, ending):
    name = eval_ppl.name_of(settings_for("h2o", 16, 16, 96, **changes))
    assert name == f"base, h2o M=16{ending}"


def test_a_score_beyond_the_context_has_a_warning(run):
    """H2O has the positions of the text here. About full attention there is a note."""
    words = f"--method h2o --mem 128 --data {HERE}/assets/prompt.txt --lengths 2048"
    code, _, err = run(eval_ppl, words)
    assert code == 0 and err.count("warning") == 1
    assert "warning: h2o: positions may reach 2,048, and the memory is for 1,024" in err
    note = "note: the base was pretrained on 1,024 tokens; the row `base, full` goes beyond that\n"
    assert note in err
    assert "note: " not in run(eval_ppl, words.replace("2048", "1024"))[2]


def test_recompute_gives_the_same_losses_and_gradients_from_less_memory(run, monkeypatch):
    """What is kept for the backward pass of a whole sequence, with its compressions."""
    found = []

    def measure(setup, adapted, *_):
        losses, model, config = [], adapted.model, setup.config
        first, _ = train.draw_sequence(config, setup.text.ids, setup.tokenizer, 0)
        tokens, segment = first[None], config.segment
        pieces = segment_losses(model, tokens, adapted.cache(), segment, bptt=99)
        kept = remembered(lambda: losses.extend(nats for nats, _ in pieces))
        losses[0].sum().backward()
        found.append(sum(kept.values()))
        found.append([losses[0], *(p.grad for p in adapted.trained().values())])

    monkeypatch.setattr(train, "train", measure)
    for flag in ("", "--recompute"):
        words = f"--method lococo --score-tokens 0 --out run{flag} {flag}"
        assert run(train, f"{LINES[train]} {words}")[0] == 0
    usual_bytes, usual, kept_bytes, kept = found
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-4) for a, b in zip(usual, kept, strict=True))
    assert kept_bytes < 0.4 * usual_bytes, (kept_bytes, usual_bytes)


def test_recall_in_the_tables_of_both_programs(run, tokenizer, monkeypatch):
    """The share of answers that are the likeliest word, beside a window and H2O of the size of each
    memory; and what is told for training has other names."""
    usual, draws = train.gradients, []
    watched = Mock(side_effect=lambda *args: draws.append(args[1]) or usual(*args))
    monkeypatch.setattr(train, "gradients", watched)
    words = "--data text --mem 64 --seq 300 --facts 3 --steps 1 --batch 1 --micro-batch 1 --out run"
    trained = cells(run(train, f"{words} --score-tokens 900")[1])
    words = "run adapter --recall --data text --lengths 64 300 --documents 3"
    table = cells(run(eval_ppl, words)[1])
    names = ["base, full", "base, streaming M=64", "base, h2o M=64 positions=slots",
             "base, streaming M=16", H2O_ROW, "run", "adapter"]  # fmt: skip
    assert list(table)[1:8] == names
    assert table["recalled; by chance 1 in 220"] == ["answers", *names]
    ids = token_streams([Path("text")], tokenizer)["held-out"]
    texts = long_documents(ids, tokenizer.bos, 300, 3)
    rows = [tell(text, 8, "held-out", 0, i, tokenizer) for i, text in enumerate(texts)]
    models = {"base, full": tiny(FULL), "run": load_adapter(Path("run"), load_llama(TINY))}
    models["base, streaming M=64"] = untrained(load_llama(TINY), "streaming", 64, 64)
    for name, adapted in models.items():
        near, far = [], []
        for told, ago in rows:
            likeliest = read_by_hand(adapted, told.tolist()).argmax(dim=-1)
            for t in ago.nonzero()[:, 0].tolist():
                (near if ago[t] <= 64 + 64 else far).append(float(likeliest[t - 1] == told[t]))
        shares = [f"{np.mean(hits):.3f}" for hits in (near, far)]
        for kind, hits, share in zip(("0-128", "128-300"), (near, far), shares):
            row = table[f"told ago {kind}"]
            assert (row[0], row[1 + names.index(name)]) == (str(len(hits)), share)
        # The window has one name in both programs.
        row = {"run": "lococo+window, after training", "base, full": None}.get(name, name)
        assert row is None or trained[row][1:] == shares
        assert row or "0.000" not in shares  # full attention has some
    assert trained[f"{len(rows)} held-out documents"][1:] == ["recall 0-128", "recall 128-300"]
    drawn = [names_in(draws[0](i)[0], tokenizer) for i in range(9)]
    assert set(map(len, drawn)) == {3}
    assert not set.union(*drawn) & set.union(*[names_in(told, tokenizer) for told, _ in rows])


def test_the_form_of_facts_reaches_all_that_is_scored(run, monkeypatch):
    forms = []
    for name in ("tell_all", "fact_tokens"):

        def watched(*args, usual=getattr(eval_ppl, name)):
            forms.append(args[-1])
            return usual(*args)

        monkeypatch.setattr(eval_ppl, name, watched)
    words = f"{LINES[eval_ppl]} --lengths 300 --documents 1 --recall --fact-form sentence"
    code, out, err = run(eval_ppl, words)
    assert code == 0 and "recalled; by chance" in out, err
    assert forms == ["sentence", "sentence"]


@pytest.mark.parametrize("words", ["--method full", SINKS, "--adapter adapter"])
def test_greedy_text_and_figures(run, tokenizer, words):
    book = Path("text/0.py").read_text()[:250]
    Path("book").write_text(book)
    adapted = tiny({"full": FULL, "h2o": H2O}.get(words.split()[1]))
    ask, ids = f"{words} --temperature 0 --max-new-tokens 12", tokenizer.encode(book)
    code, out, err = run(generate, f"{ask} --prompt book")
    assert book + out == tokenizer.decode(greedy_by_hand(adapted, ids)) + "\n", err
    assert run(generate, f"{ask} --prompt -", stdin=book.encode())[:2] == (code, out) == (0, out)
    shown = err.replace(",", "").replace("all entries", "0 slots").splitlines()
    memory, nbytes_and_full = (
        next(line for line in shown if line.startswith(name)) for name in ("memory", "key/value")
    )
    slots, held, seen = map(int, re.findall(r"\d+", memory))
    nbytes, full = map(int, re.findall(r"\d+", nbytes_and_full))
    assert slots == adapted.settings.mem
    assert seen == len(ids) + 11  # the last one of twelve is written, and need not be read
    assert held <= 16 + 16 if slots else held == seen
    assert (nbytes, full) == (ENTRY * held, ENTRY * seen)


def test_a_base_without_an_adapter_says_what_it_does(run):
    """And a memory, what the entries beside its slots are."""
    shutil.copytree(TINY, "base", ignore=shutil.ignore_patterns("adapter*"))
    ask = "--prompt text/0.py --max-new-tokens 3 --temperature 0"
    code, out, err = run(generate, f"{ask} --model base")
    sentence = "its memory is the full cache, which keeps every token; for 512 slots: --method h2o"
    assert code == 0 and sentence in err.splitlines()[0]
    assert (code, out) == run(generate, f"{ask} --method full")[:2]
    for words in ("", SINKS):
        err = run(generate, f"{ask} {words}")[2]
        assert sentence not in err
        slots, held = re.search(r"(\d+) slots; (\d+) entries held", err).groups()
        waiting = int(held) - int(slots)
        assert f"{slots} slots, and {waiting} tokens since the last compression" in err
    err = run(generate, f"{ask} --method h2o --mem 16 --budgets 8 24 8 24")[2]
    assert "this is the mean; layers have 8 to 24 slots and at most T = 16 new tokens" in err


def test_a_warning_where_a_text_with_its_answer_passes_the_trained_length(run, tokenizer):
    ids = tokenizer.encode(Path("text/0.py").read_text() * 9)[:1000]
    Path("long").write_text(tokenizer.decode(ids))
    for new in (24, 25):
        err = run(generate, f"--method full --prompt long --max-new-tokens {new}")[2]
        assert ("warning: " in err) == (new == 25), err


@pytest.mark.parametrize("words", [SINKS, "--adapter adapter"])
def test_a_memory_is_saved_and_asked_again(run, tokenizer, words):
    """What is read in two runs is what one run reads, if the first ends with a whole segment."""
    ids, question = tokenizer.encode(Path("text/0.py").read_text())[:96], "return x"
    Path("book").write_text(tokenizer.decode(ids))  # 6 segments of 16
    Path("question").write_text(question)
    assert run(generate, f"{words} --prompt book --save-memory memory")[0] == 0
    ask = f"{words} --prompt question --load-memory memory --temperature 0 --max-new-tokens 3"
    both = ids + tokenizer.encode(question)[1:]
    adapted = tiny(H2O if words == SINKS else None)
    expected = tokenizer.decode(greedy_by_hand(adapted, both)[: len(both) + 3]) + "\n"
    for _ in range(2):
        code, out, err = run(generate, ask)
        assert code == 0 and expected.endswith(question + out), err
    Path("memory").write_bytes(Path("memory").read_bytes()[:-1] + b"\x77")
    assert "damaged" in run(generate, ask)[2]


def test_two_that_save_one_memory(run, monkeypatch):
    """The second one is refused before it reads; what the first one saves is there."""
    usual, answers = generate.prefill, []

    def prefill(*args):
        with monkeypatch.context() as patch:
            patch.setattr(generate, "prefill", usual)
            patch.setattr(Path, "exists", lambda path: False)  # both have looked by now
            answers.append(run(generate, f"{SINKS} --prompt text/1.py --save-memory memory"))
        return usual(*args)

    monkeypatch.setattr(generate, "prefill", prefill)
    assert run(generate, f"{SINKS} --prompt text/0.py --save-memory memory")[0] == 0
    sentence = "generate.py: memory: there is such a file already; name another one\n"
    assert answers == [(2, "", sentence)]
    monkeypatch.setattr(generate, "prefill", usual)
    assert run(generate, f"{SINKS} --prompt text/0.py --load-memory memory")[0] == 0


def test_a_text_without_tokens_is_refused(run, monkeypatch):
    """Of a tokenizer that drops line breaks."""
    usual = generate.load_base

    def load_base(*args):
        model, tokenizer = usual(*args)
        encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", lambda text: encode(text.rstrip()))
        return model, tokenizer

    monkeypatch.setattr(generate, "load_base", load_base)
    Path("blank").write_bytes(b"\n")
    Path("mark").write_bytes(b"\xef\xbb\xbf")
    for name, sentence in (("blank", "no token for its text"), ("mark", "no text in it")):
        code, _, err = run(generate, f"{SINKS} --prompt {name}")
        assert (code, err.count("\n")) == (2, 1) and f"--prompt {name}: " in err and sentence in err


def test_a_perplexity_above_all_numbers(run):
    """A mean loss above 709 nats."""
    shutil.copytree(TINY, "loud", ignore=shutil.ignore_patterns("adapter*"))
    weights = load_file("loud/model.safetensors")
    weights["lm_head.weight"] *= 3000
    save_file(weights, "loud/model.safetensors")
    code, out, err = run(eval_ppl, f"{LINES[eval_ppl]} --model loud")
    assert code == 0 and len(re.findall(" inf$", out, re.M)) == 2, err  # of two models
    assert eval_ppl.perplexity(torch.tensor([1.0, 3.0])) == pytest.approx(math.e**2)
    assert math.isnan(eval_ppl.perplexity(torch.tensor([1.0, math.nan])))  # which is not infinite


def test_an_output_that_is_not_finite(run):
    """As of an adapter that the last step has ruined. Its likeliest token would be any."""
    shutil.copytree(TINY, "loud", ignore=shutil.ignore_patterns("adapter*"))
    weights = load_file("loud/model.safetensors")
    weights["lm_head.weight"] *= 3e38
    save_file(weights, "loud/model.safetensors")
    for temperature in (0, 1):
        code, out, err = run(generate, f"{SINKS} --prompt text/0.py --model loud "
                                       f"--temperature {temperature}")  # fmt: skip
        assert (code, out) == (2, "") and "the model's output is not finite" in err, err


def test_a_book_of_ones_own_that_fell_into_another_part(run):
    """The sentence names the part and the flag."""
    Path("2.txt").write_text("some words of a book\n" * 300)
    words = "adapter --data 2.txt --lengths 64"
    code, _, err = run(eval_ppl, words)
    assert code == 2 and "no document of the held-out part is so long" in err
    assert "but one of the training part" in err and "--part all scores every document" in err
    for part in ("training", "all"):
        code, out, _ = run(eval_ppl, f"{words} --part {part}")
        assert code == 0 and "1 of 64 tokens" in out
    Path("3.txt").touch()
    for file, tokens in (("2.txt", r"[\d,]+ tokens"), ("3.txt", "1 token")):  # one is its BOS
        code, _, err = run(eval_ppl, f"adapter --data {file} --lengths 9000")
        assert code == 2 and "; name smaller --lengths" in err
        assert re.search(f"longest document has {tokens};", err)


def test_documents_of_other_parts_are_counted(run, tokenizer):
    """Of 40 documents of one's own, a run scores those whose names are held out, and says so."""
    rows = [json.dumps({"text": f"{n} {'some words ' * 60}"}) for n in range(40)]
    Path("own.jsonl").write_text("\n".join(rows))
    ids = token_streams([Path("own.jsonl")], tokenizer)["held-out"]
    held_out = int((ids == tokenizer.bos).sum())
    words = "adapter --data own.jsonl --lengths 64 --documents 99"
    _, out, err = run(eval_ppl, words)
    assert 0 < held_out < 40 and f"documents (held-out): {held_out} of 64 tokens" in out
    assert f"left out: {40 - held_out} documents of the other parts; --part all" in err
    _, out, err = run(eval_ppl, f"{words} --part all")
    assert ": 40 of 64 tokens" in out and "left out" not in err


@pytest.mark.parametrize("temperature, expected", [
    (0, [0, 1, 0, 0]), (1, [0.04, 0.64, 0.16, 0.16]),
    (2, [1 / 9, 4 / 9, 2 / 9, 2 / 9])])  # roots: 0.2, 0.8, 0.4, 0.4; the sum is 1.8  # fmt: skip
def test_sampling_and_the_end_of_a_text(tokenizer, temperature, expected):
    """Of a model of 8 ids more than the tokenizer has, which it likes best: they are padding."""
    torch.manual_seed(0)
    logits = torch.tensor([0.04, 0.64, 0.16, 0.16]).log() + 3
    drawn = [sample(logits, temperature) for _ in range(2000)]
    shares = np.bincount(drawn, minlength=4) / 2000
    assert np.allclose(shares, expected, atol=0.04) and not shares[np.equal(expected, 0)].any()
    logits = torch.zeros(3, 1, 1, 2048 + 8)
    logits[range(3), ..., [5, 7, *tokenizer.ends]] = 50
    logits[..., 2048:] = 99
    model = Mock(side_effect=list(logits[1:]))
    assert list(decode(model, tokenizer, logits[0, 0], None, 9, temperature)) == [5, 7]
    assert [call.args[0].tolist() for call in model.call_args_list] == [[[5]], [[7]]]


@pytest.mark.parametrize("text", ["    return x", "  a  b ", "naïve", "北京 🐍\n", "\n\n x"])
def test_text_is_shown_as_it_comes_and_in_whole_characters(tokenizer, text):
    prompt = tokenizer.encode("the prompt:")
    ids = tokenizer.encode("the prompt:" + text + "🐍")[len(prompt) :]
    pieces = list(as_text(iter(ids), tokenizer, prompt))
    assert "".join(pieces) == text + "🐍" and len(pieces) > 1 and "\ufffd" not in "".join(pieces)
    assert "".join(as_text(iter(ids[:-1]), tokenizer, prompt)) == text  # a part is held back


# What follows a program's line, and what the sentence must say.
FOLLOWING = {
    generate: [
        ("--temperature nan", "--temperature nan"), ("--show-memory 4 0", "layers 0 to 3 and"),
        ("--mem 2", "--mem 2: it must be at least 4\n"),
        ("--forget 1.5", "--forget 1.5: it must be from 0 to 1"), ("--forget nan", "--forget nan"),
        ("--device hpu", "--device hpu: this torch has no"),
        ("--show-memory 0 2", "--show-memory 0 2"), ("--method lococo", "--method lococo"),
        ("--prompt -", "--prompt -"), ("--prompt allocate", "allocate: there is no such file"),
        ("--prompt latin/x", "latin/x: a part of this name is a file; name another place"),
        ("--prompt latin", "latin: not UTF-8 text (byte 3)"), ("--model nan-base", "finite"),
        ("--adapter adapter", "adapter, h2o: one at a time"), ("--save-memory no/m", "no/m: there"),
        ("--method full --show-memory 0 0", "no slots"), ("--save-memory latin", "latin: there is"),
        ("--load-memory adapter/adapter.safetensors", "saved with another model"),
        ("--load-memory nowhere", "nowhere"), ("--load-memory text", "text: this is a folder"),
        ("--method h2o streaming", "h2o, streaming: one at a time, or --show-memory page.html"),
        ("--method h2o streaming --show-memory 0 0", "h2o, streaming: one at a time"),
        ("--show-memory 1", "--show-memory 1: name a layer and a head, such as 1 0, or one file"),
        ("--show-memory 1 x", "--show-memory 1 x: name a layer and"), ("--show-memory -1 0", "-1"),
        ("--show-memory a.html b.html", "or one file"), ("--show-memory 0 0 0", "0 0 0: name a"),
        ("--show-memory latin.html", "latin.html: there is such a file already; name another one"),
        ("--show-memory text", "text: name a layer and a head, such as 1 0, or one file, such as"),
        ("--show-memory no/p.html", "no/p.html: there is no"),
        ("--method full --show-memory p.html", "no slots"),
        ("--mem 8 --budgets 8 8 4 12 --show-memory p.html", "a page does not show layers"),
        ("--method lococo --show-memory p.html", "python train.py --model MODEL --method lococo "),
        ("--adapter damaged --show-memory p.html", "checksum"),
        ("--method h2o streaming full --adapter a --show-memory p.html", "at most 3 memories"),
        ("--show-memory p.html --save-memory m", "one at a time"),
        ("--show-memory p.html --load-memory adapter", "not allowed with argument"),
    ],
    eval_ppl: [
        ("--lengths 99999", "--lengths 99999"), ("-- nowhere", "nowhere: there is no adapter"),
        ("--json no/x", "no/x"), ("--json text", "text: this is"),
        ("--fact-form line", "--fact-form line: it goes with --recall"),
    ],
    train: [
        ("--conv-lr inf", "--conv-lr inf"), ("--kernel 4", "--kernel 4: it must be odd"),
        ("--seq 33", "--seq 33"), ("--seq 99999", "--seq 99999"), ("--device gpu", "--device gpu"),
        ("--method magic", "choice: 'magic'"), ("--mem 3", "--mem 3"), ("--steps 1.5", "'1.5'"),
        ("--sinks 9 --recent 8", "not fit"), ("--method full --recent 8", "--method full --mem 16"),
        ("--method streaming --sinks 0 --recent 0", "not fit"),
        ("--model missing", "missing: there is no such folder of a model"),
        ("--method lococo+sinks --sinks 16", "not fit"), ("--device meta", "--device meta"),
        ("--method h2o --lora-rank 0", "nothing to train"), ("--data text nowhere", "nowhere"),
        ("--out text", "text: it is there"),
        ("--out latin/run", "latin/run: a part of this name is a file; name another place"),
        ("--out latin", "--out latin: this is a file; name a folder"), ("--out ''", "is empty"),
        ("--resume nowhere", "nowhere: there is no run to go on with"),
        ("--data ''", "--data '': this name is empty"),
    ],
}  # fmt: skip
MISTAKES = [
    (generate, "--prompt text/0.py --show-memory p.html --model other-base", "has no adapter"),
    (generate, "", "required: --prompt"),
    (generate, "--prompt text/0.py --mem 16", "go with --method"),
    (generate, "--prompt text/0.py --adapter damaged", "checksum"),
    (generate, "--prompt text/0.py --adapter adapter --model other-base", "for another base"),
    (eval_ppl, "--data text --mem 16", "with --method"),
    (eval_ppl, "newer --recall --data text --lengths 64", "newer: its adapter is by another"),
    (eval_ppl, "adapter --model other-base --data text --lengths 64", "for another base"),
    (generate, "--prompt text --method h2o", "text: this is a folder"),
]
NUMBERS = {
    generate: "max-new-tokens temperature", eval_ppl: "lengths documents micro-batch",
    train: "seq kernel lora-rank lr conv-lr steps batch micro-batch bptt save-every facts "
           "answer-weight score-tokens",
}  # fmt: skip
for program, line in LINES.items():
    MISTAKES += [(program, f"{line} {words}", sentence) for words, sentence in FOLLOWING[program]]
    for name in f"mem segment sinks heavy recent seed {NUMBERS[program]}".split():
        for value in (-3, 10**20):
            MISTAKES.append((program, f"{line} --{name} {value}", f"--{name} {value}"))


@pytest.mark.parametrize("program, words, sentence", MISTAKES)
def test_a_mistake_is_one_sentence(run, program, words, sentence):
    """Exit code 2, one line on standard error, no traceback, and nothing is written, or scored
    before."""
    before = {file for file in Path().rglob("*.*") if "cache" not in file.parts}
    code, out, err = run(program, words)
    assert code == 2 and err.count("\n") == 1 and sentence in err, err
    assert program is train or not out
    assert err.startswith(f"{program.__name__}.py: ")
    assert {file for file in Path().rglob("*.*") if "cache" not in file.parts} == before


@pytest.mark.parametrize("error, code, sentence", [
    (torch.OutOfMemoryError("CUDA out of memory."), 2, "smaller --mem"),
    (RuntimeError("not enough memory: you tried to allocate 8 bytes."), 2, "smaller --mem"),
    (MemoryError(), 2, "smaller --mem"), (OSError(28, "No space left"), 2, "No space left"),
    (KeyboardInterrupt(), 130, ""), (RuntimeError("x"), None, "")], ids=repr)  # fmt: skip
def test_which_errors_are_a_sentence_and_which_a_traceback(capsys, error, code, sentence):
    with pytest.raises(type(error) if code is None else SystemExit) as raised:
        run_program(Mock(side_effect=error))
    err = capsys.readouterr().err
    assert raised.value is error if code is None else raised.value.code == code
    assert sentence in err and err.count("\n") == (code == 2)


def test_where_nothing_can_be_written(run, monkeypatch):
    """It is said before the work, not after it."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    for program, flag in ((eval_ppl, "--json"), (generate, "--save-memory")):
        code, out, err = run(program, f"{LINES[program]} {flag} figures")
        assert (code, out) == (2, "") and f"{flag} figures: nothing can be written there" in err


def test_help(run):
    """M has a default of its own in each program."""
    defaults = {train: "the recipe's", generate: "512; on a page that of the adapter"}
    for program in LINES:
        code, out, _ = run(program, "--help")
        assert code == 0 and f"python {program.__name__}.py" in out and "--mem M " in out
        default = defaults.get(program, "512")
        assert f"slots, from 4 on (default: {default})" in " ".join(out.split())


def test_a_terminal_of_ascii(run, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code, _, err = run(generate, f"{LINES[generate]} --show-memory 0 0")
    assert code == 0 and b"heavy    ???? 1.00" in terminal.buffer.getvalue(), err


def test_closed_streams(run):
    """As the shell's `<&-` and `>&-` close them, and some that start programs by themselves; and
    `| head`, which closes a pipe that is written to."""
    words = LINES[generate]
    code, _, err = run(generate, words.replace("text/0.py", "-"), stdin=None)
    assert code == 2 and "there is no text in it" in err
    line = f"{sys.executable} {generate.__file__} {words} --max-new-tokens 1 --show-memory 0 0"
    closed, head = (
        Popen(["bash", "-c", f"{line} {ending}; exit ${{PIPESTATUS[0]}}"], stderr=PIPE, text=True)
        for ending in (">&-", "| :")
    )
    (_, figures), (_, nothing) = closed.communicate(), head.communicate()
    assert (closed.returncode, head.returncode) == (0, 1)
    assert "16 slots" in figures and nothing == ""
