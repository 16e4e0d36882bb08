"""Who is here: incarnations, beats, suspicion confirmed by a second observer, eviction and leave (after SWIM and Lifeguard).

Every peer keeps a membership. The coordinator's is first-hand (all beat to it) and it alone suspects and evicts; the others
learn from its replies and forget whom nobody heard lately. An incarnation that was evicted or left never comes back; a peer
that learns of its eviction returns with a higher one. An observer that was itself late does not accuse anybody of silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import assert_never

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.settings import SwarmSettings

MAX_MEMBERS = 4096
MAX_GONE = 4096
"""Evicted incarnations remembered; the oldest are forgotten first."""


@dataclass(frozen=True, slots=True)
class Member:
    """A peer that is here: in which incarnation, when it was last heard, and since when it is suspected."""

    incarnation: int
    heard_at: float
    holds: bool
    sequence: int = 0
    suspected_at: float | None = None


@dataclass(frozen=True, slots=True)
class Membership:
    """State: the living, the highest incarnation of those that are gone, and whether all beat to us."""

    members: Mapping[PeerId, Member] = field(default_factory=dict)
    gone: Mapping[PeerId, int] = field(default_factory=dict)
    ticked_at: float | None = None
    observing: bool = False

    def heard_since(self, earliest: float) -> frozenset[PeerId]:
        """Peers heard at `earliest` or later."""
        return frozenset(peer for peer, member in self.members.items() if member.heard_at >= earliest)

    def is_gone(self, peer: PeerId, incarnation: int) -> bool:
        """Whether this incarnation was evicted or has left."""
        return incarnation <= self.gone.get(peer, -1)

    def superseded_by(self, peer: PeerId, incarnation: int) -> int | None:
        """The incarnation that a peer has to exceed to be heard; None when this one is heard."""
        if self.is_gone(peer, incarnation):
            return self.gone[peer]
        known = self.members.get(peer)
        return known.incarnation if known is not None and incarnation < known.incarnation else None


@dataclass(frozen=True, slots=True)
class Heard:
    """A peer spoke to us itself. `sequence` is None for answers, which cannot be late."""

    peer: PeerId
    incarnation: int
    holds: bool
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Listed:
    """Another peer says that it heard this one so many seconds ago."""

    peer: PeerId
    incarnation: int
    holds: bool
    heard_ago_s: float


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A second observer, or a question of our own, reached the suspect."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Left:
    """A peer said goodbye."""

    peer: PeerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `observing`: we coordinate, so silence towards us is a reason for suspicion."""

    observing: bool


Event = Heard | Listed | Confirmed | Left | Tick


