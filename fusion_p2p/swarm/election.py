"""Who coordinates: one token (term, peer id) after another, each backed by a majority of the peers heard lately.

    * A peer gives one vote per term, none while it hears a live coordinator, none for `quiet_s` after a start.
    * When the coordinator falls silent, peers become candidates one after another (`rank` x `stagger_s`): standby before slice
      holders, directly reachable first, longest here first. So the first candidate usually stands alone; who stood in vain
      draws a lot.
    * A majority is counted over the peers heard lately; one peer alone is a swarm of one.
    * After a partition heals there are two coordinators: the one with the lower token steps down when it hears of the higher.
    * What others tell of a coordinator counts only until we found it, or a later one, silent ourselves; then we ask it. What
      it says itself always counts.
    * Terms grow by steps. A term that leaps is a lie and is ignored, except as the first that a newcomer hears.

Election keeps the swarm live. That a run stays right is the owner's part: it obeys only the highest token it has seen.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import NamedTuple, assert_never

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.settings import SwarmSettings

MAX_LEAP = 1 << 20
"""Elections that a peer may have missed. Who lies about the term gains no more than this by a message."""
LOT_STAGGERS = 4
"""Two seconds, between ticks a quarter of a second apart."""
HELD_BACK_STAGGERS = 0.5
"""After a coordinator was lost again that somebody else still hears: that one finds it out at its next beat, and before the
next in the queue stands we do."""
MAX_TERM = 1 << 52
"""Only a lie told to a newcomer leads here: it forgets all terms then, and learns the true one."""


class Token(NamedTuple):
    """A coordinator and its term; compared by term, then peer id."""

    term: int
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Candidacy:
    """Our own: the term we stand for, who may vote, who did, and when we give up."""

    term: int
    electorate: frozenset[PeerId]
    votes: frozenset[PeerId]
    until: float

    @property
    def won(self) -> bool:
        return len(self.votes) * 2 > len(self.electorate)


class Election(NamedTuple):
    """State of one peer; a named tuple as `members.Membership` is.

    term: the highest seen. voted: the newest vote given. heard_at: when the coordinator spoke to us itself, -inf before.
    patience_until: until then it may stay silent. vacant_since: from when on the places in the queue of candidates count.
    fallen: the highest token found silent. rumour_at: when we last asked one that is no higher whether it coordinates.
    """

    me: PeerId
    started_at: float
    vacant_since: float
    term: int = 0
    voted: Token | None = None
    coordinator: Token | None = None
    heard_at: float = -math.inf
    patience_until: float = 0.0
    fallen: Token | None = None
    candidacy: Candidacy | None = None
    ticked_at: float | None = None
    rumour_at: float = -math.inf

    @property
    def coordinating(self) -> bool:
        return self.coordinator is not None and self.coordinator.peer == self.me


def begin(me: PeerId, now: float, settings: SwarmSettings) -> Election:
    """The state of a peer that has just started: quiet, because it does not know how it voted before."""
    return Election(me=me, started_at=now, vacant_since=now + settings.quiet_s)


@dataclass(frozen=True, slots=True)
class HeardCoordinator:
    """The holder of the token said itself that it coordinates."""

    token: Token


@dataclass(frozen=True, slots=True)
class ToldOfCoordinator:
    """Somebody else says so. `alive`: it refused us its vote because it hears that coordinator."""

    token: Token
    alive: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorGone:
    """That peer left, says that it does not coordinate, or is reached by nobody."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class VoteAsked:
    candidate: Token


