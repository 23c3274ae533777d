"""The command line of train.py: its flags, and what it refuses before a run begins."""

import os
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from lococo import METHODS, Settings
from support.command_line import Parser, at_least, named_path
from support.files import UserError
from support.programs.settings import refuse_not_compressed, refuse_not_fitted

# What a run that goes on takes beside --resume: more steps, and where things are now.
OF_A_RESUMED_RUN = ("steps", "model", "data", "held_out", "device")

RECIPES_VALUE = "where no default is named, the recipe's value holds: see the end"


def described(values: dict) -> str:
    """Values of a configuration in a line, without those that are not set."""
    chosen = {name: value for name, value in values.items() if value not in (None, [], "")}
    return ", ".join(f"{name} {value}" for name, value in chosen.items())


def make_parser(doc: str, recipes: dict[str, Any]) -> Parser:
    """A flag that is not given is None; then the recipe decides. `recipes` has a
    TrainConfig for each name. Those after the first are described by what they change of
    it."""
    parser = Parser(doc, mem="the recipe's", segment="as --mem; 512 in the paper's recipes")
    parser.add_seed()
    parser.set_defaults(model=None, seed=None)
    parser.memory.add_argument(
        "--method", choices=METHODS, metavar="METHOD",
        help="what the slots hold, one of %(choices)s (default: the recipe's); "
             "docs/paper-to-code.md says what each keeps",
    )
    add_text_flags(parser)
    add_training_flags(parser, recipes)
    add_output_flags(parser)
    first, *others = (asdict(config) for config in recipes.values())
    lines = ["what a recipe sets, and what others change of it:"]
    lines += [described(first | {"model": None})]
    for other in others:
        lines += [described({name: other[name] for name in other if other[name] != first[name]})]
    parser.epilog = "\n".join(fill(line, 78, subsequent_indent="  ") for line in lines)
    return parser


def add_text_flags(parser: Parser) -> None:
    add = parser.add_argument_group("text", RECIPES_VALUE).add_argument
    add("--data", type=named_path, nargs="+", metavar="PATH",
        help='files, folders, .jsonl of {"text": ...} (default: Python\'s own library)')
    add("--held-out", type=named_path, nargs="+", metavar="PATH",
        help="texts to score; all of --data trains then (default: a tenth of --data)")
    add("--seq", type=at_least(2), metavar="L",
        help="tokens of a sequence: the trained length")
    add("--facts", type=at_least(0), metavar="N",
        help="facts that are written into each sequence")


def add_training_flags(parser: Parser, recipes: dict[str, Any]) -> None:
    positive, number = at_least(1), at_least(0, float)
    add = parser.add_argument_group("training", RECIPES_VALUE).add_argument
    add("--recipe", choices=recipes,
        help="what is not given by flags (default: inference)")
    add("--lora-rank", type=at_least(0), metavar="RANK",
        help="of LoRA; with 0 only the convolutions train (inference mode)")
    add("--lr", type=number, metavar="RATE",
        help="learning rate of LoRA, embeddings and norms")
    add("--conv-lr", type=number, metavar="RATE",
        help="learning rate of the convolutions")
    add("--steps", type=positive,
        help="optimizer steps; the rates fall linearly towards 0")
    add("--batch", type=positive, metavar="N", help="sequences per step")
    add("--micro-batch", type=positive, metavar="N", help="sequences in memory at once")
    add("--bptt", type=positive, metavar="N", help="segments that the gradient spans")
    add("--recompute", action="store_true", default=None,
        help="compute activations again in the backward pass: less memory, more time")


def add_output_flags(parser: Parser) -> None:
    add = parser.add_argument_group("scoring and output", RECIPES_VALUE).add_argument
    add("--score-tokens", type=at_least(0), metavar="N",
        help="tokens of held-out documents to score; 0: none")
    add("--out", type=named_path, metavar="RUN",
        help="new directory of the run (default: in runs/)")
    add("--resume", type=named_path, metavar="RUN",
        help="go on with a run; it takes a new number of --steps, and --model, --data, "
             "--held-out and --device where these are others now")


def flags_given(parser: Parser, line: list[str] | None) -> dict:
    """The flags that a command line gives (None: the program's own), by the names of
    TrainConfig's fields. Paths become strings that mean the same in any folder."""
    flags = vars(parser.parse_args(line))
    given = {name: value for name, value in flags.items() if value is not None}
    for name, value in given.items():
        if isinstance(value, Path):
            given[name] = os.path.realpath(value)
        elif name in ("data", "held_out"):
            given[name] = [os.path.realpath(path) for path in value]
    others = given.keys() - {"resume", *OF_A_RESUMED_RUN}
    if "resume" in given and others:
        listed = " ".join(sorted(flag_of(name) for name in others))
        changeable = ", ".join(map(flag_of, OF_A_RESUMED_RUN))
        remedy = f"beside --resume only {changeable} may be given"
        parser.error(f"{listed}: a run that is resumed keeps its own; {remedy}")
    return given


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def check_use(settings: Settings) -> None:
    """Raises UserError if there is nothing to train, or if texts are so short that the
    convolutions would not be used."""
    refuse_not_fitted(settings)
    if not settings.merged and not settings.lora_rank:
        chosen = f"--lora-rank 0 --method {settings.method}"
        remedy = "take --lora-rank 8, or a method with merged slots"
        raise UserError(f"{chosen}: there is nothing to train; {remedy}")
    if settings.merged:
        refuse_not_compressed("--seq", settings.length, settings)
