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
from lococo import LoCoCo, prefill
from model import Llama, LlamaConfig


@pytest.mark.parametrize("kind", bench.KINDS)
def test_flops_of_a_prefill_equal_what_torch_counts(kind, monkeypatch):
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
    lococo = LoCoCo(model, bench.settings(kind, SimpleNamespace(mem=32, segment=32, seq=256)))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        prefill(model, tokens, lococo.cache(), 32)
    assert bench.flops(config, lococo.settings, 2, 256) == counter.get_total_flops() - sum(masked)


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
