"""generate.py and eval_ppl.py as a user runs them: what they print, write and refuse."""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import FULL, H2O, cells, greedy_by_hand, nats_by_hand, read_by_hand, settings
from safetensors.torch import load_file, save_file

import eval_ppl
import generate
import train
from generate import as_text, decode, prefill, sample
from lococo import AdaptedLlama, Compressor, Settings
from model import load_llama
from support.programs.adapter import identity, load_adapter, write_adapter
from support.command_line import TINY, at_least, run_program
from support.facts import FORMS, tell
from support.files import UserError, write_file
from support.programs.saved_memory import load_memory, save_memory
from support.programs.scoring import name_of
from support.programs.settings import settings_for, warn_if_too_long
from support.text import PARTS, long_documents, token_streams

LINES = {
    generate: "--method h2o --mem 16 --prompt text/0.py",
    eval_ppl: "--method h2o --mem 16 --data text --lengths 64",
}
SINKS = "--method h2o --mem 16 --sinks 4"
WINDOW = Settings("streaming", 16, 96, sinks=4, recent=12, positions="slots", lora_rank=0)
H2O_ROW = "base, h2o M=16 positions=slots"
ENTRY = 2 * 4 * 2 * 64 * 4  # bytes of a key and a value in 4 layers of 2 heads of 64 floats


def wrong_weights(name: str, weight: str, factor: float) -> None:
    """A folder with the embedded base, one of whose weights is multiplied."""
    shutil.copytree(TINY, name, ignore=shutil.ignore_patterns("adapter*"))
    weights = load_file(f"{name}/model.safetensors")
    weights[weight] *= factor
    save_file(weights, f"{name}/model.safetensors")


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Good adapters, each of whose tensors matters, and things that are wrong."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("stock")
    s = settings_for("selection", 16, 16, 96, positions="slots")
    for name in ("adapter", "whole"):
        adapted = AdaptedLlama(load_llama(TINY), s)
        for p in adapted.trained().values():
            p.data += 0.02 * torch.randn_like(p)
        (folder / name).mkdir()
        write_adapter(folder / name, adapted, [*PARTS] if name == "whole" else ["training"])
    about = identity(adapted) | {"parts": []}
    about["settings"]["colour"] = 1
    for name in ("newer", "damaged"):
        (folder / name).mkdir()
        file = folder / name / "adapter.safetensors"
        write_file(file, adapted.trained(), **about)
    file.write_bytes(file.read_bytes()[:-9] + b"\x99" * 9)
    wrong_weights(folder / "other-base", "model.layers.2.mlp.up_proj.weight", 1.1)
    wrong_weights(folder / "loud-base", "lm_head.weight", 3e38)  # the largest float
    (folder / "latin").write_bytes(b"caf\xe9 au lait")
    return folder


@pytest.fixture(autouse=True)
def stock_at_hand(own_folders, stock):
    for thing in stock.iterdir():
        Path(thing.name).symlink_to(thing)


def tiny(thing: Settings | str) -> AdaptedLlama:
    """The embedded base with a method without training, or with an adapter."""
    base = load_llama(TINY)
    return load_adapter(Path(thing), base) if isinstance(thing, str) else AdaptedLlama(base, thing)


# --- eval_ppl.py ------------------------------------------------------------------------


