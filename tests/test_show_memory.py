"""generate.py --show-memory: what it says of the slots is what they hold."""

import pytest
import torch

from generate import TracedMemory, describe_slots
from lococo import LoCoCo, Memory, Settings, prefill
from model import KVCache

TOKENS = torch.randint(0, 64, (1, 45), generator=torch.Generator().manual_seed(2))
WINDOW = (4, 0, 0, 4)  # sinks, heavy, merged, recent
ROWS = pytest.mark.parametrize("counts", [WINDOW, (0, 4, 0, 4), (0, 0, 8, 0), (2, 2, 3, 1)])


def traced(model, counts, layer, head, memory=TracedMemory):
    """A memory of 8 slots that has read the 45 tokens in segments of 8, and the logits."""
    settings = Settings("a method", 8, 64, *counts, "original", kernel=3, lora_rank=0)
    torch.manual_seed(1)
    cache = LoCoCo(model, settings).cache(memory)
    cache.layer, cache.head = layer, head
    return cache, prefill(model, TOKENS, cache, 8)


@pytest.mark.parametrize("layer, head", [(0, 0), (1, 1)])
@ROWS
def test_shares_are_the_product_of_all_mixing_matrices(model, counts, layer, head):
    """W by its definition, in loops and float64: kept entries move, merged ones are mixed."""
    kept, recent, shares = sum(counts[:2]), counts[3], [torch.eye(16, 45).double()]
    largest = []

    class Followed(TracedMemory):
        def compress(self, n):
            order, w = super().compress(n)
            if n == layer:
                S, W = order.shape[2], torch.zeros(8, order.shape[2]).double()
                for place, entry in enumerate(order[0, head].tolist()):
                    if kept <= place < S - recent:
                        W[kept : 8 - recent, entry] = w[0, head, :, place - kept].double()
                    else:
                        W[place if place < kept else place - S, entry] = 1
                largest.append((W @ shares[0]).max(dim=1))
                shares[0] = torch.cat((W @ shares[0], torch.eye(45)[self.seen : self.seen + 8]))
            return order, w

    cache, logits = traced(model, counts, layer, head, memory=Followed)
    assert cache.held == 8 + 5 and torch.allclose(cache.shares.double(), shares[0], atol=1e-5)
    assert torch.allclose(cache.shares.sum(dim=1), torch.ones(13), atol=1e-5)
    for (share, token), (found, where) in zip(largest, cache.largest, strict=True):
        assert torch.allclose(found.double(), share, atol=1e-5) and torch.equal(where, token)
    assert torch.equal(logits, traced(model, counts, layer, head, memory=Memory)[1])


@ROWS
def test_entries_are_the_mixtures_of_tokens_that_are_shown(model, counts):
    """In layer 0 a key depends on its token and position alone, and a value on its token."""
    cache, full = traced(model, counts, 0, 1)[0], KVCache(model.config)
    model.hidden(TOKENS, full)
    for ours, theirs in ((cache.keys, full.keys), (cache.values, full.values)):
        assert torch.allclose(cache.shares @ theirs[0][0, 1], ours[0][0, 1], atol=1e-4)
    if counts[2] == 0:  # nothing is merged
        assert cache.shares.unique().tolist() == [0, 1]
    if counts == WINDOW:
        assert cache.shares.argmax(dim=1).tolist() == [0, 1, 2, 3, *range(36, 45)]


def test_slots_are_described_by_their_largest_shares(model, tokenizer):
    """Shares written by hand: three a slot are shown, from 0.01, and after each compression the
    largest share of the first of them; none while all tokens are held."""
    ids = tokenizer.encode("def f(x):\n    return [x]")
    settings = Settings("a method", 2, 64, 1, 1, 1, 1, kernel=3, lora_rank=0)
    cache = LoCoCo(model, settings).cache(TracedMemory)
    cache.layer, cache.head, cache.keys[0] = 1, 0, torch.zeros(1, 2, 6, 8)
    cache.shares = torch.zeros(6, len(ids))
    slots, tokens = (0, 1, 2, 2, 2, 2, 3, 3), (0, 3, 2, 4, 6, 7, 8, 7)
    cache.shares[slots, tokens] = torch.tensor([1, 1, 0.5, 0.25, 0.2, 0.05, 0.994, 0.006])
    at_first = torch.tensor([1, 0.5, 0.3, 0.05]), torch.tensor([0, 3, 3, 2])
    cache.largest = at_first, cache.shares[:4].max(dim=1)
    assert list(describe_slots(cache, ids, tokenizer)) == [
        "layer 1, head 0: 6 entries after 12 tokens",
        "   0 sinks    ████ 1.00 '<s>'      0      ██",
        "   1 heavy    ████ 1.00 '('        3      ▄█",
        "   2 merged   ██·· 0.50 ' f'       2      █··· 0.25 'x'        4"
        "      █··· 0.20 '<0x0A>'   6       ▄",
        "   3 recent   ████ 0.99 'return'   8       █",
    ]
    cache.keys[0] = torch.zeros(1, 2, 12, 8)
    assert len(list(describe_slots(cache, ids, tokenizer))) == 1
