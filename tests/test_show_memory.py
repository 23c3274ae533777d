"""generate.py --show-memory: what it says of the slots is what they hold."""

import pytest
import torch

from generate import TracedMemory, describe_slots, prefill
from lococo import AdaptedLlama, Settings

TOKENS = torch.randint(0, 64, (1, 45), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layer, head", [(0, 1), (1, 0)])
@pytest.mark.parametrize("counts", [(4, 0, 0, 4), (0, 4, 0, 4), (0, 0, 8, 0), (2, 2, 3, 1)])
def test_entries_are_the_mixtures_of_tokens_that_are_shown(model, counts, layer, head):
    """A memory of 8 slots reads 45 tokens in segments of 8. After each compression its keys and
    values are those that once entered, mixed by the shares; tracing changes nothing."""
    settings, entered, largest = Settings("a method", 8, 64, *counts, "original", kernel=3), [], []

    class Followed(TracedMemory):
        def attend(self, n, q, k, v):
            if n == layer:
                entered.append(torch.cat((k, v), dim=3)[0, head])
            return super().attend(n, q, k, v)

        def compress(self, n):
            arranged, w = super().compress(n)
            if n == layer:
                held = torch.cat((self.keys[n], self.values[n]), dim=3)[0, head]
                assert torch.allclose(self.shares @ torch.cat(entered), held, atol=1e-4)
                largest.append(self.shares.max(dim=1))
            return arranged, w

    torch.manual_seed(1)
    adapted = AdaptedLlama(model, settings)
    cache = adapted.cache(Followed)
    cache.layer, cache.head = layer, head
    logits = prefill(model, TOKENS, cache, 8)
    assert cache.size == 8 + 5 and len(largest) == len(cache.largest) == 4
    assert torch.allclose(cache.shares.sum(dim=1), torch.ones(8), atol=1e-5)
    assert all(map(torch.equal, sum(largest, ()), sum(cache.largest, ())))
    assert torch.equal(logits, prefill(model, TOKENS, adapted.cache(), 8))
    if counts[2] == 0:  # nothing is merged
        assert cache.shares.unique().tolist() == [0, 1]
    if counts == (4, 0, 0, 4):
        assert cache.shares.argmax(dim=1).tolist() == [0, 1, 2, 3, *range(36, 40)]


def test_slots_are_described_by_their_largest_shares(model, tokenizer):
    """Shares written by hand: three a slot are shown, from 0.01, and after each compression the
    largest share of the first of them; none while all tokens are held."""
    ids = tokenizer.encode("def f(x):\n    return [x]")
    settings = Settings("a method", 2, 64, 1, 1, 1, 1, kernel=3, lora_rank=0)
    cache = AdaptedLlama(model, settings).cache(TracedMemory)
    cache.layer, cache.head, cache.keys[0] = 1, 0, torch.zeros(1, 2, 6, 8)
    cache.compressed = True
    cache.shares = torch.zeros(4, len(ids))
    slots, tokens = (0, 1, 2, 2, 2, 2, 3, 3), (0, 3, 2, 4, 6, 7, 8, 7)
    cache.shares[slots, tokens] = torch.tensor([1, 1, 0.5, 0.25, 0.2, 0.05, 0.994, 0.006])
    at_first = torch.tensor([1, 0.5, 0.3, 0.05]), torch.tensor([0, 3, 3, 2])
    cache.largest = at_first, cache.shares.max(dim=1)
    assert list(describe_slots(cache, ids, tokenizer)) == [
        "layer 1, head 0: 6 entries after 12 tokens",
        "   0 sinks    ████ 1.00 '<s>'      0      ██",
        "   1 heavy    ████ 1.00 '('        3      ▄█",
        "   2 merged   ██·· 0.50 ' f'       2      █··· 0.25 'x'        4"
        "      █··· 0.20 '<0x0A>'   6       ▄",
        "   3 recent   ████ 0.99 'return'   8       █",
    ]
    cache.compressed = False
    assert len(list(describe_slots(cache, ids, tokenizer))) == 1
