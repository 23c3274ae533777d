"""Text in, perplexity and recall out: a model with its full cache beside runs with a memory.

    python eval_ppl.py                                       # the embedded model and adapter
    python eval_ppl.py runs/a runs/b --lengths 2048 8192 --by-position
    python eval_ppl.py --method streaming h2o --mem 512      # without training, on any base
    python eval_ppl.py runs/a --tasks questions.jsonl        # instead: the answers to questions

Perplexity is exp(nats / tokens) over all tokens of a document after the first. A document shorter
than the length is left out, a longer one is cut: so compare within a column.
"""

import gzip
import hashlib
import json
import math
import os
import re
import sys
import sysconfig
import zlib
from collections import Counter
from functools import lru_cache, partial
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from generate import TINY, Parser, as_text, decode, load_adapter, load_base, precision, prepare
from generate import read_file, run_program, untrained, write_file
from lococo import METHODS, LoCoCo, Settings, prefill, segment_losses
from model import DAMAGED, KVCache, Tokenizer, UserError

# --- Text ----------------------------------------------------------------------------------------

CACHE = os.environ.get("LOCOCO_CACHE", "~/.cache/lococo")  # of tokens; safe to delete

# By the checksum of a document's name, modulo 20. Tune on the choosing part, then score held-out.
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
        inside = (f for f in sorted(path.rglob("*")) if "/." not in f"/{f.relative_to(path)}")
        files += [f for f in inside if f.is_file()] if path.is_dir() else [path]
    return files


def read_rows(file: Path, check: Callable[[dict], bool]) -> Iterator[tuple[int, dict]]:
    """Number and object of each line of a .jsonl or .jsonl.gz file, for which `check` must hold."""
    opener, number = gzip.open if file.suffix == ".gz" else open, 0
    with opener(file, "rt", encoding="utf-8") as content:
        try:
            for number, line in enumerate(content, start=1):
                if line.strip():
                    row = json.loads(line)
                    if not check(row):
                        raise ValueError(f"{row}"[:80])
                    yield number, row
        except (*DAMAGED, zlib.error) as error:
            raise UserError(f"{file}, line {number}: not as README says ({error!r})") from None


