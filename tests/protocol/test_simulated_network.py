"""The simulated network itself: time, bandwidth, faults, reproducibility."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from fusion_p2p.errors import DeadlinePassed, NetworkError, PeerUnreachable, StreamClosed
from fusion_p2p.net.base import Stream
from fusion_p2p.net.identity import seal
from fusion_p2p.net.memory import KEEPALIVE_S, SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.records import RECORD_DOMAIN
from tests.protocol.swarm_world import in_virtual_time

PROTOCOL = "/test/1"


async def echo(stream: Stream) -> None:
    while True:
        size = int.from_bytes(await stream.read_exactly(4), "big")
        await stream.write(await stream.read_exactly(size))


async def served(network: SimulatedNetwork) -> tuple[SimulatedPeer, SimulatedPeer, Stream]:
    """Two peers and a stream from the second to the first, which echoes."""
    a, b = network.join(), network.join()
    await a.transport.serve(PROTOCOL, echo)
    return a, b, await b.transport.open(a.peer_id, PROTOCOL)


async def round_trip(stream: Stream, message: bytes = b"hello") -> float:
    """Seconds from the question to the answer."""
    started = now()
    await stream.write(len(message).to_bytes(4, "big") + message)
    assert await stream.read_exactly(len(message)) == message
    return now() - started


def now() -> float:
    return asyncio.get_running_loop().time()


def test_latency_and_bandwidth_take_their_time():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1, link=Link(latency_s=0.05, bytes_per_s=1e6)) as network:
            _, _, stream = await served(network)
            assert await round_trip(stream) == pytest.approx(0.1, abs=0.001)
            assert await round_trip(stream, bytes(2_000_000)) == pytest.approx(4.1, rel=0.05)

    in_virtual_time(scenario())


def test_streams_of_one_link_share_its_bandwidth():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1, link=Link(latency_s=0.01, bytes_per_s=1e6)) as network:
            a, b, stream = await served(network)
            bulk = await b.transport.open(a.peer_id, PROTOCOL)
            sending = asyncio.create_task(bulk.write((1 << 30).to_bytes(4, "big") + bytes(1 << 20)))
            await asyncio.sleep(0.05)
            assert 0.1 < await round_trip(stream) < 0.5, "a question waits behind what is in flight, which is bounded"
            sending.cancel()
            await asyncio.wait([sending])

    in_virtual_time(scenario())


def test_a_lost_chunk_is_late_and_order_is_kept():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=3, link=Link(latency_s=0.01, jitter_s=0.05, loss=0.2)) as network:
            _, _, stream = await served(network)
            rng = random.Random(1)
            times = [await round_trip(stream, rng.randbytes(100_000)) for _ in range(30)]
            assert min(times) < 0.2 < max(times)

    in_virtual_time(scenario())


def test_a_partition_is_silence_then_the_end_and_heals():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, b, stream = await served(network)
            network.partition([a.peer_id])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(KEEPALIVE_S - 5):
                    await round_trip(stream)
            with pytest.raises(DeadlinePassed):
                await b.transport.open(a.peer_id, PROTOCOL, timeout_s=3)
            with pytest.raises(StreamClosed):
                await stream.read_exactly(1)
            assert now() == pytest.approx(KEEPALIVE_S, abs=1)
            network.heal()
            await round_trip(await b.transport.open(a.peer_id, PROTOCOL))

    in_virtual_time(scenario())


def test_a_short_partition_only_delays():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, _, stream = await served(network)
            network.partition([a.peer_id])
            asyncio.get_running_loop().call_later(10, network.heal)
            assert await round_trip(stream) == pytest.approx(10, abs=0.1)
            await asyncio.sleep(2 * KEEPALIVE_S)
            await round_trip(stream)

    in_virtual_time(scenario())


def test_a_crash_is_the_end_for_the_others_and_the_peer_may_return():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, b, stream = await served(network)
            network.crash(a.peer_id)
            with pytest.raises(StreamClosed):
                await stream.read_exactly(1)
            with pytest.raises(StreamClosed):
                await stream.write(b"x")
            with pytest.raises(PeerUnreachable):
                await b.transport.open(a.peer_id, PROTOCOL)
            back = network.join(identity=a.identity)
            await back.transport.serve(PROTOCOL, echo)
            await round_trip(await b.transport.open(a.peer_id, PROTOCOL))
            with pytest.raises(ValueError, match="already"):
                network.join(identity=a.identity)

    in_virtual_time(scenario())


def test_a_crash_behind_a_partition_is_not_noticed_at_once():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, _, stream = await served(network)
            network.partition([a.peer_id])
            network.crash(a.peer_id)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(20):
                    await stream.read_exactly(1)

    in_virtual_time(scenario())


def test_a_frozen_peer_keeps_its_connections_and_says_nothing():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, b, stream = await served(network)
            network.freeze(a.peer_id)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(10 * KEEPALIVE_S):
                    await round_trip(stream)
            other = await b.transport.open(a.peer_id, PROTOCOL)
            network.thaw(a.peer_id)
            await round_trip(other)

    in_virtual_time(scenario())


def test_a_peer_that_cannot_be_dialled_is_reached_while_it_is_connected():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            hidden, a = network.join(dialable=False), network.join()
            await hidden.transport.serve(PROTOCOL, echo)
            with pytest.raises(PeerUnreachable):
                await a.transport.open(hidden.peer_id, PROTOCOL)
            await hidden.transport.connect(a.transport.addresses)
            await round_trip(await a.transport.open(hidden.peer_id, PROTOCOL))

    in_virtual_time(scenario())


def test_announcements_do_not_cross_a_partition():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, b = network.join(), network.join()

            async def announce(sequence: int) -> None:
                record = seal(a.identity, sequence.to_bytes(8, "big"), domain=RECORD_DOMAIN)
                await a.directory.announce(record, lifetime_s=600)

            network.partition([a.peer_id])
            await announce(1)
            assert await b.directory.lookup() == {}
            network.heal()
            assert set(await b.directory.lookup()) == {a.peer_id}
            await asyncio.sleep(601)
            assert await b.directory.lookup() == {}
            network.crash(a.peer_id)
            with pytest.raises(NetworkError):
                await a.directory.lookup()

    in_virtual_time(scenario())


def test_an_older_record_does_not_replace_a_newer_one():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            a, b = network.join(), network.join()
            old, new = (seal(a.identity, number.to_bytes(8, "big"), domain=RECORD_DOMAIN) for number in (1, 2))
            await a.directory.announce(new, lifetime_s=60)
            network.store(old, lifetime_s=600)  # replayed by a stranger
            assert await b.directory.lookup() == {a.peer_id: new}

    in_virtual_time(scenario())


async def busy_swarm(seed: int, num_peers: int) -> list[tuple[str, float]]:
    """A hundred peers that ask each other things while links and peers fail: what arrived, and when."""
    log: list[tuple[str, float]] = []
    async with SimulatedNetwork(seed, link=Link(latency_s=0.02, jitter_s=0.02, loss=0.02)) as network:
        peers = [network.join() for _ in range(num_peers)]
        for peer in peers:
            await peer.transport.serve(PROTOCOL, echo)
        rng = random.Random(seed)

        async def ask(peer: SimulatedPeer, number: int) -> None:
            target = peers[rng.randrange(num_peers)]
            try:
                stream = await peer.transport.open(target.peer_id, PROTOCOL, timeout_s=5)
                async with asyncio.timeout(5):
                    await round_trip(stream, bytes(2000))
                log.append((f"{peer.peer_id} {number}", now()))
                await stream.close()
            except (NetworkError, TimeoutError) as error:
                log.append((f"{peer.peer_id} {number} {type(error).__name__}", now()))

        async with asyncio.TaskGroup() as tasks:
            for number in range(5):
                for peer in peers:
                    tasks.create_task(ask(peer, number))
                network.crash(peers[number].peer_id)
                network.partition([peer.peer_id for peer in peers[50:60]])
                await asyncio.sleep(0.1)
                network.heal()
    return log


def test_a_hundred_peers_are_cheap_and_the_same_seed_gives_the_same_run():
    logs: list[list[tuple[str, float]]] = []

    async def scenario() -> None:
        logs.append(await busy_swarm(seed=11, num_peers=100))

    started = time.monotonic()
    in_virtual_time(scenario())
    in_virtual_time(scenario())
    assert time.monotonic() - started < 20
    assert len(logs[0]) == 500
    assert logs[0] == logs[1]
