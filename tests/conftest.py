"""Shared by the tests: a small random model, and Llama-2 written a second time, from Meta's formulas, in float64."""

import pytest
import torch

import eval_ppl
from eval_ppl import TINY
from model import Llama, LlamaConfig, Tokenizer


@pytest.fixture
def config() -> LlamaConfig:
    """Grouped-query attention on purpose: 4 query heads, 2 key/value heads."""
    return LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=96, vocab_size=64, context=64)


@pytest.fixture
def model(config) -> Llama:
    torch.manual_seed(0)
    model = Llama(config)
    with torch.no_grad():  # larger than at a training's start, so that mistakes in attention show
        for p in model.parameters():
            p.normal_(std=0.3) if p.dim() > 1 else p.uniform_(0.5, 1.5)
    return model


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    """An empty directory to work in, with text/ in it, and a cache of tokenized text of its own."""
    monkeypatch.setattr(eval_ppl, "CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):  # enough names that every part has some
        (folder / f"{i}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(20)))


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(TINY)


def permute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k from Meta's order (neighbours turn together) to Hugging Face's (halves), by its definition:
    channel 2i goes to i and channel 2i + 1 to i + D/2."""
    D = w.shape[0] // heads
    rows = [h * D + (2 * j if j < D // 2 else 2 * (j - D // 2) + 1) for h in range(heads) for j in range(D)]
    return w[rows]


def meta_state(model: Llama) -> dict[str, torch.Tensor]:
    """The weights as Meta's checkpoint would have them (q and k rows in Meta's order)."""
    state = {}
    for name, p in model.state_dict().items():
        heads = {"wq": model.config.n_heads, "wk": model.config.n_kv_heads}.get(name.split(".")[-2])
        if heads:
            order = permute(torch.arange(p.shape[0])[:, None], heads)[:, 0]
            p = torch.empty_like(p).index_copy_(0, order, p)
        state[name] = p.clone()
    return state


def reference_logits(state: dict[str, torch.Tensor], c: LlamaConfig, tokens: torch.Tensor) -> torch.Tensor:
    """Llama-2 on one sequence (T,) -> logits (T, V): complex rotation of neighbours, loops over heads and queries."""
    w = {name: tensor.double() for name, tensor in state.items()}
    T, D = len(tokens), c.dim // c.n_heads
    angle = torch.tensor([[t / c.rope_scale * c.rope_theta ** (-2 * i / D) for i in range(D // 2)] for t in range(T)])
    turn = torch.polar(torch.ones_like(angle.double()), angle.double())

    def norm(x, g):
        return torch.stack([row / (row.pow(2).mean() + c.norm_eps).sqrt() * g for row in x])

    def rotated(x):  # (T, D)
        return torch.view_as_real(torch.view_as_complex(x.reshape(T, D // 2, 2).contiguous()) * turn).reshape(T, D)

    x = w["tok_embeddings.weight"][tokens]
    for n in range(c.n_layers):
        p = f"layers.{n}."
        h = norm(x, w[p + "attention_norm.weight"])
        q, k, v = (h @ w[p + f"attention.w{s}.weight"].T for s in "qkv")
        heads = []
        for head in range(c.n_heads):
            g = head // (c.n_heads // c.n_kv_heads)
            qh, kh = rotated(q[:, head * D : (head + 1) * D]), rotated(k[:, g * D : (g + 1) * D])
            vh = v[:, g * D : (g + 1) * D]
            heads.append(torch.stack([(kh[: t + 1] @ qh[t] / D**0.5).softmax(0) @ vh[: t + 1] for t in range(T)]))
        x = x + torch.cat(heads, 1) @ w[p + "attention.wo.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate = h @ w[p + "feed_forward.w1.weight"].T
        x = x + (gate * gate.sigmoid() * (h @ w[p + "feed_forward.w3.weight"].T)) @ w[p + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


def remembered(forward) -> dict[int, int]:
    """What a backward pass keeps alive: {address: bytes} of the storages saved while `forward` runs."""
    saved = {}

    def pack(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        forward()
    return saved
