"""How a peer answers on the swarm protocol: beats, votes, probes, goodbyes, status, and owners that register."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from fusion_p2p.errors import NetworkError, StreamClosed, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Stream
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.peer.presence_messages import beat_arrived, from_token
from fusion_p2p.peer.swarm_view import SwarmView
from fusion_p2p.swarm import election, node
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.settings import SwarmSettings
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import (
    SWARM_MESSAGES,
    Beat,
    BeatReply,
    Leave,
    LinksRequest,
    NotCoordinator,
    Probe,
    ProbeReply,
    Register,
    StatusRequest,
    VoteReply,
    VoteRequest,
)

FIRST_MESSAGE_S = 10.0
"""A stream on which nothing is asked for so long is closed."""
NEXT_BEAT_S = 10.0
MAX_CONVERSATIONS = 256
"""Streams kept open for beats: each is an open file. Who is beyond them beats on a stream of its own each time."""

Registrar = Callable[[MessageStream, Register], Awaitable[None]]
"""Serves one owner that registers, until its proposal is delivered or we no longer coordinate."""
Step = Callable[[node.Event], tuple[node.Action, ...]]
"""Feeds the state machine and carries out what it says."""


class SwarmService:
    """Serves streams of the swarm protocol."""

    def __init__(self, view: SwarmView, others: Acquaintances, step: Step, settings: SwarmSettings) -> None:
        self._view = view
        self._others = others
        self._step = step
        self._settings = settings
        self._conversations: set[MessageStream] = set()
        self.registrar: Registrar | None = None
        self.closed = False
        """Set when we leave: who has said goodbye answers no more."""

    async def serve(self, stream: Stream) -> None:
        """One question and its answer, or one beat after the other. WireError when a peer asks what nobody asks."""
        messages = MessageStream(stream, SWARM_MESSAGES)
        asked = await messages.receive(timeout_s=FIRST_MESSAGE_S)
        if self.closed:
            return
        await self._answer(messages, asked)
        if isinstance(asked, Beat) and len(self._conversations) < MAX_CONVERSATIONS:
            self._conversations.add(messages)
            try:
                await self._answer_beats(messages)
            finally:
                self._conversations.discard(messages)

    async def _answer_beats(self, messages: MessageStream) -> None:
        """Until they end: whoever beats once only closes the stream then."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(StreamClosed, TimeoutError):
            async with asyncio.timeout(NEXT_BEAT_S) as deadline:
                while not self.closed:
                    beat = expect(await messages.receive(), Beat)
                    deadline.reschedule(loop.time() + NEXT_BEAT_S)
                    if not self.closed:
                        await messages.send(self._answer_beat(messages.remote, beat))

    async def _answer(self, messages: MessageStream, asked: Message) -> None:
        peer = messages.remote
        match asked:
            case Beat():
                await messages.send(self._answer_beat(peer, asked))
            case VoteRequest():
                await messages.send(self._answer_vote(peer, asked))
            case Probe():
                await messages.send(ProbeReply(heard=await self._reaches(PeerId(asked.peer))))
            case Leave():
                self._step(node.LeaveArrived(peer, asked.incarnation))
            case LinksRequest():
                await messages.send(self._view.links())
            case StatusRequest():
                await messages.send(self._view.snapshot())
            case Register():
                await self._answer_owner(messages, asked)
            case _:
                raise WireError(f"{asked.kind} opens no conversation")

    def not_coordinator(self) -> NotCoordinator:
        """Where an owner should go instead."""
        coordinator = None if self._view.coordinating else self._view.coordinator
        known = None if coordinator is None else self._others.announcement(coordinator.peer)
        return NotCoordinator(coordinator=from_token(coordinator), addresses=known.addresses if known else ())

    def _answer_beat(self, peer: PeerId, beat: Beat) -> BeatReply:
        if beat.record and self._others.learn(beat.record) != peer:
            raise WireError(f"{peer} sent an announcement that is not its own or not for this swarm")
        self._step(beat_arrived(peer, beat))
        self._view.note_beat(peer, beat)
        return self._view.make_reply(peer, beat)

    def _answer_vote(self, peer: PeerId, asked: VoteRequest) -> VoteReply:
        actions = self._step(node.VoteRequestArrived(Token(asked.term, peer)))
        answer = next(action for action in actions if isinstance(action, election.AnswerVote))
        return VoteReply(term=answer.term, granted=answer.granted, reason=answer.reason, coordinator=from_token(answer.alive))

    async def _reaches(self, suspect: PeerId) -> bool:
        """Whether a peer answers us now: what we heard of it may be hearsay from the very peer that suspects it."""
        beat, _ = self._view.make_beat(suspect)
        try:
            await self._others.ask(suspect, beat, timeout_s=self._settings.confirm_s / 2)
        except (NetworkError, WireError):
            return False
        return True

    async def _answer_owner(self, messages: MessageStream, register: Register) -> None:
        if self._view.coordinating and self.registrar is not None:
            await self.registrar(messages, register)
        else:
            await messages.send(self.not_coordinator())
