"""What the tests compare with: the model and the method, written a second time in the plainest way,
in float64. A Llama-2 by Meta's formulas, the equations of the compressors by loops, and a slow
memory. Equations have the paper's numbers, letters are those of model.py."""

import math

import torch
import torch.nn.functional as F

from model import Llama, LlamaConfig

# --- The second Llama -------------------------------------------------------------------


def permute(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k from Meta's order (neighbours turn together) to Hugging Face's (halves), by
    its definition: channel 2i goes to i and channel 2i + 1 to i + D/2."""
    D = w.shape[0] // heads
    rows = []
    for head in range(heads):
        rows += [head * D + 2 * i for i in range(D // 2)]
        rows += [head * D + 2 * i + 1 for i in range(D // 2)]
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


def reference_logits(
    state: dict[str, torch.Tensor], c: LlamaConfig, tokens: torch.Tensor
) -> torch.Tensor:
    """Llama-2 on one sequence (T,) -> logits (T, V), by Meta's formulas: neighbouring channels turn
    as complex numbers, loops over heads and queries."""
    w = {name: tensor.double() for name, tensor in state.items()}
    T, D = len(tokens), c.dim // c.n_heads
    n = c.turned * D  # channels that turn
    frequency = c.rope_theta ** (-torch.arange(0, D, 2, dtype=torch.float64) / n)
    frequency[int(n / 2) :] = 0
    angle = torch.outer(torch.arange(T) / c.rope_scale, frequency)
    turn = torch.polar(torch.ones_like(angle), angle)

    def norm(x, g):
        return torch.stack([row / (row.pow(2).mean() + c.norm_eps).sqrt() * g for row in x])

    def rotated(x):  # (T, D)
        pairs = torch.view_as_complex(x.reshape(T, D // 2, 2).contiguous())
        return torch.view_as_real(pairs * turn).reshape(T, D)

    x = w["tok_embeddings.weight"][tokens]
    for n in range(c.n_layers):
        p = f"layers.{n}."
        h = norm(x, w[p + "attention_norm.weight"])
        q, k, v = (h @ w[p + f"attention.w{s}.weight"].T for s in "qkv")
        if c.qkv_bias:
            q, k, v = (x + w[p + f"attention.w{s}.bias"] for s, x in zip("qkv", (q, k, v)))
        heads = []
        for head in range(c.n_heads):
            g = head // (c.n_heads // c.n_kv_heads)
            qh = rotated(q[:, head * D : (head + 1) * D])
            kh = rotated(k[:, g * D : (g + 1) * D])
            vh = v[:, g * D : (g + 1) * D]
            for t in range(T):
                weights = (kh[: t + 1] @ qh[t] / D**0.5).softmax(dim=0)
                heads.append(weights @ vh[: t + 1])
        read = torch.stack(heads).view(c.n_heads, T, D).transpose(0, 1).flatten(1)
        x = x + read @ w[p + "attention.wo.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate = h @ w[p + "feed_forward.w1.weight"].T
        up = h @ w[p + "feed_forward.w3.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ w[p + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


# --- The equations by loops -------------------------------------------------------------


def paper_by_loop(compressor, k, v):
    """(6), the ReLU and (7) for one head, k and v (S, D) -> w (slots, S), in float64."""
    entries, S, g = torch.cat((k, v), dim=1).double(), len(k), compressor.conv.weight.double()
    w = torch.zeros(len(g), S, dtype=torch.float64)
    for i in range(len(g)):
        for j in range(S):
            for tap in range(g.shape[2]):
                neighbour = j + tap - g.shape[2] // 2
                if 0 <= neighbour < S:  # beyond the ends are zeros
                    w[i, j] += g[i, :, tap] @ entries[neighbour]  # (6)
        w[i] = w[i].clamp(min=0)
        w[i] = w[i] / w[i].sum() if w[i].any() else 1 / S  # (7)
    return w.detach()


def official_rows(compressor, k, v, scores):
    """Of LoCoCo's code: (1 - g) onehot + g softmax(ReLU). The heavy hitters that come
    next are in time order."""
    weight, bias, g = (p.double() for p in (*compressor.conv.parameters(), compressor.gate))
    entries = torch.cat((k, v), dim=1).T[None]
    logits = F.conv1d(entries, weight, bias, padding=weight.shape[2] // 2)[0]  # (6)
    w = g * logits.clamp(min=0).softmax(dim=1)
    next_best = sorted(range(len(scores)), key=lambda i: -scores[i])[: len(logits)]
    for row, i in enumerate(sorted(next_best)):
        w[row, i] += 1 - g
    return w.detach()


def by_loop(compressor, k, v, scores):
    """Those rows of W that a compressor fills, for one head."""
    if hasattr(compressor, "gate"):
        return official_rows(compressor, k, v, scores)
    return paper_by_loop(compressor, k, v)


# --- The slow memory --------------------------------------------------------------------

# Algorithm 2 for one key/value head, by loops.


def turned(k, positions, adapted):
    """Keys or queries (..., S, D), each turned by its position, as complex numbers."""
    s, c = adapted.settings, adapted.model.config
    half = k.shape[-1] // 2
    frequency = c.rope_theta ** (-torch.arange(half) / half)
    reached = s.largest + s.segment if s.positions == "slots" else s.length
    scale = reached / c.context if s.lora_rank else c.rope_scale
    angle = torch.as_tensor(positions).double()[:, None] / scale * frequency
    pairs = torch.complex(k[..., :half], k[..., half:]) * torch.exp(1j * angle)
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def learned_score(which, score, k, v, received, age):
    """One of the two scores of one entry, whose key (D,) is not rotated."""
    x = [*k, *v, (received + 1e-4).log(), math.log(age)]
    x = [(a - m) / d for a, m, d in zip(x, score.mean.double(), score.deviation.double())]
    total = sum(a * w for a, w in zip(x, score.linear.weight[which].double()))
    for unit, weight in enumerate(score.out.weight[which].double()):
        z = score.hidden.bias[unit].double()
        z = z + sum(a * w for a, w in zip(x, score.hidden.weight[unit].double()))
        total = total + weight * z * (1 + torch.erf(z / 2**0.5)) / 2  # GELU
    return float(total + score.linear.bias[which])


def rule(s, adapted, k, v, scores, seen, q):
    """The score of each entry by a rule of support/ours/published.py. `scores` are the attention
    received, and q (heads, tokens, D) all queries so far, which are not rotated."""
    S, D = k.shape
    if s.memory == "snapkv":
        near = [scores[max(0, i - 2) : i + 3] for i in range(S)]
        return torch.stack([some.mean() for some in near])
    if s.memory == "key-norm":
        return torch.stack([-key.pow(2).sum().sqrt() for key in k])
    if s.memory == "keydiff":
        unit = torch.stack([key / key.norm() for key in k])
        anchor = unit.sum(dim=0)
        return torch.stack([-key @ anchor / anchor.norm() for key in unit])
    if s.memory == "expected-attention":
        shares = torch.zeros(S, dtype=torch.float64)
        for own in q[:, -8:]:  # the last queries
            later = [turned(own, [p] * len(own), adapted) for p in range(seen, seen + 512)]
            later = torch.stack(later).mean(dim=0) / D**0.5
            covariance = torch.cov(later.T, correction=0)
            logits = [later.mean(dim=0) @ key + key @ covariance @ key / 2 for key in k]
            shares += torch.stack(logits).softmax(dim=0) / len(q)
        return shares * v.pow(2).sum(dim=1).sqrt()
    return scores


def slow_compress(k, v, scores, places, seen, adapted, s, q):
    """k, v (S, D), scores and places (S,) -> those of the M slots."""
    S, compressors = len(k), adapted.compressors
    preferred = [rule(s, adapted, k, v, scores, seen, q)] * s.heavy  # by each heavy slot
    if s.compressor == "learned":
        entries = [*zip(turned(k, -places, adapted), v, scores, seen - places)]
        both = [[learned_score(n, compressors[-1], *e) for e in entries] for n in (0, 1)]
        preferred = [both[slot >= s.heavy * 3 // 5] for slot in range(s.heavy)]
    rest, heavy = [*range(s.sinks, S - s.recent)], []
    for score in preferred:
        heavy.append(max(rest, key=lambda i: score[i]))
        rest.remove(heavy[-1])
    kept = [*range(s.sinks), *sorted(heavy)]
    W = torch.zeros(s.mem, S, dtype=torch.float64)
    for slot, i in enumerate(kept):
        W[slot, i] = 1
    if s.merged:
        rows = by_loop(compressors[-1], k[rest], v[rest], scores[rest])
        W[len(kept) : len(kept) + s.merged, rest] = rows
    for n in range(1, s.recent + 1):
        W[s.mem - n, S - n] = 1
    return W @ k, W @ v, W @ scores, W @ places


def slow_memory(adapted, s, segments):
    """Segments of q (heads that share the key/value head, T, D), k and v (T, D), not rotated ->
    keys as attention reads them, values and attention received, all at the end, and what the heads
    have read. The head is of the last layer, and `s` are its settings."""
    D, outputs = adapted.model.config.head_dim, []
    k, v, scores = torch.zeros(0, D).double(), torch.zeros(0, D).double(), torch.zeros(0).double()
    seen, places = 0, torch.zeros(0).double()
    reach, ceiling = adapted.model.config.context, adapted.model.config.context - s.segment
    lowest = 0
    for number, (q, k_new, v_new) in enumerate(segments):
        T, q, k_new = len(k_new), q.double(), k_new.double()
        if len(k) + T > s.mem + s.segment:
            queries = torch.cat([earlier.double() for earlier, *_ in segments[:number]], dim=1)
            k, v, scores, places = slow_compress(
                k, v, scores, places, seen, adapted, s, queries
            )
        if s.positions == "text":
            if seen and seen + T - lowest > reach:  # the last new token would be too far away
                lowest = seen - ceiling
                k = turned(k, places.clamp(min=lowest) - places, adapted)
                places = places.clamp(min=lowest)
            q, k_new = (turned(x, range(seen, seen + T), adapted) for x in (q, k_new))
        k, v = torch.cat((k, k_new)), torch.cat((v, v_new.double()))
        places = torch.cat((places, torch.arange(seen, seen + T)))
        read = k
        if s.positions == "slots":
            read = turned(k, range(len(k)), adapted)
            q = turned(q, range(len(k) - T, len(k)), adapted)
        earlier = F.pad(scores, (0, T))
        scores = s.forget ** (T / (s.forget_in or s.segment)) * earlier
        out = torch.zeros_like(q)
        for t in range(T):
            n = len(k) - T + t + 1  # entries that query t may see
            p = (q[:, t] @ read[:n].T / D**0.5).softmax(dim=1)  # (1), a row for each head
            if s.memory == "largest-share":
                scores = earlier = torch.maximum(earlier, F.pad(p.amax(dim=0), (0, len(k) - n)))
            else:
                scores[:n] += p.mean(dim=0)
            out[:, t] = p @ v[:n]
        outputs.append(out)
        seen += T
    return read, v, scores, torch.cat(outputs, dim=1)
