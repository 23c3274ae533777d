"""Continue a prompt of any length from a memory of fixed size.

    python generate.py --prompt file.txt                   # the embedded model and adapter
    python generate.py --prompt - --adapter runs/my-run < book.txt
    python generate.py --prompt file.txt --method streaming --mem 128    # without an adapter

A text that is read once and asked many times. Without a question, --ask reads questions
from standard input, one a line:

    python generate.py --model SmolLM2-135M --method h2o --prompt book.txt --save-memory book
    python generate.py --model SmolLM2-135M --load-memory book --ask "Who tells this story?"
    python generate.py --model SmolLM2-135M --load-memory book --prompt more.txt --save-memory both

The text goes to standard output, the figures to standard error. How it works is in the
functions `prefill` and `decode`. tools/show_memory.py shows what the slots hold.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Callable, Collection, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from lococo import METHODS, AdaptedLlama
from model import KVCache, Llama, load_base
from support.command_line import TINY, Parser, at_least, is_tiny, new_file, prepare
from support.command_line import run_program
from support.chat import Chat, read_chat
from support.files import refuse_not_finite
from support.programs.adapter import load_adapter
from support.programs.usage import print_figures, print_pace, print_peak
from support.programs.saved_memory import Reader, load_memory, named, saving
from support.programs.settings import SUGGESTED, check_slots, method_sizes, refuse_sizes
from support.programs.settings import untrained, warn_if_too_long
from support.prompt import prompt_ids, question_ids, read_prompt
from support.tokenizer import Tokenizer

# --- Decoding ---------------------------------------------------------------------------


@torch.no_grad()
def prefill(
    model: Llama, tokens: Tensor, cache: KVCache, segment: int,
    after: Callable[[], None] = lambda: None,
) -> Tensor:
    """Read tokens (B, L) into the cache by segments, and call `after()` behind each segment.
    Returns float32 logits (B, vocab_size) of what comes next. Raises UserError if these are
    not finite."""
    delay = 2 if sys.stderr.isatty() else 10  # seconds before the bar shows
    bar = tqdm(total=tokens.shape[1], desc="reading", unit=" tokens", leave=False, delay=delay)
    with bar:
        for x in tokens.split(segment, dim=1):
            h = model.hidden(x, cache)
            after()
            bar.update(x.shape[1])
    logits = model.logits(h[:, -1])
    refuse_not_finite(logits)
    return logits


def read_ids(
    adapted: AdaptedLlama, ids: list[int], cache: KVCache, after: Callable = lambda: None
) -> Tensor:
    """Read a text into a cache of the model. Returns the logits of `prefill`."""
    tokens = torch.tensor([ids], device=adapted.model.device)
    return prefill(adapted.model, tokens, cache, adapted.settings.segment, after)


def sample(logits: Tensor, temperature: float) -> int:
    """One token id from logits (vocab_size,); temperature 0 takes the likeliest."""
    if temperature < 1e-4:  # as good as 0; the division could overflow
        return int(logits.argmax())
    return int(torch.softmax(logits.double() / temperature, dim=-1).multinomial(1))


@torch.no_grad()
def decode(model: Llama, tokenizer: Tokenizer, logits: Tensor, cache: KVCache,
           most: int, temperature: float, ends: Collection[int] = ()) -> Iterator[int]:
    """Yield up to `most` token ids that continue the text in the cache. It stops before a
    token that ends the text, or is one of `ends`. `logits` (1, vocab_size) are those
    after the last token that was read."""
    for _ in range(most):
        # Some models pad their vocabulary: logits beyond `vocab_size` belong to no token.
        token = sample(logits[0, : tokenizer.vocab_size], temperature)
        if token in tokenizer.ends or token in ends:
            return
        # It enters the cache before it is handed on, so that the cache has all that was
        # written.
        logits = model(torch.tensor([[token]], device=logits.device), cache)[:, -1]
        refuse_not_finite(logits)
        yield token


def as_text(
    tokens: Iterator[int], tokenizer: Tokenizer, prompt: list[int]
) -> Iterator[str]:
    """Text of tokens as they come behind a prompt, which may be its prefix alone. An
    incomplete character waits, and is dropped if nothing follows."""
    continues = prompt[-1] not in tokenizer.prefix
    return tokenizer.texts(tokens, before=tokenizer.x if continues else [])


# --- The program ------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    parser = Parser(__doc__, mem="the adapter's, or 512",
                    segment="the adapter's, or as --mem")
    parser.add_seed()
    add = parser.add_argument_group("text").add_argument
    add("--prompt", nargs="+", default=[], metavar="FILE",
        help="text files, which are read one after the other; - for standard input")
    add("--ask", nargs="?", const="", metavar="QUESTION",
        help="ask as the model's chat template says; without a question, those of standard input")
    add("--follow-up", action="store_true",
        help="what was asked and answered stays in the memory for the next question")
    add("--special-tokens", action="store_true",
        help="read <|im_start|> and the like in it, as a chat template writes them, as tokens")
    add("--max-new-tokens", type=at_least(1), default=200, metavar="N",
        help="tokens to write (default: 200)")
    add("--temperature", type=at_least(0, float), metavar="NUMBER",
        help="of the softmax over the next token; 0 takes the likeliest (default: 0.8, or 0 with "
             "--ask)")
    add = parser.memory.add_argument
    add("--adapter", type=Path, metavar="RUN",
        help="directory made by train.py or tools/fit_scores.py (default for tiny/: its own)")
    add("--method", choices=METHODS, metavar="METHOD",
        help="instead of an adapter, one without training, of %(choices)s (default for other "
             "models: full); docs/paper-to-code.md says what each keeps")
    add = parser.add_argument_group("output").add_argument
    add("--save-memory", type=new_file, metavar="FILE",
        help="write the memory there, and end")
    add("--load-memory", type=Path, metavar="FILE",
        help="go on from such a memory, with its method and sizes")

    flags = parser.parse_sizes()
    refuse_contradictions(parser, flags)
    if not flags.load_memory:  # whose file names an adapter
        flags.adapter = adapter_of(flags)
    if flags.temperature is None:
        flags.temperature = 0.8 if flags.ask is None else 0.0
    return flags


def refuse_contradictions(parser: Parser, flags: argparse.Namespace) -> None:
    """End with a sentence if a flag is missing, or would be ignored beside another."""
    if not flags.prompt and (flags.ask is None or not flags.load_memory):
        parser.error("give --prompt, or --load-memory with --ask")
    if flags.ask is not None and flags.save_memory:
        parser.error("--ask and --save-memory: save first, then ask with --load-memory")
    if flags.ask == "" and "-" in flags.prompt:
        parser.error("--ask QUESTION: standard input has the text of --prompt -")
    if flags.ask is None and flags.follow_up:
        parser.error("--follow-up: it is for several questions; add --ask")
    sizes = [value for value in flags.sizes.values() if value is not None]
    if flags.load_memory and (flags.method or sizes):
        parser.error("--load-memory: a memory keeps its --method and its sizes; leave them out")
    if flags.adapter and flags.method:
        parser.error(f"--adapter {flags.adapter}, --method {flags.method}: name one of them")


def adapter_of(flags: argparse.Namespace) -> Path | None:
    """The folder of the adapter: the one that is named, or for tiny/ without --method
    its own."""
    if is_tiny(flags.model) and not flags.adapter and not flags.method:
        return TINY
    return flags.adapter


def chosen_model(flags: argparse.Namespace, base: Llama) -> AdaptedLlama:
    """The adapter or the method that the flags name, or else the full cache."""
    if flags.adapter:
        return load_adapter(flags.adapter, base, **flags.sizes)
    sizes = method_sizes(flags, [])
    if flags.method:
        return untrained(base, flags.method, budgets=flags.budgets, **sizes)
    return untrained(base, "full", **sizes)


def reader_of(flags: argparse.Namespace, base: Llama, in_turn: bool) -> Reader:
    """The model and its memory: one that was saved, or an empty one. Raises UserError if
    flags need slots, and the empty one has none."""
    if flags.load_memory:
        return load_memory(flags.load_memory, base, flags.adapter)
    adapted = chosen_model(flags, base)
    if flags.save_memory:  # refused here, before a long text is read
        check_slots(adapted.settings)
    if not adapted.settings.mem:
        refuse_sizes(flags)
    if not flags.adapter and not flags.method:
        memory = "the memory is the full cache, which keeps every token"
        others = f"for 512 slots: {SUGGESTED}"
        print(f"note: no --adapter and no --method: {memory}; {others}", file=sys.stderr)
    return Reader(adapted, adapted.cache(), flags.adapter, in_turn=in_turn)


def continue_text(
    flags: argparse.Namespace, reader: Reader, ids: list[int], tokenizer: Tokenizer
) -> None:
    """Read the text into the memory. Continue it, unless it is to be saved or asked."""
    adapted, cache = reader.adapted, reader.memory
    continues = flags.ask is None and not flags.save_memory
    most = flags.max_new_tokens if continues else 0
    warn_if_too_long(adapted, cache.seen + len(ids) + most)
    logits = fill_memory(flags, reader, ids)
    if continues:
        begun = time.perf_counter()
        new = decode(adapted.model, tokenizer, logits, cache, most, flags.temperature)
        written = print_text(new, tokenizer, ids)
        if written:
            print_pace("writing", written, time.perf_counter() - begun)
    print_figures(cache, adapted.settings)
    print_peak(adapted.model.device)


def fill_memory(flags: argparse.Namespace, reader: Reader, ids: list[int]) -> Tensor:
    """Read the text into the memory, and save this if --save-memory says so. Returns the
    logits of `prefill`."""
    adapted, cache = reader.adapted, reader.memory
    begun = time.perf_counter()
    if flags.save_memory:
        model = flags.model.name
        with saving(flags.save_memory, reader, ids, model) as (rest, keep):
            logits = read_ids(adapted, rest, cache, after=keep)
    else:
        rest = ids
        logits = read_ids(adapted, rest, cache)
    print_pace("reading", len(rest), time.perf_counter() - begun)
    return logits


def print_text(new: Iterator[int], tokenizer: Tokenizer, ids: list[int]) -> int:
    """Print the tokens that continue `ids` as they come. Returns how many there are."""
    written = 0
    for written, piece in enumerate(as_text(new, tokenizer, ids), start=1):
        print(piece, end="", flush=True)
    print(flush=True)
    return written


def answers(
    flags: argparse.Namespace, reader: Reader, chat: Chat | None, tokenizer: Tokenizer
) -> None:
    """Answer the question of --ask, or each line of standard input, as it is written.
    Each question is asked of a copy of the memory, so that answers do not depend on their
    order; with --follow-up the copy takes its place. Ctrl-C ends an answer."""
    memory, in_turn = reader.memory, reader.in_turn
    for question in questions(flags.ask):
        if not flags.ask and not sys.stdin.isatty():
            print(f"> {question}")
        asked = memory.copy()
        ids, ends = question_ids(question, in_turn, chat, tokenizer)
        written = 0
        try:
            logits = read_ids(reader.adapted, ids, asked)
            new = decode(reader.adapted.model, tokenizer, logits, asked, flags.max_new_tokens,
                         flags.temperature, ends)
            written = print_text(new, tokenizer, ids)
            if flags.follow_up:
                memory, in_turn = asked, False
        except KeyboardInterrupt:
            if flags.ask:
                raise
            print(flush=True)
        if written == flags.max_new_tokens:
            print(f"note: cut after --max-new-tokens {written}", file=sys.stderr)


def questions(given: str) -> Iterator[str]:
    """The one that is given, or those of standard input, one a line."""
    if given:
        yield given
        return
    while True:
        if sys.stdin.isatty():
            print("question: ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def main() -> None:
    flags = parse()
    machine = prepare(flags.device, flags.dtype, flags.seed)
    texts = [read_prompt(name) for name in flags.prompt]
    base, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    # A text that will be asked stands in the first turn of a chat, if the base knows chats.
    # With --special-tokens the user has written the turns.
    asks = flags.ask is not None or flags.save_memory
    chat = read_chat(flags.model) if asks else None
    in_turn = chat is not None and not flags.special_tokens
    ids = prompt_ids(
        flags.prompt, texts, tokenizer, flags.special_tokens,
        chat if in_turn else None, continues=flags.load_memory is not None,
    )
    with machine.precision():
        reader = reader_of(flags, base, in_turn)
        reader.texts += tuple(map(named, flags.prompt, texts))
        if ids:
            continue_text(flags, reader, ids, tokenizer)
        if flags.ask is not None:
            if not chat:
                note = "this base has no chat template; questions simply continue the text"
                print(f"note: --model {flags.model}: {note}", file=sys.stderr)
            answers(flags, reader, chat, tokenizer)


if __name__ == "__main__":
    run_program(main)
