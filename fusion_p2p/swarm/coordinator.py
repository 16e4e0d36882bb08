"""Which job gets which peers, and when: the coordinator's decisions, without I/O. Its state is soft: owners register again.

    registered --Look--> waiting(reason)  until enough peers are free
                         planning         the runner fetches the graph and calls the scheduler
                         proposed         the owner has the plan; its peers are kept for it until they hold its slices

Jobs are served in the order of registration: a later one waits while an earlier one waits for peers, but not while the
earlier one has no plan that fits. With `peers` a job is planned as soon as so many are free, otherwise when nobody new came for
`settle_s`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, assert_never

from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.swarm.settings import SwarmSettings

MAX_JOBS = 64


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
    """What an owner asks for: so many peers, or all that are free."""

    job: JobId
    owner: PeerId
    incarnation: int
    peers: int | None


@dataclass(frozen=True, slots=True)
class Job:
    """A registered job. `failed_with` are the peers for which there was no plan; `peers` those of the newest plan."""

    wish: Wish
    phase: Literal["waiting", "planning", "proposed"] = "waiting"
    reason: str = "registered"
    failed_with: frozenset[PeerId] = frozenset()
    peers: frozenset[PeerId] = frozenset()
    kept_until: float = 0.0


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
class OwnerGone:
    job: JobId


Event = Registered | Look | Planned | NotPlanned | OwnerGone


@dataclass(frozen=True, slots=True)
class Wait:
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


Action = Wait | MakePlan | Refuse
Step = tuple[Jobs, tuple[Action, ...]]


def step(state: Jobs, event: Event, now: float, settings: SwarmSettings) -> Step:
    """The next state, and what to tell or do for the job of the event."""
    match event:
        case Registered(wish):
            return _register(state, wish)
        case Look():
            return _look(_without_finished(state, event.seats, now), event, now, settings)
        case Planned(job, peers):
            return _planned(state, job, peers, now + settings.reserve_s), ()
        case NotPlanned(job, reason, lasting):
            return _not_planned(state, job, reason, lasting)
        case OwnerGone(job):
            return replace(state, jobs={other: entry for other, entry in state.jobs.items() if other != job}), ()
        case _:
            assert_never(event)


def _register(state: Jobs, wish: Wish) -> Step:
    known = state.jobs.get(wish.job)
    if known is None and len(state.jobs) >= MAX_JOBS:
        return state, (Refuse(wish.job, f"{MAX_JOBS} jobs are registered already"),)
    if known is not None and wish.owner != known.wish.owner:
        return state, (Refuse(wish.job, "this job is registered by another owner"),)
    return replace(state, jobs={**state.jobs, wish.job: Job(wish)}), ()


def _look(state: Jobs, event: Look, now: float, settings: SwarmSettings) -> Step:
    entry = state.jobs.get(event.job)
    if entry is None:
        return state, (Refuse(event.job, "this job is not registered"),)
    decision = _decide(state, entry, event, now, settings)
    if isinstance(decision, str):
        return _with(state, replace(entry, phase="waiting", reason=decision)), (Wait(event.job, decision),)
    chosen = tuple(seat.peer for seat in decision)
    planning = replace(entry, phase="planning", reason=f"planning with {_peers(len(chosen))}", peers=frozenset(chosen))
    return _with(state, planning), (MakePlan(event.job, chosen, _left_out(state, entry, event.seats, chosen)),)


def _decide(state: Jobs, entry: Job, event: Look, now: float, settings: SwarmSettings) -> str | Sequence[Seat]:
    """The peers to plan with, fastest first, or the reason to wait."""
    wish = entry.wish
    earlier = _served_first(state, wish.job)
    if earlier is not None:
        return f"job {earlier[:8]} registered earlier and is served first"
    free = [seat for seat in event.seats if _why_not(state, wish.job, seat) is None]
    free.sort(key=lambda seat: (-seat.flops_per_s, seat.peer))
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


def _served_first(state: Jobs, job: JobId) -> JobId | None:
    """The earlier job that still waits for peers, if any."""
    for other, entry in state.jobs.items():
        if other == job:
            return None
        if entry.phase != "proposed" and not entry.failed_with:
            return other
    return None


def _why_not(state: Jobs, job: JobId, seat: Seat) -> str | None:
    """Why a peer cannot take a slice of this job."""
    if seat.unusable is not None:
        return seat.unusable
    if seat.holds is not None and seat.holds != job:
        return f"works for job {seat.holds[:8]}"
    for other, entry in state.jobs.items():
        if other != job and seat.peer in entry.peers and entry.phase != "waiting":
            return f"is kept for job {other[:8]}"
    return None


def _left_out(state: Jobs, entry: Job, seats: Iterable[Seat], chosen: Sequence[PeerId]) -> tuple[tuple[PeerId, str], ...]:
    spare = f"the owner asked for {entry.wish.peers} peers only"
    return tuple((seat.peer, _why_not(state, entry.wish.job, seat) or spare) for seat in seats if seat.peer not in chosen)


def _planned(state: Jobs, job: JobId, peers: frozenset[PeerId], kept_until: float) -> Jobs:
    entry = state.jobs.get(job)
    if entry is None:
        return state
    reason = f"a plan over {_peers(len(peers))} was proposed"
    return _with(state, replace(entry, phase="proposed", reason=reason, peers=peers, kept_until=kept_until))


def _not_planned(state: Jobs, job: JobId, reason: str, lasting: bool) -> Step:
    entry = state.jobs.get(job)
    if entry is None:
        return state, ()
    failed_with = entry.peers if lasting else frozenset[PeerId]()
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
