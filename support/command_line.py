"""The command line of all programs: shared flags, device and dtype, errors as one
sentence."""

import argparse
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NoReturn

import torch

from support.files import FOREIGN, UserError, is_out_of_memory, read_json

HERE = Path(__file__).resolve().parent.parent  # the project's folder
TINY = HERE / "tiny"  # the embedded model and its adapter
HUGE = 2**31 - 1  # the largest number that a flag takes
SIZES = ("mem", "segment", "budgets", "bits")  # flags that give an adapter another memory


def is_tiny(path: Path) -> bool:
    """Whether it is the folder of the embedded model. `Path.resolve` would fail on a link to
    itself, of which a later sentence says what is wrong."""
    return os.path.realpath(path) == str(TINY)


def at_least(least: float, kind: type = int) -> Callable[[str], float]:
    """An argparse type: a number from `least` to HUGE."""

    def convert(text: str) -> float:
        number = kind(text)
        if not number >= least:  # also what is not a number
            raise argparse.ArgumentTypeError(f"{text}: it must be at least {least}")
        if number > HUGE:
            raise argparse.ArgumentTypeError(f"{text}: it must be at most {HUGE}")
        return number

    convert.__name__ = kind.__name__  # for argparse's own sentence: invalid int value
    return convert


def named_path(text: str) -> Path:
    """An argparse type: a file or a folder. An empty name, as an unset variable of the
    shell gives, would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("'': this name is empty; give a file or a folder")
    return Path(text)


def output_file(text: str) -> Path:
    """An argparse type: a file that can be written when the work is done."""
    file = Path(text)
    if file.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: this is a folder; name a file")
    if not file.parent.is_dir():
        none = f"there is no folder {file.parent}; make it first"
        raise argparse.ArgumentTypeError(f"{text}: {none}")
    redirected = text.startswith(("/dev/std", "/dev/fd"))  # whose file has other output, too
    if redirected or (file.exists() and not file.is_file()):
        raise argparse.ArgumentTypeError(f"{text}: this is a stream; name a file")
    if not os.access(os.path.dirname(os.path.realpath(file)), os.W_OK):
        sentence = "nothing can be written there; name another file"
        raise argparse.ArgumentTypeError(f"{text}: {sentence}")
    return file


def new_file(text: str) -> Path:
    """An argparse type: an output file that is not there."""
    file = output_file(text)
    if file.exists():
        there = "there is such a file already; name another one, or remove it"
        raise argparse.ArgumentTypeError(f"{text}: {there}")
    return file


def budgets_file(text: str) -> list[list[int]]:
    """An argparse type: a file of tools/budgets.py. Returns the slots of each layer's
    heads, or for the word "equal" an empty list. Raises UserError."""
    if text == "equal":
        return []
    if not Path(text).is_file():
        raise UserError(f"--budgets {text}: there is no such file")
    try:
        slots = [[int(n) for n in row] for row in read_json(Path(text))["budgets"]]
    except FOREIGN:
        slots = []
    if min(sum(slots, []), default=0) < 1 or len({len(row) for row in slots}) > 1:
        remedy = "it has no lists of budgets, numbers from 1 on; tools/budgets.py makes them"
        raise UserError(f"--budgets {text}: {remedy}")
    return slots


def resume_command(run: Path) -> str:
    """How to go on with a run, as a shell takes it in the folder where the user is."""
    program = "train.py" if Path.cwd() == HERE else str(HERE / "train.py")
    return shlex.join(["python", program, "--resume", os.path.relpath(run)])


def counted(number: int, thing: str) -> str:
    """As "1 document" and "2,048 documents"."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


class PlainParser(argparse.ArgumentParser):
    """It has no flags yet. A mistake in the command line is one sentence."""

    def __init__(self, doc: str):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(description=doc, formatter_class=formatter)

    def error(self, message: str):
        if message.startswith("argument "):  # argparse's "argument --mem: 0: it must ..."
            message = message.removeprefix("argument ").replace(": ", " ", 1)
        self.exit(2, f"{self.prog}: {message}\n")


