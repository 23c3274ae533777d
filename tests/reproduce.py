"""The paper's experiments at the scale of the embedded model, unattended: hours on two cores.

    python tests/reproduce.py                         # all of it; run it again to go on where it stopped
    python tests/reproduce.py --scales 2 --seeds 0    # twice the pretrained context, one seed
    python tests/reproduce.py --keep                  # in a new clone: only what tests/reproduce.json does not have

Every cell trains as `train.py` does, with the same data, steps and seed, and is scored as by `eval_ppl.py` on the
held-out part; two at a time, one core each. What is finished is found in runs/reproduce/ and not done again. After
every cell tests/reproduce.json and, between their marks, the tables of tests/results.md are written anew, with the
rows that there are.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))
import train  # noqa: E402
from eval_ppl import Corpus, by_position, evaluate, load_base, scored_batches, untrained  # noqa: E402
from lococo import LoCoCo  # noqa: E402

OUT = HOME / "runs" / "reproduce"
MARKS = "<!-- tests/reproduce.py writes from here -->", "<!-- to here -->"
CONTEXT, MEM, TOKENS, DOCUMENTS = 1024, 128, 8192, 24  # TOKENS: of a step
LENGTHS = (512, 1024, 2048, 4096, 8192)

SLOTS, LAST = ("--positions", "slots"), ("--positions", "original")
OURS = ("--method", "lococo")  # as the embedded recipe has it
PAPER = ("--filters", "0", "--normalise", "sum")
OFFICIAL = ("--filters", "0", "--normalise", "softmax-relu", "--blend", "0.5", "--score", "last")
WINDOW, H2O = ("--method", "streaming"), ("--method", "h2o", *SLOTS)
SINKS = (*WINDOW, "--sinks", "8", "--recent", "0")
LOCOCO_H2O = ("--method", "lococo+h2o", *SLOTS)
METHODS = {  # row of the main table: flags of train.py
    "full": ("--method", "full", *LAST),
    "window: 4 sinks + 124 recent": WINDOW,
    "H2O: 64 heavy + 64 recent": H2O,
    "LoCoCo, the recipe: 4 sinks + 16 merged + 108 recent": OURS,
    "LoCoCo + H2O: 64 heavy + 64 merged": (*LOCOCO_H2O, *PAPER),
    "the same, official code's settings": (*LOCOCO_H2O, *OFFICIAL),
    "LoCoCo: 128 merged": ("--method", "lococo", "--sinks", "0", "--recent", "0", *PAPER),
    "LoCoCo + sinks: 4 sinks + 124 merged": ("--method", "lococo+sinks", *SLOTS, *PAPER),
    "8 sinks, then the segment (the paper's StreamingLLM)": SINKS,
    "LongLoRA": ("--method", "longlora", *LAST),
}
EVICTION = (WINDOW, H2O, SINKS)
SEEDED = list(METHODS)[:4]  # the ones that get every seed
INFERENCE = {"8 sinks, then the segment": SINKS, "window": WINDOW, "H2O": H2O, "LoCoCo, the recipe": OURS,
             "LoCoCo + H2O": (*LOCOCO_H2O, *PAPER)}
VARIANTS = {  # the recipe with something changed, at twice the context
    "the recipe": (),
    "equation 8": ("--normalise", "sum"),
    "softmax of the ReLU": ("--normalise", "softmax-relu"),
    "a filter per slot (the paper)": ("--filters", "0"),
    "a filter per slot, depthwise": ("--filters", "0", "--depthwise"),
    "gradient through one segment (the paper)": ("--bptt", "1"),
    "a learnt blend with one-hot rows (official code)": ("--blend", "0.5"),
    "no sinks, 112 recent": ("--sinks", "0"),
    "8 sinks, 104 recent": ("--sinks", "8"),
    "32 merged, 92 recent": ("--recent", "92"),
    "62 merged, 62 recent": ("--recent", "62"),
    "124 merged, nothing recent": ("--recent", "0"),
    "the same, equation 8": ("--recent", "0", "--normalise", "sum"),
    "the same, a filter per slot": ("--recent", "0", "--filters", "0"),
    "the same, a filter per slot, depthwise": ("--recent", "0", "--filters", "0", "--depthwise"),
    "16 heavy, 16 merged, 92 recent": ("--heavy", "16", "--recent", "92"),
    "the same, score per query": ("--heavy", "16", "--recent", "92", "--score", "mean"),
    "the same, the last segment's score": ("--heavy", "16", "--recent", "92", "--score", "last"),
    "original positions": LAST,
    "kernel 3": ("--kernel", "3"),
    "kernel 11": ("--kernel", "11"),
    "kernel 41": ("--kernel", "41"),
    "kernel 61": ("--kernel", "61"),
}
MEMORIES, SIZED = (64, MEM, 256), {"window": WINDOW, "H2O": H2O, "LoCoCo, the recipe": OURS}
LONGER = 4  # times the steps


class Cell(NamedTuple):
    flags: tuple  # of train.py
    seq: int = 2 * CONTEXT
    seed: int = 0
    mem: int = MEM
    segment: int = MEM
    frozen: bool = False  # the inference mode: compressors alone
    times: int = 1  # the steps

    def folder(self, steps: int) -> Path:
        steps *= self.times
        name = "".join(self.flags).replace("--", "-").strip("-") or "base"
        return OUT / f"{name}-{self.seq}-m{self.mem}-t{self.segment}-s{self.seed}-{steps}{'-frozen' * self.frozen}"

    def measure(self, steps: int) -> None:
        """Train and score, unless that is done; leaves table.json in the folder, at the end."""
        folder, batch = self.folder(steps), max(TOKENS // self.seq, 1)
        steps *= self.times
        words = ["--device", "cpu", "--mem", self.mem, "--segment", self.segment, "--seq", self.seq, "--steps", steps]
        words += ["--seed", self.seed, "--batch", batch, "--micro-batch", batch, "--out", folder, *self.flags]
        sys.argv = ["train.py", *map(str, words)]
        args, begun = train.parse(), time.process_time()
        if self.frozen:
            args.lora_rank = 0
        recipe = {name: getattr(args, name) for name in train.RECIPES}
        if (folder / "table.json").is_file():
            if json.loads((folder / "table.json").read_text())["recipe"] != recipe:
                raise RuntimeError(f"{folder} was measured with another recipe; delete it")
            return
        folder.mkdir(parents=True, exist_ok=True)
        model, tokenizer = load_base(args)
        corpus = Corpus([], tokenizer)

        if self.frozen and not self.flags:
            method = lambda length: None  # noqa: E731
        elif self.frozen and self.flags in EVICTION:  # nothing to train
            method = lambda length: LoCoCo(model, untrained(args, args.method, length))  # noqa: E731
        else:
            lococo = LoCoCo(model, train.settings_of(args))
            lococo.start_training()
            data = train.Sequences(corpus, corpus.part("training"), args.seq, args.seed)
            if train.train(lococo, data, args, train.make_optimizer(lococo, args)):
                raise KeyboardInterrupt
            lococo.save(folder / "adapter.safetensors")
            lococo.remove()
            method = lambda length: LoCoCo.load(folder, model)  # noqa: E731
        lengths = [n for n in LENGTHS if n <= self.seq or not self.frozen]
        batches = {n: scored_batches(corpus, "held-out", n, "cpu", DOCUMENTS, 8) for n in lengths}
        row = evaluate(model, method, batches)
        row["name"] = " ".join(map(str, self))
        where = by_position([row], torch.cat(batches[lengths[-1]]))
        del row["losses"]
        content = {**row, "recipe": recipe, "by_position": where, "minutes": (time.process_time() - begun) / 60}
        (folder / "table.part").write_text(json.dumps(content, indent=1))
        (folder / "table.part").replace(folder / "table.json")

    def row(self, steps: int) -> dict[int, float] | None:
        """{evaluation length: perplexity}, if measured."""
        table = self.folder(steps) / "table.json"
        if not table.is_file():
            return None
        return {int(n): value for n, value in json.loads(table.read_text())["perplexity"].items()}


def work_quietly() -> None:
    """A worker: one core, no progress bars of its own."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")


