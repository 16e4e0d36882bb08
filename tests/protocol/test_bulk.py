"""Bulk data on a slow line, in virtual time: messages beside it are not late, caps are kept, what was sent arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fusion_p2p.errors import DeadlinePassed, WireError
from fusion_p2p.net.base import Stream
from fusion_p2p.net.blobs import BlobReader, BlobServer
from fusion_p2p.net.bulk import IDLE_TIMEOUT_S, Outgoing, read_bulk, together
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.pacing import Pace
from tests.protocol.swarm_world import in_virtual_time

BULK, BEATS = "/test/bulk/1", "/test/beats/1"
LINE = Link(latency_s=0.02, bytes_per_s=1e6, buffer_bytes=4 << 20)
"""8 Mbit/s, with as much room in front of it as p2pd has."""
SIZE = 8 << 20


def now() -> float:
    return asyncio.get_running_loop().time()


async def take_beats(
    network: SimulatedNetwork, sender: SimulatedPeer, taker: SimulatedPeer
) -> tuple[list[float], Awaitable[None]]:
    """How late each of the beats is that are sent from now on, ten a second."""
    late: list[float] = []

    async def hear(stream: Stream) -> None:
        while True:
            late.append(now() - float(await stream.read_exactly(16)))

    async def beat() -> None:
        stream = await sender.transport.open(taker.peer_id, BEATS)
        while True:
            await stream.write(f"{now():016.6f}".encode())
            await asyncio.sleep(0.1)

    await taker.transport.serve(BEATS, hear)
    return late, beat()


async def send_bulk(sender: SimulatedPeer, taker: SimulatedPeer, data: bytes) -> float:
    """Seconds that it takes, with what the taker says of its arrival on the same stream."""
    done: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()

    async def take(stream: Stream) -> None:
        async def arrived(size: int) -> None:
            await stream.write(size.to_bytes(8, "big"))

        done.set_result(await read_bulk(stream, len(data), taker.transport.bandwidth.down, arrived))

    await taker.transport.serve(BULK, take)
    began = now()
    stream = await sender.transport.open(taker.peer_id, BULK)
    outgoing = Outgoing(stream, sender.transport.bandwidth)

    async def listen() -> None:
        left = len(data)
        while left:
            size = int.from_bytes(await stream.read_exactly(8), "big")
            outgoing.arrived(size)
            left -= size

    await together(outgoing.write(memoryview(data)), listen())
    outgoing.end()
    assert await done == data
    return now() - began


async def send_plainly(sender: SimulatedPeer, taker: SimulatedPeer, data: bytes) -> float:
    """The same without regard to what is on its way."""

    async def take(stream: Stream) -> None:
        await stream.read_exactly(len(data))
        await stream.write(b".")

    await taker.transport.serve(BULK, take)
    began = now()
    stream = await sender.transport.open(taker.peer_id, BULK)
    await stream.write(data)
    await stream.read_exactly(1)
    return now() - began


async def lateness(send: Callable[[SimulatedPeer, SimulatedPeer, bytes], Awaitable[float]]) -> tuple[float, float]:
    """The latest beat beside bulk data, and the bytes per second of that."""
    async with SimulatedNetwork(3, LINE) as network:
        sender, taker = network.join(), network.join()
        late, beating = await take_beats(network, sender, taker)
        beats = asyncio.ensure_future(beating)
        took_s = await send(sender, taker, bytes(SIZE))
        beats.cancel()
        await asyncio.gather(beats, return_exceptions=True)
        return max(late), SIZE / took_s


@pytest.mark.row(11)
def test_beats_are_not_late_beside_bulk_data_which_fills_the_line_all_the_same() -> None:
    async def scenario() -> None:
        late_s, bytes_per_s = await lateness(send_bulk)
        assert late_s < 0.4
        assert bytes_per_s > 0.95 * LINE.bytes_per_s
        late_s, _ = await lateness(send_plainly)
        assert late_s > 2.0, "the simulated line queues too little for this test to mean anything"

    in_virtual_time(scenario())


@pytest.mark.row(21)
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_cap_is_kept_and_used_up(way: str) -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(3, Link(latency_s=0.01, bytes_per_s=1e8)) as network:
            sender, taker = network.join(), network.join()
            capped = sender.transport.bandwidth.up if way == "up" else taker.transport.bandwidth.down
            capped.set_rate(1e6)
            took_s = await send_bulk(sender, taker, bytes(SIZE))
            assert SIZE / took_s == pytest.approx(1e6, rel=0.05)
            assert capped.taken == SIZE

    in_virtual_time(scenario())


@pytest.mark.row(16)
def test_a_blob_that_is_downloaded_does_not_hold_up_beats() -> None:
    async def download(sender: SimulatedPeer, taker: SimulatedPeer, data: bytes) -> float:
        server = BlobServer(sender.transport)
        await server.start()
        digest, began = server.offer(data), now()
        async with BlobReader(taker.transport, sender.peer_id) as reader:
            assert await reader.content(digest, len(data)) == data
        return now() - began

    async def scenario() -> None:
        late_s, bytes_per_s = await lateness(download)
        assert late_s < 0.4
        assert bytes_per_s > 0.95 * LINE.bytes_per_s

    in_virtual_time(scenario())


@pytest.mark.row(11)
def test_streams_of_one_link_share_what_may_be_on_its_way() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(3, LINE) as network:
            sender, taker = network.join(), network.join()
            server = BlobServer(sender.transport)
            await server.start()
            data = bytes(2 << 20)
            digest = server.offer(data)
            late, beating = await take_beats(network, sender, taker)
            beats = asyncio.ensure_future(beating)

            async def fetch() -> float:
                async with BlobReader(taker.transport, sender.peer_id) as reader:
                    await reader.content(digest, len(data))
                return now()

            ends = await asyncio.gather(*(fetch() for _ in range(6)))
            beats.cancel()
            assert max(late) < 0.5
            assert min(ends) > 0.8 * max(ends), "one went before the others"

    in_virtual_time(scenario())


def test_a_reader_that_claims_too_much_breaks_the_protocol() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(3) as network:
            sender, taker = network.join(), network.join()

            async def take(stream: Stream) -> None:
                await stream.read_exactly(1)

            await taker.transport.serve(BULK, take)
            outgoing = Outgoing(await sender.transport.open(taker.peer_id, BULK), sender.transport.bandwidth)
            await outgoing.write(memoryview(bytes(100)))
            outgoing.arrived(99)
            with pytest.raises(WireError):
                outgoing.arrived(2)

    in_virtual_time(scenario())


@pytest.mark.row(16)
def test_a_sender_that_falls_silent_is_given_up_in_time() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(3) as network:
            sender, taker = network.join(), network.join()

            async def give(stream: Stream) -> None:
                await stream.write(bytes(1000))
                await asyncio.sleep(1000)

            async def arrived(size: int) -> None:
                told.append(size)

            told: list[int] = []
            await sender.transport.serve(BULK, give)
            stream = await taker.transport.open(sender.peer_id, BULK)
            began = now()
            with pytest.raises(DeadlinePassed, match="at byte 1000 of 2000"):
                await read_bulk(stream, 2000, Pace(), arrived)
            assert now() - began < IDLE_TIMEOUT_S + 1
            assert told == [1000]

    in_virtual_time(scenario())


def test_callers_of_a_pace_take_turns_and_a_change_wakes_them() -> None:
    async def scenario() -> None:
        pace, order = Pace(1e5), list[str]()

        async def mover(name: str) -> None:
            for _ in range(5):
                await pace.take(10_000)
                order.append(name)

        began = now()
        await asyncio.gather(mover("a"), mover("b"))
        assert all(abs(order[:many].count("a") - order[:many].count("b")) <= 2 for many in range(11))
        assert now() - began == pytest.approx(1.0, abs=0.2)
        slow = asyncio.ensure_future(asyncio.gather(pace.take(1_000_000), pace.take(1)))
        await asyncio.sleep(0.5)
        assert not slow.done()
        pace.set_rate(None)
        async with asyncio.timeout(0.1):
            await slow
        with pytest.raises(ValueError, match="above 0"):
            pace.set_rate(0)

    in_virtual_time(scenario())
