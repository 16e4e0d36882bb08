"""What a peer publishes about itself in the directory: at most 2 KiB, signed by its key, replaced by higher sequence numbers.

    payload = sequence number (8 bytes, big-endian) | MessagePack map of Announcement

The caller seals the payload with `net.identity.seal`. Announcements say what a peer can do and how to reach it; whether it
lives is never taken from them.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Annotated

import msgpack
from pydantic import Field, ValidationError

from fusion_p2p import PROTOCOL, __version__
from fusion_p2p.errors import WireError
from fusion_p2p.wire.frames import CODECS
from fusion_p2p.wire.job_messages import Finite
from fusion_p2p.wire.messages import Count, Name, PeerName, Record, Seconds, describe, unpack
from fusion_p2p.wire.probe_messages import BytesPerSecond
from fusion_p2p.wire.swarm_messages import MAX_RECORD_BYTES, PeerState, Reachability

SEQUENCE_BYTES = 8
SEAL_BYTES = 96
"""What sealing adds: public key and signature (`net.identity`)."""
MAX_PAYLOAD_BYTES = MAX_RECORD_BYTES - SEAL_BYTES
MAX_ADDRESSES = 6
MAX_VERSION = 32
MAX_LINKS = 4

Address = Annotated[str, Field(max_length=256)]
Version = Annotated[str, Field(max_length=MAX_VERSION)]
_Rate = Annotated[Finite, Field(ge=0)]
_UnixTime = Annotated[Finite, Field(ge=0, le=1e12)]


class Versions(Record):
    """What this peer runs. Only `protocol` must be equal everywhere."""

    protocol: Count
    fusion: Version
    torch: Version
    python: Version
    codecs: Annotated[tuple[Version, ...], Field(max_length=16)]


def own_versions(torch_version: str) -> Versions:
    """What this installation runs."""
    return Versions(
        protocol=PROTOCOL,
        fusion=__version__[:MAX_VERSION],
        torch=torch_version[:MAX_VERSION],
        python=platform.python_version()[:MAX_VERSION],
        codecs=CODECS,
    )


class MeasuredRates(Record):
    """Forward+backward rates of the device, measured when it joined: FLOP/s and bytes/s."""

    matmul_flops: _Rate
    convolution_flops: _Rate
    attention_flops: _Rate
    memory_bytes_per_s: _Rate


class Caps(Record):
    """Limits that the volunteer set, None where there is none."""

    upload_bytes_per_s: _Rate | None = None
    download_bytes_per_s: _Rate | None = None


class LinkFigure(Record):
    """One measured link: seconds one way, and bytes per second to the peer and from it."""

    peer: PeerName
    latency_s: Seconds
    out: BytesPerSecond
    back: BytesPerSecond


class Line(Record):
    """The peer's line as probes and traffic found it: the best rates to and from other places, and its newest links."""

    up_bytes_per_s: BytesPerSecond | None = None
    down_bytes_per_s: BytesPerSecond | None = None
    links: Annotated[tuple[LinkFigure, ...], Field(max_length=MAX_LINKS)] = ()


class Announcement(Record):
    """One peer's account of itself."""

    network: Name
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]
    reachability: Reachability
    versions: Versions
    device: Annotated[str, Field(max_length=64)]
    rates: MeasuredRates
    free_bytes: Count
    """Device memory this peer offers, a margin already taken off."""
    caps: Caps
    line: Line
    state: PeerState
    incarnation: Count
    wall_s: _UnixTime
    """Unix time on this peer's clock when it wrote this."""


class Profile(Record):
    """What an announcement says that does not change from minute to minute."""

    network: Name
    reachability: Reachability
    versions: Versions
    device: Annotated[str, Field(max_length=64)]
    rates: MeasuredRates
    free_bytes: Count
    caps: Caps = Caps()
    line: Line = Line()


def announce(profile: Profile, addresses: Sequence[str], state: PeerState, incarnation: int, wall_s: float) -> Announcement:
    """The announcement of a peer right now; addresses beyond the limit are left out, best first."""
    return Announcement(
        **dict(profile), addresses=tuple(addresses[:MAX_ADDRESSES]), state=state, incarnation=incarnation, wall_s=wall_s
    )


def fitted(announcement: Announcement) -> Announcement:
    """What of it can be encoded: links are left out first, then the addresses that reach least."""
    while SEQUENCE_BYTES + len(_pack(announcement)) > MAX_PAYLOAD_BYTES:
        line, addresses = announcement.line, announcement.addresses
        if line.links:
            shorter: dict[str, object] = {"line": line.model_copy(update={"links": line.links[:-1]})}
        elif addresses:
            shorter = {"addresses": addresses[:-1]}
        else:
            break
        announcement = announcement.model_copy(update=shorter)
    return announcement


def encode_announcement(announcement: Announcement, sequence: int) -> bytes:
    """The payload to seal. ValueError when it is too large or the sequence number is out of range: our own fault."""
    data: bytes = sequence.to_bytes(SEQUENCE_BYTES, "big") + _pack(announcement)
    if len(data) > MAX_PAYLOAD_BYTES:
        raise ValueError(f"announcement of {len(data)} bytes exceeds {MAX_PAYLOAD_BYTES}")
    return data


def _pack(announcement: Announcement) -> bytes:
    packed: bytes = msgpack.packb(announcement.model_dump())
    return packed


def decode_announcement(payload: bytes) -> tuple[int, Announcement]:
    """Sequence number and announcement of an unsealed payload; WireError when malformed."""
    if len(payload) < SEQUENCE_BYTES:
        raise WireError("announcement without a sequence number")
    try:
        announcement = Announcement.model_validate(unpack(payload[SEQUENCE_BYTES:], MAX_PAYLOAD_BYTES))
    except ValidationError as error:
        raise WireError(f"announcement: {describe(error)}") from None
    return int.from_bytes(payload[:SEQUENCE_BYTES], "big"), announcement