def text(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def table(head: list[str], lengths: tuple, rows: list[tuple[list[str], list[dict | None]]]) -> list[str]:
    head = [*head, *(f"{n:,}" for n in lengths)]
    lines = ["", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for names, seeds in rows:
        if measured := [row for row in seeds if row]:
            lines.append("| " + " | ".join([*names, *(text([row[n] for row in measured]) for n in lengths)]) + " |")
    return lines


def closed(rows: dict[str, list[dict | None]], length: int) -> str:
    """How much of the gap in nats to full attention the recipe closes, from H2O and from the better eviction."""
    if not all(any(rows[name]) for name in SEEDED):
        return "not all measured"
    full, window, h2o, ours = (statistics.mean(math.log(row[length]) for row in rows[name] if row) for name in SEEDED)
    best = min(window, h2o)
    return (f"H2O is {h2o - full:.4f} nats above full attention, the window {window - full:.4f}, the recipe "
            f"{ours - full:.4f}: it closes {round(100 * (h2o - ours) / (h2o - full))} % of H2O's gap and "
            f"{round(100 * (best - ours) / (best - full))} % of the smaller one")  # fmt: skip


UNTOUCHED = [Cell(flags, LENGTHS[-1], frozen=True) for flags in ((), WINDOW)]


def write(scales: list[int], seeds: list[int], steps: int) -> None:
    files = sorted(file for n in (steps, steps * LONGER) for file in OUT.glob(f"*-{n}*/table.json"))
    record = {file.parent.name: json.loads(file.read_text()) for file in files}
    hours = sum(cell["minutes"] for cell in record.values()) / 60
    about = (f"`python tests/reproduce.py --scales {' '.join(map(str, scales))} --seeds {' '.join(map(str, seeds))} "
             f"--steps {steps}`: {len(record)} cells measured, {hours:.1f} hours of one core, {DOCUMENTS} held-out "
             f"documents for each length, {time.strftime('%Y-%m-%d')}.")  # fmt: skip

    def rows(name: str, scale: int) -> list[dict | None]:
        return [Cell(METHODS[name], CONTEXT * scale, s).row(steps) for s in (seeds if name in SEEDED else seeds[:1])]

    lines = [about, "", f"**Extended**: M = T = {MEM}, {steps} steps of {TOKENS:,} tokens, held-out perplexity (mean ± "
             f"standard deviation where there are two or three seeds)."]  # fmt: skip
    base, window = (cell.row(steps) for cell in UNTOUCHED)
    untouched = [(["-", "untouched base, full cache"], [base]),
                 (["-", f"untouched base, {list(METHODS)[1]}"], [window])]  # fmt: skip
    cells = {scale: {name: rows(name, scale) for name in METHODS} for scale in scales}
    lines += table(["trained at", "method"], LENGTHS, untouched + [
        ([f"{CONTEXT * scale:,}", name], row) for scale in scales for name, row in cells[scale].items()])  # fmt: skip
    for scale in scales:
        lines += ["", f"Trained and scored at {CONTEXT * scale:,}: {closed(cells[scale], CONTEXT * scale)}."]
    lines += ["", f"**Inference mode**: base frozen, {CONTEXT:,} tokens, M = T, compressors alone trained."]
    lines += table(["ratio", "method"], LENGTHS[:2], [(["1:1", "full cache"], [base])] + [
        ([f"{CONTEXT // mem}:1", name], [Cell(flags, CONTEXT, seed, mem, mem, True).row(steps) for seed in seeds])
        for mem in (64, 32) for name, flags in INFERENCE.items()])  # fmt: skip
    lines += ["", f"**Variants** of the recipe, trained at {2 * CONTEXT:,} tokens, seed {seeds[0]}."]
    lines += table(["changed"], LENGTHS, [([name], [Cell((*OURS, *flags), seed=seeds[0]).row(steps)])
                                          for name, flags in VARIANTS.items()])  # fmt: skip
    lines += ["", f"**Memory size**, trained at {2 * CONTEXT:,} tokens, T = {MEM}, seed {seeds[0]}."]
    lines += table(["M", "method"], LENGTHS, [(["8", "8 sinks, then the segment"], [Cell(SINKS).row(steps)])] + [
        ([str(mem), name], [Cell(flags, seed=seeds[0], mem=mem).row(steps)])
        for mem in MEMORIES for name, flags in SIZED.items()])  # fmt: skip
    longer = [([name], [Cell(METHODS[name], seed=seeds[0], times=LONGER).row(steps)]) for name in SEEDED]
    if any(row for _, (row,) in longer):
        lines += ["", f"**Longer training**: {LONGER} times the steps, at {2 * CONTEXT:,} tokens, seed {seeds[0]}."]
        lines += table(["method"], LENGTHS, longer)
    readme = HOME / "tests" / "results.md"
    before, rest = readme.read_text().split(MARKS[0])
    readme.write_text("\n".join([before + MARKS[0], *lines, MARKS[1]]) + rest.split(MARKS[1])[1])
    (HOME / "tests" / "reproduce.json").write_text(json.dumps({"about": about, "cells": record}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=int, nargs="+", choices=(2, 4, 8), default=[2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--keep", action="store_true", help="what tests/reproduce.json has counts as done")
    parser.add_argument("--jobs", type=int, default=2, help="cells at a time, one core each")
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    if args.keep:
        for name, cell in json.loads((HOME / "tests" / "reproduce.json").read_text())["cells"].items():
            (OUT / name).mkdir(exist_ok=True)
            (OUT / name / "table.json").write_text(json.dumps(cell, indent=1))
    main_table = [Cell(METHODS[name], CONTEXT * scale, seed) for seed in args.seeds for scale in args.scales
                  for name in METHODS if seed == args.seeds[0] or name in SEEDED]  # fmt: skip
    frozen = [Cell(flags, CONTEXT, seed, mem, mem, True) for seed in args.seeds for mem in (64, 32)
              for flags in INFERENCE.values() if seed == args.seeds[0] or flags == OURS]  # fmt: skip
    small = [Cell((*OURS, *flags), seed=args.seeds[0]) for flags in VARIANTS.values()]
    small += [Cell(flags, seed=args.seeds[0], mem=mem) for mem in MEMORIES for flags in SIZED.values()]
    small += [Cell(METHODS[name], seed=args.seeds[0], times=LONGER) for name in SEEDED]
    jobs = list(dict.fromkeys([*UNTOUCHED, *main_table, *frozen, *small]))
    with ProcessPoolExecutor(args.jobs, initializer=work_quietly) as pool:
        running = [pool.submit(cell.measure, args.steps) for cell in jobs]
        try:
            for done in tqdm(as_completed(running), total=len(jobs), unit=" cells"):
                done.result()
                write(args.scales, args.seeds, args.steps)
        except BaseException:  # Ctrl-C too: what is running ends, nothing else begins
            pool.shutdown(wait=False, cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
