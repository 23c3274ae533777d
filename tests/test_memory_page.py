"""The page of --show-memory page.html: its shares, its text, and its view in a browser."""

import json
import os
import re
import shutil
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from subprocess import run as run_command
from unittest.mock import Mock

import pytest
import torch
from conftest import settings
from reference import by_loop, slow_memory

import generate
from generate import TracedMemory
from lococo import KINDS, AdaptedLlama
from model import Llama
from support.command_line import HERE, TINY
from support.memory_page import PLACE, TEMPLATE, page_record, slot_record, token_texts
from support.memory_page import write_page

BROWSER = shutil.which("chromium")
TEXTS = {
    "script": "</script><!-- <script> ]]> &amp; THE_DATA_OF_THE_PAGE\n",
    "quotes": "say \"a\" and 'b', `c`, a \\ and ${d}\r\n\ttab\x00\x1f",
    "emoji": "snake 🐍, family 👩‍👩‍👧, flag 🇳🇴, é and e\u0301",
    "right to left": "שלום עולם, مرحبا (1)\n",
    "separators": "a\u2028b\u2029c\ufffd\ufffd d\ufffd",
}


class Scripts(HTMLParser):
    """The scripts of a page, as a browser finds them; and everything that it would fetch."""

    def __init__(self):
        super().__init__()
        self.scripts, self.fetched = [], []

    def handle_starttag(self, tag, attributes):
        if tag == "script":
            self.scripts.append("")
        self.fetched += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        if self.cdata_elem == "script":
            self.scripts[-1] += data


def data_of(file: str | Path) -> dict:
    """The data of a page. It has two scripts, and fetches nothing."""
    parser = Scripts()
    parser.feed(Path(file).read_bytes().decode("utf-8"))
    assert len(parser.scripts) == 2 and parser.fetched == []
    return json.loads(parser.scripts[0])


def pairs(record: int | list[int]) -> dict[int, int]:
    """Of a slot: {token: share in hundredths}."""
    return {record: 100} if isinstance(record, int) else dict(zip(record[::2], record[1::2]))


# --- Shares -----------------------------------------------------------------------------


def slots_by_hand(matrices: list[torch.Tensor]) -> list[list[dict[int, float]]]:
    """For each compression, given its W, what the slots hold: {token: share}."""
    compressions, entries, read = [], [], 0
    for W in matrices:
        while len(entries) < W.shape[1]:  # those that have come since the compression before
            entries.append({read: 1.0})
            read += 1
        slots = []
        for row in W.tolist():
            slot = {}
            for weight, entry in zip(row, entries):
                for token, share in entry.items():
                    slot[token] = slot.get(token, 0) + weight * share
            slots.append(slot)
        compressions.append(slots)
        entries = [*slots]
    return compressions


@torch.no_grad()
@pytest.mark.parametrize("method, changes", [
    ("streaming", dict(sinks=2)), ("h2o", {}), ("lococo", dict(sinks=1, heavy=2, recent=2)),
    ("lococo", dict(recent=1, compressor="facts")), ("lococo+h2o+recent", {})])  # fmt: skip
def test_the_shares_are_those_of_a_slow_memory(config, method, changes):
    """Three compressions of two heads: from W of the slow memory to shares, by loops."""
    torch.manual_seed(1)
    adapted = AdaptedLlama(Llama(replace(config, n_layers=1)), settings(method, **changes))
    cache = adapted.cache(partial(TracedMemory, layers=[0]))
    segments = []
    for _ in range(5):
        k, v = torch.randn(2, 1, 2, 6, 8)
        segments.append((2 * k.repeat_interleave(2, dim=1) + torch.randn(1, 4, 6, 8), k, v))
        cache.enter(6)
        cache.attend(0, *segments[-1])
    record = page_record("a memory", cache, {}, "next")
    assert record["read"] == [12, 18, 24] and len(record["held"]) == 3
    for head in range(2):
        own = [(q[0, 2 * head : 2 * head + 2], k[0, head], v[0, head]) for q, k, v in segments]
        matrices = [slow_memory(adapted, own[:n], by_loop)[2] for n in (3, 4, 5)]
        for compression, slots in enumerate(slots_by_hand(matrices)):
            found = record["held"][compression][0][head]
            assert len(found) == len(slots) == 8
            for slot, expected in zip(found, slots):
                largest = sorted(expected.values(), reverse=True)[:3]
                largest = [100 * share for share in largest if share >= 0.01]
                assert [*pairs(slot).values()] == pytest.approx(largest, abs=0.51)
                for token, share in pairs(slot).items():
                    assert share == pytest.approx(100 * expected[token], abs=0.51)


