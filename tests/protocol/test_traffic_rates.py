"""Values tell how fast the link is on which they come, when they are large and come slowly enough."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.values import Expected, Payload, ValueReceiver, ValueSender
from fusion_p2p.wire.frames import Direction, Edge, Moment, RunId
from tests.protocol.swarm_world import in_virtual_time

RUN = RunId(JobId("5" * 32), 1, 1)
VALUES = 3
EDGE = Edge(9, 0, 1, Direction.FORWARD)


class Taker:
    """Takes whatever comes."""

    def __init__(self, declared: TensorType) -> None:
        self.declared = declared
        self.taken = 0
        self.finished = asyncio.Event()

    def expected(self, edge: Edge, moment: Moment, sender: PeerId) -> Expected:
        return Expected(self.declared)

    def deliver(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        self.taken += 1
        if self.taken == VALUES:
            self.finished.set()


async def rates(num_floats: int, mbit: float) -> dict[PeerId, list[float]]:
    """What is observed of three values over such a link."""
    async with SimulatedNetwork(1, Link(latency_s=0.002, bytes_per_s=mbit * 1e6 / 8)) as network:
        there, here = network.join(), network.join()
        declared = TensorType((num_floats,), "float32", True)
        receiver, taker, seen = ValueReceiver(there.transport), Taker(declared), dict[PeerId, list[float]]()
        receiver.observed = lambda peer, rate: seen.setdefault(peer, []).append(rate)
        await receiver.start()
        receiver.open_inlet(RUN, taker)
        sender = ValueSender(
            here.transport,
            RUN,
            {EDGE: VALUES},
            {1: there.peer_id},
            local=lambda edge, moment, payload: None,
            lost=lambda peer, reason: None,
        )
        await asyncio.sleep(1.0)
        running = asyncio.ensure_future(sender.run())
        for number in range(VALUES):
            sender.offer(EDGE, Moment(1, number), Payload(declared, memoryview(bytes(declared.num_bytes))))
        async with asyncio.timeout(60):
            await taker.finished.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return {here.peer_id: seen.pop(here.peer_id, []), **seen}


@pytest.mark.row(40)
@pytest.mark.parametrize(("num_floats", "mbit"), [(1 << 18, 20), (1 << 16, 8), (1 << 20, 100)])
def test_large_values_tell_the_rate(num_floats: int, mbit: float) -> None:
    async def scenario() -> None:
        (observed,) = (await rates(num_floats, mbit)).values()
        assert observed == pytest.approx([mbit * 1e6 / 8] * VALUES, rel=0.1)

    in_virtual_time(scenario())


@pytest.mark.parametrize(("num_floats", "mbit"), [(1 << 14, 1), (1 << 18, 1000)])
def test_small_and_quick_ones_do_not(num_floats: int, mbit: float) -> None:
    async def scenario() -> None:
        (observed,) = (await rates(num_floats, mbit)).values()
        assert observed == []

    in_virtual_time(scenario())
