"""Text: files into documents, documents into tokens, and tokens into what a run trains
on and scores."""

import gzip
import hashlib
import json
import os
import sys
import sysconfig
import zlib
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from support.command_line import counted
from support.files import FOREIGN, UTF8, UserError, checksum
from support.files import read_file, read_text, write_file
from support.tokenizer import Tokenizer

# --- Files into documents ---------------------------------------------------------------


def library() -> Path:
    """Python's own: real text on every machine that runs this program."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_files(paths: list[Path]) -> list[Path]:
    """The files, and in folders all but hidden ones; without a path those of Python's
    library. A file that is named twice counts once."""
    if not paths:
        files = sorted(library().rglob("*.py"))
        return [file for file in files if "site-packages" not in file.parts]
    files = {}
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: there is no such file or folder of texts")
        for file in files_in(path) if path.is_dir() else [path]:
            files.setdefault(file.resolve(), file)
    return list(files.values())


def files_in(folder: Path) -> Iterator[Path]:
    to_folders, to_nothing = [], []
    for path in sorted(folder.rglob("*")):
        if "/." in f"/{path.relative_to(folder)}":
            continue
        if path.is_file():
            yield path
        elif path.is_symlink():
            (to_folders if path.is_dir() else to_nothing).append(str(path))
    say_left_out("links to folders", to_folders)  # they may lead in a circle
    say_left_out("links to nothing", to_nothing)


def say_left_out(what: str, names: list[str]) -> None:
    if names:
        listed = ", ".join(names[:3]) + (f" and {len(names) - 3:,} more" if names[3:] else "")
        print(f"left out, as they are {what}: {listed}", file=sys.stderr)


def read_rows(file: Path, check: Callable[[dict], bool]) -> Iterator[tuple[int, dict]]:
    """Number and object of each line of a .jsonl or .jsonl.gz file. `check` says whether an
    object is a row; it may also raise one of FOREIGN."""
    opener = gzip.open if file.suffix.lower() == ".gz" else open
    number = 1
    # Bytes, as text would be decoded ahead of the line that is read.
    with opener(file, "rb") as content:
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
            sentence = f"not as --help says ({error!r})"
            raise UserError(f"{file}, line {number}: {sentence}") from None


def is_row(row: Any) -> bool:
    return isinstance(row, dict) and isinstance(row.get("text"), str)


def parsed(text: bytes | str) -> Any:
    """The value of a JSON text; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def has_rows(file: Path) -> bool:
    """Whether each line is a document. The end of the name says so, in capitals or not. For
    a .json file that is not packed the first line says so. Raises UserError for a list of
    texts."""
    name = file.name.lower()
    if name.endswith((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".json.gz")):
        return True
    if not name.endswith(".json"):
        return False
    content = file.read_bytes()
    whole = parsed(content)
    if isinstance(whole, list) and any(map(is_row, whole)):
        remedy = "write each row in a line, as .jsonl"
        raise UserError(f"{file}: a list of texts is not read; {remedy}")
    return is_row(parsed(content.split(b"\n", 1)[0]))  # else it is a plain text


