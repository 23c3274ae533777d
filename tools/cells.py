"""Figures that tools/reproduce.py and tools/real_llama.py make and keep: the cells of their tables.

A cell is named by all that makes it: flags, base, texts, and a checksum of the source files that
compute it. A change of any of these makes another cell, so that a stored figure never answers
another question. A cell is one line of JSON in a file of docs/, with its name, its figures, the
date and the commit. The programs only add cells. Of those at one place of a table the last one
counts. (Commit 18ac226 translated checksums that were stored before it into those of today.)
"""

import fcntl
import hashlib
import json
import os
import platform
import subprocess
import sys
from contextlib import contextmanager, redirect_stdout
from datetime import date
from pathlib import Path
from typing import Iterable, Iterator

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402
from support.command_line import HERE  # noqa: E402
from support.files import as_json, read_text, write_text  # noqa: E402
from support.text import read_rows  # noqa: E402
from support.tokenizer import tokenizer_file  # noqa: E402

# What computes a figure, whichever program asks for it. Beside them is the program itself; this
# file only names and keeps what they compute.
SOURCES = ("model.py", "lococo.py", "train.py", "eval_ppl.py", "support/command_line.py",
           "support/facts.py", "support/files.py", "support/processes.py",
           "support/run_folder.py", "support/text.py", "support/tokenizer.py",
           "support/weights.py",
           "tools/official_code.py", "tools/variants.py")  # fmt: skip

# --- The name of a cell -----------------------------------------------------------------


def checksum_of_files(files: Iterable[Path]) -> str:
    """Of their names, which decide what a text is used for, and of their contents."""
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)} ".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def checksum_of_base(model: Path) -> str:
    """Of all files that are read: configuration, weights in any layout, tokenizer."""
    files = {tokenizer_file(model)}
    for pattern in ("*.json", "*.safetensors", "*.bin", "*.pth"):
        files |= set(model.glob(pattern))
    files -= {model / "adapter.safetensors"}  # tiny/ has one; it is no part of the base
    return checksum_of_files(sorted(files))


def checksum_of_sources(tool: str) -> str:
    return checksum_of_files(HERE / source for source in (*SOURCES, f"tools/{tool}"))


def digest_of(name: dict) -> str:
    """A few letters that stand for a name, or for a part of it."""
    return hashlib.sha256(json.dumps(name).encode()).hexdigest()[:12]


def origin() -> dict:
    """When a cell is made, of which code and on what. The commit has a plus if this tree has
    changed since, other than in the cells themselves."""
    git = ["git", "-C", str(HERE)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    status = [*git, "status", "--porcelain", "--", ".", ":!docs/*.jsonl"]
    changes = subprocess.run(status, capture_output=True, text=True)
    commit = head.stdout.strip() + ("+" if changes.stdout else "")
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return {"date": str(date.today()), "commit": commit, "machine": machine}


# --- Runs of train.py -------------------------------------------------------------------


def train_in(out: Path, line: list[str]) -> None:
    """Train by a command line of train.py, or go on with the run in this folder if there is one."""
    if (out / "adapter.safetensors").is_file():
        return
    again = (out / "state.safetensors").is_file()
    with redirect_stdout(sys.stderr):
        train.main(["--resume", str(out)] if again else [*line, "--out", str(out)])


# --- Stored cells -----------------------------------------------------------------------


def read(file: Path) -> list[dict]:
    """The cells that are stored, the oldest first."""
    return [cell for _, cell in read_rows(file, lambda row: True)] if file.is_file() else []


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block, of any program."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # this unlocks, as does the end of a process


def add(file: Path, cell: dict) -> None:
    """Add a cell. The file is read under a lock, so that no cell of another process is lost, and
    written whole, so that a full disk leaves the old one."""
    file.parent.mkdir(exist_ok=True)
    with locked(file.parent):
        old = read_text(file) if file.is_file() else ""
        write_text(file, f"{old}{as_json(cell)}\n")


def find(file: Path, name: dict) -> bool:
    """Whether the cell of this name is stored."""
    return any(name.items() <= cell.items() for cell in read(file))


def latest(cells: list[dict], *fields: str) -> list[dict]:
    """Of the cells that are alike in these fields the last one. A table is of one base and scores
    one text, which are those of the very last cell; a cell without a checksum may be of any."""
    for file in ("base", "scored"):
        cells = [cell for cell in cells if cell.get(file) in (None, cells[-1].get(file))]
    return list({tuple(cell[field] for field in fields): cell for cell in cells}.values())


# --- Tables in pages --------------------------------------------------------------------


def with_tables(text: str, tool: str, tables: dict[str, str]) -> str:
    """A text in which each of the tables, between two comments, is made anew."""
    end = "<!-- end -->\n"
    for name, table in tables.items():
        start = f"<!-- tools/{tool}: {name} -->\n"
        if start in text:
            before, rest = text.split(start)
            text = before + start + table + end + rest.split(end, 1)[1]
    return text


def write_tables(pages: Iterable[Path], tool: str, tables: dict[str, str]) -> None:
    for page in pages:
        write_text(page, with_tables(page.read_text("utf-8"), tool, tables))
