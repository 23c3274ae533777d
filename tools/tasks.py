"""The paper's tasks: rows from the files that their authors publish, and the scores of rows.

    python tools/tasks.py race RACE --shots 4 --out race4.jsonl
    python tools/tasks.py hellaswag hellaswag/data --shots 10 --out hellaswag10.jsonl
    python tools/tasks.py winogrande winogrande_1.1 --shots 70 --out winogrande70.jsonl
    python tools/tasks.py arc ARC-V1-Feb2018-2/ARC-Challenge --shots 40 --out arc40.jsonl
    python tools/tasks.py triviaqa triviaqa-unfiltered --shots 50 --out triviaqa50.jsonl
    python tools/tasks.py scrolls scrolls/qasper --out qasper.jsonl
    python tools/tasks.py longbench LongBench/data/qasper.jsonl --out longbench-qasper.jsonl
    python tools/tasks.py score race4.jsonl --model Llama-2-7b-hf --method streaming h2o --mem 512
    python tools/tasks.py score longbench-qasper.jsonl --model Llama-2-7b-hf --run R --cut 3500

A row is a line of JSON of one of two kinds; `score` reads each prompt once, through the memory:

    {"prompt": "Question: Why?\\nAnswer:", "choices": ["ice", "sun"], "answer": 1}
    {"prompt": "Question: Where?\\nAnswer:", "answers": ["Hull", "Hull, UK"], "max_tokens": 32}

Choices are scored by log-likelihood behind the prompt and a blank (acc_norm: per character),
answers by greedy decoding, up to "stop" (else a line break). Cells are means ± standard errors.

The paper does not print its prompts. These follow the lm-evaluation-harness (TriviaQA is scored by
its own script). SCROLLS is scored as its authors do: the harness scores QuALITY and ContractNLI by
likelihood, so that its numbers differ. LongBench's prompts are in its folder config/; --cut
shortens long prompts in their middle, as it does. metrics.py says what an answer is worth. Shots
are drawn from the training split, by the seed.

`tasks.py race --help` lists the flags for rows, `tasks.py score --help` those for scores.
"""

import argparse
import json
import re
import sys
from itertools import islice
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import NAME, standard_error
from generate import as_text, decode, prefill
from lococo import AdaptedLlama, segment_losses
from metrics import LONGBENCH, compare
from model import KVCache, load_base
from support.command_line import Machine, Parser, PlainParser
from support.command_line import at_least, counted, prepare, run_program
from support.files import FOREIGN, UserError, read_json, write_json, write_text
from support.programs.scoring import add_shared_flags, models_to_score, parse_models
from support.text import read_rows
from support.tokenizer import Tokenizer

# --- Rows from the official files -------------------------------------------------------


def race(article: dict, file: Path) -> dict:
    """The last question of an article is asked, those before it are told with their answers."""
    right = ["ABCD".index(letter) for letter in article["answers"]]
    prompt = f"Article: {article['article']}\n\n"
    for question, options, i in zip(article["questions"], article["options"], right[:-1]):
        told = f"Question: {question}\nAnswer: "
        if question.endswith("  _  ."):  # of such a question the harness tells the end alone
            told = question[-5:]
        prompt += f"{told}{options[i]}\n"
    choices = article["options"][-1]
    return {"prompt": prompt + article["questions"][-1], "choices": choices, "answer": right[-1]}


def hellaswag(row: dict, file: Path) -> dict:
    def clean(text: str) -> str:
        text = text.strip().replace(" [title]", ". ")
        return re.sub(r"\[.*?\]", "", text).replace("  ", " ")

    context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
    endings = [clean(ending) for ending in row["endings"]]  # " Ok" of "[step] Ok", as the harness
    return {"prompt": clean(context), "choices": endings, "answer": int(row["label"])}


def winogrande(row: dict, file: Path) -> dict:  # a prompt for each option; what follows is scored
    before, after = row["sentence"].split("_")
    prompts, right = [before + row["option1"], before + row["option2"]], int(row["answer"]) - 1
    return {"prompt": prompts, "choices": [after.strip()] * 2, "answer": right}


