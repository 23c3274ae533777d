"""Text: files into documents, documents into tokens, tokens into sequences and rows to score."""

import gzip
import hashlib
import json
import os
import re
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from support.command_line import counted
from support.files import FOREIGN, UTF8, UserError, read_file, read_text, write_file
from support.tokenizer import Tokenizer

CACHE = os.environ.get("LOCOCO_CACHE") or "~/.cache/lococo"  # of tokens; safe to delete

# By the checksum of a document's name, modulo 20. Tune on the choosing part, then score held-out.
PARTS = {"held-out": range(0, 2), "choosing": range(2, 3), "training": range(3, 20)}


def library() -> Path:
    """Python's own: real text on every machine that runs this program."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_files(paths: list[Path], say: bool = True) -> list[Path]:
    """The files, and in folders all but hidden ones; without a path those of Python's library. A
    file that is named twice counts once. `say`: print what is left out."""
    if not paths:
        return sorted(f for f in library().rglob("*.py") if "site-packages" not in f.parts)
    files = []
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder of texts")
        inside = [f for f in sorted(path.rglob("*")) if "/." not in f"/{f.relative_to(path)}"]
        for link in (f for f in inside if say and f.is_symlink() and f.is_dir()):
            print(f"left out, as it is a link to a folder: {link}", file=sys.stderr)
        files += [f for f in inside if f.is_file()] if path.is_dir() else [path]
    different = {}
    for file in files:
        different.setdefault(file.resolve(), file)
    return list(different.values())


def read_rows(file: Path, check: Callable[[dict], bool]) -> Iterator[tuple[int, dict]]:
    """Number and object of each line of a .jsonl or .jsonl.gz file, for which `check` must hold. It
    may also raise what looking for values raises."""
    opener = gzip.open if file.suffix.lower() == ".gz" else open
    number = 1
    with opener(file, "rb") as content:  # bytes: text is decoded ahead of the line that is read
        try:
            for line in content:
                if line.strip():
                    row = json.loads(line)
                    if not check(row):
                        raise ValueError(f"{row}"[:80])
                    yield number, row
                number += 1
        except json.JSONDecodeError as error:
            sentence = f"this is not valid JSON ({error.msg}, column {error.colno})"
            raise UserError(f"{file}, line {number}: {sentence}") from None
        except (*FOREIGN, RecursionError, OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file}, line {number}: not as --help says ({error!r})") from None


def is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("text"), str)


def parsed(text: bytes) -> Any:
    """The value of a JSON text; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def has_rows(file: Path) -> bool:
    """Whether each line is a document. In capitals or not, the name's end says so, and a .json file
    whose first line is one. Raises UserError if texts are packed otherwise."""
    name = file.name.lower()
    if name.endswith((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")):
        return True
    if re.search(r"\.(jsonl?|ndjson|txt)\.(gz|zst|xz|bz2|lz4|zip|7z)$", name):
        sentence = "texts that are packed so are not read; unpack it, or pack rows as .jsonl.gz"
        raise UserError(f"{file}: {sentence}")
    if not name.endswith(".json"):
        return False
    content = file.read_bytes()
    whole = parsed(content)
    if isinstance(whole, list) and any(map(is_row, whole)):
        raise UserError(f"{file}: a list of texts is not read; write each row in a line, as .jsonl")
    return is_row(parsed(content.split(b"\n", 1)[0]))  # else it is a plain text


def read_documents(file: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of a text file, or of each line of a file of rows."""
    if has_rows(file):
        for number, row in read_rows(file, is_row):
            yield f"{file.name}:{number}", row["text"]
    else:
        # The library has two files with a byte order mark. It stays there: what is measured on
        # these texts, and what is trained on them, is the same with any version of this program.
        yield file.name, read_text(file, "utf-8" if library() in file.parents else UTF8)


def tokenize(files: list[Path], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Token ids of all documents, one after the other, of each of PARTS."""
    streams = {part: [np.empty(0, np.int32)] for part in PARTS}
    for file in tqdm(files, "tokenizing", leave=False, disable=None):
        try:
            for name, text in read_documents(file):
                number = zlib.crc32(name.encode("utf-8", "surrogateescape")) % 20
                part = next(part for part in PARTS if number in PARTS[part])
                streams[part].append(np.array(tokenizer.encode(text), np.int32))
        except UnicodeDecodeError:
            if library() not in file.parents:  # the library has some on purpose
                tqdm.write(f"left out, as it is not in UTF-8: {file}", file=sys.stderr)
    return {part: torch.from_numpy(np.concatenate(ids)) for part, ids in streams.items()}


def name_of_tokens(files: list[Path], tokenizer: Tokenizer) -> str:
    """By all that tokens are made from: the texts, the names that choose a part, the tokenizer and
    how it begins a text, and how this module reads them (a number to raise)."""
    texts = [(f.name, str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    made_from = repr(("int32, 5", texts, tokenizer.prefix)).encode() + tokenizer.file.read_bytes()
    return f"{hashlib.sha256(made_from).hexdigest()[:24]}.safetensors"


def store(file: Path, streams: dict[str, Tensor]) -> None:
    """Keep tokens for the next time. Where that cannot be, a warning is enough."""
    try:
        if file.parts[0].startswith("~"):
            raise UserError(f"{file}: there is no home directory")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, streams)
    except (OSError, UserError) as error:
        remedy = "the environment variable LOCOCO_CACHE can name another folder"
        print(f"warning: the tokens are not stored; {remedy} ({error})", file=sys.stderr)


def token_streams(paths: list[Path], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The ids of each of PARTS, mapped into memory; a BOS begins each document. Tokenized once and
    stored."""
    files = find_files(paths)
    stored = Path(os.path.expanduser(CACHE), name_of_tokens(files, tokenizer))
    try:
        streams, _ = read_file(stored)
    except UserError:  # not there yet, or damaged
        streams = tokenize(files, tokenizer)
        store(stored, streams)
    if not any(len(ids) for ids in streams.values()):
        raise UserError(f"{' '.join(map(str, paths))}: there is no text in it")
    return {part: streams[part].numpy() for part in PARTS}  # a file has them in another order


def sequence(ids: np.ndarray, L: int, seed: int, i: int) -> Tensor:
    """Training sequence i, (L,): the stream is cut into pieces, shuffled anew for each pass."""
    if len(ids) < L:
        only = f"the text to train on has only {counted(len(ids), 'token')}"
        raise UserError(f"--seq {L}: {only}; give more text, or a smaller --seq")
    epoch, i = divmod(i, len(ids) // L)
    place = np.random.default_rng((seed, epoch)).permutation(len(ids) // L)[i]
    return torch.from_numpy(ids[place * L : (place + 1) * L].astype(np.int64))


def long_documents(ids: np.ndarray, bos: int, L: int, most: int) -> Tensor:
    """The first L tokens of the first documents that have so many, (<= most, L)."""
    starts = np.flatnonzero(ids == bos)
    lengths = np.diff(starts, append=len(ids))
    rows = [ids[start : start + L] for start in starts[lengths >= L][:most]]
    return torch.from_numpy(np.array(rows, np.int64).reshape(len(rows), L))
