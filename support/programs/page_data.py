"""`generate.py --page page.html`: what memories hold while a text is read, as the
data of the page."""

from collections import Counter

from support.programs.tracing import LEAST, Tracing, kinds_of

TITLES = {  # what the page calls methods
    "streaming": "window (streaming)",
    "h2o": "H2O",
    "h2o+forget": "H2O that forgets",
    "learned": "a learned score",
}


def slot_record(shares: list[float], tokens: list[int]) -> int | list[int]:
    """One slot: [token, share, token, share ...] with shares in hundredths, the largest
    first. A slot that is one whole token, as most are, is that token's number alone."""
    record = []
    for share, token in zip(shares, tokens):
        if share >= LEAST:
            record += [token, round(100 * share)]
    return record[0] if record[1:] == [100] else record


def head_record(memory: Tracing, n: int, own: int) -> dict:
    """What the page shows of head number `own` of part n. `counts` has its slots of each kind,
    and `read` the tokens that had been read at each compression. `held` has for each compression
    what the slots hold."""
    held = []
    for shares, tokens in memory.largest[n]:
        slots = zip(shares[own].tolist(), tokens[own].tolist())
        held.append([slot_record(*slot) for slot in slots])
    counts = Counter(kinds_of(memory.parts[n].settings))  # in the order of the slots
    return {"counts": counts, "read": memory.seen_at[n], "held": held}


def page_record(name: str, memory: Tracing, following: str) -> dict:
    """What the page shows of a memory that has read the text. `following` is the token that
    it predicts after the text."""
    heads = [[None] * memory.config.n_kv_heads for _ in range(memory.config.n_layers)]
    for n, part in enumerate(memory.parts):
        for own, head in enumerate(part.heads):
            heads[part.layer][head] = head_record(memory, n, own)
    method, comma, adapter = name.partition(",")
    return {
        "name": TITLES.get(method, method) + comma + adapter,
        "bytes": memory.nbytes,
        "full_bytes": memory.full_nbytes,
        "next": following,
        "heads": heads,  # by layer
    }
