"""Text in, perplexity and recall out: a model with its full cache beside runs with a memory.

    python eval_ppl.py                                       # the embedded model and adapter
    python eval_ppl.py runs/a runs/b --lengths 2048 8192 --by-position
    python eval_ppl.py --method streaming h2o --mem 512      # without training, on any base

Perplexity is exp(total negative log-likelihood / scored tokens); every token of a document after
the first is scored. A document shorter than the length is left out, a longer one is cut: different
lengths hold different documents, so compare within a column. The first section reads text.
"""

import gzip
import hashlib
import json
import math
import os
import re
import sys
import sysconfig
import time
import zlib
from functools import lru_cache, partial
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from generate import TINY, Parser, load_adapter, load_base, precision, prepare, read_file
from generate import run_program, untrained, write_file
from lococo import METHODS, LoCoCo, Settings, segment_losses
from model import DAMAGED, Tokenizer, UserError

# --- Text ----------------------------------------------------------------------------------------

CACHE = os.environ.get("LOCOCO_CACHE", "~/.cache/lococo")  # of tokens; safe to delete

# The checksum of a document's name, modulo 20, decides its part, the same on every machine. Tune on
# the choosing part; only score the held-out part.
PARTS = {"held-out": range(0, 2), "choosing": range(2, 3), "training": range(3, 20)}


def find_files(paths: list[Path]) -> list[Path]:
    """The files, and all that are in the folders; without a path Python's own standard library,
    which is real text on every machine that runs this program."""
    library = Path(sysconfig.get_paths()["stdlib"])
    if not paths:
        return sorted(f for f in library.rglob("*.py") if "site-packages" not in f.parts)
    files = []
    for path in paths:
        if not path.exists():
            raise UserError(f"--data {path}: no such file or folder")
        inside = sorted(path.rglob("*")) if path.is_dir() else []
        hidden = {f for f in inside if "/." in f"/{f.relative_to(path)}"}
        files += [f for f in inside if f.is_file() and f not in hidden] or [path]
    return files


