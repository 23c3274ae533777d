"""generate.py and eval_ppl.py as a user runs them: what they print, write and refuse."""

import argparse
import copy
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import FULL, H2O, greedy_by_hand, nats_by_hand, read_by_hand, same, settings
from safetensors.torch import load_file, save_file

import eval_ppl
import generate
from generate import as_text, decode, prefill, sample
from lococo import AdaptedLlama, Compressor, Settings
from model import load_llama
from support.programs.adapter import identity, load_adapter, shared_copy, write_adapter
from support.command_line import TINY, at_least, output_file, run_program
from support.facts import tell
from support.files import UserError, write_file
from support.programs.saved_memory import load_memory, save_memory
from support.programs.scoring import models_to_score, name_of, note_limits
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
    for name in ("latin", "latin.html"):
        (folder / name).write_bytes(b"caf\xe9 au lait")
    return folder


@pytest.fixture(autouse=True)
def stock_at_hand(own_folders, stock):
    for thing in stock.iterdir():
        Path(thing.name).symlink_to(thing)


def tiny(thing: Settings | str) -> AdaptedLlama:
    """The embedded base with a method without training, or with an adapter."""
    base = load_llama(TINY)
    return load_adapter(Path(thing), base) if isinstance(thing, str) else AdaptedLlama(base, thing)


def cells(out: str) -> dict[str, list[str]]:
    """Of a printed table, the columns of each row by its name."""
    rows = [re.split(" {2,}", line) for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows}


# --- eval_ppl.py ------------------------------------------------------------------------


def test_the_table_and_the_loss_by_position(run, tokenizer, monkeypatch):
    """The counts that are given are those of the methods: they do not concern the full cache. A
    length is scored once, and so are a method and a run, however they are named. All models share
    a base, which is loaded once."""
    watched = Mock(side_effect=eval_ppl.load_base)
    monkeypatch.setattr(eval_ppl, "load_base", watched)
    words = f"{Path('adapter').resolve()} whole adapter"
    words += " --method streaming h2o h2o --mem 16 --sinks 4"
    words += " --data text --part training --documents 2 --lengths 64 300 64"
    code, out, err = run(eval_ppl, f"{words} --by-position --json figures.json")
    figures = json.loads(Path("figures.json").read_text())
    assert code == 0 and "documents (training): 2 of 64 tokens, 2 of 300 tokens" in out, err
    assert watched.call_count == 1
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


def test_an_adapter_leaves_the_base_that_it_shares(model):
    """In bfloat16, where its embeddings and norms are in float32."""
    model.bfloat16()
    before = copy.deepcopy(model.state_dict())
    adapted = AdaptedLlama(shared_copy(model), settings(lora_rank=2))
    for p in adapted.trained().values():
        p.data += 1
    frozen = (m.layers[0].feed_forward.w1.weight.data_ptr() for m in (model, adapted.model))
    assert same(model.state_dict(), before) and len(set(frozen)) == 1


@pytest.mark.parametrize("method, changes, names", [
    ([], {}, ["base, streaming M=16", "base, h2o M=16 positions=slots"]), (["full"], {}, []),
    (["h2o"], {"heavy": 100}, ["base, h2o M=512 heavy=100 recent=412"])])  # fmt: skip
def test_which_models_stand_beside_a_run(method, changes, names):
    """For --recall a window and H2O of its size, if no methods are named."""
    flags = argparse.Namespace(runs=[Path("adapter")], method=method, mem=None, segment=None,
                               changes=changes)  # fmt: skip
    models = models_to_score(flags, load_llama(TINY), with_baselines=True)
    assert [*models] == ["base, full", *names, "adapter"]


