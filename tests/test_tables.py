"""tools/tables.py: tables have the figures that are computed here."""

from dataclasses import replace

import pytest
import tables

from support.files import UserError

LEARNED = "adapters/smollm2-135m/learned"


def cell(row, nats, seed=0, steps=60, **about):
    """A stored one, of two documents."""
    steps = steps if "lococo" in tables.row_named(row).flags else 0
    return {"row": row, "seed": seed, "steps": steps, "mem": 64, "seq": 1024, "part": "test",
            "documents": 48, "model": "M", "dtype": "float32", "base": "x", "scored": "s",
            "flags": f"--seq {about.get('seq', 1024)} {tables.row_named(row).flags}",
            "by document": nats, "cache bytes": 3e6} | about


def rows_of(text):
    return [line.split(" | ")[1:] for line in text.splitlines()[2:]]


# What a cell of two long documents has: one of each text.
LONG = dict(mem=512, seq=8192, part="long", documents=2) | {"by position": {}}


def test_the_table_by_hand(monkeypatch):
    """H2O is 2 above full attention on both texts. LoCoCo's code is 1 and 0.5 below it and, with
    another seed, 0.5 and 0.5. The newest cell counts, of those after the most steps."""
    code = "lococo-code-0.02"
    table = replace(tables.LONG, rows=("full", "streaming", "h2o", code), documents=4)
    monkeypatch.setitem(tables.TABLES, "long", table)
    about = LONG | {"documents": 4}
    old = [cell(code, [9.0] * 4, **about), cell("full", [1.0, 1.0, 3.0, 3.0], **about),
           cell(code, [9.0] * 4, **about | {"mem": 128})]
    stored = [*old, cell("h2o", [3.0, 3.0, 5.0, 5.0], **about)]
    stored += [cell(code, [2.0, 2.0, 4.5, 4.5], **about),
               cell(code, [2.5, 2.5, 4.5, 4.5], seed=1, **about),
               cell(code, [8.0] * 4, steps=40, **about)]
    made = tables.all_tables(stored)
    assert rows_of(made["long, M, float32"]) == [
        ["-", "+0.0000 ± 0.0000", "+1.2500 ± 0.0000", "+1.5000 ± 0.0000 |"],
        ["-", "+2.0000 ± 0.0000", "-0.7500 ± 0.0000", "-0.5000 ± 0.0000 |"],
        ["491,520 tokens, 2 seeds", "+1.3750 ± 0.0722", "", " |"],
    ]
    # Another base: nothing of the old one is beside it.
    new = cell("streaming", [7.0] * 4, base="y", **about)
    other = tables.all_tables([*stored, new])["long, M, float32"]
    assert len(rows_of(other)) == 1 and "| full attention |" not in other


def test_two_texts_with_64_slots():
    """Side by side, as means of the seeds. Only the newest cell of a seed counts, and only those
    after the most steps; other sizes do not."""
    code = "lococo-code-0.02, batch 1, bfloat16"
    stored = [cell("h2o", [3.0, 5.0]), cell(code, [9.0, 9.0]), cell(code, [1.0, 3.0]),
              cell(code, [2.0, 4.0], seed=1), cell("h2o", [1.0], mem=896)]
    stored += [cell("h2o", [5.0, 6.0], part="choosing"), cell(code, [7.0, 7.0], part="choosing"),
               cell(code, [6.0, 8.0], part="choosing", steps=240)]
    assert rows_of(tables.all_tables(stored)["64 slots, M, float32"]) == [
        ["-", "+0.0000 ± 0.0000", "+0.0000 ± 0.0000 |"],
        ["245,760 tokens, 1 seed", "+1.5000 ± 0.5000", "-1.5000 ± 0.0000 |"],
    ]