def read_documents(file: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of a text file, or of each line of a .jsonl or .jsonl.gz file."""
    try:
        opener = gzip.open if file.suffix == ".gz" else open
        with opener(file, "rt", encoding="utf-8", newline="") as content:
            if not file.name.endswith((".jsonl", ".jsonl.gz")):
                yield file.name, content.read()
                return
            for number, line in enumerate(content, start=1):
                if line.strip():
                    text = json.loads(line)["text"].encode("utf-8", "replace").decode()
                    yield f"{file.name}:{number}", text
    except (*DAMAGED, zlib.error) as error:
        if isinstance(error, UnicodeDecodeError) and ".jsonl" not in file.name:
            raise  # a folder may have files that are not text
        raise UserError(f'{file}: damaged, or a line is not {{"text": "..."}} ({error})') from None


def tokenize(files: list[Path], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Token ids of all documents, one after the other, of each of PARTS."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    streams = {part: [np.empty(0, dtype)] for part in PARTS}
    not_text = []
    for file in tqdm(files, "tokenizing", leave=False, disable=None):
        try:
            for name, text in read_documents(file):
                number = zlib.crc32(name.encode()) % 20
                part = next(part for part in PARTS if number in PARTS[part])
                streams[part].append(np.array(tokenizer.encode(text), dtype))
        except UnicodeDecodeError:
            not_text.append(file)
    if not_text:
        print(f"left out {len(not_text)} files not in UTF-8: {not_text[0]} ...", file=sys.stderr)
    return {part: torch.from_numpy(np.concatenate(ids)) for part, ids in streams.items()}


def token_streams(paths: list[Path], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The ids of each of PARTS, mapped into memory; a BOS begins each document. Tokenized once: the
    name of the stored file says which texts and tokenizer it is made from."""
    files = find_files(paths)
    key = repr([(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    digest = hashlib.sha256(key.encode() + tokenizer.file.read_bytes()).hexdigest()
    stored = Path(CACHE).expanduser() / f"{digest[:24]}.safetensors"
    try:
        streams, _ = read_file(stored)
    except UserError:  # not there yet, or damaged
        streams = tokenize(files, tokenizer)
        try:
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_file(stored, streams)
        except (OSError, UserError) as error:
            print(f"tokens are not kept ({error}); set LOCOCO_CACHE", file=sys.stderr)
    if not any(len(ids) for ids in streams.values()):
        raise UserError(f"--data {' '.join(map(str, paths))}: there is no text in it")
    return {part: ids.numpy() for part, ids in streams.items()}


def sequence(ids: np.ndarray, L: int, seed: int, i: int) -> Tensor:
    """Training sequence i, (L,): the stream is cut into pieces, shuffled anew for each pass."""
    if len(ids) < L:
        raise UserError(f"--seq {L}: the text to train on has only {len(ids)} tokens")
    epoch, i = divmod(i, len(ids) // L)
    place = np.random.default_rng((seed, epoch)).permutation(len(ids) // L)[i]
    return torch.from_numpy(ids[place * L : (place + 1) * L].astype(np.int64))


# --- Perplexity ----------------------------------------------------------------------------------


def long_documents(ids: np.ndarray, bos: int, L: int, most: int) -> Tensor:
    """The first L tokens of the first documents that have so many, (<= most, L)."""
    starts = np.flatnonzero(ids == bos)
    lengths = np.diff(starts, append=len(ids))
    rows = [ids[start : start + L] for start in starts[lengths >= L][:most]]
    return torch.from_numpy(np.array(rows, np.int64).reshape(len(rows), L))


@torch.no_grad()
def token_losses(lococo: LoCoCo, documents: Tensor, args) -> tuple[Tensor, Tensor, int]:
    """Of every token after the first of documents (N, L) its nats, and whether it was the likeliest
    one, (N, L - 1); and the bytes that the cache of one document has at the end."""
    rows = []
    for batch in tqdm(documents.split(args.micro_batch), "scoring", leave=False, disable=None):
        batch, cache = batch.to(args.device), lococo.cache()
        with precision(args):
            pieces = list(segment_losses(lococo.model, batch, cache, lococo.settings.segment))
        rows.append([torch.cat(piece, dim=1).cpu() for piece in zip(*pieces)])
    losses, right = (torch.cat(row) for row in zip(*rows))
    if not losses.isfinite().all():
        raise UserError("the loss is not finite: the weights or the adapter have NaN or inf")
    return losses, right, cache.nbytes // len(batch)


def last_seen(tokens: Tensor) -> Tensor:
    """How many tokens ago the three that end with each token last occurred, (L - 1,); 0: never."""
    ids, seen, ago = tokens.tolist(), {}, []
    for t in range(1, len(ids)):
        three = tuple(ids[max(t - 2, 0) : t + 1])
        ago.append(t - seen.get(three, t))
        seen[three] = t
    return torch.tensor(ago)


def ranges(what: str, n: Tensor, reach: int) -> dict[str, Tensor]:
    """Masks by n, (N, L - 1): 1 to `reach` = M + T, then up to 512, 1024 ... L. What is further
    back than `reach` is known from the memory or not at all."""
    L = n.shape[1] + 1
    edges = [e for e in (512, 1024, 2048, 4096, 8192, 16384) if reach < e < L]
    edges = sorted({0, min(reach, L), *edges, L})
    return {f"{what}{a}-{b}": (a < n) & (n <= b) for a, b in zip(edges, edges[1:])}


# --- Facts: what does a memory remember? ---------------------------------------------------------


@lru_cache
def fact_tokens(tokenizer: Tokenizer) -> tuple[list[int], int, int, int]:
    """The ids of all words that are one token, then those of a line break, of "@" and of "="."""
    pieces = [tokenizer.sp.id_to_piece(i) for i in range(tokenizer.vocab_size)]
    words = [i for i, piece in enumerate(pieces) if re.fullmatch("\u2581[a-z]{3,}", piece)]
    return words, *tokenizer.encode("x\n@ =", bos=False)[-3:]


def tell(tokens: Tensor, facts: int, part: str, seed: int, i: int,
         tokenizer: Tokenizer) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write facts into a text (L,): lines `@ message number = socket`, a name of two words and a
    word. Each is due in the first half, then after gaps of 64 to L tokens (log-uniform), and told
    at the next line break. Its name's checksum decides which of PARTS it belongs to. Returns the
    text, cut at L, and for the word of each fact how long ago it was last told, (L,), else 0."""
    words, line_break, at, equals = fact_tokens(tokenizer)
    rng, L = np.random.default_rng((seed, i)), len(tokens)
    lines, mentions = {}, []
    while len(lines) < min(facts, L // 6):
        a, b, word = rng.choice(words, 3).tolist()
        name = "".join(tokenizer.sp.id_to_piece([a, b]))
        if zlib.crc32(name.encode()) % 20 in PARTS[part]:
            lines[name] = [at, a, b, equals, word, line_break]
    for name in lines:
        place = rng.uniform(0, L / 2)
        while place < L:
            mentions.append((place, name))
            place += np.exp(rng.uniform(np.log(64), np.log(max(L, 64))))
    mentions.sort(reverse=True)
    told, ago, last = [], [], {}
    for token in tokens.tolist():
        told.append(token)
        ago.append(0)
        while token == line_break and mentions and len(told) >= mentions[-1][0]:
            _, name = mentions.pop()
            told += lines[name]
            here = len(told) - 2  # where the word is
            ago += [0, 0, 0, 0, here - last.get(name, here), 0]
            last[name] = here
    return torch.tensor(told[:L]), torch.tensor(ago[:L])


def tell_all(documents: Tensor, facts: int, part: str, tokenizer) -> tuple[Tensor, Tensor]:
    """`tell` for documents (N, L): the texts (N, L), and how long ago, (N, L - 1)."""
    rows = [tell(text, facts, part, 0, i, tokenizer) for i, text in enumerate(documents)]
    tokens, ago = (torch.stack(row) for row in zip(*rows))
    return tokens, ago[:, 1:]


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="run directories of train.py")
    add("--method", nargs="+", default=[], choices=METHODS, help="methods without training")
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="in tokens")
    add("--data", type=Path, nargs="+", default=[], help="as in train.py")
    add("--part", choices=PARTS, help="default: held-out; without runs all of --data")
    add("--documents", type=int, default=64, help="at most so many for each length")
    add("--micro-batch", type=int, default=4, help="documents in memory at once")
    add("--by-position", action="store_true", help="also where the loss is, at the last length")
    add("--recall", action="store_true", help="also what is remembered; adds window and H2O")
    args = parser.parse_args()
    parser.refuse_counts(args)
    if not args.runs and not args.method and args.model.resolve() == TINY:
        args.runs = [TINY]
    for run in args.runs:
        if not (run / "adapter.safetensors").is_file():
            parser.error(f"{run / 'adapter.safetensors'}: there is no such file")
    return args


def main() -> None:
    args = parse()
    prepare(args)
    tokenizer = Tokenizer(args.model)
    streams = token_streams(args.data, tokenizer)
    all_parts = args.data and not args.runs and not args.part
    parts = list(PARTS) if all_parts else [args.part or "held-out"]
    documents = {}
    for L in args.lengths:
        rows = [long_documents(streams[part], tokenizer.bos, L, args.documents) for part in parts]
        documents[L] = torch.cat(rows)[: args.documents]
        if L < 2 or not len(documents[L]):
            raise UserError(f"--lengths {L}: there is no document of so many tokens to score")
    L, last = list(documents.items())[-1]
    if args.recall and args.runs and not args.method:  # beside what needs no training
        own = load_adapter(args.runs[0], load_base(args)[0]).settings
        args.method, args.mem, args.segment = ["streaming", "h2o"], own.mem, own.segment
        args.positions = "slots"
    full = Settings("full", segment=512, length=0, positions="original", lora_rank=0)
    methods = {"base, full": partial(LoCoCo, settings=full)}
    methods |= {f"base, {name}": partial(untrained, args, name) for name in args.method}
    methods |= {os.path.relpath(run): partial(load_adapter, run) for run in args.runs}

    width = max(map(len, methods))
    columns = "".join(f"{L:>9}" for L in documents)
    print(f"{'':{width}} {'slots':>6} {'cache bytes':>12} {'tokens/s':>9}{columns}")
    if args.recall:
        told, told_ago = tell_all(last, 8, args.part or "held-out", tokenizer)
    losses, right, reach = {}, {}, 0
    for name, make in methods.items():
        lococo = make(load_base(args)[0])  # a fresh base, without what was dropped in before
        row, begun = "", time.time()
        for rows in documents.values():
            losses[name], _, cache_bytes = token_losses(lococo, rows, args)
            row += f"{math.exp(losses[name].double().mean()):>9.3f}"
        rate = sum(rows.numel() for rows in documents.values()) / (time.time() - begun)
        mem = lococo.settings.mem
        reach = max(reach, mem and mem + lococo.settings.segment)
        print(f"{name:{width}} {mem or '-':>6} {cache_bytes:>12,} {rate:>9,.0f}{row}")
        if args.recall:
            right[name] = token_losses(lococo, told, args)[1].double()
        del lococo  # before the next one is loaded
    counts = ", ".join(f"{len(rows)} of {n} tokens" for n, rows in documents.items())
    print(f"documents ({', '.join(parts)}): {counts}")
    if args.by_position:
        ago = torch.stack([last_seen(document) for document in last])
        kinds = ranges("position ", torch.arange(1, L).expand_as(ago), reach)
        kinds |= ranges("last seen ", ago, reach) | {"never seen": ago == 0}
        print_means(f"nats in {L} tokens", kinds, losses)
    if args.recall:
        print_means("facts recalled exactly", ranges("told ", told_ago, reach), right)
        print(f"by how many tokens ago; by chance 1 in {len(fact_tokens(tokenizer)[0])}")


def print_means(title: str, kinds: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """A row for each mask, with the number of its tokens; a column for each method."""
    print(f"\n{title:30}{'tokens':>9}", *(f"{name:>5}" for name in values), sep="  ")
    for kind, mask in kinds.items():
        means = "".join(f"  {v[mask].mean():>{max(len(n), 5)}.3f}" for n, v in values.items())
        print(f"{kind:30}{int(mask.sum()):>9,}{means}")


if __name__ == "__main__":
    run_program(main)
