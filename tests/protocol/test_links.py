"""Peers measure their links beside everything else; the coordinator plans for the network they found, the owner included."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools

import numpy as np
import pytest

from fusion_p2p.errors import StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.owner.swarm_survey import survey, survey_of
from fusion_p2p.peer import planning
from fusion_p2p.peer.link_tables import gather_links
from fusion_p2p.peer.link_watch import IDLE_AFTER_S
from fusion_p2p.peer.owner_talk import OWNER_LINKS_S, OwnerTalk
from fusion_p2p.plan.measured import LinkFigures, network_of
from fusion_p2p.plan.network import Network
from fusion_p2p.swarm.links import TARGETS, merged
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import (
    SWARM_MESSAGES,
    SWARM_PROTOCOL,
    Holding,
    Leave,
    LinkEntry,
    Links,
    MeasureLinks,
    Proposal,
    Waiting,
)
from tests.protocol.swarm_world import LoopClock, World, eventually, in_virtual_time
from tests.protocol.test_enlistment import JOB, OTHER_JOB, Owner, finished, start
from tests.protocol.test_probing import opener

MBIT = 1e6 / 8
LAN = Link(latency_s=0.0002, bytes_per_s=940 * MBIT)


def shape(world: World, up_mbit: dict[PeerId, float], latency_s: float = 0.02) -> None:
    """Every pair as fast as the slower one's line."""
    for a, b in itertools.permutations(up_mbit, 2):
        world.network.wire(a, b).link = Link(latency_s=latency_s, bytes_per_s=min(up_mbit[a], 100) * MBIT)


async def tables(world: World) -> dict[PeerId, Links]:
    leader = world.leader
    return {leader.me: leader.links(), **await gather_links(leader.others, set(world.presences) - {leader.me})}


