"""Make the embedded model: a small Llama-2 and its tokenizer, from Python's standard library.

    python tiny/pretrain.py --out runs/tiny     # an hour of one core

A plain language model of this size makes little use of distant context, and without that no memory
can be told from another. So its start contains a recall head (`init`), and five of eight sequences
that it reads ask for one: facts, repeated passages, repeated random tokens (`recall_mixture`).
Held-out documents and names of facts (support/text.py, PARTS) are never seen.

Writes Hugging Face's layout. A new base needs budgets and a score of its own: docs/training.md has the
commands.
"""

import argparse
import io
import json
import math
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from eval_ppl import token_losses
from model import Llama, LlamaConfig, hugging_face_name, rope, rotate
from support.command_line import Machine, PlainParser, at_least, run_program
from support.facts import tell
from support.files import write_text, write_whole
from support.programs.settings import untrained
from support.text import (
    find_files, long_documents, part_of, sequence, token_streams,
)
from support.tokenizer import Tokenizer

CONFIG = LlamaConfig(
    dim=128, n_layers=4, n_heads=2, n_kv_heads=2, ffn_dim=344, vocab_size=2048, context=1024,
    rope_theta=1e6,  # slow, so that half of a head's channels can match tokens 1,000 apart
)


def train_tokenizer(out: Path) -> None:
    """Llama-2's own settings (BPE, byte fallback, no normalisation, split digits)."""

    def lines():
        for file in find_files([]):
            if part_of(file.name) == "training":
                try:
                    yield from file.read_text(encoding="utf-8").splitlines()
                except UnicodeDecodeError:
                    pass

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines(), model_writer=content, model_type="bpe",
        vocab_size=CONFIG.vocab_size, byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, split_digits=True, allow_whitespace_only_pieces=True,
        character_coverage=0.9995, input_sentence_size=200_000, shuffle_input_sentence=True,
        num_threads=2, minloglevel=2,
    )
    file = out / "tokenizer.model"
    write_whole(file, lambda beside: beside.write_bytes(content.getbuffer()))


