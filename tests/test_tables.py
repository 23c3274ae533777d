"""tools/tables.py: tables have the figures that are computed here."""

from dataclasses import replace

import tables


def cell(row, nats, seed=0, steps=60, **about):
    """A stored one, of two documents."""
    steps = steps if "lococo" in tables.ROWS[row].flags else 0
    return {"row": row, "seed": seed, "steps": steps, "mem": 64, "seq": 1024, "part": "test",
            "documents": 48, "model": "M", "dtype": "float32", "by document": nats,
            "cache bytes": 3e6} | about


def rows_of(text):
    return [line.split(" | ")[1:] for line in text.splitlines()[2:]]


# What a cell of two long documents has: one of each text.
LONG = dict(mem=512, seq=8192, part="long", documents=2) | {"by position": {}}


def test_the_table_by_hand(monkeypatch):
    """Full attention is 2 below H2O on both texts. LoCoCo is 1 and 0.5 below it and, with another
    seed, 0.5 and 0.5. The newest cell counts, of those after the most steps."""
    table = replace(tables.LONG, rows=("full", "window", "h2o", "lococo"), documents=4)
    monkeypatch.setitem(tables.TABLES, "long", table)
    about = LONG | {"documents": 4}
    old = [cell("lococo", [9.0] * 4, **about), cell("full", [1.0, 1.0, 3.0, 3.0], base="x", **about),
           cell("lococo", [9.0] * 4, **about | {"mem": 128})]
    stored = [*old, cell("h2o", [3.0, 3.0, 5.0, 5.0], **about)]
    about |= {"scored": "s", "base": "x"}
    stored += [cell("lococo", [2.0, 2.0, 4.5, 4.5], **about),
               cell("lococo", [2.5, 2.5, 4.5, 4.5], seed=1, **about),
               cell("lococo", [8.0] * 4, steps=40, **about)]
    made = tables.all_tables(stored)
    assert rows_of(made["long, M, float32"]) == [
        ["3", "-", "2.0000", "-2.0000 ± 0.0000", "100, 100 |"],
        ["3", "-", "4.0000", "+0.0000 ± 0.0000", "0, 0 |"],
        ["3", "60 steps, 2 seeds", "3.3750", "-0.6250 ± 0.0722", "38, 25 |"],
    ]
    # Another base: nothing of the old one is beside it. Some cells do not say their base.
    new = cell("window", [7.0] * 4, **about | {"base": "y"})
    other = tables.all_tables([*stored, new])
    losses = [row[2] for row in rows_of(other["long, M, float32"])]
    assert losses == ["7.0000", "4.0000", "9.0000"]


def test_each_number_of_steps_with_64_slots():
    """Both texts side by side, as means of the seeds. The newest cell of a seed counts; other
    sizes do not."""
    code = "official code, one"
    stored = [cell("h2o", [3.0, 5.0]), cell(code, [9.0, 9.0]), cell(code, [1.0, 3.0]),
              cell(code, [2.0, 4.0], seed=1), cell(code, [7.0], part="choosing"),
              cell(code, [6.0], part="choosing", steps=240), cell("h2o", [1.0], mem=896)]
    assert rows_of(tables.all_tables(stored)["64 slots, M, float32"]) == [
        ["-", "", "", "4.0000", "+0.0000 ± 0.0000 |"],
        ["61,440 tokens, 2 seeds", "7.0000", "", "2.5000", "-1.5000 ± 0.0000 |"],
        ["245,760 tokens, 1 seed", "6.0000", "", "", " |"],
    ]


def test_lococo_minus_others():
    """On the first text, on the second, and on both; a mean of the seeds."""
    code, table = "official code 0.02", replace(tables.TABLES["lococo"], documents=2)
    stored = [cell("h2o", [3.0, 7.0], **LONG), cell(code, [2.0, 5.0], **LONG),
              cell(code, [1.0, 7.0], seed=1, **LONG)]
    made = tables.lococo_table(table, tables.lines_of(table, stored))
    assert rows_of(made) == [["-1.5000 ± nan", "-1.0000 ± nan", "-1.2500 ± 0.2500 |"]]


def test_what_readme_and_other_sizes_show(monkeypatch):
    """By hand: bytes, the difference from full attention, facts; and a column for each size."""
    name, panel = "base, h2o M=512", {"8192": [0.25, None, 0.75]}
    needles = {"found": {name: panel}, "errors": {name: {"8192": 0.04}}}
    monkeypatch.setattr(tables, "read_json", lambda file: needles)
    small = dict(mem=896, seq=8192, part="long", documents=8) | {"by position": {}}
    stored = [cell("full", [1.0, 3.0], **small), cell("h2o", [3.0, 6.0], **small)]
    stored += [cell("h2o heads", [2.0, 3.0], **small), cell("h2o heads @ 384 + 128", [5.0], **small)]
    made = tables.all_tables(stored + [c | dict(mem=512, documents=16) for c in stored])
    assert rows_of(made["result, M, float32"]) == [
        ["3", "+2.5000 ± 0.5000", "50 ± 4 |"], ["3", "+0.5000 ± 0.5000", " |"],
        ["3", "+0.0000 ± 0.0000", " |"]]
    columns, _, h2o, heads = made["sizes, M, float32"].splitlines()
    assert columns == "| M + T | 384 + 128 | 896 + 128 |"
    assert h2o.endswith(" |  | 4.5000 |") and heads.endswith("| 5.0000 | 2.5000 |")


def test_each_cell_has_a_line_of_its_own(monkeypatch, tmp_path):
    """Also behind a line that an editor has left without a line break."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results.jsonl")
    tables.add(cell("window", [1.0]))
    tables.RESULTS.write_text(tables.RESULTS.read_text().strip())
    tables.add(cell("h2o", [2.0]))
    assert tables.stored_cells() == [cell("window", [1.0]), cell("h2o", [2.0])]


def test_a_table_is_written_between_its_comments():
    page = "a\n<!-- tools/tables.py: {} -->\n{}<!-- end -->\nb\n<!-- end -->\n"
    made = tables.with_tables(page.format("x", "old\n"), {"x": "new\n", "y": "none\n"})
    assert made == page.format("x", "new\n")
