"""Probes on every transport: figures of both directions, from the authenticated peer, in bounded time."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.clock import SystemClock
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.probing import DIRECTION_S, Measured, Prober
from tests.conformance.harness import Harness, eventually


@pytest.mark.row(40)
async def test_two_peers_measure_the_links_between_them(harness: Harness):
    host, asker = await harness.peer(), await harness.peer()
    learnt: dict[PeerId, Measured] = {}
    await Prober(SystemClock(), learnt.__setitem__).serve(host.transport)

    async def open_stream(peer: PeerId, protocol: str, timeout_s: float) -> Stream:
        return await asker.transport.open(peer, protocol, timeout_s=timeout_s)

    loop = asyncio.get_running_loop()
    began = loop.time()
    found = await Prober(SystemClock()).probe(open_stream, host.identity.peer_id)
    assert isinstance(found, Measured)
    assert loop.time() - began < 2 * DIRECTION_S + 3
    assert 0 < found.latency_s < 0.1
    assert found.out_bytes_per_s > 1e6
    assert found.in_bytes_per_s > 1e6
    await eventually(lambda: bool(learnt))
    assert learnt == {asker.identity.peer_id: Measured(found.latency_s, found.in_bytes_per_s, found.out_bytes_per_s)}