@pytest.mark.parametrize("shares, record", [
    ([1.0, 0.0, 0.0], 7), ([0.996, 0.004, 0.0], 7), ([0.99, 0.01, 0.0], [7, 99, 8, 1]),
    ([0.5, 0.25, 0.25], [7, 50, 8, 25, 9, 25]), ([0.009, 0.009, 0.009], [])])  # fmt: skip
def test_a_slot_is_written_in_few_letters(shares, record):
    assert slot_record(shares, [7, 8, 9]) == record


# --- Text -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_every_text_survives(run, text):
    """Between other words, as the whole of a text, and at its end."""
    for whole in (text, f"x = 1  # {text}\nreturn x\n" * 4, f"see {text}"):
        Path("page.html").unlink(missing_ok=True)
        Path("prompt.txt").write_bytes(whole.encode("utf-8"))
        words = "--prompt prompt.txt --method h2o --mem 8 --show-memory page.html"
        code, _, err = run(generate, words)
        assert code == 0, err
        data = data_of("page.html")
        assert "".join(data["tokens"]) == whole
        nameless = {str(n) for n, token in enumerate(data["tokens"]) if not token}
        assert data["names"].keys() == nameless and data["names"]["0"] == "<s>"


def test_what_could_end_a_script_is_escaped(own_folders):
    """A tokenizer may have a token for all of it."""
    tokens = ["</script>", "<!-- <script>", "\u2028 \x00 \" '"]
    write_page(Path("page.html"), tokens, {}, [])
    assert data_of("page.html")["tokens"] == tokens


def test_a_character_of_several_tokens_stands_at_the_last_of_them(tokenizer):
    ids = tokenizer.encode("a 🐍b")
    texts, names = token_texts(ids, tokenizer)
    snake = texts.index("🐍")
    assert texts[snake - 3 : snake + 2] == ["", "", "", "🐍", "b"] and snake - 1 in names


# --- The program ------------------------------------------------------------------------


def printed_size(data: dict, memory: dict) -> str:
    """What is printed about a memory of the page, at its last place."""
    tokens, last = len(data["tokens"]), memory["read"][-1] if memory["read"] else 0
    entries = tokens - last + (sum(memory["counts"].values()) if last else 0)
    own, full = entries * memory["entry_bytes"], tokens * memory["entry_bytes"]
    return f"{own:,} bytes; the full cache would hold {full:,}\n"


def test_three_memories_on_one_page(run, monkeypatch):
    """Methods have the adapter's M and T, and the figures are those that are printed. The last
    compression of a head is what the two numbers print."""
    prompt = (HERE / "assets" / "prompt.txt").read_text()[:1100]
    Path("prompt.txt").write_text(prompt)
    words = f"--prompt prompt.txt --adapter {TINY} --method streaming h2o --show-memory page.html"
    code, out, err = run(generate, words)
    assert (code, out) == (0, "") and "open page.html in a browser" in err, err
    assert sorted(Path().glob("*.*")) == [Path("page.html"), Path("prompt.txt")]
    data = data_of("page.html")
    assert "".join(data["tokens"]) == prompt
    memories = data["memories"]
    names = [memory["name"] for memory in memories]
    assert names == ["ours (lococo+window), adapter tiny", "window (streaming)", "H2O"]
    assert [[*memory["counts"].values()] for memory in memories] == [
        [4, 0, 24, 100], [4, 0, 0, 124], [0, 64, 0, 64]]  # fmt: skip
    for memory in memories:
        assert printed_size(data, memory) in err
        assert memory["segment"] == 128 and memory["read"] == [256, 384]
        assert len(memory["held"]) == 2 and len(memory["held"][0]) == memory["layers"] == 4
        assert {len(layer) for layer in memory["held"][0]} == {memory["heads"]} == {2}

    for flags, memory in (("--method h2o --mem 128", memories[2]), ("", memories[0])):
        words = f"--prompt prompt.txt {flags} --temperature 0 --max-new-tokens 1"
        assert run(generate, words)[1] == memory["next"] + "\n"
        for layer, head in ((1, 0), (3, 1)):
            words = f"--prompt prompt.txt {flags} --show-memory {layer} {head}"
            lines = run(generate, words)[1].splitlines()[1:]
            for line, slot in zip(lines, memory["held"][-1][layer][head], strict=True):
                shown = re.findall(r" (\d\.\d\d) (?:'.*?'|\".*?\") +(\d+)", line)
                found = {int(token): share for share, token in shown}
                assert found == {n: f"{share / 100:.2f}" for n, share in pairs(slot).items()}


