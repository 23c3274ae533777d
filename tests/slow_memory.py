"""Algorithm 2 a second time: a memory of one key/value head, in float64, by loops. `rows` makes those
rows of W that the convolution fills: `by_loop` of test_paper.py, or the official code's."""

import torch
import torch.nn.functional as F


def official_rows(compressor, slots, k, v, from_slot, scores):
    """Of the official code: (1 - g) onehot + g softmax(ReLU)."""
    weight, bias, g = (p.double() for p in (*compressor.conv.parameters(), compressor.gate))
    entries = torch.cat((k, v), dim=1).T[None]
    logits = F.conv1d(entries, weight, bias, padding=weight.shape[2] // 2)[0]  # (6)
    w = g * logits.clamp(min=0).softmax(dim=1)
    next_best = sorted(range(len(scores)), key=lambda i: -scores[i])[: len(logits)]
    for row, i in enumerate(sorted(next_best)):
        w[row, i] += 1 - g
    return w


def turned(k, by, adapted):
    """Keys (S, D), each turned on by so many positions, as complex numbers."""
    half = k.shape[1] // 2
    scale = (adapted.settings.mem + adapted.settings.segment) / adapted.model.config.context
    angle = torch.tensor(by).double()[:, None] / scale * 10000 ** (-torch.arange(half) / half)
    pairs = torch.complex(k[:, :half], k[:, half:]) * torch.exp(1j * angle)
    return torch.cat((pairs.real, pairs.imag), dim=1)


def slow_compress(k, v, scores, from_slot, adapted, rows):
    """k, v (S, D), scores (S,) and which entries have had a slot that is not a recent one -> those
    of the M slots, and W (M, S)."""
    s, S = adapted.settings, len(k)
    by_score = sorted(range(s.sinks, S - s.recent), key=lambda i: -scores[i])
    kept = [*range(s.sinks), *sorted(by_score[: s.heavy])]
    rest = sorted(by_score[s.heavy :])
    if s.positions == "slots":
        k = turned(k, range(0, -S, -1), adapted)
    W = torch.zeros(s.mem, S, dtype=torch.float64)
    for slot, i in enumerate(kept):
        W[slot, i] = 1
    if s.merged:
        args = adapted.compressors[0], s.merged, k[rest], v[rest], from_slot[rest]
        W[len(kept) : len(kept) + s.merged, rest] = rows(*args, scores[rest])
    for n in range(1, s.recent + 1):
        W[s.mem - n, S - n] = 1
    k_new = W @ k
    if s.positions == "slots":
        k_new = turned(k_new, range(s.mem), adapted)
    from_slot = torch.arange(s.mem) < s.mem - s.recent
    return k_new, W @ v, W @ scores, from_slot, W


def slow_memory(adapted, segments, rows):
    """Segments of q (heads that share the key/value head, T, D), k and v (T, D) -> what is held at
    the end, attention received, the last W, and what the heads have read."""
    s, outputs, W = adapted.settings, [], None
    k, v, scores = torch.zeros(0, 8).double(), torch.zeros(0, 8).double(), torch.zeros(0).double()
    from_slot = torch.zeros(0).bool()
    for q, k_new, v_new in segments:
        if len(k) + len(k_new) > s.mem + s.segment:
            k, v, scores, from_slot, W = slow_compress(k, v, scores, from_slot, adapted, rows)
        k, v = torch.cat((k, k_new.double())), torch.cat((v, v_new.double()))
        scores = F.pad(s.forget * scores, (0, len(k_new)))
        from_slot = torch.cat((from_slot, torch.zeros(len(k_new)).bool()))
        out = torch.zeros_like(q).double()
        for t in range(len(k_new)):
            n = len(k) - len(k_new) + t + 1  # entries that query t may see
            for head in range(len(q)):
                p = (k[:n] @ q[head, t].double() / 8**0.5).softmax(dim=0)  # (1)
                scores[:n] += p / len(q)
                out[head, t] = p @ v[:n]
        outputs.append(out)
    return k, v, W, scores, torch.cat(outputs, dim=1)
