"""A peer's presence in the swarm: announces itself, finds others, beats, votes, answers. Decides nothing: `swarm.node` does.

Tasks, all in one group that `run` ends with a goodbye: announce, look up, tick the state machine, beat to the coordinator, beat
to peers chosen at random. Every question to a peer has a deadline; that one does not answer is an event like others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from fusion_p2p.clock import Clock, pause_unless
from fusion_p2p.errors import NetworkError, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.net.identity import Identity
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.peer.loneliness import Loneliness
from fusion_p2p.peer.lookups import Lookups
from fusion_p2p.peer.presence_messages import Present
from fusion_p2p.peer.swarm_questions import SwarmQuestions
from fusion_p2p.peer.swarm_service import Registrar, SwarmService
from fusion_p2p.peer.swarm_view import SwarmView, WorkView
from fusion_p2p.swarm import election, membership, node
from fusion_p2p.swarm.announcement import Line, Profile
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.settings import WAN, SwarmSettings
from fusion_p2p.wire.swarm_messages import (
    SWARM_MESSAGES,
    SWARM_PROTOCOL,
    JobStatus,
    Leave,
    Links,
    NotCoordinator,
    PeerState,
    StatusReply,
)

logger = logging.getLogger(__name__)

LEAVE_S = 2.0
FIRST_LOOKUP_PATIENCE_S = 10.0
"""How long a peer whose directory does not answer holds back from an election it may not be needed in."""
OBSERVERS = 2
"""How many others are asked whether they reach a suspect."""
CALM_ROUNDS = 3
"""While everybody who is announced is also a member, of so many rounds of random beats one is held, with one beat."""


class Presence:
    """One peer in the swarm. `run` until cancelled; everything else may be read at any time."""

    def __init__(
        self,
        transport: Transport,
        directory: Directory,
        identity: Identity,
        clock: Clock,
        profile: Profile,
        work: WorkView,
        settings: SwarmSettings = WAN,
    ) -> None:
        self._transport = transport
        self._directory = directory
        self._clock = clock
        self._settings = settings
        self._random = random.Random(identity.peer_id)
        self._others = Acquaintances(transport, profile.network, clock)
        self._view = SwarmView(identity, clock, profile, work, settings, self._others)
        self._beat_now = asyncio.Event()
        self._lost = asyncio.Event()
        self._elected_at = 0.0
        loneliness = Loneliness(transport, self._others, profile.network, clock)
        self._lookups = Lookups(directory, self._view, self._others, loneliness, clock, settings)
        self._service = SwarmService(self._view, self._others, self._step, settings)
        self._questions = SwarmQuestions(self._view, self._others, self._step, settings)

    @property
    def me(self) -> PeerId:
        return self._view.me

    @property
    def coordinator(self) -> Token | None:
        """The coordinator this peer follows, perhaps itself."""
        return self._view.coordinator

    @property
    def coordinating(self) -> bool:
        return self._view.coordinating

    @property
    def coordinating_since(self) -> float:
        """On our clock; meaningful only while we coordinate."""
        return self._elected_at

    def members(self) -> tuple[Present, ...]:
        """The peers heard lately and this one, by peer id."""
        return self._view.members()

    @property
    def peers(self) -> frozenset[PeerId]:
        """The ids of `members`."""
        return self._view.heard_lately(self._settings.heard_lately_s) | {self.me}

    def snapshot(self) -> StatusReply:
        """The swarm as this peer sees it: complete at the coordinator, hearsay elsewhere."""
        return self._view.snapshot()

    @property
    def standing(self) -> str:
        """What the coordinator has for us to do, in words; empty while we work, or nobody has said."""
        return self._view.standing

    @property
    def state(self) -> PeerState:
        """What may be expected of this peer now."""
        return self._view.state

    def set_state(self, state: PeerState) -> None:
        """Pause, drain, or `standby` to go on; announced at once."""
        self._view.changed_state(state)

    def set_profile(self, profile: Profile) -> None:
        """Announce other capabilities from now on."""
        self._view.profile = profile

    def serve_owners(
        self,
        registrar: Registrar,
        jobs: Callable[[], Iterable[JobStatus]],
        standings: Callable[[], Mapping[PeerId, str]] = dict,
    ) -> None:
        """Who answers owners while this peer coordinates, what it knows of their jobs, and what it has for whom to do."""
        self._service.registrar = registrar
        self._view.jobs, self._view.standings = jobs, standings

    def serve_links(self, links: Callable[[], Links]) -> None:
        """What this peer knows of its links, for whoever asks."""
        self._view.links = links

    @property
    def others(self) -> Acquaintances:
        """The peers announced, and how to ask them."""
        return self._others

    def links(self) -> Links:
        """What this peer itself knows of its links."""
        return self._view.links()

    def set_line(self, line: Line) -> None:
        """Announce what was measured of our line to the others."""
        self.set_profile(self._view.profile.model_copy(update={"line": line}))

    def set_free_bytes(self, num_bytes: int) -> None:
        """Announce that so much memory is offered now."""
        self.set_profile(self._view.profile.model_copy(update={"free_bytes": num_bytes}))

    def not_coordinator(self) -> NotCoordinator:
        """Where an owner should go instead."""
        return self._service.not_coordinator()

    async def run(self) -> None:
        """Take part until cancelled; then say goodbye. ValueError when the swarm protocol is served already."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._transport.serve(SWARM_PROTOCOL, self._service.serve)
                for task in (self._announce, self._lookups.run, self._tick, self._beat_to_coordinator, self._beat_at_random):
                    self._group.create_task(task())
        finally:
            self._service.closed = True
            await self._leave()

    async def _announce(self) -> None:
        settings = self._settings
        while True:
            self._view.changed.clear()
            wait_s = settings.announce_s
            try:
                record = self._view.seal_announcement(self._transport.addresses)
                await self._directory.announce(record, lifetime_s=settings.announcement_life_s)
            except NetworkError as error:
                wait_s = 5 * settings.beat_s
                logger.warning("not announced, trying again in %g s: %s", wait_s, error)
            await pause_unless(self._view.changed, self._clock, wait_s)

    async def _tick(self) -> None:
        await pause_unless(self._lookups.done, self._clock, FIRST_LOOKUP_PATIENCE_S)
        said = self._view.state
        while True:
            self._step(self._view.tick())
            if said != self._view.state:
                said = self._view.state
                self._view.changed.set()
            self._lost.clear()
            # No more seldom: a busy machine wakes us up to a second late, and who slept longer takes back what it suspects.
            await pause_unless(self._lost, self._clock, self._settings.beat_s / (2 if self._view.calm else 4))

    async def _beat_to_coordinator(self) -> None:
        try:
            while True:
                self._beat_now.clear()
                began, again_s = self._clock.now(), 0.0
                if self.coordinator is not None and not self.coordinating:
                    again_s = await self._beat_and_doubt(self.coordinator.peer)
                if again_s:
                    self._clock.keep_step(began + again_s)
                wait_s = (again_s or self._settings.beat_s) - (self._clock.now() - began)
                await pause_unless(self._beat_now, self._clock, wait_s)
        finally:
            await self._questions.stop_beating()

    async def _beat_and_doubt(self, coordinator: PeerId) -> float:
        """When it wants the next one; 0 when it does not mind.

        A coordinator that does not answer and is reached by nobody has gone, however short its silence.
        """
        reply, beat_s = await self._questions.beat_regularly(coordinator), self._settings.beat_s
        if reply is None:
            self._spawn(self._questions.doubt(coordinator, self._observers(coordinator)))
            return 0.0
        return reply.again_s if beat_s / 2 <= reply.again_s <= 1.5 * beat_s else 0.0

    async def _beat_at_random(self) -> None:
        """To members and to announced strangers: how newcomers, and partitions that healed, find the coordinator."""
        await self._lookups.done.wait()
        for number in itertools.count():
            for peer in self._choose(self._beats_in_round(number)):
                self._spawn(self._questions.beat(peer))
            lonely = self.coordinator is None or (self.coordinating and not self._view.node.membership.members)
            await asyncio.sleep(self._clock.pause_s(self._settings.beat_s if lonely else self._settings.random_beat_s))

    def _beats_in_round(self, number: int) -> int:
        if self._somebody_to_find():
            return self._settings.random_beats
        return 1 if number % CALM_ROUNDS == 0 else 0

    def _somebody_to_find(self) -> bool:
        """Whether we follow nobody, or somebody is announced of whom our coordinator does not tell."""
        return self.coordinator is None or not self._others.peers <= {self.me, *self._view.node.membership.members}

    def _choose(self, count: int) -> Sequence[PeerId]:
        coordinator = {self.coordinator.peer} if self.coordinator else set()
        everybody = self._everybody() - coordinator
        answering = everybody - self._others.failed_since(self._clock.now() - self._settings.heard_lately_s)
        pool = sorted(answering or everybody)
        return self._random.sample(pool, min(count, len(pool)))

    def _everybody(self) -> frozenset[PeerId]:
        return self._others.peers.union(self._view.node.membership.members) - {self.me}

    def _step(self, event: node.Event) -> tuple[node.Action, ...]:
        actions = self._view.step(event)
        for action in actions:
            self._act(action)
        return actions

    def _act(self, action: node.Action) -> None:
        match action:
            case election.AskVotes(term, voters):
                for voter in sorted(voters):
                    self._spawn(self._questions.ask_vote(voter, term))
            case election.Elected():
                self._elected_at = self._clock.now()
                self._lookups.hurry()
                for peer in sorted(self._everybody()):
                    self._spawn(self._questions.beat(peer))
            case election.Lost():
                self._lost.set()
            case election.Followed() | membership.Untold():
                self._beat_now.set()
            case election.Rumoured(token):
                self._spawn(self._questions.beat(token.peer))
            case membership.Suspected(peer):
                self._spawn(self._questions.confirm(peer, self._observers(peer)))
            case node.Returned():
                self._view.changed.set()
                self._beat_now.set()
            case _:
                pass
        level = logging.DEBUG if isinstance(action, membership.Ignored | election.AnswerVote) else logging.INFO
        logger.log(level, "swarm %s", action)

    def _observers(self, suspect: PeerId) -> Sequence[PeerId]:
        heard = sorted(self._view.heard_lately(self._settings.suspect_after_s) - {suspect})
        return self._random.sample(heard, min(OBSERVERS, len(heard)))

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        if self._service.closed:
            work.close()
        else:
            self._group.create_task(work)

    async def _leave(self) -> None:
        """Say goodbye to whoever would otherwise wait for us."""
        incarnation = self._view.node.incarnation
        await asyncio.gather(*(_say_goodbye(self._transport, peer, incarnation) for peer in sorted(_dependants(self._view))))


def _dependants(view: SwarmView) -> set[PeerId]:
    """Who beats to us, or to whom we beat."""
    if view.coordinating:
        return set(view.node.membership.members)
    return set() if view.coordinator is None else {view.coordinator.peer}


async def _say_goodbye(transport: Transport, peer: PeerId, incarnation: int) -> None:
    try:
        async with asyncio.timeout(LEAVE_S):
            messages = MessageStream(await transport.open(peer, SWARM_PROTOCOL, timeout_s=LEAVE_S), SWARM_MESSAGES)
            await messages.send(Leave(incarnation=incarnation))
            # It ends the stream when it has heard; what our daemon has not sent by our end would be lost.
            await messages.receive()
    except StreamClosed:
        return
    except (NetworkError, TimeoutError) as error:
        logger.debug("goodbye to %s: %s", peer, error)
