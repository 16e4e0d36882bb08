"""Who is here: incarnations, beats, suspicion confirmed by other observers, eviction and leave (after SWIM and Lifeguard).

Every peer keeps a membership. The coordinator's is first-hand (all beat to it) and it alone suspects and evicts; the others
follow its roster, of which its replies tell them the changes, and forget whom nobody heard lately. An incarnation that was
evicted or left never comes back; a peer that learns of its eviction returns with a higher one.

How long a peer may be silent follows from the gaps between its beats. An observer that was late itself accuses nobody, and one
whose suspicions turned out to be wrong is slower to suspect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import assert_never

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.members import DOUBT_S, Following, Member, Membership
from fusion_p2p.swarm.settings import SwarmSettings

MAX_MEMBERS = 4096
MAX_GONE = 4096
"""Evicted incarnations remembered, and departures told to those who follow the roster; the oldest are forgotten first."""
MAX_DOUBT = 2


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
class RosterTold:
    """The coordinator told what changed on its roster after `since`, up to `version`; since 0: all that is on it.

    complete: nothing has changed since `version`; otherwise the rest follows.
    """

    source: PeerId
    since: int
    version: int
    members: tuple[Listed, ...]
    gone: frozenset[PeerId]
    complete: bool = True


@dataclass(frozen=True, slots=True)
class Confirmed:
    """Another observer reached the suspect."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Denied:
    """Neither a question of our own nor any of the observers that answered reached the suspect."""

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


Event = Heard | Listed | RosterTold | Confirmed | Denied | Left | Tick


@dataclass(frozen=True, slots=True)
class Joined:
    peer: PeerId


@dataclass(frozen=True, slots=True)
class Suspected:
    """Ask this peer directly and through other observers."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Gone:
    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Untold:
    """This coordinator has more on its roster than it has told yet: ask at once."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Ignored:
    """An event that changed nothing, and why."""

    peer: PeerId
    reason: str


Action = Joined | Suspected | Gone | Untold | Ignored
Step = tuple[Membership, tuple[Action, ...]]


def step(state: Membership, event: Event, now: float, settings: SwarmSettings) -> Step:
    """The next state, and what the runner has to do or log."""
    match event:
        case Heard():
            return _heard(state, event, now, settings)
        case Listed():
            return _listed(state, event, now, settings)
        case RosterTold():
            return _roster(state, event, now, settings)
        case Confirmed(peer):
            return _confirmed(state, peer, now)
        case Denied(peer):
            return _denied(state, peer, now)
        case Left(peer, incarnation):
            return _left(state, peer, incarnation)
        case Tick(observing):
            return _tick(state, observing, now, settings)
        case _:
            assert_never(event)


def _heard(state: Membership, event: Heard, now: float, settings: SwarmSettings) -> Step:
    known = state.members.get(event.peer)
    reason = _why_ignored(state, event.peer, event.incarnation)
    if known is not None and known.incarnation != event.incarnation:
        known = None
    if reason is None and known and event.sequence is not None:
        reason = "a later beat came first" if event.sequence <= known.sequence else None
    if reason is not None:
        return state, (Ignored(event.peer, reason),)
    if known is None:
        known = Member(event.incarnation, now, event.holds)
    heard = known._replace(heard_at=now, holds=event.holds, suspected_at=None, told_gone=False)
    if event.sequence is not None:
        heard = _beaten(heard, event.sequence, now, settings)
    return _with_member(_doubting(state, known, now), event.peer, heard)


def _beaten(member: Member, sequence: int, now: float, settings: SwarmSettings) -> Member:
    """The member after a beat: the gap before it counts, but one outage is not taken for the rule."""
    if member.beaten_at is None:
        return member._replace(sequence=sequence, beaten_at=now, gap_s=settings.beat_s)
    gap_s = min(now - member.beaten_at, 2 * settings.suspect_after_s)
    error_s = gap_s - member.gap_s
    return member._replace(
        sequence=sequence,
        beaten_at=now,
        gap_s=member.gap_s + error_s / 8,
        gap_deviation_s=member.gap_deviation_s + (abs(error_s) - member.gap_deviation_s) / 4,
    )


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


