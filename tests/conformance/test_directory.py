"""What every `Directory` promises."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from fusion_p2p.errors import WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Directory
from fusion_p2p.net.identity import seal
from fusion_p2p.net.records import MAX_RECORD_BYTES, RECORD_DOMAIN
from tests.conformance.harness import Harness, Peer


def record_of(peer: Peer, sequence: int, content: bytes = b"content") -> bytes:
    return seal(peer.identity, sequence.to_bytes(8, "big") + content, domain=RECORD_DOMAIN)


async def looked_up(directory: Directory, wanted: Mapping[PeerId, bytes], timeout_s: float = 15) -> None:
    """Look until exactly this is found; the last answer is shown when it never is."""
    found: Mapping[PeerId, bytes] = {}
    try:
        async with asyncio.timeout(timeout_s):
            while (found := await directory.lookup()) != wanted:  # noqa: ASYNC110 - with a deadline
                await asyncio.sleep(0.05)
    except TimeoutError:
        assert found == wanted


async def test_what_is_announced_is_found_by_all(harness: Harness):
    peers = [await harness.peer() for _ in range(3)]
    records = {peer.identity.peer_id: record_of(peer, 1) for peer in peers}
    for peer in peers:
        await peer.directory.announce(records[peer.identity.peer_id], lifetime_s=60)
    for peer in peers:
        await looked_up(peer.directory, records)


async def test_a_new_record_replaces_the_last(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    for sequence in range(1, 4):
        record = record_of(b, sequence)
        await b.directory.announce(record, lifetime_s=60)
        await looked_up(a.directory, {b.identity.peer_id: record})
    short = record_of(b, 4)  # a shorter life is no reason to be ignored: it may be a farewell
    await b.directory.announce(short, lifetime_s=30)
    await looked_up(a.directory, {b.identity.peer_id: short})


async def test_a_record_expires(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    await b.directory.announce(record_of(b, 1), lifetime_s=1.5)
    await looked_up(a.directory, {b.identity.peer_id: record_of(b, 1)}, timeout_s=1.4)
    await looked_up(a.directory, {})


@pytest.mark.row(39)
async def test_nobody_publishes_another_peers_record(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    with pytest.raises(ValueError, match="its own peer's"):
        await a.directory.announce(record_of(b, 1), lifetime_s=60)
    assert await a.directory.lookup() == {}


@pytest.mark.row(38)
async def test_what_cannot_be_stored_is_the_callers_error(harness: Harness):
    a = await harness.peer()
    with pytest.raises(WireError, match=str(MAX_RECORD_BYTES)):
        await a.directory.announce(record_of(a, 1, bytes(MAX_RECORD_BYTES)), lifetime_s=60)
    with pytest.raises(WireError):
        await a.directory.announce(b"not sealed", lifetime_s=60)
    with pytest.raises(ValueError, match="3600"):
        await a.directory.announce(record_of(a, 1), lifetime_s=7200)
