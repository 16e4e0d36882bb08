"""Probes on the simulated network, in virtual time: right figures, bounded bytes and seconds, one at a time."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.errors import DeadlinePassed, NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.net.probing import (
    PER_MINUTE,
    PER_REMOTE,
    SESSION_S,
    STRANGER_S,
    STRANGERS_PER_MINUTE,
    Busy,
    Measured,
    Open,
    Prober,
)
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.probe_messages import (
    MAX_DIRECTION_BYTES,
    MAX_ROUND_BYTES,
    PING_BYTES,
    PROBE_MESSAGES,
    PROBE_PROTOCOL,
    BeginProbe,
    Bulk,
    EndProbe,
    Ping,
    Pong,
    ProbeBusy,
    ProbeReady,
    Pull,
    Received,
)
from tests.protocol.swarm_world import LoopClock, in_virtual_time

MBIT = 1e6 / 8


def opener(peer: SimulatedPeer) -> Open:
    async def open_stream(to: PeerId, protocol: str, timeout_s: float) -> Stream:
        return await peer.transport.open(to, protocol, timeout_s=timeout_s)

    return open_stream


async def pair(network: SimulatedNetwork, there: Link, back: Link) -> tuple[SimulatedPeer, SimulatedPeer]:
    asker, host = network.join(), network.join()
    network.wire(asker.peer_id, host.peer_id).link = there
    network.wire(host.peer_id, asker.peer_id).link = back
    return asker, host


async def served(host: SimulatedPeer, learnt: dict[PeerId, Measured] | None = None) -> Prober:
    prober = Prober(LoopClock(), (learnt if learnt is not None else {}).__setitem__)
    await prober.serve(host.transport)
    return prober


@pytest.mark.row(40)
@pytest.mark.parametrize(
    ("up_mbit", "down_mbit", "latency_s"),
    [(8, 50, 0.03), (1000, 1000, 0.0002), (20, 100, 0.12), (0.5, 4, 0.04), (100, 100, 0.005)],
)
def test_both_sides_learn_the_links_as_they_are_within_seconds(up_mbit: float, down_mbit: float, latency_s: float) -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            there = Link(latency_s=latency_s, bytes_per_s=up_mbit * MBIT, buffer_bytes=1 << 20)
            back = Link(latency_s=latency_s, bytes_per_s=down_mbit * MBIT, buffer_bytes=2 << 20)
            asker, host = await pair(network, there, back)
            learnt: dict[PeerId, Measured] = {}
            await served(host, learnt)
            clock = LoopClock()
            began = clock.now()
            found = await Prober(clock).probe(opener(asker), host.peer_id)
            assert isinstance(found, Measured)
            assert clock.now() - began < 2.2 + 60 * latency_s
            assert found.out_bytes_per_s == pytest.approx(up_mbit * MBIT, rel=0.1)
            assert found.in_bytes_per_s == pytest.approx(down_mbit * MBIT, rel=0.1)
            assert found.latency_s == pytest.approx(latency_s, rel=0.1, abs=2e-4)
            assert learnt == {asker.peer_id: Measured(found.latency_s, found.in_bytes_per_s, found.out_bytes_per_s)}

    in_virtual_time(scenario())


def test_a_smaller_budget_is_kept() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            link = Link(latency_s=0.01, bytes_per_s=8 * MBIT)
            asker, host = await pair(network, link, link)
            await served(host)
            clock = LoopClock()
            began = clock.now()
            found = await Prober(clock).probe(opener(asker), host.peer_id, budget_s=0.1)
            assert isinstance(found, Measured)
            assert clock.now() - began < 0.6
            assert found.out_bytes_per_s == pytest.approx(8 * MBIT, rel=0.2)

    in_virtual_time(scenario())


def test_a_peer_is_probed_by_one_at_a_time_and_probes_nobody_meanwhile() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            host, *askers = (network.join() for _ in range(3))
            prober = await served(host)
            first = asyncio.ensure_future(Prober(LoopClock()).probe(opener(askers[0]), host.peer_id))
            await asyncio.sleep(0.05)
            refused = await Prober(LoopClock()).probe(opener(askers[1]), host.peer_id)
            assert isinstance(refused, Busy)
            assert 0 < refused.retry_s <= 1
            assert isinstance(await prober.probe(opener(host), askers[1].peer_id), Busy)
            assert isinstance(await first, Measured)
            assert isinstance(await Prober(LoopClock()).probe(opener(askers[1]), host.peer_id), Measured)

    in_virtual_time(scenario())


def test_a_peer_that_is_occupied_says_for_how_long() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            asker, host = network.join(), network.join()
            await Prober(LoopClock(), occupied=lambda: 17.0).serve(host.transport)
            assert await Prober(LoopClock()).probe(opener(asker), host.peer_id) == Busy(17.0)

    in_virtual_time(scenario())


@pytest.mark.row(40)
def test_a_host_that_falls_silent_ends_the_probe_in_time() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            link = Link(latency_s=0.01, bytes_per_s=1 * MBIT)
            asker, host = await pair(network, link, link)
            await served(host)
            prober, clock = Prober(LoopClock()), LoopClock()
            probing = asyncio.ensure_future(prober.probe(opener(asker), host.peer_id))
            await asyncio.sleep(0.3)
            network.freeze(host.peer_id)
            with pytest.raises(DeadlinePassed, match="longer than 10 s"):
                await probing
            assert clock.now() < SESSION_S + 1
            assert not isinstance(await prober.probe(opener(asker), (await reachable(network)).peer_id), Busy), "free again"

    in_virtual_time(scenario())


async def reachable(network: SimulatedNetwork) -> SimulatedPeer:
    peer = network.join()
    await served(peer)
    return peer


def test_a_silent_asker_does_not_keep_the_host_busy() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            asker, other, host = network.join(), network.join(), network.join()
            await served(host)
            silent = MessageStream(await asker.transport.open(host.peer_id, PROBE_PROTOCOL), PROBE_MESSAGES)
            await silent.send(BeginProbe())
            expect(await silent.receive(), ProbeReady)
            assert isinstance(await Prober(LoopClock()).probe(opener(other), host.peer_id), Busy)
            await asyncio.sleep(SESSION_S)
            assert isinstance(await Prober(LoopClock()).probe(opener(other), host.peer_id), Measured)

    in_virtual_time(scenario())


@pytest.mark.row(40)
def test_nobody_is_probed_more_than_a_few_times_a_minute() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            host = network.join()
            await served(host)
            stubborn = network.join()
            answers = [await Prober(LoopClock()).probe(opener(stubborn), host.peer_id) for _ in range(PER_REMOTE + 1)]
            assert [type(answer) for answer in answers] == [Measured] * PER_REMOTE + [Busy]
            assert isinstance(answers[-1], Busy)
            assert 50 < answers[-1].retry_s <= 60
            crowd = [network.join() for _ in range(PER_MINUTE)]
            answers = [await Prober(LoopClock()).probe(opener(one), host.peer_id) for one in crowd]
            assert sum(isinstance(answer, Measured) for answer in answers) == PER_MINUTE - PER_REMOTE
            await asyncio.sleep(60)
            assert isinstance(await Prober(LoopClock()).probe(opener(stubborn), host.peer_id), Measured)

    in_virtual_time(scenario())


@pytest.mark.row(40)
def test_strangers_leave_room_for_members_and_are_not_listened_to() -> None:
    """Ids are free: as many as somebody likes use up no more than the part of strangers."""

    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            host, members = network.join(), [network.join() for _ in range(PER_MINUTE - STRANGERS_PER_MINUTE)]
            known, learnt = {member.peer_id for member in members}, dict[PeerId, Measured]()
            await Prober(LoopClock(), learnt.__setitem__, is_member=known.__contains__).serve(host.transport)
            strangers = [network.join() for _ in range(PER_MINUTE)]
            answers = [await Prober(LoopClock()).probe(opener(one), host.peer_id) for one in strangers]
            assert [type(answer) for answer in answers] == [Measured] * STRANGERS_PER_MINUTE + [Busy] * len(known)
            answers = [await Prober(LoopClock()).probe(opener(one), host.peer_id) for one in members]
            assert {type(answer) for answer in answers} == {Measured}
            await asyncio.sleep(0.1)
            assert set(learnt) == known

    in_virtual_time(scenario())


@pytest.mark.row(40)
def test_a_slow_stranger_keeps_members_waiting_only_for_a_short_while() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            stranger, member, host = network.join(), network.join(), network.join()
            await Prober(LoopClock(), is_member=member.peer_id.__eq__).serve(host.transport)
            slow = MessageStream(await stranger.transport.open(host.peer_id, PROBE_PROTOCOL), PROBE_MESSAGES)
            await slow.send(BeginProbe())
            expect(await slow.receive(), ProbeReady)
            await asyncio.sleep(STRANGER_S - 0.1)
            assert isinstance(await Prober(LoopClock()).probe(opener(member), host.peer_id), Busy)
            await asyncio.sleep(0.2)
            assert isinstance(await Prober(LoopClock()).probe(opener(member), host.peer_id), Measured)

    in_virtual_time(scenario())


@pytest.mark.parametrize("question", [Bulk(num_bytes=MAX_ROUND_BYTES), Pull(num_bytes=MAX_ROUND_BYTES)])
def test_an_asker_that_wants_more_than_a_probe_is_cut_off(question: Message) -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            asker, host = network.join(), network.join()
            await served(host)
            stream = await asker.transport.open(host.peer_id, PROBE_PROTOCOL)
            messages = MessageStream(stream, PROBE_MESSAGES)
            await messages.send(BeginProbe())
            expect(await messages.receive(), ProbeReady)
            for _ in range(MAX_DIRECTION_BYTES // MAX_ROUND_BYTES):
                await insist(stream, messages, question)
            with pytest.raises(NetworkError):
                await insist(stream, messages, question)

    in_virtual_time(scenario())


async def insist(stream: Stream, messages: MessageStream, question: Message) -> None:
    await messages.send(question)
    if isinstance(question, Bulk):
        await stream.write(bytes(question.num_bytes))
        expect(await messages.receive(), Received)
    else:
        expect(await messages.receive(), Bulk)
        await stream.read_exactly(MAX_ROUND_BYTES)


def test_a_host_that_sends_another_number_of_bytes_is_refused() -> None:
    async def lie(stream: Stream) -> None:
        messages = MessageStream(stream, PROBE_MESSAGES)
        expect(await messages.receive(), BeginProbe)
        await messages.send(ProbeBusy(retry_s=3.0) if stream.remote == honest else Received(seconds=1.0))

    async def scenario() -> None:
        nonlocal honest
        async with SimulatedNetwork(1) as network:
            asker, host = network.join(), network.join()
            await host.transport.serve(PROBE_PROTOCOL, lie)
            with pytest.raises(WireError, match="probe_ready"):
                await Prober(LoopClock()).probe(opener(asker), host.peer_id)
            honest = asker.peer_id
            assert await Prober(LoopClock()).probe(opener(asker), host.peer_id) == Busy(3.0)

    honest = PeerId("")
    in_virtual_time(scenario())


def test_a_host_that_claims_to_have_received_in_no_time_is_not_believed() -> None:
    async def boast(stream: Stream) -> None:
        messages = MessageStream(stream, PROBE_MESSAGES)
        while not isinstance(said := await messages.receive(), EndProbe):
            match said:
                case BeginProbe():
                    await messages.send(ProbeReady())
                case Ping():
                    await messages.send(Pong(data=said.data))
                case Bulk():
                    await stream.read_exactly(said.num_bytes)
                    await messages.send(Received(seconds=0.0))
                case Pull():
                    await messages.send(Bulk(num_bytes=said.num_bytes))
                    await stream.write(bytes(said.num_bytes))

    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            link = Link(latency_s=0.03, bytes_per_s=8 * MBIT)
            asker, host = await pair(network, link, link)
            await host.transport.serve(PROBE_PROTOCOL, boast)
            found = await Prober(LoopClock()).probe(opener(asker), host.peer_id)
            assert isinstance(found, Measured)
            assert found.out_bytes_per_s <= 2.1 * link.bytes_per_s
            assert found.in_bytes_per_s == pytest.approx(link.bytes_per_s, rel=0.1)

    in_virtual_time(scenario())


def test_a_host_that_answers_pings_before_they_come_is_refused() -> None:
    async def hurry(stream: Stream) -> None:
        messages = MessageStream(stream, PROBE_MESSAGES)
        await messages.receive()
        await messages.send(ProbeReady())
        for number in range(30):
            await messages.send(Pong(data=number.to_bytes(PING_BYTES, "big")))

    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            asker, host = network.join(), network.join()
            await host.transport.serve(PROBE_PROTOCOL, hurry)
            with pytest.raises(WireError, match="another ping"):
                await Prober(LoopClock()).probe(opener(asker), host.peer_id)

    in_virtual_time(scenario())


@pytest.mark.parametrize("bursts", [0, 3])
def test_an_asker_cannot_claim_to_send_faster_than_it_came(bursts: int) -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            link, learnt = Link(latency_s=0.03, bytes_per_s=8 * MBIT), dict[PeerId, Measured]()
            asker, host = await pair(network, link, link)
            await served(host, learnt)
            stream = await asker.transport.open(host.peer_id, PROBE_PROTOCOL)
            messages = MessageStream(stream, PROBE_MESSAGES)
            await messages.send(BeginProbe())
            expect(await messages.receive(), ProbeReady)
            for _ in range(bursts):
                await insist(stream, messages, Bulk(num_bytes=MAX_ROUND_BYTES))
            await messages.send(EndProbe(latency_s=0.0, out_bytes_per_s=1e12, in_bytes_per_s=1e12))
            await asyncio.sleep(1.0)
            seen = learnt[asker.peer_id].in_bytes_per_s
            assert seen == pytest.approx(link.bytes_per_s if bursts else 0.0, rel=0.1)

    in_virtual_time(scenario())


@pytest.mark.row(21)
def test_a_probe_keeps_the_caps_and_finds_no_more_than_they_allow() -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(1, Link(latency_s=0.01, bytes_per_s=1e8)) as network:
            host, asker = network.join(), network.join()
            host.transport.bandwidth.up.set_rate(2e6)
            host.transport.bandwidth.down.set_rate(4e6)
            await Prober(LoopClock(), bandwidth=host.transport.bandwidth).serve(host.transport)
            found = await Prober(LoopClock()).probe(opener(asker), host.peer_id)
            assert isinstance(found, Measured)
            assert found.in_bytes_per_s == pytest.approx(2e6, rel=0.15)
            assert found.out_bytes_per_s == pytest.approx(4e6, rel=0.15)

    in_virtual_time(scenario())
