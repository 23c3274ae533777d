"""Continue a prompt of any length from a memory of fixed size.

    python generate.py --prompt file.txt                   # the embedded model and adapter
    python generate.py --prompt - --adapter runs/my-run < book.txt
    python generate.py --prompt file.txt --method streaming --mem 128    # without an adapter

Show what the slots of layer 2, head 1 hold; or all slots, as a page.

    python generate.py --prompt file.txt --show-memory 2 1
    python generate.py --prompt file.txt --show-memory page.html

A text that is read once and asked many times:

    python generate.py --prompt book.txt --save-memory book.safetensors
    python generate.py --prompt question.txt --load-memory book.safetensors

The text goes to standard output, the figures to standard error. For the method read
`prefill` and `decode`.
"""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Iterable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from lococo import KINDS, METHODS, AdaptedLlama, Memory, Settings, identity, load_adapter
from lococo import read_adapter, untrained, warn_if_too_long
from model import Entries, KVCache, Llama, load_base
from support.command_line import TINY, Machine, Parser, at_least, config_of, method_flags
from support.command_line import counted, output_file, prepare, run_program
from support.files import UTF8, UserError, checksum, created, read_file, write_file
from support.memory_page import page_record, token_texts, write_page
from support.tokenizer import Tokenizer

# --- Text as it comes -------------------------------------------------------------------


def as_text(
    tokens: Iterator[int], tokenizer: Tokenizer, prompt: list[int]
) -> Iterator[str]:
    """Text of tokens as they come. The prompt's end is decoded, too, because tokenizers drop
    a leading space. Text that ends inside a character (U+FFFD) waits; it is dropped if nothing
    follows."""
    ids = [i for i in prompt[-8:] if i not in tokenizer.prefix]
    shown = len(tokenizer.decode(ids))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


# --- Decoding ---------------------------------------------------------------------------


@torch.no_grad()
def prefill(model: Llama, tokens: Tensor, cache: KVCache, segment: int) -> Tensor:
    """Read tokens (B, L) into the cache by segments. Returns float32 logits (B, vocab_size)
    of what comes next. Raises UserError if these are not finite."""
    segments = tokens.split(segment, dim=1)
    delay = 2 if sys.stderr.isatty() else 10  # seconds before the bar shows
    for x in tqdm(segments, "reading", leave=False, delay=delay):
        h = model.hidden(x, cache)
    logits = model.logits(h[:, -1])
    if not logits.isfinite().all():
        no_good = "its weights or its adapter are no good"
        raise UserError(f"the model's output is not finite; {no_good}")
    return logits


def sample(logits: Tensor, temperature: float) -> int:
    """One token id from logits (vocab_size,); temperature 0 takes the likeliest."""
    if temperature < 1e-4:  # as good as 0; the division could overflow
        return int(logits.argmax())
    return int(torch.softmax(logits.double() / temperature, dim=-1).multinomial(1))


@torch.no_grad()
def decode(model: Llama, tokenizer: Tokenizer, logits: Tensor, cache: KVCache,
           most: int, temperature: float) -> Iterator[int]:  # fmt: skip
    """Yield up to `most` token ids that continue the text in the cache. It stops before a
    token that ends the text. `logits` (1, vocab_size) are those after the last token that
    was read."""
    for n in range(most):
        # Without the rows that only pad the vocabulary.
        token = sample(logits[0, : tokenizer.vocab_size], temperature)
        if token in tokenizer.ends:
            return
        yield token
        if n + 1 < most:  # nothing comes after the last one
            logits = model(torch.tensor([[token]], device=logits.device), cache)[:, -1]


# --- What the slots hold ----------------------------------------------------------------


