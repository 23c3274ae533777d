"""The folder of a run: one process writes there, and what a crash left behind is removed."""

import fcntl
import json
import os
from itertools import count, takewhile
from pathlib import Path
from typing import Iterator, TextIO

from support.files import FOREIGN, UserError
from support.processes import RANK

HALF = "state.safetensors.*.part"  # what a power cut leaves of a state


def is_used(out: Path) -> bool:
    """Whether a folder has files. Those of a run that never began do not count: an empty log, and
    half of a first state."""
    files = set(out.glob("*")) - set(out.glob(HALF))
    return any(f.name != "log.jsonl" or f.stat().st_size for f in files)


def never_began(out: Path) -> bool:
    return (out / "log.jsonl").is_file() and not is_used(out)


def claim(out: str, usual: Path, steps: int | None) -> tuple[Path, TextIO]:
    """The folder of a run and its log, which is locked, so that no other process writes there.

    Without `out` it is `usual`, usual-2, usual-3 ..., the first that is not used. `steps`: those of
    a run to resume, or None. Processes other than the first get the usual folder, and a log that
    nobody keeps. Raises UserError.
    """
    if RANK > 0:
        return Path(out or usual), open(os.devnull, "a")
    for folder in [Path(out)] if out else new_folders(usual):
        log = lock_log(folder)
        if log and (steps is not None or not is_used(folder)):
            forget_crash(folder, log, steps or 0)
            return folder, log
    if log:
        sentence = "another process has trained in this folder meanwhile; name a new --out"
    elif steps is None:
        sentence = "another process trains in this folder; name a new --out"
    else:
        sentence = "another process trains in this folder; wait until it ends"
    raise UserError(f"{os.path.relpath(out)}: {sentence}")


def new_folders(usual: Path) -> Iterator[Path]:
    for number in count(1):
        folder = usual if number == 1 else usual.with_name(f"{usual.name}-{number}")
        if not is_used(folder):
            yield folder


def lock_log(out: Path) -> TextIO | None:
    """The log in a run's folder, locked until it is closed. None if another process has it."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log.jsonl", "a+", encoding="utf-8", newline="\n")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return log


def forget_crash(out: Path, log: TextIO, step: int) -> None:
    """Remove what a crash left: half a file, half a line, lines of steps that are taken again."""
    for name in (HALF, "adapter.safetensors.*.part"):
        for part in out.glob(name):
            part.unlink()
    log.seek(0)

    def is_kept(line: str) -> bool:
        return line[-1] == "\n" and json.loads(line)["step"] <= step

    kept = takewhile(is_kept, log)
    try:
        log.truncate(sum(len(line) for line in kept))  # each character is a byte
    except FOREIGN as error:
        sentence = f"damaged ({error!r}); move it elsewhere to go on"
        raise UserError(f"{os.path.relpath(log.name)}: {sentence}") from None
