"""Files of our own: what is read is what was written, and everything else is refused."""

import copy

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import model as model_module
from generate import prefill, settings_for
from lococo import AdaptedLlama, described, load_adapter
from model import UserError, checksum, read_file, write_file

TENSORS = {
    "a.b": torch.randn(3, 5), "steps": torch.tensor(7.0), "none": torch.empty(0, 3),
    "half": torch.randn(4, 3).bfloat16().T, "every other": torch.arange(9)[::2],
    "ids": torch.from_numpy(np.arange(6, dtype=np.int32)),
}  # fmt: skip
ABOUT = {"step": 3, "words": "na\u00efve", "a": [None, 0.1]}
LORA_A = "model.layers.0.attention.wq.lora_a"


def same(a: dict, b: dict) -> bool:
    alike = (t.dtype == b[name].dtype and torch.equal(t, b[name]) for name, t in a.items())
    return a.keys() == b.keys() and all(alike)


def refusal(call, *args) -> str:
    """The sentence by which it is refused: one line."""
    with pytest.raises(UserError) as caught:
        call(*args)
    assert str(caught.value).isprintable()
    return str(caught.value)


def test_a_changed_byte_is_noticed(tmp_path):
    """A bit is flipped in each byte of the header, of what is said and of each tensor, and the file
    is cut off in many places. What is read all the same is what was written."""
    file, read = tmp_path / "file", 0
    write_file(file, {"another": torch.ones(3)})  # is replaced
    write_file(file, TENSORS, **ABOUT)
    whole = file.read_bytes()
    changed = [whole[:at] for at in range(0, len(whole), 9)]
    for at, byte in enumerate(whole):
        changed.append(whole[:at] + bytes([byte ^ 1 << at % 8]) + whole[at + 1 :])
    for content in [whole, *changed]:
        file.write_bytes(content)
        try:
            tensors, found = read_file(file)
            assert same(tensors, TENSORS) and found == ABOUT
            read += 1
        except UserError as error:
            assert str(error).startswith(f"{file}: ") and str(error).isprintable()
    assert 1 <= read < 10  # the whole, and changes of its padding
    zeros = torch.zeros(2, 3)
    alike = (zeros, zeros.T, zeros.flatten(), zeros.int())  # the same bytes
    assert len({checksum({"a": t}, "") for t in alike}) == 4


def test_files_of_other_programs_are_refused(tmp_path):
    file = tmp_path / "file"
    assert refusal(read_file, file).startswith(f"{file}: cannot be read")
    for metadata in (None, {"format": "pt"}, {"checksum": "x"}, {"content": "{}"}):
        save_file({"a": torch.ones(3)}, file, metadata)
        assert refusal(read_file, file).startswith(f"{file}: cannot be read, or another version's")


def test_a_failed_write_leaves_what_was_there(tmp_path, monkeypatch):
    file, folder = tmp_path / "file", tmp_path / "folder"
    folder.mkdir()
    write_file(file, TENSORS)
    for place in (folder, tmp_path / "gone" / "file"):
        assert refusal(write_file, place, {}).startswith(f"{place}: cannot be written (")

    def disk_is_full(tensors, path, metadata):
        path.write_bytes(b"the first half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_module, "save_file", disk_is_full)
    assert "No space left on device" in refusal(write_file, file, {})
    assert same(read_file(file)[0], TENSORS) and sorted(tmp_path.iterdir()) == [file, folder]


def adapter(model) -> AdaptedLlama:
    """With random weights."""
    adapted = AdaptedLlama(
        model, settings_for("lococo", 8, 8, 64, kernel=3, lora_rank=2, compressor="facts")
    )
    for p in adapted.trained().values():
        p.data += 0.3 * torch.randn(p.shape)
    return adapted


def test_an_adapter_comes_back_on_its_base_alone(model, tmp_path):
    base, scaled, turned, rounded = (copy.deepcopy(model) for _ in range(4))
    adapted, tokens = adapter(model), torch.arange(60)[None]
    write_file(tmp_path / "adapter.safetensors", adapted.trained(), **described(adapted))
    scaled.layers[1].feed_forward.w2.weight.data *= 1.1
    turned.config.rope_theta *= 2
    for other in (scaled, turned):
        assert "for another base" in refusal(load_adapter, tmp_path, other)
    loaded = load_adapter(tmp_path, base)
    assert loaded.settings == adapted.settings
    assert torch.equal(*(prefill(m.model, tokens, m.cache(), 8) for m in (adapted, loaded)))
    assert same(load_adapter(tmp_path, rounded.bfloat16()).trained(), adapted.trained())


@pytest.mark.parametrize("change", [
    lambda tensors, about: tensors.update({LORA_A: tensors[LORA_A][:1]}),  # it could broadcast
    lambda tensors, about: tensors.update(more=tensors.pop(LORA_A)),
    lambda tensors, about: about["settings"].update(lora_rank=4),
    lambda tensors, about: about["settings"].pop("method"),
    lambda tensors, about: about.pop("base")])  # fmt: skip
def test_adapters_of_another_version_are_refused(model, tmp_path, change):
    base, adapted = copy.deepcopy(model), adapter(model)
    tensors, about = adapted.trained(), described(adapted)
    change(tensors, about)
    write_file(tmp_path / "adapter.safetensors", tensors, **about)
    sentence = refusal(load_adapter, tmp_path, base)
    assert sentence.startswith(f"{tmp_path}: its adapter is ") and "another version" in sentence
