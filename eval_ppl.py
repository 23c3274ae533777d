"""Text in, perplexity out: the base model with its full cache beside each run with its memory.

    python eval_ppl.py                                        # the embedded model and adapter
    python eval_ppl.py runs/a runs/b --lengths 2048 4096 8192 --json table.json
    python eval_ppl.py --method streaming h2o --mem 512       # eviction needs no training: any base, no run
    python eval_ppl.py tiny --by-position --passkey           # where the loss is, and what can be recalled

Perplexity is exp(total negative log-likelihood / scored tokens): every token after the first is scored, segment
boundaries included. A document shorter than the length is left out, a longer one cut; each starts with BOS and
an empty memory. Columns of different lengths hold different documents: compare within a column.

The first half reads text for all programs: files -> documents -> token ids in a memory-mapped cache.
"""

import argparse
import gzip
import hashlib
import json
import math
import os
import platform
import sys
import sysconfig
import time
import zlib
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Callable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from lococo import POSITIONS, SCORES, LoCoCo, Settings, adapter_file, read_file, segment_losses
from model import KVCache, Llama, Tokenizer, UserError

HERE = Path(__file__).parent
TINY = HERE / "tiny"  # the embedded model and adapter

# --- Text ----------------------------------------------------------------------------------------------------

CACHE = HERE / ".cache"  # tokenized text; may be deleted at any time
CHUNK = 1 << 20  # characters tokenized at once

# A document belongs to one part for ever: the checksum of its file's name, modulo 20, decides. The choosing part
# is for hyperparameters, so that the held-out part is scored only.
PARTS = {"held-out": (0, 1), "choosing": (2,), "training": tuple(range(3, 20)), "all": tuple(range(20))}


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
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
                if not isinstance(text, str):
                    raise TypeError
            except (ValueError, KeyError, TypeError):
                raise UserError(f'{file}: line {number} is not a JSON object with a "text" field') from None
            yield f"{file.name}:{number}", iter([text.encode("utf-8", "replace").decode()])  # lone surrogates: ?


def text_chunks(file: Path) -> Iterator[str]:
    """At most about CHUNK characters at a time, cut before the last newline or else before spaces; where there is
    neither anywhere, so that no file is too long a line."""
    with open(file, encoding="utf-8", newline="") as text:
        rest = ""
        while chunk := text.read(CHUNK):
            cut = chunk.rfind("\n")
            if cut <= 0:
                cut = len(chunk[: chunk.rfind(" ") + 1].rstrip(" ")) or len(chunk)
            yield rest + chunk[:cut]
            rest = chunk[cut:]
        yield rest


def token_dtype(tokenizer: Tokenizer) -> type:
    return np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32


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
    part = CACHE / f"{key}-{os.getpid()}.part"
    try:
        with open(part, "wb") as out:
            ends, sums = write_tokens(out, files, tokenizer, skip_binary)
        if not any(ends):
            raise UserError(f"--data {files[0] if len(files) == 1 else files[0].parent}: there is no text in it")
        part.replace(ids)
        with open(part, "wb") as out:
            np.savez(out, ends=np.array(ends, np.int64), sums=np.array(sums, np.uint32))
        part.replace(index)  # last: its presence says that both are whole
    finally:
        part.unlink(missing_ok=True)
    return ids, index


