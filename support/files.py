"""Files: the error that a user sees, weights of any kind, and files that the programs
write."""

import hashlib
import json
import os
import pickle
import re
from pathlib import Path
from typing import Any, Callable
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


class UserError(Exception):
    """A mistake that the user can fix. Programs print it and exit with code 2."""


UTF8 = "utf-8-sig"  # of all text files, whatever the locale says; a byte order mark is no text

# What taking values from a JSON file of another program can raise.
FOREIGN = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError)

# What a library can raise that reads damaged weights. A .bin file is a pickle, and a
# damaged pickle can raise nearly anything. Code of ours should not run under this, as its
# bugs would be hidden.
DAMAGED = (RuntimeError, OSError, ValueError, LookupError, EOFError, AssertionError, TypeError,
           AttributeError, ArithmeticError, pickle.UnpicklingError, SafetensorError)

# What writing a file can raise: the system, safetensors, and torch.save on a full disk.
CANNOT_WRITE = (OSError, SafetensorError, RuntimeError)


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a type for a full GPU. For a full main memory it raises a bare
    RuntimeError, so that words have to tell it: "not enough memory: you tried to allocate
    ..."."""
    if isinstance(error, RuntimeError) and "you tried to allocate" in str(error):
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


def read_text(file: Path, encoding: str = UTF8) -> str:
    """The text of a file, with the line breaks that it has."""
    return file.read_bytes().decode(encoding)


def read_json(file: Path, object_hook: Callable[[dict], dict] | None = None) -> Any:
    try:
        return json.loads(read_text(file), object_hook=object_hook)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: cannot be read as JSON ({why(file, error)})") from None


def read_given(file: Path) -> Any:
    """A configuration of another program. A key whose value is null counts as missing."""
    return read_json(file, lambda keys: {k: v for k, v in keys.items() if v is not None})


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .bin or .pth file by name, mapped into memory."""
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        return {name: tensor.detach() for name, tensor in content.items()}
    except DAMAGED as error:
        raise UserError(f"{file}: cannot be read as weights ({why(file, error)})") from None


def why(file: Path, error: Exception) -> str:
    """The first sentence of what a library says about a file that it cannot read. About a
    pointer of Git LFS, which is a small text in the place of a file, it would mislead."""
    if not isinstance(error, OSError):  # else there is no file, or none that may be read
        with open(file, "rb") as content:
            if content.read(99).startswith(b"version https://git-lfs"):
                return "it is a pointer of Git LFS; to fetch the file itself run: git lfs pull"
    sentence = " ".join(str(error).split()).split(". ")[0]
    return f"{type(error).__name__}: {sentence:.150}"


WHICH_MODELS = "docs/models.md says which models load, and how to download one"


def refuse_missing_model(path: Path) -> None:
    """Raises UserError if there is no such directory of a model. A name such as a/b may be
    that of a hub."""
    if path.is_file():
        raise UserError(f"{path}: this is a file; name the folder of the model")
    if not path.is_dir():
        remedy, name = WHICH_MODELS, os.path.relpath(path)
        if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
            remedy += f"; from the hub: hf download {name} --local-dir {path.name}"
        raise UserError(f"{path}: there is no such folder of a model; {remedy}")


def refuse_not_finite(t: Tensor) -> None:
    """Raises UserError if what a model computes has infinities or NaN."""
    if not t.isfinite().all():
        no_good = "its weights or its adapter are no good"
        raise UserError(f"the model's output is not finite; {no_good}")


def checksum(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        column = t.detach().cpu().reshape(-1, 1).contiguous()  # so that `view` always can
        digest.update(column.view(torch.uint8).numpy())
    return digest.hexdigest()


def write_file(file: Path, tensors: dict[str, Tensor], **about) -> None:
    """A safetensors file with a JSON object and a checksum. One key of metadata: the
    order of several would differ between runs."""
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    text = json.dumps(about)
    metadata = {"content": json.dumps([text, checksum(tensors, text)])}
    write_whole(file, lambda beside: save_file(tensors, beside, metadata))


def write_whole(file: Path, save: Callable[[Path], None]) -> None:
    """Write a file by save(path): under a name that no other process has, synced, then
    renamed."""
    whole = Path(os.path.realpath(file))  # a link stays one
    beside = whole.with_name(f"{whole.name}.{uuid4().hex[:8]}.part")
    try:
        save(beside)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, whole)
    except CANNOT_WRITE as error:
        raise UserError(f"{file}: cannot be written ({error}); nothing is changed") from None
    finally:
        beside.unlink(missing_ok=True)  # after an error or Ctrl-C; else it has its name by now


def write_text(file: Path, text: str) -> None:
    """In UTF-8, whatever the locale says."""
    write_whole(file, lambda beside: beside.write_text(text, "utf-8"))


def write_json(file: Path, content: Any) -> None:
    write_text(file, as_json(content, indent=1) + "\n")


def as_json(content: Any, indent: int | None = None) -> str:
    """JSON has no infinity and no NaN: these become null."""
    plain = json.loads(json.dumps(content), parse_constant=lambda word: None)
    return json.dumps(plain, indent=indent)


def read_file(file: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a file of `write_file` by name, mapped into memory, and its JSON
    object."""
    if not file.exists():
        raise UserError(f"{file}: there is no such file")
    if file.is_dir():
        raise UserError(f"{file}: this is a folder; name a file")
    try:
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
            text, written = json.loads((handle.metadata() or {})["content"])
    except DAMAGED as error:
        reason = why(file, error)
        other = "damaged, or not made by this version of the programs"
        raise UserError(f"{file}: {other} ({reason})") from None
    if checksum(tensors, text) != written:
        remedy = "take another copy, or make it anew"
        raise UserError(f"{file}: damaged, its content does not have its checksum; {remedy}")
    return tensors, json.loads(text)
