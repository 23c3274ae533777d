"""bench.py: what it counts, and that it runs."""

import json
import sys
from types import SimpleNamespace

import bench
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import lococo as lococo_py
import model as model_py
from lococo import LoCoCo, Settings, prefill
from model import Llama, LlamaConfig


KINDS = [*((kind, {}) for kind in bench.KINDS), ("lococo", dict(filters=1, heavy=16)),
         ("lococo", dict(filters=2, blend=0.5))]  # fmt: skip


def settings(kind: str, changes: dict) -> Settings:
    method, own = bench.KINDS[kind](32)
    return Settings.of(method, 32, 32, 256, **own | changes)


@pytest.mark.parametrize("kind, changes", KINDS)
def test_flops_of_a_prefill_equal_what_torch_counts(kind, changes, monkeypatch):
    """torch counts whole T x S matrices: what the causal mask leaves out is taken off. Convolutions count in full,
    as do the sums in which one filter mixes."""

    def attend(q, k, v):
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        masked.append(4 * q.shape[0] * q.shape[1] * q.shape[3] * int((~mask).sum()))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    masked = []
    for module in (lococo_py, model_py):
        monkeypatch.setattr(module, "attend", attend)
    monkeypatch.setattr(lococo_py.Fourier, "apply", lambda x, w: F.conv1d(x.transpose(1, 2), w, padding=10))
    monkeypatch.setattr(lococo_py, "mix", lambda w, x: (w @ lococo_py.in_pieces(x, w.shape[2])).flatten(2, 3))
    config = LlamaConfig(64, 2, 4, 2, 172, 256)
    model, tokens = Llama(config), torch.randint(0, 256, (2, 256))
    lococo = LoCoCo(model, settings(kind, changes))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        prefill(model, tokens, lococo.cache(), 32)
    assert bench.flops(config, lococo.settings, 2, 256) == counter.get_total_flops() - sum(masked)


@pytest.mark.parametrize("kind, changes", [case for case in KINDS if case[0].startswith("lococo")])
def test_the_size_of_w_is_what_a_compression_returns(kind, changes):
    s = settings(kind, changes)
    args = SimpleNamespace(batch=3, mem=32, segment=32, dtype=torch.float32, device="cpu")
    rest = 64 - s.sinks - s.heavy - s.recent
    lococo, x = LoCoCo(Llama(LlamaConfig(64, 2, 4, 2, 172, 256)), s), torch.randn(3, 2, rest, 16)
    w = lococo.compressors[0](x, x, torch.rand(3, 2, rest))[2]
    assert bench.compressor_bytes(lococo, args)["mixing_bytes"] == 2 * 4 * w.numel()


def test_caches_take_turns_at_decoding(monkeypatch):
    """One token each that is not timed, then 20 in turns of 16 and 4; times go to the cache that they are of. The
    clock is a made-up one: a token takes 1 or 3 seconds."""
    calls = []

    def seconds(work, device):
        before = len(calls)
        work()
        return sum({"quick": 1, "slow": 3}[cache] for cache in calls[before:])

    monkeypatch.setattr(bench, "seconds", seconds)
    took = bench.decode(lambda token, cache: calls.append(cache), None, ["quick", "slow"], 20, "cpu")
    assert calls == ["quick", "slow"] + 16 * ["quick"] + 16 * ["slow"] + 4 * ["quick"] + 4 * ["slow"]
    assert took == [20, 60]


def test_the_benchmark_runs(monkeypatch, capsys, tmp_path):
    words = "--dim 32 --layers 1 --ffn 48 --vocab 64 --heads 2 --kv-heads 1 --mem 16 --segment 16 --seq 64 --rounds 1"
    words += f" --contexts 32 64 --batches 1 2 --parts train prefill decode convolution --json {tmp_path}/table.json"
    monkeypatch.setattr(sys, "argv", ["bench.py", *words.split()])
    bench.main()
    out = capsys.readouterr().out
    for words in ("train: 1 x 64 tokens, M = 16, T = 16", "each of 2 sequences", "lococo: to 16 channels, 32 entries"):
        assert words in out
    rows = json.loads((tmp_path / "table.json").read_text())["rows"]
    merging = [kind for kind in bench.KINDS if kind.startswith("lococo")]
    assert len(rows) == len(bench.KINDS) * (1 + 1 + 2 * 2) + 2 * len(merging)
    assert all(min(row["seconds"]) > 0 for row in rows)
