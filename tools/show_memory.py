"""Write a page for a browser that shows what the slots of up to three memories hold while a
text is read.

    python tools/show_memory.py --prompt file.txt --page page.html
    python tools/show_memory.py --prompt file.txt --adapter tiny \\
        --method streaming h2o --page page.html

docs/memory-page.md says how to read it.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from generate import adapter_of, read_ids, sample
from lococo import METHODS, AdaptedLlama
from model import Llama, load_base
from support.command_line import Parser, new_file, prepare, run_program
from support.files import UserError
from support.memory_page import token_texts, write_page
from support.programs.adapter import load_adapter
from support.programs.usage import print_figures, print_pace, print_peak
from support.programs.settings import SUGGESTED, check_slots, method_sizes, untrained
from support.programs.settings import warn_if_too_long
from support.programs.tracing import page_record, traced
from support.prompt import prompt_ids, read_prompt
from support.tokenizer import Tokenizer

Models = dict[str, AdaptedLlama]  # by the name that the page gives them


def parse() -> argparse.Namespace:
    parser = Parser(__doc__, mem="the adapter's, or 512",
                    segment="the adapter's, or as --mem")
    add = parser.add_argument
    add("--prompt", nargs="+", required=True, metavar="FILE",
        help="text files, which are read one after the other; - for standard input")
    add("--special-tokens", action="store_true",
        help="read <|im_start|> and the like in it, as a chat template writes them, as tokens")
    add("--page", type=new_file, required=True, metavar="FILE", help="the page that is written")
    add = parser.memory.add_argument
    add("--adapter", type=Path, metavar="RUN",
        help="directory made by train.py or tools/fit_scores.py (default for tiny/: its own)")
    add("--method", nargs="+", default=[], choices=METHODS, metavar="METHOD",
        help="methods without training, of %(choices)s")
    flags = parser.parse_sizes()
    flags.method = list(dict.fromkeys(flags.method))
    named = [f"--adapter {flags.adapter}"] if flags.adapter else []
    named += flags.method
    if len(named) > 3:
        parser.error(f"{', '.join(named)}: a page shows up to three memories")
    flags.adapter = adapter_of(flags)
    return flags


def models_to_show(flags: argparse.Namespace, base: Llama) -> Models:
    """The adapter and the methods that the flags name, on one base. Beside an adapter the
    methods have its M, T and bits. Raises UserError if there is none, or if one
    cannot be shown."""
    models = {}
    if flags.adapter:
        adapted = load_adapter(flags.adapter, base, **flags.sizes)
        name = f"{adapted.settings.method}, adapter {flags.adapter.resolve().name}"
        models[name] = adapted
    sizes = method_sizes(flags, [*models.values()])
    for method in flags.method:
        models[method] = untrained(base, method, budgets=flags.budgets, **sizes)
    if not models:
        raise UserError(f"no memory is named; take {SUGGESTED}")
    for adapted in models.values():
        check_slots(adapted.settings)
    return models


def show(page: Path, models: Models, ids: list[int], tokenizer: Tokenizer) -> None:
    """Write a page of what each memory holds while the text is read."""
    records = []
    for name, adapted in models.items():
        memory = traced(adapted)
        begun = time.perf_counter()
        logits = read_ids(adapted, ids, memory)
        print(name, file=sys.stderr)
        print_pace("reading", len(ids), time.perf_counter() - begun)
        print_figures(memory, adapted.settings)
        likeliest = sample(logits[0, : tokenizer.vocab_size], temperature=0)
        records.append(page_record(name, memory, tokenizer.piece(likeliest)))
    write_page(page, *token_texts(ids, tokenizer), records)
    print_peak(logits.device)
    print(f"open {page} in a browser", file=sys.stderr)


def main() -> None:
    flags = parse()
    machine = prepare(flags.device, flags.dtype)
    texts = [read_prompt(name) for name in flags.prompt]
    base, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    ids = prompt_ids(flags.prompt, texts, tokenizer, flags.special_tokens)
    models = models_to_show(flags, base)
    for adapted in models.values():
        warn_if_too_long(adapted, len(ids))
    with machine.precision():
        show(flags.page, models, ids, tokenizer)


if __name__ == "__main__":
    run_program(main)
