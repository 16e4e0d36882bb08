"""Tensor frames: a fixed 88-byte header, then raw payload bytes in bounded chunks; no MessagePack, no copy.

Value streams (`/fusion/values/1`) carry frames from the peer that computes a value to the peer that reads it; `CREDIT` and
`ARRIVED` frames come back on the same stream. All integers are little-endian:

    offset  0  magic      2s   b"FV"
            2  version    u8
            3  kind       u8   VALUE, NONE, CREDIT, ARRIVED
            4  job       16s
           20  incarnation u32
           24  epoch      u32
           28  step       u32
           32  micro_batch u32
           36  value      u32
           40  source     u16  replica that sends it (OWNER for feeds)
           42  target     u16  replica that reads it (OWNER for what the owner asked for)
           44  direction  u8   FORWARD, BACKWARD, EVALUATE, TIED
           45  dtype      u8   index in DTYPES
           46  rank       u8
           47  codec      u8   index in CODECS
           48  shape      8 x u32
           80  payload    u64  number of bytes that follow; of an ARRIVED frame, that have arrived since the last one

A header is refused (`WireError`) before anything is allocated: the receiver compares it with the type that the graph declares.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import DTYPE_BYTES, MAX_RANK, TensorType
from fusion_p2p.ids import JobId
from fusion_p2p.wire.codecs import FAMILIES

MAGIC = b"FV"
VERSION = 1
OWNER = 0xFFFF
"""Replica number of the owner: the source of feeds."""
MAX_CHUNK_BYTES = 256 << 10
"""A payload is written in pieces of at most this many bytes, each waiting for the stream to drain."""
MAX_PAYLOAD_BYTES = 4 << 30

DTYPES: tuple[str, ...] = tuple(DTYPE_BYTES)
CODECS = FAMILIES

_LAYOUT = struct.Struct("<2sBB16sIIIIIHHBBBB8IQ")
HEADER_BYTES = _LAYOUT.size


class FrameKind(IntEnum):
    VALUE = 1
    NONE = 2
    """No gradient flows back through this value: an explicit nothing, so that nobody waits for it."""
    CREDIT = 3
    """The value of this edge and moment has been taken: one more may be sent, and its sender may forget it."""
    ARRIVED = 4
    """So many payload bytes have been read: as many more may be on their way. Edge and moment mean nothing."""


class Direction(IntEnum):
    FORWARD = 0
    BACKWARD = 1
    EVALUATE = 2
    TIED = 3
    """The gradient of a shared parameter, summed over a step (or an updated buffer), between the replicas that hold a copy."""


@dataclass(frozen=True, slots=True)
class Edge:
    """A way from one replica of a slice to one of another for one value; credits are counted per edge."""

    value: int
    source: int
    target: int
    direction: Direction


@dataclass(frozen=True, slots=True)
class RunId:
    """Which plan of which run a frame belongs to; a frame of another one is stale."""

    job: JobId
    incarnation: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Moment:
    """When in a run: the step and the micro-batch."""

    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes a payload. `type` is None unless it is a VALUE."""

    kind: FrameKind
    run: RunId
    moment: Moment
    edge: Edge
    type: TensorType | None = None
    codec: str = "none"
    payload_bytes: int = 0


def encode_header(header: Header) -> bytes:
    """The 88 bytes of a header."""
    tensor = header.type or TensorType((), "float32", False)
    shape = tensor.shape + (0,) * (MAX_RANK - len(tensor.shape))
    run, moment, edge = header.run, header.moment, header.edge
    return _LAYOUT.pack(
        MAGIC, VERSION, header.kind, bytes.fromhex(run.job), run.incarnation, run.epoch, moment.step, moment.micro_batch,
        edge.value, edge.source, edge.target, edge.direction, DTYPES.index(tensor.dtype), len(tensor.shape),
        CODECS.index(header.codec), *shape, header.payload_bytes,
    )  # fmt: skip


def decode_header(data: bytes) -> Header:
    """The header in exactly HEADER_BYTES bytes; WireError for anything that `encode_header` would not write."""
    if len(data) != HEADER_BYTES:
        raise WireError(f"frame header of {len(data)} bytes, not {HEADER_BYTES}")
    (magic, version, kind, job, incarnation, epoch, step, micro_batch, value, source, target, direction,
     dtype, rank, codec, *rest) = _LAYOUT.unpack(data)  # fmt: skip
    shape, payload = tuple(rest[:MAX_RANK]), rest[MAX_RANK]
    if magic != MAGIC or version != VERSION:
        raise WireError("not a value frame of this version")
    if dtype >= len(DTYPES) or rank > MAX_RANK or codec >= len(CODECS) or any(shape[rank:]):
        raise WireError("frame header out of range")
    if payload > MAX_PAYLOAD_BYTES:
        raise WireError(f"frame payload of {payload} bytes exceeds {MAX_PAYLOAD_BYTES}")
    try:
        frame_kind, way = FrameKind(kind), Direction(direction)
    except ValueError as error:
        raise WireError(f"frame header: {error}") from None
    if frame_kind is not FrameKind.VALUE and (rank or dtype or codec or (payload and frame_kind is not FrameKind.ARRIVED)):
        raise WireError("frame header: fields that do not belong to its kind")
    return Header(
        kind=frame_kind,
        run=RunId(JobId(job.hex()), incarnation, epoch),
        moment=Moment(step, micro_batch),
        edge=Edge(value, source, target, way),
        type=TensorType(shape[:rank], DTYPES[dtype], False) if frame_kind is FrameKind.VALUE else None,
        codec=CODECS[codec],
        payload_bytes=payload,
    )
