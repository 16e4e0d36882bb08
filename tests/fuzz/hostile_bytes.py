"""What a stranger might send instead of frames and control messages: valid bytes bent in every way, and bombs.

`attack_frames` and `attack_messages` run a number of inputs from a seed and count what happened: each must be decoded or
refused with WireError, whatever it is.
"""

from __future__ import annotations

import copy
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import JobId
from fusion_p2p.wire.frames import (
    DTYPES,
    HEADER_BYTES,
    Direction,
    Edge,
    FrameKind,
    Header,
    Moment,
    RunId,
    decode_header,
    encode_header,
)
from fusion_p2p.wire.messages import LENGTH_BYTES, MAX_MESSAGE_BYTES, body_length
from tests.fuzz.examples import MESSAGE_SETS, examples


@dataclass
class Outcome:
    """What became of the inputs."""

    inputs: int = 0
    refused: int = 0
    accepted: int = 0
    unexpected: list[str] = field(default_factory=list)
    """Any error that is not ours, with its input in hexadecimal."""

    def take(self, decode: Callable[[bytes], object], data: bytes) -> None:
        self.inputs += 1
        try:
            decode(data)
        except WireError:
            self.refused += 1
        except Exception as error:  # noqa: BLE001 - whatever else comes out is what we look for
            self.unexpected.append(f"{type(error).__name__}: {error} on {data[:200].hex()}")
        else:
            self.accepted += 1


def attack_frames(count: int, seed: int) -> Outcome:
    """Hostile frame headers; one that is accepted must encode to the same bytes again."""
    outcome, rng = Outcome(), random.Random(seed)
    for data in _take(count, _hostile_headers(rng)):
        outcome.take(_decode_header_strictly, data)
    return outcome


def attack_messages(count: int, seed: int) -> Outcome:
    """Hostile control messages for every protocol; one that is accepted must encode and decode to itself."""
    outcome, rng = Outcome(), random.Random(seed)
    sources = [(messages, [messages.encode(one) for one in examples(messages)]) for messages in MESSAGE_SETS.values()]
    for _ in range(count):
        messages, valid = rng.choice(sources)
        data = _hostile_message(rng, rng.choice(valid))

        def decode(data: bytes, messages: Any = messages) -> None:
            body_length(data[:LENGTH_BYTES])
            message = messages.decode(data[LENGTH_BYTES:])
            again = messages.decode(messages.encode(message)[LENGTH_BYTES:])
            if repr(again) != repr(message):  # repr: NaN is not itself
                raise AssertionError("a message changed on its way")

        outcome.take(decode, data)
    return outcome


def _take(count: int, inputs: Iterator[bytes]) -> Iterator[bytes]:
    for _, data in zip(range(count), inputs, strict=False):
        yield data


def _decode_header_strictly(data: bytes) -> None:
    if encode_header(decode_header(data)) != data:
        raise AssertionError("a header was accepted that encode_header would not write")


def _hostile_headers(rng: random.Random) -> Iterator[bytes]:
    while True:
        data = encode_header(_header(rng))
        way = rng.randrange(5)
        if way == 0:
            yield data
        elif way == 1:
            yield bend(rng, data)
        elif way == 2:
            yield rng.randbytes(HEADER_BYTES)
        elif way == 3:
            yield data[:4] + rng.randbytes(HEADER_BYTES - 4)
        else:
            position = rng.randrange(HEADER_BYTES - 8)
            yield data[:position] + struct.pack("<Q", rng.choice(NUMBERS)) + data[position + 8 :]


def _header(rng: random.Random) -> Header:
    kind = rng.choice(list(FrameKind))
    rank = rng.randrange(9)
    shape = tuple(rng.choice((0, 1, 7, 4096, 0xFFFFFFFF)) for _ in range(rank))
    return Header(
        kind=kind,
        run=RunId(JobId(rng.randbytes(16).hex()), rng.getrandbits(32), rng.getrandbits(32)),
        moment=Moment(rng.getrandbits(32), rng.getrandbits(32)),
        edge=Edge(rng.getrandbits(32), rng.getrandbits(16), rng.getrandbits(16), rng.choice(list(Direction))),
        type=TensorType(shape, rng.choice(DTYPES), False) if kind is FrameKind.VALUE else None,
        payload_bytes=rng.getrandbits(32) if kind is FrameKind.VALUE else 0,
    )


