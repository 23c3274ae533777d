"""`generate.py --page page.html`: what memories hold while a text is read, as the
data of the page."""

from collections import Counter

from support.programs.tracing import LEAST, TracedMemory, kinds_of

TITLES = {  # what the page calls methods
    "streaming": "window (streaming)",
    "h2o": "H2O",
    "h2o+forget": "H2O that forgets",
}


def slot_record(shares: list[float], tokens: list[int]) -> int | list[int]:
    """One slot: [token, share, token, share ...] with shares in hundredths, the largest
    first. A slot that is one whole token, as most are, is that token's number alone."""
    record = []
    for share, token in zip(shares, tokens):
        if share >= LEAST:
            record += [token, round(100 * share)]
    return record[0] if record[1:] == [100] else record


def page_record(name: str, memory: TracedMemory, following: str) -> dict:
    """What the page shows of a memory that has read the text. `following` is the token that
    it predicts after the text."""
    held = []  # [compression][layer][head][slot]
    for layers in zip(*memory.largest.values()):
        numbers = [(shares.tolist(), tokens.tolist()) for shares, tokens in layers]
        held.append([[[slot_record(*slot) for slot in zip(*head)] for head in zip(*layer)]
                     for layer in numbers])
    method, comma, adapter = name.partition(",")
    return {
        "name": TITLES.get(method, method) + comma + adapter,
        "counts": Counter(kinds_of(memory.settings)),  # of slots, in their order
        "layers": memory.config.n_layers,
        "heads": memory.config.n_kv_heads,
        # Of one entry in all layers, here and in a full cache.
        "entry_bytes": memory.nbytes // memory.keys[0].size,
        "full_entry_bytes": memory.full_nbytes // memory.seen,
        "next": following,
        "read": memory.seen_at,
        "held": held,
    }
