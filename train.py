"""Extend a pretrained Llama-2: tune compressors, LoRA, embeddings and norms on long sequences, segment by segment.

    python train.py                               # the embedded model, CPU
    python train.py --mem 512 --seq 8192          # the same, 8 times its pretrained context
    python train.py --model Llama-2-7b-hf --data RedPajama/ --mem 512 --seq 32768

First the text (files -> documents -> sequences), then the recipes and the loop. Left out on purpose: resuming,
several processes.
"""

import argparse
import gzip
import hashlib
import json
import sys
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from lococo import METHODS, POSITIONS, LoCoCo, Settings, perplexity, segment_losses
from model import Llama, Tokenizer, UserError

HERE = Path(__file__).parent
TINY = HERE / "tiny"  # the embedded model and adapter

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
                if not isinstance(text, str):
                    raise TypeError
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
    dtype = token_dtype(tokenizer)
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
            except (EOFError, gzip.BadGzipFile, zlib.error):
                raise UserError(f"{file}: not a complete gzip file") from None
            except UnicodeDecodeError:
                if not skip_binary:
                    raise UserError(f"{file}: not UTF-8 text") from None
                out.seek(start[0])
                out.truncate()
                del ends[start[1] :], sums[start[1] :]
                total = start[2]
                skipped.append(file)
            bar.update(file.stat().st_size)
    if total == 0:
        ids.with_suffix(".part").unlink()
        raise UserError(f"--data {files[0] if len(files) == 1 else files[0].parent}: there is no text in it")
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
                ids = np.memmap(file, token_dtype(tokenizer), mode="r")
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


# --- Recipes -------------------------------------------------------------------------------------------------

RECIPES = {
    #              embedded  Llama-2: the paper
    "method":      ("lococo",   "lococo"),
    "mem":         (256,        512),
    "sinks":       (4,          0),
    "recent":      (None,       0),  # None: 7/8 of the memory, sinks included
    "positions":   ("slots",    "interpolated"),
    "segment":     (512,        512),
    "seq":         (2048,       8192),
    "kernel":      (21,         21),
    "lora_rank":   (8,          8),
    "lr":          (1e-3,       5e-5),
    "conv_lr":     (5e-2,       5e-2),
    "steps":       (100,        200),
    "batch":       (4,          128),
    "micro_batch": (4,          1),
}  # fmt: skip
EVALUATED = 16  # held-out documents that a run is scored on, at most

# --- What the programs share ---------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("--model", type=Path, help="directory of the base model (default: the embedded tiny/)")
        self.add_argument("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
        self.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on cpu, else bfloat16")
        self.add_argument("--seed", type=int, default=0)

    def error(self, message: str):
        self.exit(2, f"{self.prog}: {message}\n")


def exit_on_user_error(main: Callable[[], None]) -> None:
    """Run a program: what the user can mend is one sentence and exit code 2, Ctrl-C is exit code 130."""
    try:
        main()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"\n{Path(sys.argv[0]).name}: stopped by Ctrl-C", file=sys.stderr)
        sys.exit(130)


def load_base(args: argparse.Namespace) -> tuple[Llama, Tokenizer]:
    """The model and tokenizer that --model, --device and --dtype ask for; fills in what they leave open."""
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError):
        raise UserError(f"--device {args.device}: there is no such device here") from None
    args.dtype = getattr(torch, args.dtype or ("float32" if args.device == "cpu" else "bfloat16"))
    torch.manual_seed(args.seed)
    path = args.model or TINY
    if not path.is_dir():
        raise UserError(f"--model {path}: no such directory")
    tokenizer = Tokenizer(path)
    model = Llama.from_pretrained(path, dtype=args.dtype, device=args.device)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"{tokenizer.file} has {tokenizer.vocab_size} tokens, the model only {model.config.vocab_size}")
    return model, tokenizer