def test_recall(run, tokenizer):
    """The share of answers that are the likeliest word."""
    words = "adapter --recall --data text --part held-out --lengths 64 300 --documents 2"
    code, out, err = run(eval_ppl, words)
    names, table = ["base, full", "base, streaming M=16", H2O_ROW, "adapter"], cells(out)
    assert code == 0 and table["recalled; by chance 1 in 220"] == ["answers", *names], err
    ids = token_streams([Path("text")], tokenizer)["held-out"]
    texts = long_documents(ids, tokenizer.bos, 300, 2)
    rows = [tell(text, 8, "held-out", 0, i, tokenizer) for i, text in enumerate(texts)]
    for column, thing in ((1, FULL), (4, "adapter")):
        adapted, hits = tiny(thing), []
        for told, ago in rows:
            likeliest = read_by_hand(adapted, told.tolist()).argmax(dim=-1)
            answers = ago.nonzero()[:, 0].tolist()
            hits += [float(likeliest[t - 1] == told[t]) for t in answers]
        # A fact is told again after 64 tokens at least.
        assert table["told ago 0-32"] == ["0", "-", "-", "-", "-"]
        row = table["told ago 32-300"]
        assert (row[0], row[column]) == (str(len(hits)), f"{np.mean(hits):.3f}")
        assert thing == "adapter" or 1 in hits  # full attention has some


def test_the_form_of_facts_reaches_all_that_is_scored(run, monkeypatch):
    forms = []
    for name in ("tell_all", "fact_tokens"):
        usual = getattr(eval_ppl, name)
        watched = Mock(side_effect=lambda *args, usual=usual: forms.append(args[-1]) or usual(*args))
        monkeypatch.setattr(eval_ppl, name, watched)
    words = f"{LINES[eval_ppl]} --lengths 300 --documents 1 --recall --fact-form sentence"
    code, out, err = run(eval_ppl, words)
    assert code == 0 and "recalled; by chance" in out and forms == 2 * ["sentence"], err


@pytest.mark.parametrize("words, scored", [
    ("adapter whole", "held-out): 2"), ("whole", "all parts): 20"),
    ("--method full", "all parts): 20"), ("whole --part training", "training): "),
    ("adapter --embedded", "all parts): 20")])  # it has read Python's library alone  # fmt: skip
def test_which_part_of_the_texts_is_scored(run, monkeypatch, words, scored):
    """What a run has held out. If no run has, all that the user names."""
    rows = [json.dumps({"text": f"{n} {'some words ' * 60}"}) for n in range(20)]
    Path("own.jsonl").write_text("\n".join(rows))
    if "--embedded" in words:
        monkeypatch.setattr("support.programs.scoring.TINY", Path("adapter").resolve())
    words = words.replace("--embedded", "") + " --data own.jsonl --lengths 64 --documents 99"
    code, out, err = run(eval_ppl, words)
    assert code == 0 and f"documents ({scored}" in out, err
    assert ("whole: it trained on all of its --data" in err) == ("whole" in words)


def test_without_a_text_it_says_what_it_scores(run, monkeypatch):
    monkeypatch.setattr("support.text.find_files", lambda *args: sorted(Path("text").iterdir()))
    _, out, _ = run(eval_ppl, "--method full --lengths 64")
    assert "documents (Python's standard library, held-out): " in out


def test_a_book_of_ones_own_that_fell_into_another_part(run):
    Path("2.txt").write_text("some words of a book\n" * 300)
    words = "adapter --data 2.txt --lengths"
    code, _, err = run(eval_ppl, f"{words} 64")
    assert code == 2 and "--lengths 64: the longest document of the held-out part has 0 tokens" in err
    assert "another --part" in err
    code, _, err = run(eval_ppl, f"{words} 9000 --part all")
    assert code == 2 and re.search("the longest document has [1-8],... tokens; name smaller", err)
    assert "1 of 64 tokens" in run(eval_ppl, f"{words} 64 --part training")[1]


def test_a_perplexity_above_all_numbers(run):
    """A mean loss above 709 nats."""
    wrong_weights("loud", "lm_head.weight", 3000)
    code, out, err = run(eval_ppl, f"{LINES[eval_ppl]} --model loud")
    assert code == 0 and len(re.findall(" inf$", out, re.M)) == 2, err  # of two models
    assert eval_ppl.perplexity(torch.tensor([1.0, 3.0])) == pytest.approx(math.e**2)
    assert math.isnan(eval_ppl.perplexity(torch.tensor([1.0, math.nan])))  # which is not infinite


@pytest.mark.parametrize("changes, ending", [
    ({}, ""), ({"heavy": 4, "forget": 0.5}, " heavy=4 recent=12 forget=0.5"),
    ({"positions": "slots"}, " positions=slots"), ({"budgets": [12, 20]}, " budgets")])
