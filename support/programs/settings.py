"""From a method's name and some numbers to Settings, and to a model that needs no
training."""

import argparse
import sys
from dataclasses import replace

from lococo import COMPRESSORS, MEMORIES, AdaptedLlama, Settings, position_divisor, settings_for
from model import Llama
from support.ours.budgets import BudgetMemory, HeadSettings, scaled, with_ours, with_slots
from support.files import UserError


Budgets = list[list[int]]  # slots of the key/value heads of each layer


def make_settings(
    method: str, mem: int, segment: int, length: int, budgets: Budgets | None = None, **changes
) -> HeadSettings:
    """As lococo.settings_for. Budgets are scaled to M slots on average. Raises
    UserError."""
    settings = settings_for(method, mem, segment, length, **changes)
    if not budgets:
        return with_ours(settings)
    settings = with_ours(settings, budgets=scaled(budgets, settings.mem))
    check_sizes(settings)
    return settings


def resized(
    settings: HeadSettings, mem: int | None = None, segment: int | None = None,
    budgets: Budgets | None = None, bits: int | None = None,
) -> HeadSettings:
    """A trained memory in another size. None leaves a number as it was in training. Budgets
    are scaled to M slots on average, and an empty list means M everywhere. Raises
    UserError."""
    bits = settings.bits if bits is None else bits
    changed = replace(settings, segment=segment or settings.segment, bits=bits)
    if settings.merged and changed.segment != settings.segment:
        remedy = f"its compressor was trained with {settings.segment}; leave --segment out"
        raise UserError(f"--segment {changed.segment}, {settings.method}: {remedy}")
    if mem is None and budgets is None:
        return changed
    check_sizes(settings)
    budgets = settings.budgets if budgets is None else budgets
    changed = with_slots(changed, mem or settings.mem)
    changed = replace(changed, budgets=scaled(budgets, changed.mem) if budgets else [])
    check_sizes(changed)
    if settings.merged and changed.mem != settings.mem:
        remedy = "it has a filter for each merged slot; leave --mem out"
        raise UserError(f"--mem {changed.mem}, {settings.method}: {remedy}")
    return changed


def check_sizes(settings: HeadSettings) -> None:
    """Raises UserError if a head has too few slots, or budgets do not suit the method."""
    if settings.mem == settings.sinks:  # 0 if all is kept
        remedy = "take a larger --mem" if settings.mem else "leave --mem and --budgets out"
        raise UserError(f"{settings.method} has no slots to divide; {remedy}, or another method")
    if settings.merged and settings.budgets:
        none = "a method with merged slots has as many in each head"
        raise UserError(f"--budgets, {settings.method}: {none}; leave them out")
    least = min(sum(settings.budgets, []), default=settings.mem)
    # At least 4, as for --mem. Each head has all sinks, and room for something else.
    if least < max(4, settings.sinks + 1):
        few = f"{least} slots of a head are too few for {settings.method}"
        raise UserError(f"{few}; take a larger --mem")


def untrained(
    model: Llama, method: str, mem: int, segment: int, budgets: Budgets | None = None,
    bits: int = 0, **changes,
) -> AdaptedLlama:
    """A method that needs no training, on its base model. None leaves budgets equal.
    `changes` are as in lococo.settings_for. Raises UserError."""
    length = model.config.longest
    settings = make_settings(method, mem, segment, length, budgets, lora_rank=0, **changes)
    settings = replace(settings, bits=bits)
    refuse_not_fitted(settings)
    if settings.merged:
        flags = f"--model MODEL --method {method} --data TEXTS --out RUN"
        missing = f"it must be trained first: python train.py {flags}"
        raise UserError(f"method {method}: {missing}; then name RUN (generate.py: --adapter RUN)")
    return AdaptedLlama(model, settings).eval()


def refuse_not_fitted(settings: Settings) -> None:
    """Raises UserError if a method needs numbers that another program makes."""
    program = COMPRESSORS[settings.compressor].fitted_by
    if program:
        needs = f"its score must be fitted first, by {program}; name the run by --adapter"
        raise UserError(f"--method {settings.method}: {needs}")


def refuse_not_compressed(flag: str, L: int, s: Settings) -> None:
    """Raises UserError if a text of L tokens, which `flag` has given, fits into a memory."""
    if L - 1 <= s.capacity:
        sizes = f"a memory of {s.mem} slots and a segment of {s.segment} tokens"
        nothing = f"it fits into {sizes}, so that nothing is compressed"
        remedy = f"take a larger {flag}, or a smaller --mem and --segment"
        raise UserError(f"{flag} {L}: {nothing}; {remedy}")


# What to try where there is no adapter.
SUGGESTED = "--method h2o+forget --mem 512, or --adapter RUN"


def check_slots(settings: Settings) -> None:
    """Raises UserError if there are no slots to show or to save, or if the class of the memory
    cannot do it."""
    if not settings.mem:
        reason = "it keeps everything and has no slots"
        raise UserError(f"{settings.method}: {reason}; take {SUGGESTED}")
    if not issubclass(MEMORIES[settings.memory], BudgetMemory):
        remedy = "let its class inherit from BudgetMemory"
        raise UserError(f"memory {settings.memory}: it cannot be shown or saved; {remedy}")


def method_sizes(flags: argparse.Namespace, adapters: list[AdaptedLlama]) -> dict[str, int]:
    """M, T and bits of methods without training: those of the first adapter beside them that
    has slots, or else those of the flags."""
    for adapted in adapters:
        s = adapted.settings
        if s.mem:
            return dict(mem=s.mem, segment=s.segment, bits=s.bits)
    mem = flags.mem or 512
    return dict(mem=mem, segment=flags.segment or mem, bits=flags.bits or 0)


def refuse_sizes(flags: argparse.Namespace) -> None:
    """Raises UserError if flags have sizes of slots, and no memory that is named has
    slots."""
    for name, value in flags.sizes.items():
        if value is not None:
            remedy = "name a --method that has slots, or an adapter"
            raise UserError(f"--{name}: it needs a memory of slots; {remedy}")


def warn_if_too_long(adapted: AdaptedLlama, tokens: int) -> None:
    """Print a warning if the base does not read so many tokens of a text well. In a full
    cache distances do not end. In a memory they end at a ceiling
    (support/ours/ceiling.py), which needs room for the new segment and the one before it,
    or by slot at M + T of the largest head."""
    s, config = adapted.settings, adapted.model.config
    known = round(config.context * position_divisor(config, s))
    farthest, remedy = tokens, "--method h2o+forget --mem 512 reads texts of any length"
    if s.mem and s.positions == "slots":
        farthest, remedy = s.largest + s.segment, "take a smaller --mem or --segment"
    elif s.mem:
        farthest, remedy = 2 * s.segment, "take a smaller --segment"
    elif s.lora_rank:
        remedy = "train with a larger --seq"
    if min(tokens, farthest) > known:
        needed = f"it needs distances of {min(tokens, farthest):,} tokens"
        sentence = f"{needed}, and the base knows up to {known:,}"
        print(f"warning: {s.method}: {sentence}; {remedy}", file=sys.stderr)