class TracedMemory(Memory):
    """A memory for a batch of one text that multiplies the mixing matrices of all
    compressions, so that each slot is known as a mixture of tokens. It does so in some
    layers or in all."""

    def __init__(self, *args, layers: Iterable[int]):
        """`args` as those of Memory."""
        super().__init__(*args)
        self.seen_at = []  # tokens that had entered at each compression
        # shares[layer][g, slot, place] is how much of the slot is the token at this place of
        # the text, (G, M, tokens).
        self.shares = {layer: torch.zeros(self.config.n_kv_heads, 0, 0) for layer in layers}
        # For each layer, after each compression: the three largest shares of each slot, and
        # their tokens' places, both (G, M, 3). `shares` grows with the text, these do not.
        self.largest = {layer: [] for layer in layers}

    def copy(self) -> "TracedMemory":
        other = super().copy()
        other.seen_at = [*self.seen_at]
        other.shares = {**self.shares}
        other.largest = {layer: [*kept] for layer, kept in self.largest.items()}
        return other

    def compress(self, layer: int) -> tuple[Tensor, Tensor]:
        order, w = super().compress(layer)
        if layer == 0:
            self.seen_at.append(self.seen)
        if layer in self.shares:
            matrix = self.mixing_matrix(layer, order, w)[0].float().cpu()  # (G, M, S)
            before = self.shares[layer]
            # Entries in slots: 0 before the first compression, then M. Every other entry is
            # one whole token.
            in_slots = before.shape[1]
            old, new = matrix.tensor_split([in_slots], dim=2)
            shares = torch.cat((old @ before, new), dim=2)
            self.shares[layer] = shares
            self.largest[layer].append(shares.topk(min(3, shares.shape[2])))
        return order, w


def describe_slots(
    memory: TracedMemory, layer: int, head: int, ids: list[int], tokenizer: Tokenizer
) -> Iterator[str]:
    """Lines about what the slots hold; ids are the tokens that were read.

    The bars at a line's end follow its first token, one bar for each compression. A bar is
    the token's largest share among the slots in which it came first then.
    """
    held = memory.keys[layer].size
    yield f"layer {layer}, head {head}: {held} entries after {len(ids)} tokens"
    counts = memory.layer_settings[layer]
    kinds = [kind for kind in KINDS for _ in range(getattr(counts, kind))]
    for slot, kind in enumerate(kinds if memory.largest[layer] else []):
        line = f"{slot:>4} {kind:7}"
        last = memory.largest[layer][-1]  # after the last compression
        shares, places = (part[head, slot].tolist() for part in last)
        for share, place in zip(shares, places):
            if share >= 0.01:
                piece = repr(tokenizer.piece(ids[place]))
                line += f"  {'█' * round(4 * share):·<4} {share:.2f} {piece:<10} {place:<5}"
        bars = ""
        for shares_then, places_then in memory.largest[layer]:
            same = places_then[head, :, 0] == places[0]
            first = shares_then[head, :, 0] * same
            bars += " ▁▂▃▄▅▆▇█"[round(8 * float(first.max()))]
        yield f"{line}  {bars}"


# --- Saved memories ---------------------------------------------------------------------


def save_memory(file: Path, memory: Memory, owner: dict) -> None:
    """Write the entries, the scores and the number of tokens seen. `owner` says which base
    and adapter they belong to. Raises UserError."""
    tensors = {}
    for layer in range(memory.config.n_layers):
        tensors[f"keys {layer}"] = memory.keys[layer].held
        tensors[f"values {layer}"] = memory.values[layer].held
        if memory.scoring:
            tensors[f"scores {layer}"] = memory.scores[layer]
    write_file(file, tensors, seen=memory.seen, owner=owner)


def load_memory(file: Path, memory: Memory, owner: dict, device: str) -> None:
    """Read what `save_memory` has written into an empty memory. Raises UserError."""
    tensors, about = read_file(file)
    if about.get("owner") != owner:
        other = "it was saved with another model, adapter, --dtype, --method or its flags"
        raise UserError(f"--load-memory {file}: {other}; give the same ones")
    for layer in range(memory.config.n_layers):
        memory.keys[layer] = Entries(tensors[f"keys {layer}"].to(device))
        memory.values[layer] = Entries(tensors[f"values {layer}"].to(device))
        if memory.scoring:
            memory.scores[layer] = tensors[f"scores {layer}"].to(device)
    memory.seen = about["seen"]


# --- The program ------------------------------------------------------------------------

MOST_MEMORIES = 3  # on a page
# What to try where there is no adapter. By slot, so that a text of any length can be read.
SUGGESTED = "--method h2o --mem 512 --positions slots"