def arc(row: dict, file: Path) -> dict:
    question, choices = row["question"], row.get("choices")
    if choices is None:  # in AI2's own files both are inside the question
        question, rows = question["stem"], question["choices"]
        choices = {key: [choice[key] for choice in rows] for key in ("text", "label")}
    right = choices["label"].index(row["answerKey"])
    return {"prompt": f"Question: {question}\nAnswer:", "choices": choices["text"], "answer": right}


def triviaqa(row: dict, file: Path) -> dict:
    answers = dict.fromkeys([row["Answer"]["Value"], *row["Answer"]["Aliases"]])
    answers = [answer for answer in answers if answer.strip()]
    return {"prompt": f"Question: {row['Question']}?\nAnswer:", "answers": answers}


def scrolls(row: dict, file: Path) -> dict:
    text, question = row["input"], "What is a summary of the preceding text?"
    name = file.parent.resolve().name
    summary = name in ("gov_report", "summ_screen_fd")
    if not summary:  # the question comes first; in QuALITY it has choices (A) to (D)
        end = text.index("\n\n", text.index("(D)") if name == "quality" else 0)
        question, text = text[:end], text[end + 2 :]
    most = 1024 if summary else 512 if name == "qmsum" else 128
    return {"prompt": f"{text}\n\nQuestion: {question}\nAnswer:", "answers": [row["output"]],
            "max_tokens": most, "punctuation": "", "id": row["id"]}


def longbench(row: dict, file: Path) -> dict:
    name, config = row["dataset"].removesuffix("_e"), file.parent.resolve().parent / "config"
    if name not in LONGBENCH:
        raise UserError(f"{file}: of LongBench the sets in English and code are scored, not {name}")
    prompt = read_json(config / "dataset2prompt.json")[name]
    most = read_json(config / "dataset2maxlen.json")[name]
    stop = "\n" if name in ("trec", "triviaqa", "samsum") else "\0"  # a text that never comes
    return {"prompt": prompt.format(**row), "answers": row["answers"], "max_tokens": most,
            "stop": stop, "longbench": name, "classes": row["all_classes"]}


DATA = {  # files with shots (or ""), files with questions, how a row is converted
    "race": ("train/high/*.txt", "test/high/*.txt", race),
    "hellaswag": ("hellaswag_train.jsonl", "hellaswag_val.jsonl", hellaswag),
    "winogrande": ("train_xl.jsonl", "dev.jsonl", winogrande),
    "arc": ("ARC-*-Train.jsonl", "ARC-*-Test.jsonl", arc),
    "triviaqa": ("unfiltered-web-train.json or qa/web-train.json",
                 "unfiltered-web-dev.json or qa/web-dev.json", triviaqa),
    "scrolls": ("train.jsonl", "validation.jsonl", scrolls),
    "longbench": ("", "data/NAME.jsonl itself", longbench),
}


def items(file: Path) -> Iterator[tuple[int, dict]]:
    """The rows of a file with their numbers in it: the lines of a .jsonl; or those of its list
    "Data" (TriviaQA), or the one object that it is (RACE)."""
    if file.suffix.lower() == ".jsonl":
        yield from read_rows(file, lambda row: True)
    else:
        content = read_json(file)
        yield from enumerate(content.get("Data", [content]), start=1)


def read(data: str, source: Path, patterns: str, convert: Callable) -> list[dict]:
    """The converted rows of all files of a folder that match, or of one file."""
    files = [source] if "itself" in patterns and source.is_file() else []
    for pattern in patterns.split(" or "):
        files = files or sorted(source.glob(pattern))
    if not files:
        raise UserError(f"{source}: of {data}, {patterns} was expected here")
    rows = {}
    for file in files:
        number = 1
        try:
            for number, item in items(file):
                row = convert(item, file)
                key = row.pop("id", len(rows))
                if key in rows:  # in SCROLLS a row for each answer
                    rows[key]["answers"] += row["answers"]
                rows.setdefault(key, row)
        except FOREIGN as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{file}, row {number}: not as in {data} ({reason})") from None
    return list(rows.values())


