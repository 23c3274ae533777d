"""Continue a prompt of any length from a memory of fixed size.

    python generate.py --prompt file.txt                          # the embedded model and adapter
    python generate.py --prompt - --adapter runs/my-run < book.txt
    python generate.py --prompt file.txt --method streaming --mem 128         # without an adapter
    python generate.py --prompt file.txt --show-memory 2 1        # the slots of layer 2, head 1
    python generate.py --prompt book.txt --save-memory book.safetensors       # read it once ...
    python generate.py --prompt question.txt --load-memory book.safetensors   # ... ask many times

The text goes to standard output, the figures to standard error.
"""

import argparse
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from lococo import KINDS, METHODS, AdaptedLlama, Memory, Settings, identity, load_adapter
from lococo import untrained
from model import Entries, KVCache, Llama, Tokenizer, load_base
from support.command_line import TINY, Parser, at_least, method_flags, output_file, prepare
from support.command_line import run_program
from support.files import UTF8, UserError, checksum, created, read_file, write_file

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
    """A memory that also follows W through all compressions, for one layer and key/value head."""

    def __init__(self, *args, layer: int, head: int):
        """`args` as those of Memory."""
        super().__init__(*args)
        self.layer, self.head = layer, head
        self.shares = torch.zeros(0, 0)  # (M, N): how much of each of N tokens each slot has
        self.largest = []  # after each compression: the largest share in each slot, its token

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        order, w = super().compress(layer)
        if layer == self.layer:
            W = self.mixing_matrix(layer, order, w)[0, self.head].float().cpu()  # (M, S)
            entered = torch.eye(W.shape[1] - len(self.shares))
            self.shares = W @ torch.block_diag(self.shares, entered)
            self.largest = [*self.largest, self.shares.max(dim=1)]
        return order, w


def describe_slots(memory: TracedMemory, ids: list[int], tokenizer: Tokenizer) -> Iterator[str]:
    """Lines about what the slots hold; ids are the tokens that were read. At a line's end stands a
    bar for each compression: the largest share that the line's first token had then, of slots
    where it came first."""
    yield f"layer {memory.layer}, head {memory.head}: {memory.size} entries after {len(ids)} tokens"
    kinds = [kind for kind in KINDS for _ in range(getattr(memory.layers[memory.layer], kind))]
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
    tensors = {}
    for layer in range(memory.config.n_layers):
        tensors[f"keys {layer}"] = memory.keys[layer].held
        tensors[f"values {layer}"] = memory.values[layer].held
        if memory.scoring:
            tensors[f"scores {layer}"] = memory.scores[layer]
    write_file(file, tensors, seen=memory.seen, owner=owner)


def load_memory(file: Path, memory: Memory, owner: dict, device: str) -> None:
    tensors, about = read_file(file)
    if about.get("owner") != owner:
        raise UserError(f"--load-memory {file}: of another model, adapter, method or --dtype")
    for layer in range(memory.config.n_layers):
        memory.keys[layer] = Entries(tensors[f"keys {layer}"].to(device))
        memory.values[layer] = Entries(tensors[f"values {layer}"].to(device))
        if memory.scoring:
            memory.scores[layer] = tensors[f"scores {layer}"].to(device)
    memory.seen = about["seen"]


# --- The program ---------------------------------------------------------------------------------


def read_prompt(name: str) -> str:
    """The text of a file; of standard input if the name is -."""
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = data.decode(UTF8)
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt {name}: not UTF-8 text (byte {error.start})") from None
    if not text:
        raise UserError(f"--prompt {name}: there is no text in it")
    return text


def parse() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument_group("text").add_argument
    add("--prompt", required=True, metavar="FILE", help="a text file; - for standard input")
    add("--max-new-tokens", type=at_least(1), default=200, metavar="N",
        help="tokens to write (default: 200)")
    add("--temperature", type=at_least(0, float), default=0.8, metavar="T",
        help="default: 0.8; 0 takes the likeliest token")
    one = parser.memory.add_mutually_exclusive_group().add_argument
    one("--adapter", type=Path, metavar="RUN",
        help="run directory of train.py (default for tiny/: its own)")
    one("--method", choices=METHODS,
        help="a method without training, instead of an adapter (default for other models: full)")
    group = parser.add_argument_group("output")
    group.add_argument("--save-memory", type=output_file, metavar="FILE",
                       help="write the memory there, and end")  # fmt: skip
    one = group.add_mutually_exclusive_group().add_argument
    one("--load-memory", type=Path, metavar="FILE", help="go on from such a memory")
    one("--show-memory", type=at_least(0), nargs=2, metavar=("LAYER", "HEAD"),
        help="print what the slots hold, and end")  # fmt: skip
    args = parser.parse_args()
    parser.refuse_counts(args)
    if args.save_memory and args.save_memory.exists():
        parser.error(f"--save-memory {args.save_memory}: there is such a file already")
    return args


