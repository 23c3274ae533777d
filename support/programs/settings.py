"""From a method's name and some numbers to Settings, and to a model that needs no training."""

import sys
from dataclasses import replace

from lococo import KINDS, METHODS, AdaptedLlama, Settings, in_layer
from model import Llama
from support.files import UserError


def settings_for(method: str, mem: int, segment: int, length: int, **changes) -> Settings:
    """Settings from a row of METHODS at M = mem. Each of `changes` that is not None replaces
    a field.

    Slots that are left over go to the merged ones, or else to the recent ones. With
    `selection`, M = 128 and sinks=4, heavy=0, recent=100 there are 24 merged slots. With
    merged=24 in the place of recent=100 there are 100 recent slots. If both counts are given,
    or the only one that the row has, there may be fewer than M slots: `h2o` with M = 128 and
    recent=0 has 64. A row without slots keeps all entries. Budgets are scaled to M slots on
    average. Raises UserError.
    """
    row = METHODS[method](mem)
    given = {name: value for name, value in changes.items() if value is not None}
    chosen = row | given
    counts = {kind: chosen.get(kind, 0) for kind in KINDS}
    left_over = "merged" if "merged" in row and "merged" not in given else "recent"
    if row and left_over not in given:
        counts[left_over] += mem - sum(counts.values())

    rule = broken_rule(row, counts, mem)
    if rule:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise UserError(f"method {method}, mem {mem}: {listed} slots do not fit; {rule}")
    settings = Settings(method, segment, length, **chosen | counts)
    if settings.budgets:
        settings = replace(settings, budgets=scaled(settings.budgets, settings.mem))
        check_budgets(settings)
    return settings


def scaled(budgets: list[int], mem: int) -> list[int]:
    """Slots of layers in the same proportions, `mem` on average. What rounding leaves over
    goes to the largest."""
    total = mem * len(budgets)
    slots = [n * total // sum(budgets) for n in budgets]
    slots[slots.index(max(slots))] += total - sum(slots)
    return slots


def broken_rule(row: dict, counts: dict[str, int], mem: int) -> str | None:
    """Why these counts of slots do not suit a row of METHODS; None if they do."""
    total = sum(counts.values())
    if not row:
        return "this method keeps everything and has no slots" if total else None
    if "merged" in row and counts["merged"] == 0:
        return "this method needs merged slots; leave room for them"
    if not 0 < total <= mem or min(counts.values()) < 0:
        return f"together they must be from 1 to {mem}, and none negative"
    return None


def check_budgets(settings: Settings) -> None:
    """Raises UserError if the budgets do not suit the other settings."""
    budgets = settings.budgets
    if not settings.mem:
        raise UserError(f"budgets: {settings.method} keeps everything and has no slots")
    layers = [in_layer(settings, layer) for layer in range(len(budgets))]
    # At least 4, as for --mem. Each layer has all sinks, and room for something else.
    too_few = min(budgets) < max(4, settings.sinks + 1) or settings.mem == settings.sinks
    if too_few or (settings.merged and min(s.merged for s in layers) == 0):
        few = f"{min(budgets)} slots of a layer are too few for {settings.method}"
        raise UserError(f"budgets: {few}; take a larger --mem")


def untrained(model: Llama, method: str, mem: int, segment: int, **changes) -> AdaptedLlama:
    """A method that needs no training, on its base model; `changes` as in `settings_for`.
    Raises UserError."""
    length = int(model.config.context * model.config.rope_scale)
    settings = settings_for(method, mem, segment, length, **changes | {"lora_rank": 0})
    if settings.merged:
        command = f"python train.py --model MODEL --method {method} --data TEXTS --out RUN"
        missing = f"its convolution must be trained first: {command}, then take RUN"
        raise UserError(f"method {method}: {missing}")
    return AdaptedLlama(model, settings).eval()


def warn_if_too_long(settings: Settings, tokens: int) -> None:
    """Print a warning if positions pass those that a memory is for. Positions in the text
    end at `tokens`, those in the cache at M + T."""
    by_slot = settings.positions == "slots" and settings.mem
    largest = max(settings.budgets, default=settings.mem) + settings.segment
    positions = min(tokens, largest) if by_slot else tokens
    if positions <= settings.length:
        return
    if settings.merged or settings.lora_rank:
        remedy = "train with a larger --seq, or with --positions slots"
    elif by_slot:
        remedy = "take a smaller --mem or --segment"
    elif settings.mem:
        remedy = "--positions slots keeps them small"
    else:
        remedy = "--method h2o --mem 512 --positions slots keeps them small"
    reached = f"positions may reach {positions:,}, and the memory is for {settings.length:,}"
    print(f"warning: {settings.method}: {reached}; {remedy}", file=sys.stderr)
