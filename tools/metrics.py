"""What a text is worth beside an answer: the metrics of SQuAD, TriviaQA, SCROLLS and LongBench.

Each data set of LongBench has one metric, as in LongBench's own metrics.py. The others have exact
match (em), F1 and ROUGE-1, -2, -L. tasks.py takes the best over a row's answers.
"""

import re
from collections import Counter
from difflib import SequenceMatcher

# --- SQuAD, TriviaQA, SCROLLS -----------------------------------------------------------


def compare(text: str, answer: str, row: dict) -> dict[str, float]:
    """The columns of a row of tasks.py."""
    if "longbench" in row:
        column, metric = LONGBENCH[row["longbench"]]
        return {column: metric(text, answer, row["classes"])}
    mark = row.get("punctuation", " ")
    return word_overlap(text, answer, mark) | rouge(text, answer)


def word_overlap(text: str, answer: str, mark: str) -> dict[str, float]:
    """Exact match and F1 of words without case, articles and punctuation: a `mark` instead (SQuAD:
    nothing; TriviaQA: a space, as for curly quotes)."""
    quotes = "‘’´" if mark else ""
    both = [re.sub(rf"[!-/:-@\[-`{{-~{quotes}]", mark, t.lower()) for t in (text, answer)]
    x, y = words = [re.sub(r"\b(a|an|the)\b", " ", t).split() for t in both]
    return {"em": float(x == y), "f1": shared(*words)}


def shared(x: list, y: list) -> float:
    """F1 of what two lists have in common, in any order."""
    return 2 * (Counter(x) & Counter(y)).total() / max(len(x + y), 1)


def rouge(text: str, answer: str) -> dict[str, float]:
    """ROUGE-1, -2 and -L of SCROLLS: words of letters and digits, without case, unstemmed."""
    x, y = words = [re.findall("[a-z0-9]+", t.lower()) for t in (text, answer)]
    pairs = [[*zip(t, t[1:])] for t in words]
    longest = lengths(x, y)[-1][-1]
    rouge_l = 2 * longest / max(len(x + y), 1)
    return {"rouge1": shared(x, y), "rouge2": shared(*pairs), "rougeL": rouge_l}


def lengths(x: list[str], y: list[str]) -> list[list[int]]:
    """Of the longest common subsequence of the first i words of x and the first j of y."""
    table = [[0] * (len(y) + 1)]
    for word in x:
        above, row = table[-1], [0]
        for j, other in enumerate(y):
            row.append(above[j] + 1 if word == other else max(above[j + 1], row[j]))
        table.append(row)
    return table


# --- LongBench --------------------------------------------------------------------------


def question_f1(text: str, answer: str, classes: None) -> float:
    return word_overlap(text, answer, "")["f1"]


def summary_rouge(text: str, answer: str, classes: None) -> float:
    """ROUGE-L of the package `rouge`: different words of the longest common subsequences of all
    pairs of sentences. Sentences end at full stops, words at blanks, with case and punctuation."""
    x, y = ([" ".join(s.split()).split(" ") for s in t.split(".") if s] for t in (answer, text))
    common = set()
    for a, b in ((a, b) for a in x for b in y):
        table, i, j = lengths(a, b), len(a), len(b)
        while i and j:  # the words of one such subsequence, from its end
            if a[i - 1] == b[j - 1]:
                common.add(a[i - 1])
                i, j = i - 1, j - 1
            elif table[i - 1][j] > table[i][j - 1]:
                i -= 1
            else:
                j -= 1
    different = [len({word for sentence in t for word in sentence}) for t in (x, y)]
    return 2 * len(common) / max(sum(different), 1)


def class_named(text: str, answer: str, classes: list[str]) -> float:
    named = [name for name in classes if name in text]
    for name in named:  # as there: behind a name that is removed one is passed over
        if name in answer and name != answer:
            named.remove(name)
    return (answer in named) / max(len(named), 1)


def right_numbers(text: str, answer: str, classes: None) -> float:
    """The share of the text's numbers that are the answer's ("7", "Paragraph 7")."""
    numbers, right = re.findall(r"\d+", text), re.findall(r"\d+", answer)[:1]
    return sum([number] == right for number in numbers) / max(len(numbers), 1)


def code_line(text: str, answer: str, classes: None) -> float:
    """The first line without a comment, by fuzzywuzzy's ratio: difflib's, in whole per cent."""
    lines = (line for line in text.split("\n") if not re.search("[`#]|//", line))
    return round(100 * SequenceMatcher(None, next(lines, ""), answer).ratio()) / 100


LONGBENCH = {"trec": ("class", class_named)}  # data set: column and metric
QUESTIONS = "narrativeqa qasper multifieldqa_en hotpotqa 2wikimqa musique triviaqa".split()
LONGBENCH |= dict.fromkeys(QUESTIONS, ("f1", question_f1))
SUMMARIES = "gov_report qmsum multi_news samsum".split()
LONGBENCH |= dict.fromkeys(SUMMARIES, ("rouge package", summary_rouge))
COUNTS = ("passage_count", "passage_retrieval_en")
LONGBENCH |= dict.fromkeys(COUNTS, ("numbers", right_numbers))
LONGBENCH |= dict.fromkeys(("lcc", "repobench-p"), ("code", code_line))