@dataclass(frozen=True, slots=True)
class Joined:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Suspected:
    """Ask this peer directly and through a second observer."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Gone:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Ignored:
    """An event that changed nothing, and why."""

    peer: PeerId
    reason: str


Action = Joined | Suspected | Gone | Ignored
Step = tuple[Membership, tuple[Action, ...]]


def step(state: Membership, event: Event, now: float, settings: SwarmSettings) -> Step:
    """The next state, and what the runner has to do or log."""
    match event:
        case Heard():
            return _heard(state, event, now)
        case Listed():
            return _listed(state, event, now, settings)
        case Confirmed(peer):
            return _confirmed(state, peer, now)
        case Left(peer, incarnation):
            return _left(state, peer, incarnation)
        case Tick(observing):
            return _tick(state, observing, now, settings)
        case _:
            assert_never(event)


def _heard(state: Membership, event: Heard, now: float) -> Step:
    known = state.members.get(event.peer)
    reason = _why_ignored(state, event.peer, event.incarnation)
    if reason is None and known and event.sequence is not None and known.incarnation == event.incarnation:
        reason = "a later beat came first" if event.sequence <= known.sequence else None
    if reason is not None:
        return state, (Ignored(event.peer, reason),)
    sequence = event.sequence if event.sequence is not None else known.sequence if known else 0
    member = Member(event.incarnation, now, event.holds, sequence)
    return _with_member(state, event.peer, member)


def _listed(state: Membership, event: Listed, now: float, settings: SwarmSettings) -> Step:
    reason = _why_ignored(state, event.peer, event.incarnation)
    heard_at = now - event.heard_ago_s
    if reason is None and heard_at < now - settings.heard_lately_s:
        reason = "not heard lately by anybody"
    known = state.members.get(event.peer)
    if reason is None and known and known.incarnation == event.incarnation:
        # An observer's own list comes back to it a little younger each time, so it believes its ears only.
        reason = "observed ourselves" if state.observing else "heard later" if known.heard_at >= heard_at else None
    if reason is not None:
        return state, (Ignored(event.peer, reason),)
    sequence = known.sequence if known and known.incarnation == event.incarnation else 0
    return _with_member(state, event.peer, Member(event.incarnation, heard_at, event.holds, sequence))


def _why_ignored(state: Membership, peer: PeerId, incarnation: int) -> str | None:
    known = state.members.get(peer)
    if state.is_gone(peer, incarnation):
        return "this incarnation is gone"
    if known is not None and incarnation < known.incarnation:
        return "an older incarnation"
    if known is None and len(state.members) >= MAX_MEMBERS:
        return f"the swarm is full: {MAX_MEMBERS} members"
    return None


def _with_member(state: Membership, peer: PeerId, member: Member) -> Step:
    known = state.members.get(peer)
    new = known is None or known.incarnation != member.incarnation
    return replace(state, members={**state.members, peer: member}), ((Joined(peer),) if new else ())


def _confirmed(state: Membership, peer: PeerId, now: float) -> Step:
    known = state.members.get(peer)
    if known is None:
        return state, (Ignored(peer, "confirmed too late"),)
    return replace(state, members={**state.members, peer: replace(known, heard_at=now, suspected_at=None)}), ()


def _left(state: Membership, peer: PeerId, incarnation: int) -> Step:
    known = state.members.get(peer)
    if known is not None and incarnation < known.incarnation:
        return state, (Ignored(peer, "an older incarnation left"),)
    return _without(state, peer, incarnation), ((Gone(peer, "left"),) if known else ())


def _without(state: Membership, peer: PeerId, incarnation: int) -> Membership:
    members = {other: member for other, member in state.members.items() if other != peer}
    gone = {**state.gone, peer: max(incarnation, state.gone.get(peer, -1))}
    while len(gone) > MAX_GONE:
        gone.pop(next(iter(gone)))
    return replace(state, members=members, gone=gone)


def _tick(state: Membership, observing: bool, now: float, settings: SwarmSettings) -> Step:
    late = state.ticked_at is not None and now - state.ticked_at > settings.suspect_after_s / 2
    state = replace(state, ticked_at=now, observing=observing)
    if late:
        # We slept, so their beats may lie unread: everybody gets one more suspect time before being accused.
        return replace(state, members={peer: _excused(member, now) for peer, member in state.members.items()}), ()
    return _accuse(state, now, settings) if observing else _forget(state, now, settings)


def _excused(member: Member, now: float) -> Member:
    return replace(member, heard_at=now, suspected_at=None)


def _accuse(state: Membership, now: float, settings: SwarmSettings) -> Step:
    """Suspect the silent, evict those that stayed silent until nobody could confirm them."""
    actions: list[Action] = []
    for peer, member in tuple(state.members.items()):
        silent_s = now - member.heard_at
        if member.suspected_at is None and silent_s > settings.suspect_after_s:
            state = replace(state, members={**state.members, peer: replace(member, suspected_at=now)})
            actions.append(Suspected(peer))
        elif member.suspected_at is not None and now - member.suspected_at > settings.confirm_s:
            state = _without(state, peer, member.incarnation)
            actions.append(Gone(peer, f"not heard for {silent_s:.1f} s by us or a second observer"))
    return state, tuple(actions)


def _forget(state: Membership, now: float, settings: SwarmSettings) -> Step:
    living = state.heard_since(now - settings.heard_lately_s)
    lost = [peer for peer in state.members if peer not in living]
    members = {peer: member for peer, member in state.members.items() if peer in living}
    return replace(state, members=members), tuple(Gone(peer, "not heard lately by anybody") for peer in lost)
