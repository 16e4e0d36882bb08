"""What a directory keeps: sealed records of at most 2 KiB, one per peer, that nobody can forge, replay or lengthen.

A record is sealed by its peer for RECORD_DOMAIN, and the payload begins with an 8-byte big-endian sequence number: among two
records of one peer the higher number is the newer. For the DHT, which orders by expiry, the publisher seals the record once
more together with its expiry (`stamp`): so whoever stores it can check, without knowing what it means, that peer, content and
expiry belong together.
"""

from __future__ import annotations

import functools
import struct

from fusion_p2p.errors import WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.identity import SEAL_BYTES, Identity, seal, unseal

RECORD_DOMAIN = "announcement"
MAX_RECORD_BYTES = 2 << 10
"""Of a sealed record, without its stamp."""
MAX_LIFETIME_S = 3600.0

MAX_READ = 1024
"""Stamped records found valid are remembered: every look-up brings all of them again, and checking is most of its cost."""

_STAMP_DOMAIN = "directory"
_EXPIRY = struct.Struct(">d")
_SEQUENCE_BYTES = 8
MAX_STAMPED_BYTES = MAX_RECORD_BYTES + SEAL_BYTES + _EXPIRY.size


def read_record(record: bytes) -> tuple[PeerId, int]:
    """Who sealed a record, and its sequence number. WireError when it is too large, forged or has no number."""
    if len(record) > MAX_RECORD_BYTES:
        raise WireError(f"record of {len(record)} bytes exceeds {MAX_RECORD_BYTES}")
    signer, payload = unseal(record, domain=RECORD_DOMAIN)
    if len(payload) < _SEQUENCE_BYTES:
        raise WireError("record without a sequence number")
    return signer, int.from_bytes(payload[:_SEQUENCE_BYTES], "big")


def stamp(identity: Identity, record: bytes, expires_at: float) -> bytes:
    """The record bound to its expiry (Unix time in seconds)."""
    return seal(identity, _EXPIRY.pack(expires_at) + record, domain=_STAMP_DOMAIN)


@functools.lru_cache(MAX_READ)
def read_stamped(stamped: bytes, expires_at: float) -> tuple[PeerId, bytes]:
    """The publisher and the record; WireError unless both seals are the publisher's and the expiry is the one sealed."""
    if len(stamped) > MAX_STAMPED_BYTES:
        raise WireError(f"stamped record of {len(stamped)} bytes exceeds {MAX_STAMPED_BYTES}")
    publisher, payload = unseal(stamped, domain=_STAMP_DOMAIN)
    if payload[: _EXPIRY.size] != _EXPIRY.pack(expires_at):
        raise WireError("record with another expiry than its publisher gave it")
    record = payload[_EXPIRY.size :]
    signer, _ = read_record(record)
    if signer != publisher:
        raise WireError(f"record of {signer} published by {publisher}")
    return publisher, record