def with_shots(rows: list[dict], training: list[dict], shots: int, seed: int) -> Iterator[dict]:
    """Each row behind so many answered rows of the training split, joined by blank lines."""
    for i, row in enumerate(rows):
        order = np.random.default_rng((seed, i)).permutation(len(training))
        others = (training[j] for j in order if training[j]["prompt"] != row["prompt"])
        shown = "".join(answered(other) + "\n\n" for other in islice(others, shots))
        old = row["prompt"]
        yield row | {"prompt": shown + old if type(old) is str else [shown + p for p in old]}


def answered(row: dict) -> str:
    prompt = row["prompt"] if type(row["prompt"]) is str else row["prompt"][row["answer"]]
    return f"{prompt} {row['answers'][0] if 'answers' in row else row['choices'][row['answer']]}"


def write_rows(flags: argparse.Namespace) -> None:
    """Write the rows of a data set to --out."""
    train, test, convert = DATA[flags.data]
    if flags.shots and not train:
        none = f"{flags.data} has no training rows to draw from"
        raise UserError(f"--shots {flags.shots}: {none}; leave it out")
    rows = read(flags.data, flags.source, test, convert)
    training = read(flags.data, flags.source, train, convert) if flags.shots else []
    if flags.shots >= max(len(training), 1):
        drawn_from = counted(len(training), "row")
        raise UserError(f"--shots {flags.shots}: {drawn_from} to draw from; take fewer")
    shown = with_shots(rows, training, flags.shots, flags.seed)
    flags.out.parent.mkdir(parents=True, exist_ok=True)
    write_text(flags.out, "".join(json.dumps(row) + "\n" for row in shown))
    print(f"{flags.out}: {counted(len(rows), 'row')}")


# --- Scores -----------------------------------------------------------------------------


def shorten(row: dict, most: int, tokenizer: Tokenizer) -> bool:
    """Take the middle out of each prompt of more than so many tokens; was there one?"""
    prompts, shorter = np.atleast_1d(row["prompt"]).tolist(), []
    for prompt in prompts:
        ids, half = tokenizer.encode(prompt), most // 2
        front = ids[len(tokenizer.prefix) : half]  # what begins a text, such as <s>, is no text
        ends = tokenizer.decode(front) + tokenizer.decode(ids[-half:])
        shorter.append(prompt if len(ids) <= most else ends)
    row["prompt"] = shorter[0] if isinstance(row["prompt"], str) else shorter
    return shorter != prompts


def is_task(row: dict) -> bool:
    """True for a row of one of the two kinds. Raises one of FOREIGN that says what is wrong."""
    if "choices" in row:
        texts, answer = row["choices"], row["answer"]
        prompts = np.broadcast_to(row["prompt"], len(texts)).tolist()
        if type(answer) is not int or answer not in range(len(texts)):  # neither true nor 2.0
            raise ValueError(f"answer {answer!r} is not the place of a choice")
    else:
        texts, prompts = row["answers"], [row["prompt"]]
    if len(texts) < (2 if "choices" in row else 1):
        raise ValueError("it has too few texts to answer with")
    most = row.get("max_tokens", 32)
    if type(most) is not int or most < 1:
        raise ValueError(f"max_tokens {most!r} is not a whole number from 1 on")
    if row.get("stop", "\n") <= "":
        raise ValueError("stop is empty")
    if row.get("punctuation", " ") not in ("", " "):
        raise ValueError("punctuation is neither nothing nor a blank")
    classes = []
    if "longbench" in row:
        classes = row["classes"] or []
        if row["longbench"] not in LONGBENCH:
            raise ValueError(f"longbench {row['longbench']!r} is not one of {', '.join(LONGBENCH)}")
        if row["longbench"] == "trec" and not classes:
            raise ValueError("trec needs classes")
    if not all(text.strip() for text in prompts + texts + classes):
        raise ValueError("a text of it is blank")
    return True