def test_the_table_and_the_loss_by_position(run, tokenizer):
    """By hand. A length, a method and a run are scored once, however they are named."""
    words = f"{Path('adapter').resolve()} whole adapter"
    words += " --method streaming h2o h2o --mem 16 --sinks 4"
    words += " --data text --part training --documents 2 --lengths 64 300 64"
    code, out, err = run(eval_ppl, f"{words} --by-position --json figures.json")
    figures = json.loads(Path("figures.json").read_text())
    assert code == 0 and "documents (training): 2 of 64 tokens, 2 of 300 tokens" in out, err
    ids = token_streams([Path("text")], tokenizer)["training"]
    texts = [long_documents(ids, tokenizer.bos, L, 2) for L in (64, 300)]
    models = {"base, full": FULL, "base, streaming M=16": WINDOW,
              "base, h2o M=16 sinks=4 recent=4": H2O,  # what H2O has not by itself
              "adapter": "adapter", "whole": "whole"}  # fmt: skip
    assert [*figures["methods"]] == [*models]
    table, near, far = cells(out), [], []
    for name, thing in models.items():
        short, long = [nats_by_hand(tiny(thing), rows) for rows in texts]
        slots, nbytes, *printed = " ".join(table[name]).replace(",", "").split()
        expected = [math.exp(short.mean()), math.exp(long.mean())]
        assert [float(value) for value in printed] == pytest.approx(expected, abs=6e-4)
        written = figures["methods"][name]["perplexity"].values()
        assert [*written] == pytest.approx(expected, abs=1e-4)
        slots_and_held = ("-", 299) if thing is FULL else ("16", 16 + 299 % 16)
        assert (slots, int(nbytes) // ENTRY) == slots_and_held
        near.append(long[:, :32].mean())  # a column for each token but the first
        far.append(long[:, 32:].mean())
    for kind, expected in (("0-32", [64, *near]), ("32-300", [534, *far])):
        found = [float(word) for word in table[f"position {kind}"]]
        assert found == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("form", FORMS)
def test_recall(run, tokenizer, form):
    """The share of answers that are the likeliest word. A window and H2O stand beside a run."""
    words = "adapter --recall --data text --part held-out --lengths 64 300 --documents 2"
    code, out, err = run(eval_ppl, f"{words} --fact-form {form}")
    names, table = ["base, full", "base, streaming M=16", H2O_ROW, "adapter"], cells(out)
    assert code == 0 and table["recalled; by chance 1 in 220"] == ["answers", *names], err
    ids = token_streams([Path("text")], tokenizer)["held-out"]
    texts = long_documents(ids, tokenizer.bos, 300, 2)
    rows = [tell(text, 8, "held-out", 0, i, tokenizer, form) for i, text in enumerate(texts)]
    for column, thing in ((1, FULL), (4, "adapter")):
        adapted, hits = tiny(thing), []
        for told, ago in rows:
            likeliest = read_by_hand(adapted, told.tolist()).argmax(dim=-1)
            hits += [float(likeliest[t - 1] == told[t]) for t in ago.nonzero()[:, 0].tolist()]
        # A fact is told again after 64 tokens at least.
        assert table["told ago 0-32"] == ["0", "-", "-", "-", "-"]
        row = table["told ago 32-300"]
        assert (row[0], row[column]) == (str(len(hits)), f"{np.mean(hits):.3f}")


@pytest.mark.parametrize("L, reach, edges", [
    (600, 100, [0, 100, 512, 600]), (90, 0, [0, 90]), (600, 1024, [0, 600])])
def test_ranges_of_distances(L, reach, edges):
    """The last number of a range is in it. 0 is in none."""
    n = torch.arange(2, L + 1).repeat(2, 1)
    n[1, :2] = torch.tensor([0, 1])
    masks = eval_ppl.ranges("what ", n, reach)
    assert list(masks) == [f"what {a}-{b}" for a, b in zip(edges, edges[1:])]
    for mask, a, b in zip(masks.values(), edges, edges[1:]):
        assert n[mask].unique().tolist() == list(range(a + 1, b + 1))


@pytest.mark.parametrize("words, scored", [
    ("adapter whole", "held-out): 2"), ("whole", "all parts): 20"),
    ("--method full", "all parts): 20"), ("whole --part training", "training): ")])  # fmt: skip
def test_which_part_of_the_texts_is_scored(run, words, scored):
    """What a run has held out. If no run has, all that the user names."""
    rows = [json.dumps({"text": f"{n} {'some words ' * 60}"}) for n in range(20)]
    Path("own.jsonl").write_text("\n".join(rows))
    code, out, err = run(eval_ppl, f"{words} --data own.jsonl --lengths 64 --documents 99")
    assert code == 0 and f"documents ({scored}" in out, err
    assert ("whole: it trained on all of its --data" in err) == ("whole" in words)


@pytest.mark.parametrize("changes, ending", [
    ({}, ""), ({"heavy": 4, "forget": 0.5}, " heavy=4 recent=12 forget=0.5"),
    ({"positions": "slots"}, " positions=slots"), ({"budgets": [12, 20]}, " budgets")])
def test_a_row_is_named_by_all_that_differs(changes, ending):
    assert name_of(settings_for("h2o", 16, 16, 96, **changes)) == f"base, h2o M=16{ending}"


@pytest.mark.parametrize("method, mem, changes, tokens, remedy", [
    ("streaming", 128, {}, 9999, ""),  # positions end at M + T = 256
    ("streaming", 1024, {}, 9999, "take a smaller --mem or --segment"),  # M + T = 2048
    ("full", 16, {}, 1025, "--method h2o --mem 512 --positions slots keeps them small"),
    ("full", 16, {}, 1024, ""),
    ("h2o", 16, {"positions": "slots"}, 9999, ""),
    ("selection", 16, {}, 1025, "train with a larger --seq, or with --positions slots"),
])  # fmt: skip
def test_a_warning_if_positions_pass_the_context(capsys, method, mem, changes, tokens, remedy):
    warn_if_too_long(settings_for(method, mem, mem, 1024, **changes | {"lora_rank": 0}), tokens)
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {method}: positions may reach ") == bool(remedy)
    assert err.endswith(f"and the memory is for 1,024; {remedy}\n" if remedy else "")


# --- generate.py ------------------------------------------------------------------------


@pytest.mark.parametrize("words, thing", [
    ("--method full", FULL), (SINKS, H2O), ("--adapter adapter", "adapter")])
def test_greedy_text_and_figures(run, tokenizer, words, thing):
    book = Path("text/0.py").read_text()[:250]
    Path("book").write_text(book)
    adapted, ids = tiny(thing), tokenizer.encode(book)
    code, out, err = run(generate, f"{words} --temperature 0 --max-new-tokens 12 --prompt book")
    assert book + out == tokenizer.decode(greedy_by_hand(adapted, ids)) + "\n", err
    shown = err.replace(",", "").replace("all entries", "0 slots").splitlines()
    memory, nbytes_and_full = (
        next(line for line in shown if line.startswith(name)) for name in ("memory", "key/value")
    )
    slots, held, seen, *most = map(int, re.findall(r"\d+", memory))
    nbytes, full = map(int, re.findall(r"\d+", nbytes_and_full))
    assert slots == adapted.settings.mem and most == ([16 + 16] if slots else [])
    assert seen == len(ids) + 11  # the last one of twelve is written, and need not be read
    assert held <= 16 + 16 if slots else held == seen
    assert (nbytes, full) == (ENTRY * held, ENTRY * seen)


@pytest.mark.parametrize("method, changes", [
    ("streaming", {}), ("selection", {"positions": "slots"}), ("h2o", {})])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_memory_goes_on_to_the_bit(model, tmp_path, method, changes, dtype):
    """In the middle of a segment. One of another method or dtype is refused."""
    model.to(dtype)
    adapted = AdaptedLlama(model, settings(method, **changes)).eval()
    tokens, whole, loaded = torch.randint(0, 64, (1, 60)), adapted.cache(), adapted.cache()
    prefill(model, tokens[:, :27], whole, 6)
    save_memory(tmp_path / "memory", whole, adapted)
    load_memory(tmp_path / "memory", loaded, adapted)
    assert torch.equal(*(prefill(model, tokens[:, 27:], memory, 6) for memory in (whole, loaded)))
    assert loaded.seen == whole.seen == 60
    other = AdaptedLlama(model, settings("h2o", mem=10))
    with pytest.raises(UserError, match="saved with another model, adapter, --dtype"):
        load_memory(tmp_path / "memory", other.cache(), other)


def test_a_memory_is_saved_and_asked_again(run, tokenizer):
    """What is read in two runs is what one run reads, if the first ends with a whole segment."""
    ids, question = tokenizer.encode(Path("text/0.py").read_text())[:96], "return x"
    Path("book").write_text(tokenizer.decode(ids))  # 6 segments of 16
    Path("question").write_text(question)
    assert run(generate, f"{SINKS} --prompt book --save-memory memory")[0] == 0
    both = ids + tokenizer.encode(question)[1:]
    expected = tokenizer.decode(greedy_by_hand(tiny(H2O), both)[: len(both) + 3]) + "\n"
    ask = f"{SINKS} --prompt question --load-memory memory --temperature 0 --max-new-tokens 3"
    code, out, err = run(generate, ask)
    assert code == 0 and expected.endswith(question + out), err


def test_a_prompt_with_special_tokens(run):
    """They are plain text, which is said, or tokens; the BOS is not there twice."""
    for name, text in (("plain", "def f"), ("marked", "<s>def f")):
        Path(name).write_text(text)
    ask = f"{SINKS} --temperature 0 --max-new-tokens 3 --prompt"
    note = "note: --prompt marked has <s>, read as plain text; --special-tokens reads them as"
    assert note in run(generate, f"{ask} marked")[2]
    assert run(generate, f"{ask} marked --special-tokens") == run(generate, f"{ask} plain")


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


# --- Mistakes ---------------------------------------------------------------------------

GENERATE, EVAL = LINES.values()
MISTAKES = [
    (generate, f"{GENERATE} {words}", sentence) for words, sentence in [
        ("--show-memory 4 0", "layers 0 to 3 and heads 0 to 1"), ("--prompt -", "there is no text"),
        ("--device hpu", "--device hpu: this torch has no"), ("--method lococo", "method lococo"),
        ("--prompt allocate", "allocate: there is no such file"),
        ("--prompt latin/x", "latin/x: a part of this name is a file; name another place"),
        ("--prompt latin", "latin: not UTF-8 text (byte 3)"), ("--prompt text", "text: this is a"),
        ("--model loud-base", "the model's output is not finite"),
        ("--adapter adapter", "adapter, h2o: one at a time"),
        ("--method h2o streaming full --adapter a --show-memory p.html", "up to three with"),
        ("--show-memory 1 x", "--show-memory 1 x: name a layer and a head, such as 1 0, or one"),
        ("--method full --show-memory 0 0", "no slots"), ("--save-memory latin", "latin: there is"),
        ("--load-memory adapter/adapter.safetensors", "saved with another model"),
        ("--mem 8 --budgets 8 8 4 12 --show-memory p.html", "a page does not show layers"),
        ("--show-memory p.html --save-memory m", "goes with neither --save-memory nor"),
    ]
] + [
    (generate, "", "required: --prompt"),
    (generate, "--prompt text/0.py --mem 16", "--mem and the like go with --method"),
    (generate, "--prompt text/0.py --adapter damaged", "checksum"),
    (eval_ppl, f"{EVAL} --lengths 99999", "--lengths 99999"),
    (eval_ppl, f"{EVAL} -- nowhere", "nowhere: there is no adapter"),
    (eval_ppl, f"{EVAL} --json no/x", "no/x: there is no folder no; make it first"),
    (eval_ppl, "newer --recall --data text --lengths 64", "newer: its adapter is by another"),
    (eval_ppl, "adapter --model other-base --data text --lengths 64", "for another base"),
]  # fmt: skip


@pytest.mark.parametrize("program, words, sentence", MISTAKES)
def test_a_mistake_is_one_sentence(run, program, words, sentence):
    """Exit code 2, one line on standard error, no traceback, and nothing is scored before."""
    code, out, err = run(program, words)
    assert (code, out, err.count("\n")) == (2, "", 1) and sentence in err, err
    assert err.startswith(f"{program.__name__}.py: ")


@pytest.mark.parametrize("kind, least, most, text, sentence", [
    (int, 4, None, "3", "3: it must be at least 4"), (int, 0, None, str(10**20), "from 0 to"),
    (float, 0, 1, "1.5", "1.5: it must be from 0 to 1"), (float, 0, None, "nan", "nan: it must be"),
    (float, 0, None, "inf", "inf: it must be from")])  # fmt: skip
def test_numbers_of_flags(kind, least, most, text, sentence):
    convert = at_least(least, kind, most) if most else at_least(least, kind)
    assert convert(str(least)) == least
    with pytest.raises(argparse.ArgumentTypeError, match=sentence):
        convert(text)


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


def test_a_compressor_whose_rows_do_not_sum_to_1(run, monkeypatch):
    """One of one's own, such as a softmax over the wrong dimension, is noticed before anything is
    scored."""
    Path("mine").mkdir()
    adapted = AdaptedLlama(load_llama(TINY), settings_for("lococo", 16, 16, 96, lora_rank=0))
    write_adapter(Path("mine"), adapted, ["training"])
    monkeypatch.setattr(Compressor, "weights", lambda self, entries, *_: self.conv(entries))
    for program, words in (
        (generate, "--prompt text/0.py --adapter mine"),
        (eval_ppl, "mine --data text --lengths 64"),
        (train, "--data text --method lococo --mem 16 --seq 96 --lora-rank 0 --steps 1 --out run"),
    ):
        code, out, err = run(program, words)
        sentence = f"{program.__name__}.py: Compressor.weights: the rows of w sum to "
        assert code == 2 and err.startswith(sentence) and "perplexity" not in out


def test_a_pipe_that_is_closed():
    """As `| head` closes it when it has seen enough."""
    line = f"{sys.executable} {generate.__file__} {GENERATE} --show-memory 0 0 | :"
    command = ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
