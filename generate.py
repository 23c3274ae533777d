"""Continue a prompt of any length from a memory of fixed size.

    python generate.py --prompt file.txt                          # the embedded model and adapter
    python generate.py --prompt - --adapter runs/my-run < book.txt
    python generate.py --prompt file.txt --method streaming --mem 128         # without an adapter
    python generate.py --prompt file.txt --show-memory 2 1        # the slots of layer 2, head 1
    python generate.py --prompt book.txt --save-memory book.safetensors       # read it once ...
    python generate.py --prompt question.txt --load-memory book.safetensors   # ... ask many times

The text goes to standard output, the figures to standard error. The last section but one is what
all programs share: flags, the base model, errors.
"""

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from lococo import METHODS, AdaptedLlama, Memory, Settings, identity, load_adapter
from model import KVCache, Llama, Tokenizer, load_llama
from support.files import UserError, checksum, read_file, write_file

HERE = Path(__file__).resolve().parent
TINY = HERE / "tiny"  # the embedded model and its adapter
KINDS = ("sinks", "heavy", "merged", "recent")  # kinds of slots, in this order
POSITIONS = ("interpolated", "original", "slots")  # see lococo.interpolation

# --- Text as it comes ----------------------------------------------------------------------------


def as_text(tokens: Iterator[int], tokenizer: Tokenizer, prompt: list[int]) -> Iterator[str]:
    """Text of tokens as they come. The prompt's end is decoded too, or a first space would be lost.
    Text that ends inside a character (U+FFFD) waits; it is dropped if nothing follows."""
    ids = [i for i in prompt[-8:] if i not in tokenizer.prefix]
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


# --- Decoding ------------------------------------------------------------------------------------


@torch.no_grad()
def prefill(model: Llama, tokens: Tensor, cache: KVCache, segment: int) -> Tensor:
    """Read tokens (B, L) into the cache by segments; float32 logits (B, V) of what comes next."""
    for x in tqdm(tokens.split(segment, dim=1), "reading", leave=False, delay=2, disable=None):
        h = model.hidden(x, cache)
    return model.logits(h[:, -1])


def sample(logits: Tensor, temperature: float) -> int:
    """One token id from logits (V,); temperature 0 takes the likeliest."""
    if temperature < 1e-4:  # as good as 0; the division could overflow
        return int(logits.argmax())
    return int(torch.softmax(logits.double() / temperature, dim=-1).multinomial(1))


@torch.no_grad()
def decode(model: Llama, tokenizer: Tokenizer, logits: Tensor, cache: KVCache,
           most: int, temperature: float) -> Iterator[int]:  # fmt: skip
    """At most so many token ids that follow what the cache has read; logits (1, V) after it."""
    for _ in range(most):
        token = sample(logits[0, : tokenizer.vocab_size], temperature)  # not of the padding
        if token in tokenizer.ends:
            return
        yield token
        logits = model(torch.tensor([[token]], device=logits.device), cache)[:, -1]


# --- What the slots hold -------------------------------------------------------------------------


class TracedMemory(Memory):
    """A memory that also follows W through all compressions, for one layer and key/value head:
    `shares` (M, N) says how much of each of the N compressed tokens each slot has; `largest`, after
    each compression, the largest share in each slot and its token, both (M,)."""

    layer, head, shares, largest = 0, 0, torch.zeros(0, 0), ()

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        arranged, w = super().compress(layer)
        if layer == self.layer:
            W = self.mixing_matrix(arranged, w)[0, self.head].float().cpu()  # (M, S)
            entered = torch.eye(W.shape[1] - len(self.shares))
            self.shares = W @ torch.block_diag(self.shares, entered)
            self.largest += (self.shares.max(dim=1),)
        return arranged, w