def test_what_readme_and_other_sizes_show(monkeypatch):
    """By hand: bytes, the difference from full attention, facts; and a row for each size."""
    panels = {"base, h2o M=512": {"8192": [0.25, None, 0.75]},
              "base, h2o+forget M=896 T=128 budgets": {"8192": [0.5]},
              "base, full": {"8192": [0.5, 1.0]}}
    lines = {"found": panels, "errors": {"base, h2o M=512": {"8192": 0.04}}}
    sentences = {"found": {name: {"8192": [0.25]} for name in panels}}
    by_name = {"needle.json": lines, "needle-sentences.json": sentences}
    monkeypatch.setattr(tables, "read_json", lambda file: by_name.get(file.name, {"found": {}}))
    small = dict(mem=896, seq=8192, part="long", documents=8) | {"by position": {}}
    stored = [cell("full", [1.0, 3.0], **small), cell("h2o", [3.0, 6.0], **small)]
    stored += [cell("h2o+forget", [3.0, 4.0], **small), cell("h2o+forget, budgets", [2.0, 3.0], **small)]
    stored += [cell("h2o+forget, budgets @ 384 + 128", [5.0, 7.0], **small)]
    made = tables.all_tables(stored + [c | dict(mem=512, documents=16) for c in stored])
    assert rows_of(made["result, M, float32"]) == [["3", "+2.5000 ± 0.5000", "50 ± 4 |"]]
    head = "| memory | MB (full cache: 3) | nats per token above full attention | facts found, % "
    assert made["result, M, float32"].startswith(f"{head}(full cache: 75) |\n")
    _, forgetting, budgets, _ = rows_of(made["ladder, M, float32"])
    assert forgetting[:3] == ["3", "+1.5000 ± 0.5000", "-1.0000 ± 1.0000"]
    assert budgets[1:] == ["+0.5000 ± 0.5000", "-1.0000 ± 0.0000", " |"]
    h2o = "+2.5000 ± 0.5000"
    sizes = made["sizes, M, float32"].splitlines()
    assert sizes[-2] == "| 384 + 128 | 3 |  | +4.0000 ± 0.0000 |  |  |"
    assert sizes[-1] == f"| 896 + 128 | 3 | {h2o} | +0.5000 ± 0.5000 |  |  |"
    facts = made["facts, M, float32"].splitlines()
    assert "| H2O that forgets, with budgets | 896 + 128 | 50 | 25 |" in facts


@pytest.mark.parametrize("row, panels", [
    ("lococo-code-0.02", ("runs/lococo", "runs/lococo-1")),
    ("h2o+forget, budgets-layers", ()),  # no facts were asked for with these budgets
    ("full", ("base, full",)),
    ("streaming", ("base, streaming M=896 T=128",)),
    ("h2o @ 512 + 512", ("base, h2o M=512",)),
    ("learned, budgets, 8 bits @ 1792 + 256", (LEARNED,)),
    ("learned, budgets, 8 bits", (f"{LEARNED} M=896 T=128",)),
    ("learned", (f"{LEARNED} M=896 T=128 bits=0 equal",)),
    ("learned, budgets, no facts", ("runs/plain M=896 T=128 bits=0",)),
    ("h2o+forget, budgets, 8 bits @ 1792 + 256", ("base, h2o+forget M=1792 T=256 budgets bits=8",)),
])
def test_the_names_of_panels(row, panels):
    """Those that tools/needle.py writes."""
    assert tables.panels_of(row, tables.SMALL_SEGMENTS) == panels


def test_the_tokens_of_a_cell():
    """Four sequences of 1,024 tokens are in a step, if no --batch is given."""
    assert tables.tokens_of(cell("lococo-code-0.02", [])) == 60 * 4 * 1024
    assert tables.tokens_of(cell("lococo-code-0.02, batch 1", [])) == 60 * 1024


def test_what_the_name_of_a_row_says():
    row = tables.row_named("h2o+forget, budgets, 8 bits @ 1792 + 256")
    budgets = "adapters/smollm2-135m/budgets.json"
    flags = f"--method h2o+forget --budgets {budgets} --mem 1792 --segment 256"
    assert row == tables.Row(flags, 8, "")
    assert tables.row_named("learned, no facts").adapter == "runs/plain"
    flags = "--method lococo-code --batch 1 --dtype bfloat16"
    assert tables.row_named("lococo-code, batch 1, bfloat16").flags == flags
    assert tables.row_named("lococo-code-0.02, trained").adapter == "runs/lococo"
    for name, wrong in (
        ("h3o", "h3o: there is no such method"),
        ("h2o, 7 bits", "7 bits: there is no such word for h2o"),
        ("h2o, no facts", "no facts: there is no such word for h2o"),
        ("h2o @ 384", 'h2o @ 384: sizes are as in "h2o @ 384 \\+ 128"'),
        ("h2o @ 384 + 128, 8 bits", "sizes are as in"),
    ):
        with pytest.raises(UserError, match=wrong):
            tables.row_named(name)


def test_each_cell_has_a_line_of_its_own(monkeypatch, tmp_path):
    """Also behind a line that an editor has left without a line break."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path / "results.jsonl")
    tables.add(cell("streaming", [1.0]))
    tables.RESULTS.write_text(tables.RESULTS.read_text().strip())
    tables.add(cell("h2o", [2.0]))
    assert tables.stored_cells() == [cell("streaming", [1.0]), cell("h2o", [2.0])]


def test_a_table_is_written_between_its_comments():
    page = "a\n<!-- tools/tables.py: {} -->\n{}<!-- end -->\nb\n<!-- end -->\n"
    made = tables.with_tables(page.format("x", "old\n"), {"x": "new\n", "y": "none\n"})
    assert made == page.format("x", "new\n")
