"""Perplexity by context length: the base model with its full cache, and each run with its memory.

    python eval_ppl.py                                        # the embedded model and adapter
    python eval_ppl.py runs/a runs/b --lengths 2048 4096 8192 --json table.json

Perplexity is exp(total negative log-likelihood / scored tokens): every token after the first is scored, segment
boundaries included. A document shorter than the length is left out, a longer one cut; each starts with BOS and
an empty memory. Columns of different lengths hold different documents: compare within a column.
"""

import json
import platform
import time
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from lococo import ALL, LoCoCo, adapter_file, adapter_settings, perplexity
from model import KVCache, Llama, UserError
from train import TINY, Corpus, Parser, exit_on_user_error, heldout_batches, load_base


def evaluate(model: Llama, new_cache: Callable[[], KVCache], batches: dict[int, list[Tensor]], segment: int) -> dict:
    """One row of the table: length -> perplexity, bytes of one sequence's cache, tokens/s over all lengths."""
    caches, ppl, begun = [], {}, time.time()

    def remembered() -> KVCache:
        caches[:] = [new_cache()]
        return caches[0]

    for length, documents in batches.items():
        ppl[length] = perplexity(model, remembered, documents, segment)
    last = list(batches.values())[-1]
    tokens = sum(batch.numel() for documents in batches.values() for batch in documents)
    return {
        "perplexity": ppl,
        "cache_bytes": caches[0].nbytes // len(last[-1]),
        "tokens_per_s": tokens / (time.time() - begun),
        "rope_factor": model.config.rope_scale,
    }


def main() -> None:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="run directories of train.py (default: the embedded adapter)")
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192], help="context lengths in tokens")
    add("--data", type=Path, nargs="+", default=[], metavar="PATH", help="as in train.py; its held-out part is scored")
    add("--documents", type=int, default=64, help="at most so many per length")
    add("--json", type=Path, metavar="FILE", help="write the table and its protocol there too")
    args = parser.parse_args()
    if min(args.lengths) < 2 or args.documents < 1:
        raise UserError("--lengths need at least 2 tokens and --documents at least 1")
    args.lengths = sorted(set(args.lengths))
    runs = args.runs or ([] if args.model else [TINY])
    for run in runs:
        adapter_settings(adapter_file(run))  # a wrong path is told before the work begins
    model, tokenizer = load_base(args)
    corpus = Corpus(args.data, tokenizer)
    batches = {length: heldout_batches(corpus, length, args.device, args.documents) for length in args.lengths}
    for length, documents in batches.items():
        if not documents:
            raise UserError(f"--lengths {length}: no held-out document of --data has so many tokens")
    rows = [{"name": "base, full cache", "slots": None, **evaluate(
        model, lambda: KVCache(model.config.n_layers), batches, segment=512)}]  # fmt: skip
    for run in runs:
        # Afresh, because an adapter overwrites embeddings and norms.
        model = Llama.from_pretrained(args.model or TINY, args.dtype, args.device)
        lococo = LoCoCo.load(run, model)
        slots = None if lococo.settings.mem == ALL else lococo.settings.mem
        rows.append({"name": str(run), "slots": slots,
                     **evaluate(model, lococo.cache, batches, lococo.settings.segment)})  # fmt: skip
    print_table(rows, batches)
    if args.json:
        protocol = {
            "model": str(args.model or "tiny/"), "data": [str(path) for path in args.data] or "Python's standard library",
            "documents": {length: sum(map(len, b)) for length, b in batches.items()},
            "scored_tokens": {length: sum(t[:, 1:].numel() for t in b) for length, b in batches.items()},
            "bos": True, "dtype": str(args.dtype), "device": args.device,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }  # fmt: skip
        args.json.write_text(json.dumps({"rows": rows, "protocol": protocol}, indent=2) + "\n")


def print_table(rows: list[dict], batches: dict[int, list[Tensor]]) -> None:
    width = max(len(row["name"]) for row in rows)
    print(f"{'':{width}} {'slots':>6} {'cache bytes':>12} {'tokens/s':>9}" + "".join(f"{n:>9}" for n in batches))
    for row in rows:
        print(f"{row['name']:{width}} {row['slots'] or '-':>6} {row['cache_bytes']:>12,} {row['tokens_per_s']:>9,.0f}"
              + "".join(f"{p:>9.3f}" for p in row["perplexity"].values()))  # fmt: skip
    counts = ", ".join(f"{sum(map(len, b))} of {length}" for length, b in batches.items())
    print(f"held-out documents scored: {counts} tokens; each starts with BOS and an empty cache")


if __name__ == "__main__":
    exit_on_user_error(main)