class Parser(PlainParser):
    """The flags of programs that have a model and a memory. `mem` and `segment` say in
    --help what these flags are by default."""

    def __init__(self, doc: str, mem: str = "that of a run, or 512",
                 segment: str = "that of a run, or as --mem"):
        super().__init__(doc)
        self.machine = self.add_argument_group("model and machine")
        add = self.machine.add_argument
        add("--model", type=Path, default=TINY,
            help="directory of the base model (default: tiny/)")
        add("--device", help="cpu, cuda, cuda:1 ... (default: cuda if there is one)")
        add("--dtype", choices=("float32", "bfloat16", "float16"),
            help="of the base model (default: float32 on a CPU; on a GPU bfloat16, or float16 if "
                 "it has no bfloat16)")
        self.memory = self.add_argument_group("memory")
        add = self.memory.add_argument
        add("--mem", type=at_least(4), metavar="M",
            help=f"slots, from 4 on (default: {mem})")
        add("--segment", type=at_least(1), metavar="T",
            help=f"tokens that enter together (default: {segment})")
        add("--budgets", type=budgets_file, metavar="FILE",
            help="slots of each head, from tools/budgets.py, scaled to M on average; or the "
                 "word equal, for M each (default: the adapter's, or equal)")

    def parse_sizes(self) -> argparse.Namespace:
        """Parse the command line. `sizes` has the flags that change the sizes of a memory."""
        self.memory.add_argument(
            "--bits", type=int, choices=(0, 4, 8),
            help="store keys and values in so many bits; 0: as the model's dtype (default: the "
                 "adapter's, or 0)",
        )
        flags = self.parse_args()
        flags.sizes = {name: vars(flags)[name] for name in SIZES}
        return flags

    def add_seed(self) -> None:
        """For a program in which something is random."""
        add = self.machine.add_argument
        add("--seed", type=at_least(0), default=0, help="of all random numbers (default: 0)")


@dataclass(frozen=True)
class Machine:
    """Where a program computes, and in which numbers."""

    device: str
    dtype: torch.dtype

    def precision(self) -> torch.autocast:
        """Compute in `dtype`; what trains is kept in float32. Weights are converted at each
        use: a cache of them would add up the gradients of segments in `dtype`."""
        device, enabled = torch.device(self.device).type, self.dtype != torch.float32
        return torch.autocast(device, self.dtype, enabled=enabled, cache_enabled=False)


def prepare(device: str | None, dtype: str | None, seed: int = 0) -> Machine:
    """The machine that the flags ask for; None takes the default. Sets the random state,
    too."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError):
        none = "this torch has no such device; try --device cpu"
        raise UserError(f"--device {device}: {none}") from None
    default = "float32" if torch.device(device).type == "cpu" else "bfloat16"
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_bf16_supported(including_emulation=False):  # T4, V100
            default = "float16"
    torch.manual_seed(seed)
    # On a GPU convolutions would round float32 to 10 bits, and slots choose other entries.
    torch.backends.cudnn.allow_tf32 = False
    # A CPU is many times slower with a softmax's tiny weights.
    torch.set_flush_denormal(True)
    return Machine(device, getattr(torch, dtype or default))


def run_program(main: Callable[[], None]) -> None:
    """Run a program. A mistake that the user can fix is one sentence and exit code 2; what
    only a bug of ours can cause is a traceback."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # it is closed, as by the shell's `>&-`
            setattr(sys, name, open(os.devnull, "r+"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal may not have every character
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        if sys.stderr.isatty():  # its ^C does not end the line
            print(file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        os._exit(1)
    except UserError as error:
        end_with(str(error))
    except OSError as error:
        reasons = {
            FileNotFoundError: "there is no such file",
            IsADirectoryError: "this is a folder; name a file",
            FileExistsError: "it is there already; name another place",
            NotADirectoryError: "a part of this name is a file; name another place",
        }
        reason = reasons.get(type(error), error.strerror)
        end_with(f"{error.filename}: {reason}" if error.filename else str(error))
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        end_with("out of memory: try a smaller --mem or --segment; docs/training.md says more")


def end_with(sentence: str) -> NoReturn:
    print(f"{Path(sys.argv[0]).name}: {sentence}", file=sys.stderr)
    sys.exit(2)
