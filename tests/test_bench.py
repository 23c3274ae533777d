"""bench.py runs, and training memory does not grow with the sequence. Nothing is timed here."""

import bench
import pytest

FLAGS = "--dim 64 --layers 1 --heads 2 --ffn 128 --vocab 64 --mem 16 --segment 16"
FLAGS += " --rounds 1 --bptt 1 --seq 128 --long 512 --contexts 64 256"


def test_every_row_has_figures(monkeypatch, capsys):
    """A column has values, and how many times the window's these are."""
    monkeypatch.setattr("sys.argv", ["bench.py", *FLAGS.split()])
    bench.main()
    _, head, *lines = capsys.readouterr().out.splitlines()
    width, columns = max(map(len, bench.ROWS)), {}
    assert [line[:width].strip() for line in lines] == list(bench.ROWS)
    for n, start in enumerate(range(width, len(head), 20)):
        cells = {line[:width].strip(): line[width:].split()[2 * n :][:2] for line in lines}
        cells = {row: [*map(float, cell)] for row, cell in cells.items() if cell[0] != "-"}
        assert len(cells) == len(bench.ROWS) - (n == 5)  # not full attention
        for value, ratio in cells.values():
            assert value > 0 and ratio == pytest.approx(value / cells["window"][0], 0.01, 0.006)
        columns[head[start : start + 20].strip()] = cells
    assert list(columns)[:4] == ["train, s", "prefill, s", "decode 64, ms", "decode 256, ms"]
    short, long = columns["memory 128, MB"], columns["memory 512, MB"]
    assert short["full"][0] > 2 * short["window"][0]
    assert all(value == pytest.approx(short[row][0], rel=0.05) for row, (value, _) in long.items())
