"""Numbers of a few bits each, packed without gaps; ascending places as a Rice code. NumPy, no loop over elements.

Bits fill bytes from the lowest up, and unused bits of the last byte are 0.

    packed(numbers, width)   number i takes the bits i * width to (i + 1) * width - 1

A Rice code of k places among n, with b = `wire.codecs.remainder_bits(n, k)`; gap i counts the places skipped before i:

    remainders   packed(gap & (2**b - 1), b)
    quotients    for every gap (gap >> b) zero bits, then a one bit

It needs within 3 % of log2 C(n, k) bits when the places are independent, and never more than `wire.codecs.unary_limit` says.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.errors import WireError
from fusion_p2p.wire.codecs import packed_bytes, remainder_bits

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
_GROUP = 8
"""Numbers of any width end at a byte boundary after so many."""


def pack(numbers: NDArray[np.integer], width: int) -> Bytes:
    """`numbers` (k,) below 2**width, as packed_bytes(k, width) bytes."""
    count = len(numbers)
    groups = -(-count // _GROUP)
    columns = np.zeros((groups, _GROUP), np.uint32)
    columns.reshape(-1)[:count] = numbers
    filled = np.zeros((groups, width), np.uint8)
    for number, byte, shift in _pieces(width):
        column = columns[:, number]
        filled[:, byte] |= (column >> shift if shift >= 0 else column << -shift).astype(np.uint8)
    return filled.reshape(-1)[: packed_bytes(count, width)]


def unpack(data: Bytes, count: int, width: int) -> NDArray[np.uint32]:
    """The (count,) numbers in exactly packed_bytes(count, width) bytes. WireError when unused bits are set."""
    groups = -(-count // _GROUP)
    padded = np.zeros((groups, width), np.uint8)
    padded.reshape(-1)[: len(data)] = data
    columns = np.zeros((groups, _GROUP), np.uint32)
    for number, byte, shift in _pieces(width):
        part = padded[:, byte].astype(np.uint32)
        columns[:, number] |= part << shift if shift >= 0 else part >> -shift
    numbers = columns.reshape(-1)
    if width < 32:
        numbers &= (1 << width) - 1
    if numbers[count:].any():
        raise WireError("packed numbers: bits after the last one")
    return numbers[:count]


def _pieces(width: int) -> list[tuple[int, int, int]]:
    """How a group lies in its bytes: (number, byte, by how much the number is shifted down to be that byte)."""
    return [
        (number, byte, 8 * byte - number * width)
        for number in range(_GROUP)
        for byte in range(number * width // 8, ((number + 1) * width + 7) // 8)
    ]


def encode_places(places: Places, among: int) -> tuple[Bytes, Bytes]:
    """Remainders and quotients of k >= 1 ascending places below `among`."""
    bits = remainder_bits(among, len(places))
    gaps = np.diff(places, prepend=-1) - 1
    ends = np.cumsum((gaps >> bits) + 1) - 1
    ones = np.zeros(int(ends[-1]) + 1, np.uint8)
    ones[ends] = 1
    return pack(gaps & ((1 << bits) - 1), bits), np.packbits(ones, bitorder="little")


def decode_places(remainders: Bytes, quotients: Bytes, count: int, among: int) -> Places:
    """The `count` places. WireError when the quotients hold another number of them, or one is not below `among`."""
    bits = remainder_bits(among, count)
    ends = np.flatnonzero(np.unpackbits(quotients, bitorder="little").view(np.bool_))
    if len(ends) != count or len(quotients) != ends[-1] // 8 + 1:
        raise WireError(f"sparse payload: {len(ends)} places where {count} belong")
    gaps = (np.diff(ends, prepend=-1) - 1) << bits
    gaps |= unpack(remainders, count, bits)
    places: Places = np.cumsum(gaps + 1) - 1
    if places[-1] >= among:
        raise WireError(f"sparse payload: place {places[-1]} of {among}")
    return places
