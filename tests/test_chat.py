"""generate.py --ask: questions as a chat template writes them."""

import json
import re
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import generate
import needle
from model import load_llama
from support.chat import Chat, read_chat
from support.command_line import TINY
from support.files import UserError
from support.programs.settings import untrained
from support.prompt import question_ids
from support.tokenizer import Tokenizer

# In the form of Llama-2's and of SmolLM2's.
LLAMA = ("{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content']"
         " + ' [/INST]' }}{% else %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}{% endfor %}")
SMOL = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<s>system\nYou help</s>\n' }}{% endif %}"
        "{{ '<s>' + message['role'] + '\n' + message['content'] + '</s>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}")
TOKENS = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
OPENS, CLOSES = "<s>system\nYou help</s>\n<s>user\n", "</s>\n<s>assistant\n"
ASK = "--temperature 0 --max-new-tokens 6 --method h2o --mem 512"


def put(folder: Path, **content) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def chatty(own_folders) -> Path:
    """The embedded model with a chat template."""
    folder = put(Path("chatty"), chat_template=SMOL)
    for file in TINY.iterdir():
        if file.is_file() and file.name not in ("tokenizer_config.json", "adapter.safetensors"):
            (folder / file.name).symlink_to(file)
    return folder


@pytest.mark.parametrize("content, expected", [
    (dict(chat_template=LLAMA, **TOKENS), Chat("<s>[INST] ", " [/INST]", " </s><s>[INST] ")),
    (dict(chat_template=[{"name": "default", "template": SMOL}]),
     Chat("<s>system\nYou help</s>\n<s>user\n", "</s>\n<s>assistant\n", "</s>\n<s>user\n")),
    (dict(bos_token="<s>"), None)])
def test_what_a_template_puts_around_words(tmp_path, content, expected):
    assert read_chat(put(tmp_path, **content)) == expected
    if expected:  # a file of its own goes first
        (tmp_path / "chat_template.jinja").write_text(SMOL.replace("You help", "Be brief"))
        assert "Be brief" in read_chat(tmp_path).opens


@pytest.mark.parametrize("template, fault", [
    ("{% for", "does not render"), ("{{ raise_exception('no users') }}", r"does not render \(no users"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "does not render"),
    ("{{ messages[0].content }}", "does not have each message once"),
    ("{{ missing.content }}", "does not render")])
def test_a_template_that_is_no_good_is_refused(tmp_path, template, fault):
    """Also one that reaches out of the sandbox."""
    put(tmp_path, chat_template=template)
    with pytest.raises(UserError, match=rf"tokenizer_config.json: its chat template {fault}"):
        read_chat(tmp_path)


