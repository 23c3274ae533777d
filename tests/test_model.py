"""model.py: the Llama, its cache, the loaders of both layouts, the tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import meta_state, permute, reference_logits
from safetensors.torch import save_file

from model import KVCache, Llama, LlamaConfig, Tokenizer, UserError, attend, hugging_face_name, rope, rotate

TOKENS = torch.tensor([[1, 5, 9, 60, 33, 2, 7, 7, 5, 9, 60, 12]])


def test_logits_equal_a_float64_llama_written_from_metas_formulas(model):
    expected = reference_logits(meta_state(model), model.config, TOKENS[0])
    assert torch.allclose(model(TOKENS)[0].double(), expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, S", [(1, 9), (2, 9), (8, 9), (9, 9), (40, 700)])
def test_attention_sees_the_past_and_makes_no_matrix_of_what_it_sees(T, S, dtype, monkeypatch):
    q, (k, v) = torch.randn(2, 4, T, 8, dtype=dtype), torch.randn(2, 2, 2, S, 8, dtype=dtype)
    masks, inner = [], F.scaled_dot_product_attention

    def watched(*args, attn_mask=None, **more):
        masks.append(attn_mask)
        return inner(*args, attn_mask=attn_mask, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    out = attend(q, k, v)
    for t in range(T):
        seen = S - T + t + 1
        for h in range(4):
            p = (k[:, h // 2, :seen].double() @ q[:, h, t, :, None].double() / 8**0.5).softmax(1)
            expected = (p * v[:, h // 2, :seen].double()).sum(1)
            assert torch.allclose(out[:, h, t].double(), expected, atol=1e-5 if dtype == torch.float32 else 3e-2)
    assert len(masks) == 1 and (masks[0] is None or masks[0].untyped_storage().size() < 4 * (S + T))


def test_position_interpolation_divides_positions(model):
    model.config.rope_scale = 4.0
    expected = reference_logits(meta_state(model), model.config, TOKENS[0])
    assert torch.allclose(model(TOKENS)[0].double(), expected, atol=1e-4)
    cos, _ = rope(torch.tensor([4, 8]), model.config)
    model.config.rope_scale = 1.0
    assert torch.equal(cos, rope(torch.tensor([1, 2]), model.config)[0])


def test_rotations_compose_and_undo(config):
    x = torch.randn(1, 2, 3, config.head_dim)
    p, q = torch.tensor([3, 50, 1]), torch.tensor([7, -20, 0])
    twice = rotate(rotate(x, *rope(p, config)), *rope(q, config))
    assert torch.allclose(twice, rotate(x, *rope(p + q, config)), atol=1e-5)
    assert torch.allclose(rotate(rotate(x, *rope(p, config)), *rope(-p, config)), x, atol=1e-5)


@pytest.mark.parametrize("cuts", [(12,), (5, 7), (1,) * 12, (4, 1, 1, 6)])
def test_cached_pieces_equal_the_whole(model, cuts):
    cache = KVCache(model.config.n_layers)
    pieces = [model(piece, cache) for piece in TOKENS.split(cuts, dim=1)]
    assert torch.allclose(torch.cat(pieces, 1), model(TOKENS), atol=1e-4)
    assert cache.held == cache.seen == 12
    assert cache.nbytes == 12 * 2 * 2 * 2 * 8 * 4  # tokens, layers, key and value, heads, D, bytes


@pytest.mark.parametrize("gradients", [True, False])
def test_a_fork_does_not_disturb_the_cache_it_came_from(model, gradients):
    with torch.set_grad_enabled(gradients):
        cache = KVCache(model.config.n_layers)
        model(TOKENS[:, :6], cache)
        for _ in range(2):
            fork = cache.fork()
            assert torch.allclose(model(TOKENS[:, 6:], fork), model(TOKENS)[:, 6:], atol=1e-4)
        assert cache.held == cache.seen == 6
        model(TOKENS[:, :6], cache)  # the first goes on too
        assert torch.allclose(model(TOKENS[:, 6:], cache.fork()), model(TOKENS[:, 6:], cache), atol=1e-5)


@torch.no_grad()
def test_tokens_enter_a_buffer_in_place_and_copies_are_rare(model):
    cache, places = KVCache(model.config.n_layers), set()
    whole = model(TOKENS)
    for t in range(TOKENS.shape[1]):
        assert torch.allclose(model(TOKENS[:, t : t + 1], cache)[:, 0], whole[:, t], atol=1e-4)
        places.add(cache.keys[0].data_ptr())
    assert len(places) == 1


def test_later_tokens_never_change_earlier_logits(model):
    changed = TOKENS.clone()
    changed[0, 8:] = 3
    assert torch.equal(model(TOKENS)[:, :8], model(changed)[:, :8])
    assert not torch.allclose(model(TOKENS)[:, 8:], model(changed)[:, 8:])


def test_presets():
    with torch.device("meta"):
        models = {name: Llama(LlamaConfig.preset(name)) for name in ("tiny", "7B", "13B", "70B")}
    count = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert count == {"tiny": 1315968, "7B": 6738415616, "13B": 13015864320, "70B": 68976648192}  # Meta's own counts
    with pytest.raises(UserError, match="8B.*tiny, 7B"):
        LlamaConfig.preset("8B")


# --- Loading -------------------------------------------------------------------------------------------------


def write_meta(path, model, shards, **changes):
    """params.json and consolidated.NN.pth, cut as Meta's model parallelism does."""
    c = model.config
    path.mkdir(exist_ok=True)
    params = dict(dim=c.dim, n_layers=c.n_layers, n_heads=c.n_heads, n_kv_heads=c.n_kv_heads, multiple_of=32,
                  norm_eps=c.norm_eps, vocab_size=-1) | changes  # fmt: skip
    (path / "params.json").write_text(json.dumps(params))
    by_columns = ("tok_embeddings", "wo", "w2")
    for n in range(shards):
        shard = {"rope.freqs": torch.zeros(4)}
        for name, w in meta_state(model).items():
            kind = name.split(".")[-2]
            shard[name] = w if "norm" in kind else w.chunk(shards, dim=int(kind in by_columns))[n].clone()
        torch.save(shard, path / f"consolidated.{n:02}.pth")
    return path


