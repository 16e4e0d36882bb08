"""Which job gets which peers, and when: the coordinator's decisions, without I/O. Its state is soft: owners register again.

    registered --Look--> waiting(reason)  until enough peers are free
                         planning         the runner fetches the graph and calls the scheduler
                         proposed         the owner has the plan; its peers are kept for it until they hold its slices

Jobs are served in the order of registration: a later one waits while an earlier one waits for peers, but not while the
earlier one has no plan that fits. With `peers` a job is planned as soon as so many are free, otherwise when nobody new came for
`settle_s`.

A job that lost peers asks to be *mended*: it is served before those that merely wait, at once, with whoever is here. One that
runs may ask for something *better*: it stays as it is while others wait for peers, and keeps what it has meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.swarm.settings import SwarmSettings

MAX_JOBS = 64
MOST_SPARES = 64
"""Peers among which substitutes are looked for: those with copies first, then the fastest."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A peer as the coordinator sees it now. `unusable`: why it cannot take a slice, whatever the job."""

    peer: PeerId
    joined_at: float
    flops_per_s: float
    holds: JobId | None
    unusable: str | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """What an owner asks for: so many peers, or all that are free.

    without: peers that it cannot or will not use (any more). guards: those that keep copies of its slices.
    """

    job: JobId
    owner: PeerId
    incarnation: int
    peers: int | None
    purpose: Literal["begin", "mend", "improve"] = "begin"
    without: frozenset[PeerId] = frozenset()
    guards: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class Job:
    """A registered job. `failed_with` are the peers for which there was no plan; `peers` those of the newest plan.

    trying: peers kept for it while something better is looked for.
    """

    wish: Wish
    phase: Literal["waiting", "planning", "proposed"] = "waiting"
    reason: str = "registered"
    failed_with: frozenset[PeerId] | None = None
    peers: frozenset[PeerId] = frozenset()
    kept_until: float = 0.0
    trying: frozenset[PeerId] = frozenset()

    @property
    def wants_peers(self) -> bool:
        """Whether it waits for peers that would help it."""
        return self.phase != "proposed" and self.failed_with is None


@dataclass(frozen=True, slots=True)
class Jobs:
    """State: the jobs in the order of registration."""

    jobs: Mapping[JobId, Job] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Registered:
    wish: Wish


@dataclass(frozen=True, slots=True)
class Look:
    """Decide for one job. `since`: when we began to coordinate."""

    job: JobId
    seats: tuple[Seat, ...]
    since: float


@dataclass(frozen=True, slots=True)
class Planned:
    job: JobId
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class NotPlanned:
    """`lasting`: the same peers would give the same answer."""

    job: JobId
    reason: str
    lasting: bool


@dataclass(frozen=True, slots=True)
class NotImproved:
    """Nothing better was found for a job that runs."""

    job: JobId


@dataclass(frozen=True, slots=True)
class OwnerGone:
    job: JobId


Event = Registered | Look | Planned | NotPlanned | NotImproved | OwnerGone


