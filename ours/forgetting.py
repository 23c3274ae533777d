"""H2O that forgets: earlier attention counts less, as in A2SF (arXiv 2407.20485).

At each segment the attention received so far is multiplied by 0.75, so that what was read long
ago loses its slot to what is read now. With more heavy slots than H2O has, 5/8 of M, the loss on
SmolLM2 with 512 slots and 8,192 tokens is 0.0132 +- 0.0018 nats per token lower than that of
H2O (docs/results.md). The field `forget` of Settings is what the official code needs, too.
"""

from lococo import METHODS

METHODS["h2o+forget"] = lambda M: dict(heavy=M * 5 // 8, recent=M - M * 5 // 8, forget=0.75)