def write_tokens(out: BinaryIO, files: list[Path], tokenizer: Tokenizer, skip_binary: bool) -> tuple[list, list]:
    """Token ids to `out`; returns every document's end, counted in tokens, and the checksum of its name."""
    ends, sums, dtype, skipped = [], [], token_dtype(tokenizer), []
    size = np.dtype(dtype).itemsize
    bar = tqdm(unit=" tokens", unit_scale=True, disable=None)
    for number, file in enumerate(files, 1):
        bar.set_description(f"tokenizing file {number} of {len(files)}", refresh=False)
        start, documents = out.tell(), len(ends)
        try:
            for name, chunks in text_documents(file):
                for i, chunk in enumerate(chunks):
                    if i == 0:
                        ids = tokenizer.encode(chunk, bos=False)
                    else:  # a text that goes on: without the space that sentencepiece puts before a text
                        ids = tokenizer.encode("\n" + chunk, bos=False)[2:]
                    out.write(np.array(ids, dtype).tobytes())
                    bar.update(len(ids))
                ends.append(out.tell() // size)
                sums.append(zlib.crc32(name.encode()))
        except (EOFError, gzip.BadGzipFile, zlib.error):
            raise UserError(f"{file}: not a complete gzip file") from None
        except UnicodeDecodeError:
            if not skip_binary:
                raise UserError(f"{file}: not UTF-8 text") from None
            out.seek(start)
            out.truncate()
            del ends[documents:], sums[documents:]
            skipped.append(file)
    bar.close()
    if skipped:
        print(f"left out {len(skipped)} files that are not UTF-8 text, such as {skipped[0]}", file=sys.stderr)
    return ends, sums


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
                ids = np.memmap(file, token_dtype(tokenizer), mode="r")
                self._add(tables, ids, np.append(0, ends[:-1]), ends, sums)
        if not tables:
            raise UserError(f"--data {' '.join(map(str, paths))}: no text in it")
        self.documents = np.concatenate(tables)  # (documents, 4)

    def _add(self, tables, ids, starts, ends, sums) -> None:
        tables.append(np.stack([np.full(len(starts), len(self.ids)), starts, ends, sums], axis=1).astype(np.int64))
        self.ids.append(ids)

    def checksum(self) -> int:
        """Of all tokens and of where documents begin and end."""
        sum_ = zlib.crc32(self.documents.tobytes())
        for ids in self.ids:
            for n in range(0, len(ids), CHUNK):
                sum_ = zlib.crc32(ids[n : n + CHUNK], sum_)
        return sum_

    def part(self, name: str, at_least: int = 2) -> np.ndarray:
        """The documents of one of PARTS that have at least so many tokens, BOS included."""
        d = self.documents
        return d[np.isin(d[:, 3] % 20, PARTS[name]) & (d[:, 2] - d[:, 1] + 1 >= at_least)]

    def read(self, document: np.ndarray, start: int, stop: int) -> np.ndarray:
        """Tokens [start, stop) of a document, BOS being token 0, as int64."""
        source, first, last, _ = document
        body = self.ids[source][first + max(start - 1, 0) : min(first + stop - 1, last)].astype(np.int64)
        return np.append(self.bos, body) if start == 0 else body


def scored_batches(corpus: Corpus, part: str, L: int, device: str, most: int, size: int) -> list[Tensor]:
    """The first L tokens of documents of a part that have as many, (<= size, L) each; shorter ones are left out."""
    tokens = [torch.from_numpy(corpus.read(d, 0, L)) for d in corpus.part(part, at_least=L)[:most]]
    return [torch.stack(tokens[i : i + size]).to(device) for i in range(0, len(tokens), size)]


# --- What the programs share ---------------------------------------------------------------------------------


COUNTS = {  # flags: what a method by its name leaves open
    "mem": (int, "memory slots M (default: 512, an adapter's own, or train.py's recipe)"),
    "sinks": (int, "slots that keep the first tokens"),
    "heavy": (int, "slots that keep what has received most attention"),
    "recent": (int, "slots that keep the last tokens"),
    "score": (str, f"of attention received: one of {', '.join(SCORES)}"),
    "positions": (str, f"one of {', '.join(POSITIONS)}"),
    "segment": (int, "tokens T that enter together (default: as mem)"),
}


class Parser(argparse.ArgumentParser):
    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--model", type=Path, help="directory of the base model (default: the embedded tiny/)")
        self.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
        self.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, else bfloat16")
        self.add_argument("--seed", type=int, default=0)

    def add_counts(self) -> None:
        for name, (kind, text) in COUNTS.items():
            self.add_argument(f"--{name}", type=kind, help=text)

    def parse_args(self) -> argparse.Namespace:
        args = super().parse_args()
        if not 0 <= args.seed < 2**63:
            self.error(f"--seed {args.seed}: from 0 to 2^63 - 1")
        return args

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a program: what the user can mend is one sentence and exit code 2, Ctrl-C is exit code 130."""
    try:
        main()
        leave()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UserError, OSError) as error:
        reason = error if isinstance(error, UserError) else f"{error.filename}: {error.strerror}"
        if os.environ.get("LOCAL_RANK", "0") == "0":  # of the processes of a machine one says it
            print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{Path(sys.argv[0]).name}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


def processes() -> tuple[int, int]:
    """(number of this process, how many there are): those of torchrun, or (0, 1)."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def join(args: argparse.Namespace) -> None:
    """Under torchrun: meet the other processes, take one GPU each, leave what is printed to the first."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if args.device not in (None, "cuda", "cpu"):
        raise UserError(f"--device {args.device}: under torchrun each process takes a device of its own; cuda or cpu")
    on_gpu, own = args.device != "cpu" and torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    if on_gpu and own >= torch.cuda.device_count():
        raise UserError(f"torchrun --nproc_per_node {os.environ['LOCAL_WORLD_SIZE']}: a process needs a GPU, there are "
                        f"{torch.cuda.device_count()}")  # fmt: skip
    if on_gpu:
        args.device = f"cuda:{own}"
        torch.cuda.set_device(own)
    # The first process may tokenize for hours; one that dies is noticed by torchrun, not by waiting.
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(days=1))
    if processes()[0] > 0:
        sys.stdout = open(os.devnull, "w")


def leave() -> None:
    """Wait for the other processes and take leave: one that just ends is taken for dead."""
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def from_first(make: Callable) -> Any:
    """What `make` returns, called in the first process before the others; its UserError is everybody's."""
    rank, number = processes()
    if number == 1:
        return make()
    made, error = None, [None]
    if rank == 0:
        try:
            made = make()
        except UserError as found:
            error = [found]
    dist.broadcast_object_list(error)
    if error[0]:
        raise error[0]
    return made if rank == 0 else make()


def load_base(args: argparse.Namespace, place: str | None = None) -> tuple[Llama, Tokenizer]:
    """The model and tokenizer that --model, --device and --dtype ask for; fills in what they leave open.

    `place` is where the weights are put, if not on the device.
    """
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.ones(1, device=args.device).item()
    except (RuntimeError, AssertionError):
        raise UserError(f"--device {args.device}: there is no such device here") from None
    args.dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)  # a softmax leaves weights like 1e-40, with which a CPU is many times slower
    path = args.model or TINY
    if not path.is_dir():
        raise UserError(f"--model {path}: no such directory")
    tokenizer = Tokenizer(path)
    model = Llama.from_pretrained(path, dtype=args.dtype, device=place or args.device)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"{tokenizer.file} has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}")
    return model, tokenizer


