"""support/text.py: files into documents, documents into tokens, and these into what a
run trains on and scores. support/facts.py: the facts that are told in texts; how they
are recalled is in test_programs.py."""

import gzip
import json
import os
import re
import zlib
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import support.text
from support.facts import fact_tokens, tell
from support.files import UserError
from support.text import long_documents, part_of, pieces, pieces_to_fit, read_texts, sequence
from support.text import token_streams

pytestmark = pytest.mark.usefixtures("own_folders")  # 60 files in text/, an empty cache/
FOLDER = Path("text")
MARK = b"\xef\xbb\xbf"  # a byte order mark
CODE = "".join(f"def f{i}(x, y):\n    # one word\n\n    return {i} + x[y]\n" for i in range(200))


def texts(paths, tokenizer) -> list[str]:
    """The documents of all parts, sorted. Each begins with its only BOS."""
    found = []
    for ids in token_streams(paths, tokenizer).values():
        documents = np.split(ids, np.flatnonzero(ids == tokenizer.bos))[1:]
        found += [tokenizer.decode(document[1:].tolist()) for document in documents]
    return sorted(found)


def test_text_files_folders_and_json_lines(tokenizer, capsys):
    """With a byte order mark, with endings in capitals, with rows in .json."""
    folder = Path("some")
    for name, content in {
        "a.txt": b"first\r\n  document <s>\n", "deep/b.md": "na\u00efve".encode(),
        "deep/.hidden": b"no", ".git/c.txt": b"no", "image.png": b"\xff\xfe\x00",
        "c.jsonl": b'{"text": "line 1", "more": {}}\n\n{"text": "a\\ud800b"}',  # half a character
        "d.Jsonl.GZ": gzip.compress(b'{"text": "packed"}\n'),
        "mark.txt": MARK + b"marked", "mark.jsonl": MARK + b'{"text": "marked row"}',
        "rows.json": b'{"text": "one"}\n{"text": "two"}\n',
        "list.json": b"[1]", "object.json": b'{\n"text": "x"}',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    expected = ["a?b", "first\r\n  document <s>\n", "line 1", "marked", "marked row"]
    expected += ["na\u00efve", "one", "packed", "two", "[1]", '{\n"text": "x"}']
    for name in ("gone.txt", "lost.txt", "missing.txt", "nowhere.txt"):
        (folder / name).symlink_to("not/mounted")
    (folder / "circle").symlink_to(".")
    for _ in ("tokenized", "stored"):  # it is said in every run
        assert texts([folder], tokenizer) == sorted(expected)
        err = capsys.readouterr().err
        assert "left out, as they are not in UTF-8: some/image.png\n" in err
        assert "left out, as they are links to folders: some/circle\n" in err
        three = "some/gone.txt, some/lost.txt, some/missing.txt and 1 more\n"
        assert f"left out, as they are links to nothing: {three}" in err
    folder = folder.rename("renamed")
    assert texts([folder], tokenizer) == sorted(expected)
    assert "not in UTF-8: renamed/image.png\n" in capsys.readouterr().err
    named = [folder / "a.txt", folder / ".git", folder / "deep" / ".hidden"]
    assert texts(named, tokenizer) == [expected[1], "no", "no"]  # hidden ones only by name


ROW, HELP = b'{"text": "a text"}\n', r"line \d: not as --help says"
LIST = "a list of texts is not read"


@pytest.mark.parametrize("name, content, sentence", [
    ("a.txt", b"caf\xe9", "there is no text in it"), ("nowhere", b"", "there is no such file"),
    ("a.jsonl", ROW + b'{"text', r"line 2: this is not valid JSON \(Untermin.*, column 2\)"),
    ("a.jsonl", b'{"content": "x"}', HELP), ("a.jsonl.gz", b"not gzip", HELP),
    ("a.jsonl.gz", gzip.compress(ROW)[:-6], HELP),
    ("a.json", b"[" + ROW + b"]", LIST),
])
def test_text_that_cannot_be_used_is_named(tokenizer, name, content, sentence):
    if content:
        Path(name).write_bytes(content)
    with pytest.raises(UserError, match=f"^{name}[:,] {sentence}"):
        token_streams([Path(name)], tokenizer)


def test_parts_are_by_the_checksum_of_the_documents_name(tokenizer):
    documents = {f.name: f.read_text() for f in sorted(FOLDER.iterdir())}
    documents |= {f"z.jsonl:{n}": f"line {n}" for n in range(1, 50)}
    (FOLDER / "z.jsonl").write_text("".join(f'{{"text": "line {n}"}}\n' for n in range(1, 50)))
    expected = {"held-out": [], "training": []}
    for name, text in documents.items():
        part = "held-out" if zlib.crc32(name.encode()) % 20 < 2 else "training"
        expected[part] += tokenizer.encode(text)
    streams = token_streams([FOLDER], tokenizer)
    assert {part: ids.tolist() for part, ids in streams.items()} == expected
    assert all(ids.dtype == np.int32 and len(ids) for ids in streams.values())
    again = token_streams([FOLDER], tokenizer)  # from the file: in the same order
    assert [*streams] == [*again] == [*expected]


def test_each_text_is_tokenized_once_by_each_tokenizer(tokenizer, monkeypatch):
    """Anew if the text has changed, or if what is kept is damaged."""
    calls, inner, one = [], support.text.tokenize, FOLDER / "0.py"
    monkeypatch.setattr(support.text, "tokenize", lambda *args: calls.append(args) or inner(*args))
    one.write_text("a text")
    assert texts([one], tokenizer) == texts([one], tokenizer) == ["a text"] and len(calls) == 1
    about = one.stat()
    one.write_text("another")
    assert texts([one], tokenizer) == ["another"] and len(calls) == 2
    one.write_text("a tale")  # of the same size, with the same time, as `cp -p` leaves it
    os.utime(one, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert texts([one], tokenizer) == ["a tale"] and len(calls) == 3
    other = SimpleNamespace(
        encode=lambda text: [1, 69999], file=one, prefix=[1], beside=())
    assert max(ids.max(initial=0) for ids in token_streams([one], other).values()) == 69999
    for file in Path("cache").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert texts([one], tokenizer) == ["a tale"] and len(calls) == 5


def test_what_is_fitted_is_all_texts_or_what_trains_of_the_library(tokenizer, monkeypatch):
    monkeypatch.setattr(support.text, "library", FOLDER.resolve)
    streams = token_streams([], tokenizer)
    _, ids = pieces_to_fit([], tokenizer, 9, 1)
    assert len(streams["held-out"]) and np.array_equal(ids, streams["training"])
    _, ids = pieces_to_fit([FOLDER], tokenizer, 9, 1)
    assert len(ids) == sum(map(len, streams.values()))


def test_sequences_are_pieces_of_the_text_shuffled_for_each_pass():
    ids, orders = np.arange(107, dtype=np.uint16), {tuple(range(0, 100, 10))}
    for n, seed in ((0, 0), (1, 0), (2, 0), (0, 1), (0, 2)):
        rows = [sequence(ids, 10, seed, i) for i in range(10 * n, 10 * n + 10)]
        starts = tuple(int(row[0]) for row in rows)
        assert sorted(starts) == list(range(0, 100, 10))  # each piece once
        assert all(torch.equal(row, torch.arange(row[0], row[0] + 10)) for row in rows)
        orders.add(starts)
    assert len(orders) == 6
    assert sequence(ids, 107, 0, 5).tolist() == list(range(107))
    with pytest.raises(UserError, match="--seq 108: .* only 107 tokens"):
        sequence(ids, 108, 0, 0)


def test_long_documents():
    ids = np.array([1, 5, 6, 1, 7, 1, 8, 9, 10, 11, 1, 2, 3], np.uint16)
    assert long_documents(ids, 1, 3, 9).tolist() == [[1, 5, 6], [1, 8, 9], [1, 2, 3]]
    assert long_documents(ids, 1, 3, 2).tolist() == [[1, 5, 6], [1, 8, 9]]
    assert long_documents(ids, 1, 6, 9).shape == long_documents(ids[:0], 1, 6, 9).shape == (0, 6)


def files_of(part: str) -> list[str]:
    return [str(file) for file in sorted(FOLDER.iterdir()) if part_of(file.name) == part]


def test_a_tenth_of_a_runs_texts_is_scored(tokenizer):
    """By name, as many documents as are asked for; all others train."""
    texts = read_texts(["text"], [], 96, 250, tokenizer)
    streams = token_streams([FOLDER], tokenizer)
    assert np.array_equal(texts.ids, streams["training"]) and texts.parts == ["training"]
    held_out = pieces(streams["held-out"], tokenizer.bos, 96, 2)
    assert torch.equal(texts.documents, held_out) and len(held_out) == 2
    name = next(f"{n}.txt" for n in count() if part_of(f"{n}.txt") == "training")
    (FOLDER / name).write_text(tokenizer.decode(held_out[0].tolist()))  # trains now, too
    fewer = read_texts(["text"], [], 96, 250, tokenizer)
    assert held_out[0].tolist() not in fewer.documents.tolist()
    assert "note: not scored, as the same text trains: 1 text" in fewer.summary
    nothing = read_texts(["text"], [], 9999, 1, tokenizer).summary
    assert "no held-out document has --seq 9999 tokens; name others by" in nothing


def test_pieces_are_spread_evenly_over_texts():
    """Each begins with BOS, here 1. The end of a text that is too short for a piece is left out."""
    ids = np.array([1, 10, 11, 12, 13, 14, 1, 20, 1, 30, 31, 32, 33])
    every = [[1, 10, 11], [1, 12, 13], [1, 30, 31], [1, 32, 33]]
    assert pieces(ids, 1, 3, 9).tolist() == every
    assert pieces(ids, 1, 3, 2).tolist() == [every[0], every[2]]
    assert pieces(ids, 1, 9, 2).shape == (0, 9)


def test_texts_of_one_part_all_train(tokenizer):
    texts = read_texts(files_of("held-out"), [], 96, 999, tokenizer)
    assert np.array_equal(texts.ids, token_streams([FOLDER], tokenizer)["held-out"])
    assert texts.parts == ["held-out", "training"] and not len(texts.documents)
    few = [*files_of("held-out"), files_of("training")[0]]  # most of it is held out
    assert "note: most of the text is held out" in read_texts(few, [], 96, 0, tokenizer).summary


def test_texts_that_are_held_out_by_name(tokenizer):
    """All of the others train. What also trains, under any name, is not scored, and what is
    scored must be long enough."""
    files = [*files_of("held-out"), *files_of("training")]
    texts = read_texts(files[3:], files[:3], 96, 9999, tokenizer)
    scored = []
    for file in files[:3]:
        bos, *ids = tokenizer.encode(Path(file).read_text())
        scored += [[bos, *ids[n : n + 95]] for n in range(0, len(ids) - 94, 95)]
    assert sorted(texts.documents.tolist()) == sorted(scored)
    assert (texts.ids == tokenizer.bos).sum() == len(files) - 3
    assert texts.parts == ["held-out", "training"]
    Path("link").symlink_to(FOLDER / "1.py")
    rows = [json.dumps({"text": text}) for text in ("short", (FOLDER / "1.py").read_text())]
    Path("rows.jsonl").write_text("\n".join(rows))
    for name in ("link", "rows.jsonl"):
        summary = read_texts(["text"], [name], 96, 0, tokenizer).summary
        assert "note: not scored, as the same text trains: 1 text" in summary
    sentence = "--held-out link: no held-out document has --seq"
    with pytest.raises(UserError, match=f"{sentence} 9999 tokens; give"):
        read_texts(["text/2.py"], ["link"], 9999, 999, tokenizer)
    with pytest.raises(UserError, match=f"{sentence} 96 tokens but those of which the same text"):
        read_texts(["text"], ["link"], 96, 999, tokenizer)


def test_facts_are_lines_of_their_own(tokenizer):
    """The tokens are those that the tokenizer has for the text that is read."""
    text = torch.tensor(tokenizer.encode(CODE)[:2048])
    told, ago = tell(text, 8, "training", 0, 0, tokenizer)
    ids, written = told.tolist(), tokenizer.decode(told.tolist())
    assert len(ids) == len(ago) == 2048 and tokenizer.encode(written) == ids
    lines = written.splitlines(keepends=True)
    assert CODE.startswith("".join(line for line in lines if line[0] != "@"))
    found = [line for line in lines[:-1] if line[0] == "@"]
    assert all(re.fullmatch("@( [a-z]{3,}){2} = [a-z]{3,}\n", line) for line in found)
    assert len(found) > len(set(found)) == 8
    for t, n in enumerate(ago.tolist()):
        line = [tokenizer.piece(i) for i in ids[max(0, t - 4) : t]]
        asked = len(line) == 4 and line[0] == "@"  # "@", a name of two words and "="
        earlier = [m for m in range(4, t) if asked and ids[m - 4 : m] == ids[t - 4 : t]]
        assert n == (t - earlier[-1] if earlier else 0)


def test_facts_in_rulers_sentences(tokenizer):
    """The word asked for is the last of a sentence; it was told `ago` tokens before."""
    text = torch.tensor(tokenizer.encode(CODE)[:1500])
    told, ago = tell(text, 3, "training", 0, 0, tokenizer, "sentence")
    lines = tokenizer.decode(told.tolist()).splitlines()[:-1]
    found = [line for line in lines if line.startswith("One of")]
    words = r"One of the special magic words for [a-z]{3,} [a-z]{3,} is: [a-z]{3,}\."
    assert all(re.fullmatch(words, line) for line in found) and len(set(found)) == 3
    assert (ago > 0).sum() == len(found) - 3 > 0
    for t in ago.nonzero()[:, 0].tolist():
        assert told[t] == told[t - int(ago[t])]
        assert tokenizer.decode(told[:t].tolist()).endswith(" is:")


def test_a_tokenizer_of_few_words_has_no_facts(tokenizer, monkeypatch):
    """It does not look for names for ever. Without facts it need not have any words."""
    text = torch.tensor(tokenizer.encode(CODE))
    few = fact_tokens(tokenizer)._replace(words=fact_tokens(tokenizer).words[:2])
    monkeypatch.setattr("support.facts.fact_tokens", lambda *args: few)
    with pytest.raises(UserError, match="its 2 words of one token do not make 8 names"):
        tell(text, 8, "held-out", 0, 0, tokenizer)
    monkeypatch.setattr("support.facts.fact_tokens", None)
    untold, ago = tell(text, 0, "held-out", 0, 0, tokenizer)
    assert torch.equal(untold, text) and not ago.any()