def _roster(state: Membership, event: RosterTold, now: float, settings: SwarmSettings) -> Step:
    actions: list[Action] = []
    told = frozenset(listed.peer for listed in event.members)
    alive = told | {event.source}
    if not state.observing and alive & state.gone.keys():
        # Whom we saw go on our side of a partition, the coordinator hears now; or it is the one itself that we saw go.
        state = state._replace(gone={peer: gone for peer, gone in state.gone.items() if peer not in alive})
    for listed in event.members:
        if not state.observing:
            state = _corrected(state, listed, now, settings)
        state, more = _listed(state, listed, now, settings)
        actions += more
    if state.observing:
        return state, tuple(actions)
    state, followed = _followed(state, event, told, now)
    if not followed:
        return state, tuple(actions)
    if not event.complete and state.followed_version(event.source) == event.version:
        actions.append(Untold(event.source))
    told_gone = {peer: state.members[peer]._replace(told_gone=True) for peer in sorted(event.gone & state.members.keys())}
    if not told_gone:
        return state, tuple(actions)
    state, lost = _believe(state._replace(members={**state.members, **told_gone}), now, settings)
    return state, (*actions, *lost)


def _believe(state: Membership, now: float, settings: SwarmSettings) -> Step:
    """Drop whom the coordinator told gone, as soon as we do not hear them either: it may not reach whom we do."""
    heard = now - settings.suspect_after_s
    listed = frozenset[PeerId]() if state.following is None else state.following.peers
    told_gone = [peer for peer, member in state.members.items() if member.told_gone and member.heard_at < heard]
    lost = [peer for peer in told_gone if peer not in listed]
    return _dropped(state, lost), tuple(Gone(peer, "gone, says the coordinator") for peer in lost)


def _corrected(state: Membership, told: Listed, now: float, settings: SwarmSettings) -> Membership:
    """The state without a later incarnation than the coordinator tells of, unless we hear it still.

    A process that lived for a moment and never reached the coordinator, before one that started with an earlier clock.
    """
    known = state.members.get(told.peer)
    if known is None or known.incarnation <= told.incarnation or known.heard_at >= now - settings.suspect_after_s:
        return state
    return _dropped(state, [told.peer])


def _followed(state: Membership, event: RosterTold, told: frozenset[PeerId], now: float) -> tuple[Membership, bool]:
    """The state after these changes of a roster, and whether they fit to what we know of it.

    One that comes in pieces counts when its last piece is here: nobody is forgotten because the pieces before do not name it.
    """
    following, gathering = state.following, state.gathering
    if event.since == 0:
        before, begins = frozenset[PeerId](), True
    elif gathering is not None and (gathering.source, gathering.version) == (event.source, event.since):
        before, begins = gathering.peers, True
    elif following is not None and (following.source, following.version) == (event.source, event.since):
        before, begins = following.peers, False
    else:
        return state, False
    now_known = Following(event.source, event.version, (before - event.gone) | told, now)
    if begins and not event.complete:
        return state._replace(gathering=now_known), True
    return state._replace(following=now_known, gathering=None), True


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
    if known is None or new or known.holds != member.holds:
        state = state._replace(version=state.version + 1)
        member = member._replace(version=state.version)
    else:
        member = member._replace(version=known.version)
    departed = state.departed
    if peer in departed:
        departed = {other: version for other, version in departed.items() if other != peer}
    return state._replace(members={**state.members, peer: member}, departed=departed), ((Joined(peer),) if new else ())


def _confirmed(state: Membership, peer: PeerId, now: float) -> Step:
    known = state.members.get(peer)
    if known is None:
        return state, (Ignored(peer, "confirmed too late"),)
    state = _doubting(state, known, now)
    heard = known._replace(heard_at=now, suspected_at=None, told_gone=False)
    return state._replace(members={**state.members, peer: heard}), ()


def _doubting(state: Membership, alive: Member, now: float) -> Membership:
    """The state after this member was found to be alive: who suspected it has reason to doubt itself."""
    if alive.suspected_at is None:
        return state
    doubt = state.doubt if now - state.doubted_at < DOUBT_S else 0
    return state._replace(doubt=min(doubt + 1, MAX_DOUBT), doubted_at=now)


