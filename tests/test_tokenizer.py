"""tokenizer.json: ids by hand, where beginning and end come from, and the programs on such a base.

These tests need one package more than requirements.txt has (`pip install tokenizers`). .ci/run
installs it, and without it they are skipped."""

import json
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import eval_ppl
import generate
import tasks
import train
from generate import as_text
from model import Tokenizer
from support.command_line import TINY
from support.files import UserError

TEXTS = ["def f(x):\n    return x\n", "  two  spaces ", "<end> is plain text", "naïve 北京 🐍\n", ""]


@pytest.fixture
def folder(tmp_path):
    """A byte-level BPE in a folder: 256 bytes, merges, and two tokens with special meanings. It has
    the words " aaa" to " lll"."""
    package = pytest.importorskip("tokenizers")
    letters = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "=")]
    for letter in "abcdefghijkl":
        merges += [("Ġ" + n * letter, letter) for n in range(3)]
    words = [*letters, *("".join(pair) for pair in merges)]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = package.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<begin>", "<end>"])
    (tmp_path / "base").mkdir()
    tokenizer.save(str(tmp_path / "base" / "tokenizer.json"))
    write(tmp_path / "base", "tokenizer_config", bos_token="<begin>", eos_token="<end>")
    return tmp_path / "base"


def write(folder: Path, name: str, **content) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_ids_by_hand(folder):
    """Merges are applied in their order: "hello" is "hell" and "o"."""
    tokenizer, letters = Tokenizer(folder), sorted("".join(chr(n) for n in range(33, 127)))
    o = letters.index("o")  # the alphabet begins with the printable characters of ASCII
    assert tokenizer.encode("hello") == [296, 258, o]
    assert tokenizer.encode("hello aaa") == [296, 258, o, 262]
    assert [tokenizer.piece(i) for i in (258, o, 262, 296, 297, 298)] == [
        "hell", "o", " aaa", "<begin>", "<end>", "<298>"]  # fmt: skip
    assert tokenizer.vocab_size == 298


def test_a_text_is_read_whole_whatever_length_its_file_asks_for(folder):
    expected = Tokenizer(folder).encode("hello")
    file = folder / "tokenizer.json"
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9, pad_token="<begin>", pad_id=296)
    tokenizer.save(str(file))
    assert Tokenizer(folder).encode("hello") == expected


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_comes_back(folder, text):
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids[1:]) == text and not {296, 297} & set(ids[1:])
    prompt = tokenizer.encode("the prompt:")
    pieces = list(as_text(iter(tokenizer.encode(text)[1:]), tokenizer, prompt))
    assert "".join(pieces) == text and "\ufffd" not in "".join(pieces)


@pytest.mark.parametrize("files, bos, ends", [
    ({"tokenizer_config": {"bos_token": {"content": "<begin>"}, "eos_token": "<end>"}}, 296, {297}),
    ({"config": {"bos_token_id": 7, "eos_token_id": [8, 9]}}, 7, {8, 9}),
    ({"config": {"bos_token_id": 7, "eos_token_id": 8},
      "generation_config": {"eos_token_id": [8, 10]}}, 7, {8, 10}),
    ({"config": {"eos_token_id": 0}}, 0, {0}),  # the end of a text begins the next
    ({"config": {"bos_token_id": 0, "eos_token_id": 0}}, 0, {0})])  # fmt: skip
def test_the_files_say_what_begins_and_ends_a_text(folder, files, bos, ends):
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        write(folder, name, **content)
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos, tokenizer.ends) == (bos, ends)


def test_what_cannot_be_used_is_one_sentence(folder, monkeypatch):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="base: tokenizer.json is not .* names a token that begins"):
        Tokenizer(folder)
    for name in ("0", -1):
        write(folder, "config", bos_token_id=name)
        with pytest.raises(UserError, match=rf"no ids that begin a text: \[{name!r}\]"):
            Tokenizer(folder)
    for content in ("[]", '{"bos_token": {"text": "<s>"}}'):
        (folder / "generation_config.json").write_text(content)
        with pytest.raises(UserError, match="generation_config.json is of another form"):
            Tokenizer(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="base/generation_config.json: cannot be read as JSON"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="base: tokenizer.json is not a readable tokenizer"):
        Tokenizer(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    with pytest.raises(UserError, match="pip install tokenizers"):
        Tokenizer(folder)


def test_a_bug_of_ours_is_no_damaged_tokenizer(folder, monkeypatch):
    """It is a traceback, not the user's mistake."""
    for error in (AttributeError, LookupError, RuntimeError):
        monkeypatch.setattr("model.JsonTokens.special_ids", Mock(side_effect=error))
        with pytest.raises(error):
            Tokenizer(folder)


def test_what_the_package_says_of_other_things_than_the_file_passes_on(folder, monkeypatch):
    """It raises plain Exceptions about a file. Memory, for instance, may run out while it reads."""
    package = pytest.importorskip("tokenizers")
    for error, expected in ((Exception("broken"), UserError), (MemoryError(), MemoryError)):
        broken = Mock(from_str=Mock(side_effect=error))
        monkeypatch.setattr(package, "Tokenizer", broken)
        with pytest.raises(expected):
            Tokenizer(folder)


def test_a_tokenizer_without_the_letter_x(folder):
    """`piece` asks what a token adds behind an x."""
    package = pytest.importorskip("tokenizers")
    few = package.Tokenizer(package.models.BPE(vocab={"a": 0, "b": 1, "<begin>": 2}, merges=[]))
    few.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert [tokenizer.piece(i) for i in range(2)] == ["a", "b"]
    assert tokenizer.encode("axb") == [2, 0, 1]


def test_what_begins_a_text_is_not_in_a_prompt_that_is_cut(folder):
    """Decoded, it would come back as plain text."""
    row = {"prompt": "abcdefghi" * 9}
    assert tasks.shorten(row, 10, Tokenizer(folder)) and row["prompt"] == "abcdefghi"


def test_the_programs_run_on_such_a_base(folder, run):
    """Training with facts (there are 12 words), a table, greedy text, shown and saved memories."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(TINY / name, folder / name)
    words = f"--model {folder} --data text --mem 16 --seq 96 --steps 1 --batch 2 --facts 1"
    code, out, err = run(train, f"{words} --recipe embedded --score-tokens 0 --out run")
    assert code == 0, err
    base = f"--model {folder} --adapter run --prompt text/0.py"
    code, out, err = run(generate, f"{base} --max-new-tokens 5 --temperature 0")
    assert code == 0 and len(out) > 1, err
    assert "layer 0, head 0: " in run(generate, f"{base} --show-memory 0 0")[1]
    assert run(generate, f"{base} --save-memory memory")[0] == 0
    assert run(generate, f"{base} --load-memory memory --max-new-tokens 2")[0] == 0
    code, out, err = run(eval_ppl, f"run --model {folder} --data text --lengths 96 --recall")
    assert code == 0 and "recalled; by chance 1 in 12" in out, err
