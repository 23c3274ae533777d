"""A second backward pass, by which a memory learns to keep facts (recipe "embedded")."""

from torch import Tensor

from lococo import AdaptedLlama

EVERY = 3  # one piece in so many has the second backward pass


def add_answers(losses: Tensor, adapted: AdaptedLlama, weight: float, piece: int) -> None:
    """In the convolutions' gradient an answer counts `weight` times. An answer is the
    word of a fact that is told again. The usual backward pass counts it once. This adds
    the rest. `losses` are those of the answers in piece number `piece`.

    To save time, one piece in EVERY has this pass, EVERY times as large, so that the mean
    gradient over the steps, before it is clipped, is the same. Which pieces these are
    depends on the step, not on how the sequences are dealt out. LoRA does not get it,
    because plain text would suffer.
    """
    convolutions = list(adapted.compressors.parameters())
    if weight != 1 and piece % EVERY == 0 and convolutions and len(losses):
        extra = EVERY * (weight - 1) * losses.sum()
        extra.backward(inputs=convolutions, retain_graph=True)
