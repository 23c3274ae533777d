"""The programs as a user runs them: what they print, write and refuse."""

import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import FULL, H2O, cells, greedy_by_hand, nats_by_hand, read_by_hand, settings

import eval_ppl
import generate
import needle
import show_memory
import train
from generate import decode, prefill, sample
from lococo import AdaptedLlama, Settings
from model import Llama, load_llama
from support.programs.adapter import load_adapter, write_adapter
from support.command_line import TINY, Machine, run_program
from support.facts import tell
from support.files import UserError, read_file
from support.programs import saved_memory
from support.programs.saved_memory import Reader, load_memory, save_memory
from support.programs.settings import untrained, warn_if_too_long
from support.text import pieces, token_streams

SMALL = "--method h2o --mem 16"
ENTRY = 2 * 4 * 2 * 64 * 4  # bytes of a key and a value in 4 layers of 2 heads of 64 floats


@pytest.fixture(autouse=True)
def stock_at_hand(own_folders, stock):
    for thing in stock.iterdir():
        Path(thing.name).symlink_to(thing)
    Path("loop").symlink_to("loop")


def tiny(thing: Settings | str) -> AdaptedLlama:
    """The embedded base with a method without training, or with an adapter."""
    base = load_llama(TINY)
    return load_adapter(Path(thing), base) if isinstance(thing, str) else AdaptedLlama(base, thing)


# --- eval_ppl.py ------------------------------------------------------------------------


