"""Figures that programs make and keep: one line of JSON for each cell of a table, in a file of docs/.

A cell is named by all that makes it: flags, base, texts, and a checksum of the source files that
compute it. A change of any of these is another cell, so that a stored figure never answers another
question. Lines are only ever added, so that two programs can make cells at once; of two cells of
the same place in a table the later one counts.
"""

import hashlib
import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))
from support.files import write_text  # noqa: E402

# What computes a figure, whichever program asks for it.
SOURCES = ("model.py", "lococo.py", "train.py", "eval_ppl.py", "support/command_line.py",
           "support/facts.py", "support/files.py", "support/text.py", "tools/official_code.py")  # fmt: skip


def checksum_of_files(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def checksum_of_sources(tool: str) -> str:
    return checksum_of_files([HERE / source for source in (*SOURCES, f"tools/{tool}")])


def checksum_of_base(model: Path) -> str:
    return checksum_of_files(sorted(model.glob("*.json")) + sorted(model.glob("*.safetensors")))


def digest_of(name: dict) -> str:
    """A folder's name for what is named by `name`."""
    return hashlib.sha256(json.dumps(name).encode()).hexdigest()[:12]


def commit(results: Path) -> str:
    """The commit of this tree, with a plus if files other than the results have changed since."""
    git = ["git", "-C", str(HERE)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    changed = [line for line in changes.stdout.splitlines() if not line.endswith(results.name)]
    return head.stdout.strip() + ("+" if changed else "")


def made(results: Path) -> dict:
    """When, of which code and on what a cell is made."""
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return {"date": str(date.today()), "commit": commit(results), "machine": machine}


def read(results: Path) -> list[dict]:
    """The stored cells, the oldest first."""
    if not results.is_file():
        return []
    return [json.loads(line) for line in results.read_text("utf-8").splitlines()]


def add(results: Path, cell: dict) -> None:
    """A line goes to the end of the file in one piece, so that no other program's line is lost."""
    results.parent.mkdir(exist_ok=True)
    with open(results, "a", encoding="utf-8") as file:
        file.write(json.dumps(cell) + "\n")


def with_tables(text: str, tool: str, tables: dict[str, str]) -> str:
    """A text in which each of the tables, between two comments, is made anew."""
    end = "<!-- end -->\n"
    for name, table in tables.items():
        start = f"<!-- tools/{tool}: {name} -->\n"
        if start in text:
            before, rest = text.split(start)
            text = before + start + table + end + rest.split(end, 1)[1]
    return text


def write_tables(pages: list[Path], tool: str, tables: dict[str, str]) -> None:
    for page in pages:
        write_text(page, with_tables(page.read_text("utf-8"), tool, tables))