def describe_slots(memory: TracedMemory, ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Lines about what the slots hold; ids are the tokens that were read. At a line's end stands a
    bar for each compression: the largest share that the line's first token had then, of slots
    where it came first."""
    yield f"layer {memory.layer}, head {memory.head}: {memory.size} entries after {len(ids)} tokens"
    kinds = [kind for kind in KINDS for _ in range(getattr(memory.settings, kind))]
    for slot, kind in enumerate(kinds if memory.compressed else []):
        line = f"{slot:>4} {kind:7}"
        top = memory.shares[slot].topk(min(3, memory.shares.shape[1]))
        for share, n in zip(top.values.tolist(), top.indices.tolist()):
            if share >= 0.01:
                piece = repr(tokenizer.piece(ids[n]))
                line += f"  {'█' * round(4 * share):·<4} {share:.2f} {piece:<10} {n:<5}"
        then = [(part * (token == top.indices[0])).max() for part, token in memory.largest]
        bars = "".join(" ▁▂▃▄▅▆▇█"[round(8 * float(part))] for part in then)
        yield f"{line}  {bars}"


# --- Saved memories ------------------------------------------------------------------------------


def save_memory(file: Path, memory: Memory, owner: dict) -> None:
    """`owner` says which base and adapter the entries belong to."""
    kinds = ("keys", "values", "scores") if memory.scoring else ("keys", "values")
    tensors = {f"{kind} {n}": t for kind in kinds for n, t in enumerate(getattr(memory, kind))}
    write_file(file, tensors, seen=memory.seen, compressed=memory.compressed, owner=owner)


def load_memory(file: Path, memory: Memory, owner: dict, device: str) -> None:
    tensors, about = read_file(file)
    if about.get("owner") != owner:
        raise UserError(f"--load-memory {file}: of another model, adapter, method or --dtype")
    for name, tensor in tensors.items():
        kind, layer = name.split()
        getattr(memory, kind)[int(layer)] = tensor.to(device)
    memory.seen, memory.compressed = about["seen"], about["compressed"]


# --- Flags, the base model, errors ---------------------------------------------------------------


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """An argparse type: a number from `least` on."""

    def convert(text: str) -> float:
        number = kind(text)
        if not least <= number < 2**31:
            raise argparse.ArgumentTypeError(f"{text}: it must be from {least} on, and not huge")
        return number

    convert.__name__ = kind.__name__  # for argparse's own sentence: invalid int value
    return convert


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written when the work is done."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: this is a folder; name a file")
    if not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {file.parent}; make it first")
    return file


class Parser(argparse.ArgumentParser):
    """The flags of all programs. A mistake is one sentence."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        add = self.add_argument
        add("--model", type=Path, default=TINY, help="directory of the base model")
        add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
        add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU")
        add("--seed", type=at_least(0), default=0)
        add("--mem", type=at_least(4), help="slots M, from 4 on (default: 512, or the recipe's)")
        add("--segment", type=at_least(1), help="tokens T that enter together (default: as --mem)")
        for flag in ("--sinks", "--heavy", "--recent"):
            add(flag, type=at_least(0), help=f"{flag[2:]} slots, instead of the method's")
        add("--positions", choices=POSITIONS, help="of keys, instead of the method's")
        add("--forget", type=at_least(0, float), metavar="F",
            help="heavy slots: factor of earlier attention scores at each segment, 0 to 1")

    def refuse_counts(self, args: argparse.Namespace) -> None:
        given = {args.mem, args.segment, *method_flags(args).values()} - {None}
        if given and not args.method:
            self.error("--mem and the like go with --method; a trained adapter has its own")

    def error(self, message: str):
        if message.startswith("argument "):  # argparse's "argument --mem: 0: it must ..."
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        self.exit(2, f"{self.prog}: {message}\n")


def method_flags(args: argparse.Namespace) -> dict:
    """The flags that change a row of METHODS; train.py has three more than the others."""
    names = ("sinks", "heavy", "recent", "positions", "forget", "compressor", "kernel", "lora_rank")
    return {name: vars(args)[name] for name in names if name in args}


def settings_for(method: str, mem: int, segment: int, length: int, **changes) -> Settings:
    """A row of METHODS at M = mem; `changes` that are not None replace fields. Slots left over are
    merged, or recent if the row merges none; if that number is given, M is the sum of all. A row
    without slots keeps all. Raises UserError."""
    row = METHODS[method](mem)
    given = {name: value for name, value in changes.items() if value is not None}
    fills = "merged" if "merged" in row else "recent"
    counts = {name: (row | given).get(name, 0) for name in KINDS}
    if row and fills not in given:
        counts[fills] += mem - sum(counts.values())
    fits = 0 < sum(counts.values()) <= mem if row else sum(counts.values()) == 0
    if not fits or min(counts.values()) < 0 or ("merged" in row and counts["merged"] == 0):
        raise UserError(f"--method {method} --mem {mem}: {counts} slots do not fit")
    return Settings(method, segment, length, **row | given | counts)


@dataclass(frozen=True)
class Machine:
    """Where a program computes, and in which numbers."""

    device: str
    dtype: torch.dtype

    def precision(self) -> torch.autocast:
        """Compute in `dtype`; what trains is kept in float32."""
        device = torch.device(self.device).type
        return torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32)


def prepare(args: argparse.Namespace) -> Machine:
    """The machine that the flags ask for. Sets the random state, too."""
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):
        raise UserError(f"--device {device}: this torch has no such device") from None
    usual = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    torch.manual_seed(args.seed)
    torch.set_flush_denormal(True)  # a CPU is many times slower with a softmax's tiny weights
    return Machine(device, getattr(torch, args.dtype or usual))


def load_base(path: Path, machine: Machine) -> tuple[Llama, Tokenizer]:
    model = load_llama(path, machine.dtype, machine.device)
    tokenizer = Tokenizer(path)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise UserError(f"{tokenizer.file}: it has more tokens than the model ({path})")
    return model, tokenizer