def test_a_row_is_named_by_all_that_differs(changes, ending):
    assert name_of(settings_for("h2o", 16, 16, 96, **changes)) == f"base, h2o M=16{ending}"


@pytest.mark.parametrize("method, changes, noted", [
    ("full", {}, None), ("h2o", {}, "20 33"), ("h2o", {"budgets": [12, 20]}, None)])
def test_scores_without_a_compression_have_a_note(capsys, method, changes, noted):
    """The last token of a document is only a target, and does not enter. With budgets a layer may
    compress earlier."""
    adapted = SimpleNamespace(settings=settings_for(method, 16, 16, 96, **changes))
    note_limits({"a row": adapted}, [20, 33, 34])
    note = f"note: a row, --lengths {noted}: up to 32 entries nothing is compressed\n"
    assert capsys.readouterr().err == (note if noted else "")


@pytest.mark.parametrize("method, mem, changes, tokens, remedy", [
    ("streaming", 128, {}, 9999, ""),  # positions end at M + T = 256
    ("streaming", 1024, {}, 9999, "take a smaller --mem or --segment"),  # M + T = 2048
    ("full", 16, {}, 1025, "--method h2o --mem 512 --positions slots keeps them small"),
    ("full", 16, {}, 1024, ""), ("h2o", 16, {}, 1025, "--positions slots keeps them small"),
    ("h2o", 16, {"positions": "slots"}, 9999, ""),
    ("selection", 16, {}, 1025, "train with a larger --seq, or with --positions slots"),
])  # fmt: skip
def test_a_warning_if_positions_pass_the_context(capsys, method, mem, changes, tokens, remedy):
    warn_if_too_long(settings_for(method, mem, mem, 1024, **changes | {"lora_rank": 0}), tokens)
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {method}: positions may reach ") == bool(remedy)
    assert err.endswith(f"and the memory is for 1,024; {remedy}\n" if remedy else "")


def test_programs_warn_of_long_texts(run, tokenizer):
    """In generate.py the answer counts, too."""
    ids = tokenizer.encode(Path("text/0.py").read_text() * 9)[:1000]
    Path("long.txt").write_text(tokenizer.decode(ids))
    for new in (24, 25):
        err = run(generate, f"--method full --prompt long.txt --max-new-tokens {new}")[2]
        assert ("warning: " in err) == (new == 25), err
    Path("long.txt").write_text(Path("text/0.py").read_text() * 20)
    words = "--method full --data long.txt --lengths 64 1025"
    assert run(eval_ppl, words)[2].count("warning: ") == 1


# --- generate.py ------------------------------------------------------------------------


@pytest.mark.parametrize("words, thing", [
    ("--method full", FULL), (SINKS, H2O), ("--adapter adapter", "adapter")])
def test_greedy_text_and_figures(run, tokenizer, words, thing):
    book = Path("text/0.py").read_text()[:250]
    Path("book").write_text(book)
    adapted, ids = tiny(thing), tokenizer.encode(book)
    ask = f"{words} --temperature 0 --max-new-tokens 12"
    code, out, err = run(generate, f"{ask} --prompt book")
    assert book + out == tokenizer.decode(greedy_by_hand(adapted, ids)) + "\n", err
    assert run(generate, f"{ask} --prompt -", stdin=book.encode())[:2] == (code, out) == (0, out)
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


def test_a_base_without_an_adapter_says_what_it_does(run):
    shutil.copytree(TINY, "base", ignore=shutil.ignore_patterns("adapter*"))
    ask = "--prompt text/0.py --max-new-tokens 3 --temperature 0"
    code, out, err = run(generate, f"{ask} --model base")
    sentence = "its memory is the full cache, which keeps every token; for 512 slots: --method h2o"
    assert code == 0 and sentence in err.splitlines()[0]
    code, same_out, err = run(generate, f"{ask} --method full")
    assert (code, same_out) == (0, out) and sentence not in err


