"""Names for the numbers and strings that identify things, so that one cannot be passed for another."""

from __future__ import annotations

import hashlib
from typing import NewType

PeerId = NewType("PeerId", str)
"""libp2p peer id in base58, as in `/p2p/12D3Koo...`."""

JobId = NewType("JobId", str)
"""One training run: 32 hexadecimal digits."""

Digest = NewType("Digest", str)
"""blake2b-256 of some bytes: 64 hexadecimal digits."""


def digest_of(data: bytes | memoryview) -> Digest:
    """Identify bytes by their content."""
    return Digest(hashlib.blake2b(data, digest_size=32).hexdigest())