def read_documents(file: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of a text file, or of each line of a .jsonl or .jsonl.gz file."""
    if file.name.endswith((".jsonl", ".jsonl.gz")):
        for number, row in read_rows(file, lambda row: isinstance(row["text"], str)):
            yield f"{file.name}:{number}", row["text"]
    else:
        yield file.name, file.read_bytes().decode()


def tokenize(files: list[Path], tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Token ids of all documents, one after the other, of each of PARTS."""
    streams = {part: [np.empty(0, np.int32)] for part in PARTS}
    for file in tqdm(files, "tokenizing", leave=False, disable=None):
        try:
            for name, text in read_documents(file):
                number = zlib.crc32(name.encode()) % 20
                part = next(part for part in PARTS if number in PARTS[part])
                streams[part].append(np.array(tokenizer.encode(text), np.int32))
        except UnicodeDecodeError:
            tqdm.write(f"left out, as it is not in UTF-8: {file}", file=sys.stderr)
    return {part: torch.from_numpy(np.concatenate(ids)) for part, ids in streams.items()}


def token_streams(paths: list[Path], tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """The ids of each of PARTS, mapped into memory; a BOS begins each document. Tokenized once: the
    name of the stored file says which texts and tokenizer it is made from."""
    files = find_files(paths)
    key = repr([(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files])
    digest = hashlib.sha256(f"int32 {key}".encode() + tokenizer.file.read_bytes()).hexdigest()
    stored = Path(CACHE).expanduser() / f"{digest[:24]}.safetensors"
    try:
        streams, _ = read_file(stored)
    except UserError:  # not there yet, or damaged
        streams = tokenize(files, tokenizer)
        stored.parent.mkdir(parents=True, exist_ok=True)
        write_file(stored, streams)
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
    """For each token but the first of documents (N, L) its nats, and whether it was the likeliest
    one, (N, L - 1); and the bytes that the cache of one document has at the end."""
    rows = []
    for batch in tqdm(documents.split(args.micro_batch), "scoring", leave=False, disable=None):
        batch, cache = batch.to(args.device), lococo.cache()
        with precision(args):
            pieces = list(segment_losses(lococo.model, batch, cache, lococo.settings.segment))
        rows.append([torch.cat(piece, dim=1).cpu() for piece in zip(*pieces)])
    losses, right = (torch.cat(row) for row in zip(*rows))
    return losses, right, cache.nbytes // len(batch)


def ranges(what: str, n: Tensor, reach: int) -> dict[str, Tensor]:
    """Masks by n, (N, L - 1): 1 to `reach` = M + T, then up to 512, 1024 ... L. What is further
    back than `reach` is known from the memory or not at all."""
    L = n.shape[1] + 1
    edges = sorted({0, min(reach, L), L} | {2**e for e in range(9, 15) if reach < 2**e < L})
    return {f"{what}{a}-{b}": (a < n) & (n <= b) for a, b in zip(edges, edges[1:])}


# --- Facts: what does a memory remember? ---------------------------------------------------------


@lru_cache
def fact_tokens(tokenizer: Tokenizer) -> tuple[list[int], int, int, int]:
    """The ids of all words that are one token, then those of a line break, of "@" and of "="."""
    pieces = [tokenizer.sp.id_to_piece(i) for i in range(tokenizer.vocab_size)]
    words = [i for i, piece in enumerate(pieces) if re.fullmatch("\u2581[a-z]{3,}", piece)]
    return words, *tokenizer.encode("x\n@ =")[-3:]


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


# --- Tasks: multiple choice and questions --------------------------------------------------------


def is_task(row: dict) -> bool:
    """No text is blank, "stop" is text, and `answer` is the place of a choice."""
    many = "choices" in row
    texts, right = (row["choices"], row["answer"]) if many else (row["answers"], 0)
    prompts = np.broadcast_to(row["prompt"], len(texts)).tolist() if many else [row["prompt"]]
    ends = row.get("stop", "\n") > "" and row.get("max_tokens", 32) > 0
    return ends and right in range(len(texts)) and all(text.strip() for text in prompts + texts)


@torch.no_grad()
def score_choices(lococo: LoCoCo, row: dict, tokenizer: Tokenizer, args) -> tuple[dict, KVCache]:
    """Is the likeliest choice right, and (`acc_norm`) the likeliest per character? As in the
    lm-evaluation-harness, prompt, space and choice are tokenized together, then cut."""
    model, T, scores = lococo.model, lococo.settings.segment, []
    prompts = np.broadcast_to(row["prompt"], len(row["choices"])).tolist()
    for i, (prompt, choice) in enumerate(zip(prompts, row["choices"])):
        if i == 0 or prompt != prompts[i - 1]:  # read once, but for its last token
            start, cache = tokenizer.encode(prompt.rstrip(" ")), lococo.cache()
            prefill(model, torch.tensor([start[:-1]], device=args.device), cache, T)
        rest = start[-1:] + tokenizer.encode(f"{prompt.rstrip(' ')} {choice.strip()}")[len(start) :]
        pieces = segment_losses(model, torch.tensor([rest], device=args.device), cache.fork(), T)
        scores.append(-sum(nats.sum().item() for nats, _ in pieces))
    by_length = [score / len(choice.strip()) for score, choice in zip(scores, row["choices"])]
    likeliest = {"acc": np.argmax(scores), "acc_norm": np.argmax(by_length)}
    return {metric: i == row["answer"] for metric, i in likeliest.items()}, cache


def score_answer(lococo: LoCoCo, row: dict, tokenizer: Tokenizer, args) -> tuple[dict, KVCache]:
    """The greedy continuation, up to the row's "stop" (else a line break), of at most "max_tokens"
    (else 32), beside the answer that it is most like. The cache returned has read the prompt."""
    model, T, cache = lococo.model, lococo.settings.segment, lococo.cache()
    ids, most = tokenizer.encode(row["prompt"]), row.get("max_tokens", 32)
    logits = prefill(model, torch.tensor([ids], device=args.device), cache, T)
    text, stop = "", row.get("stop", "\n")
    for piece in as_text(decode(model, tokenizer, logits, cache.fork(), most, 0), tokenizer, ids):
        text += piece
        if stop in text:
            break
    text, mark = text.split(stop)[0], row.get("punctuation", " ")
    likeness = [compare(text, answer, mark) for answer in row["answers"]]
    return {metric: max(each[metric] for each in likeness) for metric in likeness[0]}, cache


def compare(text: str, answer: str, mark: str) -> dict[str, float]:
    """Exact match and F1 of words without case, articles and punctuation, which becomes `mark` (in
    TriviaQA a space, in SQuAD nothing); F of ROUGE-1, -2 and -L, without a stemmer (SCROLLS)."""
    both = [re.sub(r"[!-/:-@\[-`{-~‘’´]", mark, t.lower()) for t in (text, answer)]
    words = [re.sub(r"\b(a|an|the)\b", " ", t).split() for t in both]
    x, y = tokens = [re.findall("[a-z0-9]+", t.lower()) for t in (text, answer)]
    common = [0] * (len(y) + 1)  # longest common subsequence of x so far and the first j of y
    for token in x:
        above, common = common, [0]
        for j, other in enumerate(y):
            common.append(above[j] + 1 if token == other else max(above[j + 1], common[j]))
    pairs = [[*zip(t, t[1:])] for t in tokens]
    lists = {"f1": words, "rouge1": tokens, "rouge2": pairs, "rougeL": tokens}
    shared = {metric: (Counter(a) & Counter(b)).total() for metric, (a, b) in lists.items()}
    shared["rougeL"] = common[-1]
    f1 = {metric: 2 * shared[metric] / max(len(a + b), 1) for metric, (a, b) in lists.items()}
    return {"em": words[0] == words[1]} | f1


def score_tasks(args, tokenizer: Tokenizer, methods: dict[str, Callable], width: int) -> None:
    """A table for each file: means over its rows ± standard error. tests/tasks.py makes files."""
    files = {file: list(read_rows(file, is_task)) for file in args.tasks}
    if not all(files.values()):
        raise UserError(f"--tasks {', '.join(map(str, files))}: one of them has no rows")
    for file, rows in files.items():
        for name, make in methods.items():
            lococo, columns, long = make(load_base(args)[0]), {}, []
            trained = lococo.settings.length or lococo.model.config.context
            for number, row in tqdm(rows, name, leave=False, disable=None):
                score = score_choices if "choices" in row else score_answer
                with precision(args):
                    metrics, cache = score(lococo, row, tokenizer, args)
                long += [number] * (cache.seen > trained)
                about = {"compressed": cache.size < cache.seen, "cache, MB": cache.nbytes / 1e6}
                for column, value in (about | metrics).items():
                    columns.setdefault(column, []).append(float(value))
            errors = {c: np.std(v) / max(len(v) - 1, 1) ** 0.5 for c, v in columns.items()}
            cells = {c: f"{np.mean(v):.3f} ±{errors[c]:.3f}" for c, v in columns.items()}
            if "rougeL" in columns:  # the geometric mean of the means, as SCROLLS has it
                three = [np.mean(columns[c]) for c in ("rouge1", "rouge2", "rougeL")]
                cells["rouge"] = f"{np.cbrt(np.prod(three)):.3f}"
            if name == next(iter(methods)):
                print(f"{file}: {len(rows)} rows\n{'':{width}}", *(f"{c:>13}" for c in cells))
            note = f" {len(long)} above {trained:,} tokens: line {long[0]} ..." if long else ""
            print(f"{name:{width}}", *(f"{cell:>13}" for cell in cells.values()), note)
            del lococo  # before the next one is loaded


def parse():
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="run directories of train.py")
    add("--method", nargs="+", default=[], choices=METHODS, help="methods without training")
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="in tokens")
    add("--data", type=Path, nargs="+", default=[], help="as in train.py")
    add("--part", choices=PARTS, help="default: held-out; all of --data without a RUN")
    add("--documents", type=int, default=64, help="at most so many for each length")
    add("--micro-batch", type=int, default=4, help="documents in memory at once")
    add("--by-position", action="store_true", help="also where the loss is, at the last length")
    add("--recall", action="store_true", help="also what is remembered; adds window and H2O to RUN")
    add("--tasks", type=Path, nargs="+", default=[], metavar="FILE", help="score these instead")
    args = parser.parse_args()
    parser.refuse_counts(args)
    if not args.runs and not args.method and args.model.resolve() == TINY:
        args.runs = [TINY]
    return args


def main() -> None:
    args = parse()
    prepare(args)
    tokenizer = Tokenizer(args.model)
    if (args.recall or args.tasks) and args.runs and not args.method:  # adds what needs no training
        own = load_adapter(args.runs[0], load_base(args)[0]).settings
        args.method, args.mem, args.segment = ["streaming", "h2o"], own.mem, own.segment
        args.positions = "slots"
    for run in args.runs:
        read_file(run / "adapter.safetensors")  # refused now, not after others are scored
    full = Settings("full", segment=512, length=0, positions="original", lora_rank=0)
    methods = {"base, full": partial(LoCoCo, settings=full)}
    methods |= {f"base, {name}": partial(untrained, args, name) for name in args.method}
    methods |= {os.path.relpath(run): partial(load_adapter, run) for run in args.runs}
    width = max(map(len, methods))
    if args.tasks:
        return score_tasks(args, tokenizer, methods, width)
    streams = token_streams(args.data, tokenizer)
    all_parts = args.data and args.runs in ([], [TINY]) and not args.part
    parts = list(PARTS) if all_parts else [args.part or "held-out"]
    documents = {}
    for L in args.lengths:
        rows = [long_documents(streams[part], tokenizer.bos, L, args.documents) for part in parts]
        documents[L] = torch.cat(rows)[: args.documents]
        if L < 2 or not len(documents[L]):
            raise UserError(f"--lengths {L}: no {' or '.join(parts)} document is so long")
    L, last = list(documents.items())[-1]
    print(f"{'':{width}} {'slots':>6} {'cache bytes':>12}", *(f"{L:>8}" for L in documents))
    if args.recall:
        told, told_ago = tell_all(last, 8, args.part or "held-out", tokenizer)
    losses, right, reach = {}, {}, 0
    for name, make in methods.items():
        lococo = make(load_base(args)[0])  # a fresh base, without what was dropped in before
        row = ""
        for rows in documents.values():
            losses[name], _, cache_bytes = token_losses(lococo, rows, args)
            row += f"{math.exp(losses[name].double().mean()):>9.3f}"
        mem = lococo.settings.mem
        reach = max(reach, mem and mem + lococo.settings.segment)
        print(f"{name:{width}} {mem or '-':>6} {cache_bytes:>12,}{row}")
        if args.recall:
            right[name] = token_losses(lococo, told, args)[1].double()
        del lococo  # before the next one is loaded
    counts = ", ".join(f"{len(rows)} of {n} tokens" for n, rows in documents.items())
    print(f"documents ({', '.join(parts)}): {counts}")
    if args.by_position:
        position = torch.arange(1, L).expand(len(last), -1)
        print_means(f"nats in {L} tokens", ranges("position ", position, reach), losses)
    if args.recall:
        title = f"recalled; by chance 1 in {len(fact_tokens(tokenizer)[0])}"
        print_means(title, ranges("told ago ", told_ago, reach), right)


def print_means(title: str, kinds: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    """A row for each mask, with the number of its tokens; a column for each method."""
    print(f"\n{title:30}{'tokens':>9}", *(f"{name:>5}" for name in values), sep="  ")
    for kind, mask in kinds.items():
        means = "".join(f"  {v[mask].mean():>{max(len(n), 5)}.3f}" for n, v in values.items())
        print(f"{kind:30}{int(mask.sum()):>9,}{means}")


if __name__ == "__main__":
    run_program(main)
