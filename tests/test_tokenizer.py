"""support/tokenizer.py: both kinds of tokenizers, and what begins and ends a text.

The tests of tokenizer.json need one package more than requirements.txt has (`pip install
tokenizers`). .ci/run installs it, and without it they are skipped."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import refusal
from sentencepiece import SentencePieceTrainer

from support.command_line import TINY
from support.facts import fact_tokens
from support.tokenizer import Tokenizer


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


# --- Both kinds -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json"])
@pytest.mark.parametrize("text", [
    "def f(x):\n    return x\n", "  two  spaces ", "<s> a <end>", "naïve 北京 🐍\n", ""])
def test_a_text_comes_back(request, kind, text):
    """What looks like a special token is plain text."""
    path = TINY if kind == "tokenizer.model" else request.getfixturevalue("folder")
    tokenizer = Tokenizer(path)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos and not {tokenizer.bos, *tokenizer.ends} & {*ids[1:]}
    assert tokenizer.decode(ids[1:]) == text


# --- tokenizer.model --------------------------------------------------------------------


def test_metas_tokenizer_is_found_from_everywhere(tmp_path, tokenizer, monkeypatch):
    """It is one level up. By its path, and from inside it."""
    (tmp_path / "llama" / "7B").mkdir(parents=True)
    shutil.copy(tokenizer.file, tmp_path / "llama")
    monkeypatch.chdir(tmp_path / "llama" / "7B")
    for path in (tmp_path / "llama" / "7B", Path(".")):
        assert Tokenizer(path).encode("x") == tokenizer.encode("x")


@pytest.mark.parametrize("bos, eos, begins", [(1, 2, 1), (-1, 1, 1), (-1, -1, None)])
def test_a_tokenizer_without_a_token_that_begins_a_text(tmp_path, bos, eos, begins):
    """The end of a text begins the next one. A tokenizer with neither is refused."""
    (tmp_path / "text").write_text("the cat sat on the mat and ran\n" * 20)
    SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=24,
        model_type="bpe", bos_id=bos, eos_id=eos, minloglevel=2)  # fmt: skip
    if begins is None:
        refusal(Tokenizer, tmp_path, "names a token that begins or ends a text")
    else:
        found = Tokenizer(tmp_path)
        assert (found.bos, found.prefix, found.ends) == (begins, [begins], {eos})


@pytest.mark.parametrize("file, content, sentence", [
    ("tokenizer.model", "", "tokenizer.model is not a readable tokenizer"),
    ("prefix.json", "[-1]", "no ids that begin a text: [-1]")])
def test_a_file_that_cannot_be_used_is_named(tmp_path, tokenizer, file, content, sentence):
    shutil.copy(tokenizer.file, tmp_path)
    (tmp_path / file).write_text(content)
    refusal(Tokenizer, tmp_path, sentence)


# --- tokenizer.json ---------------------------------------------------------------------


def test_ids_by_hand(folder):
    """Merges are applied in their order: "hello" is "hell" and "o"."""
    tokenizer, letters = Tokenizer(folder), sorted("".join(chr(n) for n in range(33, 127)))
    o = letters.index("o")  # the alphabet begins with the printable characters of ASCII
    assert tokenizer.encode("hello") == [296, 258, o]
    assert tokenizer.encode("hello aaa") == [296, 258, o, 262]
    assert [tokenizer.piece(i) for i in (258, o, 262, 296, 297, 298)] == [
        "hell", "o", " aaa", "<begin>", "<end>", "<298>"]  # fmt: skip
    assert tokenizer.vocab_size == 298
    assert len(fact_tokens(tokenizer).words) == 12


def test_a_text_is_read_whole_whatever_length_its_file_asks_for(folder):
    expected = Tokenizer(folder).encode("hello")
    file = folder / "tokenizer.json"
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9, pad_token="<begin>", pad_id=296)
    tokenizer.save(str(file))
    assert Tokenizer(folder).encode("hello") == expected


@pytest.mark.parametrize("files, bos, ends", [
    ({"tokenizer_config": {"bos_token": {"content": "<begin>"}, "eos_token": "<end>"}}, 296, {297}),
    ({"config": {"bos_token_id": 7, "eos_token_id": 8},
      "generation_config": {"eos_token_id": [8, 10]}}, 7, {8, 10}),
    ({"config": {"eos_token_id": 0}}, 0, {0})])  # the end of a text begins the next  # fmt: skip
def test_the_files_say_what_begins_and_ends_a_text(folder, files, bos, ends):
    (folder / "tokenizer_config.json").unlink()
    for name, content in files.items():
        write(folder, name, **content)
    tokenizer = Tokenizer(folder)
    assert (tokenizer.bos, tokenizer.ends) == (bos, ends)


@pytest.mark.parametrize("file, content, sentence", [
    ("config", "{}", "names a token that begins"),
    ("generation_config", "[]", "generation_config.json is of another form"),
    ("tokenizer", "{", "tokenizer.json is not a readable tokenizer")])  # fmt: skip
def test_what_cannot_be_used_is_one_sentence(folder, file, content, sentence):
    (folder / "tokenizer_config.json").unlink()
    (folder / f"{file}.json").write_text(content)
    refusal(Tokenizer, folder, sentence)


def test_a_package_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    refusal(Tokenizer, folder, "pip install tokenizers")
