"""Budgets as in other papers, for the rows of support/ours/published.py.

    python tools/field_budgets.py adapters/smollm2-135m/budgets.json

Beside this file of tools/budgets.py stand then, for M = 896 and T = 128:

    budgets-pyramid.json  PyramidKV (arXiv 2406.02069): each layer has fewer slots than the
                          one before, the last a 20th of M
    budgets-duo.json      DuoAttention (arXiv 2410.10819): the eight neediest heads keep all
                          of 8,192 tokens, and the others share out what is left
    budgets-layers.json   Ada-KV (arXiv 2407.11550) shares out slots among the heads of a
                          layer: so does this, in the proportions of the file's budgets
"""

import shlex
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.command_line import PlainParser, run_program
from support.files import FOREIGN, UserError, read_json, write_json
from support.ours.budgets import scaled

M, T, L = 896, 128, 8192
RETRIEVAL_HEADS = 8


def read_measured(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """The need of each head, and its slots, both (layers, heads). Raises UserError."""
    try:
        measured = read_json(file)
        needs, slots = np.array(measured["needs"], float), np.array(measured["budgets"], int)
        if needs.ndim != 2 or needs.shape != slots.shape or needs.size <= RETRIEVAL_HEADS:
            raise ValueError
    except FOREIGN:
        none = f"it has no needs and budgets of more than {RETRIEVAL_HEADS} heads"
        raise UserError(f"{file}: {none}; tools/budgets.py measures them") from None
    return needs, slots


def main() -> None:
    parser = PlainParser(__doc__)
    parser.add_argument("budgets", type=Path, help="a file of tools/budgets.py")
    file = parser.parse_args().budgets
    needs, slots = read_measured(file)
    layers, heads = needs.shape
    least = M // 20
    pyramid = np.linspace(2 * M - least, least, layers).astype(int)
    neediest = needs >= np.sort(needs, axis=None)[-RETRIEVAL_HEADS]
    left = needs.size * M - RETRIEVAL_HEADS * (L - T)
    window = left // (needs.size - RETRIEVAL_HEADS)
    made = {
        "pyramid": np.repeat(pyramid[:, None], heads, axis=1).tolist(),
        "duo": np.where(neediest, L - T, window).tolist(),
        "layers": [scaled([row], M)[0] for row in slots.tolist()],
    }
    command = shlex.join(["python", "tools/field_budgets.py", str(file)])
    for name, budgets in made.items():
        out = file.with_name(f"{file.stem}-{name}.json")
        write_json(out, {"made by": command, "budgets": budgets})


if __name__ == "__main__":
    run_program(main)
