"""eval_ppl.py's first half: text into documents, documents into sequences, and the parts that stay apart."""

import gzip
import json
import zlib

import numpy as np
import pytest

import eval_ppl
from eval_ppl import PARTS, Corpus, text_chunks
from model import UserError
from train import Sequences


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(eval_ppl, "CACHE", tmp_path / "cache")


def texts(corpus, tokenizer):
    return [tokenizer.decode(corpus.read(d, 0, 10**9).tolist()) for d in corpus.documents]


def test_text_files_folders_and_json_lines(tmp_path, tokenizer):
    folder = tmp_path / "text"
    (folder / "deep").mkdir(parents=True)
    (folder / "a.txt").write_text("first\n  document\n")
    (folder / "deep" / "b.md").write_text("naïve 北京")
    (folder / "deep" / ".hidden").write_text("not read")
    (folder / "image.png").write_bytes(b"\xff\xfe\x00")
    lines = [json.dumps({"text": f"line {i}", "meta": {}}) for i in range(3)]
    (folder / "c.jsonl").write_text("\n".join(lines) + "\n\n")
    with gzip.open(folder / "d.jsonl.gz", "wt") as out:
        out.write("\n".join(lines[:2]) + "\n")
    expected = ["first\n  document\n", "line 0", "line 1", "line 2", "line 0", "line 1", "naïve 北京"]
    assert texts(Corpus([folder], tokenizer), tokenizer) == expected
    both = Corpus([folder / "a.txt", folder / "c.jsonl"], tokenizer)
    assert texts(both, tokenizer) == expected[:4]
    assert all(both.read(d, 0, 5)[0] == tokenizer.bos for d in both.documents)


