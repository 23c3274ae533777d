"""From a method's name and some numbers to Settings, and to a model that needs no training."""

import argparse
import sys
from dataclasses import replace

from lococo import KINDS, METHODS, AdaptedLlama, Settings, divided, interpolation
from lococo import with_slots
from model import Llama
from support.files import UserError


def settings_for(method: str, mem: int, segment: int, length: int, **changes) -> Settings:
    """Settings from a row of METHODS at M = mem. Each of `changes` that is not None replaces
    a field.

    What is missing to M slots goes to one kind: to merged, if the row has merged slots and
    `merged` is not among the changes, or else to recent. If that kind was given, too, there may
    be fewer than M slots: `h2o` with M = 128 and recent=0 has 64. A row without slots keeps all
    entries. Budgets are scaled to M slots on average. Raises UserError.
    """
    if method not in METHODS:
        raise UserError(f"method {method}: lococo.METHODS has {', '.join(METHODS)}")
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
        check_sizes(settings)
    return settings


def resized(
    settings: Settings, mem: int | None = None, segment: int | None = None,
    budgets: list[list[int]] | None = None, positions: str | None = None,
) -> Settings:
    """A trained memory in another size. None leaves a number as it was in training. Budgets
    are scaled to M slots on average, and an empty list means M everywhere. Raises
    UserError."""
    changed = replace(
        settings, segment=segment or settings.segment, positions=positions or settings.positions
    )
    if mem is None and budgets is None:
        return changed
    if settings.mem == settings.sinks:  # 0 if all is kept
        raise UserError(f"--mem, --budgets: {settings.method} has no slots to divide")
    budgets = settings.budgets if budgets is None else budgets
    changed = with_slots(changed, mem or settings.mem)
    changed = replace(changed, budgets=scaled(budgets, changed.mem) if budgets else [])
    check_sizes(changed)
    if settings.merged and not changed.merged:
        raise UserError(f"--mem {changed.mem}: it leaves no merged slot; take a larger --mem")
    return changed


def scaled(budgets: list[list[int]], mem: int) -> list[list[int]]:
    """Slots of heads in the same proportions, `mem` on average."""
    shares, heads = sum(budgets, []), len(budgets[0])
    slots = divided(mem * len(shares), shares)
    return [slots[n : n + heads] for n in range(0, len(slots), heads)]


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


def check_sizes(settings: Settings) -> None:
    """Raises UserError if a head has too few slots, or budgets do not suit the method."""
    if settings.mem == settings.sinks:  # 0 if all is kept
        none = f"{settings.method} has no slots to divide"
        raise UserError(f"{none}; take a larger --mem, or another method")
    least = settings.head_sizes[0]
    # At least 4, as for --mem. Each head has all sinks, and room for something else.
    too_few = least < max(4, settings.sinks + 1)
    if too_few or (settings.merged and with_slots(settings, least).merged == 0):
        few = f"{least} slots of a head are too few for {settings.method}"
        raise UserError(f"{few}; take a larger --mem")


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


def method_sizes(flags: argparse.Namespace, adapters: list[AdaptedLlama]) -> tuple[int, int]:
    """M and T of methods without training: those of the first adapter beside them that has
    slots, or else those of the flags."""
    for adapted in adapters:
        if adapted.settings.mem:
            return adapted.settings.mem, adapted.settings.segment
    mem = flags.mem or 512
    return mem, flags.segment or mem


def refuse_sizes(flags: argparse.Namespace) -> None:
    """Raises UserError if flags have sizes of slots, and no memory that is named has slots."""
    for name, value in flags.sizes.items():
        if value is not None:
            remedy = "name one by --method, or an adapter"
            raise UserError(f"--{name}: it needs a memory of slots; {remedy}")


def reach_of(adapted: AdaptedLlama) -> int:
    """The largest position that a base reads: its context times what positions are divided
    by."""
    config = adapted.model.config
    return round(config.context * interpolation(config, adapted.settings))


def keep_within_context(adapted: AdaptedLlama, tokens: int, new: int) -> None:
    """Number keys by slot, if so many tokens of a text and new ones behind it pass the base's
    context. A base that was tuned to divided positions stays as it is."""
    s, config, reach = adapted.settings, adapted.model.config, reach_of(adapted)
    by_slot = replace(s, positions="slots")
    same = interpolation(config, by_slot) == interpolation(config, s)
    if s.mem and s.positions == "text" and same and tokens + new > reach:
        adapted.settings = by_slot
        both = f"{tokens:,} tokens and {new:,} that may follow"
        passed = f"{both} pass the base's context of {reach:,}"
        print(f"note: {s.method}: {passed}; keys are numbered by slot", file=sys.stderr)


def warn_if_too_long(adapted: AdaptedLlama, tokens: int) -> None:
    """Print a warning if positions pass those that the base reads. Positions in the text end
    at `tokens`, those in the cache at M + T of the largest head."""
    settings, reach = adapted.settings, reach_of(adapted)
    by_slot = settings.positions == "slots" and settings.mem
    largest = settings.head_sizes[-1] + settings.segment
    positions = min(tokens, largest) if by_slot else tokens
    if positions <= reach:
        return
    if by_slot:
        remedy = "take a smaller --mem or --segment"
    elif settings.lora_rank:
        remedy = "train with a larger --seq, or with --positions slots"
    elif settings.mem:
        remedy = "read the text with --positions slots, which keeps them small"
    else:
        remedy = "--method h2o --mem 512 --positions slots keeps them small"
    reached = f"positions may reach {positions:,}, and the memory is for {reach:,}"
    print(f"warning: {settings.method}: {reached}; {remedy}", file=sys.stderr)
