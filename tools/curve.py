"""Learning curves: how far does a longer training take LoCoCo's code, or another row?

    python tools/curve.py code-1-0.5@5e-2:60 selection@2e-2:240:1 \\
        --model SmolLM2-135M --prose prose --out docs/curves.jsonl

A cell is NAME@RATE:STEPS[:SEED[:BATCH]]. The base is frozen, M = T = 64, and a step has four
sequences of 1,024 tokens, or BATCH. NAME is `code-START-GATE`, which is LoCoCo's code with
these first values (GATE is 0 or 0.5), `paper-START`, which is the paper's `lococo+h2o`, or
`selection`. What trains, and what is scored, is as in the table "frozen" of
tools/tables.py. A run goes on where it was stopped.

A cell becomes one line of the file: the nats of each document of the choosing and of the test
part, the gates of the layers, and the standard deviation of the weights in the first layer.
"""

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import official_code
import tables
import train
from eval_ppl import token_losses
from lococo import COMPRESSORS, METHODS
from model import load_base
from support.command_line import HERE, PlainParser, prepare, run_program
from support.files import as_json, read_file
from support.programs.adapter import load_adapter


class ClosedGate(official_code.OfficialCompressor):
    """LoCoCo's code whose gate starts at 0: as its H2O."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gate = nn.Parameter(torch.tensor(0.0))


COMPRESSORS["official-closed"] = ClosedGate
ROWS = {"code": "lococo-code", "paper": "lococo+h2o"}  # of METHODS


def train_cell(
    name: str, rate: str, steps: str, seed: str, batch: str, out: Path, options
) -> None:
    """Train, or go on."""
    line = ["--recipe", "inference", "--conv-lr", rate, "--steps", steps]
    line += ["--seed", seed, "--batch", batch]
    line += ["--model", str(options.model), "--dtype", options.dtype, "--device", "cpu"]
    line += ["--score-tokens", "0", "--save-every", "8", "--out", str(out)]
    line += ["--data", *(str(options.prose / book) for book in tables.BOOKS)]
    if name != "selection":
        kind, start, *gate = name.split("-")
        tables.refuse_unknown(kind, ROWS, "name")
        changes = {"start": float(start)}
        if gate and float(gate[0]) == 0:
            changes["compressor"] = "official-closed"
        METHODS[name] = lambda M: METHODS[ROWS[kind]](M) | changes
        line += ["--method", name]
    if (out / "state.safetensors").is_file():
        line = ["--resume", str(out)]
    train.run(*train.parse(line))


def main() -> None:
    parser = PlainParser(__doc__)
    add = parser.add_argument
    add("cells", nargs="+", metavar="CELL", help="NAME@RATE:STEPS[:SEED[:BATCH]]")
    add("--model", type=Path, required=True, help="directory of the base")
    add("--prose", type=Path, required=True, help="as of tools/tables.py")
    add("--dtype", choices=("float32", "bfloat16"), default="float32",
        help="of the base (default: float32)")
    add("--out", type=Path, required=True, help="where lines are added")
    options = parser.parse_args()
    machine = prepare("cpu", options.dtype)
    model, tokenizer = load_base(options.model, machine.dtype)
    parts = {}
    for part in ("choosing", "test"):
        table = replace(tables.FROZEN, part=part)
        parts[part] = tables.documents_of(table, options, tokenizer)
    for cell in options.cells:
        kind, steps, *more = cell.split(":")
        seed = more[0] if more else "0"
        batch = more[1] if len(more) > 1 else "4"
        name, rate = kind.split("@")
        out = HERE / "runs" / "curve" / cell.replace(":", "-")
        if not (out / "adapter.safetensors").is_file():
            with redirect_stdout(sys.stderr):
                train_cell(name, rate, steps, seed, batch, out, options)
        adapted = load_adapter(out, model)
        row = {"cell": cell, "dtype": options.dtype} | tables.origin()
        for part, documents in parts.items():
            nats, _, _ = token_losses(adapted, documents, machine, 8)
            means = nats.double().mean(dim=1)
            row[part] = means.mean().item()
            row[f"{part} by document"] = [round(mean, 5) for mean in means.tolist()]
        tensors, _ = read_file(out / "adapter.safetensors")
        row["gates"] = [round(t.item(), 4) for n, t in tensors.items() if n.endswith("gate")]
        row["deviation"] = round(tensors["compressors.0.conv.weight"].std().item(), 4)
        with open(options.out, "a", encoding="utf-8") as file:
            file.write(as_json(row) + "\n")


if __name__ == "__main__":
    run_program(main)
