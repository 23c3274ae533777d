"""Continue a prompt of any length from a memory of fixed size.

    python generate.py --prompt file.txt                          # the embedded model and adapter
    python generate.py --prompt - --adapter runs/my-run < book.txt
    python generate.py --prompt file.txt --model Llama-2-7b-hf    # no adapter: the plain model, full cache
    python generate.py --prompt book.txt --save-memory book.safetensors      # read it once ...
    python generate.py --load-memory book.safetensors --prompt question.txt  # ... and ask as often as you like
    python generate.py --prompt file.txt --show-memory            # what the slots hold

The prompt is read segment by segment; before a segment that would not fit into M + T entries, what is held is
compressed into M slots; while decoding, when a whole segment has gathered; and at the end of each of several
prompts, so that a saved memory is M slots. The text goes to standard output, the figures to standard error.
"""

import argparse
import sys
import time
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor

from eval_ppl import TINY, Parser, exit_on_user_error, load_base, precision, refuse_counts, untrained
from lococo import LoCoCo, Memory, Settings, prefill, read_file, write_file
from model import KVCache, Llama, Tokenizer, UserError


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from float logits (V,); temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    p, ids = torch.softmax((logits - logits.max()).double() / temperature, dim=-1).sort(descending=True)
    p[p.cumsum(0) - p >= top_p] = 0  # the fewest tokens that together reach top_p, at least one
    return int(ids[torch.multinomial(p, 1, generator=generator)])


@torch.no_grad()
def decode(model: Llama, tokenizer: Tokenizer, logits: Tensor, cache: KVCache, most: int, temperature: float,
           top_p: float, seed: int) -> Iterator[int]:  # fmt: skip
    """Token ids that follow the prompt in the cache, whose last logits are given, until EOS or `most` (algorithm 2)."""
    generator = torch.Generator(logits.device).manual_seed(seed)
    for n in range(most):
        # A padded vocabulary has ids that no text corresponds to: never drawn.
        token = sample(logits[0, : tokenizer.vocab_size], temperature, top_p, generator)
        if token == tokenizer.eos:
            return
        yield token
        if n + 1 < most:
            logits = model(torch.tensor([[token]], device=logits.device), cache)[:, -1]


class TextStream:
    """Text of tokens as they come: decoded after the end of the prompt, so that a first space is kept, and held
    back while it ends inside a UTF-8 character (which decodes to U+FFFD)."""

    def __init__(self, tokenizer: Tokenizer, prompt: list[int]):
        self.tokenizer, self.context, self.held = tokenizer, prompt[-8:], []

    def add(self, token: int) -> str:
        self.held.append(token)
        text = self.rest()
        if text.endswith("\ufffd"):
            return ""
        self.context, self.held = (self.context + self.held)[-8:], []
        return text

    def rest(self) -> str:
        return self.tokenizer.decode(self.context + self.held)[len(self.tokenizer.decode(self.context)) :]


def read_prompt(name: str) -> str:
    try:
        data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise UserError(f"--prompt {name}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt {name}: not UTF-8 text (byte {error.start})") from None
    if not text:
        raise UserError(f"--prompt {name}: there is no text in it")
    return text


def save_memory(file: Path, lococo: LoCoCo, memory: Memory) -> None:
    """What a settled memory holds, M slots of each layer, and whose it is."""
    tensors = {f"keys.{n}": k for n, k in enumerate(memory.keys)} | {
        f"values.{n}": v for n, v in enumerate(memory.values)}  # fmt: skip
    tensors |= {f"scores.{n}": score for n, score in enumerate(memory.scores) if score is not None}
    write_file(file, "memory", tensors, settings=asdict(lococo.settings), base=lococo.base, adapter=lococo.adapter,
               seen=memory.seen)  # fmt: skip


