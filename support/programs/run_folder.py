"""The folder of a run: its log, which locks the folder, and the state to resume from."""

import fcntl
import os
from itertools import count, takewhile
from pathlib import Path
from typing import Iterator, NamedTuple, TextIO

import torch
from torch import Tensor
from torch.optim import Optimizer

from lococo import AdaptedLlama
from support.programs.adapter import check_settings
from support.files import UserError, read_file, write_file
from support.processes import RANK
from support.text import parsed

# --- The folder -------------------------------------------------------------------------

HALF = "*.safetensors.*.part"  # what a power cut leaves of a state or an adapter


def is_used(out: Path) -> bool:
    """Whether a folder has files. Those of a run that never began do not count: an empty
    log, and half of a first state."""
    files = set(out.glob("*")) - set(out.glob(HALF))
    return any(f.name != "log.jsonl" or f.stat().st_size for f in files)


def claim(out: str, usual: Path, steps: int | None) -> tuple[Path, TextIO]:
    """The folder of a run and its log, which is locked, so that no other process writes
    there. Without `out` it is `usual`, usual-2, usual-3 ..., the first that is not used.

    `steps` are those that a run to resume has done, None at a start. Processes other
    than the first get a log that nobody keeps. Raises UserError.
    """
    if RANK > 0:
        return Path(out or usual), open(os.devnull, "a")
    for folder in [Path(out)] if out else new_folders(usual):
        if steps is None and is_used(folder):
            sentence = "it is there already; name a new folder, or go on with it by --resume"
            raise UserError(f"--out {os.path.relpath(folder)}: {sentence}")
        log = lock_log(folder)
        if log:
            forget_crash(folder, steps or 0)
            return folder, log
    sentence = "another process trains in this folder; wait until it ends"
    raise UserError(f"{os.path.relpath(out)}: {sentence}")


def new_folders(usual: Path) -> Iterator[Path]:
    for number in count(1):
        folder = usual if number == 1 else usual.with_name(f"{usual.name}-{number}")
        if not is_used(folder):
            yield folder


def lock_log(out: Path) -> TextIO | None:
    """The log in a run's folder, locked until it is closed. None if another process has
    it."""
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / "log.jsonl", "a", encoding="utf-8", newline="\n")
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return log


def forget_crash(out: Path, steps: int) -> None:
    """Remove what a crash left: half a file, half a line, lines of steps that are taken
    again. The log has a line for each step."""
    for part in out.glob(HALF):
        part.unlink()
    with open(out / "log.jsonl", "r+b") as log:
        # An editor may have left a whole line without its line break.
        kept = [*takewhile(parsed, log.readlines()[:steps])]
        log.truncate(sum(map(len, kept)))
        if kept and not kept[-1].endswith(b"\n"):
            log.seek(0, os.SEEK_END)
            log.write(b"\n")


# --- The state --------------------------------------------------------------------------


class State(NamedTuple):
    """What state.safetensors holds."""

    step: int  # steps done
    config: dict  # fields of TrainConfig
    owner: dict  # the settings, and checksums of model and text
    scores: dict  # rows of figures, by the name of a memory
    tensors: dict[str, Tensor]  # what trains, and AdamW's moments


def write_state(
    out: Path, adapted: AdaptedLlama, optimizer: Optimizer, config: dict, owner: dict,
    scores: dict, step: int,
) -> None:
    """Write all that changes during a run. Nothing in a step is random, so that a run which
    goes on from here ends with the same bytes."""
    tensors = {}
    for name, p in adapted.trained().items():
        tensors[f"value {name}"] = p
        for key, moment in optimizer.state[p].items():
            tensors[f"{key} {name}"] = moment
    if RANK == 0:
        about = dict(step=step, config=config, owner=owner, scores=scores)
        write_file(out / "state.safetensors", tensors, **about)


def read_state(out: Path, names: list[str]) -> State:
    """The state of a run, whose configuration must have these names. Raises
    UserError."""
    run = os.path.relpath(out)
    if not (out / "state.safetensors").exists():
        sentence = "there is no run to go on with; name a folder that train.py has made"
        if (out / "log.jsonl").exists() and not is_used(out):
            sentence = "this run has not begun; give its command again, without --resume"
        raise UserError(f"--resume {run}: {sentence}")
    tensors, about = read_file(out / "state.safetensors")
    about["tensors"] = tensors
    if about.keys() != {*State._fields} or about["config"].keys() != {*names}:
        other = "made by another version of this program; start a new run"
        raise UserError(f"--resume {run}: {other}")
    check_settings(out, about["owner"]["settings"])
    return State(**about)


@torch.no_grad()
def restore(
    out: Path, state: State, owner: dict, adapted: AdaptedLlama, optimizer: Optimizer
) -> None:
    """Go on from a state. Raises UserError if the model, the text or the settings, which
    `owner` has, are not those that the run began with."""
    names = {"base": "model", "text": "text", "settings": "row of lococo.METHODS"}
    changed = [names[key] for key in names if owner[key] != state.owner[key]]
    if changed:
        since = f"its {' and '.join(changed)} changed since it began"
        remedy = "give what it had, or start a new run"
        raise UserError(f"--resume {os.path.relpath(out)}: {since}; {remedy}")
    for name, p in adapted.trained().items():
        p.copy_(state.tensors[f"value {name}"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if f"{key} {name}" in state.tensors:  # not before the first step
                device = "cpu" if key == "step" else p.device
                moment = state.tensors[f"{key} {name}"].to(device, copy=True)
                optimizer.state[p][key] = moment
