"""The file of an adapter: what was trained or fitted, and which base it belongs to."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lococo import COMPRESSORS, MEMORIES, METHODS, AdaptedLlama, Settings, position_divisor
from model import Llama, LlamaConfig, sampled
from support.ours.budgets import HeadSettings, check_budgets, with_ours
from support.command_line import resume_command
from support.files import UserError, checksum, read_file, write_file
from support.programs.settings import resized


class Adapter(NamedTuple):
    """What adapter.safetensors holds."""

    settings: Settings
    tensors: dict[str, Tensor]  # what was trained, by name
    base: str  # the checksum of its base, see `identity`
    parts: list[str]  # the parts of its texts (support.text.PARTS) that it was trained on
    trained: set[int]  # support.text.fingerprints of these


def identity(adapted: AdaptedLlama) -> dict:
    """The settings and a checksum of the base. The checksum covers the configuration and a
    sample of each frozen tensor, which is the same with any --dtype."""
    config = adapted.model.config
    about = repr(config) + (repr(config.llama3_rope) if config.llama3_rope else "")
    frozen = {n: p for n, p in adapted.named_parameters() if not p.requires_grad}
    read = {f"model.{n}": t for n, t in adapted.model.sample.items()}
    some = {n: read.get(n.replace(".base.", "."), sampled(p)) for n, p in frozen.items()}
    return dict(settings=asdict(with_ours(adapted.settings)), base=checksum(some, about))


def settings_of(file: Path, saved: dict) -> Settings:
    """From what `identity` has of the settings, in this file or run. Raises UserError."""
    try:
        settings = HeadSettings(**saved)
    except TypeError as error:
        raise UserError(f"{file}: it is by another version ({error})") from None
    rows = dict(method=METHODS, compressor=COMPRESSORS, memory=MEMORIES)
    for name, known in rows.items():
        own = getattr(settings, name)
        if own not in known:
            remedy = "import its file in support/ours/__init__.py, or make it again"
            raise UserError(f"{file}: its {name} {own!r} is unknown; {remedy}")
    return settings


TEXTS = "fingerprints of the texts"  # a tensor of an adapter's file


def write_adapter(
    run: Path, adapted: AdaptedLlama, parts: list[str], trained: set[int]
) -> None:
    about = identity(adapted) | {"parts": parts}
    texts = torch.tensor(sorted(trained), dtype=torch.int64, device="cpu")
    tensors = adapted.trained() | {TEXTS: texts}
    write_file(run / "adapter.safetensors", tensors, **about)


def read_adapter(run: Path) -> Adapter:
    """The adapter of a run directory of train.py. Raises UserError."""
    if not (run / "adapter.safetensors").exists():
        inside = sorted(file.parent for file in run.glob("*/adapter.safetensors"))
        if (run / "state.safetensors").exists():
            sentence = f"this run has not ended; to go on: {resume_command(run)}"
        elif run.is_file():
            remedy = "an adapter is a folder (texts are named by --data, budgets by --budgets)"
            sentence = f"this is a file; {remedy}"
        elif not run.exists():
            sentence = "there is no such folder; name an adapter, or a run of train.py"
        elif inside:
            sentence = f"name one of the runs in it: {', '.join(map(str, inside))}"
        else:
            sentence = "there is no adapter.safetensors; name a folder that train.py has made"
        raise UserError(f"{run}: {sentence}")
    tensors, about = read_file(run / "adapter.safetensors")
    try:
        settings = settings_of(run, about["settings"])
        base, parts, trained = about["base"], about["parts"], {*tensors.pop(TEXTS).tolist()}
    except (LookupError, TypeError) as error:
        raise UserError(f"{run}: its adapter is by another version ({error})") from None
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise UserError(f"{run}: {name} has numbers that are not finite; train it again")
    return Adapter(settings, tensors, base, parts, trained)


def refuse_other_positions(
    run: Path | str, config: LlamaConfig, before: Settings, now: Settings
) -> None:
    """Raises UserError if other sizes divide positions by another number."""
    divisors = [position_divisor(config, s) for s in (before, now)]
    if divisors[0] != divisors[1]:
        divided = f"positions were divided by {divisors[0]:.3g} in training"
        now_divided = f"and would be divided by {divisors[1]:.3g} now"
        raise UserError(f"{run}: {divided}, {now_divided}; take smaller sizes")


def load_adapter(run: Path | str, model: Llama, **sizes) -> AdaptedLlama:
    """The adapter of a run directory of train.py on its base model, for reading and not for
    training. `sizes` are the arguments of `resized`. The base itself stays as it is. Without
    LoRA it may have other weights of the same shapes, such as those before a quantization.
    Raises UserError."""
    adapter = read_adapter(Path(run))
    settings, tensors, base = adapter.settings, adapter.tensors, adapter.base
    remedy = "name its own by --model; an adapter of another version must be trained again"
    other = f"{run}: its adapter is for another base than --model, which is tiny/ if unnamed; {remedy}"
    try:
        check_budgets(settings.budgets, model.config)
    except UserError:
        raise UserError(other) from None
    changed = resized(settings, **sizes)
    refuse_other_positions(run, model.config, settings, changed)
    adapted = AdaptedLlama(model, changed).eval()
    trained = adapted.trained()
    # The shapes are compared, too, as a tensor of another shape could be broadcast.
    stored = {name: t.shape for name, t in tensors.items()}
    needed = {name: p.shape for name, p in trained.items()}
    same = identity(adapted)["base"] == base
    if stored != needed or (settings.lora_rank and not same):
        raise UserError(other)
    if not same:
        note = "its adapter was trained on other weights of the same shapes"
        print(f"note: {run}: {note}; it is used all the same", file=sys.stderr)
    for name, p in trained.items():
        p.data = tensors[name].to(p.device, copy=True)
    # The embeddings may be the output matrix, too. In float32 each call of the model would
    # convert all of them.
    adapted.model.tok_embeddings.to(adapted.model.dtype)
    return adapted