def test_text_is_tokenized_once_and_again_when_it_changes(tmp_path, tokenizer, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("some text")
    Corpus([file], tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(eval_ppl, "text_documents", None)  # any use would fail
        assert texts(Corpus([file], tokenizer), tokenizer) == ["some text"]
    file.write_text("other text")
    assert texts(Corpus([file], tokenizer), tokenizer) == ["other text"]


@pytest.mark.parametrize("text", ["def f():\n    return 1\n\n\n" * 50 + "end without newline",
                                  "one line,  two   spaces and more: " * 50, " \u00e9t\u00e9    " * 200])  # fmt: skip
def test_long_text_is_tokenized_in_chunks_without_a_trace(tmp_path, tokenizer, monkeypatch, text):
    file = tmp_path / "a.py"
    file.write_text(text)
    monkeypatch.setattr(eval_ppl, "CHUNK", 64)
    chunks = list(text_chunks(file))
    assert len(chunks) > 10 and max(map(len, chunks)) <= 2 * 64 and "".join(chunks) == text
    corpus = Corpus([file], tokenizer)
    assert corpus.read(corpus.documents[0], 0, 10**9).tolist() == tokenizer.encode(text)


def test_text_without_spaces_is_cut_anywhere(tmp_path, tokenizer, monkeypatch):
    file, text = tmp_path / "a.txt", "0123456789\u4e16\u754c" * 100
    file.write_text(text)
    monkeypatch.setattr(eval_ppl, "CHUNK", 64)
    assert max(map(len, text_chunks(file))) <= 64
    assert texts(Corpus([file], tokenizer), tokenizer) == [text]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_files_of_token_ids(tmp_path, tokenizer, dtype, monkeypatch):
    monkeypatch.setattr(eval_ppl, "CHUNK", 2)  # documents cross the blocks in which the file is searched
    ids = [1, 50, 60, 70, 1, 80, 1, 90, 91]
    np.array(ids, dtype).tofile(tmp_path / "tokens.bin")
    corpus = Corpus([tmp_path / "tokens.bin"], tokenizer)
    assert [corpus.read(d, 0, 99).tolist() for d in corpus.documents] == [[1, 50, 60, 70], [1, 80], [1, 90, 91]]
    np.array(ids[1:4], dtype).tofile(tmp_path / "no-bos.bin")
    corpus = Corpus([tmp_path / "no-bos.bin"], tokenizer)
    assert [corpus.read(d, 0, 99).tolist() for d in corpus.documents] == [[1, 50, 60, 70]]


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("a.txt", b"caf\xe9", "a.txt: not UTF-8 text"),
        ("a.txt", b"", "no text in it"),
        ("a.jsonl", b'{"content": "x"}\n', 'a.jsonl: line 1 is not a JSON object with a "text" field'),
        ("a.jsonl", b'{"text": "x"}\n{"text', "a.jsonl: line 2"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl: line 1"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz: not a complete gzip file"),
        ("a.jsonl.zst", b"x", "unpack it first, with `zstd -d .*a.jsonl.zst`"),
        ("a.bin", b"", "a.bin: not uint16 or uint32"),
        ("a.bin", b"\xff\xff\xff\xff", "a.bin: not uint16 or uint32 token ids below the vocabulary's 2048"),
        ("a.bin", b"\x01\x00\x02", "a.bin: not uint16 or uint32"),
    ],
)
def test_text_that_cannot_be_used_is_named(tmp_path, tokenizer, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        Corpus([tmp_path / name], tokenizer)
    assert not list((tmp_path / "cache").glob("*"))


def test_half_a_surrogate_pair_becomes_a_question_mark(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')  # seen in web crawls; no UTF-8 text can hold it
    assert texts(Corpus([tmp_path / "a.jsonl"], tokenizer), tokenizer) == ["a?b"]


def test_a_missing_path_is_named(tmp_path, tokenizer):
    with pytest.raises(UserError, match="--data .*nowhere: no such file"):
        Corpus([tmp_path / "nowhere"], tokenizer)


def test_parts_are_apart_and_follow_the_files_name(tmp_path, tokenizer):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(200):
        (folder / f"{i}.txt").write_text("words " * (i + 1))
    corpus = Corpus([folder], tokenizer)
    counts = {name: len(corpus.part(name)) for name in PARTS}
    assert sum(counts.values()) == 2 * 200 and counts["all"] == 200 and all(counts.values())
    held = {zlib.crc32(f"{i}.txt".encode()) for i in range(200) if zlib.crc32(f"{i}.txt".encode()) % 20 in (0, 1)}
    assert {int(d[3]) for d in corpus.part("held-out")} == held
    long = corpus.part("training", at_least=100)
    assert all(len(corpus.read(d, 0, 10**9)) >= 100 for d in long) and 0 < len(long) < counts["training"]


def test_sequences_are_the_shuffled_documents_end_to_end(tmp_path, tokenizer):
    """Every token of a pass appears once, in document order, and sequence i is a function of the seed alone."""
    np.concatenate([[1, *range(100 * n, 100 * n + 3 * n)] for n in range(1, 8)]).astype(np.uint16).tofile(
        tmp_path / "a.bin"
    )
    corpus = Corpus([tmp_path / "a.bin"], tokenizer)
    documents = corpus.documents
    data = Sequences(corpus, documents, L=10, seed=0)
    total = sum(1 + 3 * n for n in range(1, 8))
    assert data.per_pass == total // 10
    for epoch in (0, 1):
        rows = [data[epoch * data.per_pass + i] for i in range(data.per_pass)]
        assert all(row.shape == (10,) and row.dtype == np.int64 for row in rows)
        flat = np.concatenate(rows)
        assert len(set(flat[flat != 1].tolist())) == len(flat[flat != 1])  # nothing twice
        for row in rows:  # inside a row a document goes on, or the next begins with BOS
            assert all(b in (a + 1, 1) or a == 1 for a, b in zip(row, row[1:]))
    again = Sequences(corpus, documents, L=10, seed=0)
    assert np.array_equal(again[7], data[7]) and np.array_equal(again[2], data[2])
    other = Sequences(corpus, documents, L=10, seed=1)
    assert any(not np.array_equal(other[i], data[i]) for i in range(data.per_pass))
    with pytest.raises(UserError, match=f"{total} tokens to train on, a sequence needs 1000"):
        Sequences(corpus, documents, L=1000, seed=0)
