"""One peer's view of the swarm: membership and election fed by the messages that arrive, without any I/O.

The runner (`peer.presence`) turns messages into events and actions into messages; everything that is decided is decided here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm import election, membership
from fusion_p2p.swarm.election import Election, Token
from fusion_p2p.swarm.members import Membership
from fusion_p2p.swarm.membership import Listed, RosterTold
from fusion_p2p.swarm.settings import SwarmSettings

MAX_INCARNATION = 1 << 52
"""Far beyond any clock, far below what a message can carry: nobody can drive a peer's incarnation out of range."""


@dataclass(frozen=True, slots=True)
class Node:
    """State of one peer in the swarm. `incarnation` starts as Unix milliseconds and is raised when we were evicted."""

    incarnation: int
    election: Election
    membership: Membership

    @property
    def me(self) -> PeerId:
        return self.election.me


def begin(me: PeerId, incarnation: int, now: float, settings: SwarmSettings) -> Node:
    """A peer that has just started and knows nobody."""
    # Numbers of the roster begin beyond all that an earlier process of this peer gave; who knows one of those is told all.
    members = Membership(version=incarnation, departed_since=incarnation)
    return Node(incarnation, election.begin(me, now, settings), members)


@dataclass(frozen=True, slots=True)
class BeatArrived:
    peer: PeerId
    incarnation: int
    sequence: int
    holds: bool
    coordinator: Token | None


@dataclass(frozen=True, slots=True)
class ReplyArrived:
    peer: PeerId
    incarnation: int
    holds: bool
    coordinator: Token | None
    over: int | None
    """The incarnation of ours up to which all are over for that peer."""
    members: tuple[Listed, ...]
    roster: RosterTold | None = None
    """What changed on the roster of a coordinator; None from who is none, whose `members` are a sample."""
    asked_at: float = math.inf
    """When we asked: the answer may be older than what we have heard since."""


@dataclass(frozen=True, slots=True)
class VoteRequestArrived:
    candidate: Token


@dataclass(frozen=True, slots=True)
class VoteReplyArrived:
    voter: PeerId
    term: int
    granted: bool
    coordinator: Token | None


@dataclass(frozen=True, slots=True)
class SuspectAnswered:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class SuspectDenied:
    """Nobody that we asked reaches it, nor do we."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class CoordinatorDenied:
    """It did not answer us, and nobody that we asked reaches it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class LeaveArrived:
    peer: PeerId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `holds`: we execute slices. `indirect`: peers, perhaps us, that cannot be dialled directly."""

    holds: bool
    indirect: frozenset[PeerId]


Event = (
    BeatArrived
    | ReplyArrived
    | VoteRequestArrived
    | VoteReplyArrived
    | SuspectAnswered
    | SuspectDenied
    | CoordinatorDenied
    | LeaveArrived
    | Tick
)


@dataclass(frozen=True, slots=True)
class Returned:
    """We were evicted, or our clock was set back before a restart: our beats carry this incarnation from now on."""

    incarnation: int


Action = membership.Action | election.Action | Returned
Step = tuple[Node, tuple[Action, ...]]


def step(state: Node, event: Event, now: float, settings: SwarmSettings) -> Step:
    """The next state and the actions of membership and election, in order."""
    match event:
        case BeatArrived():
            heard = membership.Heard(event.peer, event.incarnation, event.holds, event.sequence)
            late = state.membership.is_late(event.peer, event.incarnation, event.sequence)
            claims = [] if late else _claims(event.peer, event.coordinator)
            return _run(state, [heard, *claims], now, settings)
        case ReplyArrived():
            return _reply(state, event, now, settings)
        case VoteRequestArrived(candidate):
            return _run(state, [election.VoteAsked(candidate)], now, settings)
        case VoteReplyArrived():
            return _run(state, _vote_reply(event), now, settings)
        case SuspectAnswered(peer):
            return _run(state, [membership.Confirmed(peer)], now, settings)
        case SuspectDenied(peer):
            return _run(state, [membership.Denied(peer)], now, settings)
        case CoordinatorDenied(peer):
            return _run(state, [election.CoordinatorGone(peer)], now, settings)
        case LeaveArrived(peer, incarnation):
            return _run(state, [membership.Left(peer, incarnation), election.CoordinatorGone(peer)], now, settings)
        case Tick():
            return _tick(state, event, now, settings)
        case _:
            assert_never(event)


_Inner = membership.Event | election.Event


def _run(state: Node, events: Iterable[_Inner], now: float, settings: SwarmSettings) -> Step:
    actions: list[Action] = []
    for event in events:
        if isinstance(event, membership.Event):
            members, member_actions = membership.step(state.membership, event, now, settings)
            state = Node(state.incarnation, state.election, members)
            actions.extend(member_actions)
        else:
            elected, election_actions = election.step(state.election, event, now, settings)
            state = Node(state.incarnation, elected, state.membership)
            actions.extend(election_actions)
    return state, tuple(actions)


def _claims(peer: PeerId, claimed: Token | None) -> list[_Inner]:
    """What a peer's words about the coordinator mean: its own claim, hearsay, or that our coordinator disowns the term."""
    if claimed is not None and claimed.peer == peer:
        return [election.HeardCoordinator(claimed)]
    events: list[_Inner] = [election.CoordinatorGone(peer)]
    if claimed is not None:
        events.append(election.ToldOfCoordinator(claimed))
    return events