def _denied(state: Membership, peer: PeerId, now: float) -> Step:
    known = state.members.get(peer)
    if known is None or known.suspected_at is None:
        return state, (Ignored(peer, "it is not suspected any more"),)
    reason = f"not heard for {now - known.heard_at:.1f} s, and nobody reaches it"
    return _without(state, peer, known.incarnation), (Gone(peer, reason),)


def _left(state: Membership, peer: PeerId, incarnation: int) -> Step:
    known = state.members.get(peer)
    if known is not None and incarnation < known.incarnation:
        return state, (Ignored(peer, "an older incarnation left"),)
    return _without(state, peer, incarnation), ((Gone(peer, "left"),) if known else ())


def _without(state: Membership, peer: PeerId, incarnation: int) -> Membership:
    """The state in which this incarnation is gone for good."""
    gone = {**state.gone, peer: max(incarnation, state.gone.get(peer, -1))}
    while len(gone) > MAX_GONE:
        gone.pop(next(iter(gone)))
    return _dropped(state._replace(gone=gone), [peer])


def _dropped(state: Membership, peers: Iterable[PeerId]) -> Membership:
    """The state without these members, and with their departure on the roster."""
    dropped = dict.fromkeys(peer for peer in peers if peer in state.members)
    if not dropped:
        return state
    since, version = state.departed_since, state.version + len(dropped)
    departed = {**state.departed, **{peer: state.version + place for place, peer in enumerate(dropped, 1)}}
    while len(departed) > MAX_GONE:
        since = departed.pop(next(iter(departed)))
    members = {peer: member for peer, member in state.members.items() if peer not in dropped}
    return state._replace(members=members, version=version, departed=departed, departed_since=since)


def _tick(state: Membership, observing: bool, now: float, settings: SwarmSettings) -> Step:
    late = state.ticked_at is not None and now - state.ticked_at > settings.suspect_after_s / 2
    begins = observing and not state.observing
    forgotten: tuple[Action, ...] = ()
    if begins and not late:  # hearsay that is too old by now would otherwise be excused as well
        state, forgotten = _forget(state, now, settings)
    state = state._replace(ticked_at=now, observing=observing)
    if begins:
        state = state._replace(following=None, gathering=None)
    if late or begins:
        # We slept, so their beats may lie unread; or they have not begun to beat to us. Either way nobody is accused yet.
        return state._replace(members={peer: _excused(member, now) for peer, member in state.members.items()}), forgotten
    return _accuse(state, now, settings) if observing else _forget(state, now, settings)


def _excused(member: Member, now: float) -> Member:
    return member._replace(heard_at=now, suspected_at=None, beaten_at=None)


def _accuse(state: Membership, now: float, settings: SwarmSettings) -> Step:
    """Suspect the silent, evict those that stayed silent until nobody could confirm them."""
    actions: list[Action] = []
    for peer, member in tuple(state.members.items()):
        silent_s = now - member.heard_at
        if silent_s <= settings.suspect_after_s:
            continue
        if member.suspected_at is None and silent_s > state.patience_s(member, now, settings):
            state = state._replace(members={**state.members, peer: member._replace(suspected_at=now)})
            actions.append(Suspected(peer))
        elif member.suspected_at is not None and now - member.suspected_at > settings.confirm_s:
            state = _without(state, peer, member.incarnation)
            actions.append(Gone(peer, f"not heard for {silent_s:.1f} s by us or a second observer"))
    return state, tuple(actions)


def _forget(state: Membership, now: float, settings: SwarmSettings) -> Step:
    state, believed = _believe(state, now, settings)
    earliest = now - settings.heard_lately_s
    rosters = [known for known in (state.following, state.gathering) if known is not None and known.heard_at >= earliest]
    lost = [peer for peer, member in state.members.items() if member.heard_at < earliest]
    for known in rosters:
        lost = [peer for peer in lost if peer not in known.peers]
    return _dropped(state, lost), (*believed, *(Gone(peer, "not heard lately by anybody") for peer in lost))
