"""The folder of a run: its log, and the state to resume from."""

import json
import os
from contextlib import suppress
from itertools import count, takewhile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from lococo import AdaptedLlama
from support.programs.adapter import settings_of
from support.files import UserError, read_file, read_text, write_file, write_text
from support.processes import RANK
from support.text import parsed

# --- The folder -------------------------------------------------------------------------


def refuse_used(out: str) -> None:
    """Raises UserError if a folder for a new run has files. An empty name is no folder."""
    if out and Path(out).is_dir() and any(Path(out).iterdir()):
        sentence = "it has files already; name a new folder (train.py goes on with a run by --resume)"
        raise UserError(f"--out {os.path.relpath(out)}: {sentence}")


def make_folder(out: str, default: Path) -> Path:
    """The folder of a run: `out`, or if this is empty the first of default, default-2,
    default-3 ... that is not there. Makes it if it is new."""
    if RANK > 0:
        return Path(out or default)
    if out:
        Path(out).mkdir(parents=True, exist_ok=True)
        return Path(out)
    for number in count(1):
        folder = default if number == 1 else default.with_name(f"{default.name}-{number}")
        with suppress(FileExistsError):  # of two runs that start together one makes it
            folder.mkdir(parents=True)
            return folder


def remove_leftovers(out: Path, steps: int) -> None:
    """Remove what a crash left in the folder of a run that has done so many steps: half
    a file, half a line of the log, and lines of steps that will be taken again."""
    if RANK > 0:
        return
    for half in out.glob("*.part"):
        half.unlink()
    log = out / "log.jsonl"
    lines = read_text(log).splitlines()[:steps] if log.exists() else []
    write_text(log, "".join(f"{line}\n" for line in takewhile(parsed, lines)))


# --- The state --------------------------------------------------------------------------


class State(NamedTuple):
    """What state.safetensors holds."""

    step: int  # steps done
    config: dict  # fields of TrainConfig
    owner: dict  # the settings, and checksums of model and text
    scores: dict  # rows of figures, by the name of a memory
    tensors: dict[str, Tensor]  # what trains, and AdamW's moments


def tensors_of(adapted: AdaptedLlama, optimizer: Optimizer) -> dict[str, Tensor]:
    """All that a step changes, by name. They are not copies: the next step changes them.
    Nothing in a step is random, so that a run which goes on from here ends with the
    same bytes."""
    tensors = {}
    for name, p in adapted.trained().items():
        tensors[f"value {name}"] = p
        for key, moment in optimizer.state[p].items():
            tensors[f"{key} {name}"] = moment
    return tensors


def write_state(out: Path, state: State) -> None:
    if RANK == 0:
        about = state._asdict()
        tensors = about.pop("tensors")
        write_file(out / "state.safetensors", tensors, **about)


def write_step(out: Path, state: State, line: dict) -> None:
    """Append the line of a step to the log, and write the state after this step."""
    if RANK > 0:
        return
    with open(out / "log.jsonl", "a", encoding="utf-8", newline="\n") as log:
        log.write(json.dumps(line) + "\n")
        log.flush()
        # After a power cut, too, the log has every step of the state.
        os.fsync(log.fileno())
    write_state(out, state)


def read_state(out: Path, names: list[str]) -> State:
    """The state of a run, whose configuration must have these names. Raises
    UserError."""
    run = os.path.relpath(out)
    if not (out / "state.safetensors").exists():
        sentence = "there is no run to go on with; name a folder that train.py has made"
        raise UserError(f"--resume {run}: {sentence}")
    tensors, about = read_file(out / "state.safetensors")
    about["tensors"] = tensors
    if about.keys() != {*State._fields} or about["config"].keys() != {*names}:
        other = "made by another version of this program; start a new run"
        raise UserError(f"--resume {run}: {other}")
    settings_of(out, about["owner"]["settings"])
    return State(**about)


@torch.no_grad()
def restore(
    out: Path, state: State, owner: dict, adapted: AdaptedLlama, optimizer: Optimizer
) -> None:
    """Bring the model, the optimizer and the log back to a state. Raises UserError if
    the model, the text or the settings, which `owner` has, are not those that the run
    began with."""
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
    remove_leftovers(out, state.step)
