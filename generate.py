"""Continue a prompt of any length from a memory of fixed size.

    python generate.py --prompt file.txt                          # the embedded model and adapter
    python generate.py --prompt - --adapter runs/my-run < book.txt
    python generate.py --prompt file.txt --model Llama-2-7b-hf    # no adapter: the plain model, full cache

The prompt is read segment by segment; before a segment that would not fit into M + T entries, what is held is
compressed into M slots; while decoding, when a whole segment has gathered. The text goes to standard output, the
figures to standard error.
"""

import sys
import time
from pathlib import Path
from typing import Iterator

import torch
from torch import Tensor

from eval_ppl import TINY, Parser, exit_on_user_error, load_base, precision, refuse_counts, untrained
from lococo import LoCoCo, prefill
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
    """Token ids that follow the prompt in the cache, whose last logits are given, until EOS or `most`."""
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


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--prompt", required=True, help="a text file, or - for standard input")
    add("--adapter", metavar="RUN", help="run directory of train.py (default: the embedded one for tiny/)")
    add("--full", action="store_true", help="keep the full cache, however long the text")
    add("--method", metavar="NAME", help="a training-free method instead of an adapter (streaming, h2o)")
    parser.add_counts()
    add("--max-new-tokens", type=int, default=200)
    add("--temperature", type=float, default=0.8, help="0 is greedy")
    add("--top-p", type=float, default=0.95)
    add("--num-samples", type=int, default=1)
    args = parser.parse_args()
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
    text = read_prompt(args.prompt)
    model, tokenizer = load_base(args)
    prompt = tokenizer.encode(text)
    adapter = args.adapter or (None if args.model or args.method else TINY)
    if args.method:
        lococo = LoCoCo(model, untrained(args, args.method, len(prompt) + args.max_new_tokens))
    else:
        lococo = LoCoCo.load(adapter, model) if adapter else None

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if lococo is None or args.full:
        say(f"full cache ({'--full' if args.full else 'no adapter'}): every key and value is kept")
        cache, segment, slots, trained = KVCache(model.config.n_layers), 512, "no limit", "the model was pretrained"
        length = round(model.config.context * model.config.rope_scale)  # interpolation stretches it
    else:
        s = lococo.settings
        cache, segment, length, trained = lococo.cache(), s.segment, s.length, "the adapter was trained"
        slots = "no limit" if s.mem is None else f"{s.mem} slots"
    if len(prompt) > length:
        say(f"warning: the prompt has {len(prompt):,} tokens, {trained} on {length:,}: expect worse text")

    begun = time.time()
    with precision(args):
        logits = prefill(model, torch.tensor([prompt], device=args.device), cache, segment)
        logits[0, 0].item()  # a GPU has finished the prompt when this returns
        filled, count = time.time(), 0
        for number in range(args.num_samples):
            if args.num_samples > 1:
                say(f"--- sample {number + 1}")
            branch, text = cache.fork(), TextStream(tokenizer, prompt)  # the prompt is read once
            for token in decode(model, tokenizer, logits, branch, args.max_new_tokens, args.temperature, args.top_p,
                                args.seed + number):  # fmt: skip
                print(text.add(token), end="", flush=True)
                count += 1
            print(text.rest().rstrip("\ufffd"), flush=True)  # the limit may fall inside a character
    done = time.time()
    full = branch.nbytes // branch.held * branch.seen
    say(f"prompt           {len(prompt):,} tokens in {-(-len(prompt) // segment)} segments of {segment}")
    say(f"memory           {slots}; {branch.held:,} entries held after {branch.seen:,} tokens")
    say(f"key/value cache  {branch.nbytes:,} bytes; the full cache would hold {full:,}")
    say(f"tokens/s         prefill {len(prompt) / (filled - begun):,.0f}, decode {count / (done - filled):,.0f}")


if __name__ == "__main__":
    exit_on_user_error(main)
