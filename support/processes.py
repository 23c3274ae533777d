"""Signals to a process, and the work of many processes that torchrun starts."""

import os
import signal
import sys
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from support.files import UserError


def number_of(variable: str, default: int) -> int:
    """The number that torchrun has put into a variable, or else `default`."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else default


RANK = number_of("RANK", 0)  # of this process; 0 alone prints, scores and writes
WORLD = number_of("WORLD_SIZE", 1)  # processes

# --- Start and end ----------------------------------------------------------------------


def start_process() -> None:
    """Begin a program of many processes, or of one. Process 0 calls `join` when it knows
    that the work can begin: until then it refuses flags and texts, and tokenizes, while
    the others wait here."""
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")
        join()


def join() -> None:
    """Meet the other processes. Returns when all are here."""
    if torch.cuda.is_available():  # choose the one that "cuda" means
        local_rank = number_of("LOCAL_RANK", 0)
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    try:
        dist.init_process_group(timeout=timedelta(days=1))
    except (ValueError, RuntimeError) as error:
        fault = str(error).splitlines()[0]
        remedy = "start them by torchrun, take another MASTER_PORT, or for one process unset "
        remedy += "RANK and WORLD_SIZE"
        raise UserError(f"the processes do not meet ({fault}); {remedy}") from None


def end_together(code: int) -> None:
    """End all processes with this exit code, when all have done their work: process 0
    still scores, and torchrun ends all when one has ended. One process alone goes on if
    the code is 0."""
    if WORLD > 1:
        add_up(torch.zeros(1, device="cpu"))  # returns when all are here
        sys.stdout.flush()
        sys.stderr.flush()
        # At once, as gloo's threads may abort a process that ends in the usual way
        # (PyTorch issue 190489).
        os._exit(code)
    if code:
        sys.exit(code)


# --- Work -------------------------------------------------------------------------------


def share(numbers: range) -> range:
    """The numbers that fall to this process: every WORLD-th, from number RANK on."""
    return numbers[RANK::WORLD]


def add_up(t: Tensor) -> Tensor:
    """The sum of t over all processes, in its place."""
    if WORLD > 1:
        dist.all_reduce(t)
    return t


def start_alike(parameters: Iterable[Tensor]) -> None:
    """All processes start from the parameters of process 0. Their own may differ where
    their random numbers do, on another kind of machine for instance."""
    if WORLD > 1:
        for p in parameters:
            dist.broadcast(p.data, src=0)


# --- Signals ----------------------------------------------------------------------------


@contextmanager
def noted_signals() -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM add their number to the list. A second one ends the process at
    once."""
    noted = []
    numbers = (signal.SIGINT, signal.SIGTERM)

    def note(number: int, frame) -> None:
        noted.append(number)
        for each in numbers:  # the second signal may be the other one
            signal.signal(each, signal.SIG_DFL)
        if RANK == 0:  # a handler may interrupt `print`, and must not call it
            with suppress(OSError):  # the terminal may be gone
                sentence = "this step is finished first; a second signal ends at once"
                os.write(2, f"\n{sentence}\n".encode())

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agreed(noted: list[int]) -> int:
    """The number of a signal, if any process has noted one; else 0."""
    if add_up(torch.tensor(len(noted), device="cpu")) == 0:
        return 0
    return noted[0] if noted else signal.SIGTERM
