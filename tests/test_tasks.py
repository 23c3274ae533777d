"""Scores of tasks, by hand; files as their authors publish them, as rows and with shots."""

import json
import re
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import tasks
from conftest import FULL, H2O, greedy_by_hand, read_by_hand

from generate import prefill
from lococo import AdaptedLlama
from model import load_llama
from support.command_line import HERE, TINY
from support.files import UserError

TEXT = "\ndef add(x, y):\n    return [x, y]\n\ndef get(x, y):\n    return x[y]\n"
TEXT += "\ndef f(x, y):\n    return x["  # three segments


@pytest.mark.parametrize("text, answer, mark, expected", [  # em, f1, rouge1, rouge2, rougeL
    ("The  CAT_sat, on a mat!", "cat sat on mat", " ", (1, 1, 4 / 5, 2 / 4, 4 / 5)),
    ("An apple-pie", "apple pie", " ", (1, 1, 4 / 5, 2 / 3, 4 / 5)),  # an article is in ROUGE
    ("cat’s", "cats", "", (0,) * 5), ("cat’s", "cat s", " ", (1,) * 5),
    ("cat’s", "cat s", "", (0, 0, 1, 1, 1)),
    ("U.S.", "US", "", (1, 1, 0, 0, 0)), ("", "cat", "", (0,) * 5),
    # Shared: one, two twice, three, four; two two, three four; in order one .. three four
    ("One two two three four five", "two, one six THREE four-two two_two", " ",
     (0, 5 / 7, 2 * 5 / (6 + 8), 2 * 2 / (5 + 7), 2 * 3 / (6 + 8)))])
def test_metrics(text, answer, mark, expected):
    for pair in ((text, answer), (answer, text)):
        found = tasks.compare(*pair, {"punctuation": mark}).values()
        assert [*found] == pytest.approx(expected)


@pytest.mark.parametrize("data, text, answer, classes, expected", [
    # The package rouge 1.0.1 says so: 7 different words of 8 and 9 are shared; 2 of 3 and 3.
    ("gov_report", "The cat sat. It ran on the mat", "A cat sat on the mat. It ran.\n", 0,
     14 / 17),
    ("multi_news", "a b. a a a", "b a a", None, 1 / 2),  # of equals it takes "a a", not "b a"
    ("hotpotqa", "The U.S. won", "US", None, 2 / 3),
    ("trec", "Food or Date", "Date", ["Food", "Date", "Sum"], 1 / 2),
    ("trec", "a b c", "a b c", ["a", "b", "c", "a b c"], 1 / 2),  # its code passes over "b"
    ("passage_count", "3 or 4, 3", "3", None, 2 / 3),
    ("passage_retrieval_en", "Paragraph 12", "Paragraph 12 or 3", None, 1),
    ("lcc", "# no\nx = y\nz", "x = z", None, 0.8)])
def test_metrics_of_longbench(data, text, answer, classes, expected):
    found = tasks.compare(text, answer, {"longbench": data, "classes": classes}).values()
    assert [*found] == pytest.approx([expected])


@pytest.mark.parametrize("settings, space, ends", [(FULL, " ", "xxxxx"), (H2O, "", "xys01")])
def test_the_likeliest_choice(tokenizer, monkeypatch, settings, space, ends):
    """By sums and by sums for a character. A prompt, which each choice may have, is read once, but
    for its last token. A blank at its end is read with the choice, before the choice's own."""
    adapted, sums = AdaptedLlama(load_llama(TINY), settings), []
    choices = ["x", "x + y", "None", " self", "x[y]"]
    prompts = [TEXT + end + space for end in ends]
    for end, prompt, choice in zip(ends, prompts, choices):
        start = tokenizer.encode(TEXT + end)
        ids = start + tokenizer.encode(f"{prompt} {choice}")[len(start) :]
        p = read_by_hand(adapted, ids[:-1])
        sums.append(sum(p[t - 1, ids[t]].item() for t in range(len(start), len(ids))))
    by_length = np.divide(sums, [1, 5, 4, 5, 4])  # characters
    assert np.argmax(sums) != np.argmax(by_length)
    row = {"prompt": prompts if ends == "xys01" else prompts[0], "choices": choices}
    for answer in range(5):
        monkeypatch.setattr(tasks, "prefill", Mock(side_effect=prefill))
        found, cache = tasks.score_choices(adapted, row | {"answer": answer}, tokenizer, "cpu")
        assert found == {"acc": answer == np.argmax(sums), "acc_norm": answer == np.argmax(by_length)}
        assert (cache.seen, cache.keys[0].size) == (48, 32 if settings.mem else 48)
        assert tasks.prefill.call_count == len(set(prompts))


