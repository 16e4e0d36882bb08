"""What a peer asks others on the swarm protocol, and what their answers mean for its state machine.

Every question has a deadline; that a peer does not answer is an event like others.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.conversation import Conversation
from fusion_p2p.peer.presence_messages import reply_arrived, to_token
from fusion_p2p.peer.swarm_service import Step
from fusion_p2p.peer.swarm_view import SwarmView
from fusion_p2p.swarm import node
from fusion_p2p.swarm.settings import SwarmSettings
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import BeatReply, Probe, ProbeReply, VoteReply, VoteRequest

logger = logging.getLogger(__name__)


class SwarmQuestions:
    """Beats, requests for votes, and probes of suspects."""

    def __init__(self, view: SwarmView, others: Acquaintances, step: Step, settings: SwarmSettings) -> None:
        self._view = view
        self._others = others
        self._step = step
        self._settings = settings
        self._conversation = Conversation(others)

    async def beat_regularly(self, peer: PeerId) -> BeatReply | None:
        """What it answered. The stream stays open for the next beat; not for several tasks at once."""
        return await self._beat(peer, self._conversation)

    async def stop_beating(self) -> None:
        """Close that stream."""
        await self._conversation.end()

    async def beat(self, peer: PeerId) -> bool:
        """Whether it answered."""
        return await self._beat(peer, self._others) is not None

    async def _beat(self, peer: PeerId, way: Acquaintances | Conversation) -> BeatReply | None:
        (beat, number), asked_at = self._view.make_beat(peer), self._view.now()
        reply = await _ask(way, peer, beat, self._settings.suspect_after_s)
        if not isinstance(reply, BeatReply):
            return None
        self._view.acknowledge(peer, number)
        self._view.note_standing(peer, reply.standing)
        self._step(reply_arrived(peer, reply, asked_at))
        return reply

    async def ask_vote(self, voter: PeerId, term: int) -> None:
        question = VoteRequest(term=term, incarnation=self._view.node.incarnation)
        reply = await _ask(self._others, voter, question, self._settings.vote_s)
        if isinstance(reply, VoteReply):
            self._step(node.VoteReplyArrived(voter, reply.term, reply.granted, to_token(reply.coordinator)))

    async def confirm(self, suspect: PeerId, observers: Iterable[PeerId]) -> None:
        """Ask the suspect, and the observers whether they reach it."""
        reached, denied = await asyncio.gather(self.beat(suspect), self._denied(suspect, observers))
        if denied and not reached:
            self._step(node.SuspectDenied(suspect))

    async def doubt(self, coordinator: PeerId, observers: Iterable[PeerId]) -> None:
        """Ask the observers whether they reach a coordinator that did not answer us."""
        if await self._denied(coordinator, observers):
            self._step(node.CoordinatorDenied(coordinator))

    async def _denied(self, suspect: PeerId, observers: Iterable[PeerId]) -> bool:
        """Whether no observer reaches it. Who alone does not reach it may be cut off itself, so silence of all is no denial."""
        said = await asyncio.gather(*(self._probe(observer, suspect) for observer in observers))
        return True not in said and False in said

    async def _probe(self, observer: PeerId, suspect: PeerId) -> bool | None:
        """Whether the observer reaches the suspect; None when it does not answer."""
        reply = await _ask(self._others, observer, Probe(peer=suspect), self._settings.confirm_s)
        if not isinstance(reply, ProbeReply):
            return None
        if reply.heard:
            self._step(node.SuspectAnswered(suspect))
        return reply.heard


async def _ask(way: Acquaintances | Conversation, peer: PeerId, message: Message, timeout_s: float) -> Message | None:
    try:
        return await way.ask(peer, message, timeout_s=timeout_s)
    except (NetworkError, WireError) as error:
        logger.debug("%s to %s: %s", message.kind, peer, error)
        return None