def heldout_batches(corpus: Corpus, L: int, device: str, most: int, size: int = 4) -> list[Tensor]:
    """The first L tokens of held-out documents that have as many, (<= size, L) each; shorter ones are left out."""
    documents = corpus.part("held-out", at_least=L)[:most]
    tokens = [torch.from_numpy(corpus.read(d, 0, L)) for d in documents]
    return [torch.stack(tokens[i : i + size]).to(device) for i in range(0, len(tokens), size)]


# --- Training ------------------------------------------------------------------------------------------------


def train(lococo: LoCoCo, data: Sequences, args: argparse.Namespace) -> None:
    """AdamW with linear decay; per step args.batch sequences, one segment's graph in memory at a time."""
    groups = lococo.groups()
    rates = {group: args.conv_lr if group == "compressors" else args.lr for group in groups}
    optimizer = torch.optim.AdamW(
        [{"params": list(tensors.values()), "lr": rates[group]} for group, tensors in groups.items()], weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=args.steps)
    parameters = [p for tensors in groups.values() for p in tensors.values()]
    scored = args.batch * (args.seq - 1)
    bar = tqdm(total=args.steps * scored, desc="training", unit=" tokens", unit_scale=True)
    with bar, open(args.out / "log.jsonl", "w") as log:
        for step in range(args.steps):
            begun, total = time.time(), 0.0
            sequences = torch.from_numpy(np.stack([data[step * args.batch + i] for i in range(args.batch)]))
            for tokens in sequences.to(args.device).split(args.micro_batch):
                cache = lococo.cache()
                with torch.autocast(tokens.device.type, args.dtype, enabled=args.dtype != torch.float32):
                    for loss in segment_losses(lococo.model, tokens, cache, args.segment):
                        if loss.requires_grad:  # without LoRA nothing that trains comes before a compression
                            (loss / scored).backward()  # at once: the graph of one segment is all that there is
                        total += loss.item()
                        bar.update(min(args.segment, args.seq - 1) * len(tokens))
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            bar.set_postfix_str(f"step {step + 1}/{args.steps}, loss {total / scored:.3f}")
            row = dict(step=step + 1, loss=total / scored, tokens_per_s=round(scored / (time.time() - begun)))
            log.write(json.dumps(row) + "\n")
            log.flush()


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--data", type=Path, nargs="+", default=[], metavar="PATH",
        help="text, folders, .jsonl(.gz), .bin of token ids (default: Python's standard library)")  # fmt: skip
    add("--out", type=Path, help="new directory of the run (default: runs/ and a name)")
    add("--recipe", choices=("embedded", "paper"), help="default: embedded for tiny/, paper for any other --model")
    add("--method", help=f"one of {', '.join(METHODS)}")
    add("--mem", type=int, help="memory slots M")
    add("--sinks", type=int, help="slots that keep the first tokens")
    add("--recent", type=int, help="slots that keep the last tokens")
    add("--positions", help=f"one of {', '.join(POSITIONS)}")
    add("--segment", type=int, help="tokens T that enter together")
    add("--seq", type=int, help="trained length L in tokens")
    add("--kernel", type=int, help="taps of the convolution, odd")
    add("--lora-rank", type=int, help="0: only the compressors train (the paper's inference mode)")
    add("--lr", type=float)
    add("--conv-lr", type=float, help="learning rate of the compressors")
    add("--steps", type=int)
    add("--batch", type=int, help="sequences per step")
    add("--micro-batch", type=int, help="sequences in memory at once")
    args = parser.parse_args()
    args.recipe = args.recipe or ("paper" if args.model else "embedded")
    column = ("embedded", "paper").index(args.recipe)
    own = args.method in (None, RECIPES["method"][column])  # the recipe's counts are those of its method
    for name, values in RECIPES.items():
        if getattr(args, name) is None and (own or name not in ("sinks", "recent", "positions")):
            setattr(args, name, values[column])
    if own and args.recent is None:
        args.recent = max(args.mem * 7 // 8 - args.sinks, 0)
    for name in ("steps", "batch", "micro_batch", "lr", "conv_lr"):
        if not getattr(args, name) > 0:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: more than 0 is needed")
    return args


def run_directory(args: argparse.Namespace, settings: Settings) -> Path:
    """A new directory for this run; one that holds anything is refused."""
    name = HERE / "runs" / f"{settings.method}-mem{args.mem}-seq{args.seq}"
    numbered = (name.with_name(f"{name.name}-{i}") for i in range(2, 10**6))
    out = args.out or (next(d for d in numbered if not d.exists()) if name.exists() else name)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"--out {out} holds another run; give a new directory")
    return out


