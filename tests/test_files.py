"""support/files.py: files of our own are written whole, and a damaged one is noticed."""

import json
import math

import torch
from conftest import refusal, same
from safetensors.torch import save_file

from support.files import read_file, read_json, write_file, write_json

TENSORS = {
    "a.b": torch.randn(3, 5), "steps": torch.tensor(7.0), "none": torch.empty(0, 3),
    "half": torch.randn(4, 3).bfloat16().T, "every other": torch.arange(9)[::2],
}
ABOUT = {"step": 3, "words": "na\u00efve", "a": [None, 0.1]}


def test_a_damaged_file_is_named(tmp_path):
    """And one of another program. What is whole comes back to the bit."""
    file = tmp_path / "file"
    write_file(file, {"another": torch.ones(3)})  # is replaced
    write_file(file, TENSORS, **ABOUT)
    tensors, found = read_file(file)
    assert same(tensors, TENSORS) and found == ABOUT
    whole = file.read_bytes()
    for content in (whole[:-1], whole[:-1] + b"\x99", whole[:50]):
        file.write_bytes(content)
        refusal(read_file, file, "damaged")
    save_file({"a": torch.ones(3)}, file)
    refusal(read_file, file, "damaged")


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    """As a clone without Git LFS has them in the place of large files."""
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    (tmp_path / "file").write_text(pointer)
    for read in (read_file, read_json):
        refusal(read, tmp_path / "file", "run: git lfs pull")


def test_json_is_json(tmp_path):
    """Other languages' readers refuse Infinity and NaN. A byte order mark is no text."""
    write_json(tmp_path / "file", {"nats": [1.5, math.nan, -math.inf], "ppl": {512: math.inf}})
    written = (tmp_path / "file").read_bytes()
    assert json.loads(written) == {"nats": [1.5, None, None], "ppl": {"512": None}}
    (tmp_path / "file").write_bytes(b"\xef\xbb\xbf" + written)
    assert read_json(tmp_path / "file") == json.loads(written)
    for content in ('{"dim": ', "[" * 99999):
        (tmp_path / "file").write_text(content)
        refusal(read_json, tmp_path / "file", "cannot be read as JSON (")


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "link").symlink_to("figures.json")
    write_json(tmp_path / "link", [1])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "figures.json").read_text() == "[\n 1\n]\n"