@pytest.mark.parametrize("settings, more, kept", [
    (H2O, {"stop": ",", "punctuation": ""}, 12), (FULL, {"max_tokens": 1}, 1)])
def test_a_text_is_the_likeliest_up_to_its_stop(tokenizer, monkeypatch, settings, more, kept):
    adapted, ids = AdaptedLlama(load_llama(TINY), settings), tokenizer.encode(TEXT)
    written = tokenizer.decode(greedy_by_hand(adapted, ids)[: 48 + kept])[len(TEXT) :]
    text, stop, _ = written.partition(more.get("stop", "\n"))
    assert text and bool(stop) == (kept == 12)
    row = {"prompt": TEXT, "answers": ["other", text]} | more
    monkeypatch.setattr(tasks, "compare", lambda *given: {"same": given == (text, text, row)})
    found, cache = tasks.score_answer(adapted, row, tokenizer, "cpu")
    assert found == {"same": True} and cache.seen == 48


def test_means_and_standard_errors(run, tokenizer, monkeypatch):
    """Of a model that always says the same: right; its words turned round; not right."""
    said = tokenizer.encode("Q: one two three four")[len(tokenizer.encode("Q:")) :]
    monkeypatch.setattr(tasks, "decode", lambda *args: iter(said))
    answers = ["one two three four"], ["nothing", "four three two one"], ["five"]
    rows = [{"prompt": "Q:", "answers": a} for a in answers]
    Path("rows").write_text("\n\n".join(map(json.dumps, rows)))
    code, out, err = run(tasks, "score rows --method h2o --json figures.json")
    assert (code, err) == (0, "") and out.startswith("rows: 3 rows\n")
    head, *lines = [re.split("  +", line.strip()) for line in out.splitlines()[1:]]
    assert head[2:] == ["em", "f1", "rouge1", "rouge2", "rougeL", "rouge"]
    third = "0.333 ±0.333"  # 1, 0, 0: variance (4 + 1 + 1) / 9 / 2, its root / sqrt(3) is 1 / 3
    both = "0.667 ±0.333"  # 1, 1, 0; and 1, 1/4, 0 have the variance (49 + 4 + 25) / 144 / 2
    # The geometric mean of 2 / 3, 1 / 3, 5 / 12 is 0.452; the mean of 1, 0, 0 would be 0.333.
    expected = [third, both, both, third, "0.417 ±0.300", "0.452"]
    assert [line[3:] for line in lines] == [expected] * 2
    written = json.loads(Path("figures.json").read_text())["rows"]["base, full"]["em"]
    assert written == pytest.approx({"mean": 1 / 3, "error": 1 / 3})


def test_long_prompts_lose_their_middle(tokenizer):
    """As LongBench shortens them: the first and the last N/2 tokens stay, and the BOS counts."""
    text = TEXT + "y"
    ids, row = tokenizer.encode(text), {"prompt": [text, "x ="]}
    assert len(ids) % 2 == 1
    assert not tasks.shorten(row, len(ids), tokenizer) and tasks.shorten(row, 11, tokenizer)
    assert row["prompt"] == [tokenizer.decode(ids[1:5]) + tokenizer.decode(ids[-5:]), "x ="]


def test_a_prompt_that_is_cut_to_nothing(run):
    """The middle is all of its text. This is said before anything is scored."""
    row = {"prompt": "\n\n\n\nx = y\n\n\n\n", "answers": ["1"]}
    Path("rows").write_text(json.dumps(row))
    code, out, err = run(tasks, "score rows --method h2o --cut 4")
    assert (code, out, err.count("\n")) == (2, "", 1) and "rows, line 1: no token for" in err


@pytest.mark.parametrize("words, sentence", [
    ("scrolls . --out x --run nowhere --model nowhere --mem 64",
     "tasks.py scrolls: unrecognized arguments: --run nowhere --model nowhere --mem 64"),
    ("race . --out x --model tiny", "tasks.py race: unrecognized arguments: --model tiny"),
    ("score rows --out x", "tasks.py: unrecognized arguments: --out x"),
    ("--mem 4 race . --out x", "tasks.py: race: the first word must be score or one of race,"),
    ("longbench f --shots 2 --out x", "--shots 2: longbench has no training rows to draw from"),
])
def test_flags_are_of_the_first_word(run, words, sentence):
    code, out, err = run(tasks, words, before="")
    assert (code, out, err.count("\n")) == (2, "", 1) and sentence in err