def test_a_page_before_any_compression(run):
    """Of a text that fits."""
    code, _, err = run(generate, "--prompt - --show-memory page.html", b"a short text")
    assert code == 0 and "nothing is compressed up to M + T = 256" in err
    data = data_of("page.html")
    memory = data["memories"][0]
    assert memory["held"] == memory["read"] == [] and printed_size(data, memory) in err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("x"), OSError(28, "full")])
def test_nothing_is_left_of_a_page_that_fails(run, monkeypatch, error):
    """While a text is read, and while the page is written."""
    for name in ("generate.prefill", "support.files.os.fsync"):
        with monkeypatch.context() as broken:
            broken.setattr(name, Mock(side_effect=error))
            try:
                code = run(generate, "--prompt text/0.py --show-memory page.html")[0]
            except RuntimeError:
                code = None
        assert code != 0 and not Path("page.html").exists()


# --- The template -----------------------------------------------------------------------


def test_the_template_is_a_page_of_its_own():
    text = TEMPLATE.read_text("utf-8")
    assert text.count(PLACE) == 1 and "http" not in text and "innerHTML" not in text
    assert max(map(len, text.splitlines())) <= 100
    assert all(f".{kind} {{ --own" in text for kind in KINDS)


def test_the_picture_of_the_mechanism_has_the_colours_of_the_page():
    """They are those of the light page, which come first in it."""
    page, picture = TEMPLATE.read_text("utf-8"), (HERE / "tools" / "mechanism.py").read_text()
    colours = dict(re.findall(r'"(\w+)": "(#\w{6})"', picture))
    assert colours.keys() == {"heavy", "merged", "recent"}
    for kind, colour in colours.items():
        assert re.search(rf"--{kind}: (#\w+);", page)[1] == colour


def in_a_browser(page: str, view: str) -> str:
    """What is in the page's document when the address names this view; the console says nothing."""
    flags = ["--headless", "--disable-gpu", "--enable-logging=stderr"]
    flags += ["--virtual-time-budget=2000"]  # milliseconds that the page is given
    flags += ["--no-sandbox"] * (os.geteuid() == 0)  # Chromium refuses to run as root with it
    address = f"{Path(page).resolve().as_uri()}#{view}"
    done = run_command([BROWSER, *flags, "--dump-dom", address], capture_output=True, text=True)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    return done.stdout.split("<main")[1].split("</main>")[0]


@pytest.mark.skipif(not BROWSER, reason="chromium is not installed")
def test_a_browser_shows_a_long_text_near_the_viewport_only(run):
    Path("prompt.txt").write_text((HERE / "assets" / "prompt.txt").read_text() * 2)
    words = f"--prompt prompt.txt --adapter {TINY} --method streaming --show-memory page.html"
    assert run(generate, words)[0] == 0
    shown = in_a_browser("page.html", "compression=17&layer=1&head=0&token=72")
    ours, window = shown.split("<section")[1:]
    assert "gone in all layers and heads; in layer 1, head 0, since compression 1." in window
    assert "There it is only merged from compression 1 on" in ours
    there = [*map(int, re.findall(r'data-token="(\d+)"', ours))]
    assert 72 in there and len(there) < 3000 < len(data_of("page.html")["tokens"])
    assert re.search(r'class="slot merged lit".*?1\.00 “ socket”', ours)