@dataclass(frozen=True)
class GenerateConfig:
    """What the command line asks for."""

    model: Path
    device: str | None  # None: a GPU if there is one
    dtype: str | None
    seed: int
    prompt: str  # a file; - for standard input
    max_new_tokens: int
    temperature: float
    # Memory: an adapter, or a method without training. More than one only for a page.
    adapter: Path | None
    method: list[str]
    mem: int | None  # of the methods; None was not given
    segment: int | None
    changes: dict  # of the methods' rows of METHODS
    # Output.
    save_memory: Path | None
    load_memory: Path | None
    layer_and_head: tuple[int, int] | None  # of --show-memory
    page: Path | None  # the file of --show-memory


def read_prompt(name: str) -> str:
    """The text of a file; of standard input if the name is -."""
    if Path(name).is_dir():
        raise UserError(f"--prompt {name}: this is a folder; name a file")
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = data.decode(UTF8)
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt {name}: not UTF-8 text (byte {error.start})") from None
    if not text:
        raise UserError(f"--prompt {name}: there is no text in it")
    return text


def encode_prompt(config: GenerateConfig, text: str, tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(text)
    if len(ids) == len(tokenizer.prefix):
        sentence = "the tokenizer has no token for its text; write more"
        raise UserError(f"--prompt {config.prompt}: {sentence}")
    return ids


def refuse_without_slots(settings: Settings) -> None:
    if not settings.mem:
        remedy = f"take {SUGGESTED}, or --adapter RUN after train.py"
        raise UserError(f"{settings.method}: it keeps everything and has no slots; {remedy}")


def refuse_for_page(settings: Settings) -> None:
    refuse_without_slots(settings)
    if settings.budgets:
        reason = "a page does not show layers with budgets, as their compressions differ in time"
        raise UserError(f"{settings.method}: {reason}; give --show-memory LAYER HEAD")


def make_parser() -> Parser:
    parser = Parser(__doc__, mem="512; on a page that of the adapter")
    add = parser.add_argument_group("text").add_argument
    add("--prompt", required=True, metavar="FILE", help="a text file; - for standard input")
    add("--max-new-tokens", type=at_least(1), default=200, metavar="N",
        help="tokens to write (default: 200)")
    add("--temperature", type=at_least(0, float), default=0.8, metavar="NUMBER",
        help="of the softmax over the next token; 0 takes the likeliest (default: 0.8)")
    add = parser.memory.add_argument
    add("--adapter", type=Path, metavar="RUN",
        help="run directory of train.py (default for tiny/: its own)")
    add("--method", nargs="+", default=[], choices=METHODS,
        help="a method without training, instead of an adapter (default for other models: "
             "full); several, also beside an adapter, with --show-memory page.html")
    group = parser.add_argument_group("output")
    group.add_argument("--save-memory", type=output_file, metavar="FILE",
                       help="write the memory there, and end")  # fmt: skip
    one = group.add_mutually_exclusive_group().add_argument
    one("--load-memory", type=Path, metavar="FILE", help="go on from such a memory")
    one("--show-memory", nargs="+", metavar="WHAT",
        help="LAYER HEAD: print what its slots hold, and end; FILE.html: write a page of what "
             "all slots hold while the text is read, and end")
    return parser


def parse() -> GenerateConfig:
    parser = make_parser()
    flags = parser.parse_args()
    flags.layer_and_head = flags.page = None
    if flags.show_memory:
        flags.layer_and_head, flags.page = what_to_show(flags.show_memory, parser)
    parser.refuse_counts(flags)
    flags.method = list(dict.fromkeys(flags.method))
    flags.changes = method_flags(vars(flags))
    config = config_of(GenerateConfig, flags)
    refuse_conflicts(config, parser)
    if config.save_memory and config.save_memory.exists():
        parser.error(f"--save-memory {config.save_memory}: there is such a file already")
    return config


def what_to_show(
    words: list[str], parser: Parser
) -> tuple[tuple[int, int] | None, Path | None]:
    """Of --show-memory: a layer and a head, or else the file of a page."""
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(words) == len(numbers) == 2:
        return tuple(numbers), None
    if len(words) > 1 or not words[0].lower().endswith(".html"):
        remedy = "name a layer and a head, such as 1 0, or one file, such as page.html"
        parser.error(f"--show-memory {' '.join(words)}: {remedy}")
    try:
        return None, output_file(words[0])
    except argparse.ArgumentTypeError as error:
        parser.error(f"--show-memory {error}")


def refuse_conflicts(config: GenerateConfig, parser: Parser) -> None:
    """Refuse flags that do not go together. A page may show three memories, else there is
    one."""
    asked = ([f"--adapter {config.adapter}"] if config.adapter else []) + config.method
    if len(asked) > 1 and not config.page:
        parser.error(f"{', '.join(asked)}: one at a time, or --show-memory page.html")
    if len(asked) > MOST_MEMORIES:
        parser.error(f"{', '.join(asked)}: a page shows at most {MOST_MEMORIES} memories")
    if config.save_memory and (config.layer_and_head or config.page):
        parser.error("--save-memory and --show-memory: one at a time, as each ends the program")


def model_with_memory(config: GenerateConfig, model: Llama) -> AdaptedLlama:
    """The base with the adapter or the method that the flags ask for."""
    if config.adapter:
        return load_adapter(config.adapter, model)
    if config.method:
        mem = config.mem or 512
        return untrained(model, config.method[0], mem, config.segment or mem, **config.changes)
    if config.model.resolve() == TINY:
        return load_adapter(TINY, model)
    memory = "its memory is the full cache, which keeps every token"
    others = f"for 512 slots: {SUGGESTED}, or --adapter RUN after train.py"
    print(f"this base has no adapter: {memory}; {others}", file=sys.stderr)
    return untrained(model, "full", 512, 512)


def empty_cache(config: GenerateConfig, adapted: AdaptedLlama) -> KVCache:
    """The cache that reads the prompt: with --show-memory LAYER HEAD a TracedMemory. Raises
    UserError."""
    if config.save_memory or config.load_memory or config.layer_and_head:
        refuse_without_slots(adapted.settings)
    if not config.layer_and_head:
        return adapted.cache()
    layer, head = config.layer_and_head
    sizes = adapted.model.config
    if layer >= sizes.n_layers or head >= sizes.n_kv_heads:
        has = f"layers 0 to {sizes.n_layers - 1} and heads 0 to {sizes.n_kv_heads - 1}"
        raise UserError(f"--show-memory {layer} {head}: no such layer or head; there are {has}")
    return adapted.cache(partial(TracedMemory, layers=[layer]))


def figures(cache: KVCache, settings: Settings) -> str:
    """How much is held, and what the full cache would hold."""
    held = sum(keys.size for keys in cache.keys) // len(cache.keys)  # mean over the layers
    slots = f"{settings.mem} slots" if settings.mem else "all entries"
    memory = f"memory           {slots}; {held:,} entries held of {cache.seen:,}"
    below = "\n" + 17 * " "
    if settings.budgets:
        layers = f"layers have {min(settings.budgets)} to {max(settings.budgets)} slots"
        new = f"at most T = {settings.segment} new tokens"
        memory += f"{below}this is the mean; {layers} and {new}"
    elif settings.mem and cache.compressed:
        waiting = f"{counted(cache.size - settings.mem, 'token')} since the last compression"
        most = f"at most T = {settings.segment}"
        memory += f"{below}these are {settings.mem} slots, and {waiting} ({most})"
    elif settings.mem:
        memory += f"{below}nothing is compressed up to M + T = {settings.room:,} entries"
    full = f"the full cache would hold {cache.full_nbytes:,}"
    return f"{memory}\nkey/value cache  {cache.nbytes:,} bytes; {full}"


def adapter_of_page(config: GenerateConfig) -> Path | None:
    """The run whose memory a page shows; None if it shows methods alone. Raises
    UserError."""
    run = config.adapter
    if not run and not config.method:
        run = TINY
        if config.model.resolve() != TINY:
            remedy = f"name a memory: {SUGGESTED}, or --adapter RUN after train.py"
            raise UserError(f"--show-memory {config.page}: this base has no adapter; {remedy}")
    if run:
        refuse_for_page(read_adapter(run).settings)
    return run


def methods_of_page(
    config: GenerateConfig, model: Llama, run: Path | None
) -> list[AdaptedLlama]:
    """Each --method on one base. Without --mem they have the adapter's M and T."""
    mem, segment = config.mem or 512, config.segment
    if run and not config.mem:
        settings = read_adapter(run).settings
        mem, segment = settings.mem, segment or settings.segment
    models = []
    for method in config.method:
        adapted = untrained(model, method, mem, segment or mem, **config.changes)
        refuse_for_page(adapted.settings)
        models.append(adapted)
    return models


def memories_of_page(
    config: GenerateConfig, machine: Machine
) -> Iterator[tuple[str, AdaptedLlama]]:
    """Names and models: each --method, then the adapter. The methods share a base. Delete a
    model before asking for the next: a GPU may hold just one."""
    run = adapter_of_page(config)
    if config.method:
        if run:  # it reads last, but one of another base is refused now
            load_adapter(run, load_base(config.model, machine.dtype, machine.device)[0])
        model, _ = load_base(config.model, machine.dtype, machine.device)
        models = methods_of_page(config, model, run)
        yield from zip(config.method, models)
        del model, models
    if run:
        adapted = load_adapter(run, load_base(config.model, machine.dtype, machine.device)[0])
        yield f"{adapted.settings.method}, adapter {run.resolve().name}", adapted


def make_page(config: GenerateConfig, machine: Machine, text: str) -> None:
    """Read the text with each memory, and write down what its slots hold on the way."""
    tokenizer = Tokenizer(config.model)
    ids = encode_prompt(config, text, tokenizer)
    prompt = torch.tensor([ids], device=machine.device)
    records = []
    with created(config.page):
        for name, adapted in memories_of_page(config, machine):
            settings, layers = adapted.settings, range(adapted.model.config.n_layers)
            warn_if_too_long(settings, len(ids))
            cache = adapted.cache(partial(TracedMemory, layers=layers))
            with machine.precision():
                logits = prefill(adapted.model, prompt, cache, settings.segment)
            following = tokenizer.piece(sample(logits[0, : tokenizer.vocab_size], temperature=0))
            counts = {kind: getattr(settings, kind) for kind in KINDS}
            records.append(page_record(name, cache, counts, following))
            print(f"{name}\n{figures(cache, settings)}", file=sys.stderr)
            del adapted, cache
        if config.adapter:
            # The adapter was the last to read, and comes first.
            records.insert(0, records.pop())
        write_page(config.page, *token_texts(ids, tokenizer), records)
    print(f"open {config.page} in a browser", file=sys.stderr)


def print_text(new: Iterator[int], tokenizer: Tokenizer, ids: list[int]) -> None:
    """Print the new tokens behind `ids` as they come."""
    for piece in as_text(new, tokenizer, ids):
        print(piece, end="", flush=True)
    print(flush=True)


def main() -> None:
    config = parse()
    machine = prepare(config.device, config.dtype, config.seed)
    text = read_prompt(config.prompt)
    if config.page:
        make_page(config, machine, text)
        return
    model, tokenizer = load_base(config.model, machine.dtype, machine.device)
    ids = encode_prompt(config, text, tokenizer)
    adapted = model_with_memory(config, model)
    settings = adapted.settings
    cache = empty_cache(config, adapted)
    if config.save_memory or config.load_memory:
        owner = identity(adapted) | {"adapter": checksum(adapted.trained(), str(machine.dtype))}
    if config.load_memory:
        load_memory(config.load_memory, cache, owner, machine.device)
        # The question continues a text, so it has no BOS. Sentencepiece still puts a blank
        # first.
        ids = ids[len(tokenizer.prefix) :]
    answer = 0 if config.save_memory or config.layer_and_head else config.max_new_tokens
    warn_if_too_long(settings, cache.seen + len(ids) + answer)

    saved = created(config.save_memory) if config.save_memory else nullcontext()
    with saved, machine.precision():
        prompt = torch.tensor([ids], device=machine.device)
        logits = prefill(model, prompt, cache, settings.segment)
        if config.save_memory:
            save_memory(config.save_memory, cache, owner)
        elif config.layer_and_head:
            print(*describe_slots(cache, *config.layer_and_head, ids, tokenizer), sep="\n")
        else:
            most, temperature = config.max_new_tokens, config.temperature
            print_text(decode(model, tokenizer, logits, cache, most, temperature), tokenizer, ids)
    print(figures(cache, settings), file=sys.stderr)


if __name__ == "__main__":
    run_program(main)