@dataclass(frozen=True, slots=True)
class Wait:
    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class Stay:
    """A job that runs is left as it is, and why."""

    job: JobId
    reason: str


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan with these peers; `left_out` are the others with their reasons."""

    job: JobId
    peers: tuple[PeerId, ...]
    left_out: tuple[tuple[PeerId, str], ...]


@dataclass(frozen=True, slots=True)
class Refuse:
    job: JobId
    reason: str


Action = Wait | Stay | MakePlan | Refuse
Step = tuple[Jobs, tuple[Action, ...]]


def step(state: Jobs, event: Event, now: float, settings: SwarmSettings) -> Step:
    """The next state, and what to tell or do for the job of the event."""
    match event:
        case Registered(wish):
            return _register(state, wish, now + settings.reserve_s)
        case Look():
            return _look(_without_finished(state, event.seats, now), event, now, settings)
        case Planned(job, peers):
            return _planned(state, job, peers, now + settings.reserve_s), ()
        case NotPlanned(job, reason, lasting):
            return _not_planned(state, job, reason, lasting)
        case NotImproved(job):
            entry = state.jobs.get(job)
            return state if entry is None else _with(state, replace(entry, trying=frozenset())), ()
        case OwnerGone(job):
            return replace(state, jobs={other: entry for other, entry in state.jobs.items() if other != job}), ()
        case _:
            assert_never(event)


def _register(state: Jobs, wish: Wish, kept_until: float) -> Step:
    known = state.jobs.get(wish.job)
    if known is None and len(state.jobs) >= MAX_JOBS:
        return state, (Refuse(wish.job, f"{MAX_JOBS} jobs are registered already"),)
    if known is not None and wish.owner != known.wish.owner:
        return state, (Refuse(wish.job, "this job is registered by another owner"),)
    if wish.purpose != "improve":
        return _with(state, Job(wish)), ()
    if known is not None and known.phase == "proposed":
        return _with(state, replace(known, wish=wish, trying=frozenset())), ()
    running = Job(wish, phase="proposed", reason="it runs on a plan made before", kept_until=kept_until)
    return _with(state, running), ()


def _look(state: Jobs, event: Look, now: float, settings: SwarmSettings) -> Step:
    entry = state.jobs.get(event.job)
    if entry is None:
        return state, (Refuse(event.job, "this job is not registered"),)
    if entry.wish.purpose == "improve":
        return _improve(state, entry, event, now)
    mending = entry.wish.purpose == "mend"
    decision = _substitutes(state, entry, event, now, settings) if mending else _decide(state, entry, event, now, settings)
    if isinstance(decision, str):
        return _with(state, replace(entry, phase="waiting", reason=decision)), (Wait(event.job, decision),)
    chosen = tuple(seat.peer for seat in decision)
    planning = replace(entry, phase="planning", reason=f"planning with {_peers(len(chosen))}", peers=frozenset(chosen))
    return _with(state, planning), (MakePlan(event.job, chosen, _left_out(state, entry, event.seats, chosen, now)),)


def _improve(state: Jobs, entry: Job, event: Look, now: float) -> Step:
    """Look for something better with all that are free or its own, unless others need them."""
    job = event.job
    wanting = next((other for other, waiting in state.jobs.items() if other != job and waiting.wants_peers), None)
    if wanting is not None:
        return state, (Stay(job, f"job {wanting[:8]} waits for peers and is served first"),)
    chosen = tuple(seat.peer for seat in _by_speed(_free(state, entry.wish, event.seats, now)))
    if len(chosen) < (entry.wish.peers or 0):
        return state, (Stay(job, f"{entry.wish.peers} peers wanted: {_peers(len(chosen))} free or its own"),)
    trying = _with(state, replace(entry, trying=frozenset(chosen)))
    return trying, (MakePlan(job, chosen, _left_out(state, entry, event.seats, chosen, now)),)


def _substitutes(state: Jobs, entry: Job, event: Look, now: float, settings: SwarmSettings) -> str | Sequence[Seat]:
    """Its own peers and those that could take a slice, or why the same ones are not asked again."""
    own: list[Seat] = []
    others: list[Seat] = []
    for seat in _by_speed(_free(state, entry.wish, event.seats, now)):
        (own if seat.holds == entry.wish.job else others).append(seat)
    others.sort(key=lambda seat: seat.peer not in entry.wish.guards)
    chosen = [*own, *others[:MOST_SPARES]]
    if now - event.since < settings.beat_s / 2 and entry.wish.guards.isdisjoint(seat.peer for seat in chosen):
        return "elected a moment ago: who is here reports within a second"
    return entry.reason if frozenset(seat.peer for seat in chosen) == entry.failed_with else chosen


def _decide(state: Jobs, entry: Job, event: Look, now: float, settings: SwarmSettings) -> str | Sequence[Seat]:
    """The peers to plan with, fastest first, or the reason to wait."""
    wish = entry.wish
    earlier = _served_first(state, wish.job, event.seats, now)
    if earlier is not None:
        return earlier
    free = _by_speed(_free(state, wish, event.seats, now))
    here = f"{_peers(len(free))} free, {len(event.seats) - len(free)} busy or unfit"
    if wish.peers is not None and len(free) < wish.peers:
        return f"{wish.peers} peers wanted: {here}"
    if not free:
        return f"nobody can take a slice: {here}"
    newest = max(event.since, *(seat.joined_at for seat in free))
    if wish.peers is None and now - newest < settings.settle_s:
        return f"{_peers(len(free))} here, until nobody new has come for {settings.settle_s:g} s"
    chosen = free[: wish.peers]
    return entry.reason if frozenset(seat.peer for seat in chosen) == entry.failed_with else chosen


def _served_first(state: Jobs, job: JobId, seats: Sequence[Seat], now: float) -> str | None:
    """The job that is served before this one, if any: one to be mended, or an earlier one that waits for peers."""
    for other, entry in state.jobs.items():
        if other != job and _may_be_mended(state, entry, seats, now):
            return f"job {other[:8]} has lost peers and is served first"
    for other, entry in state.jobs.items():
        if other == job:
            return None
        if entry.wants_peers:
            return f"job {other[:8]} registered earlier and is served first"
    return None


def _may_be_mended(state: Jobs, entry: Job, seats: Sequence[Seat], now: float) -> bool:
    """Whether a job waits to be mended and somebody is here with whom that was not tried."""
    if entry.wish.purpose != "mend" or entry.phase == "proposed":
        return False
    here = {seat.peer for seat in _free(state, entry.wish, seats, now)}
    return entry.failed_with is None or not here <= entry.failed_with


def _free(state: Jobs, wish: Wish, seats: Iterable[Seat], now: float) -> list[Seat]:
    return [seat for seat in seats if _why_not(state, wish, seat, now) is None]


def _by_speed(seats: Iterable[Seat]) -> list[Seat]:
    return sorted(seats, key=lambda seat: (-seat.flops_per_s, seat.peer))


def _why_not(state: Jobs, wish: Wish, seat: Seat, now: float) -> str | None:
    """Why a peer cannot take a slice of this job."""
    if seat.peer in wish.without:
        return "is lost, leaves, or failed in this job"
    if seat.unusable is not None:
        return seat.unusable
    if seat.holds is not None and seat.holds != wish.job:
        return f"works for job {seat.holds[:8]}"
    keeper = kept_for(state, seat.peer, now)
    return None if keeper is None or keeper == wish.job else f"is kept for job {keeper[:8]}"


def kept_for(state: Jobs, peer: PeerId, now: float) -> JobId | None:
    """The job that is planned with this peer, or has a plan with it and is given time to begin there."""
    for job, entry in state.jobs.items():
        planned = entry.phase == "planning" or (entry.phase == "proposed" and now < entry.kept_until)
        if (planned and peer in entry.peers) or peer in entry.trying:
            return job
    return None


def _left_out(
    state: Jobs, entry: Job, seats: Iterable[Seat], chosen: Sequence[PeerId], now: float
) -> tuple[tuple[PeerId, str], ...]:
    spare = f"the owner asked for {entry.wish.peers} peers only" if entry.wish.peers else "others come first"
    taken = frozenset(chosen)
    return tuple((seat.peer, _why_not(state, entry.wish, seat, now) or spare) for seat in seats if seat.peer not in taken)


def _planned(state: Jobs, job: JobId, peers: frozenset[PeerId], kept_until: float) -> Jobs:
    entry = state.jobs.get(job)
    if entry is None:
        return state
    reason = f"a plan over {_peers(len(peers))} was proposed"
    planned = replace(entry, phase="proposed", reason=reason, peers=peers, kept_until=kept_until, trying=frozenset())
    return _with(state, planned)


def _not_planned(state: Jobs, job: JobId, reason: str, lasting: bool) -> Step:
    entry = state.jobs.get(job)
    if entry is None:
        return state, ()
    failed_with = entry.peers if lasting else None
    waiting = replace(entry, phase="waiting", reason=reason, failed_with=failed_with, peers=frozenset())
    return _with(state, waiting), (Wait(job, reason),)


def _without_finished(state: Jobs, seats: Iterable[Seat], now: float) -> Jobs:
    """Forget proposed jobs whose peers were kept long enough and hold nothing of it."""
    held = {seat.holds for seat in seats}
    kept = {
        job: entry for job, entry in state.jobs.items() if entry.phase != "proposed" or now < entry.kept_until or job in held
    }
    return replace(state, jobs=kept)


def _with(state: Jobs, entry: Job) -> Jobs:
    return replace(state, jobs={**state.jobs, entry.wish.job: entry})


def _peers(count: int) -> str:
    return "1 peer" if count == 1 else f"{count} peers"