@pytest.mark.parametrize("content", ["[]", '{"chat_template": [{"name": "default"}]}'])
def test_a_file_that_another_program_would_not_write(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(UserError, match="tokenizer_config.json: its chat template cannot be read"):
        read_chat(tmp_path)


def answer_by_hand(folder, *pieces):
    """What the base says to a chat. Its pieces are markup, words, markup ... Nothing is forgotten."""
    base, tokenizer = load_llama(folder), Tokenizer(folder)
    ids = [i for n, piece in enumerate(pieces) for i in tokenizer.continued(piece, n % 2 == 0)]
    written = []
    with torch.no_grad():
        while len(written) < 6:
            token = int(base(torch.tensor([ids + written]))[0, -1].argmax())
            if token in tokenizer.ends:
                break
            written.append(token)
    return tokenizer.decode([*tokenizer.x, *written])[1:]


@pytest.mark.parametrize("template, expected", [(LLAMA, "</s>"), (SMOL, "</s>"),
                                                (SMOL.replace("</s>", "User"), None)])
def test_an_answer_ends_at_the_special_token_behind_it(chatty, template, expected):
    """Also if the template has a blank before it; without such a token it ends nowhere."""
    tokenizer = Tokenizer(chatty)
    chat = read_chat(put(chatty, chat_template=template, **TOKENS))
    _, ends = question_ids("who", True, chat, tokenizer)
    assert [tokenizer.tokens.name(i) for i in ends] == [expected] * (expected is not None)


def test_a_question_stands_in_the_chat(run, chatty):
    """Behind the text, in the first turn; that is what a model reads at once. A memory that was saved
    answers the same, in any order."""
    book = Path("text/0.py").read_text()[:300]
    Path("book").write_text(book)
    expected = {
        q: answer_by_hand(chatty, OPENS, book, "", f"\n\n{q}", CLOSES)
        for q in ("def what(x):", "return y")
    }
    for question, answer in expected.items():
        code, out, err = asks(run, f"{ASK} --model chatty --prompt book --ask", [question])
        assert (code, out) == (0, f"> {question}\n{answer}\n"), err
    assert run(generate, f"{ASK} --model chatty --prompt book --save-memory m")[0] == 0
    words = "--model chatty --load-memory m --temperature 0 --max-new-tokens 6 --ask"
    for order in ([*expected], [*expected][::-1]):
        code, out, err = asks(run, words, order)
        assert (code, out) == (0, "".join(f"> {q}\n{expected[q]}\n" for q in order)), err


def asks(run, words: str, questions: list[str]):
    """Run with questions on standard input."""
    patch = pytest.MonkeyPatch()
    lines = iter([*(f"{q}\n" for q in questions), ""])
    patch.setattr(generate, "sys", Mock(stdin=Mock(isatty=lambda: False, readline=lambda: next(lines)),
                                        stderr=sys.stderr))
    try:
        return run(generate, words)
    finally:
        patch.undo()


def test_a_text_that_is_in_no_turn_is_asked_in_a_turn_of_its_own(run, chatty):
    """Such as a chat that the user has written."""
    Path("book").write_text("<s>x = 1</s>")
    assert run(generate, f"{ASK} --model chatty --prompt book --special-tokens --save-memory m")[0] == 0
    words = "--model chatty --load-memory m --temperature 0 --max-new-tokens 6 --ask"
    expected = answer_by_hand(chatty, "<s>x = 1</s>", "", "</s>\n<s>user\n", "def f(x):", CLOSES)
    assert asks(run, words, ["def f(x):"])[:2] == (0, f"> def f(x):\n{expected}\n")
    both = f"{ASK} --model chatty --prompt book --special-tokens --ask"
    code, out, err = asks(run, both, ["def f(x):"])
    assert (code, out) == (0, f"> def f(x):\n{expected}\n") and "template" not in err
    code, _, err = asks(run, words.removeprefix("--model chatty "), ["return"])
    assert code == 0, err  # tiny/ is the same model


def test_a_needle_is_found_if_the_answer_has_its_word(chatty, monkeypatch):
    """Which is what the model says to the whole chat. The forms are asked at each depth in turn."""
    base, tokenizer, chat = load_llama(chatty), Tokenizer(chatty), read_chat(chatty)
    told = [needle.sentences_of(i, tokenizer, chat) for i in range(3)]
    at_depth_0 = [tokenizer.decode(facts[0].line) for facts in told]
    assert [line[:9] for line in at_depth_0] == ["The code ", "The passw", "One of th"]
    line, question, word, ends = told[0][0]
    asked = tokenizer.decode(line).removesuffix(f" is {word}.\n").replace("The", "What is the")
    assert tokenizer.decode(question).startswith(f"\n\n{asked}?")
    ids = tokenizer.continued(OPENS, special=True) + tokenizer.continued("x = 1\n")
    chat = [OPENS, "x = 1\n", "", f"\n\n{asked}?", CLOSES]
    monkeypatch.setattr(needle, "ANSWER", 6)
    said = max(re.findall(r"\w+", answer_by_hand(chatty, *chat).lower()), key=len)
    facts = [needle.Fact([], question, word, ends) for word in (said, said[:-1], f"x{said}")]
    found = [*needle.found(untrained(base, "full", 512, 512), ids, facts, tokenizer)]
    assert len(said) > 1 and found == [True, False, False]


def test_the_text_of_a_needle_stands_in_the_chat(run, chatty, monkeypatch):
    """Behind its opening, which takes the place of BOS."""
    asked, tokenizer = [], Tokenizer(chatty)

    def found(adapted, ids, facts, tokenizer):
        asked.append((ids, facts))
        return [True] * len(facts)

    monkeypatch.setattr(needle, "found", found)
    words = "--model chatty --method h2o --ask --lengths 500 --documents 1 --json n.json"
    code, out, err = run(needle, f"{words} --data {json.__file__} --part all")
    opens = tokenizer.continued(OPENS, special=True)
    (ids, facts), _ = asked  # of the full cache and of H2O
    assert code == 0 and "1.00" in out and ids[: len(opens)] == opens, err
    assert ids[len(opens)] not in tokenizer.prefix and len(facts) <= 3
    code, _, err = run(needle, "--ask")
    assert code == 2 and "has no chat template; leave it out" in err


def test_with_follow_up_an_answer_stays_in_the_memory(run, chatty):
    Path("book").write_text("x = 1\n")
    words = f"{ASK} --model chatty --prompt book --ask"
    one, two = "def f(x):", "return"
    chat = [OPENS, "x = 1\n", "", f"\n\n{one}", CLOSES]
    first = answer_by_hand(chatty, *chat)
    second = answer_by_hand(chatty, *chat, first, "</s>\n<s>user\n", two, CLOSES)
    code, out, err = asks(run, f"{words} --follow-up", [one, two])
    assert (code, out) == (0, f"> {one}\n{first}\n> {two}\n{second}\n"), err


def test_a_base_without_a_template_continues_the_text(run):
    """A note says so."""
    Path("book").write_text("x = 1\n")
    code, out, err = asks(run, f"{ASK} --prompt book --ask", ["def f(x):"])
    assert code == 0 and out and "this base has no chat template; questions simply continue" in err
    assert "note: cut after --max-new-tokens 6\n" in err


def test_ctrl_c_ends_an_answer_and_not_the_program(run, chatty, monkeypatch):
    Path("book").write_text("x = 1\n")
    usual, count = generate.decode, iter(range(9))

    def stopped(*args):
        if next(count) == 0:
            raise KeyboardInterrupt
        yield from usual(*args)

    words = f"{ASK} --model chatty --prompt book --ask"
    expected = asks(run, words, ["return"])[1]
    monkeypatch.setattr(generate, "decode", stopped)
    assert asks(run, words, ["def f(x):", "return"])[:2] == (0, "> def f(x):\n\n" + expected)