def write_hugging_face(path, model, weights="model.safetensors", shards=1, drop=(), **changes):
    c = model.config
    path.mkdir(exist_ok=True)
    content = dict(
        model_type="llama", hidden_act="silu", hidden_size=c.dim, intermediate_size=c.ffn_dim,
        num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads,
        vocab_size=c.vocab_size, rms_norm_eps=c.norm_eps, max_position_embeddings=c.context,
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(content | changes))
    state = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    for name, w in meta_state(model).items():
        heads = {"wq": c.n_heads, "wk": c.n_kv_heads}.get(name.split(".")[-2])
        if hugging_face_name(name) not in drop:
            state[hugging_face_name(name)] = permute(w, heads) if heads else w
    save = save_file if weights.endswith("safetensors") else torch.save
    if shards == 1:
        save(state, path / weights)
        return path
    stem, _, ending = weights.rpartition(".")
    names = {key: f"{stem}-{i % shards + 1:05}-of-{shards:05}.{ending}" for i, key in enumerate(state)}
    for file in set(names.values()):
        save({key: state[key] for key in state if names[key] == file}, path / file)
    (path / f"{weights}.index.json").write_text(json.dumps({"weight_map": names}))
    return path


def assert_loads(path, model, **config):
    loaded = Llama.from_pretrained(path)
    expected = reference_logits(meta_state(model), loaded.config, TOKENS[0])
    assert torch.allclose(loaded(TOKENS)[0].double(), expected, atol=1e-4)
    assert {key: getattr(loaded.config, key) for key in config} == config
    return loaded


@pytest.mark.parametrize("shards", [1, 2])
def test_meta_layout(tmp_path, model, shards):
    assert_loads(write_meta(tmp_path, model, shards), model, vocab_size=64, context=4096, rope_theta=10000.0)


def test_meta_eight_shards_ffn_multiplier_and_theta(tmp_path):
    """As Llama-2 70B is stored: eight shards with one key/value head in each."""
    config = LlamaConfig(64, 1, 16, 8, ffn_dim=224, vocab_size=64)
    model = Llama(config)
    path = write_meta(tmp_path, model, 8, ffn_dim_multiplier=1.3, rope_theta=1e6, vocab_size=64)
    assert_loads(path, model, ffn_dim=224, rope_theta=1e6)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("shards", [1, 3])
def test_hugging_face_layout(tmp_path, model, weights, shards):
    assert_loads(write_hugging_face(tmp_path, model, weights, shards), model, context=64, rope_theta=10000.0)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 123.0}}, {"rope_theta": 123.0}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"rope_scale": 4.0}),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {"rope_scale": 2.0}),
        ({"rope_scaling": None, "sliding_window": None, "attention_bias": False}, {"rope_scale": 1.0}),
    ],
)
def test_hugging_face_rotary_settings(tmp_path, model, changes, expected):
    assert_loads(write_hugging_face(tmp_path, model, **changes), model, **expected)


def test_tied_embeddings(tmp_path, model):
    model.output.weight = model.tok_embeddings.weight
    path = write_hugging_face(tmp_path, model, drop=("lm_head.weight",), tie_word_embeddings=True)
    loaded = assert_loads(path, model, tied=True)
    assert loaded.output.weight is loaded.tok_embeddings.weight