def precision(args: argparse.Namespace) -> torch.autocast:
    """Compute in --dtype, whatever dtype a weight is kept in: what trains is always float32."""
    return torch.autocast(torch.device(args.device).type, args.dtype, enabled=args.dtype != torch.float32)


def refuse_counts(args: argparse.Namespace) -> None:
    for name in COUNTS:
        if getattr(args, name) is not None and not args.method:
            raise UserError(f"--{name} {getattr(args, name)} goes with --method; an adapter has its own")


def untrained(args: argparse.Namespace, method: str, length: int) -> Settings:
    """A method that needs no training, for `length` tokens, as the flags of `Parser.add_counts` say."""
    mem = 512 if args.mem is None else args.mem
    segment = mem if args.segment is None else args.segment
    settings = Settings.of(method, mem, segment, max(length, segment), args.sinks, args.heavy, args.recent,
                           args.positions, score=args.score or "sum", lora_rank=0)  # fmt: skip
    if settings.merged:
        raise UserError(f"--method {method}: its convolution must be trained first, by train.py")
    return settings


# --- Perplexity ----------------------------------------------------------------------------------------------


@torch.no_grad()
def token_losses(model: Llama, new_cache: Callable[[], KVCache], batches: list[Tensor],
                 segment: int) -> tuple[Tensor, int]:  # fmt: skip
    """Nats of every token of (B, L) after the first, (all documents, L - 1), and bytes of one sequence's cache at the
    end. Several processes share the batches out, in as many turns each; all return all."""
    rank, number = processes()
    turns, own = -(-len(batches) // number), []
    for turn in tqdm(range(turns), desc="scoring", leave=False, disable=rank > 0 or None):
        batch, cache = batches[(turn * number + rank) % len(batches)], new_cache()  # the last ones: begin again
        nats = torch.cat(list(segment_losses(model, batch, cache, segment)), dim=1)
        own.append((nats.cpu(), cache.nbytes // len(nats)))
    shares = [own] * number
    if number > 1:
        dist.all_gather_object(shares, own)
    losses = [share[turn] for turn in range(turns) for share in shares][: len(batches)]
    return torch.cat([nats for nats, _ in losses]), losses[-1][1]


def perplexity(model: Llama, new_cache: Callable[[], KVCache], batches: list[Tensor], segment: int) -> float:
    """exp(total negative log-likelihood / scored tokens) over batches (B, L)."""
    return math.exp(token_losses(model, new_cache, batches, segment)[0].double().mean())


def evaluate(model: Llama, method: Callable[[int], LoCoCo | None], batches: dict[int, list[Tensor]]) -> dict:
    """A row of the table: per length perplexity, seconds and RoPE factor; of the last one the bytes of one sequence's
    cache and the nats of every token. method(length) drops a method into the model; None is the plain full cache."""
    row = {"perplexity": {}, "seconds": {}, "rope_factor": {}}
    for length, documents in batches.items():
        with dropped_in(model, method(length)) as (new_cache, segment, mem):
            begun = time.time()
            losses, cache_bytes = token_losses(model, new_cache, documents, segment)
            row["seconds"][length] = time.time() - begun
            row["perplexity"][length] = math.exp(losses.double().mean())
            row["rope_factor"][length] = model.config.rope_scale
            row |= {"losses": losses, "slots": mem, "segment": segment,
                    "cache_bytes": cache_bytes}  # fmt: skip
    return row


@contextmanager
def dropped_in(model: Llama, lococo: LoCoCo | None) -> Iterator[tuple[Callable[[], KVCache], int, int | None]]:
    """(a maker of empty caches, T, M) while a method is in the model, and afterwards the base again."""
    if lococo is None:
        yield partial(KVCache, model.config.n_layers), 512, None
    else:
        try:
            yield lococo.cache, lococo.settings.segment, lococo.settings.mem
        finally:
            lococo.remove()


# --- Where it is lost ----------------------------------------------------------------------------------------

RUN = 3  # tokens: a token repeats if it ends a run of so many that the document has had before


def last_seen(tokens: Tensor) -> Tensor:
    """How many tokens ago each token (L,) after the first last ended the same run of RUN tokens, (L - 1,); 0: never."""
    ids, seen, ago = tokens.tolist(), {}, []
    for t in range(1, len(ids)):
        run = tuple(ids[max(t - RUN + 1, 0) : t + 1])
        ago.append(t - seen.get(run, t))
        seen[run] = t
    return torch.tensor(ago)


def by_position(rows: list[dict], tokens: Tensor) -> dict[str, dict[str, float]]:
    """Nats per token of every row by position in the documents (N, L), and by how long ago the token was last seen.

    What was last seen more than M + T tokens ago (of the largest memory among the rows) has left the memory and
    segment as a token: to know it still is what a memory is for.
    """
    L, reach = tokens.shape[1], max((row["slots"] + row["segment"] for row in rows if row["slots"]), default=512)
    position, ago = torch.arange(1, L), torch.stack([last_seen(document) for document in tokens])
    edges = [0, *(n for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if n < L), L]
    masks = {f"position to {b}": ((a <= position) & (position < b)).expand_as(ago) for a, b in zip(edges, edges[1:])}
    masks |= {"seen never": ago == 0, f"seen to {reach} ago": (0 < ago) & (ago <= reach),
              f"seen > {reach} ago": ago > reach}  # fmt: skip
    masks = {name: mask for name, mask in masks.items() if mask.any()}
    return {"share of tokens": {name: float(mask.double().mean()) for name, mask in masks.items()}} | {
        row["name"]: {name: float(row["losses"][mask].double().mean()) for name, mask in masks.items()}
        for row in rows}  # fmt: skip


@torch.no_grad()
def passkey(model: Llama, new_cache: Callable[[], KVCache], segment: int, tokenizer: Tokenizer, texts: list[Tensor],
            depth: float, seed: int) -> float:  # fmt: skip
    """Share of texts (B, L) from whose end the model tells a five-digit number hidden at a depth from 0 to 1.

    The text around it is real. The answer counts if it is the likeliest token at each of its places, which is what
    greedy decoding would write.
    """
    rng, right, total = np.random.default_rng(seed), 0, 0
    for batch in texts:
        prompts = []
        for text in batch.cpu():
            # Sentencepiece puts a space before a text; this one goes on.
            line = torch.tensor(tokenizer.encode(f"\npasskey = {rng.integers(10_000, 100_000)}\n", bos=False)[1:])
            if not tokenizer.decode(line[-6:].tolist()).strip().isdigit():
                raise UserError(f"--passkey: {tokenizer.file} does not give each digit a token of its own")
            asked, body = line[:-1], text[: len(text) - 2 * len(line) + 1]
            place = 1 + round(depth * (len(body) - 1))
            prompts.append(torch.cat((body[:place], line, body[place:], asked)))
        tokens, cache = torch.stack(prompts).to(batch.device), new_cache()
        told = torch.cat([model(x, cache).argmax(-1) for x in tokens[:, :-1].split(segment, dim=1)], dim=1)
        right += int((told[:, -5:] == tokens[:, -5:]).all(dim=1).sum())
        total += len(tokens)
    return right / total


# --- The table -----------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run directories of train.py (default: the embedded adapter)")
    add("--method", nargs="+", default=[], metavar="NAME", help="training-free methods to score on the untouched base")
    parser.add_counts()
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="context lengths in tokens")
    add("--data", type=Path, nargs="+", default=[], metavar="PATH", help="as in train.py (default: Python's library)")
    add("--part", choices=PARTS, help="documents to score (default: all of --data, the held-out part of the library)")
    add("--documents", type=int, default=64, help="at most so many per length")
    add("--micro-batch", type=int, default=4, help="documents in memory at once")
    add("--by-position", action="store_true", help="also where the loss is, at the longest length")
    add("--passkey", type=float, nargs="*", metavar="DEPTH",
        help="also the share of numbers found that were hidden at these depths, 0 to 1 (default: 0, 0.25 ... 1)")
    add("--json", type=Path, metavar="FILE", help="write the table and its protocol there too")
    args = parser.parse_args()
    if args.passkey == []:
        args.passkey = [0.0, 0.25, 0.5, 0.75, 1.0]
    args.part = args.part or ("all" if args.data else "held-out")
    args.runs = args.runs or ([] if args.model or args.method else [TINY])
    check(args)
    return args


def check(args: argparse.Namespace) -> None:
    """What can be told before the work begins."""
    for name, value, least in (("lengths", min(args.lengths), 2), ("documents", args.documents, 1),
                               ("micro-batch", args.micro_batch, 1)):  # fmt: skip
        if value < least:
            raise UserError(f"--{name} {value}: at least {least} is needed")
    for depth in args.passkey or []:
        if not 0 <= depth <= 1:
            raise UserError(f"--passkey {depth}: a depth is from 0 (the beginning) to 1 (the end)")
    if args.passkey and max(args.lengths) < 64:
        raise UserError(f"--passkey needs texts of 64 tokens, --lengths {max(args.lengths)} is less")
    refuse_counts(args)
    for method in args.method:
        untrained(args, method, max(args.lengths))
    for run in args.runs:
        read_file(adapter_file(run), "adapter")
    if args.json and (args.json.is_dir() or not args.json.parent.is_dir()):
        raise UserError(f"--json {args.json}: not a file in a directory that exists")


def main() -> None:
    args = parse()
    join(args)
    model, tokenizer = load_base(args)
    corpus = from_first(lambda: Corpus(args.data, tokenizer))
    batches = {length: scored_batches(corpus, args.part, length, args.device, args.documents, args.micro_batch)
               for length in sorted(set(args.lengths))}  # fmt: skip
    for length, documents in batches.items():
        if not documents:
            raise UserError(f"--lengths {length}: no document of that many tokens (--part {args.part})")
    methods = {"base, full cache": lambda length: None}
    for name in args.method:  # positions are interpolated for each length anew
        methods[f"{name}, untouched base"] = lambda length, name=name: LoCoCo(model, untrained(args, name, length))
    for run in args.runs:
        methods["tiny/" if run is TINY else str(run)] = lambda length, run=run: LoCoCo.load(run, model)
    rows = []
    for name, method in methods.items():
        with precision(args):  # autocast remembers weights in low precision: a new one for each method
            rows.append({"name": name, **evaluate(model, method, batches)})
    print_table(rows, batches, args.part)
    last, where, found = max(batches), None, {}
    if args.by_position:
        where = by_position(rows, torch.cat([b.cpu() for b in batches[last]]))
        print_columns(f"nats per token at {last} tokens, by position and by when the same {RUN} tokens were last seen",
                      where)  # fmt: skip
    if args.passkey:
        for name, method in methods.items():
            with dropped_in(model, method(last)) as (new_cache, segment, _), precision(args):
                found[name] = {f"{depth:g}": passkey(model, new_cache, segment, tokenizer, batches[last], depth,
                                                       args.seed) for depth in args.passkey}  # fmt: skip
        print_columns(f"share of passkeys found in {last} tokens, by depth", found)
    if args.json and processes()[0] == 0:
        write_json(args, batches, rows, {"by_position": where, "passkey": found})


def write_json(args: argparse.Namespace, batches: dict[int, list[Tensor]], rows: list[dict], tables: dict) -> None:
    rows = [{key: value for key, value in row.items() if key != "losses"} for row in rows]
    protocol = {
        "model": str(args.model or "tiny/"), "part": args.part,
        "data": [str(path) for path in args.data] or "Python's standard library",
        "documents": {length: sum(map(len, b)) for length, b in batches.items()},
        "scored_tokens": {length: sum(t[:, 1:].numel() for t in b) for length, b in batches.items()},
        "bos": True, "dtype": str(args.dtype), "device": args.device,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }  # fmt: skip
    args.json.write_text(json.dumps({"rows": rows, **tables, "protocol": protocol}, indent=2) + "\n")


def print_table(rows: list[dict], batches: dict[int, list[Tensor]], part: str) -> None:
    width = max(len(row["name"]) for row in rows)
    print(f"{'':{width}} {'slots':>6} {'cache bytes':>12} {'tokens/s':>9}" + "".join(f"{n:>9}" for n in batches))
    tokens = sum(batch.numel() for documents in batches.values() for batch in documents)
    for row in rows:
        rate = tokens / sum(row["seconds"].values())
        print(f"{row['name']:{width}} {row['slots'] or '-':>6} {row['cache_bytes']:>12,} {rate:>9,.0f}"
              + "".join(f"{p:>9.3f}" for p in row["perplexity"].values()))  # fmt: skip
    counts = ", ".join(f"{sum(map(len, b))} of {length}" for length, b in batches.items())
    print(f"documents scored ({part}): {counts} tokens; each starts with BOS and an empty cache")


def print_columns(title: str, rows: dict[str, dict[str, float]]) -> None:
    """A column for each row: there are more numbers than methods."""
    first = max(map(len, next(iter(rows.values()))))
    print(f"\n{title}\n{'':{first}}" + "".join(f"  {name:>8}" for name in rows))
    for key in next(iter(rows.values())):
        print(f"{key:{first}}" + "".join(f"  {row[key]:>{max(len(name), 8)}.3f}" for name, row in rows.items()))


if __name__ == "__main__":
    exit_on_user_error(main)