@dataclass(frozen=True, slots=True)
class VoteAnswered:
    voter: PeerId
    term: int
    granted: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. `others`: peers heard lately, without us. `rank`: our place among the candidates, 0 first."""

    others: frozenset[PeerId]
    rank: int


Event = HeardCoordinator | ToldOfCoordinator | CoordinatorGone | VoteAsked | VoteAnswered | Tick


@dataclass(frozen=True, slots=True)
class AskVotes:
    term: int
    voters: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class AnswerVote:
    """`term` is the one voted in, or the highest we know when refused; `alive` the coordinator we hear."""

    candidate: PeerId
    term: int
    granted: bool
    reason: str
    alive: Token | None


@dataclass(frozen=True, slots=True)
class Elected:
    """We coordinate now: tell everybody."""

    token: Token


@dataclass(frozen=True, slots=True)
class Followed:
    token: Token


@dataclass(frozen=True, slots=True)
class Rumoured:
    """Others say that it coordinates, and we follow nobody: ask it itself."""

    token: Token


@dataclass(frozen=True, slots=True)
class SteppedDown:
    token: Token
    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    token: Token
    reason: str


Action = AskVotes | AnswerVote | Elected | Followed | Rumoured | SteppedDown | Lost
Step = tuple[Election, tuple[Action, ...]]


def step(state: Election, event: Event, now: float, settings: SwarmSettings) -> Step:
    """The next state, and what the runner has to do."""
    match event:
        case HeardCoordinator(token) | ToldOfCoordinator(token) if not _credible(state, token.term):
            return state, ()
        case VoteAsked(candidate) if not _credible(state, candidate.term):
            reason = f"term {candidate.term} is far beyond {state.term}"
            return state, (AnswerVote(candidate.peer, state.term, False, reason, _alive(state, now, settings)),)
        case VoteAnswered(_, term, _) if not _credible(state, term):
            return state, ()
        case HeardCoordinator(token):
            return _heard(state, token, now, settings)
        case ToldOfCoordinator(token, alive):
            return _told(state, token, alive, now, settings)
        case CoordinatorGone(peer):
            return _gone(state, peer, now, settings)
        case VoteAsked(candidate):
            return _vote(state, candidate, now, settings)
        case VoteAnswered(voter, term, granted):
            return _count(state, voter, term if granted else 0, max(state.term, term), now)
        case Tick(others, rank):
            return _tick(state, others, rank, now, settings)
        case _:
            assert_never(event)


def _credible(state: Election, term: int) -> bool:
    return state.term == 0 or term <= state.term + MAX_LEAP


def _heard(state: Election, token: Token, now: float, settings: SwarmSettings) -> Step:
    state = state._replace(term=max(state.term, token.term))
    if token.peer == state.me or (state.coordinator is not None and token < state.coordinator):
        return state, ()
    state, actions = _follow(state, token)
    return state._replace(heard_at=now, patience_until=now + settings.suspect_after_s), actions


def _told(state: Election, token: Token, alive: bool, now: float, settings: SwarmSettings) -> Step:
    state = state._replace(term=max(state.term, token.term))
    if token.peer == state.me or (state.coordinator is not None and token <= state.coordinator):
        return state, ()
    if not alive and state.fallen is not None and token <= state.fallen:
        return _rumoured(state, token, now, settings)
    state, actions = _follow(state, token)
    # Hearsay earns patience, but no vote is refused because of it: else two peers could talk each other out of an election.
    return state._replace(heard_at=-math.inf, patience_until=now + settings.suspect_after_s), actions


def _rumoured(state: Election, token: Token, now: float, settings: SwarmSettings) -> Step:
    """After a partition, ours may have had later terms than the one that all others here follow."""
    if state.coordinator is not None or now - state.rumour_at < settings.beat_s:
        return state, ()
    return state._replace(rumour_at=now), (Rumoured(token),)


def _follow(state: Election, token: Token) -> Step:
    if state.coordinator == token:
        return state, ()
    actions: tuple[Action, ...] = (Followed(token),)
    if state.coordinator is not None and state.coordinating:
        actions = (SteppedDown(state.coordinator, f"{token.peer} coordinates in term {token.term}"), *actions)
    return state._replace(coordinator=token, candidacy=None), actions


def _gone(state: Election, peer: PeerId, now: float, settings: SwarmSettings) -> Step:
    if state.coordinator is None or state.coordinator.peer != peer or state.coordinating:
        return state, ()
    return _lose(state, "it left, does not coordinate any more, or nobody reaches it", now, settings)


def _lose(state: Election, reason: str, now: float, settings: SwarmSettings) -> Step:
    token = state.coordinator
    if token is None:
        return state, ()
    again = state.fallen is not None and token <= state.fallen
    fallen = state.fallen if again else token
    held_back_s = HELD_BACK_STAGGERS * settings.stagger_s if again else 0.0
    vacant_since = max(now + held_back_s, state.started_at + settings.quiet_s)
    return state._replace(coordinator=None, fallen=fallen, vacant_since=vacant_since), (Lost(token, reason),)


def _vote(state: Election, candidate: Token, now: float, settings: SwarmSettings) -> Step:
    reason = _why_no_vote(state, candidate, now, settings)
    if reason is not None:
        state = state._replace(term=max(state.term, candidate.term))
        return state, (AnswerVote(candidate.peer, state.term, False, reason, _alive(state, now, settings)),)
    state = state._replace(
        term=candidate.term,
        voted=candidate,
        candidacy=None,
        vacant_since=max(state.vacant_since, now + settings.vote_s),
    )
    return state, (AnswerVote(candidate.peer, candidate.term, True, "yours", None),)


def _why_no_vote(state: Election, candidate: Token, now: float, settings: SwarmSettings) -> str | None:
    if now < state.started_at + settings.quiet_s:
        return "started a moment ago and may have voted before"
    alive = _alive(state, now, settings)
    if alive is not None and alive.peer != candidate.peer:
        return f"{alive.peer} coordinates and is heard"
    if candidate.term < state.term:
        return f"term {candidate.term} is over, {state.term} is the newest"
    if state.voted is not None and state.voted.term >= candidate.term and state.voted != candidate:
        return f"voted for {state.voted.peer} in term {state.voted.term}"
    return None


def _alive(state: Election, now: float, settings: SwarmSettings) -> Token | None:
    """The coordinator, if it spoke to us itself within the suspect time."""
    if state.coordinating or now - state.heard_at <= settings.suspect_after_s:
        return state.coordinator
    return None


def _count(state: Election, voter: PeerId, granted_term: int, newest_term: int, now: float) -> Step:
    state = state._replace(term=newest_term)
    standing = state.candidacy
    if standing is None or granted_term != standing.term or voter not in standing.electorate or now > standing.until:
        return state, ()
    return _win_or_wait(state._replace(candidacy=replace(standing, votes=standing.votes | {voter})))


def _win_or_wait(state: Election) -> Step:
    standing = state.candidacy
    if standing is None or not standing.won:
        return state, ()
    token = Token(standing.term, state.me)
    return state._replace(coordinator=token, candidacy=None), (Elected(token),)


def _tick(state: Election, others: frozenset[PeerId], rank: int, now: float, settings: SwarmSettings) -> Step:
    late = state.ticked_at is not None and now - state.ticked_at > settings.suspect_after_s / 2
    state = state._replace(ticked_at=now)
    if state.coordinating:
        return state, ()
    if late:
        # We slept: what the coordinator said meanwhile may lie unread, so it gets one more suspect time.
        state = state._replace(patience_until=now + settings.suspect_after_s, vacant_since=max(state.vacant_since, now))
        return state, ()
    if state.coordinator is not None:
        if now <= state.patience_until:
            return state, ()
        return _lose(state, f"not heard for {settings.suspect_after_s:g} s", now, settings)
    return _stand(state, others, rank, now, settings)


def _lot_s(state: Election, settings: SwarmSettings) -> float:
    """How long to hold back after a candidacy in vain, by lot: two that stand at the same moments would do so for ever."""
    lot = hashlib.blake2b(f"{state.me}/{state.term}".encode(), digest_size=4).digest()
    return int.from_bytes(lot) / (1 << 32) * LOT_STAGGERS * settings.stagger_s


def _stand(state: Election, others: frozenset[PeerId], rank: int, now: float, settings: SwarmSettings) -> Step:
    """Without a coordinator: give up a candidacy that took too long, or become a candidate when it is our turn."""
    if state.candidacy is not None:
        if now < state.candidacy.until:
            return state, ()
        state = state._replace(candidacy=None, vacant_since=now + _lot_s(state, settings))
    if now < state.vacant_since + rank * settings.stagger_s:
        return state, ()
    if state.term >= MAX_TERM:
        state = state._replace(term=0, voted=None, fallen=None)
    token = Token(state.term + 1, state.me)
    standing = Candidacy(token.term, others | {state.me}, frozenset({state.me}), now + settings.vote_s)
    state, won = _win_or_wait(state._replace(term=token.term, voted=token, candidacy=standing))
    return state, won or (AskVotes(token.term, others),)