def test_weights_arrive_in_the_dtype_asked_for(tmp_path, model):
    loaded = Llama.from_pretrained(write_hugging_face(tmp_path, model), dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert loaded(TOKENS).dtype == torch.float32


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "without a 'factor'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"head_dim": 64}, "head_dim 64"),
        ({"num_key_value_heads": 4}, "wk.weight is .*16, 32.*32, 32"),
        ({"vocab_size": 65}, r"tok_embeddings.weight is .*64, 32.*65, 32"),
        ({"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ({"num_hidden_layers": 1}, "unexpected tensor 'model.layers.1"),
    ],
)
def test_what_is_not_this_llama_is_refused_by_name(tmp_path, model, changes, sentence):
    with pytest.raises(UserError, match=sentence):
        Llama.from_pretrained(write_hugging_face(tmp_path, model, **changes))


def test_missing_and_damaged_files_are_named(tmp_path, model):
    with pytest.raises(UserError, match="not a model directory"):
        Llama.from_pretrained(tmp_path)
    meta = write_meta(tmp_path / "meta", model, 2)
    (meta / "consolidated.01.pth").unlink()
    with pytest.raises(UserError, match="tok_embeddings.weight is .*64, 16.*64, 32.*a file is missing"):
        Llama.from_pretrained(meta)
    (meta / "consolidated.00.pth").unlink()
    with pytest.raises(UserError, match="no consolidated"):
        Llama.from_pretrained(meta)
    for weights in ("model.safetensors", "pytorch_model.bin"):
        path = write_hugging_face(tmp_path / weights, model, weights)
        whole = (path / weights).read_bytes()
        for length in (0, 4, 100, len(whole) // 2, len(whole) - 1):
            (path / weights).write_bytes(whole[:length])
            with pytest.raises(UserError, match=f"{weights}: cannot be read as weights"):
                Llama.from_pretrained(path)
    path = write_hugging_face(tmp_path / "index", model, shards=2)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="00002-of-00002.*not a file"):
        Llama.from_pretrained(path)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../b"}}))
    with pytest.raises(UserError, match="'../b'"):
        Llama.from_pretrained(path)


PEAK = """
import sys, threading, time, torch
from model import Llama, LlamaConfig

def own() -> int:  # memory that is the process's alone: files that are mapped into it do not count
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watch():
    while True:
        seen.append(own())
        time.sleep(0.001)

with torch.device("meta"):
    Llama(LlamaConfig.preset("tiny")).to_empty(device="cpu")  # for the first time this imports much of torch
before, seen = own(), []
threading.Thread(target=watch, daemon=True).start()
model = Llama.from_pretrained(sys.argv[1])
seen.append(own())
print((max(seen) - before) / sum(p.numel() * p.element_size() for p in model.parameters()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc/self/status is Linux's")
@pytest.mark.parametrize("layout", ["meta", "safetensors", "bin"])
def test_loading_never_holds_two_copies_of_the_weights(tmp_path, layout):
    model = Llama(LlamaConfig(512, 8, 8, 8, ffn_dim=1536, vocab_size=4096))  # 125 MB, 8 MB the largest tensor
    if layout == "meta":
        write_meta(tmp_path, model, 2, multiple_of=512)
    else:
        write_hugging_face(tmp_path, model, {"bin": "pytorch_model.bin"}.get(layout, "model.safetensors"))
    home = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], cwd=home, capture_output=True, text=True, check=True)
    assert 0.99 < float(done.stdout) < 1.25, done.stdout


def test_meta_parameters_that_are_not_llama_2_are_refused(tmp_path, model):
    with pytest.raises(UserError, match="use_scaled_rope"):
        Llama.from_pretrained(write_meta(tmp_path, model, 1, use_scaled_rope=True))
    (tmp_path / "params.json").write_text('{"dim": 32}')
    with pytest.raises(UserError, match="params.json: 'n_layers' is missing"):
        Llama.from_pretrained(tmp_path)


# --- Tokenizer -----------------------------------------------------------------------------------------------


def test_tokenizer_round_trip(tokenizer):
    for text in ("def f(x):\n    return x\n", "  two  spaces ", "naïve café 北京 🐍", "<s> is text", ""):
        ids = tokenizer.encode(text)
        assert ids[0] == 1 and 1 not in ids[1:]
        assert tokenizer.decode(ids) == text


def test_tokenizer_is_found_in_the_directory_or_one_level_up(tmp_path, tokenizer):
    (tmp_path / "7B").mkdir()
    with pytest.raises(UserError, match="no tokenizer.model"):
        Tokenizer(tmp_path / "7B")
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.file.read_bytes())
    assert Tokenizer(tmp_path / "7B").vocab_size == Tokenizer(tmp_path).vocab_size == tokenizer.vocab_size
    (tmp_path / "tokenizer.model").write_bytes(tokenizer.file.read_bytes()[:1000])
    with pytest.raises(UserError, match="not a sentencepiece model"):
        Tokenizer(tmp_path)