def recall_mixture(tokens: Tensor, i: int, tokenizer: Tokenizer) -> Tensor:
    """Of 8 sequences (L,) three stay, three have 1 to 16 facts written into them, one repeats a
    passage of 32 to 256 tokens, and one is random tokens that repeat, with a period of 8 to L/2
    (log-uniform): only recall predicts those."""
    rng, L = np.random.default_rng((1, i)), len(tokens)
    kind = rng.integers(8)
    if kind in (3, 4, 5):
        tokens, _ = tell(tokens, int(rng.integers(1, 17)), "training", 1, i, tokenizer)
    if kind == 6:
        n = int(rng.integers(32, 257))
        source = int(rng.integers(0, L - 2 * n))
        target = int(rng.integers(source + n, L - n))
        tokens[target : target + n] = tokens[source : source + n]
    if kind == 7:
        period = int(np.exp(rng.uniform(np.log(8), np.log(L // 2))))
        tokens = torch.from_numpy(np.resize(rng.integers(3, CONFIG.vocab_size, period), L))
    return tokens


@torch.no_grad()
def init(model: Llama) -> Llama:
    """Random weights, and in them an induction head written by hand (arXiv 2209.11895): see this
    token, look for its last occurrence, expect what followed it. Left to chance it had not formed
    in 14 M tokens; training goes on from here and may change every number.

    Of 128 channels A = 0..62 hold the token, B = 63..125 the token before it, 126 a constant.
    """
    A, B, ONE = slice(0, 63), slice(63, 126), 126
    for name, p in model.named_parameters():
        if p.dim() > 1:  # layers that add to the residual stream start smaller
            p.normal_(std=0.01 if name.endswith(("wo.weight", "w2.weight")) else 0.08)
    embedding = model.tok_embeddings.weight.normal_(std=0.02)
    embedding[:, A].normal_(std=0.16)
    embedding[:, ONE] = 1.8
    model.output.weight.normal_(std=0.02)
    model.output.weight[:, A] = embedding[:, A]

    # Layer 0, head 0, previous token: from the constant, q = u and k = u turned by one position, so
    # that q . k is largest where the key is one position before the query. Its value, the token,
    # goes from A to B.
    first, D, identity = model.layers[0].attention, CONFIG.head_dim, torch.eye(63)
    u = torch.zeros(1, 1, 1, D)
    u[..., :12] = 7.0  # the fast rotations tell neighbours apart
    first.wq.weight[:D] = first.wk.weight[:D] = first.wv.weight[:D] = 0.0
    first.wq.weight[:D, ONE] = u.flatten() / 9
    first.wk.weight[:D, ONE] = rotate(u, *rope(torch.tensor([1]), CONFIG)).flatten() / 9
    first.wv.weight[:63, A] = 0.2 * identity
    first.wo.weight[B, :63] = identity

    # Layer 1, head 0, match: this token (A) against the token before the key (B), in the slow
    # channels, which hardly turn within the context. The value, the token found, is added to A,
    # from where the output reads it.
    second, P = model.layers[1].attention, torch.linalg.qr(torch.randn(63, D // 2)).Q.T
    slow = [*range(D // 4, D // 2), *range(3 * D // 4, D)]
    second.wq.weight[:D] = second.wk.weight[:D] = second.wv.weight[:D] = 0.0
    for row, channel in enumerate(slow):
        second.wq.weight[channel, A] = 3.0 * P[row]
        second.wk.weight[channel, B] = 3.0 * P[row]
    second.wv.weight[:63, A] = 0.2 * identity
    second.wo.weight[A, :63] = 3.0 * identity
    return model


Options = argparse.Namespace  # the flags of `parse`


def parse() -> Options:
    parser = PlainParser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of the model; a run there goes on")
    add("--steps", type=at_least(1), default=1500, help="of the optimizer (default: 1500)")
    add("--batch", type=at_least(1), default=16, help="sequences per step (default: 16)")
    add("--lr", type=at_least(0, float), default=2e-3, help="highest rate (default: 2e-3)")
    return parser.parse_args()


def step_loss(model: Llama, tokens: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def pretrain(model: Llama, ids: np.ndarray, tokenizer: Tokenizer, options: Options) -> str:
    """Train on texts with facts, with a warm-up and a cosine schedule. Goes on from the last
    checkpoint in --out, and writes one after every 100 steps. Returns the log."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    checkpoint, first, log = options.out / "pretrain.pt", 0, ""
    if checkpoint.is_file():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first, log = state["step"], state["log"]
    L = CONFIG.context + 1
    begun, seen = time.time(), 0
    bar = tqdm(range(first, options.steps), initial=first, total=options.steps, mininterval=10)
    for step in bar:
        own = range(step * options.batch, (step + 1) * options.batch)
        tokens = torch.stack([recall_mixture(sequence(ids, L, 0, i), i, tokenizer) for i in own])
        warm, done = min(1, (step + 1) / 50), step / options.steps
        for group in optimizer.param_groups:
            group["lr"] = options.lr * warm * (0.5 + 0.5 * math.cos(math.pi * done))
        loss = step_loss(model, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen += tokens[:, 1:].numel()
        if (step + 1) % 20 == 0:
            rate = round(seen / (time.time() - begun))
            row = dict(step=step + 1, loss=round(loss.item(), 4), tokens_per_s=rate)
            log += json.dumps(row) + "\n"
            bar.set_postfix_str(f"loss {loss.item():.3f}, {rate:,} tokens/s")
        if (step + 1) % 100 == 0 or step + 1 == options.steps:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict())
            write_whole(checkpoint, partial(torch.save, state | {"step": step + 1, "log": log}))
            write_text(options.out / "pretrain.jsonl", log)
    return log


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    if not (options.out / "tokenizer.model").is_file():
        train_tokenizer(options.out)
    tokenizer = Tokenizer(options.out)
    streams = token_streams([], tokenizer)
    ids = streams["training"]
    print(f"{len(ids) / 1e6:.1f} M training tokens", flush=True)
    model = init(Llama(CONFIG))
    log = pretrain(model, ids, tokenizer, options)
    save(model, options.out)
    row = figures(model, long_documents(streams["held-out"], tokenizer.bos, CONFIG.context, 64))
    write_text(options.out / "pretrain.jsonl", log + json.dumps(row) + "\n")
    print(row)


def figures(model: Llama, documents: Tensor) -> dict[str, float]:
    """Does it use distant context? Held-out perplexity with all of it and with 64 tokens."""
    machine = Machine("cpu", torch.float32)

    def perplexity(method: str, mem: int, segment: int) -> float:
        adapted = untrained(model, method, mem, segment)
        losses, _, _ = token_losses(adapted, documents, machine, 16)
        return math.exp(losses.double().mean())

    narrow = perplexity("streaming", 63, 1)  # and the token itself
    full = perplexity("full", 63, CONFIG.context)
    count, ratio = len(documents), narrow / full
    return dict(documents=count, full_attention=full, window_64=narrow, ratio=ratio)


def save(model: Llama, out: Path) -> None:
    """config.json and model.safetensors as Hugging Face's Llama has them."""
    c = model.config
    content = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_act="silu",
        hidden_size=c.dim, intermediate_size=c.ffn_dim, num_hidden_layers=c.n_layers,
        num_attention_heads=c.n_heads, num_key_value_heads=c.n_kv_heads, vocab_size=c.vocab_size,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.context, rope_theta=c.rope_theta,
        rope_scaling=None, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
        torch_dtype="float32",
    )
    weights = {hugging_face_name(n): p.detach().contiguous() for n, p in model.named_parameters()}
    keep = partial(save_file, weights, metadata={"format": "pt"})
    write_whole(out / "model.safetensors", keep)
    write_text(out / "config.json", json.dumps(content, indent=2) + "\n")  # last: all is there


if __name__ == "__main__":
    run_program(main)