def refuse_without_tokens(
    file: Path, rows: list[tuple[int, dict]], tokenizer: Tokenizer
) -> None:
    """A tokenizer may drop all of a text. A choice without a token would have probability 1."""
    start = tokenizer.encode("x")
    for number, row in rows:
        for prompt in np.atleast_1d(row["prompt"]).tolist():
            if len(tokenizer.encode(prompt.rstrip())) == len(tokenizer.prefix):
                raise UserError(f"{file}, line {number}: no token for {prompt!r}; leave it out")
        for choice in row.get("choices", []):
            if len(tokenizer.encode(f"x {choice}")) <= len(start):
                raise UserError(f"{file}, line {number}: no token for {choice!r}; leave it out")


@torch.no_grad()
def score_choices(
    adapted: AdaptedLlama, row: dict, tokenizer: Tokenizer, device: str
) -> tuple[dict[str, bool], KVCache]:
    """Is the likeliest choice right, and (`acc_norm`) the likeliest per character? As in the
    lm-evaluation-harness, prompt, blank and choice are tokenized together, then cut; a blank at the
    prompt's end belongs to the choice. The cache returned has read the last prompt but for its last
    token."""
    model, T, scores = adapted.model, adapted.settings.segment, []
    prompts = np.broadcast_to(row["prompt"], len(row["choices"])).tolist()
    for i, (prompt, choice) in enumerate(zip(prompts, row["choices"])):
        if i == 0 or prompt != prompts[i - 1]:  # else it is read already
            start, cache = tokenizer.encode(prompt.rstrip()), adapted.cache()
            prefill(model, torch.tensor([start[:-1]], device=device), cache, T)
        rest = start[-1:] + tokenizer.encode(f"{prompt} {choice}")[len(start) :]
        pieces = segment_losses(model, torch.tensor([rest], device=device), cache.copy(), T)
        scores.append(-sum(nats.sum().item() for nats, _ in pieces))
    by_length = [score / len(choice) for score, choice in zip(scores, row["choices"])]
    likeliest = {"acc": np.argmax(scores), "acc_norm": np.argmax(by_length)}
    return {metric: i == row["answer"] for metric, i in likeliest.items()}, cache


@torch.no_grad()
def score_answer(
    adapted: AdaptedLlama, row: dict, tokenizer: Tokenizer, device: str
) -> tuple[dict[str, float], KVCache]:
    """The greedy continuation, up to the row's "stop" (else a line break), of at most "max_tokens"
    (else 32), beside the answer that it is most like. The cache returned has read the prompt."""
    model, cache = adapted.model, adapted.cache()
    ids, most = tokenizer.encode(row["prompt"]), row.get("max_tokens", 32)
    logits = prefill(model, torch.tensor([ids], device=device), cache, adapted.settings.segment)
    text, stop = "", row.get("stop", "\n")
    new = decode(model, tokenizer, logits, cache.copy(), most, 0)
    for piece in as_text(new, tokenizer, ids):
        text += piece
        if "longbench" in row:
            text = text.lstrip("\n")  # as it does, so that a first line is not empty
        if stop in text:
            break
    likeness = [compare(text.split(stop)[0], answer, row) for answer in row["answers"]]
    return {metric: max(each[metric] for each in likeness) for metric in likeness[0]}, cache


def score_rows(
    adapted: AdaptedLlama, rows: list[tuple[int, dict]], tokenizer: Tokenizer, machine: Machine
) -> tuple[dict[str, list[float]], list[int]]:
    """By column a value for each row, and the numbers of the lines whose prompts are longer than
    the model is trained for."""
    trained = adapted.settings.length
    columns, long = {}, []
    for number, row in tqdm(rows, "scoring", leave=False, disable=None):
        score_row = score_choices if "choices" in row else score_answer
        with machine.precision():
            metrics, cache = score_row(adapted, row, tokenizer, machine.device)
        compressed = any(keys.size < cache.seen for keys in cache.keys)
        values = {"compressed": compressed, "cache, MB": cache.nbytes / 1e6} | metrics
        for column, value in values.items():
            columns.setdefault(column, []).append(float(value))
        if cache.seen > trained:
            long.append(number)
    return columns, long


