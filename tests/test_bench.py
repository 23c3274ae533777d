"""bench.py runs, and training memory does not grow with the sequence. Nothing is timed here."""

import io
import math
from contextlib import redirect_stdout

import bench
import pytest

FLAGS = "--dim 64 --layers 1 --heads 2 --ffn 128 --vocab 64 --mem 16 --segment 16 --rounds 1"
FLAGS += " --seq 128 --long 512 --contexts 64 256"


@pytest.fixture(scope="module")
def columns() -> dict[str, dict[str, tuple[float, float]]]:
    """{column: {row: (value, how many times the window's)}}, read from what is printed."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        patch.setattr("sys.argv", ["bench.py", *FLAGS.split()])
        bench.main()
    _, head, *lines = printed.getvalue().splitlines()
    width = max(map(len, bench.ROWS))
    names = [head[start : start + 20].strip() for start in range(width, len(head), 20)]
    assert [line[:width].strip() for line in lines] == list(bench.ROWS)
    columns = {name: {} for name in names}
    for line in lines:
        words = line[width:].split()
        for name, value, ratio in zip(names, words[::2], words[1::2], strict=True):
            if value != "-":
                columns[name][line[:width].strip()] = (float(value), float(ratio))
    return columns


def test_every_row_has_figures(columns):
    parts = ["train, s", "prefill, s", "decode 64, ms", "decode 256, ms", "memory 128, MB"]
    assert list(columns) == [*parts, "memory 512, MB"]
    assert list(columns["memory 512, MB"]) == list(bench.ROWS)[1:]  # not full attention
    for name in parts:
        assert list(columns[name]) == list(bench.ROWS)
    for values in columns.values():
        for value, ratio in values.values():
            assert math.isfinite(value) and value > 0
            assert ratio == pytest.approx(value / values["window"][0], abs=0.006, rel=0.01)


def test_training_memory_does_not_grow_with_the_sequence(columns):
    for row, (long, _) in columns["memory 512, MB"].items():
        assert long == pytest.approx(columns["memory 128, MB"][row][0], rel=0.05)
    assert columns["memory 128, MB"]["full"][0] > 2 * columns["memory 128, MB"]["window"][0]
