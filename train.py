import gzip
import hashlib
import json
import sysconfig
import zlib
from pathlib import Path
from typing import Iterator

import numpy as np
from tqdm import tqdm

from model import Tokenizer, UserError

HERE = Path(__file__).parent

# --- Text ----------------------------------------------------------------------------------------------------

CACHE = HERE / ".cache"  # tokenized text; may be deleted at any time
CHUNK = 1 << 20  # characters tokenized at once

# A document belongs to one part for ever: the checksum of its file's name, modulo 20, decides.
PARTS = {"held-out": (0, 1), "choosing": (2,), "training": tuple(range(3, 20))}


def default_files() -> list[Path]:
    """The source of Python's own standard library: real text on every machine that runs this program."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(file for file in root.rglob("*.py") if "site-packages" not in file.parts)


def text_documents(file: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """The documents of one text or JSON-lines file: (name, its text in chunks)."""
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        yield file.name, text_chunks(file)
        return
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError):
                raise UserError(f'{file}: line {number} is not a JSON object with a "text" field') from None
            yield f"{file.name}:{number}", iter([text])


def text_chunks(file: Path) -> Iterator[str]:
    """About CHUNK characters at a time; every chunk but the first begins with a newline."""
    with open(file, encoding="utf-8", newline="") as text:
        rest = ""
        while chunk := text.read(CHUNK):
            cut = chunk.rfind("\n")
            if cut > 0:
                yield rest + chunk[:cut]
                rest = chunk[cut:]
            else:
                rest += chunk
        yield rest


def tokenize(files: list[Path], tokenizer: Tokenizer, skip_binary: bool) -> tuple[Path, Path]:
    """Token ids of all documents, one after the other, into the cache, unless they are there already.

    Returns the files of ids (uint16, uint32 for a large vocabulary) and of document ends and names' checksums.
    The key covers each file's path, size and time and the tokenizer's bytes.
    """
    stamps = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    key = hashlib.sha256(repr(stamps).encode() + tokenizer.file.read_bytes()).hexdigest()[:24]
    ids, index = CACHE / f"{key}.ids", CACHE / f"{key}.npz"
    if index.is_file():
        return ids, index
    CACHE.mkdir(exist_ok=True)
    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
    ends, sums, total, skipped = [], [], 0, []
    bar = tqdm(total=sum(size for _, size, _ in stamps), desc="tokenizing", unit="B", unit_scale=True)
    with bar, open(ids.with_suffix(".part"), "wb") as out:
        for file in files:
            start = (out.tell(), len(ends), total)
            try:
                for name, chunks in text_documents(file):
                    for i, chunk in enumerate(chunks):
                        # Sentencepiece puts a space before a text; not before a text that goes on.
                        tokens = np.array(tokenizer.encode(chunk, bos=False)[i > 0 :], dtype)
                        out.write(tokens.tobytes())
                        total += len(tokens)
                    ends.append(total)
                    sums.append(zlib.crc32(name.encode()))
            except UnicodeDecodeError:
                if not skip_binary:
                    raise UserError(f"{file}: not UTF-8 text") from None
                out.seek(start[0])
                out.truncate()
                del ends[start[1] :], sums[start[1] :]
                total = start[2]
                skipped.append(file)
            bar.update(file.stat().st_size)
    if skipped:
        tqdm.write(f"skipped {len(skipped)} files that are not UTF-8 text, the first is {skipped[0]}")
    with open(index.with_suffix(".npz.part"), "wb") as out:
        np.savez(out, ends=np.array(ends, np.int64), sums=np.array(sums, np.uint32))
    ids.with_suffix(".part").rename(ids)
    index.with_suffix(".npz.part").rename(index)
    return ids, index


def open_bin(file: Path, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A file of raw token ids, memory-mapped: (ids, document starts, document ends); a BOS begins a document."""
    for dtype in (np.uint32, np.uint16):  # ids of 16 bits, read as 32, exceed every vocabulary
        if file.stat().st_size == 0 or file.stat().st_size % dtype().itemsize:
            continue
        ids = np.memmap(file, dtype, mode="r")
        blocks = range(0, len(ids), CHUNK)
        if max(int(ids[b : b + CHUNK].max()) for b in blocks) < tokenizer.vocab_size:
            bos = np.concatenate([b + np.flatnonzero(ids[b : b + CHUNK] == tokenizer.bos) for b in blocks])
            starts = bos + 1 if len(bos) and bos[0] == 0 else np.concatenate(([0], bos + 1))
            return ids, starts, np.append(starts[1:] - 1, len(ids))
    raise UserError(f"{file}: not uint16 or uint32 token ids below the vocabulary's {tokenizer.vocab_size}")


