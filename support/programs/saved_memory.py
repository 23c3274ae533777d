"""The file of --save-memory: what a memory holds after a text, to go on from there."""

from dataclasses import replace
from pathlib import Path

from lococo import AdaptedLlama, Memory
from support.programs.adapter import identity
from support.files import UserError, checksum, read_file, write_file


def owner(adapted: AdaptedLlama) -> dict:
    """Which base, settings, dtype and adapter a memory belongs to."""
    adapter = checksum(adapted.trained(), str(adapted.model.dtype))
    return identity(adapted) | {"adapter": adapter}


def save_memory(file: Path | str, memory: Memory, adapted: AdaptedLlama) -> None:
    """Write what each layer holds (with budgets, each Part of support/ours/budgets.py), and the
    number of tokens seen, into a file. One of this name is replaced. Raises UserError."""
    memory.check_whole()
    tensors = {}
    for n in range(len(memory.keys)):
        tensors[f"keys {n}"] = memory.to_compress[n].held
        tensors[f"values {n}"] = memory.values[n].held
        if memory.counts_attention:
            tensors[f"scores {n}"] = memory.received[n]
    write_file(Path(file), tensors, seen=memory.seen, owner=owner(adapted))


def load_memory(
    file: Path | str, adapted: AdaptedLlama, positions: str | None = None
) -> Memory:
    """A memory that holds what `save_memory` has written. A text may have been read by slot
    because of its length: if the user says nothing about `positions`, the model goes on as
    the text was read. Raises UserError."""
    tensors, about = read_file(Path(file))
    saved = about.get("owner", {})
    settings = saved.get("settings", {})
    if positions is None and "positions" in settings:
        adapted.settings = replace(adapted.settings, positions=settings["positions"])
    mine = owner(adapted)
    if saved != mine:
        other = [f"{name} {value}" for name, value in settings.items()
                 if value != mine["settings"].get(name) and name != "budgets"]
        what = ", ".join(other) or "other budgets, another adapter or another --dtype"
        if saved.get("base") != mine["base"]:
            what = "another model or adapter"
        raise UserError(f"--load-memory {file}: it was saved with {what}; give the same")
    memory = adapted.cache()
    device = adapted.model.norm.weight.device
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    for n in range(len(memory.keys)):
        kept = [tensors.get(f"{what} {n}") for what in ("keys", "values", "scores")]
        memory.hold(n, *kept)
    memory.seen = about["seen"]
    return memory