async def measured(world: World, within_s: float) -> dict[PeerId, Links]:
    """The tables when nobody measures any more."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while True:
        told = await tables(world)
        if len(told) == len(world.presences) and not any(table.measuring for table in told.values()):
            return told
        assert loop.time() - began < within_s
        await asyncio.sleep(1.0)


def all_links(told: dict[PeerId, Links]) -> dict[tuple[PeerId, PeerId], LinkFigures]:
    return merged({peer: table.entries for peer, table in told.items()})


@pytest.mark.row(40)
def test_a_small_swarm_knows_all_its_links_within_seconds() -> None:
    async def scenario() -> None:
        async with World(1, measuring=True) as world:
            peers = [world.add().me for _ in range(6)]
            shape(world, dict(zip(peers, (8, 16, 100, 20, 50, 30), strict=True)))
            await eventually(world.complete, within_s=10.0)
            links = all_links(await measured(world, within_s=25.0))
            assert set(links) == set(itertools.permutations(peers, 2))
            for (a, b), figures in links.items():
                real = world.network.wire(a, b).link
                assert figures.bytes_per_s == pytest.approx(real.bytes_per_s, rel=0.2)
                assert figures.latency_s == pytest.approx(real.latency_s, rel=0.2)

    in_virtual_time(scenario())


def test_measuring_delays_neither_joining_nor_beats() -> None:
    async def scenario() -> None:
        async with World(2, measuring=True) as world:
            peers = [world.add().me for _ in range(5)]
            shape(world, dict.fromkeys(peers, 2.0))
            await eventually(world.complete, within_s=8.0)
            await measured(world, within_s=30.0)
            assert world.complete()

    in_virtual_time(scenario())


def test_in_a_large_swarm_a_peer_measures_a_few_links_and_a_newcomer_too() -> None:
    async def scenario() -> None:
        async with World(3, measuring=True) as world:
            for _ in range(11):
                world.add()
            await eventually(world.complete, within_s=20.0)
            told = await measured(world, within_s=90.0)
            counts = [len(table.entries) for table in told.values()]
            assert min(counts) >= TARGETS
            assert np.mean(counts) < 10, "not everybody"
            newcomer = world.add().me
            await eventually(world.complete, within_s=20.0)
            told = await measured(world, within_s=30.0)
            assert len(told[newcomer].entries) >= TARGETS

    in_virtual_time(scenario())


def test_the_plan_is_made_for_the_links_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    networks: list[Network] = []

    def spy(*arguments: object) -> Network:
        networks.append(network_of(*arguments))  # type: ignore[arg-type]
        return networks[-1]

    monkeypatch.setattr(planning, "network_of", spy)

    async def scenario() -> None:
        async with World(4, measuring=True) as world:
            peers = [world.add().me for _ in range(4)]
            shape(world, dict(zip(peers, (8, 16, 30, 50), strict=True)))
            for a, b in itertools.permutations(peers[2:], 2):
                world.network.wire(a, b).link = LAN
            owner = Owner(world, peers=4)
            for peer in peers:
                world.network.wire(owner.node.peer_id, peer).link = Link(latency_s=0.015, bytes_per_s=5 * MBIT)
                world.network.wire(peer, owner.node.peer_id).link = Link(latency_s=0.015, bytes_per_s=40 * MBIT)
            enlisted = await finished(start(owner.enlist()), 25.0)
            assert owner.heard("measuring links")
            assert set(enlisted.plan.peers) <= set(peers)
            (network,) = networks
            nodes = [*network.peers, owner.node.peer_id]
            for (i, a), (j, b) in itertools.permutations(enumerate(nodes), 2):
                real = world.network.wire(a, b).link
                assert 1 / network.beta_s[i, j] == pytest.approx(real.bytes_per_s, rel=0.2), (i, j)
                assert network.alpha_s[i, j] == pytest.approx(real.latency_s, rel=0.2, abs=2e-4), (i, j)
            near = network.sites[[network.peers.index(peer) for peer in peers]]
            assert near[2] == near[3]
            assert len(set(near)) == 3

    in_virtual_time(scenario())


def test_who_works_is_neither_probed_nor_waited_for_and_plans_are_made_without() -> None:
    async def scenario() -> None:
        async with World(5, measuring=True) as world:
            for _ in range(3):
                world.add()
            for work in world.work.values():
                work.held = Holding(job=JOB, slices=(0,))

            async def compute() -> None:
                while True:
                    for work in world.work.values():
                        work.done += 1
                    await asyncio.sleep(0.5)

            computing = asyncio.ensure_future(compute())
            await eventually(world.complete, within_s=10.0)
            await asyncio.sleep(10.0)
            told = await tables(world)
            assert all(table.entries == () and not table.measuring for table in told.values())
            owner = Owner(world, peers=3)
            await finished(start(owner.enlist()), 10.0)
            computing.cancel()
            await asyncio.sleep(IDLE_AFTER_S + 2.0)
            links = all_links(await measured(world, within_s=60.0))
            assert len(links) == 6, "once idle they measure"

    in_virtual_time(scenario())


def test_what_a_peer_found_is_announced_and_replaces_a_table_that_cannot_be_had() -> None:
    async def scenario() -> None:
        async with World(6, measuring=True) as world:
            peers = [world.add().me for _ in range(3)]
            shape(world, dict(zip(peers, (8, 16, 30), strict=True)))
            await eventually(world.complete, within_s=10.0)
            await measured(world, within_s=20.0)
            await asyncio.sleep(5.0)
            for present in world.leader.members():
                assert present.announcement is not None
                line = present.announcement.line
                mine = {other: world.network.wire(present.peer, other).link for other in peers if other != present.peer}
                assert line.up_bytes_per_s == pytest.approx(max(link.bytes_per_s for link in mine.values()), rel=0.2)
                assert {link.peer for link in line.links} == set(mine)

    in_virtual_time(scenario())


def test_a_dry_run_surveys_the_peers_that_are_free() -> None:
    async def scenario() -> None:
        async with World(8, measuring=True) as world:
            peers = [world.add().me for _ in range(4)]
            shape(world, dict(zip(peers, (8, 16, 30, 50), strict=True)))
            await eventually(world.complete, within_s=10.0)
            await measured(world, within_s=20.0)
            world.work[peers[1]].held = Holding(job=OTHER_JOB, slices=(0,))
            await asyncio.sleep(3.0)
            guest, said = world.network.join(), list[str]()
            for peer in peers:
                world.network.wire(guest.peer_id, peer).link = Link(latency_s=0.01, bytes_per_s=6 * MBIT)
                world.network.wire(peer, guest.peer_id).link = Link(latency_s=0.01, bytes_per_s=60 * MBIT)
            network = await survey(guest.transport, guest.directory, LoopClock(), timeout_s=5.0, report=said.append)
            assert set(network.peers) == set(peers) - {peers[1]}
            assert said == ["measuring links to 3 peers"]
            nodes = [*network.peers, guest.peer_id]
            for i, j in itertools.permutations(range(4), 2):
                real = world.network.wire(nodes[i], nodes[j]).link.bytes_per_s
                assert 1 / network.beta_s[i, j] == pytest.approx(real, rel=0.2), (i, j)

    in_virtual_time(scenario())


def test_the_owner_of_a_run_learns_what_the_links_of_its_peers_are_like_now() -> None:
    async def scenario() -> None:
        async with World(8, measuring=True) as world:
            peers = [world.add().me for _ in range(3)]
            shape(world, dict(zip(peers, (8, 16, 30), strict=True)))
            await eventually(world.complete, within_s=10.0)
            await measured(world, within_s=20.0)
            for peer in peers:
                world.work[peer].held = Holding(job=OTHER_JOB, slices=(0,))
            guest = world.network.join()
            look = functools.partial(survey_of, guest.transport, guest.directory, OwnLinks(guest.peer_id, LoopClock()))
            network = await look(frozenset(peers[:2]))
            assert network is not None
            assert set(network.peers) == set(peers[:2])
            for i, j in ((0, 1), (1, 0)):
                real = world.network.wire(network.peers[i], network.peers[j]).link.bytes_per_s
                assert 1 / network.beta_s[i, j] == pytest.approx(real, rel=0.2)
            assert await look(frozenset({*peers, PeerId("nobody")})) is None

    in_virtual_time(scenario())


def test_who_is_no_member_gets_no_place_in_a_table() -> None:
    async def scenario() -> None:
        async with World(10, measuring=True) as world:
            peers = [world.add().me for _ in range(2)]
            await eventually(world.complete, within_s=10.0)
            await measured(world, within_s=20.0)
            guest = world.network.join()
            found = await OwnLinks(guest.peer_id, LoopClock()).measure(opener(guest), peers)
            assert {entry.peer for entry in found.entries} == set(peers)
            await asyncio.sleep(1.0)
            for peer, table in (await tables(world)).items():
                assert {entry.peer for entry in table.entries} == set(peers) - {peer}

    in_virtual_time(scenario())


@pytest.mark.parametrize("answer", [None, Leave(incarnation=1)])
def test_an_owner_that_does_not_measure_is_not_waited_for_long(answer: Message | None) -> None:
    async def scenario() -> None:
        async with World(9, measuring=True) as world:
            for _ in range(3):
                world.add()
            await eventually(world.complete, within_s=10.0)
            await measured(world, within_s=20.0)
            owner = Owner(world, peers=3)
            await owner.blobs.start()
            stream = await owner.node.transport.open(world.leader.me, SWARM_PROTOCOL)
            messages = MessageStream(stream, SWARM_MESSAGES)
            await messages.send(owner.register)
            async with asyncio.timeout(10.0):
                while not isinstance(said := await messages.receive(), MeasureLinks):
                    assert isinstance(said, Waiting)
                assert set(said.peers) == set(world.presences)
                if answer is not None:
                    await messages.send(answer)
                    await until_closed(messages)
                else:
                    while not isinstance(said, Proposal):
                        said = await messages.receive()

    in_virtual_time(scenario())


def test_a_late_answer_of_the_owner_is_none_to_the_next_question() -> None:
    """The links to other peers, measured when they were asked for: no plan may take them for those to these."""

    async def scenario() -> None:
        async with SimulatedNetwork(1) as network:
            owner, coordinator = network.join(), network.join()
            asked: list[MeasureLinks] = []

            async def answer_late(stream: Stream) -> None:
                messages = MessageStream(stream, SWARM_MESSAGES)
                for late_s in (OWNER_LINKS_S + 1.0, 0.5):
                    asked.append(expect(await messages.receive(), MeasureLinks))
                    await asyncio.sleep(late_s)
                    told = tuple(entry_of(peer) for peer in asked[-1].peers)
                    await messages.send(Links(entries=told, measuring=False, request=asked[-1].request))
                with contextlib.suppress(StreamClosed):
                    await messages.receive()

            await owner.transport.serve(SWARM_PROTOCOL, answer_late)
            stream = await coordinator.transport.open(owner.peer_id, SWARM_PROTOCOL)
            talk = OwnerTalk(MessageStream(stream, SWARM_MESSAGES), LoopClock(), 5.0)
            began = LoopClock().now()
            assert await talk.links_to([PeerId("a")]) == ()
            assert LoopClock().now() - began < OWNER_LINKS_S + 0.5
            assert await talk.links_to([PeerId("b")]) == (entry_of("b"),)
            await stream.close()

    in_virtual_time(scenario())


def entry_of(peer: str) -> LinkEntry:
    return LinkEntry(peer=peer, latency_s=0.01, out_bytes_per_s=1e6, in_bytes_per_s=1e6, age_s=0.0, in_age_s=0.0)


async def until_closed(messages: MessageStream) -> None:
    """Who speaks out of turn is let go, and the coordinator goes on."""
    with contextlib.suppress(StreamClosed):
        while isinstance(await messages.receive(), Waiting):
            pass
        pytest.fail("it got something else")


def test_a_job_of_peers_that_work_for_another_waits_as_before() -> None:
    async def scenario() -> None:
        async with World(7, measuring=True) as world:
            for _ in range(2):
                world.add()
            await eventually(world.complete, within_s=10.0)
            for work in world.work.values():
                work.held = Holding(job=OTHER_JOB, slices=(0,))
            await asyncio.sleep(2.0)
            owner = Owner(world, peers=2)
            enlisting = start(owner.enlist())
            await eventually(lambda: owner.heard("0 peers free"), within_s=10.0)
            for work in world.work.values():
                work.held = None
            assert (await finished(enlisting, 20.0)).plan.peers

    in_virtual_time(scenario())
