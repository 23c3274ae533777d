"""The file of --save-memory: a memory that has read a text, and what is needed to go on."""

import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Callable, Iterator

import torch

from lococo import AdaptedLlama
from model import KVCache, Llama
from support.ours.ceiling import CeilingMemory
from support.programs.adapter import identity, load_adapter, settings_of
from support.programs.settings import check_slots
from support.files import UserError, checksum, read_file, write_file

REMEDIES = {  # what follows "it was saved with another"
    "base": "model; name its --model",
    "dtype": "--dtype; give the same",
    "adapter": "adapter; name it by --adapter",
    "settings": "version of this program; make it anew by --save-memory",
}


@dataclass
class Reader:
    """A model and its memory of what was read."""

    adapted: AdaptedLlama
    memory: KVCache
    run: Path | None = None  # the folder of the adapter, if there is one
    texts: tuple[str, ...] = ()  # what was read: names, and how the texts begin
    in_turn: bool = False  # whether it stands in the first turn of a chat


def named(name: str, text: str) -> str:
    """A text as --load-memory tells it."""
    return f'{name} ("{" ".join(text[:400].split())[:40]}")'


def owner(adapted: AdaptedLlama) -> dict:
    """Whose memory it is: the base, the settings, the adapter and the dtype."""
    dtype = str(adapted.model.dtype).removeprefix("torch.")
    return identity(adapted) | {"adapter": checksum(adapted.trained(), ""), "dtype": dtype}


def save_memory(file: Path | str, reader: Reader, model: str = "", of: str = "") -> None:
    """Write what each layer holds (with budgets, each Part of support/ours/budgets.py),
    and what is needed to go on. For a memory that is still reading, `of` is a checksum
    of what it reads. A file of this name is replaced. Raises UserError."""
    adapted, memory, run = reader.adapted, reader.memory, reader.run
    check_slots(adapted.settings)
    tensors = {}
    for n in range(len(memory.keys)):
        tensors |= {f"{what} {n}": t for what, t in memory.stored(n).items()}
    about = {"owner": owner(adapted), "run": str(run.resolve()) if run else ""}
    about |= {"texts": reader.texts, "in_turn": reader.in_turn, "of": of}
    about["date"] = datetime.now().isoformat(" ", "minutes")
    about |= {"config": repr(adapted.model.config), "model": model}
    about["counters"] = {name: getattr(memory, name) for name in memory.counters}
    write_file(Path(file), tensors, **about)


def load_memory(file: Path | str, model: Llama, run: Path | None = None) -> Reader:
    """The memory of a file on its base. `run` is where its adapter is now; None: where it
    was. A line on standard error says what was read. Raises UserError."""
    tensors, about = read_file(Path(file))
    refuse_other(file, about, model)
    saved = about["owner"]
    settings = settings_of(Path(file), saved["settings"])
    run = adapter_folder(file, about["run"], run)
    if run:
        sizes = dict(mem=settings.mem, segment=settings.segment, bits=settings.bits)
        adapted = load_adapter(run, model, budgets=settings.budgets, **sizes)
    else:
        adapted = AdaptedLlama(model, settings).eval()
    mine = owner(adapted)
    for name, remedy in REMEDIES.items():
        if saved[name] != mine[name]:
            raise UserError(f"--load-memory {file}: it was saved with another {remedy}")
    memory = adapted.cache()
    fill(memory, tensors, about["counters"], adapted.model.device)
    listed = ", ".join(about["texts"]) or "a text"
    held = f"{memory.seen:,} tokens in {memory.nbytes:,} bytes"
    print(f"memory of {listed}, read {about['date']}: {held}", file=sys.stderr)
    return Reader(adapted, memory, run, tuple(about["texts"]), about["in_turn"])


def refuse_other(file: Path | str, about: dict, model: Llama) -> None:
    """Raises UserError if a file is no memory of a whole text, or not of this model."""
    needed = "counters owner config model run texts in_turn date".split()
    if not about.keys() >= {*needed}:
        other = "this is no memory, or one of an older version"
        raise UserError(f"--load-memory {file}: {other}; make it anew by --save-memory")
    if about.get("of"):
        goes_on = "run the command again that made it"
        raise UserError(f"--load-memory {file}: its text is not read to the end; {goes_on}")
    if about["config"] != repr(model.config):
        made = f"it was saved with another model, {about['model'] or 'unknown'}; name it by --model"
        raise UserError(f"--load-memory {file}: {made}")


def adapter_folder(file: Path | str, was: str, now: Path | None) -> Path | None:
    """The folder of a memory's adapter, None if it has no adapter. Raises UserError."""
    if now and not was:
        raise UserError(f"--adapter {now}: {file} was read without one; leave the flag out")
    if not was:
        return None
    run = now or Path(was)
    if not run.exists():
        gone = f"its adapter was {run}, which is not there"
        raise UserError(f"--load-memory {file}: {gone}; name its place by --adapter")
    return run


def fill(memory: CeilingMemory, tensors: dict, counters: dict, device: torch.device) -> None:
    """Put what was saved into a memory."""
    for n in range(len(memory.keys)):
        own = {name: t.to(device) for name, t in tensors.items() if name.endswith(f" {n}")}
        memory.restore(n, {name.rpartition(" ")[0]: t for name, t in own.items()})
    for name, value in counters.items():
        setattr(memory, name, value)


def go_on(part: Path, memory: CeilingMemory, of: str, device: torch.device) -> None:
    """Fill a memory with what was read before. `of` says what is to be read, and how. Raises
    UserError if something else was begun in this file."""
    tensors, about = read_file(part)
    if about.get("of") != of:
        other = "another text, or another memory, was begun there"
        raise UserError(f"{part}: {other}; remove it, or name another --save-memory")
    fill(memory, tensors, about["counters"], device)
    print(f"going on from {part}, with {memory.seen:,} tokens", file=sys.stderr)


SAVE_EVERY = 60  # seconds


@contextmanager
def saving(
    file: Path, reader: Reader, ids: list[int], model: str
) -> Iterator[tuple[list[int], Callable[[], None]]]:
    """Save a memory in a file once the body of `with` has read a text. Yields the ids
    that are left to read, and a function to call behind each segment. Every minute this
    saves the memory in FILE.part, from where the same command goes on."""
    memory, part = reader.memory, file.with_name(f"{file.name}.part")
    start, end = memory.seen, memory.seen + len(ids)
    # What FILE.part is a part of: these tokens behind these texts, read by this model.
    of = checksum({}, f"{ids} {start} {reader.texts} {owner(reader.adapted)}")
    if part.exists():
        go_on(part, memory, of, reader.adapted.model.device)
    saved = time.monotonic()

    def keep() -> None:
        nonlocal saved
        if time.monotonic() - saved >= SAVE_EVERY and memory.seen < end:
            saved = time.monotonic()
            save_memory(part, reader, model, of)

    try:
        yield ids[memory.seen - start :], keep
    except KeyboardInterrupt:
        if part.exists():
            goes_on = f"the same command goes on from {part}, which is saved each minute"
            print(goes_on, file=sys.stderr)
        raise
    save_memory(file, reader, model)
    part.unlink(missing_ok=True)
    print(f"saved {file}", file=sys.stderr)