def read_documents(file: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of a text file, or of each line of a file of rows."""
    if has_rows(file):
        for number, row in read_rows(file, is_row):
            yield f"{file.name}:{number}", row["text"]
    else:
        # Two files of the library begin with a byte order mark. It is kept as text, because
        # the stored figures were made so.
        yield file.name, read_text(file, "utf-8" if library() in file.parents else UTF8)


# --- Documents into tokens --------------------------------------------------------------

# Where tokens are stored; it is safe to delete.
CACHE = os.environ.get("LOCOCO_CACHE") or "~/.cache/lococo"

PARTS = ("held-out", "training")


def part_of(name: str) -> str:
    """The part of a document or of a fact with this name: a tenth of all names is held out."""
    number = zlib.crc32(name.encode("utf-8", "surrogateescape")) % 20
    return "held-out" if number < 2 else "training"


def tokenize(
    files: list[Path], tokenizer: Tokenizer
) -> tuple[dict[str, Tensor], list[int]]:
    """Token ids of all documents, one after the other, of each of PARTS; and the numbers of
    the files that are left out, as they are not in UTF-8."""
    streams = {part: [np.empty(0, np.int32)] for part in PARTS}
    left_out = []
    for number, file in enumerate(tqdm(files, "tokenizing", leave=False, disable=None)):
        try:
            for name, text in read_documents(file):
                streams[part_of(name)].append(np.array(tokenizer.encode(text), np.int32))
        except UnicodeDecodeError:
            if library() not in file.parents:  # the library has some on purpose
                left_out.append(number)
    joined = {part: torch.from_numpy(np.concatenate(ids)) for part, ids in streams.items()}
    return joined, left_out


def name_of_tokens(files: list[Path], tokenizer: Tokenizer) -> str:
    """A name by all that tokens are made from: the texts, the names that choose a part,
    the tokenizer and how it begins a text, and a version (raise it when this module reads
    texts in another way). A text is known by its content: another one may have its size and
    its time.
    """
    texts = []
    for file in files:
        with open(file, "rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        texts.append((file.name, library() in file.parents, digest))
    made_from = repr(("int32, 8", texts, tokenizer.prefix, tokenizer.beside)).encode()
    made_from += tokenizer.file.read_bytes()
    return f"{hashlib.sha256(made_from).hexdigest()[:24]}.safetensors"


def store(file: Path, streams: dict[str, Tensor], left_out: list[int]) -> None:
    """Keep tokens for the next time. Where that cannot be, a warning is enough."""
    try:
        if file.parts[0].startswith("~"):
            raise UserError(f"{file}: there is no home directory")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, streams, left_out=left_out)
    except (OSError, UserError) as error:
        remedy = "the environment variable LOCOCO_CACHE can name another folder"
        print(f"warning: the tokens are not stored; {remedy} ({error})", file=sys.stderr)


def token_streams(paths: list[Path], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The ids of each of PARTS, mapped into memory; a BOS begins each document. They are
    tokenized once and stored."""
    files = find_files(paths)
    stored = Path(os.path.expanduser(CACHE), name_of_tokens(files, tokenizer))
    try:
        streams, about = read_file(stored)
        left_out = about["left_out"]
    except (OSError, UserError):  # not there yet, damaged, or not to be read
        streams, left_out = tokenize(files, tokenizer)
        store(stored, streams, left_out)
    # Also in runs that find the tokens stored.
    say_left_out("not in UTF-8", [str(files[number]) for number in left_out])
    if not any(len(ids) for ids in streams.values()):
        raise UserError(f"{' '.join(map(str, paths))}: there is no text in it")
    return {part: streams[part].numpy() for part in PARTS}  # a file has another order


# --- Tokens into sequences and documents ------------------------------------------------


def sequence(ids: np.ndarray, L: int, seed: int, i: int) -> Tensor:
    """Training sequence i, (L,): the stream is cut into pieces, which are shuffled anew
    for each pass."""
    if len(ids) < L:
        only = f"the text to train on has only {counted(len(ids), 'token')}"
        raise UserError(f"--seq {L}: {only}; give more text, or a smaller --seq")
    epoch, i = divmod(i, len(ids) // L)
    place = np.random.default_rng((seed, epoch)).permutation(len(ids) // L)[i]
    return torch.from_numpy(ids[place * L : (place + 1) * L].astype(np.int64))


def long_documents(ids: np.ndarray, bos: int, L: int, most: int) -> Tensor:
    """The first L tokens of the first documents that have so many, (<= most, L)."""
    rows = [document[:L] for document in documents_in(ids, bos) if len(document) >= L][:most]
    return torch.from_numpy(np.array(rows, np.int64).reshape(len(rows), L))


def fingerprint(tokens: np.ndarray) -> int:
    digest = hashlib.sha256(tokens.astype(np.int32).tobytes()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def fingerprints(ids: np.ndarray, bos: int) -> set[int]:
    """Fingerprints by which documents are recognised under any name: of the first 64, 128,
    256 ... tokens of each, or of the whole document if it is shorter than 64."""
    known = set()
    for document in documents_in(ids, bos):
        beginnings = range(6, len(document).bit_length())
        lengths = [2**e for e in beginnings] or [len(document)]
        known.update(fingerprint(document[:n]) for n in lengths)
    return known


def of_beginning(document: np.ndarray, L: int) -> int:
    """The fingerprint by which a document of L tokens or more is looked up. It covers the
    largest power of two up to L, and at least 64 tokens."""
    return fingerprint(document[: max(64, 2 ** (L.bit_length() - 1))])


def documents_in(ids: np.ndarray, bos: int) -> list[np.ndarray]:
    starts = np.flatnonzero(ids == bos)
    return np.split(ids, starts)[1:]  # nothing stands before the first one


def copies(ids: np.ndarray, trained: set[int], bos: int, L: int) -> set[int]:
    """The fingerprints in `trained` of those documents that have at least L tokens."""
    long = (document for document in documents_in(ids, bos) if len(document) >= L)
    return trained.intersection(of_beginning(document, L) for document in long)


def note_of_copies(copied: set[int]) -> str:
    return f"note: not scored, as the same text trains: {counted(len(copied), 'text')}"


def pieces(
    ids: np.ndarray, bos: int, L: int, most: int, without: set[int] = frozenset()
) -> Tensor:
    """Documents cut into pieces of L tokens, of which the first is BOS. At most `most` of
    them, spread evenly over all, (<= most, L), but for documents whose fingerprint is in
    `without`."""
    found = []  # L - 1 tokens each, without BOS
    for document in documents_in(ids, bos):
        if not without or of_beginning(document, L) not in without:
            count = (len(document) - 1) // (L - 1)
            found += [*document[1 : 1 + count * (L - 1)].reshape(count, L - 1)]
    most = min(most, len(found))
    rows = [[bos, *found[i * len(found) // most]] for i in range(most)]
    return torch.from_numpy(np.array(rows, np.int64).reshape(most, L))


def pieces_to_fit(
    paths: list[Path], tokenizer: Tokenizer, L: int, most: int
) -> tuple[Tensor, np.ndarray]:
    """The `pieces` of all texts, and the ids of these texts; without a path, of the training
    part of Python's library. Raises UserError if no text is long enough."""
    streams = token_streams(paths, tokenizer)
    ids = np.concatenate([*streams.values()]) if paths else streams["training"]
    rows = pieces(ids, tokenizer.bos, L, most)
    if not len(rows):
        raise UserError(f"--data: no text has --length {L} tokens")
    return rows, ids


class Texts(NamedTuple):
    """What a run trains on and scores."""

    ids: np.ndarray  # tokens to train on
    trained: set[int]  # the fingerprints of these texts
    parts: list[str]  # the parts of its texts that they come from
    documents: Tensor  # to score, (P, L)
    summary: str  # for the user

    @property
    def checksum(self) -> str:
        return checksum({"ids": torch.from_numpy(self.ids), "scored": self.documents}, "")


def read_texts(
    data: list[str], held_out: list[str], L: int, score_tokens: int, tokenizer: Tokenizer
) -> Texts:
    """The texts of a run. All of `data` trains if texts are held out. If none are, the
    names of the documents choose a tenth of `data` that is held out. About
    `score_tokens` of what is held out are scored, in pieces of L tokens. Raises
    UserError."""
    if held_out:
        ids, scored, parts = split_by_flag(data, held_out, tokenizer)
    else:
        ids, scored, parts = split_by_name(data, tokenizer)
    most = max(1, score_tokens // L) if score_tokens else 0
    trained = fingerprints(ids, tokenizer.bos)
    copied = copies(scored, trained, tokenizer.bos, L)
    documents = pieces(scored, tokenizer.bos, L, most, without=copied)
    summary = f"text: {size_of(ids, tokenizer)} to train on, "
    summary += f"{size_of(scored, tokenizer)} held out; {len(documents)} to score"
    if most and not len(documents):
        reason = f"no held-out document has --seq {L} tokens"
        if copied:
            reason += " but those of which the same text trains"
        if held_out:
            remedy = "give longer ones, a smaller --seq, or --score-tokens 0"
            raise UserError(f"--held-out {' '.join(held_out)}: {reason}; {remedy}")
        summary += f"\nnote: nothing is scored, as {reason}; name others by --held-out"
    if len(scored) > len(ids) and not held_out:
        most_of_it = "most of the text is held out, as names choose the documents, long or short"
        summary += f"\nnote: {most_of_it}; name what to score by --held-out"
    if copied:
        summary += f"\n{note_of_copies(copied)}"
    return Texts(ids, trained, parts, documents, summary)


def split_by_flag(
    data: list[str], held_out: list[str], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Tokens to train on, tokens to score, and the parts of `data` that train: all."""
    ids, scored = (
        np.concatenate([*token_streams([*map(Path, names)], tokenizer).values()])
        for names in (data, held_out)
    )
    return ids, scored, [*PARTS]


def split_by_name(
    data: list[str], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Tokens to train on, tokens to score, and the parts that train. If all documents
    are of one part, they all train, and nothing is scored."""
    streams = token_streams([Path(name) for name in data], tokenizer)
    ids, scored = streams["training"], streams["held-out"]
    if not len(ids):
        ids, scored = scored, ids
    return ids, scored, ["training"] if len(scored) else [*PARTS]


def size_of(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    documents = int((ids == tokenizer.bos).sum())  # each begins with a BOS
    return f"{counted(documents, 'document')} ({len(ids):,} tokens)"
