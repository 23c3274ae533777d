"""LoCoCo with smaller first weights, or with a gate that starts at 0.

tools/tables.py imports this module, which adds the names to COMPRESSORS and METHODS. To use one
in another program, write `import tools.variants` there.
"""

import torch
from torch import nn

from lococo import COMPRESSORS, METHODS
from support.ours.official_code import OfficialCompressor


class ClosedGate(OfficialCompressor):
    """LoCoCo's code that begins by choosing, as H2O does."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gate = nn.Parameter(torch.tensor(0.0))


COMPRESSORS["official-closed"] = ClosedGate
METHODS["lococo-code-closed"] = lambda M: METHODS["lococo-code-0.02"](M) | {
    "compressor": "official-closed"
}
METHODS["lococo+h2o-0.02"] = lambda M: METHODS["lococo+h2o"](M) | {"start": 0.02}
