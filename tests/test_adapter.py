"""support/programs/adapter.py: adapters in files."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from conftest import refusal, same, settings

from generate import prefill
from lococo import AdaptedLlama
from model import load_llama
from support.command_line import HERE, TINY
from support.files import UserError, write_file
from support.programs.adapter import identity, load_adapter, read_adapter, write_adapter
from support.programs.settings import untrained

LORA_A = "model.layers.0.attention.wq.lora_a"


def adapter(model) -> AdaptedLlama:
    """With random weights."""
    adapted = AdaptedLlama(model, settings("lococo-code", 8, 8, 64, lora_rank=2)).eval()
    for p in adapted.trained().values():
        p.data += 0.3 * torch.randn(p.shape)
    return adapted


def test_an_adapter_comes_back_on_its_base_alone(model, tmp_path):
    """A base stays as it is, also one that is refused."""
    base, scaled, turned, rounded = (copy.deepcopy(model) for _ in range(4))
    adapted, tokens = adapter(model), torch.arange(60)[None]
    write_adapter(tmp_path, adapted, ["training"], set())
    scaled.layers[1].feed_forward.w2.weight.data *= 1.1
    turned.config = replace(turned.config, rope_theta=20000.0)
    for other in (scaled, turned):
        before = {name: t.clone() for name, t in other.state_dict().items()}
        refusal(load_adapter, tmp_path, "for another base", args=(other,))
        assert same(other.state_dict(), before)
    loaded = load_adapter(tmp_path, base)
    assert loaded.settings == adapted.settings
    assert torch.equal(*(prefill(m.model, tokens, m.cache(), 8) for m in (adapted, loaded)))
    half = load_adapter(tmp_path, rounded.bfloat16())
    assert half.model.tok_embeddings.weight.dtype == torch.bfloat16
    half.model.tok_embeddings.weight.data = adapted.model.tok_embeddings.weight
    assert same(half.trained(), adapted.trained())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_knows_its_base_in_every_dtype(dtype):
    """float16 rounds small numbers to others than bfloat16 does."""
    bases = [load_llama(TINY, dtype), load_llama(TINY)]
    one, other = (identity(untrained(base, "h2o", 16, 16)) for base in bases)
    assert one == other


def test_without_lora_other_weights_of_the_same_shapes_are_taken(model, tmp_path, capsys):
    """Such as those before a quantization. A note says so."""
    base = copy.deepcopy(model)
    base.layers[1].feed_forward.w2.weight.data *= 1.1
    adapted = AdaptedLlama(model, settings("lococo", 8, 8, 64, lora_rank=0))
    write_adapter(tmp_path, adapted, ["training"], set())
    assert same(load_adapter(tmp_path, base).trained(), adapted.trained())
    assert "trained on other weights of the same shapes" in capsys.readouterr().err


def test_an_adapter_is_used_with_more_slots(model, tmp_path):
    """A learned score serves any number of slots; the paper's compressor has a filter for each."""
    base, tokens = copy.deepcopy(model), torch.arange(60)[None]
    adapted = AdaptedLlama(model, settings("learned", 16, 8, 64, lora_rank=0)).eval()
    write_adapter(tmp_path, adapted, ["training"], set())
    loaded = load_adapter(tmp_path, base, mem=24, segment=12)
    cache = loaded.cache()
    prefill(loaded.model, tokens, cache, 12)
    assert loaded.settings == settings("learned", 24, 12, 64, lora_rank=0)
    assert cache.keys[0].size == 36 and same(loaded.trained(), adapted.trained())
    write_adapter(tmp_path, AdaptedLlama(model, settings("lococo", 8, lora_rank=0)), [], set())
    with pytest.raises(UserError, match="it has a filter for each merged slot; leave --mem"):
        load_adapter(tmp_path, base, mem=24)


def test_what_positions_were_divided_by_stays(model, tmp_path):
    """A base that was tuned to divided positions would read others badly."""
    base = copy.deepcopy(model)
    by_slot = settings("h2o", 8, 8, 256, positions="slots", lora_rank=2)
    write_adapter(tmp_path, AdaptedLlama(model, by_slot), ["training"], set())
    with pytest.raises(UserError, match="divided by 1 in training, and would .* by 3.25 now; take"):
        load_adapter(tmp_path, base, mem=200)


@pytest.mark.parametrize("folder", sorted((HERE / "adapters").glob("*/*/")), ids=str)
def test_what_the_repository_has_can_be_read(folder):
    """One adapter in each folder, of at most 1 MB, whose page says how it is made."""
    adapter = read_adapter(folder)
    assert adapter.settings.compressor == "learned"
    assert len(adapter.settings.budgets) == 30
    assert (folder / "adapter.safetensors").stat().st_size <= 1e6
    assert f"`{folder.name}/`" in (folder.parent / "README.md").read_text()


def test_a_run_that_has_not_ended_has_no_adapter(model, tmp_path):
    write_file(tmp_path / "state.safetensors", {})
    sentence = "this run has not ended; to go on: python train.py --resume"
    refusal(load_adapter, tmp_path, sentence, args=(model,))


@pytest.mark.parametrize("change, sentence", [
    (lambda tensors, about: tensors.update({LORA_A: tensors[LORA_A][:1]}),  # it could broadcast
     "another version"),
    (lambda tensors, about: tensors[LORA_A].data.view(-1)[:1].fill_(math.nan), "not finite"),
    (lambda tensors, about: about["settings"].pop("method"), "another version"),
    (lambda tensors, about: about.pop("base"), "another version"),
    (lambda tensors, about: about["settings"].update(method="magic"), "method 'magic' is unknown"),
    # A program that adds a compressor to COMPRESSORS makes adapters that others cannot read.
    (lambda tensors, about: about["settings"].update(compressor="magic"),
     "compressor 'magic' is unknown"),
    (lambda tensors, about: about["settings"].update(memory="magic"), "memory 'magic' is unknown")])
def test_adapters_that_cannot_be_used_are_refused(model, tmp_path, change, sentence):
    base, adapted = copy.deepcopy(model), adapter(model)
    tensors = adapted.trained() | {"fingerprints of the texts": torch.empty(0)}
    about = identity(adapted) | {"parts": []}
    change(tensors, about)
    write_file(tmp_path / "adapter.safetensors", tensors, **about)
    refusal(load_adapter, tmp_path, sentence, args=(base,))
