"""Strangers that break the swarm protocol lose their stream; the peer and its swarm go on."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.errors import NetworkError
from fusion_p2p.net.base import Stream
from fusion_p2p.net.identity import seal
from fusion_p2p.net.memory import SimulatedPeer
from fusion_p2p.net.messaging import MessageStream, request
from fusion_p2p.net.records import RECORD_DOMAIN
from fusion_p2p.swarm.announcement import announce, encode_announcement
from fusion_p2p.swarm.election import MAX_LEAP, MAX_TERM
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import (
    MAX_RECORD_BYTES,
    SWARM_MESSAGES,
    SWARM_PROTOCOL,
    Beat,
    BeatReply,
    Coordinator,
    Leave,
    ProbeReply,
    StatusReply,
    StatusRequest,
    VoteReply,
    VoteRequest,
    Waiting,
)
from tests.protocol.swarm_world import PROFILE, World, always, eventually, in_virtual_time


def beat(record: bytes = b"", incarnation: int = 1, coordinator: Coordinator | None = None) -> Beat:
    return Beat(
        incarnation=incarnation, sequence=1, coordinator=coordinator, state="standby", holding=None, progress=0, record=record
    )


def announced_by(node: SimulatedPeer, **changes: object) -> bytes:
    profile = PROFILE.model_copy(update=changes)
    payload = encode_announcement(announce(profile, node.transport.addresses, "standby", 1, 1.7e9), 1)
    return seal(node.identity, payload, domain=RECORD_DOMAIN)


async def ask(stranger: SimulatedPeer, world: World, message: Message) -> Message:
    (target,) = world.presences
    return await request(stranger.transport, target, SWARM_PROTOCOL, SWARM_MESSAGES, message, timeout_s=5.0)


async def open_raw(stranger: SimulatedPeer, world: World) -> Stream:
    (target,) = world.presences
    return await stranger.transport.open(target, SWARM_PROTOCOL)


def test_what_breaks_the_protocol_ends_its_stream_only() -> None:
    async def scenario() -> None:
        async with World(1) as world:
            world.add()
            await eventually(world.complete, within_s=10.0)
            stranger, another = world.network.join(), world.network.join()
            wrong = [
                ProbeReply(heard=True),
                Waiting(reason="no"),
                beat(record=announced_by(another)),
                beat(record=announced_by(stranger, network="elsewhere")),
                beat(record=b"\x00" * MAX_RECORD_BYTES),
            ]
            for message in wrong:
                with pytest.raises(NetworkError):
                    await ask(stranger, world, message)
            for data in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x05\x81\xa4kind", bytes(64)):
                stream = await open_raw(stranger, world)
                await stream.write(data)
                with pytest.raises(NetworkError):
                    await MessageStream(stream, SWARM_MESSAGES).receive(timeout_s=15.0)
            assert isinstance(await ask(stranger, world, StatusRequest()), StatusReply)
            assert world.complete()

    in_virtual_time(scenario())


def test_who_says_nothing_is_not_waited_for() -> None:
    async def scenario() -> None:
        async with World(2) as world:
            world.add()
            await eventually(world.complete, within_s=10.0)
            stranger = world.network.join()
            stream = await open_raw(stranger, world)
            await stream.write(b"\x00\x00")
            began = asyncio.get_running_loop().time()
            with pytest.raises(NetworkError):
                await stream.read_exactly(1)
            assert asyncio.get_running_loop().time() - began < 12.0

    in_virtual_time(scenario())


@pytest.mark.row(39)
def test_nobody_can_say_goodbye_or_vote_for_another() -> None:
    async def scenario() -> None:
        async with World(3) as world:
            world.add()
            await eventually(world.complete, within_s=10.0)
            stranger, another = world.network.join(), world.network.join()
            answer = await ask(another, world, beat(record=announced_by(another), incarnation=5))
            assert isinstance(answer, BeatReply)
            with pytest.raises(NetworkError):
                await ask(stranger, world, Leave(incarnation=5))
            assert another.peer_id in {peer.peer for peer in world.leader.members()}
            vote = await ask(stranger, world, VoteRequest(term=99, incarnation=1))
            assert isinstance(vote, VoteReply)
            assert not vote.granted
            assert vote.coordinator is not None
            assert vote.coordinator.peer == world.leader.me

    in_virtual_time(scenario())


@pytest.mark.parametrize("term", [1000, MAX_TERM - 1, (1 << 53) - 1])
def test_a_stranger_that_claims_to_coordinate_delays_but_does_not_stop_a_swarm(term: int) -> None:
    async def scenario() -> None:
        async with World(4) as world:
            honest = world.add()
            await eventually(world.complete, within_s=10.0)
            stranger = world.network.join()
            claim = Coordinator(term=term, peer=stranger.peer_id)
            await ask(stranger, world, beat(record=announced_by(stranger), coordinator=claim))
            assert honest.coordinating == (term > MAX_LEAP), "a term that leaps is not believed"
            world.network.crash(stranger.peer_id)
            world.add()
            await eventually(world.complete, within_s=30.0)
            await always(world.agreed, for_s=30.0)

    in_virtual_time(scenario())


def test_a_newcomer_that_is_told_an_absurd_term_first_finds_its_swarm_nevertheless() -> None:
    async def scenario() -> None:
        async with World(5) as world:
            stranger = world.network.join()
            newcomer = world.add()
            await asyncio.sleep(0.5)
            claim = Coordinator(term=(1 << 53) - 1, peer=stranger.peer_id)
            await ask(stranger, world, beat(record=announced_by(stranger), coordinator=claim))
            assert newcomer.coordinator == (claim.term, stranger.peer_id)
            for _ in range(2):
                world.add()
            await eventually(world.complete, within_s=60.0)
            await always(world.agreed, for_s=60.0)

    in_virtual_time(scenario())