def page_by_hand() -> None:
    """Eight tokens a to h, a slot of each kind, two heads and two compressions. The heavy slot of
    head 0 has a mixture: its tokens are not kept word for word. In head 1 token c leaves."""
    first = [0, [1, 60, 2, 40], [2, 75, 1, 25], 4]
    second = [0, 1, [3, 50, 2, 50], 4]
    last = [0, 1, [3, 50, 1, 50], 6]
    memory = {"name": "by hand", "counts": dict.fromkeys(KINDS, 1), "segment": 2, "layers": 1}
    memory |= {"heads": 2, "entry_bytes": 100, "next": "i", "read": [5, 7]}
    memory["held"] = [[[first, second]], [[first, last]]]
    write_page(Path("page.html"), [*"abcdefgh"], {}, [memory])


@pytest.mark.skipif(not BROWSER, reason="chromium is not installed")
@pytest.mark.parametrize("head, expected", [
    # Of both heads: tokens 0 to 4, then the segment of 5 and 6. Token 7 has not been read.
    ("0", ["held sinks", "held merged", "held merged", "gone", "held recent"]),
    ("1", ["held sinks", "held heavy", "held merged", "held merged", "held recent"]),
    ("all", ["held sinks", "held heavy", "held merged", "held merged", "held recent"]),
])  # fmt: skip
def test_a_browser_colours_tokens_by_what_holds_them(own_folders, head, expected):
    page_by_hand()
    shown = in_a_browser("page.html", f"compression=1&layer=0&head={head}")
    found = re.findall(r'class="([\w ]*)" data-token="(\d)"', shown)
    classes = [*expected, "segment", "segment", "unread"]
    assert found == [(kind, str(token)) for token, kind in enumerate(classes)]
    slots = re.findall(r'<div class="slot (\w+)".*?</div>', shown)
    if head == "all":  # a mean over slots of different heads would say nothing
        assert slots == [] and "Slots differ between heads." in shown
    else:
        assert slots == [*KINDS] and {"0": "0.60", "1": "1.00"}[head] + " “b”" in shown


@pytest.mark.skipif(not BROWSER, reason="chromium is not installed")
@pytest.mark.parametrize("view, words", [
    ("compression=0&layer=0&head=0&token=3",
     ["0 slots + 5 new tokens = 5 entries, 500 bytes", "an entry of its own, not compressed yet",
      "In layer 0, head 0 it is lost at compression 1."]),
    ("compression=1&layer=0&head=0&token=3",
     ["4 slots + 2 new tokens = 6 entries, 600 bytes",
      "a full cache would have 7 entries, 700 bytes",
      "gone in layer 0, head 0, since compression 1; layer 0, head 1 still has it"]),
    ("compression=1&layer=0&head=0&token=1",
     ["share 0.60 of heavy slot 1 and 0.25 of merged slot 2 in layer 0, head 0",
      "only merged from compression 1 on; it is not among the sinks, heavy hitters and recent"]),
    ("compression=1&layer=0&head=1&token=2",
     ["There it is merged from compression 1 on, and lost at compression 2."]),
    ("compression=2&layer=0&head=1&token=2", ["head 0 still has it", "It was merged from"]),
    ("compression=1&layer=0&head=1&token=0", ["There it is kept word for word to the end."]),
    ("compression=2&layer=0&head=1&token=7", ["The text ends before it is compressed."]),
    ("compression=2&layer=all&head=all&token=5",
     ["gone in all layers and heads since compression 2"]),
    ("compression=1&layer=0&head=all&token=2",
     ["mean share 0.63; the largest is share 0.75 of merged slot 2 and 0.40 of heavy slot 1"]),
])  # fmt: skip
def test_a_browser_says_what_becomes_of_a_token(own_folders, view, words):
    page_by_hand()
    shown = in_a_browser("page.html", view)
    assert [sentence for sentence in words if sentence not in shown] == []