ANSWERS = {"prompt": "x =", "answers": ["1"]}
CHOICES = {"prompt": "x =", "choices": ["1", "2"], "answer": 0}
BAD = {
    "x": "this is not valid JSON", "[1]": "not as --help says",
    json.dumps(ANSWERS | {"answers": []}): "too few texts",
    json.dumps(ANSWERS | {"stop": ""}): "stop is empty",
    json.dumps(ANSWERS | {"max_tokens": 2.0}): "max_tokens 2.0 is not a whole number",
    json.dumps(ANSWERS | {"punctuation": "."}): "punctuation is neither",
    json.dumps(ANSWERS | {"longbench": "lsht", "classes": None}): "longbench 'lsht' is not",
    json.dumps(ANSWERS | {"longbench": "trec", "classes": None}): "trec needs classes",
    json.dumps(CHOICES | {"answer": 2}): "answer 2 is not", json.dumps(CHOICES | {"prompt": " "}): "blank",
    json.dumps(CHOICES | {"prompt": ["x"] * 3}): "not as --help says",
}


@pytest.mark.parametrize("line", BAD)
def test_a_mistake_in_the_rows_is_one_sentence(tmp_path, line):
    (tmp_path / "rows").write_text(f"{json.dumps(ANSWERS)}\n\n{line}")
    with pytest.raises(UserError, match=f"rows, line 3: .*{BAD[line]}"):
        list(tasks.read_rows(tmp_path / "rows", tasks.is_task))


# For each data set its files of questions and of shots, all fields of its authors' rows with # for
# a number, the row that is made of them, and the answer as it follows a prompt in a shot.
PROMPTS = '{"qasper": "{context} Q: {input}", "trec": "{context} Type: {input}"}'
CASES = json.loads((HERE / "tests" / "official_rows.json").read_text("utf-8"))


def convert(run, words):
    """The rows that tasks.py makes, or its one sentence."""
    code, _, err = run(tasks, f"{words} --out x", before="")
    assert (code, err.count("\n")) == ((2, 1) if err else (0, 0)), err
    return err or [json.loads(line) for line in open("x")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["questions"])
def test_official_files_become_rows(run, case):
    """Six shots of seven training rows, of which one asks the question: they are the others."""
    data, test, train, row = case["data"], case["questions"], case["shots"], case["row"]
    words, shots = f"{data} {case['folder']}", 6 * (train != "-")
    content = "\n".join(map(json.dumps, case["official"]))
    texts = [content.replace("#", str(n)) for n in range(7)]
    files = {"config/dataset2prompt.json": [PROMPTS], train: texts}
    files |= {"config/dataset2maxlen.json": ['{"qasper": 9, "trec": 64}'], test: texts[:2]}
    for file, lines in files.items():
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        if data == "triviaqa" and "web" in file:
            lines = ['{"Data": [%s], "Domain": "Web", "Version": 1.0}' % ",".join(lines)]
        for n, line in enumerate(lines):
            Path(file.replace("#", str(n))).open("a").write(line + "\n")
    rows = convert(run, words)
    assert rows == [json.loads(json.dumps(row).replace("#", str(n))) for n in range(2)]
    shown = np.atleast_1d(row["prompt"])[-1] + case["answer"] + "\n\n"
    found, other = (convert(run, f"{words} --shots {shots} --seed {seed}") for seed in (3, 4))
    assert found != other or not shots
    for n, (row, bare) in enumerate(zip(found, rows, strict=True)):
        assert row | {"prompt": bare["prompt"]} == bare
        for prompt, last in zip(np.atleast_1d(row["prompt"]), np.atleast_1d(bare["prompt"])):
            order = re.findall(r"\d", prompt)
            assert len(set(order)) == len(order) == shots + 1 and order[-1] == str(n)
            assert prompt == "".join(shown.replace("#", n) for n in order[:-1]) + last
    Path(test.replace("#", "0")).write_text("{}")
    assert f"row 1: not as in {data} (KeyError: " in convert(run, words)
    assert f": of {data}, " in convert(run, f"{data} text")  # then its files' names
