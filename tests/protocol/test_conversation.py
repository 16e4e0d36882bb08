"""Questions that follow each other on one stream, and the beats of a peer that does so."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from fusion_p2p.errors import DeadlinePassed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Stream
from fusion_p2p.net.conversation import Conversation
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.wire.swarm_messages import SWARM_MESSAGES, SWARM_PROTOCOL, Probe, VoteReply, VoteRequest
from tests.protocol.swarm_world import LoopClock, World, eventually, in_virtual_time


class _Answerer:
    """Answers each request for a vote with its term."""

    def __init__(self) -> None:
        self.streams = 0

    async def serve(self, stream: Stream) -> None:
        self.streams += 1
        messages = MessageStream(stream, SWARM_MESSAGES)
        while True:
            asked = await messages.receive()
            assert isinstance(asked, VoteRequest)
            await messages.send(VoteReply(term=asked.term, granted=False, reason="", coordinator=None))


async def _term(conversation: Conversation, peer: PeerId, term: int, timeout_s: float = 1.0) -> int:
    reply = await conversation.ask(peer, VoteRequest(term=term, incarnation=1), timeout_s=timeout_s)
    assert isinstance(reply, VoteReply)
    return reply.term


def test_questions_share_a_stream_and_survive_its_end() -> None:
    async def ask() -> None:
        async with SimulatedNetwork(1) as network:
            asker, other, answerer = network.join(), network.join(), _Answerer()
            await other.transport.serve(SWARM_PROTOCOL, answerer.serve)
            conversation = Conversation(Acquaintances(asker.transport, None, LoopClock()))
            assert [await _term(conversation, other.peer_id, term) for term in range(5)] == [0, 1, 2, 3, 4]
            assert answerer.streams == 1
            network.reset_streams()
            assert await _term(conversation, other.peer_id, 5) == 5
            assert answerer.streams == 2
            await conversation.end()

    in_virtual_time(ask())


def test_an_answer_that_comes_too_late_is_not_the_next_questions() -> None:
    async def ask() -> None:
        async with SimulatedNetwork(1) as network:
            asker, other, answerer = network.join(), network.join(), _Answerer()
            await other.transport.serve(SWARM_PROTOCOL, answerer.serve)
            others = Acquaintances(asker.transport, None, LoopClock())
            conversation = Conversation(others)
            await _term(conversation, other.peer_id, 1)
            network.freeze(other.peer_id)
            with pytest.raises(DeadlinePassed):
                await _term(conversation, other.peer_id, 2)
            assert others.failed_since(0.0) == {other.peer_id}
            network.thaw(other.peer_id)
            assert await _term(conversation, other.peer_id, 3) == 3
            await conversation.end()

    in_virtual_time(ask())


def test_who_follows_beats_on_one_stream() -> None:
    async def live() -> None:
        async with World(seed=3) as world:
            for _ in range(4):
                world.add()
            await eventually(world.known_to_all, 30.0)
            await asyncio.sleep(20.0)
            follower = next(one for one in world.presences.values() if not one.coordinating)
            leader, transport = world.leader.me, world.nodes[follower.me].transport
            opened, really_open = Counter[PeerId](), transport.open

            async def counted(peer: PeerId, protocol: str, *, timeout_s: float = 10.0) -> Stream:
                opened[peer] += 1
                return await really_open(peer, protocol, timeout_s=timeout_s)

            transport.open = counted  # type: ignore[assignment,method-assign]
            await asyncio.sleep(60.0)
            assert opened.total() > 0  # to peers chosen at random
            assert opened[leader] == 0
            assert leader in {one.peer for one in follower.members()}

    in_virtual_time(live())


def test_nothing_but_beats_follows_a_beat() -> None:
    async def ask() -> None:
        async with World(seed=3) as world:
            first, second = world.add(), world.add()
            await eventually(world.complete, 30.0)
            beat, _ = first._view.make_beat(second.me)
            conversation = Conversation(first.others)
            await conversation.ask(second.me, beat, timeout_s=1.0)
            messages = conversation._messages
            assert messages is not None
            reply = await conversation.ask(second.me, Probe(peer=first.me), timeout_s=5.0)
            assert conversation._messages is not messages, "it was refused there and asked again on a stream of its own"
            assert reply.kind == "probe_reply"
            await conversation.end()

    in_virtual_time(ask())
