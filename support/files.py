"""Files: the error that a user sees, weights of any kind, and files that the programs write."""

import hashlib
import json
import os
import pickle
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor


class UserError(Exception):
    """A mistake that the user can fix. Programs print it and exit with code 2."""


UTF8 = "utf-8-sig"  # of all text files, whatever the locale says; a byte order mark is no text

# What reading a damaged or foreign file can raise.
DAMAGED = (RuntimeError, OSError, ValueError, LookupError, EOFError, AssertionError, TypeError,
           AttributeError, ArithmeticError, pickle.UnpicklingError, SafetensorError)  # fmt: skip


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has a type for a full GPU. For a full main memory it raises a bare RuntimeError, so
    that words have to tell it: "not enough memory: you tried to allocate ..."."""
    if isinstance(error, RuntimeError) and "you tried to allocate" in str(error):
        return True
    return isinstance(error, (MemoryError, torch.OutOfMemoryError))


def read_text(file: Path, encoding: str = UTF8) -> str:
    """The text of a file, with the line breaks that it has."""
    return file.read_bytes().decode(encoding)


def read_json(file: Path) -> Any:
    return json.loads(read_text(file))


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
    """What a library says about a file that it cannot read, in one line. To a pointer of Git LFS it
    says something that misleads."""
    if file.is_file() and file.stat().st_size < 1000:
        if file.read_bytes().startswith(b"version https://git-lfs"):
            return "it is a pointer of Git LFS; run: git lfs pull"
    sentence = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}: {sentence:.150}"


def checksum(tensors: dict[str, Tensor], about: str) -> str:
    digest = hashlib.sha256(about.encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        column = t.detach().cpu().reshape(-1, 1).contiguous()  # so that `view` always can
        digest.update(column.view(torch.uint8).numpy())
    return digest.hexdigest()


def write_file(file: Path, tensors: dict[str, Tensor], **about) -> None:
    """A safetensors file with a JSON object and a checksum. One key of metadata: the order of
    several would differ between runs."""
    tensors = {name: t.detach().contiguous() for name, t in tensors.items()}
    text = json.dumps(about)
    metadata = {"content": json.dumps([text, checksum(tensors, text)])}
    write_whole(file, lambda beside: save_file(tensors, beside, metadata))


def write_whole(file: Path, save: Callable[[Path], None]) -> None:
    """Write a file by save(path): under a name that no other process has, synced, then renamed."""
    beside = file.with_name(f"{file.name}.{uuid4().hex[:8]}.part")
    try:
        save(beside)
        with open(beside, "rb") as written:
            os.fsync(written.fileno())
        os.replace(beside, file)
    except DAMAGED as error:
        beside.unlink(missing_ok=True)
        raise UserError(f"{file}: cannot be written ({error}); nothing is changed") from None


def write_text(file: Path, text: str) -> None:
    write_whole(file, lambda beside: beside.write_text(text, "utf-8"))


def write_json(file: Path, content: Any) -> None:
    """JSON has no infinity and no NaN: these become null."""
    plain = json.loads(json.dumps(content), parse_constant=lambda word: None)
    write_text(file, json.dumps(plain, indent=1) + "\n")


@contextmanager
def created(file: Path) -> Iterator[None]:
    """Take a file's name, so that no other process takes it while its content is made; give it back
    if that fails. Raises UserError."""
    try:
        file.open("x").close()
    except FileExistsError:
        raise UserError(f"{file}: there is such a file already; name another one") from None
    try:
        yield
    except BaseException:
        file.unlink()
        raise


def read_file(file: Path) -> tuple[dict[str, Tensor], dict]:
    """The tensors of a file of `write_file` by name, mapped into memory, and its JSON object."""
    try:
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}
            text, written = json.loads((handle.metadata() or {})["content"])
    except DAMAGED as error:
        raise UserError(f"{file}: not there, damaged or another version's ({error})") from None
    if checksum(tensors, text) != written:
        raise UserError(f"{file}: damaged, its content does not have its checksum")
    return tensors, json.loads(text)