class Corpus:
    """Tokenized documents of some files or folders, memory-mapped; each begins with BOS when it is read."""

    def __init__(self, paths: list[str | Path], tokenizer: Tokenizer):
        """No path means Python's standard library. Folders are read recursively, files as their ending says."""
        self.bos, self.ids = tokenizer.bos, []
        tables = []  # per source: its number, start, end and name's checksum of every document
        for path in map(Path, paths) if paths else [None]:
            if path is not None and not path.exists():
                raise UserError(f"--data {path}: no such file or directory")
            files = default_files() if path is None else [path] if path.is_file() else sorted(
                f for f in path.rglob("*") if f.is_file() and not any(p[0] == "." for p in f.relative_to(path).parts)
            )  # fmt: skip
            packed = [f for f in files if f.suffix == ".zst"]
            if packed:
                raise UserError(f"{packed[0]}: unpack it first, with `zstd -d {packed[0]}`")
            bins = [f for f in files if f.suffix == ".bin"]
            for file in bins:
                ids, starts, ends = open_bin(file, tokenizer)
                sums = np.array([zlib.crc32(f"{file.name}:{i}".encode()) for i in range(len(starts))])
                self._add(tables, ids, starts, ends, sums)
            texts = [f for f in files if f.suffix != ".bin"]
            if texts:
                file, index = tokenize(texts, tokenizer, skip_binary=path is None or path.is_dir())
                with np.load(index) as arrays:
                    ends, sums = arrays["ends"], arrays["sums"]
                if len(ends) and ends[-1]:
                    dtype = np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32
                    ids = np.memmap(file, dtype, mode="r")
                    self._add(tables, ids, np.append(0, ends[:-1]), ends, sums)
        if not tables:
            raise UserError(f"--data {' '.join(map(str, paths))}: no text in it")
        self.documents = np.concatenate(tables)  # (documents, 4)

    def _add(self, tables, ids, starts, ends, sums) -> None:
        tables.append(np.stack([np.full(len(starts), len(self.ids)), starts, ends, sums], axis=1).astype(np.int64))
        self.ids.append(ids)

    def part(self, name: str, at_least: int = 2) -> np.ndarray:
        """The documents of one of PARTS that have at least so many tokens, BOS included."""
        d = self.documents
        return d[np.isin(d[:, 3] % 20, PARTS[name]) & (d[:, 2] - d[:, 1] + 1 >= at_least)]

    def read(self, document: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document, BOS being token 0, as int64."""
        source, first, last, _ = document
        body = self.ids[source][first + max(start - 1, 0) : min(first + stop - 1, last)].astype(np.int64)
        return np.append(self.bos, body) if start == 0 else body


class Sequences:
    """Training sequences of L tokens: the documents, shuffled anew for each pass, one after the other, cut to L.

    Sequence i depends on nothing but (corpus, L, seed, i).
    """

    def __init__(self, corpus: Corpus, documents: np.ndarray, L: int, seed: int):
        self.corpus, self.documents, self.L, self.seed = corpus, documents, L, seed
        lengths = documents[:, 2] - documents[:, 1] + 1
        self.per_pass, self.epoch = int(lengths.sum()) // L, None
        if self.per_pass == 0:
            raise UserError(f"the text has {int(lengths.sum())} tokens to train on, a sequence needs {L}")

    def __getitem__(self, i: int) -> np.ndarray:
        epoch, i = divmod(i, self.per_pass)
        if epoch != self.epoch:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(self.documents))
            self.epoch, self.order = epoch, self.documents[order]
            self.ends = np.cumsum(self.order[:, 2] - self.order[:, 1] + 1)
        # Neighbours in the stream are neighbours in i, so a batch would hold one document: visit i out of order.
        position = np.random.default_rng((self.seed, epoch, 1)).permutation(self.per_pass)[i] * self.L
        pieces, need = [], self.L
        d = int(np.searchsorted(self.ends, position, side="right"))
        while need:
            start = position - (self.ends[d - 1] if d else 0)
            pieces.append(self.corpus.read(self.order[d], start, start + need))
            position, need, d = position + len(pieces[-1]), need - len(pieces[-1]), d + 1
        return np.concatenate(pieces)
