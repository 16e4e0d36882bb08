"""What this peer knows of the swarm and says of itself: the state machine with the last words of everybody, without I/O."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from fusion_p2p.clock import Clock
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.identity import Identity, seal
from fusion_p2p.net.records import RECORD_DOMAIN
from fusion_p2p.peer.presence_messages import Present, RosterChanges, changes_since, from_token, sample_of, status_reply
from fusion_p2p.swarm import membership
from fusion_p2p.swarm.announcement import Announcement, Profile, announce, encode_announcement, fitted
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.node import Action, Event, Node, Tick, begin, step
from fusion_p2p.swarm.settings import SwarmSettings
from fusion_p2p.wire.swarm_messages import Beat, BeatReply, Holding, JobStatus, Links, PeerState, StatusReply

PUNCTUAL_S = 0.01
"""Beats that come so close to the moments at which a coordinator looks up are left alone."""


class WorkView(Protocol):
    """What has to be known of the work this peer does."""

    def holding(self) -> Holding | None:
        """The slices executed now."""

    def progress(self) -> int:
        """Tasks done since the start of the process."""


class SwarmView:
    """The state of one peer in the swarm. Not thread-safe: it belongs to the event loop."""

    def __init__(
        self, identity: Identity, clock: Clock, profile: Profile, work: WorkView, settings: SwarmSettings, others: Acquaintances
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._profile = profile
        self._work = work
        self._settings = settings
        self._others = others
        self._node = begin(identity.peer_id, int(clock.wall() * 1000), clock.now(), settings)
        self._ordered: PeerState = "standby"
        self._addresses: tuple[str, ...] = ()
        self._last_beats: dict[PeerId, Beat] = {}
        self._beaten_at: dict[PeerId, float] = {}
        self._joined_at: dict[PeerId, float] = {}
        self._beats_made = 0
        self._record = b""
        self._record_number = 0
        self._acknowledged: dict[PeerId, int] = {}
        self.jobs: Callable[[], Iterable[JobStatus]] = tuple
        self.standings: Callable[[], Mapping[PeerId, str]] = dict
        self._told_standing = ""
        self.links: Callable[[], Links] = lambda: Links(entries=(), measuring=False)
        self.changed = asyncio.Event()
        """Set when what we announce is no longer what we are."""

    @property
    def me(self) -> PeerId:
        return self._identity.peer_id

    @property
    def node(self) -> Node:
        return self._node

    @property
    def coordinator(self) -> Token | None:
        return self._node.election.coordinator

    @property
    def coordinating(self) -> bool:
        return self._node.election.coordinating

    @property
    def calm(self) -> bool:
        """Whether our coordinator, another peer, answered our last beat: nothing is due before the next one."""
        silent_s = self._clock.now() - self._node.election.heard_at
        return self.coordinator is not None and not self.coordinating and silent_s < 1.5 * self._settings.beat_s

    @property
    def state(self) -> PeerState:
        """Working while it holds slices, unless it was told to pause or drain."""
        if self._ordered == "standby" and self._work.holding() is not None:
            return "working"
        return self._ordered

    @state.setter
    def state(self, ordered: PeerState) -> None:
        self._ordered = ordered
        self.changed.set()

    @property
    def profile(self) -> Profile:
        return self._profile

    @profile.setter
    def profile(self, profile: Profile) -> None:
        self._profile = profile
        self.changed.set()

    def now(self) -> float:
        """Monotonic time."""
        return self._clock.now()

    def step(self, event: Event) -> tuple[Action, ...]:
        """Feed the state machine; what to do is returned."""
        now = self._clock.now()
        self._node, actions = step(self._node, event, now, self._settings)
        for action in actions:
            if isinstance(action, membership.Joined):
                self._joined_at[action.peer] = now
            elif isinstance(action, membership.Gone):
                for memory in (self._last_beats, self._beaten_at, self._joined_at, self._acknowledged):
                    memory.pop(action.peer, None)
        return actions

    def tick(self) -> Tick:
        """The event that time passed."""
        indirect = set[PeerId]()
        if self.coordinator is None:  # only candidates compare themselves with others
            indirect = {peer for peer in self._others.peers if _is_indirect(self._others.announcement(peer))}
        if self._profile.reachability != "direct":
            indirect.add(self.me)
        return Tick(self._work.holding() is not None, frozenset(indirect))

    def seal_announcement(self, addresses: Iterable[str]) -> bytes:
        """A new sealed announcement, also carried by beats until it is acknowledged."""
        wall_s = self._clock.wall()
        self._record_number = max(self._record_number + 1, int(wall_s * 1000))
        self._addresses = tuple(addresses)
        announcement = announce(self._profile, self._addresses, self.state, self._node.incarnation, wall_s)
        payload = encode_announcement(fitted(announcement), self._record_number)
        self._record = seal(self._identity, payload, domain=RECORD_DOMAIN)
        return self._record

    def continue_after(self, sequence: int) -> None:
        """An announcement of ours with this number is out, from before a restart with another clock: exceed it."""
        if sequence > self._record_number:
            self._record_number = sequence
            self.changed.set()

    def make_beat(self, peer: PeerId) -> tuple[Beat, int]:
        """The next beat to a peer, and the number of the announcement that its answer acknowledges."""
        self._beats_made += 1
        known = self._acknowledged.get(peer) == self._record_number
        beat = Beat(
            incarnation=self._node.incarnation,
            sequence=self._beats_made,
            coordinator=from_token(self.coordinator),
            state=self.state,
            holding=self._work.holding(),
            progress=self._work.progress(),
            roster=self._node.membership.followed_version(peer),
            record=b"" if known else self._record,
        )
        return beat, self._record_number

    def acknowledge(self, peer: PeerId, number: int) -> None:
        """The peer has read our announcement of this number."""
        self._acknowledged[peer] = number

    def changed_state(self, state: PeerState) -> None:
        """Something else may be expected of us: what the coordinator had for us to do is out of date."""
        self.state, self._told_standing = state, ""

    def note_standing(self, peer: PeerId, standing: str) -> None:
        """What a peer has for us to do counts if it coordinates."""
        if self.coordinator is not None and peer == self.coordinator.peer:
            self._told_standing = standing

    @property
    def standing(self) -> str:
        """What the coordinator has for us to do, in words; empty while we work, or nobody has said."""
        if self.coordinating:
            return self.standings().get(self.me, "")
        return self._told_standing if self.coordinator is not None else ""

    def note_beat(self, peer: PeerId, beat: Beat) -> None:
        """Remember what a member said of itself."""
        if peer in self._node.membership.members:
            self._last_beats[peer] = beat
            self._beaten_at[peer] = self._clock.now()

    def make_reply(self, peer: PeerId, beat: Beat) -> BeatReply:
        """The answer to a beat, after it was stepped."""
        now, members = self._clock.now(), self._node.membership
        if self.coordinating:
            told = changes_since(members, beat.roster, now, peer)
        elif self.coordinator is not None and beat.coordinator == from_token(self.coordinator):
            told = RosterChanges(0, 0, (), ())  # it has the same roster
        else:
            told = RosterChanges(0, 0, sample_of(members, now, peer, self._settings.heard_lately_s), ())
        return BeatReply(
            incarnation=self._node.incarnation,
            coordinator=from_token(self.coordinator),
            state=self.state,
            holds=self._work.holding() is not None,
            over=members.superseded_by(peer, beat.incarnation),
            members=told.members,
            gone=told.gone,
            since=told.since,
            roster=told.version,
            more=told.more,
            standing=self.standings().get(peer, "") if self.coordinating else "",
            again_s=self._again_s() if self.coordinating else 0.0,
        )

    def _again_s(self) -> float:
        """When who beats to us is to do so again, for beats to come when we look up anyway; 0 when this one just did."""
        beat_s = self._settings.beat_s
        pause_s = self._clock.pause_s(beat_s, often=True)
        return 0.0 if abs(pause_s - beat_s) <= PUNCTUAL_S else pause_s

    def heard_lately(self, within_s: float) -> frozenset[PeerId]:
        """Members heard in the last seconds."""
        return self._node.membership.heard_since(self._clock.now() - within_s)

    def members(self) -> tuple[Present, ...]:
        """The peers heard lately and this one, by peer id."""
        present = (self._myself(), *map(self._present, self.heard_lately(self._settings.heard_lately_s)))
        return tuple(sorted(present, key=lambda one: one.peer))

    def snapshot(self) -> StatusReply:
        """The swarm as this peer sees it: complete at the coordinator, hearsay elsewhere."""
        jobs = self.jobs() if self.coordinating else ()
        standings = self.standings() if self.coordinating else {}
        return status_reply(self.me, self._profile.network, self.coordinator, self.members(), jobs, standings)

    def _myself(self) -> Present:
        return Present(
            peer=self.me,
            announcement=announce(self._profile, self._addresses, self.state, self._node.incarnation, self._clock.wall()),
            state=self.state,
            holding=self._work.holding(),
            progress=self._work.progress(),
            heard_ago_s=0.0,
            joined_at=self._node.election.started_at,
            reported=True,
        )

    def _present(self, peer: PeerId) -> Present:
        beat, now = self._last_beats.get(peer), self._clock.now()
        return Present(
            peer=peer,
            announcement=self._others.announcement(peer),
            state=beat.state if beat else "standby",
            holding=beat.holding if beat else None,
            progress=beat.progress if beat else 0,
            heard_ago_s=now - self._node.membership.heard_at(peer),
            joined_at=self._joined_at.get(peer, now),
            reported=now - self._beaten_at.get(peer, -math.inf) <= self._settings.suspect_after_s,
        )


def _is_indirect(announcement: Announcement | None) -> bool:
    return announcement is not None and announcement.reachability != "direct"