def load_memory(file: Path, model: Llama, args: argparse.Namespace) -> tuple[LoCoCo, Memory]:
    """A memory of `save_memory`, on the model and with the adapter that it was made with."""
    tensors, about = read_file(file, "memory")
    if about["adapter"] is None and args.adapter:
        raise UserError(f"{file}: made without an adapter; leave out --adapter")
    if about["adapter"] and args.model and not args.adapter:
        raise UserError(f"{file}: made with an adapter; give it as --adapter")
    lococo = LoCoCo.load(args.adapter or TINY, model) if about["adapter"] else LoCoCo(
        model, Settings(**about["settings"]))  # fmt: skip
    if (lococo.base, lococo.adapter) != (about["base"], about["adapter"]):
        raise UserError(f"{file}: made with another {'model' if lococo.base != about['base'] else 'adapter'}")
    if tensors["keys.0"].dtype != args.dtype:
        raise UserError(f"{file}: made with --dtype {tensors['keys.0'].dtype}".replace("torch.", ""))
    memory = lococo.cache()
    for name, tensor in tensors.items():
        kind, layer = name.split(".")
        getattr(memory, kind)[int(layer)] = tensor.to(args.device)
    memory.seen = about["seen"]
    return lococo, memory


# --- What the slots hold -------------------------------------------------------------------------------------


class Trace(Memory):
    """A memory that also follows, for one layer and key/value head, of which tokens its entries are made.

    `shares` (S, N) is what W has made of one-hot rows, so a row is the mixture of the N tokens of `tokens` that an
    entry is. A token of which no entry has a millionth is dropped from both.
    """

    def __init__(self, lococo: LoCoCo, layer: int, head: int):
        super().__init__(lococo.model.config, lococo.settings, lococo.compressors)
        self.layer, self.head = layer, head
        self.shares, self.tokens = torch.zeros(0, 0), torch.zeros(0, dtype=torch.long)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        everything = super().update(layer, k, v)
        if layer == self.layer:
            T = k.shape[2]
            self.shares = torch.block_diag(self.shares, torch.eye(T))
            self.tokens = torch.cat((self.tokens, torch.arange(self.seen - T, self.seen)))
        return everything

    def follow(self, layer: int, place: Tensor, w: Tensor) -> None:
        super().follow(layer, place, w)
        if layer == self.layer:
            place = place if place.dim() == 1 else place[:1, self.head, None]
            shares = self.carry(self.shares[None, None], place.cpu(), w[:1, self.head, None].cpu())[0, 0]
            alive = shares.amax(dim=0) >= 1e-6
            self.shares, self.tokens = shares[:, alive], self.tokens[alive]


KEPT, GONE = 0.999, 0.01  # share of a slot from which on it is one token; of all slots, below which nothing is left


