"""What slots hold: their shares, as lines and as a page, its text and its view in a browser."""

import json
import os
import re
import shutil
from pathlib import Path
from subprocess import run as run_command

import pytest
import torch

import generate
import show_memory
from conftest import settings as small_settings
from generate import prefill
from lococo import KINDS, MEMORIES, AdaptedLlama, Memory, Settings
from support.command_line import HERE
from support.files import UserError
from support.memory_page import token_texts, write_page
from support.ours.budgets import BudgetMemory
from support.programs.saved_memory import Reader, save_memory
from support.programs.settings import check_slots
from support.programs.tracing import Tracing, page_record

BROWSER = shutil.which("chromium")
TEXTS = ["</script><!-- <script> ]]> &amp; THE_DATA_OF_THE_PAGE\n",
         "say \"a\" and 'b', a \\ and ${d}\r\n\ttab\x00\x1f a\u2028b\u2029\ufffdc",
         "snake \N{SNAKE}, \u0645\u0631\u062d\u0628\u0627, e\u0301 and \u5317"]


def data_of(file: str | Path) -> dict:
    """The data of a page. It has two scripts, and fetches nothing."""
    page = Path(file).read_bytes().decode("utf-8")
    scripts = re.findall("<script.*?>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2 and not re.search("(src|href)=", page)
    return json.loads(scripts[0])


def pairs(record: int | list[int]) -> dict[int, int]:
    """Of a slot: {token: share in hundredths}."""
    return {record: 100} if isinstance(record, int) else dict(zip(record[::2], record[1::2]))


# --- Shares -----------------------------------------------------------------------------


@pytest.mark.parametrize("counts, compressor, dtype", [
    ((0, 4, 4, 0), "official", torch.float32), ((2, 2, 3, 1), "paper", torch.float32),
    ((0, 4, 0, 4), "paper", torch.bfloat16)])  # H2O's mixing matrix has the dtype of the keys
def test_entries_are_the_mixtures_of_tokens_that_are_shown(model, counts, compressor, dtype):
    """8 slots read 40 tokens in segments of 8. After each compression keys and values are those
    that once entered, mixed by the shares; tracing changes nothing."""
    model = model.to(dtype)
    settings = Settings("a method", 8, 64, *counts, "slots", compressor, kernel=3, lora_rank=0)
    tokens = torch.randint(0, 64, (1, 40))
    entered, compressions = {0: [], 1: []}, []

    class Followed(Tracing, BudgetMemory):
        def attend(self, layer, q, k, v):
            entered[layer].append(torch.cat((k, v), dim=3)[0].float())
            return super().attend(layer, q, k, v)

        def compress(self, layer):
            result = super().compress(layer)
            compressions.append(self.seen)
            held = torch.cat((self.keys[layer].held, self.values[layer].held), dim=3)[0]
            shares = self.shares[layer]  # (G, M, tokens)
            mixtures = shares @ torch.cat(entered[layer], dim=1)
            assert torch.allclose(mixtures, held.float(), atol=1e-4)
            assert torch.allclose(shares.sum(dim=2), torch.ones(2, 8), atol=1e-5)
            return result

    adapted = AdaptedLlama(model, settings).eval()
    cache = adapted.cache(Followed)
    logits = [prefill(model, tokens, memory, 8) for memory in (cache, adapted.cache())]
    assert torch.equal(*logits) and cache.keys[0].size == 8 + 8
    assert compressions == [16, 16, 24, 24, 32, 32]
    held = page_record("a method", cache, "x")["heads"][1][0]["held"][-1]
    for shares, record in zip(cache.shares[1][0], held, strict=True):
        largest = zip(*shares.topk(3))
        assert pairs(record) == {int(n): round(100 * float(s)) for s, n in largest if s >= 0.01}


# --- Text -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_every_text_survives(own_folders, tokenizer, text):
    """Between other words, as the whole of a text, and at its end."""
    for whole in (text, f"x = 1  # {text}\nreturn x\n" * 4, f"see {text}"):
        write_page(Path("page.html"), *token_texts(tokenizer.encode(whole), tokenizer), [])
        data = data_of("page.html")
        assert "".join(data["tokens"]) == whole
        nameless = {str(n) for n, token in enumerate(data["tokens"]) if not token}
        assert data["names"].keys() == nameless and data["names"]["0"] == "<s>"


# --- The program ------------------------------------------------------------------------


def test_three_memories_on_one_page(run, stock):
    """Methods have the adapter's M and T, and the figures are those that are printed."""
    prompt = (HERE / "assets" / "prompt.txt").read_text()[:150]
    Path("prompt.txt").write_text(prompt)
    ours = f"--adapter {stock / 'adapter'}"
    words = f"--prompt prompt.txt {ours} --method streaming h2o --page page.html"
    code, out, err = run(show_memory, words)
    assert (code, out) == (0, "") and "open page.html in a browser" in err, err
    data = data_of("page.html")
    assert "".join(data["tokens"]) == prompt
    memories = data["memories"]
    counts = {"heavy": 10, "recent": 6}, {"sinks": 4, "recent": 12}, {"heavy": 8, "recent": 8}
    entry = 2 * 4 * 2 * 64 * 4  # bytes
    for memory, expected in zip(memories, counts, strict=True):
        assert (len(memory["heads"]), len(memory["heads"][0])) == (4, 2)
        for head in sum(memory["heads"], []):
            assert [*head["counts"].items()] == [*expected.items()]  # in the order of slots
            assert head["read"][:2] == [32, 48] and len(head["held"]) == len(head["read"])
        assert memory["bytes"] == (16 + len(data["tokens"]) - head["read"][-1]) * entry
        assert memory["full_bytes"] == len(data["tokens"]) * entry
        held = f"{memory['bytes']:,} bytes; the full cache would hold {memory['full_bytes']:,}\n"
        assert held in err

    for flags, memory in (("--method h2o --mem 16", memories[2]), (ours, memories[0])):
        words = f"--prompt prompt.txt {flags} --temperature 0 --max-new-tokens 1"
        assert run(generate, words)[1] == memory["next"] + "\n"


def test_a_memory_without_parts_is_not_shown_and_not_saved(model, monkeypatch, tmp_path):
    monkeypatch.setitem(MEMORIES, "own", Memory)
    adapted = AdaptedLlama(model, small_settings("h2o", memory="own"))
    with pytest.raises(UserError, match="memory own: it cannot be shown or saved; let its class"):
        check_slots(adapted.settings)
    with pytest.raises(UserError, match="memory own: it cannot be shown or saved; let its class"):
        save_memory(tmp_path / "memory", Reader(adapted, adapted.cache()))


def test_heads_with_budgets_have_their_own_slots(run, stock):
    """They are compressed whenever their slots and a segment are full."""
    Path("prompt.txt").write_text((HERE / "assets" / "prompt.txt").read_text()[:150])
    words = f"--method h2o --mem 8 --budgets {stock / 'heads.json'} --segment 8"
    code, _, err = run(show_memory, f"--prompt prompt.txt {words} --page page.html")
    assert code == 0, err
    [memory] = data_of("page.html")["memories"]
    for heads, M in zip(memory["heads"], (8, 8, 4, 12)):
        for head in heads:
            assert head["counts"] == {"heavy": M // 2, "recent": M // 2}
            assert head["read"][0] == (M + 8) // 8 * 8 and len(head["held"][0]) == M


# --- The template -----------------------------------------------------------------------


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
def test_a_browser_colours_tokens_by_what_holds_them(own_folders):
    """Eight tokens and two heads, each with a slot of each kind and two compressions. A token has
    the kind of the slot with its largest share. Token d, which the address names, is in a slot of
    head 1 alone."""
    first = [0, [1, 60, 2, 40], [2, 75, 1, 25], 4]
    second = [0, 1, [3, 50, 2, 50], 2]
    heads = [{"read": [5, 7], "held": [first, first]}, {"read": [4, 6], "held": [second, second]}]
    memory = {"name": "by hand", "bytes": 1234, "full_bytes": 5678, "next": "i"}
    memory["heads"] = [[{"counts": dict.fromkeys(KINDS, 1)} | head for head in heads]]
    write_page(Path("page.html"), [*"abcdefgh"], {}, [memory])
    shown = in_a_browser("page.html", "moment=3&layer=0&head=0&token=3")  # 6 tokens are read
    text = shown.split('class="text"')[1].split('class="slots"')[0]
    found = re.findall(r'class="([\w ]*)" data-token="(\d)"', text)
    classes = ["held sinks", "held heavy", "held merged", "gone lit", "held recent"]
    classes += ["reading", "unread", "unread"]
    assert found == [(kind, str(token)) for token, kind in enumerate(classes)]
    assert re.findall(r'<div class="slot (\w+)".*?</div>', shown) == [*KINDS]
    assert "0.60 \u201cb\u201d" in shown
    for words in ("1,234 bytes at the end, where a full cache has 5,678; next token: \u201ci\u201d",
                  "compression 1 of 2: 1 sinks, 1 heavy, 1 merged, 1 recent, 1 not compressed yet",
                  "token 3: gone; held in 1 of 2 heads: layer 0, head 1."):
        assert words in shown, shown
    shown = in_a_browser("page.html", "moment=2&layer=0&head=1&token=4")  # 5 tokens
    assert "token 4: not compressed yet; held in 2 of 2 heads" in shown
    shown = in_a_browser("page.html", "layer=0&head=1&token=3")  # all
    assert "token 3: 0.50 of merged slot 2; held in 1 of 2 heads" in shown
    assert re.findall(r'title="(compression \d: \w+)"', shown) == [
        "compression 1: merged", "compression 2: merged"]