def test_the_embedded_adapter_is_the_usual_one(run, monkeypatch):
    """Of the embedded model, if no other memory is named."""
    shutil.copytree(TINY, "own", ignore=shutil.ignore_patterns("adapter*"))
    shutil.copy("adapter/adapter.safetensors", "own")
    for program in ("generate", "support.programs.scoring"):
        monkeypatch.setattr(f"{program}.TINY", Path("own").resolve())
    ask = "--prompt text/0.py --max-new-tokens 3 --temperature 0"
    expected = run(generate, f"{ask} --adapter adapter")
    assert expected[0] == 0 and run(generate, f"{ask} --model own") == expected
    table = cells(run(eval_ppl, "--model own --data text --lengths 64 --documents 1")[1])
    assert [*table][2:] == ["base, full", "own"]


@pytest.mark.parametrize("method, changes", [
    ("streaming", {}), ("selection", {"positions": "slots"}), ("selection", {}), ("h2o", {})])
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
    for _ in range(2):
        code, out, err = run(generate, ask)
        assert code == 0 and expected.endswith(question + out), err


def test_two_that_save_one_memory(run, monkeypatch):
    """The second one is refused before it reads; what the first one saves is there."""
    usual, answers = generate.prefill, []

    def prefill(*args):
        with monkeypatch.context() as patch:
            patch.setattr(generate, "prefill", usual)
            answers.append(run(generate, f"{SINKS} --prompt text/1.py --save-memory memory"))
        return usual(*args)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "prefill", prefill)
        assert run(generate, f"{SINKS} --prompt text/0.py --save-memory memory")[0] == 0
    sentence = "generate.py: memory: there is such a file already; name another one\n"
    assert answers == [(2, "", sentence)]
    assert run(generate, f"{SINKS} --prompt text/0.py --load-memory memory")[0] == 0


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
        ("--mem 2", "--mem 2: it must be at least 4\n"),
        ("--show-memory 4 0", "layers 0 to 3 and heads 0 to 1"), ("--show-memory 0 2", "0 2: no such"),
        ("--device hpu", "--device hpu: this torch has no"), ("--method lococo", "method lococo"),
        ("--prompt -", "--prompt -"), ("--prompt allocate", "allocate: there is no such file"),
        ("--prompt latin/x", "latin/x: a part of this name is a file; name another place"),
        ("--prompt latin", "latin: not UTF-8 text (byte 3)"), ("--prompt text", "text: this is a f"),
        ("--model loud-base", "the model's output is not finite"),
        ("--adapter adapter", "adapter, h2o: one at a time"), ("--save-memory no/m", "no/m: there"),
        ("--method h2o streaming --show-memory 0 0", "h2o, streaming: one at a time"),
        ("--method h2o streaming full --adapter a --show-memory p.html", "up to three with"),
        ("--method full --show-memory 0 0", "no slots"), ("--save-memory latin", "latin: there is"),
        ("--load-memory adapter/adapter.safetensors", "saved with another model"),
        ("--load-memory nowhere", "nowhere"), ("--load-memory text", "text: this is a folder"),
        ("--show-memory 1 x", "--show-memory 1 x: name a layer and"), ("--show-memory -1 0", "-1"),
        ("--show-memory latin.html", "latin.html: there is such a file already; name another one"),
        ("--method full --show-memory p.html", "no slots"),
        ("--mem 8 --budgets 8 8 4 12 --show-memory p.html", "a page does not show layers"),
        ("--show-memory p.html --save-memory m", "goes with neither --save-memory nor"),
    ]
] + [
    (eval_ppl, f"{EVAL} {words}", sentence) for words, sentence in [
        ("--lengths 99999", "--lengths 99999"), ("-- nowhere", "nowhere: there is no adapter"),
        ("--json no/x", "no/x: there is no folder no; make it first"), ("--json text", "this is a"),
    ]
] + [
    (generate, "", "required: --prompt"),
    (generate, "--prompt text/0.py --show-memory p.html --model other-base", "no slots; take"),
    (generate, "--prompt text/0.py --mem 16", "--mem and the like go with --method"),
    (generate, "--prompt text/0.py --adapter damaged", "checksum"),
    (generate, "--prompt text/0.py --adapter adapter --model other-base", "for another base"),
    (eval_ppl, "--data text --mem 16", "--mem and the like go with --method"),
    (eval_ppl, "newer --recall --data text --lengths 64", "newer: its adapter is by another"),
    (eval_ppl, "adapter --model other-base --data text --lengths 64", "for another base"),
]  # fmt: skip