NUMBERS = (0, 1, 255, 0xFFFF, 0xFFFFFFFF, 1 << 32, 1 << 53, (1 << 63) - 1, (1 << 64) - 1)
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1 << 53, (1 << 64) - 1, -(1 << 63), float("nan"), float("inf"), -0.0, 1e308,
    "", "x" * 5000, "\x00\x1b[2J", "\ud800", "__class__", "../../etc/passwd", "12D3Koo",
    b"", b"\xff" * 4000, [], {}, [[]], [None] * 500, {"kind": "kind"},
)  # fmt: skip
BOMBS = (
    b"\xdd\xff\xff\xff\xff",  # an array of 2^32 - 1
    b"\xdf\xff\xff\xff\xff",  # a map of as many
    b"\xdb\xff\xff\xff\xff",  # a string of 4 GiB
    b"\xc6\xff\xff\xff\xff",  # bytes of 4 GiB
    b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
    b"\xc7\x08\xff" + bytes(8),  # a time stamp
    b"\x91" * 60_000,  # arrays in arrays
    b"\x81\xa1a" * 20_000,  # maps in maps
    b"\x81\xc0\xc0",  # a key that is no string
    b"\x82\xa4kind\xa5pulse\xa4kind\xa5pulse",  # a key twice
    b"\xc1",
)


def _hostile_message(rng: random.Random, valid: bytes) -> bytes:
    """A message with its length in front, which may lie."""
    way = rng.randrange(6)
    body = valid[LENGTH_BYTES:]
    if way == 0:
        body = bend(rng, body)
    elif way in (1, 2):
        body = _bent_fields(rng, body)
    elif way == 3:
        body = rng.choice(BOMBS)
    elif way == 4:
        position = rng.randrange(len(body))
        body = body[:position] + rng.choice(BOMBS)[:200] + body[position:]
    else:
        body = rng.randbytes(rng.randrange(200))
    length = rng.choice((len(body), len(body), len(body), 0, MAX_MESSAGE_BYTES + 1, 0xFFFFFFFF))
    return length.to_bytes(LENGTH_BYTES, "big") + body


def bend(rng: random.Random, data: bytes) -> bytes:
    """A few bytes flipped, cut, doubled or put in."""
    bent = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        position = rng.randrange(len(bent) + 1)
        way = rng.randrange(4)
        if way == 0 and position < len(bent):
            bent[position] ^= 1 << rng.randrange(8)
        elif way == 1:
            del bent[position : position + rng.randint(1, 8)]
        elif way == 2:
            bent[position:position] = bent[position : position + 16]
        else:
            bent[position:position] = rng.randbytes(rng.randint(1, 8))
    return bytes(bent)


def _bent_fields(rng: random.Random, body: bytes) -> bytes:
    """Well-formed MessagePack whose fields are wrong: replaced, missing, doubled in depth, or too many."""
    fields = msgpack.unpackb(body)
    for _ in range(rng.randint(1, 3)):
        container = _somewhere(rng, fields)
        key = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
        way = rng.randrange(4)
        if way == 0 and isinstance(container, dict) and len(container) > 1:
            del container[key]
        elif way == 1 and isinstance(container, dict):
            container[rng.choice(("extra", "", "__init__", "kind"))] = copy.deepcopy(rng.choice(VALUES))
        elif way == 2 and isinstance(container, list):
            container.extend(container * rng.choice((1, 50)))
            del container[20_000:]
        else:
            container[key] = _nudged(container[key]) if rng.random() < 0.4 else copy.deepcopy(rng.choice(VALUES))
    return bytes(msgpack.packb(fields, unicode_errors="surrogatepass"))


def _nudged(value: Any) -> Any:
    """Another value of the same type, which may well be allowed."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return min(value + 1, (1 << 64) - 1)
    return value + value[:1] if isinstance(value, str | bytes) else value


def _somewhere(rng: random.Random, fields: Any) -> Any:
    """A map or array, not empty, anywhere inside."""
    inside = [
        value for value in (fields.values() if isinstance(fields, dict) else fields) if isinstance(value, dict | list) and value
    ]
    return _somewhere(rng, rng.choice(inside)) if inside and rng.random() < 0.6 else fields