def model_with_memory(args: argparse.Namespace, model: Llama) -> AdaptedLlama:
    """The base with the adapter or the method that the flags ask for."""
    if args.adapter:
        return load_adapter(args.adapter, model)
    if args.method:
        mem = args.mem or 512
        flags = method_flags(vars(args))
        return untrained(model, args.method, mem, args.segment or mem, **flags)
    if args.model.resolve() == TINY:
        return load_adapter(TINY, model)
    memory = "its memory is the full cache, which keeps every token"
    others = "for 512 slots: --method h2o --mem 512, or --adapter RUN after train.py"
    print(f"this base has no adapter: {memory}; {others}", file=sys.stderr)
    return untrained(model, "full", 512, 512)


def empty_cache(args: argparse.Namespace, adapted: AdaptedLlama) -> KVCache:
    """With --show-memory a memory that is traced."""
    settings, config = adapted.settings, adapted.model.config
    needs_slots = args.save_memory or args.load_memory or args.show_memory
    if needs_slots and not settings.mem:
        raise UserError(f"--method {settings.method}: it keeps everything and has no slots")
    if not args.show_memory:
        return adapted.cache()
    layer, head = args.show_memory
    if layer >= config.n_layers or head >= config.n_kv_heads:
        raise UserError(f"--show-memory {layer} {head}: no such layer or head")
    return adapted.cache(partial(TracedMemory, layer=layer, head=head))


def figures(cache: KVCache, settings: Settings) -> str:
    """How much is held, and what the full cache would hold."""
    held = sum(keys.size for keys in cache.keys)  # in all layers
    full = cache.nbytes // held * len(cache.keys) * cache.seen
    mean = held // len(cache.keys)
    lines = [
        f"memory           {settings.mem} slots; {mean:,} entries held of {cache.seen:,}",
        f"key/value cache  {cache.nbytes:,} bytes; the full cache would hold {full:,}",
    ]
    if settings.budgets:
        least, most = min(settings.budgets), max(settings.budgets)
        lines.append(f"entries held     on average; layers have {least} to {most} slots")
    elif settings.mem and cache.compressed:
        waiting = f"{cache.size - settings.mem} tokens since the last compression"
        most = f"at most T = {settings.segment}"
        lines.append(f"entries held     {settings.mem} slots, and {waiting} ({most})")
    elif settings.mem:
        room = f"M + T = {settings.mem + settings.segment:,} entries"
        lines.append(f"entries held     all: nothing is compressed up to {room}")
    return "\n".join(lines)


def main() -> None:
    args = parse()
    machine = prepare(args.device, args.dtype, args.seed)
    text = read_prompt(args.prompt)
    model, tokenizer = load_base(args.model, machine)
    ids = tokenizer.encode(text)
    if len(ids) == len(tokenizer.prefix):
        sentence = "the tokenizer has no token for its text; write more"
        raise UserError(f"--prompt {args.prompt}: {sentence}")
    adapted = model_with_memory(args, model)
    settings = adapted.settings
    cache = empty_cache(args, adapted)
    if args.save_memory or args.load_memory:
        owner = identity(adapted) | {"adapter": checksum(adapted.trained(), str(machine.dtype))}
    if args.load_memory:
        load_memory(args.load_memory, cache, owner, machine.device)
        ids = ids[len(tokenizer.prefix) :]  # without the BOS; sentencepiece's blank stays
    answer = 0 if args.save_memory or args.show_memory else args.max_new_tokens
    if settings.positions != "slots" and cache.seen + len(ids) + answer > settings.length:
        print(f"warning: this may pass the {settings.length:,} tokens trained for", file=sys.stderr)

    saved = created(args.save_memory) if args.save_memory else nullcontext()
    with saved, machine.precision():
        prompt = torch.tensor([ids], device=machine.device)
        logits = prefill(model, prompt, cache, settings.segment)
        if args.save_memory:
            save_memory(args.save_memory, cache, owner)
        elif args.show_memory:
            print(*describe_slots(cache, ids, tokenizer), sep="\n")
        else:
            new = decode(model, tokenizer, logits, cache, args.max_new_tokens, args.temperature)
            for piece in as_text(new, tokenizer, ids):
                print(piece, end="", flush=True)
            print(flush=True)
    print(figures(cache, settings), file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
