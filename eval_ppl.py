"""Text in, perplexity out: a model with its full cache beside each run with its memory.

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
import sys
import sysconfig
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from generate import (
    TINY, Parser, load_adapter, load_base, precision, prepare, read_file,
    run_program, untrained, write_file,
)  # fmt: skip
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
def token_losses(lococo: LoCoCo, documents: Tensor, args) -> tuple[Tensor, int]:
    """Nats of every token after the first of documents (N, L), (N, L - 1), and the bytes that the
    cache of one document has at the end."""
    losses = []
    for batch in tqdm(documents.split(args.micro_batch), "scoring", leave=False, disable=None):
        batch, cache = batch.to(args.device), lococo.cache()
        with precision(args):
            pieces = segment_losses(lococo.model, batch, cache, lococo.settings.segment)
            losses.append(torch.cat(list(pieces), dim=1).cpu())
    losses = torch.cat(losses)
    if not losses.isfinite().all():
        raise UserError("the loss is not finite: the weights or the adapter have NaN or inf")
    return losses, cache.nbytes // len(batch)


def last_seen(tokens: Tensor) -> Tensor:
    """How many tokens ago the three that end with each token last occurred, (L - 1,); 0: never."""
    ids, seen, ago = tokens.tolist(), {}, []
    for t in range(1, len(ids)):
        three = tuple(ids[max(t - 2, 0) : t + 1])
        ago.append(t - seen.get(three, t))
        seen[three] = t
    return torch.tensor(ago)


def by_position(documents: Tensor, reach: int) -> dict[str, Tensor]:
    """Masks (N, L - 1) of documents (N, L), by position and by how long ago a token was last seen.
    What was seen more than `reach` = M + T tokens ago is known from the memory or not at all."""
    L = documents.shape[1]
    position = torch.arange(1, L).expand(len(documents), L - 1)
    ago = torch.stack([last_seen(document) for document in documents])
    kinds, edges = {}, [0] + [n for n in (256, 512, 1024, 2048, 4096, 8192, 16384) if n < L] + [L]
    for start, stop in zip(edges, edges[1:]):
        kinds[f"position to {stop}"] = (start <= position) & (position < stop)
    kinds["never seen before"] = ago == 0
    kinds[f"last seen up to {reach} ago"] = (ago > 0) & (ago <= reach)
    kinds["last seen longer ago"] = ago > reach
    return kinds


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
    parts = list(PARTS) if args.data and not args.runs else ["held-out"]
    if args.part:
        parts = [args.part]
    documents = {}
    for L in args.lengths:
        rows = [long_documents(streams[part], tokenizer.bos, L, args.documents) for part in parts]
        documents[L] = torch.cat(rows)[: args.documents]
        if L < 2 or not len(documents[L]):
            raise UserError(f"--lengths {L}: there is no document of so many tokens to score")
    full = Settings("full", segment=512, length=0, positions="original", lora_rank=0)
    methods = {"base, full": partial(LoCoCo, settings=full)}
    methods |= {f"base, {name}": partial(untrained, args, name) for name in args.method}
    methods |= {os.path.relpath(run): partial(load_adapter, run) for run in args.runs}

    width = max(map(len, methods))
    columns = "".join(f"{L:>9}" for L in documents)
    print(f"{'':{width}} {'slots':>6} {'cache bytes':>12} {'tokens/s':>9}{columns}")
    losses, reach = {}, 0
    for name, make in methods.items():
        lococo = make(load_base(args)[0])  # a fresh base, without what was dropped in before
        row, begun = "", time.time()
        for L, rows in documents.items():
            losses[name], cache_bytes = token_losses(lococo, rows, args)
            row += f"{math.exp(losses[name].double().mean()):>9.3f}"
        rate = sum(rows.numel() for rows in documents.values()) / (time.time() - begun)
        mem = lococo.settings.mem
        reach = max(reach, mem and mem + lococo.settings.segment)
        print(f"{name:{width}} {mem or '-':>6} {cache_bytes:>12,} {rate:>9,.0f}{row}")
        del lococo  # before the next one is loaded
    counts = ", ".join(f"{len(rows)} of {L} tokens" for L, rows in documents.items())
    print(f"documents ({', '.join(parts)}): {counts}")
    if args.by_position:
        print(f"\nnats per token in {L} tokens\n{'':26}{'share':>8}", *losses, sep="  ")
        for kind, mask in by_position(documents[L], reach).items():
            print(f"{kind:26}{mask.double().mean():>8.3f}", end="")
            print("".join(f"  {nats[mask].mean():>{len(n)}.3f}" for n, nats in losses.items()))


if __name__ == "__main__":
    run_program(main)
