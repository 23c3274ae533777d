"""Shared by the tests: a small random model, what a model with a memory reads and writes, computed
by hand, and programs that are run by a line."""

import io
import os
import re
import shutil
import sys
from pathlib import Path

# Before torch is imported, and for the programs that tests start: small models are faster with one
# thread, and adapters are equal to the last bit only if sums have one order.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch

from lococo import AdaptedLlama, Settings
from model import Llama, LlamaConfig, load_llama
from support.programs.adapter import write_adapter
from support.programs.settings import make_settings
from support.command_line import HERE, TINY, run_program
from support.files import UserError
from support.text import PARTS
from support.tokenizer import Tokenizer

sys.path.insert(0, str(HERE / "tools"))  # tests import its programs

FULL = Settings("full", 16, 1024, lora_rank=0)
H2O = Settings("h2o", 16, 1024, heavy=8, recent=8, lora_rank=0)


def settings(method="lococo", mem=8, segment=6, length=40, **changes) -> Settings:
    """Of a small memory."""
    return make_settings(method, mem, segment, length, **{"kernel": 3, "lora_rank": 0} | changes)


@pytest.fixture
def config() -> LlamaConfig:
    """With grouped-query attention: 4 query heads, 2 key/value heads."""
    return LlamaConfig(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, context=64
    )


@pytest.fixture
def model(config) -> Llama:
    torch.manual_seed(0)
    model = Llama(config)
    with torch.no_grad():  # larger than at a training's start, so that mistakes in attention show
        for p in model.parameters():
            p.normal_(std=0.3) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def in_float64():
    """What is made meanwhile is in float64, which hardly rounds."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """An empty working directory, with text in the folder text/, and a token cache of its own."""
    monkeypatch.setattr("support.text.CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):  # enough names that every part has some
        lines = (f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(20))
        (folder / f"{i}.py").write_text("".join(lines))
    yield
    # pytest keeps what is in tmp_path for three runs. To remove so many files then takes minutes.
    shutil.rmtree(folder)


@pytest.fixture
def run(own_folders, monkeypatch, capsys):
    """Run a program with a command line; returns (exit code, stdout, stderr)."""

    def call(program, words, before="--device cpu"):
        words = [word.strip("'") for word in f"{before} {words}".split()]
        monkeypatch.setattr(sys, "argv", [f"{program.__name__}.py", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        try:
            run_program(program.main)
        except SystemExit as stop:
            return stop.code, *capsys.readouterr()
        return 0, *capsys.readouterr()

    return call


@pytest.fixture(scope="session")
def stock(tmp_path_factory) -> Path:
    """A folder with two adapters of 16 slots, each of whose tensors matters, a text in
    another encoding, and two files of budgets, of which one has none."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("stock")
    small = make_settings("learned", 16, 16, 96)
    for name, parts in (("adapter", ["training"]), ("whole", [*PARTS])):
        adapted = AdaptedLlama(load_llama(TINY), small)
        for p in adapted.trained().values():
            p.data += 0.02 * torch.randn_like(p)
        (folder / name).mkdir()
        write_adapter(folder / name, adapted, parts, set())
    (folder / "latin").write_bytes(b"caf\xe9 au lait")
    (folder / "heads.json").write_text('{"budgets": [[8, 8], [8, 8], [4, 4], [12, 12]]}')
    (folder / "tiny.json").write_text('{"slots": 8}')
    return folder


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def refusal(call, path, *parts: str, args=()) -> None:
    """call(path, *args) is refused by a short line that names the path and has all `parts`."""
    with pytest.raises(UserError) as caught:
        call(path, *args)
    sentence = str(caught.value)
    assert sentence.isprintable() and len(sentence.replace(str(path.parent), "")) < 500
    assert all(part in sentence for part in (str(path), *parts)), sentence


def same(a: dict, b: dict) -> bool:
    """Whether these are the same tensors, to the bit."""
    alike = (t.dtype == b[name].dtype and torch.equal(t, b[name]) for name, t in a.items())
    return a.keys() == b.keys() and all(alike)


@torch.no_grad()
def read_by_hand(adapted, ids: list[int]) -> torch.Tensor:
    """Logarithms of the probabilities after each of the ids, (L, V), in float64."""
    cache, x = adapted.cache(), torch.tensor([ids])
    pieces = [adapted.model(s, cache)[0] for s in x.split(adapted.settings.segment, dim=1)]
    return torch.cat(pieces).double().log_softmax(-1)


def nats_by_hand(adapted, rows: torch.Tensor) -> np.ndarray:
    """Of every token after the first of rows (N, L), (N, L - 1)."""
    ps = [read_by_hand(adapted, ids[:-1]) for ids in rows.tolist()]
    return np.array([[-p[t, i].item() for t, i in enumerate(ids[1:])] for p, ids in zip(ps, rows)])


def greedy_by_hand(adapted, ids: list[int]) -> list[int]:
    """Append the 12 likeliest tokens; everything is read again for each."""
    for _ in range(12):
        ids = [*ids, int(read_by_hand(adapted, ids)[-1].argmax())]
    return ids


def cells(out: str) -> dict[str, list[str]]:
    """Of a printed table, the columns of each row by its name."""
    rows = [re.split(" {2,}", line) for line in out.splitlines()]
    return {row[0]: row[1:] for row in rows}