def print_groups(lococo: LoCoCo, args: argparse.Namespace) -> None:
    rows = [("what trains", "tensors", "parameters", "learning rate")]
    for group, tensors in lococo.groups().items():
        rate = args.conv_lr if group == "compressors" else args.lr
        rows.append((group, str(len(tensors)), f"{sum(p.numel() for p in tensors.values()):,}", f"{rate:g}"))
    frozen = [p for p in lococo.model.parameters() if not p.requires_grad]
    rows.append(("frozen", str(len(frozen)), f"{sum(p.numel() for p in frozen):,}", "-"))
    for group, count, size, rate in rows:
        print(f"  {group:12} {count:>8} {size:>14} {rate:>14}")


def main() -> None:
    args = parse()
    settings = Settings.of(args.method, args.mem, args.segment, args.seq, args.sinks, args.recent, args.positions,
                           args.kernel, args.lora_rank)  # fmt: skip
    if not (settings.merged or settings.lora_rank):
        raise UserError(f"--lora-rank 0 with --method {args.method}: there is nothing to train")
    args.out = run_directory(args, settings)
    model, tokenizer = load_base(args)
    print(f"model {args.model or 'tiny/'}: {sum(p.numel() for p in model.parameters()):,} parameters, "
          f"pretrained context {model.config.context}, {args.dtype} on {args.device}; recipe {args.recipe}")  # fmt: skip
    corpus = Corpus(args.data, tokenizer)
    documents = corpus.part("training")
    if len(documents) == 0:
        raise UserError("all documents of --data fall into the held-out part; give more files or a longer list")
    data = Sequences(corpus, documents, args.seq, args.seed)
    heldout = heldout_batches(corpus, args.seq, args.device, EVALUATED)
    print(f"text: {data.per_pass * args.seq / 1e6:.1f} M tokens to train on, "
          f"{sum(map(len, heldout))} held-out documents of {args.seq} tokens")  # fmt: skip

    def score(lococo: LoCoCo) -> str:
        with torch.autocast(torch.device(args.device).type, args.dtype, enabled=args.dtype != torch.float32):
            return f"{perplexity(model, lococo.cache, heldout, args.segment):.3f}" if heldout else "no document"

    window = LoCoCo(model, Settings.of("streaming", max(args.mem, 5), args.segment, args.seq, lora_rank=0))
    beside = score(window)
    window.remove()
    lococo = LoCoCo(model, settings)
    lococo.start_training()
    print(f"method {settings.method}: {settings.sinks} sinks + {settings.merged} merged + {settings.recent} recent slots, "
          f"positions {settings.positions}, RoPE factor {model.config.rope_scale:g}")  # fmt: skip
    print_groups(lococo, args)
    before = score(lococo)
    args.out.mkdir(parents=True, exist_ok=True)
    train(lococo, data, args)
    lococo.save(args.out / "adapter.safetensors")
    print(f"held-out perplexity at {args.seq} tokens")
    print(f"  untouched base, window of equal memory ({window.settings.sinks} sinks + {window.settings.recent} recent,"
          f" positions by slot)  {beside}")  # fmt: skip
    print(f"  {settings.method} before training  {before}")
    print(f"  {settings.method} after training   {score(lococo)}")
    print(f"adapter: {args.out / 'adapter.safetensors'}")


if __name__ == "__main__":
    exit_on_user_error(main)