def _reply(state: Node, event: ReplyArrived, now: float, settings: SwarmSettings) -> Step:
    returned: tuple[Action, ...] = ()
    if event.over is not None and state.incarnation <= event.over < MAX_INCARNATION:
        state = replace(state, incarnation=event.over + 1)
        returned = (Returned(state.incarnation),)
    heard = membership.Heard(event.peer, event.incarnation, event.holds)
    claims = _claims(event.peer, event.coordinator)
    if state.election.heard_at > event.asked_at:  # it may have said so before it was elected
        claims = [claim for claim in claims if not isinstance(claim, election.CoordinatorGone)]
    state, actions = _run(state, [heard, *claims], now, settings)
    listed = tuple(member for member in event.members if member.peer != state.me)
    followed = state.election.coordinator is not None and state.election.coordinator.peer == event.peer
    told = [replace(event.roster, members=listed)] if event.roster is not None and followed else listed
    state, more = _run(state, told, now, settings)
    return state, returned + actions + more


def _vote_reply(event: VoteReplyArrived) -> list[_Inner]:
    events: list[_Inner] = [election.VoteAnswered(event.voter, event.term, event.granted)]
    if event.coordinator is not None and event.coordinator.peer == event.voter:
        events.append(election.HeardCoordinator(event.coordinator))
    elif event.coordinator is not None:
        events.append(election.ToldOfCoordinator(event.coordinator, alive=True))
    return events


def _tick(state: Node, event: Tick, now: float, settings: SwarmSettings) -> Step:
    state, actions = _run(state, [membership.Tick(state.election.coordinating)], now, settings)
    if state.election.coordinator is not None:
        # Nobody stands for election, so who may vote and our place among the candidates need not be found out.
        others, rank = frozenset[PeerId](), 0
    else:
        others, rank = state.membership.heard_since(now - settings.heard_lately_s), candidate_rank(state, event)
    state, more = _run(state, [election.Tick(others, rank)], now, settings)
    return state, actions + more


def candidate_rank(state: Node, tick: Tick) -> int:
    """How many peers stand before us: standby before slice holders, reachable before relayed, longest here first."""

    def place(peer: PeerId, incarnation: int, holds: bool) -> tuple[bool, bool, int, PeerId]:
        return holds, peer in tick.indirect, incarnation, peer

    mine = place(state.me, state.incarnation, tick.holds)
    fallen = state.election.fallen
    return sum(
        place(peer, member.incarnation, member.holds) < mine
        for peer, member in state.membership.members.items()
        if fallen is None or peer != fallen.peer
    )