def describe_slots(trace: Trace, ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Lines of at most 80 columns: what each slot holds, in order; ids are the tokens that were read."""
    s, held, start = trace.settings, trace.shares.shape[0], 0
    title = f"layer {trace.layer}, head {trace.head}: {held:,} entries after {len(ids):,} tokens"
    if held == len(ids):
        yield title
        yield f"nothing is compressed before there are more than {s.mem + s.segment} tokens: all are kept"
        return
    yield f"{title}, {max(held - s.mem, 0)} not yet compressed"
    for kind in ("sinks", "heavy", "merged", "recent"):
        if not (count := getattr(s, kind)):
            continue
        yield f"slots {start}-{start + count - 1}, {kind}" + (": share, token, position" if kind == "merged" else "")
        alone = []  # positions of the tokens that neighbouring slots hold, unmixed
        for slot in range(start, start + count):
            share, where = trace.shares[slot].max(dim=0)
            if kind != "merged" and share > KEPT:
                alone.append(int(trace.tokens[where]))
                continue
            yield from describe_kept(alone, ids, tokenizer)
            alone = []
            yield describe_mixture(trace, slot, ids, tokenizer)
        yield from describe_kept(alone, ids, tokenizer)
        start += count
    slots, past = trace.shares[: s.mem], len(ids) - max(held - s.mem, 0)
    kept = (slots > KEPT).any(dim=0)
    mixed = (slots.sum(dim=0) >= GONE) & ~kept
    kept, mixed = int(kept.sum()), int(mixed.sum())
    yield f"of {past:,} tokens {kept:,} are whole, {mixed:,} part of a mixture, {past - kept - mixed:,} gone"


def describe_mixture(trace: Trace, slot: int, ids: list[int], tokenizer: Tokenizer) -> str:
    """A slot's two largest shares, and how much the others have."""
    share, where = trace.shares[slot].sort(descending=True)
    line = f"{slot:>4}"
    for w, n in zip(share[:2].tolist(), trace.tokens[where[:2]].tolist()):
        if w >= 0.005:
            line += f" {'█' * round(4 * w):·<4} {w:.2f} {quoted(tokenizer.piece(ids[n]), 9):<9} {n:<6}"
    others = 1 - float(share[:2].sum())
    return (line + f" others {others:.2f}" if others >= 0.005 else line).rstrip()


def describe_kept(positions: list[int], ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Lines about tokens that are kept as they are, neighbours together: positions and text."""
    runs = []
    for n in positions:
        if runs and runs[-1][-1] == n - 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    line = ""
    for run in runs:
        where = f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}"
        part = f"{where} {quoted(''.join(tokenizer.piece(ids[n]) for n in run), 55)}"
        if line and len(line) + 2 + len(part) > 80:
            yield line + ","
            line = ""
        line = f"{line}, {part}" if line else f"     {part}"
    if line:
        yield line


def quoted(text: str, most: int) -> str:
    """In quotation marks and one line of at most so many characters: if it is longer, its middle is left out."""
    shown = [c if c.isprintable() else ascii(c)[1:-1] for c in text]
    if sum(map(len, shown)) <= most - 2:
        return f'"{"".join(shown)}"'
    front, back = list(accumulate(shown)), list(accumulate(reversed(shown), lambda text, c: c + text))
    half = (most - 3) // 2
    front, back = (max((text for text in texts if len(text) <= half), key=len, default="") for texts in (front, back))
    return f'"{front}…{back}"'


# --- The program ---------------------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> None:
    for name, value, fits, range_ in (
        ("max-new-tokens", args.max_new_tokens, args.max_new_tokens >= 1, "at least 1"),
        ("temperature", args.temperature, 0 <= args.temperature < float("inf"), "0 or more"),
        ("top-p", args.top_p, 0 < args.top_p <= 1, "more than 0 and at most 1"),
        ("num-samples", args.num_samples, args.num_samples >= 1, "at least 1"),
    ):
        if not fits:
            raise UserError(f"--{name} {value}: it must be {range_}")
    refuse_counts(args)
    if args.method and (args.adapter or args.full):
        raise UserError(f"--method {args.method} does not go with --adapter or --full")
    if args.load_memory and (args.method or args.full):
        raise UserError(f"--load-memory {args.load_memory} does not go with --method or --full: it has its own method")
    if args.show_memory is not None and len(args.show_memory) not in (0, 2):
        raise UserError(f"--show-memory {' '.join(map(str, args.show_memory))}: give a layer and a head, or neither")
    if args.show_memory is not None and args.load_memory:
        raise UserError("--show-memory does not go with --load-memory: its file does not say which tokens were read")
    if args.load_memory and not args.load_memory.is_file():
        raise UserError(f"--load-memory {args.load_memory}: no such file")
    if args.save_memory and (args.save_memory.is_dir() or not args.save_memory.parent.is_dir()):
        raise UserError(f"--save-memory {args.save_memory}: not a file in a directory that exists")
    if args.save_memory and args.save_memory.exists():
        raise UserError(f"--save-memory {args.save_memory}: that file is there already; remove it or give another name")


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--prompt", required=True, nargs="+", metavar="FILE", help="text files, read in turn; - for standard input")
    add("--adapter", metavar="RUN", help="run directory of train.py (default: the embedded one, without --model)")
    add("--full", action="store_true", help="keep the full cache, however long the text")
    add("--method", metavar="NAME", help="a training-free method instead of an adapter (streaming, h2o)")
    parser.add_counts()
    add("--save-memory", type=Path, metavar="FILE", help="write the memory after the prompt there and end")
    add("--load-memory", type=Path, metavar="FILE", help="begin with such a memory, not with an empty one")
    add("--show-memory", type=int, nargs="*", metavar="N",
        help="print what the slots hold after the prompt and end; LAYER HEAD (default: 0 0)")  # fmt: skip
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.8, help="0 is greedy")
    add("--top-p", type=float, default=0.95)
    add("--num-samples", type=int, default=1)
    args = parser.parse_args()
    check(args)
    return args


def begin(args: argparse.Namespace, model: Llama, count: int) -> tuple[LoCoCo | None, KVCache]:
    """The method, and its cache as it is before the prompt of so many tokens."""
    adapter = args.adapter or (None if args.model or args.method else TINY)
    if args.load_memory:
        return load_memory(args.load_memory, model, args)
    if args.method:
        lococo = LoCoCo(model, untrained(args, args.method, count + args.max_new_tokens))
    else:
        lococo = LoCoCo.load(adapter, model) if adapter else None
    full = lococo is None or args.full or lococo.settings.mem is None
    if full and (args.save_memory or args.show_memory is not None):
        flag = f"--save-memory {args.save_memory}" if args.save_memory else "--show-memory"
        raise UserError(f"{flag}: a cache that keeps everything is no memory of M slots")
    if args.show_memory is None:
        return lococo, KVCache(model.config.n_layers) if lococo is None or args.full else lococo.cache()
    layer, head = args.show_memory or (0, 0)
    if not (0 <= layer < model.config.n_layers and 0 <= head < model.config.n_kv_heads):
        raise UserError(f"--show-memory {layer} {head}: layers are 0 to {model.config.n_layers - 1}, "
                        f"key/value heads 0 to {model.config.n_kv_heads - 1}")  # fmt: skip
    return lococo, Trace(lococo, layer, head)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    args = parse()
    texts = [read_prompt(name) for name in args.prompt]
    model, tokenizer = load_base(args)
    prompts = [tokenizer.encode(text, bos=n == 0 and not args.load_memory) for n, text in enumerate(texts)]
    count = sum(map(len, prompts))
    lococo, cache = begin(args, model, count)
    if lococo is None or args.full:
        say(f"full cache ({'--full' if args.full else 'no adapter'}): every key and value is kept")
        segment, trained = 512, "the model was pretrained"
        length = round(model.config.context * model.config.rope_scale)  # interpolation stretches it
    else:
        segment, length = lococo.settings.segment, lococo.settings.length
        trained = "the adapter was trained" if lococo.adapter else "the memory was made for positions"
    if cache.seen + count > length:
        remembered = f" after the {cache.seen:,} remembered" if cache.seen else ""
        say(f"warning: the prompt has {count:,} tokens{remembered}, {trained} on {length:,}: expect worse text")

    begun = time.time()
    with precision(args):
        logits = read(model, cache, prompts, segment, args)
        filled, written = time.time(), 0
        if args.save_memory:
            save_memory(args.save_memory, lococo, cache)
        if args.show_memory is not None:
            print(*describe_slots(cache, sum(prompts, []), tokenizer), sep="\n")
        if not args.save_memory and args.show_memory is None:
            cache, written = write(model, tokenizer, logits, cache, prompts[-1], args)
    done = time.time()
    slots = f"{cache.settings.mem} slots" if isinstance(cache, Memory) else "no limit"
    full = cache.nbytes // cache.held * cache.seen
    say(f"prompt           {count:,} tokens in {sum(-(-len(p) // segment) for p in prompts)} segments of {segment}")
    say(f"memory           {slots}; {cache.held:,} entries held after {cache.seen:,} tokens")
    say(f"key/value cache  {cache.nbytes:,} bytes; the full cache would hold {full:,}")
    decoded = f", decode {written / (done - filled):,.0f}" if written else ""
    say(f"tokens/s         prefill {count / (filled - begun):,.0f}{decoded}")


def read(model: Llama, cache: KVCache, prompts: list[list[int]], segment: int, args: argparse.Namespace) -> Tensor:
    """All prompts into the cache; logits (1, V) of what comes next."""
    for n, prompt in enumerate(prompts, 1):
        logits = prefill(model, torch.tensor([prompt], device=args.device), cache, segment)
        if isinstance(cache, Memory) and (n < len(prompts) or args.save_memory):
            cache.settle()
    logits[0, 0].item()  # a GPU has finished the prompt when this returns
    return logits


def write(model: Llama, tokenizer: Tokenizer, logits: Tensor, cache: KVCache, prompt: list[int],
          args: argparse.Namespace) -> tuple[KVCache, int]:  # fmt: skip
    """Print the samples, each from a copy of the cache; the last copy, and how many tokens there were in all."""
    written = 0
    for number in range(args.num_samples):
        if args.num_samples > 1:
            say(f"--- sample {number + 1}")
        branch, text = cache.fork(), TextStream(tokenizer, prompt)  # the prompt is read once
        for token in decode(model, tokenizer, logits, branch, args.max_new_tokens, args.temperature, args.top_p,
                            args.seed + number):  # fmt: skip
            print(text.add(token), end="", flush=True)
            written += 1
        print(text.rest().rstrip("\ufffd"), flush=True)  # the limit may fall inside a character
    return branch, written


if __name__ == "__main__":
    exit_on_user_error(main)