def untrained(model: Llama, method: str, mem: int, segment: int, **flags) -> AdaptedLlama:
    """A method that needs no training, on its base model."""
    settings = settings_for(method, mem, segment, model.config.context, **flags | {"lora_rank": 0})
    if settings.merged:
        raise UserError(f"--method {method}: its convolution must be trained first, by train.py")
    return AdaptedLlama(model, settings)


def run_program(main: Callable[[], None]) -> None:
    """What the user can mend is one sentence and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal may not have every character
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        os._exit(1)
    except (UserError, OSError, RuntimeError, MemoryError) as error:
        sentence = str(error)
        if isinstance(error, OSError) and error.filename:
            sentence = f"{error.filename}: {error.strerror}"
        scarce = "allocate" in sentence or "out of memory" in sentence
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and scarce):
            sentence = "out of memory: try a smaller --mem or --segment; README.md says what else"
        elif isinstance(error, RuntimeError):
            raise
        print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
        sys.exit(2)


# --- The program ---------------------------------------------------------------------------------


def read_prompt(name: str) -> str:
    """The text of a file; of standard input if the name is -."""
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    if not data:
        raise UserError(f"--prompt {name}: there is no text in it")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt {name}: not UTF-8 text (byte {error.start})") from None


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--prompt", required=True, metavar="FILE", help="a text file; - for standard input")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--adapter", type=Path, metavar="RUN", help="run directory of train.py")
    one("--method", choices=METHODS, help="a method without training, instead of an adapter")
    add("--save-memory", type=output_file, metavar="FILE", help="write the memory there, and end")
    one = parser.add_mutually_exclusive_group().add_argument
    one("--load-memory", type=Path, metavar="FILE", help="go on from such a memory")
    one("--show-memory", type=at_least(0), nargs=2, metavar=("LAYER", "HEAD"),
        help="print what the slots hold, and end")  # fmt: skip
    add("--max-new-tokens", type=at_least(1), default=200, help="default: 200")
    add("--temperature", type=at_least(0, float), default=0.8,
        help="default: 0.8; 0 takes the likeliest token")  # fmt: skip
    args = parser.parse_args()
    parser.refuse_counts(args)
    if args.method is None and args.adapter is None:
        embedded = args.model.resolve() == TINY
        args.adapter, args.method = (TINY, None) if embedded else (None, "full")
    if args.save_memory and args.save_memory.exists():
        parser.error(f"--save-memory {args.save_memory}: there is such a file already")
    return args


def main() -> None:
    args = parse()
    machine = prepare(args)
    text = read_prompt(args.prompt)
    model, tokenizer = load_base(args.model, machine)
    ids, mem = tokenizer.encode(text), args.mem or 512
    if args.adapter:
        adapted = load_adapter(args.adapter, model)
    else:
        adapted = untrained(model, args.method, mem, args.segment or mem, **method_flags(args))
    settings = adapted.settings
    if not settings.mem and (args.save_memory or args.load_memory or args.show_memory):
        raise UserError(f"--method {settings.method}: it keeps everything and has no slots")
    cache = adapted.cache(TracedMemory if args.show_memory else Memory)
    if args.show_memory:
        cache.layer, cache.head = args.show_memory
        if cache.layer >= model.config.n_layers or cache.head >= model.config.n_kv_heads:
            raise UserError(f"--show-memory {cache.layer} {cache.head}: no such layer or head")
    if args.save_memory or args.load_memory:
        owner = identity(adapted) | {"adapter": checksum(adapted.trained(), str(machine.dtype))}
    if args.load_memory:
        load_memory(args.load_memory, cache, owner, machine.device)
        ids = ids[len(tokenizer.prefix) :]  # without the BOS; sentencepiece's blank stays
    answer = 0 if args.save_memory or args.show_memory else args.max_new_tokens
    if settings.positions != "slots" and cache.seen + len(ids) + answer > settings.length:
        print(f"warning: this may pass the {settings.length:,} tokens trained for", file=sys.stderr)
    with machine.precision():
        logits = prefill(model, torch.tensor([ids], device=machine.device), cache, settings.segment)
        if args.save_memory:
            save_memory(args.save_memory, cache, owner)
        elif args.show_memory:
            print(*describe_slots(cache, ids, tokenizer), sep="\n")
        else:
            new = decode(model, tokenizer, logits, cache, args.max_new_tokens, args.temperature)
            for piece in as_text(new, tokenizer, ids):
                print(piece, end="", flush=True)
            print(flush=True)
    full = cache.nbytes // cache.size * cache.seen
    sys.stderr.write(
        f"memory           {settings.mem} slots; {cache.size:,} entries held of {cache.seen:,}\n"
        f"key/value cache  {cache.nbytes:,} bytes; the full cache would hold {full:,}\n"
    )


if __name__ == "__main__":
    run_program(main)
