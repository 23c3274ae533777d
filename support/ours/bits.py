"""Slots in 8 bits: the same bytes hold twice the slots of bfloat16, or nearly four times
those of float32.

Blocks of 32 channels of a key or a value share a power of two as their scale, and each
channel has 8 bits, as in the format MXINT8 (arXiv 2310.10537). A power of two makes it
exact to pack again what was unpacked, so that a kept slot is rounded once, as KIVI (arXiv
2402.02750) keeps what it stored. What entered last, at most a segment, stays as it is. On
SmolLM2 8 bits change the loss of a learned score by at most 0.0001 nats per token over
eight texts of 8,192 tokens, and a memory with M = 896 and T = 128 has 16 MB instead of 47
(docs/results.md). All of it is unpacked for each token, which makes writing slower. 4 bits
in this form raise the loss by 0.03.

It departs from every other memory in what is stored. Attention is computed in the model's
dtype.
"""

import math

import torch
from torch import Tensor

from model import Entries, widened
from support.ours.ceiling import CeilingMemory

BLOCK = 32  # channels that share a scale; fewer if 32 does not divide those of a head


def power_of_two(exponent: Tensor) -> Tensor:
    """2 ** exponent, exactly, in float32."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent)


def pack(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Keys or values (B, G, S, D) -> whole numbers of 8 bits, or two of 4 bits in a byte,
    and the exponents of their scales (B, G, S, blocks), both int8."""
    blocks = widened(x).unflatten(-1, (-1, math.gcd(BLOCK, x.shape[-1])))
    _, exponent = torch.frexp(blocks.abs().amax(dim=-1, keepdim=True))
    exponent = (exponent - (bits - 1)).clamp(-126, 126)
    largest = 2 ** (bits - 1) - 1
    numbers = (blocks * power_of_two(-exponent)).round().clamp(-largest, largest)
    numbers = numbers.to(torch.int8).flatten(-2)
    if bits == 4:
        numbers = (numbers[..., ::2] << 4) | (numbers[..., 1::2] & 15)
    return numbers, exponent.squeeze(-1).to(torch.int8)


def unpack(numbers: Tensor, exponent: Tensor, bits: int, like: Tensor) -> Tensor:
    """What `pack` has packed, in the dtype of `like`."""
    if bits == 4:  # an arithmetic shift keeps the sign
        pairs = torch.stack((numbers >> 4, (numbers << 4) >> 4), dim=-1)
        numbers = pairs.flatten(-2)
    blocks = numbers.float().unflatten(-1, (exponent.shape[-1], -1))
    return (blocks * power_of_two(exponent.unsqueeze(-1))).flatten(-2).type_as(like)


class PackedEntries(Entries):
    """Entries of which the older ones are packed. New ones are appended as they are."""

    def __init__(self, packed: tuple[Tensor, Tensor], new: Entries, bits: int):
        self.packed, self.new, self.bits = packed, new, bits

    @property
    def size(self) -> int:
        return self.packed[0].shape[2] + self.new.size

    @property
    def buffer(self) -> Tensor:
        """That of the new entries."""
        return self.new.buffer

    @property
    def held(self) -> Tensor:
        return torch.cat((unpack(*self.packed, self.bits, self.buffer), self.new.held), dim=2)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.packed) + self.new.held.nbytes

    def append(self, new: Tensor) -> None:
        self.new.append(new)

    def detach(self) -> None:
        self.new.detach()

    def pack_new(self) -> None:
        """Pack all entries that are not packed yet."""
        old_and_new = zip(self.packed, pack(self.new.held, self.bits))
        self.packed = tuple(torch.cat(pair, dim=2) for pair in old_and_new)
        self.new = Entries(self.new.held[:, :, :0])

    def copy(self) -> "PackedEntries":
        return PackedEntries(self.packed, self.new.copy(), self.bits)


class PackedMemory(CeilingMemory):
    """A memory that packs what it holds before new tokens enter, if its settings have 8
    or 4 `bits`. It is for use: rounding has no gradient."""

    def make_room(self, B: int, T: int) -> None:
        super().make_room(B, T)
        if not self.settings.bits:
            return
        for entries in (self.keys, self.values):
            for layer, own in enumerate(entries):
                # A head with fewer slots than a segment has tokens would never have enough.
                enough = min(self.settings.segment, self.of_layer[layer].mem)
                packed = isinstance(own, PackedEntries)
                if packed and own.new.size >= enough:
                    own.pack_new()
                elif not packed and own.size >= enough:
                    none, bits = Entries(own.held[:, :, :0]), self.settings.bits
                    entries[layer] = PackedEntries(pack(own.held, bits), none, bits)

    def stored(self, layer: int) -> dict[str, Tensor]:
        """Of what is packed the numbers and exponents take the place of the values."""
        found = super().stored(layer)
        for name, entries in (("keys", self.keys[layer]), ("values", self.values[layer])):
            if isinstance(entries, PackedEntries):
                found[name] = entries.new.held
                found[f"packed {name}"], found[f"exponents of {name}"] = entries.packed
        return found

    def restore(self, layer: int, stored: dict[str, Tensor]) -> None:
        super().restore(layer, stored)
        for name, entries in (("keys", self.keys), ("values", self.values)):
            if f"packed {name}" in stored:
                packed = stored[f"packed {name}"], stored[f"exponents of {name}"]
                entries[layer] = PackedEntries(packed, entries[layer], self.settings.bits)
