"""support/tokenizer.py: both kinds of tokenizers, and what begins and ends a text.

The tests of tokenizer.json need one package more than requirements.txt has (`pip install
tokenizers`). .ci/run installs it, and without it they are skipped."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import refusal
from sentencepiece import SentencePieceTrainer

from generate import as_text
from support.command_line import TINY
from support.facts import fact_tokens
from support.files import UserError
from support.prompt import prompt_ids
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


@pytest.fixture
def bytes_apart(tmp_path):
    """As Llama 2's tokenizer.json: what has no token of its own is bytes, as <0xE1>."""
    package = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abc"]
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = package.Tokenizer(package.models.BPE(
        vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    blanks = [package.normalizers.Prepend("▁"), package.normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = package.normalizers.Sequence(blanks)
    decoders = package.decoders
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path, "tokenizer_config", bos_token="<s>", eos_token="</s>")
    return tmp_path


def blank_in_front(folder: Path, drops_blanks: bool, rule: str = "identity") -> Path:
    """A tokenizer.model that puts a blank in front of a text, as Llama 2's does."""
    SentencePieceTrainer.train(
        input=__file__, model_prefix=str(folder / "tokenizer"), vocab_size=500,
        model_type="bpe", byte_fallback=True, normalization_rule_name=rule,
        remove_extra_whitespaces=drops_blanks, minloglevel=2)
    return folder


@pytest.fixture
def as_llama_2(tmp_path):
    return blank_in_front(tmp_path, drops_blanks=False)


@pytest.fixture
def as_open_llama(tmp_path):
    return blank_in_front(tmp_path, drops_blanks=True)


@pytest.fixture
def as_usual(tmp_path):
    """As sentencepiece trains one if nothing is asked for."""
    return blank_in_front(tmp_path, drops_blanks=True, rule="nmt_nfkc")


def write(folder: Path, name: str, **content) -> None:
    (folder / f"{name}.json").write_text(json.dumps(content))


# --- Both kinds -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokenizer.model", "folder", "bytes_apart", "as_llama_2"])
def test_tokens_one_by_one_have_the_text(request, kind, monkeypatch):
    """As all of them at once, from the first or behind a prompt, in time that is linear: what is
    decoded for a token has a few ids. Random Unicode of one to four bytes a letter."""
    tokenizer = Tokenizer(TINY if kind == "tokenizer.model" else request.getfixturevalue(kind))
    whole, decoded = tokenizer.decode, []
    monkeypatch.setattr(tokenizer, "decode", lambda ids: decoded.append(len(ids)) or whole(ids))
    rng = np.random.default_rng(0)
    letters = [*" \n\tabc<0xE1>", *map(chr, range(0xC0, 0x100)), *map(chr, range(0x1200, 0x1240)),
               *"\u0301\u200d\U0001f40d\U0010ffff\x00"]
    for _ in range(200):
        prompt, more = ("".join(rng.choice(letters, rng.integers(0, 40))) for _ in range(2))
        ids = tokenizer.encode(prompt)
        assert "".join(tokenizer.texts(ids[1:])) == prompt == whole(ids[1:])
        new = tokenizer.continued(more)
        expected = whole(ids[1:] + new).removeprefix(prompt)
        assert "".join(as_text(iter(new), tokenizer, ids)) == expected
        assert expected == more
        cut = tokenizer.encode(f"{prompt}\U0001f40d")[1:-1]
        assert "".join(tokenizer.texts(cut)) == prompt  # a part of a character is held back
    assert max(decoded) < 10
    ids = [*tokenizer.continued("a"), tokenizer.bos, *tokenizer.continued(" b")]
    assert "".join(tokenizer.texts(ids)) == whole(ids)  # a token without text before a blank


@pytest.mark.parametrize("kind", ["bytes_apart", "folder", "as_llama_2", "as_open_llama", "as_usual"])
def test_a_text_in_two_halves(request, kind):
    """Cut anywhere, also within a word, it has no blank more, and the ids of a word are the same
    if it is whole in one half."""
    tokenizer = Tokenizer(request.getfixturevalue(kind))
    text = "a cab in a tokenizer, or many tokens"
    for cut in range(1, len(text)):
        first, second = text[:cut], text[cut:]
        if not first.endswith(" "):  # some tokenizers drop it
            halves = tokenizer.encode(first) + tokenizer.continued(second)
            assert tokenizer.decode(halves[1:]) == text
            assert second[0] != " " or halves == tokenizer.encode(text)


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
        model_type="bpe", bos_id=bos, eos_id=eos, minloglevel=2)
    if begins is None:
        refusal(Tokenizer, tmp_path, "names a token that begins or ends a text")
    else:
        found = Tokenizer(tmp_path)
        assert (found.bos, found.prefix, found.ends) == (begins, [begins], {eos})


def test_what_files_beside_it_add(tmp_path, tokenizer):
    """More ends, by name and by id, and tokens of their own. A special one is read as a token only
    if asked for, any other always, as its row has trained so."""
    shutil.copy(tokenizer.file, tmp_path)
    write(tmp_path, "added_tokens", **{"<end>": 2048, "newword": 2050, "[PAD]": 2051})
    write(tmp_path, "special_tokens_map", pad_token="[PAD]")
    write(tmp_path, "tokenizer_config", eos_token={"content": "<end>"}, bos_token=None,
          added_tokens_decoder={"2049": {"content": "<user>", "special": True}})
    write(tmp_path, "config", bos_token_id=1, eos_token_id=[2, 7])
    write(tmp_path, "generation_config", eos_token_id=9)
    found = Tokenizer(tmp_path)
    assert (found.bos, found.ends, found.vocab_size) == (1, {2, 7, 9, 2048}, 2052)
    ab, text = tokenizer.encode("a b")[1:], "<user>a b<end>"
    assert found.encode(text) == tokenizer.encode(text)
    assert found.encode("a bnewworda b") == [1, *ab, 2050, *ab]
    assert found.encode(text, special=True) == [1, 2049, *ab, 2048]
    assert found.encode(f"<s>{text}", special=True) == [1, 2049, *ab, 2048]  # begins once
    assert found.special_in(text) == ["<end>", "<user>"]
    write(tmp_path, "special_tokens_map", pad_token="[PAD]", eos_token="newword")
    assert 2050 not in Tokenizer(tmp_path).encode("a bnewworda b")  # it is named as special
    write(tmp_path, "special_tokens_map", pad_token="[PAD]")
    assert found.decode([*ab, 2049, *ab]) == "a b<user>a b"
    assert [*found.texts([*ab, 2049])][-1] == found.piece(2049) == "<user>"
    found.fit(2051)  # no text has [PAD]
    assert found.vocab_size == 2051
    with pytest.raises(UserError, match="newword has id 2050"):
        found.fit(2050)


@pytest.mark.parametrize("kind", ["as_llama_2", "folder"])
@pytest.mark.parametrize("content, sentence", [
    ({"added_tokens_decoder": {"5": {"content": "word"}}}, "word is added as 5"),
    ({"added_tokens_decoder": {"{next}": {"content": "word", "rstrip": True}}}, "rstrip of word"),
    ({"add_prefix_space": True}, "add_prefix_space")])
def test_what_is_not_implemented_is_named(request, kind, content, sentence):
    """tokenizer.json has some of it."""
    folder = request.getfixturevalue(kind)
    size = Tokenizer(folder).vocab_size
    text = json.dumps(content).replace("{next}", str(size))
    (folder / "tokenizer_config.json").write_text(text[:-1] + ', "bos_token": "="}')
    if kind == "folder" and "rstrip" in sentence:
        for ids in (Tokenizer(folder).encode("a word b")[1:], Tokenizer(folder).continued("a word b")):
            assert ids == [64, 220, size, 65]
    elif kind == "as_llama_2" and "prefix" in sentence:
        assert Tokenizer(folder).decode(Tokenizer(folder).encode("a")) == "a"
    else:
        refusal(Tokenizer, folder, sentence)


@pytest.mark.parametrize("first, later, expected", [
    (None, None, " x<user> y"), (False, None, "x<user> y"), (None, False, " x<user>y")])
def test_blanks_as_the_configuration_says(as_llama_2, first, later, expected):
    """Llama 2's own says that `legacy` is false: no blank behind a token that was added."""
    write(as_llama_2, "tokenizer_config", add_prefix_space=first, legacy=later,
          added_tokens_decoder={"500": {"content": "<user>", "special": True}})
    found = Tokenizer(as_llama_2)
    ids = found.encode("x<user>y", special=True)
    assert "".join(map(found.piece, ids[1:])) == expected
    text = "x<user> y" if later is False else "x<user>y"  # what is written is read again
    ids = found.encode(text, special=True)[1:]
    assert found.decode(ids) == "".join(found.texts(ids)) == text


def test_a_file_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    refusal(Tokenizer, tmp_path, "tokenizer.model is not a readable tokenizer")


# --- tokenizer.json ---------------------------------------------------------------------


def test_ids_by_hand(folder):
    """Merges are applied in their order: "hello" is "hell" and "o"."""
    tokenizer, letters = Tokenizer(folder), sorted("".join(chr(n) for n in range(33, 127)))
    o = letters.index("o")  # the alphabet begins with the printable characters of ASCII
    assert tokenizer.encode("hello") == [296, 258, o]
    assert tokenizer.encode("hello aaa") == [296, 258, o, 262]
    assert [tokenizer.piece(i) for i in (258, o, 262, 296, 297, 298)] == [
        "hell", "o", " aaa", "<begin>", "<end>", "<298>"]
    assert tokenizer.vocab_size == 298
    assert len(fact_tokens(tokenizer).words) == 12


def test_a_token_without_a_row(folder):
    """No text has a special one, but for --special-tokens. Any other is named."""
    tokens = pytest.importorskip("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens.add_special_tokens(["[PAD]"])
    tokens.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    tokenizer.fit(298)
    assert tokenizer.vocab_size == 298 and 298 not in tokenizer.encode("[PAD]")
    with pytest.raises(UserError, match="no row for \\[PAD\\]; leave it out"):
        prompt_ids(["p"], ["a [PAD]"], tokenizer, special=True)
    with pytest.raises(UserError, match="no row for \\[PAD\\]"):  # as in a chat template
        tokenizer.continued("[PAD]", special=True)
    tokens.add_tokens(["word"])
    tokens.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="more tokens than the model: word has id 299, the model has 298"):
        Tokenizer(folder).fit(298)


def test_a_text_is_read_whole_whatever_length_its_file_asks_for(folder):
    expected = Tokenizer(folder).encode("hello")
    file = folder / "tokenizer.json"
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9, pad_token="<begin>", pad_id=296)
    tokenizer.save(str(file))
    assert Tokenizer(folder).encode("hello") == expected


@pytest.mark.parametrize("file, content, sentence", [
    ("generation_config", "[]", "generation_config.json is of another form"),
    ("tokenizer", "{", "tokenizer.json is not a readable tokenizer")])
def test_what_cannot_be_used_is_one_sentence(folder, file, content, sentence):
    (folder / "tokenizer_config.json").unlink()
    (folder / f"{file}.json").write_text(content)
    refusal(Tokenizer, folder, sentence)


def test_a_package_that_is_missing_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    refusal(Tokenizer, folder, "pip install tokenizers")