@pytest.mark.parametrize("program, words, sentence", MISTAKES)
def test_a_mistake_is_one_sentence(run, program, words, sentence):
    """Exit code 2, one line on standard error, no traceback, and nothing is written, or scored
    before."""
    before = {file for file in Path().rglob("*.*") if "cache" not in file.parts}
    code, out, err = run(program, words)
    assert (code, out, err.count("\n")) == (2, "", 1) and sentence in err, err
    assert err.startswith(f"{program.__name__}.py: ")
    assert {file for file in Path().rglob("*.*") if "cache" not in file.parts} == before


@pytest.mark.parametrize("kind, least, most, text, sentence", [
    (int, 4, None, "3", "3: it must be at least 4"), (int, 0, None, str(10**20), "from 0 to"),
    (float, 0, 1, "1.5", "1.5: it must be from 0 to 1"), (float, 0, None, "nan", "nan: it must be"),
    (float, 0, None, "inf", "inf: it must be from")])  # fmt: skip
def test_numbers_of_flags(kind, least, most, text, sentence):
    convert = at_least(least, kind, most) if most else at_least(least, kind)
    assert convert(str(least)) == least
    with pytest.raises(argparse.ArgumentTypeError, match=sentence):
        convert(text)


def test_a_compressor_whose_rows_do_not_sum_to_1(run, monkeypatch):
    """One of one's own, such as a softmax over the wrong dimension."""
    Path("mine").mkdir()
    adapted = AdaptedLlama(load_llama(TINY), settings_for("lococo", 16, 16, 96, lora_rank=0))
    write_adapter(Path("mine"), adapted, ["training"])
    monkeypatch.setattr(Compressor, "weights", lambda self, entries, *_: self.conv(entries))
    for program, words in ((generate, "--prompt text/0.py --adapter mine"),
                           (eval_ppl, "mine --data text --lengths 64")):  # fmt: skip
        code, out, err = run(program, words)
        sentence = f"{program.__name__}.py: Compressor.weights: the rows of w sum to "
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith(sentence)


def test_a_text_without_tokens_is_refused(run, monkeypatch):
    """Of a tokenizer that drops line breaks."""
    usual = generate.Tokenizer.encode
    monkeypatch.setattr(generate.Tokenizer, "encode", lambda self, text: usual(self, text.rstrip()))
    Path("blank").write_bytes(b"\n")
    Path("mark").write_bytes(b"\xef\xbb\xbf")
    for name, sentence in (("blank", "no token for its text"), ("mark", "no text in it")):
        code, _, err = run(generate, f"{SINKS} --prompt {name}")
        assert (code, err.count("\n")) == (2, 1) and f"--prompt {name}: " in err and sentence in err


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


def test_where_nothing_can_be_written(monkeypatch):
    """It is said before the work, not after it."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(argparse.ArgumentTypeError, match="figures: nothing can be written there"):
        output_file("figures")


def test_help(run):
    """M has a default of its own in each program."""
    for program, default in ((generate, "512; on a page that of the adapter"), (eval_ppl, "512")):
        code, out, _ = run(program, "--help")
        assert code == 0 and f"python {program.__name__}.py" in out and "--mem M " in out
        assert f"slots, from 4 on (default: {default})" in " ".join(out.split())


def test_a_terminal_of_ascii(run, monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        code, _, err = run(generate, f"{GENERATE} --show-memory 0 0")
    assert code == 0 and b"heavy    ???? 1.00" in terminal.buffer.getvalue(), err


def test_closed_streams(run, monkeypatch):
    """As the shell's `<&-` and `>&-` close them; and `| head`, which closes a pipe that is
    written to."""
    code, _, err = run(generate, GENERATE.replace("text/0.py", "-"), stdin=None)
    assert code == 2 and "there is no text in it" in err
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        code, _, err = run(generate, f"{GENERATE} --show-memory 0 0")
    assert code == 0 and "16 slots" in err
    line = f"{sys.executable} {generate.__file__} {GENERATE} --show-memory 0 0 | :"
    command = ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