def summary(columns: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of each column the mean and, of more than one row, its standard error. The mean of three
    ROUGEs is the geometric mean of their means, as SCROLLS has it, and has no error."""
    cells = {}
    for column, values in columns.items():
        cells[column] = {"mean": np.mean(values).item()}
        if len(values) > 1:
            numbers = torch.tensor(values, dtype=torch.float64)
            cells[column]["error"] = standard_error(numbers)
    if "rougeL" in columns:
        three = [cells[column]["mean"] for column in ("rouge1", "rouge2", "rougeL")]
        cells["rouge"] = {"mean": np.cbrt(np.prod(three)).item()}
    return cells


def score(flags: argparse.Namespace) -> None:
    """A table for each file: means over its rows ± standard error."""
    machine = prepare(flags.device, flags.dtype)
    files = {file: list(read_rows(file, is_task)) for file in flags.files}
    for file, rows in files.items():
        if not rows:
            raise UserError(f"{file}: there are no rows in it")
    model, tokenizer = load_base(flags.model, machine.dtype, machine.device)
    cuts = {}
    for file, rows in files.items():
        if flags.cut:
            cuts[file] = sum(shorten(row, flags.cut, tokenizer) for _, row in rows)
        refuse_without_tokens(file, rows, tokenizer)
    models = models_to_score(flags, model, with_baselines=True)
    report = {}
    for file, rows in files.items():
        print(f"{file}: {counted(len(rows), 'row')}", end="")
        if flags.cut:
            print(f", {cuts[file]} with a prompt cut to {flags.cut:,} tokens", end="")
        print()
        report[str(file)] = score_file(models, rows, tokenizer, machine)
    if flags.json:
        write_json(flags.json, report)


def score_file(
    models: dict[str, AdaptedLlama], rows: list[tuple[int, dict]], tokenizer: Tokenizer,
    machine: Machine,
) -> dict[str, dict]:
    """Print a line for each model. Returns its cells by its name."""
    methods = {}
    for name, adapted in models.items():
        columns, long = score_rows(adapted, rows, tokenizer, machine)
        cells = summary(columns)
        if not methods:
            print(f"{'':{NAME}}", *(f"{column:>13}" for column in cells))
        line = f"{name:{NAME}}"
        for cell in cells.values():
            text = " ±".join(f"{number:.3f}" for number in cell.values())
            line += f" {text:>13}"
        if long:
            trained = adapted.settings.length
            line += f"  {len(long)} above {trained:,} tokens: line {long[0]} ..."
        print(line, flush=True)
        methods[name] = cells | {"lines above the trained length": long}
    return methods


# --- The program ------------------------------------------------------------------------


def parse_for_rows(data: str) -> argparse.Namespace:
    """The flags behind the name of a data set. None of them is about a model."""
    parser = PlainParser(__doc__)
    parser.prog += f" {data}"
    parser.set_defaults(data=data)
    add = parser.add_argument
    add("source", type=Path, metavar="PATH", help="official folder; longbench: a file")
    add("--shots", type=at_least(0), default=0, help="answered rows in front of each")
    add("--seed", type=at_least(0), default=0, help="by which shots are drawn (default: 0)")
    add("--out", type=Path, required=True, help="file to write rows to")
    return parser.parse_args(sys.argv[2:])


def score_word(word: str) -> str:
    """An argparse type: the word score. Raises UserError."""
    if word != "score":
        raise UserError(f"{word}: the first word must be score or one of {', '.join(DATA)}")
    return word


def parse_for_score() -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("score", type=score_word, help="this word")
    add("files", type=Path, nargs="+", metavar="ROWS", help="files of rows")
    add("--cut", type=at_least(4), metavar="N", help="cut longer prompts in the middle")
    add("--run", dest="runs", type=Path, nargs="+", default=[], help="score these adapters")
    add_shared_flags(parser)
    return parse_models(parser)


def main() -> None:
    """The first word says what to do, and thereby which flags there are."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    if first in DATA:
        write_rows(parse_for_rows(first))
    else:
        score(parse_for_score())


if __name__ == "__main__":
    run_program(main)