def test_the_table_and_the_loss_by_position(run, tokenizer):
    """By hand. A length, a method and a run are scored once, however they are named."""
    words = f"{Path('adapter').resolve()} adapter --method h2o h2o --mem 16"
    words += " --data text --part training --documents 2 --lengths 64 300 64"
    code, out, err = run(eval_ppl, f"{words} --by-position --json figures.json")
    figures = json.loads(Path("figures.json").read_text())
    assert code == 0 and "(training): 2 of 64 tokens, 2 of 300 tokens" in out, err
    ids = token_streams([Path("text")], tokenizer)["training"]
    texts = [pieces(ids, tokenizer.bos, L, 2) for L in (64, 300)]
    models = {"base, full": FULL}
    models["base, h2o M=16"] = H2O
    models["adapter M=16"] = "adapter"
    assert [*figures["methods"]] == [*models]
    perplexities, differences, positions = map(cells, out.split("\n\n"))
    near, far, means = [], [], []
    for name, thing in models.items():
        short, long = [nats_by_hand(tiny(thing), rows) for rows in texts]
        slots, nbytes, *printed = " ".join(perplexities[name]).replace(",", "").split()
        expected = [math.exp(short.mean()), math.exp(long.mean())]
        assert [float(value) for value in printed] == pytest.approx(expected, abs=6e-4)
        written = figures["methods"][name]["perplexity"].values()
        assert [*written] == pytest.approx(expected, abs=1e-4)
        slots_and_held = ("-", 299) if thing is FULL else ("16", 16 + 299 % 16)
        assert (slots, int(nbytes) // ENTRY) == slots_and_held
        near.append(long[:, :32].mean())  # a column for each token but the first
        far.append(long[:, 32:].mean())
        means.append(long.mean(axis=1))
    for kind, expected in (("0-32", [64, *near]), ("32-300", [534, *far])):
        found = [float(word) for word in positions[f"position {kind}"]]
        assert found == pytest.approx(expected, abs=6e-4)
    for name, nats in zip(models, means):  # the run is compared with
        above = nats - means[2]  # of two pieces: the error of their mean is half their distance
        expected = [x for t in (nats, above) for x in (t.mean(), abs(t[0] - t[1]) / 2)]
        found = [float(word) for word in differences[name]]
        assert found == pytest.approx(expected, abs=6e-4)
    assert "note: 2 pieces of 300 tokens: too few to tell memories apart" in err


def test_recall(run, tokenizer):
    """The share of answers that are the likeliest word. A window and H2O stand beside a run."""
    words = "adapter --recall --data text --part held-out --lengths 64 300 --documents 2"
    code, out, err = run(eval_ppl, f"{words} --json figures.json")
    names, table = ["base, full", "base, streaming M=16", "base, h2o M=16", "adapter"], cells(out)
    assert code == 0 and table["recalled; by chance 1 in 220"] == ["answers", *names], err
    ids = token_streams([Path("text")], tokenizer)["held-out"]
    texts = pieces(ids, tokenizer.bos, 300, 2)
    rows = [tell(text, 8, "held-out", 0, i, tokenizer) for i, text in enumerate(texts)]
    shares = []
    for column, thing in ((1, FULL), (4, "adapter")):
        adapted, hits = tiny(thing), []
        for told, ago in rows:
            likeliest = read_by_hand(adapted, told.tolist()).argmax(dim=-1)
            hits += [float(likeliest[t - 1] == told[t]) for t in ago.nonzero()[:, 0].tolist()]
        # A fact is told again after 64 tokens at least.
        assert table["told ago 0-32"] == ["0", "-", "-", "-", "-"]
        row = table["told ago 32-300"]
        assert (row[0], row[column]) == (str(len(hits)), f"{np.mean(hits):.3f}")
        shares.append(np.mean(hits))
    assert max(shares) > 0
    near = json.loads(Path("figures.json").read_text())["recall"]["told ago 0-32"]
    assert near == {"tokens": 0} | dict.fromkeys(names)  # null: there are no answers


def test_columns_line_up(capsys):
    """Whatever the names are. A single piece has no standard error."""
    long = "a run whose name is longer than the column of names"
    losses = {"base, full": torch.ones(1, 4), long: torch.full((1, 4), 1.5)}
    rows = eval_ppl.differences(losses, first="base, full")
    columns = [("mean", ".2f"), ("error", ".2f"), (f"above {long}", "+.1f"), ("error", ".2f")]
    eval_ppl.print_table("nats", columns, rows)
    lines = capsys.readouterr().out.strip().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert cells(lines[2])[long] == ["1.50", "-", "+0.5", "-"]


def test_ranges_of_distances():
    """The last number of a range is in it. 0 is in none."""
    numbers = torch.arange(600)[None]
    first, second, third = eval_ppl.ranges("what ", numbers, near=100).items()
    assert [first[0], second[0], third[0]] == ["what 0-100", "what 100-512", "what 512-601"]
    assert numbers[first[1]].tolist() == list(range(1, 101))
    assert numbers[third[1]].tolist() == list(range(513, 600))


@pytest.mark.parametrize("words, scored", [
    ("adapter whole", "held-out): 2"), ("whole", "all parts): 20"),
    ("whole --part training", "training): ")])
def test_which_part_of_the_texts_is_scored(run, words, scored):
    """What a run has held out. If no run has, all that the user names."""
    rows = [json.dumps({"text": f"{n} {'some words ' * 30}"}) for n in range(20)]
    Path("own.jsonl").write_text("\n".join(rows))
    code, out, err = run(eval_ppl, f"{words} --data own.jsonl --lengths 64 --documents 99")
    assert code == 0 and f"pieces of texts ({scored}" in out, err


def test_the_usual_lengths_that_no_text_has_are_left_out(run):
    Path("own.txt").write_text("some words " * 1200)
    code, out, err = run(eval_ppl, "--method streaming --mem 16 --data own.txt --documents 1")
    assert code == 0 and "parts): 1 of 2048 tokens\n" in out, err


@pytest.mark.parametrize("method, mem, tokens, remedy", [
    ("streaming", 128, 9999, ""),  # positions end at M + T = 256
    ("streaming", 1024, 9999, "take a smaller --mem or --segment"),  # M + T = 2048
    ("full", 16, 1025, "--method h2o+forget --mem 512 reads texts of any length"),
    ("h2o", 512, 9999, ""), ("h2o", 513, 9999, "take a smaller --segment"),
])
def test_a_warning_if_distances_pass_the_context(capsys, method, mem, tokens, remedy):
    warn_if_too_long(untrained(load_llama(TINY), method, mem, mem), tokens)
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {method}: it needs distances of ") == bool(remedy)
    assert err.endswith(f"and the base knows up to 1,024; {remedy}\n" if remedy else "")


# --- generate.py ------------------------------------------------------------------------


@pytest.mark.parametrize("words, thing", [
    ("--method full", FULL), ("--adapter adapter", "adapter")])
def test_greedy_text(run, tokenizer, words, thing):
    """Reading and writing have a line each; the other figures are tested with the memory page."""
    book = Path("text/0.py").read_text()[:250]
    Path("book").write_text(book)
    written = tokenizer.decode(greedy_by_hand(tiny(thing), tokenizer.encode(book)))
    code, out, err = run(generate, f"{words} --temperature 0 --max-new-tokens 12 --prompt book")
    assert code == 0 and book + out == written + "\n", err
    read = len(tokenizer.encode(book))
    lines = rf"reading +{read} tokens in [\d.]+ s, .*\nwriting +12 tokens in [\d.]+ s, [\d,]+ tokens/s\n"
    assert re.search(lines, err) and re.search(r"whole process +at most [\d,]+ MB\n", err)


def test_all_that_is_written_is_in_the_cache(model):
    """Also the last token: what is read behind an answer sees the whole of it."""
    adapted = AdaptedLlama(model, settings("h2o"))
    read, asked = torch.randint(3, 64, (1, 20)), torch.randint(3, 64, (1, 4))
    cache, expected = adapted.cache(), adapted.cache()
    logits = prefill(model, read, cache, 6)
    some = Mock(vocab_size=64, ends=set())
    written = torch.tensor([[*decode(model, some, logits, cache, most=5, temperature=0)]])
    for tokens in (*read.split(6, dim=1), *written.split(1, dim=1)):
        model(tokens, expected)
    assert cache.seen == expected.seen == 25
    stopped = adapted.cache()
    new = decode(model, some, prefill(model, read, stopped, 6), stopped, most=5, temperature=0)
    assert next(new) == written[0, 0] and stopped.seen == 21  # also if no more is asked for
    assert torch.equal(*(prefill(model, asked, c, 6) for c in (cache, expected)))


@pytest.mark.parametrize("method, positions, dtype, bits", [
    ("lococo-code", "slots", torch.float32, 0), ("h2o", "text", torch.bfloat16, 0),
    ("learned", "text", torch.float32, 8)])
def test_a_saved_memory_goes_on_to_the_bit(model, tmp_path, method, positions, dtype, bits):
    """In the middle of a segment, with the settings and the adapter of the file. Another dtype is
    refused."""
    model.config = replace(model.config, context=16)
    model.to(dtype)
    adapted = AdaptedLlama(model, settings(method, positions=positions)).eval()
    write_adapter(tmp_path, adapted, [], set())
    adapted.settings = replace(adapted.settings, bits=bits)
    tokens, whole = torch.randint(0, 64, (1, 60)), adapted.cache()
    prefill(model, tokens[:, :27], whole, 6)
    assert positions == "slots" or whole.lowest > 0  # entries have been moved up
    save_memory(tmp_path / "memory", Reader(adapted, whole, tmp_path, ("a book",)), "mine")
    loaded = load_memory(tmp_path / "memory", model)
    memory = loaded.memory
    assert memory.lowest == whole.lowest
    assert loaded.adapted.settings == adapted.settings
    assert (loaded.run, loaded.texts) == (tmp_path, ("a book",))
    assert torch.equal(*(prefill(model, tokens[:, 27:], m, 6) for m in (whole, memory)))
    assert memory.seen == whole.seen == 60 and memory.lowest == whole.lowest
    model.config = replace(model.config, norm_eps=1e-3)
    with pytest.raises(UserError, match="saved with another model, mine; name it by --model"):
        load_memory(tmp_path / "memory", model)
    model.config = adapted.model.config
    other = torch.float64 if dtype == torch.float32 else torch.float32
    with pytest.raises(UserError, match="saved with another --dtype; give the same"):
        load_memory(tmp_path / "memory", model.to(other))


def test_a_memory_is_saved_and_asked_again(run, tokenizer):
    """What is read in two runs is what one run reads, if the first ends with a whole segment."""
    ids, question = tokenizer.encode(Path("text/0.py").read_text())[:96], "return x"
    Path("book").write_text(tokenizer.decode(ids))  # 6 segments of 16
    Path("question").write_text(question)
    assert run(generate, f"{SMALL} --prompt book --save-memory memory")[0] == 0
    both = ids + tokenizer.continued(question)
    expected = tokenizer.decode(greedy_by_hand(tiny(H2O), both)[: len(both) + 3]) + "\n"
    ask = "--prompt question --load-memory memory --temperature 0 --max-new-tokens 3"
    code, out, err = run(generate, ask)
    assert code == 0 and expected.endswith(question + out), err
    held = r'memory of book \("def f0_0.*\), read [-\d]+ [:\d]+: 96 tokens in [\d,]+ bytes\n'
    assert re.match(held, err)
    keeps = "--load-memory: a memory keeps its --method and its sizes; leave them out"
    for words, sentence in (
        ("--mem 8", keeps), ("--bits 8", keeps), ("--method streaming", keeps),
        ("--budgets equal", keeps),
        ("--adapter adapter", "--adapter adapter: memory was read without one; leave the flag"),
        ("--dtype bfloat16", "memory: it was saved with another --dtype; give the same"),
    ):
        code, _, err = run(generate, f"{ask} {words}")
        assert (code, err.count("\n")) == (2, 1) and sentence in err, err


@pytest.mark.parametrize("before", [SMALL, "--load-memory start"])
def test_reading_goes_on_after_ctrl_c(run, monkeypatch, before):
    """From what was saved meanwhile, to the bit, and not with another text."""
    Path("book").write_text(Path("text/0.py").read_text()[:300])
    Path("more").write_text(Path("text/1.py").read_text()[:300])
    assert run(generate, f"{SMALL} --prompt book --save-memory start")[0] == 0
    line = f"{before} --prompt book more --save-memory"
    assert run(generate, f"{line} once")[0] == 0
    monkeypatch.setattr(saved_memory, "SAVE_EVERY", 0)
    entered, hidden = [], Llama.hidden

    def interrupted(*args):
        entered.append(args)
        if len(entered) == 4:
            raise KeyboardInterrupt
        return hidden(*args)

    monkeypatch.setattr(Llama, "hidden", interrupted)
    code, _, err = run(generate, f"{line} stopped")
    assert code == 130 and "the same command goes on from stopped.part" in err
    monkeypatch.setattr(Llama, "hidden", hidden)
    code, _, err = run(generate, f"{before} --prompt book --save-memory stopped")
    begun = "stopped.part: another text, or another memory, was begun there; remove it, or name"
    assert code == 2 and begun in err
    code, _, err = run(generate, f"{SMALL} --mem 8 --prompt book more --save-memory stopped")
    assert code == 2 and begun in err
    code, _, err = run(generate, "--load-memory stopped.part --prompt book --save-memory other")
    assert code == 2 and "its text is not read to the end; run the command again that" in err
    code, _, err = run(generate, f"{line} stopped")
    assert code == 0 and "going on from stopped.part, with " in err
    assert before != SMALL or "with 48 tokens" in err  # 3 segments of 16 tokens
    left = int(re.search(r"reading +(\d+) tokens in", err)[1])
    assert before != SMALL or left == read_file(Path("stopped"))[1]["counters"]["seen"] - 48
    (once, about), (stopped, other) = (read_file(Path(name)) for name in ("once", "stopped"))
    assert about | {"date": ""} == other | {"date": ""} and once.keys() == stopped.keys()
    assert all(torch.equal(once[name], stopped[name]) for name in once)
    assert not Path("stopped.part").exists()
    with monkeypatch.context() as patch:  # stopped while the whole memory is saved

        def fails(file, *args):
            if file.name == "last":
                raise KeyboardInterrupt
            save_memory(file, *args)

        patch.setattr(saved_memory, "save_memory", fails)
        assert run(generate, f"{line} last")[0] == 130
    assert run(generate, f"{line} last")[0] == 0
    last, _ = read_file(Path("last"))
    assert all(torch.equal(once[name], last[name]) for name in once)


def test_several_texts_are_read_below_their_names(run):
    for name, text in (("a.txt", "def f():"), ("b.txt", "return x"),
                       ("both", "a.txt\n\ndef f():\n\nb.txt\n\nreturn x")):
        Path(name).write_text(text)
    ask = f"{SMALL} --temperature 0 --max-new-tokens 8 --prompt"
    assert run(generate, f"{ask} a.txt b.txt")[:2] == run(generate, f"{ask} both")[:2]


def test_a_prompt_with_special_tokens(run):
    """They are plain text, which is said, or tokens; the BOS is not there twice."""
    for name, text in (("plain", "def f"), ("marked", "<s>def f")):
        Path(name).write_text(text)
    ask = f"{SMALL} --temperature 0 --max-new-tokens 3 --prompt"
    note = "note: --prompt marked has <s>, read as plain text; --special-tokens reads them as"
    assert note in run(generate, f"{ask} marked")[2]
    marked, plain = run(generate, f"{ask} marked --special-tokens"), run(generate, f"{ask} plain")
    assert marked[:2] == plain[:2] and note not in marked[2]


@pytest.mark.parametrize("temperature, expected", [
    (0, [0, 1, 0, 0]), (1, [0.04, 0.64, 0.16, 0.16]),
    (2, [1 / 9, 4 / 9, 2 / 9, 2 / 9])])  # roots: 0.2, 0.8, 0.4, 0.4; the sum is 1.8
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


def test_weights_that_are_no_good_are_noticed(model):
    model.output.weight.data.fill_(3e38)  # the largest float
    adapted, tokens = AdaptedLlama(model, FULL), torch.ones(1, 4, dtype=torch.int64)
    with pytest.raises(UserError, match="the model's output is not finite"):
        prefill(model, tokens, adapted.cache(), 16)
    with pytest.raises(UserError, match="the model's output is not finite"):
        eval_ppl.token_losses(adapted, tokens, Machine("cpu", torch.float32), 1)


# --- Mistakes ---------------------------------------------------------------------------

GENERATE = "--method h2o --mem 16 --prompt text/0.py"
EVAL = "--method h2o --mem 16 --data text --lengths 64"
TRAIN = "--data text --mem 16 --segment 16 --seq 96 --steps 2 --out run"
MISTAKES = [
    (generate, f"{GENERATE} {words}", sentence) for words, sentence in [
        ("--prompt -", "there is no text"), ("--save-memory latin", "latin: there is"),
        ("--device hpu", "--device hpu: this torch has no"),
        ("--prompt latin/x", "latin/x: there is no such file; a text itself comes by"),
        ("--prompt latin", "latin: not UTF-8 text (byte 3)"), ("--prompt text", "text: this is a"),
        ("--adapter adapter", "--adapter adapter, --method h2o: name one of them"),
        ("--method full --save-memory m", "full: it keeps everything and has no slots"),
        ("--method full", "--mem: it needs a memory of slots"),
        ("--budgets latin", "latin: cannot be read as JSON"),
        ("--budgets nowhere", "--budgets nowhere: there is no such file"),
        ("--temperature nan", "--temperature nan: it must be at least 0"),
        ("--budgets tiny.json", "tiny.json: it has no lists of budgets"),
    ]
] + [
    (generate, "", "give --prompt, or --load-memory with --ask"),
    (generate, "--ask who", "give --prompt, or --load-memory with --ask"),
    (generate, "--load-memory adapter/adapter.safetensors --ask who", "this is no memory, or one"),
    (generate, f"{GENERATE} --ask --save-memory m", "--ask and --save-memory: save first, then"),
    (generate, f"{GENERATE} --follow-up", "--follow-up: it is for several questions; add --ask"),
    (eval_ppl, f"{EVAL} --fact-form line", "--fact-form line: it is for facts; add --recall"),
    (needle, "--ask --fact-form line", "--ask: a chat has its own sentences; leave --fact-form out"),
    (show_memory, f"{GENERATE} --method full --page p", "full: it keeps everything and has no"),
    (show_memory, "--prompt a --method h2o streaming full --adapter a --page p", "up to three mem"),
    (generate, f"{GENERATE} --mem 3", "--mem 3: it must be at least 4"),
    (generate, f"{GENERATE} --method lococo", "it must be trained first: python train.py "),
    (generate, f"{GENERATE} --method learned", "its score must be fitted first, by tools/fit_scores"),
    (train, f"{TRAIN} --method learned", "its score must be fitted first, by tools/fit_scores"),
    (train, f"{TRAIN} --seq 33", "so that nothing is compressed"),
    (train, f"{TRAIN} --model missing", "missing: there is no such"),
    (train, f"{TRAIN} --model loop", "loop: there is no such folder of a model"),
    (generate, "--model loop --prompt text/0.py", "loop: there is no such folder of a model"),
    (eval_ppl, "--model loop", "loop: there is no such folder of a model"),
    (train, f"{TRAIN} --model latin", "latin: this is a file; name the folder of the model"),
    (train, f"{TRAIN} --method h2o --lora-rank 0", "there is nothing to train"),
    (train, f"{TRAIN} --out latin", "latin: it is there already; name another place"),
    (train, f"{TRAIN} --out text", "--out text: it has files already"),
    (train, f"{TRAIN} --out ''", "this name is empty"),
    (eval_ppl, f"{EVAL} --lengths 99999", "--lengths 99999"),
    (eval_ppl, f"{EVAL} -- nowhere", "nowhere: there is no such folder"),
    (eval_ppl, f"{EVAL} -- loop", "loop: there is no such folder"),
    (eval_ppl, f"{EVAL} -- latin", "texts are named by --data"),
    (eval_ppl, f"{EVAL} --json no/x", "no/x: there is no folder no; make it first"),
    (eval_ppl, f"{EVAL} --json /dev/stdout", "/dev/stdout: this is a stream; name a file"),
]


@pytest.mark.parametrize("program, words, sentence", MISTAKES)
def test_a_mistake_is_one_sentence(run, program, words, sentence):
    """Exit code 2, one line on standard error, no traceback, and nothing is scored before."""
    code, out, err = run(program, words)
    assert (code, out, err.count("\n")) == (2, "", 1) and sentence in err, err
    assert err.startswith(f"{program.__name__}.py: ")


def test_held_out_texts_that_all_train_are_not_scored(run):
    Path("twice").mkdir()
    for i in range(40):  # of such names some are held out
        Path(f"twice/{i}.txt").write_text("a text of more than 64 tokens. " * 20)
    words = "--method h2o --mem 16 --data twice --part held-out --lengths 64"
    code, out, err = run(eval_ppl, words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "--lengths 64: all texts of this length are also training texts, under" in err


@pytest.mark.parametrize("error, code, sentence", [
    (torch.OutOfMemoryError("CUDA out of memory."), 2, "smaller --mem"),
    (RuntimeError("not enough memory: you tried to allocate 8 bytes."), 2, "smaller --mem"),
    (MemoryError(), 2, "smaller --mem"), (OSError(28, "No space left"), 2, "No space left"),
    (KeyboardInterrupt(), 130, ""), (RuntimeError("x"), None, "")], ids=repr)
def test_which_errors_are_a_sentence_and_which_a_traceback(capsys, error, code, sentence):
    with pytest.raises(type(error) if code is None else SystemExit) as raised:
        run_program(Mock(side_effect=error))
    err = capsys.readouterr().err
    assert raised.value is error if code is None else raised.value.code == code
    assert sentence in err and err.count("\n") == (code == 2)


def test_a_pipe_that_is_closed(monkeypatch):
    """As `| head` closes it when it has seen enough: what is printed last cannot be
    written. The program ends at once and without a traceback."""
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setattr(sys, "stdout", Mock(flush=Mock(side_effect=BrokenPipeError)))
    with pytest.raises(SystemExit) as raised:
        run_program(Mock())
    assert raised.value.code == 1
