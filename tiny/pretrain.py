"""Make the embedded model: a small Llama-2 and its tokenizer, from the source of Python's standard library.

    python tiny/pretrain.py --out tiny          # about 100 minutes on two cores

A plain language model of this size makes little use of distant context, and without that no memory can be told
from another. So it first learns to recall, on random tokens that repeat (the idea of induction-head studies, arXiv
2209.11895), and then reads text in which a quarter of the sequences repeat one of their own passages further on
and a quarter are random tokens repeated.
Held-out and choosing documents (train.py, PARTS) are never seen. Writes the official Hugging Face layout.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import PARTS, Corpus, default_files  # noqa: E402
from model import Llama, LlamaConfig, Tokenizer, hugging_face_name  # noqa: E402
from train import Sequences  # noqa: E402

RECALL_STEPS = 1000  # first, short: 4 M random tokens, repeated


def train_tokenizer(out: Path, vocab_size: int) -> None:
    """Llama-2's own settings (BPE, byte fallback, no normalisation, split digits) on the training files."""
    import zlib

    def lines():
        for file in default_files():
            if zlib.crc32(file.name.encode()) % 20 in PARTS["training"]:
                try:
                    yield from file.read_text(encoding="utf-8").splitlines()
                except UnicodeDecodeError:
                    pass

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(), model_prefix=str(out / "tokenizer"), vocab_size=vocab_size, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
        allow_whitespace_only_pieces=True, character_coverage=0.9995, input_sentence_size=200_000,
        shuffle_input_sentence=True, num_threads=2, minloglevel=2,
    )  # fmt: skip
    (out / "tokenizer.vocab").unlink()


def repeated(L: int, rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """L random tokens that repeat with a period drawn log-uniformly from 8 to L/2: only recall predicts them."""
    period = int(np.exp(rng.uniform(np.log(8), np.log(L // 2))))
    return np.resize(rng.integers(3, vocab_size, period), L)


def recall_mixture(tokens: np.ndarray, rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    """Half of the sequences stay; a quarter repeat a passage of 32 to 256 tokens, a quarter are random, repeated."""
    L, kind = len(tokens), rng.integers(4)
    if kind == 2:
        n = int(rng.integers(32, 257))
        source = int(rng.integers(0, L - 2 * n))
        target = int(rng.integers(source + n, L - n))
        tokens[target : target + n] = tokens[source : source + n]
    return repeated(L, rng, vocab_size) if kind == 3 else tokens


@torch.no_grad()
def init(model: Llama) -> Llama:
    """A start from which recall heads form within 3 M tokens: the output layer begins as the embedding, so that
    copying a token is easy, and all embeddings share a component, so that heads can look at positions alone."""
    std = model.config.dim**-0.5
    for name, p in model.named_parameters():
        if p.dim() > 1:  # layers that add to the residual stream start smaller
            small = name.endswith(("wo.weight", "w2.weight"))
            p.normal_(std=std / (2 * model.config.n_layers) ** 0.5 if small else std)
    model.output.weight.copy_(model.tok_embeddings.weight)
    model.tok_embeddings.weight += 0.16 * torch.randn(model.config.dim)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    args.out.mkdir(exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig.preset("tiny")
    if not (args.out / "tokenizer.model").is_file():
        train_tokenizer(args.out, config.vocab_size)
    tokenizer = Tokenizer(args.out)
    corpus = Corpus([], tokenizer)
    data = Sequences(corpus, corpus.part("training"), config.context + 1, seed=0)
    print(f"{data.per_pass * data.L / 1e6:.1f} M training tokens", flush=True)
    model = init(Llama(config))
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = [p for p in model.parameters() if p.dim() == 1]
    decay = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decay, lr=args.lr, betas=(0.9, 0.95))
    checkpoint, first = args.out / "pretrain.pt", 0
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    log = open(args.out / "pretrain.jsonl", "a")
    begun, seen = time.time(), 0
    bar = tqdm(range(first, args.steps), initial=first, total=args.steps, mininterval=10)
    for step in bar:
        rng = np.random.default_rng((1, step))
        if step < RECALL_STEPS:
            batch = [repeated(257, rng, config.vocab_size) for _ in range(16)]
        else:
            batch = [recall_mixture(data[step * args.batch + i].copy(), rng, config.vocab_size)
                     for i in range(args.batch)]  # fmt: skip
        tokens = torch.from_numpy(np.stack(batch))
        warm, done = min(1, (step + 1) / 50), max(0, step - RECALL_STEPS) / (args.steps - RECALL_STEPS)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * warm * (0.5 + 0.5 * math.cos(math.pi * done))
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += tokens[:, 1:].numel()
        if (step + 1) % 20 == 0:
            rate = seen / (time.time() - begun)
            log.write(json.dumps(dict(step=step + 1, loss=round(loss.item(), 4), tokens_per_s=round(rate))) + "\n")
            log.flush()
            bar.set_postfix_str(f"loss {loss.item():.3f}, {rate:,.0f} tokens/s")
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), step=step + 1)
            torch.save(state, checkpoint.with_suffix(".part"))
            checkpoint.with_suffix(".part").rename(checkpoint)
    save(model, args.out)


def save(model: Llama, out: Path) -> None:
    """config.json and model.safetensors as Hugging Face's Llama has them."""
    c = model.config
    content = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu", hidden_size=c.dim,
        intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers, num_attention_heads=c.n_heads,
        num_key_value_heads=c.n_kv_heads, vocab_size=c.vocab_size, rms_norm_eps=c.norm_eps,
        max_position_embeddings=c.context, rope_theta=c.rope_theta, rope_scaling=None, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2, torch_dtype="float32",
    )  # fmt: skip
    (out / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    weights = {hugging_face_name(name): p.detach().contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
