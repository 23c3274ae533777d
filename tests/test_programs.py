"""The three programs, run as a user would: what they print, write and refuse."""

import argparse
import gzip
import io
import json
import math
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import eval_ppl
import generate
import train
from eval_ppl import HERE, TINY, Corpus, exit_on_user_error, last_seen, passkey, perplexity, scored_batches
from generate import TextStream, decode, sample
from lococo import METHODS, LoCoCo, Settings, prefill, segment_losses
from model import KVCache, Llama, Tokenizer
from train import RECIPES, backward_through, make_optimizer, set_rates

RUN = ["--mem", "16", "--seq", "96", "--segment", "16", "--steps", "2", "--batch", "2", "--micro-batch", "1"]


pytestmark = pytest.mark.usefixtures("own_folders")


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a program with a command line; returns (exit code, stdout, stderr)."""

    def call(program, *words, stdin=b""):
        monkeypatch.setattr(sys, "argv", [program.__name__ + ".py", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        try:
            exit_on_user_error(program.main)
            code = 0
        except SystemExit as stop:
            code = stop.code
        return code, *capsys.readouterr()

    return call


# --- train.py ------------------------------------------------------------------------------------------------


def test_train_then_generate_then_evaluate(run, tmp_path):
    code, out, err = run(train, "--data", "text", "--out", "run", *RUN)
    assert code == 0, err
    for word in ("compressors", "LoRA", "embeddings", "norms", "frozen", "learning rate", "untouched base",
                 "before training", "after training", "4 sinks + 2 merged + 10 recent",
                 "(4 sinks + 12 recent, by slot)"):  # fmt: skip
        assert word in out, word
    assert sorted(f.name for f in (tmp_path / "run").iterdir()) == ["adapter.safetensors", "log.jsonl"]
    assert [json.loads(line)["step"] for line in open("run/log.jsonl")] == [1, 2]

    code, out, err = run(generate, "--prompt", "-", "--adapter", "run", "--max-new-tokens", 40, stdin=b"x = 1\n" * 40)
    assert code == 0 and out
    assert "16 slots" in err and "segments of 16" in err and "warning: the prompt has" in err
    figures = re.search(r"; ([\d,]+) entries held.*?([\d,]+) bytes; the full cache would hold ([\d,]+)", err, re.S)
    held, used, full = (int(n.replace(",", "")) for n in figures.groups())
    assert held <= 32 and used < full

    code, out, err = run(eval_ppl, "run", "--data", "text", "--lengths", 64, 96, "--json", "table.json")
    assert code == 0, err
    table = json.load(open("table.json"))
    assert [row["name"] for row in table["rows"]] == ["base, full cache", "run"]
    assert table["protocol"]["scored_tokens"]["96"] == 95 * table["protocol"]["documents"]["96"]
    for row in table["rows"]:
        line = next(line for line in out.splitlines() if line.startswith(row["name"]))
        assert f"{row['perplexity']['96']:.3f}" in line

    code, _, err = run(train, "--data", "text", "--out", "run", *RUN)
    assert code == 2 and "--out run holds another run" in err


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_generates(run, method):
    code, out, err = run(train, "--data", "text", "--out", "run", "--method", method, "--bptt", 2, *RUN)
    assert code == 0 and f"{method} after training" in out, err
    code, _, err = run(generate, "--prompt", "text/0.py", "--adapter", "run", "--max-new-tokens", 20)
    assert code == 0 and ("16 slots" in err or "no limit" in err), err


def test_eviction_needs_no_run(run):
    """`--method` on the untouched base gives what a memory of those counts gives."""
    code, out, err = run(eval_ppl, "--method", "streaming", "h2o", "--mem", 16, "--segment", 16, "--positions", "slots",
                         "--data", "text", "--lengths", 64, 96, "--json", "table.json")  # fmt: skip
    assert code == 0, err
    rows = json.load(open("table.json"))["rows"]
    assert [row["name"] for row in rows[1:]] == ["streaming, untouched base", "h2o, untouched base"]
    model, corpus = Llama.from_pretrained(TINY), Corpus(["text"], Tokenizer(TINY))
    for row in rows[1:]:
        lococo = LoCoCo(model, Settings.of(row["name"].split(",")[0], 16, 16, 96, positions="slots", lora_rank=0))
        documents = scored_batches(corpus, "all", 96, "cpu", 64, 1)
        assert perplexity(model, lococo.cache, documents, 16) == pytest.approx(row["perplexity"]["96"], rel=1e-5)
        lococo.remove()
    code, _, err = run(generate, "--prompt", "text/0.py", "--method", "h2o", "--mem", 32, "--segment", 16)
    assert code == 0 and "32 slots" in err


def test_training_twice_with_one_seed_gives_one_adapter(run):
    for out in ("one", "two"):
        assert run(train, "--data", "text", "--out", out, *RUN)[0] == 0
    assert run(train, "--data", "text", "--out", "three", "--seed", 1, *RUN)[0] == 0
    one, two, three = (load_file(f"{name}/adapter.safetensors") for name in ("one", "two", "three"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not all(torch.equal(one[name], three[name]) for name in one)


def test_micro_batches_add_up_to_the_gradient_of_the_mean_loss():
    """Two sequences at once, one after the other, and by one backward of the mean over all scored tokens."""
    gradients = []
    for size in (2, 1, None):
        torch.manual_seed(0)
        lococo = LoCoCo(Llama.from_pretrained(TINY), Settings.of("lococo", 16, 16, 64, 2, 0, 6, "slots", kernel=3))
        lococo.start_training()
        tokens = torch.randint(3, 2000, (2, 64), generator=torch.Generator().manual_seed(1))
        if size:
            for piece in tokens.split(size):
                sum(backward_through(lococo, piece, scored=2 * 63))
        else:
            (sum(x.sum() for x in segment_losses(lococo.model, tokens, lococo.cache(), 16)) / (2 * 63)).backward()
        named = {name: p for group in lococo.groups().values() for name, p in group.items()}
        gradients.append({name: p.grad for name, p in named.items()})
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            assert torch.allclose(gradient, other[name], atol=1e-5, rtol=1e-3), name


def test_optimizer_follows_the_recipe():
    lococo = LoCoCo(Llama.from_pretrained(TINY), Settings.of("lococo", 16, 16, 64))
    optimizer, rates = make_optimizer(lococo, argparse.Namespace(lr=1e-3, conv_lr=5e-2)), []
    for step in range(5):
        set_rates(optimizer, 1 - step / 4)
        rates.append([group["lr"] for group in optimizer.param_groups])
    expected = [[x * (1 - step / 4) for x in (5e-2, 1e-3, 1e-3, 1e-3)] for step in range(5)]
    assert np.allclose(rates, expected) and all(group["weight_decay"] == 0 for group in optimizer.param_groups)


def test_what_is_held_out_is_scored_and_never_trained_on(run, monkeypatch, tokenizer):
    corpus = Corpus(["text"], tokenizer)
    held = [corpus.read(d, 0, 96).tolist() for d in corpus.part("held-out", at_least=96)]
    scored = torch.cat(scored_batches(corpus, "held-out", 96, "cpu", 16, 2)).tolist()
    assert scored == held[:16] and len(held) > 2
    seen = []
    monkeypatch.setattr(train, "Sequences", lambda corpus, documents, *rest: seen.append(documents) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(train, "--data", "text", "--out", "run", *RUN)
    assert np.array_equal(seen[0], corpus.part("training")) and not np.isin(seen[0][:, 3] % 20, (0, 1, 2)).any()


def test_a_corpus_whose_names_are_all_held_out_is_trained_on_and_not_scored(run, tmp_path):
    name = next(f"{i}.txt" for i in range(999) if zlib.crc32(f"{i}.txt".encode()) % 20 < 2)
    (tmp_path / name).write_text("one lone file of text\n" * 300)
    code, out, err = run(train, "--data", name, "--out", "run", *RUN)
    assert code == 0 and "no perplexity: no held-out document has 96 tokens" in out, err
    code, out, err = run(eval_ppl, "--data", name, "--lengths", 64)
    assert code == 0 and "documents scored (all): 1 of 64" in out, err


@pytest.mark.parametrize("method", ["full", "streaming", "lococo"])
def test_every_method_trains(run, method):
    code, out, err = run(train, "--data", "text", "--out", "run", "--method", method, *RUN)
    assert code == 0 and f"{method} after training" in out, err
    assert ("compressors" in out) == (method == "lococo")


def test_inference_mode_saves_compressors_alone_and_other_flags_win(run):
    code, out, err = run(train, "--data", "text", "--out", "run", "--lora-rank", 0, "--positions", "interpolated",
                         "--kernel", 5, "--sinks", 2, "--recent", 4, "--filters", 0, *RUN)  # fmt: skip
    assert code == 0, err
    tensors = load_file("run/adapter.safetensors")
    assert len(tensors) == 8 and all(name.startswith("compressors.") for name in tensors)
    assert tensors["compressors.0.convs.0.weight"].shape == (10, 128, 5)  # 16 - 2 - 4 slots, 2D channels, kernel
    assert "LoRA" not in out and "positions interpolated" in out


def test_the_recipe_of_the_paper_is_the_papers():
    paper = {name: values[1] for name, values in RECIPES.items()}
    expected = dict(mem=512, segment=512, kernel=21, steps=200, batch=128, lr=5e-5, conv_lr=5e-2, sinks=0, recent=0,
                    positions="interpolated", lora_rank=8)  # fmt: skip
    assert {name: paper[name] for name in expected} == expected


def test_bfloat16_trains_with_float32_masters(run):
    assert run(train, "--data", "text", "--out", "run", "--dtype", "bfloat16", *RUN)[0] == 0
    assert {t.dtype for t in load_file("run/adapter.safetensors").values()} == {torch.float32}
    code, out, _ = run(generate, "--prompt", "text/0.py", "--adapter", "run", "--dtype", "bfloat16")
    assert code == 0 and out


# --- Where it is lost ----------------------------------------------------------------------------------------


def test_last_seen_equals_a_search_backwards():
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 3, 60))
    for t, ago in enumerate(last_seen(tokens).tolist(), 1):
        earlier = [u for u in range(2, t) if tokens[u - 2 : u + 1].tolist() == tokens[t - 2 : t + 1].tolist()]
        assert ago == (t - earlier[-1] if t >= 2 and earlier else 0)


def test_loss_by_position_adds_up_to_the_perplexity(run):
    words = ["--method", "streaming", "--mem", 16, "--segment", 16, "--data", "text", "--lengths", 300]
    code, out, err = run(eval_ppl, *words, "--by-position", "--json", "table.json")
    assert code == 0 and "seen > 32 ago" in out, err
    table = json.load(open("table.json"))
    share = table["by_position"].pop("share of tokens")
    for row in table["rows"]:
        nats = table["by_position"][row["name"]]
        for columns in (("position to 256", "position to 300"), ("seen never", "seen to 32 ago", "seen > 32 ago")):
            assert sum(share[c] for c in columns) == pytest.approx(1)
            assert math.exp(sum(share[c] * nats[c] for c in columns)) == pytest.approx(row["perplexity"]["300"])
    assert share["position to 256"] == 255 / 299


class Oracle:
    """A model that repeats what followed the last 4 tokens earlier, if its cache of so many tokens still holds it."""

    def __init__(self, remembers):
        self.remembers = remembers

    def __call__(self, tokens, cache):
        logits = torch.zeros(*tokens.shape, 2048)
        for b, row in enumerate(tokens.tolist()):
            for t, token in enumerate(row):
                cache[b].append(token)
                recent = cache[b][-self.remembers :]
                for u in range(len(recent) - 5, -1, -1):
                    if recent[u : u + 4] == recent[-4:]:
                        logits[b, t, recent[u + 4]] = 1.0
                        break
        return logits


@pytest.mark.parametrize("remembers, found", [(400, [1, 1, 1]), (120, [0, 0, 1])])
def test_passkeys_are_found_by_who_remembers_them(tokenizer, remembers, found):
    texts = [torch.randint(3, 2000, (2, 300)), torch.randint(3, 2000, (1, 300))]
    for depth, share in zip((0, 0.5, 1), found):
        caches = lambda: [[], []]  # noqa: E731
        assert passkey(Oracle(remembers), caches, 64, tokenizer, texts, depth, seed=1) == share


# --- generate.py ---------------------------------------------------------------------------------------------


def test_greedy_is_deterministic_and_seeds_differ(run):
    greedy = [run(generate, "--prompt", "text/0.py", "--full", "--temperature", 0, "--max-new-tokens", 20, "--seed", s)
              for s in (0, 1)]  # fmt: skip
    assert greedy[0][0] == 0 and greedy[0][1] == greedy[1][1]
    hot = [run(generate, "--prompt", "text/0.py", "--temperature", 2, "--max-new-tokens", 20, "--seed", s)[1]
           for s in (0, 0, 1)]  # fmt: skip
    assert hot[0] == hot[1] != hot[2]


def test_samples_share_one_prefill(run, monkeypatch):
    calls = []
    monkeypatch.setattr(generate, "prefill", lambda *a: calls.append(1) or prefill(*a))
    code, out, err = run(generate, "--prompt", "text/0.py", "--num-samples", 3, "--max-new-tokens", 5)
    assert code == 0 and len(calls) == 1 and "sample 3" in err
    alone = run(generate, "--prompt", "text/0.py", "--max-new-tokens", 5, "--seed", 1)[1]
    assert alone.strip() in out  # sample 2 is what seed 1 gives


def test_a_model_without_an_adapter_keeps_its_full_cache_and_says_so(run):
    code, _, err = run(generate, "--prompt", "text/0.py", "--model", TINY, "--max-new-tokens", 3)
    assert code == 0 and "full cache (no adapter)" in err and "no limit" in err


def test_decoding_with_a_memory_equals_reading_the_whole_at_once(tokenizer):
    """Greedy tokens from prefill and decode, against a pass over prompt and answer in segments (which begin where
    decoding compresses, since the prompt is a whole number of them)."""
    model = Llama.from_pretrained(TINY)
    lococo = LoCoCo(model, Settings.of("lococo", 16, 8, 200, 2, 0, 6, "slots", kernel=3, lora_rank=0))
    prompt = tokenizer.encode("def fibonacci(n):\n    if n < 2:\n        return n\n" * 3)[:24]
    cache = lococo.cache()
    logits = prefill(model, torch.tensor([prompt]), cache, 8)
    answer = list(decode(model, tokenizer, logits, cache, 30, 0, 1.0, 0))
    again = lococo.cache()
    with torch.no_grad():
        whole = [model(x, again) for x in torch.tensor([prompt + answer]).split(8, dim=1)]
    likeliest = torch.cat(whole, dim=1)[0].argmax(-1).tolist()
    assert likeliest[23 : 23 + len(answer)] == answer and len(answer) == 30
    assert cache.held <= 16 + 8


@pytest.mark.parametrize("words", [[], ["--dtype", "bfloat16"],
                                   "--method h2o --mem 64 --segment 32 --positions slots".split()])  # fmt: skip
def test_a_saved_memory_goes_on_as_if_never_saved(run, tmp_path, words):
    for name, n in (("short", 3), ("long", 60)):
        book = "".join((tmp_path / "text" / f"{i}.py").read_text() for i in range(n))
        (tmp_path / f"{name}.txt").write_text(book)
    (tmp_path / "question.txt").write_text("def f0_3(x):\n")
    code, text, _ = run(generate, "--prompt", "long.txt", "question.txt", "--max-new-tokens", 20, *words)
    assert code == 0 and text.strip()
    sizes = []
    for name in ("short", "long"):
        saved = ["--save-memory", f"{name}.safetensors"]
        code, nothing, err = run(generate, "--prompt", f"{name}.txt", *saved, *words)
        assert code == 0 and nothing == "" and f"; {64 if '--mem' in words else 128} entries held after" in err
        sizes.append((tmp_path / f"{name}.safetensors").stat().st_size)
    assert abs(sizes[0] - sizes[1]) < 100  # M slots, whatever the length of the book
    load = ["--load-memory", "long.safetensors", "--prompt", "question.txt", "--max-new-tokens", 20]
    load += words if "--dtype" in words else []
    for _ in range(2):
        code, again, err = run(generate, *load)
        assert code == 0 and again == text
    if "--method" not in words:  # the warning counts what the memory has seen
        assert re.search(r"tokens after the 21,\d+ remembered, the adapter was trained on 2,048", err)


def test_a_saved_memory_is_bound_to_its_model_and_adapter(run, tmp_path):
    assert run(train, "--data", "text", "--out", "run", *RUN)[0] == 0
    ask = ["--prompt", "text/1.py"]
    assert run(generate, "--prompt", "text/0.py", "--save-memory", "tiny.st")[0] == 0
    assert run(generate, "--prompt", "text/0.py", "--save-memory", "h2o.st", "--method", "h2o", "--mem", 32)[0] == 0
    shutil.copytree(TINY, "other")
    tensors = load_file("other/model.safetensors")
    tensors["model.norm.weight"] *= 2
    save_file(tensors, "other/model.safetensors", {"format": "pt"})
    whole = (tmp_path / "tiny.st").read_bytes()
    (tmp_path / "flipped.st").write_bytes(whole[:-9] + bytes([whole[-9] ^ 64]) + whole[-8:])
    for words, sentence in (
        (["--load-memory", "tiny.st", "--adapter", "run"], "tiny.st: made with another adapter"),
        (["--load-memory", "h2o.st", "--adapter", "run"], "h2o.st: made without an adapter; leave out --adapter"),
        (["--load-memory", "tiny.st", "--model", "other"], "tiny.st: made with an adapter; give it as --adapter"),
        (["--load-memory", "h2o.st", "--model", "other"], "h2o.st: made with another model"),
        (["--load-memory", "h2o.st", "--dtype", "bfloat16"], "h2o.st: made with --dtype float32"),
        (["--load-memory", "tiny.st", "--dtype", "bfloat16"], "tiny.st: made with --dtype float32"),
        (["--load-memory", "flipped.st"], "flipped.st: not a file of this program, or damaged"),
        (["--load-memory", "run/adapter.safetensors"], "of kind adapter, not memory"),
        (["--load-memory", "nowhere"], "--load-memory nowhere: no such file"),
        (["--load-memory", "h2o.st", "--method", "h2o"], "does not go with --method"),
        (["--load-memory", "h2o.st", "--mem", "8"], "--mem 8 goes with --method"),
        (["--save-memory", "nowhere/x"], "--save-memory nowhere/x: not a file in a directory that exists"),
        (["--save-memory", "text/0.py"], "--save-memory text/0.py: that file is there already"),
        (["--save-memory", "tiny.st"], "--save-memory tiny.st: that file is there already"),
        (["--save-memory", "x", "--full"], "a cache that keeps everything is no memory"),
    ):
        code, out, err = run(generate, *ask, *words)
        assert code == 2 and sentence in err and out == "", err


def test_sampling_takes_the_fewest_tokens_that_reach_top_p():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    generator = torch.Generator().manual_seed(0)
    for top_p, allowed in ((0.1, {0}), (0.5, {0}), (0.6, {0, 1}), (0.81, {0, 1, 2}), (1.0, {0, 1, 2, 3})):
        assert {sample(logits, 1.0, top_p, generator) for _ in range(400)} == allowed
    drawn = np.bincount([sample(logits, 1.0, 1.0, generator) for _ in range(4000)], minlength=4) / 4000
    assert np.allclose(drawn, [0.5, 0.3, 0.15, 0.05], atol=0.03)


@pytest.mark.parametrize("text", ["    return x", "  a  b ", "naïve", "北京 🐍\n", "\n\n    x", "🐍"])
def test_streamed_text_is_the_text(tokenizer, text):
    prompt = tokenizer.encode("prompt:")
    ids = tokenizer.encode("prompt:" + text)[len(prompt) :]
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(token) for token in ids]
    assert "".join(pieces) == text and stream.rest() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_text_that_ends_inside_a_character_is_shown_at_the_end(tokenizer):
    stream = TextStream(tokenizer, tokenizer.encode("a"))
    shown = [stream.add(token) for token in tokenizer.encode("a🐍")[2:-1]]
    assert "".join(shown) == "" and "\ufffd" in stream.rest()


def test_show_memory_prints_the_slots_and_no_text(run):
    code, out, err = run(generate, "--prompt", *["text/0.py"] * 3, "--show-memory", 3, 1)
    assert code == 0 and out.startswith("layer 3, head 1: ") and "slots 4-19, merged" in out
    assert "decode" not in err and "128 slots" in err
    code, out, err = run(generate, "--prompt", "text/0.py", "--show-memory", "--method", "h2o", "--mem", 400)
    assert code == 0 and "nothing is compressed before there are more than" in out


# --- Bad input -----------------------------------------------------------------------------------------------


BAD = [
    (train, ["--method", "magic"], "unknown method 'magic'; there are full, streaming, h2o, lococo"),
    (train, ["--mem", "0"], "--mem 0"),
    (train, ["--mem", "-8"], "--mem -8"),
    (train, ["--mem", "many"], "invalid int value: 'many'"),
    (train, ["--kernel", "20"], "--kernel 20: an odd size"),
    (train, ["--seq", "100"], "--seq 100 is shorter than one segment; --segment is 128"),
    (train, ["--steps", "0"], "--steps 0"),
    (train, ["--bptt", "0"], "--bptt 0"),
    (train, ["--heavy", "-1"], "--heavy -1"),
    (train, ["--score", "max"], "unknown score 'max'; there are sum, mean, last"),
    (generate, ["--prompt", "text/0.py", "--method", "lococo"], "--method lococo: its convolution must be trained"),
    (generate, ["--prompt", "text/0.py", "--method", "h2o", "--full"], "--method h2o does not go with"),
    (generate, ["--prompt", "text/0.py", "--mem", "64"], "--mem 64 goes with --method"),
    (eval_ppl, ["--method", "h3o"], "unknown method 'h3o'"),
    (eval_ppl, ["--heavy", "5"], "--heavy 5 goes with --method"),
    (train, ["--lr", "-1"], "--lr -1.0"),
    (train, ["--conv-lr", "inf"], "--conv-lr inf: a number above 0"),
    (train, ["--blend", "nan"], "--blend nan"),
    (train, ["--sinks", "600"], "--sinks 600"),
    (train, ["--method", "streaming", "--lora-rank", "0"], "nothing to train"),
    (train, ["--model", "nowhere"], "--model nowhere: no such directory"),
    (train, ["--model", "text"], "text: no tokenizer.model"),
    (train, ["--data", "nowhere"], "--data nowhere: no such file"),
    (train, ["--data", "empty.txt"], "--data empty.txt: there is no text in it"),
    (train, ["--data", "latin.txt"], "latin.txt: not UTF-8 text"),
    (train, ["--data", "text", "--seq", "100000"], "a sequence needs 100000"),
    (train, ["--out", "text"], "--out text holds another run"),
    (train, ["--out", "latin.txt"], "--out latin.txt is not a directory"),
    (train, ["--seed", "-1"], "--seed -1"),
    (train, ["--mem", "1024", "--seq", "1024"], "nothing would be merged"),
    (train, ["--method", "full", "--recent", "8"], "--method full keeps everything"),
    (train, ["--out", "latin.txt/run"], "latin.txt is not a directory that you may write to"),
    (train, ["--unknown"], "unrecognized arguments: --unknown"),
    (generate, [], "the following arguments are required: --prompt"),
    (generate, ["--prompt", "nowhere.txt"], "--prompt nowhere.txt: No such file"),
    (generate, ["--prompt", "text"], "--prompt text: Is a directory"),
    (generate, ["--prompt", "empty.txt"], "--prompt empty.txt: there is no text in it"),
    (generate, ["--prompt", "latin.txt"], "--prompt latin.txt: not UTF-8 text"),
    (generate, ["--prompt", "text/0.py", "--adapter", "nowhere"], "nowhere: no adapter there"),
    (generate, ["--prompt", "text/0.py", "--adapter", "latin.txt"], "latin.txt: not a file of this program"),
    (generate, ["--prompt", "text/0.py", "--temperature", "-1"], "--temperature -1"),
    (generate, ["--prompt", "text/0.py", "--top-p", "0"], "--top-p 0"),
    (generate, ["--prompt", "text/0.py", "--max-new-tokens", "0"], "--max-new-tokens 0"),
    (generate, ["--prompt", "text/0.py", "--dtype", "int8"], "invalid choice: 'int8'"),
    (eval_ppl, ["nowhere"], "nowhere: no adapter there"),
    (eval_ppl, ["--lengths", "1"], "--lengths 1: at least 2"),
    (eval_ppl, ["--data", "text", "--lengths", "100000"], "--lengths 100000: no document of that many tokens"),
    (eval_ppl, ["--json", "nowhere/table.json"], "--json nowhere/table.json: not a file in a directory"),
    (eval_ppl, ["--documents", "0"], "--documents 0"),
    (eval_ppl, ["--passkey", "2"], "--passkey 2.0: a depth is from 0"),
    (eval_ppl, ["--passkey", "--lengths", "16"], "--passkey needs texts of 64 tokens"),
    (train, ["--filters", "3"], "--filters 3: each fills equally many of the 16 slots"),
    (eval_ppl, ["--model", "nowhere"], "--model nowhere"),
    (train, ["--shard"], "--shard: there is one process; start several with torchrun"),
    (train, ["--save-every", "0"], "--save-every 0: at least 1"),
    (train, ["--resume", "nowhere"], "--resume nowhere: there is no state.safetensors"),
    (train, ["--resume", "text"], "--resume text: there is no state.safetensors"),
    (train, ["--resume"], "argument --resume: expected one argument"),
    (train, ["--batch", "0"], "--batch 0: a number above 0"),
    (train, ["--micro-batch", "-2"], "--micro-batch -2: a number above 0"),
    (train, ["--steps", "1.5"], "argument --steps: invalid int value: '1.5'"),
    (train, ["--lora-rank", "-1"], "--lora-rank -1"),
    (train, ["--filters", "-1"], "--filters -1"),
    (train, ["--segment", "0"], "--segment 0"),
    (train, ["--recent", "-1"], "--recent -1"),
    (train, ["--kernel", "-3"], "--kernel -3"),
    (train, ["--positions", "up"], "unknown positions 'up'; there are interpolated, original, slots"),
    (train, ["--normalise", "max"], "unknown normalise 'max'; there are sum, softmax-relu, softmax"),
    (train, ["--recipe", "mine"], "invalid choice: 'mine'"),
    (train, ["--seed", str(2**70)], "from 0 to 2^63 - 1"),
    (train, ["--lr", "nan"], "--lr nan"),
    (train, ["--conv-lr", "0"], "--conv-lr 0.0"),
    (train, ["--blend", "half"], "argument --blend: invalid float value: 'half'"),
    (train, ["--method", "h2o", "--mem", "8", "--heavy", "9"], "--heavy 9, --recent 0 do not fit into --mem 8"),
    (train, ["--method", "streaming", "--sinks", "0", "--recent", "0"], "keeps nothing"),
    (train, ["--data", "packed.txt.zst"], "packed.txt.zst: unpack it first"),
    (train, ["--data", "lines.jsonl"], "lines.jsonl: line 2 is not a JSON object"),
    (train, ["--data", "cut.jsonl.gz"], "cut.jsonl.gz: not a complete gzip file"),
    (train, ["--data", "ids.bin"], "ids.bin: not uint16 or uint32 token ids"),
    (train, ["--model", "text", "--data", "nowhere"], "text: no tokenizer.model"),
    (generate, ["--prompt", "text/0.py", "nowhere.txt"], "--prompt nowhere.txt: No such file"),
    (generate, ["--prompt", "text/0.py", "--num-samples", "0"], "--num-samples 0"),
    (generate, ["--prompt", "text/0.py", "--temperature", "nan"], "--temperature nan"),
    (generate, ["--prompt", "text/0.py", "--top-p", "1.5"], "--top-p 1.5"),
    (generate, ["--prompt", "text/0.py", "--method", "h2o", "--mem", "0"], "--mem 0"),
    (eval_ppl, ["--method", "h2o", "--segment", "0"], "--segment 0"),
    (generate, ["--prompt", "text/0.py", "--method", "streaming", "--mem", "4", "--sinks", "9"], "--sinks 9"),
    (generate, ["--prompt", "text/0.py", "--load-memory", "nowhere"], "--load-memory nowhere: no such file"),
    (generate, ["--prompt", "text/0.py", "--load-memory", "latin.txt"], "latin.txt: not a file of this program"),
    (train, ["--method", "streaming", "--filters", "-3"], "--filters -3: at least 0"),
    (generate, ["--prompt", "text/0.py", "--show-memory", "4", "0"], "--show-memory 4 0: layers are 0 to 3"),
    (generate, ["--prompt", "text/0.py", "--show-memory", "0", "-1"], "--show-memory 0 -1: layers are 0 to 3"),
    (generate, ["--prompt", "text/0.py", "--show-memory", "1"], "--show-memory 1: give a layer and a head, or neither"),
    (generate, ["--prompt", "text/0.py", "--show-memory", "--full"], "--show-memory: a cache that keeps everything"),
    (generate, ["--prompt", "text/0.py", "--show-memory", "--load-memory", "m"], "--show-memory does not go with"),
    (generate, ["--prompt", "text/0.py", "--save-memory", "text"], "--save-memory text: not a file"),
    (generate, ["--prompt", "text/0.py", "--model", "text"], "text: no tokenizer.model"),
    (eval_ppl, ["--method", "lococo"], "--method lococo: its convolution must be trained"),
    (eval_ppl, ["--method", "h2o", "--score", "max"], "unknown score 'max'"),
    (eval_ppl, ["--micro-batch", "0"], "--micro-batch 0: at least 1"),
    (eval_ppl, ["--part", "best"], "invalid choice: 'best'"),
    (eval_ppl, ["--lengths", "long"], "invalid int value: 'long'"),
    (eval_ppl, ["--json", "text"], "--json text: not a file"),
    (eval_ppl, ["--data", "nowhere"], "--data nowhere: no such file"),
    (eval_ppl, ["--data", "empty.txt"], "--data empty.txt: there is no text in it"),
    (eval_ppl, ["latin.txt"], "latin.txt: not a file of this program"),
]


@pytest.mark.parametrize("program, words, sentence", BAD, ids=lambda v: getattr(v, "__name__", None) or " ".join(v)
                         if isinstance(v, list) else "")  # fmt: skip
def test_bad_input_is_one_sentence_and_exit_code_2(run, tmp_path, program, words, sentence):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "packed.txt.zst").write_bytes(b"packed")
    (tmp_path / "lines.jsonl").write_text('{"text": "fine"}\n{"txt": "not"}\n')
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "fine"}\n' * 99)[:-9])
    (tmp_path / "ids.bin").write_bytes(b"\xff" * 16)
    before = {f for f in tmp_path.rglob("*") if "cache" not in f.parts}
    code, out, err = run(program, *words)
    assert code == 2 and (program != train or "--out" not in words or out == "")  # before any work
    assert sentence in err and "Traceback" not in err
    assert err.strip().splitlines()[-1].startswith(program.__name__ + ".py: ")
    assert {f for f in tmp_path.rglob("*") if "cache" not in f.parts} == before
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize("device", ["cuda", "gpu", "meta"])
def test_a_device_that_is_not_there(run, device):
    code, _, err = run(generate, "--prompt", "text/0.py", "--device", device)
    assert code == 2 and err == f"generate.py: --device {device}: there is no such device here\n"


def test_a_truncated_model_is_named(run, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.model", "model.safetensors"):
        content = (TINY / name).read_bytes()
        (tmp_path / "model" / name).write_bytes(content[: len(content) // 2] if "safetensors" in name else content)
    code, _, err = run(generate, "--prompt", "text/0.py", "--model", "model")
    assert code == 2 and "model.safetensors: cannot be read as weights, is it truncated?" in err


def test_an_adapter_that_keeps_everything(run):
    assert run(train, "--data", "text", "--out", "run", "--method", "full", *RUN)[0] == 0
    code, _, err = run(generate, "--prompt", "text/0.py", "--adapter", "run", "--max-new-tokens", 3)
    assert code == 0 and "no limit" in err
    model = Llama.from_pretrained(TINY)
    assert type(LoCoCo.load("run", model).cache()) is KVCache


def test_an_adapter_of_another_base(run, tmp_path):
    shutil.copytree(TINY, "base")
    weights = load_file("base/model.safetensors")
    save_file({name: w * 1.01 for name, w in weights.items()}, "base/model.safetensors")
    code, _, err = run(generate, "--prompt", "text/0.py", "--model", "base", "--adapter", TINY)
    assert code == 2 and "made for another base model" in err


def test_the_embedded_model_is_small_and_uses_distant_context(tokenizer):
    """Its own figures are in tiny/pretrain.jsonl; here a sample of this machine's library: 4 documents."""
    sizes = {file.name: file.stat().st_size for file in TINY.iterdir()}
    assert sizes["model.safetensors"] <= 8e6 and sizes["adapter.safetensors"] <= 4e6
    figures = json.loads((TINY / "pretrain.jsonl").read_text().splitlines()[-1])
    assert figures["ratio"] >= 1.12
    model = Llama.from_pretrained(TINY)
    modules = [file for file in Path(json.__file__).parents[1].glob("*.py") if file.stat().st_size > 4000]
    corpus = Corpus(sorted(modules), tokenizer)
    documents = scored_batches(corpus, "held-out", model.config.context, "cpu", 4, 4)
    full = perplexity(model, lambda: KVCache(4), documents, 512)
    window = LoCoCo(model, Settings.of("streaming", 63, 1, model.config.context, lora_rank=0))
    assert perplexity(model, window.cache, documents, 1) > 1.05 * full


def test_memory_does_not_grow_with_the_sequence(tmp_path):
    """Peak resident memory of whole training runs, as the operating system counts it: 16,384 tokens against 2,048."""
    np.random.default_rng(0).integers(3, 2000, 40_000).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    measure = "import resource as r, subprocess, sys; subprocess.run(sys.argv[1:], check=True); " \
              "print(r.getrusage(r.RUSAGE_CHILDREN).ru_maxrss)"  # fmt: skip
    peaks = []
    for length in (2048, 16384):
        command = [sys.executable, "-c", measure, sys.executable, HERE / "train.py", "--data", "tokens.bin",
                   "--device", "cpu", "--steps", "1", "--batch", "1", "--seq", length, "--out", length]  # fmt: skip
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout.split()[-1]))
    assert peaks[1] < 1.05 * peaks[0], f"{peaks} KiB"
