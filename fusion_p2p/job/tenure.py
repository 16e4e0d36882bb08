"""What a peer has promised to whom: at most one job at a time; pure.

    IDLE --Asked--> BUILDING --Built--> PREPARED --StartAsked--> RUNNING
      a refusal, an abort, a stop, or an owner silent for too long leads back to IDLE

The same owner may ask again at any time with a higher (incarnation, epoch): that replaces what was promised before. A running
epoch goes on while its successor is prepared *beside* it, until that is started:

    RUNNING e --Asked(e + 1, beside)--> BUILDING e + 1 --Built--> PREPARED e + 1 --StartAsked--> RUNNING e + 1
      a refusal or an abort of e + 1 leads back to RUNNING e
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from fusion_p2p.ids import JobId, PeerId

OWNER_SILENT_S = 30.0
"""A peer keeps a run's slices at work this long without a word from the owner; then it is free for others, and keeps copies."""


class Phase(Enum):
    IDLE = "idle"
    BUILDING = "building"
    PREPARED = "prepared"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Claim:
    """Who asks for what: one epoch of one incarnation of one job."""

    owner: PeerId
    job: JobId
    incarnation: int
    epoch: int

    @property
    def age(self) -> tuple[int, int]:
        return (self.incarnation, self.epoch)


@dataclass(frozen=True, slots=True)
class Tenure:
    """The newest claim that is being served, and until when its owner may be silent.

    running: the epoch that goes on while `claim` is prepared beside it.
    """

    phase: Phase = Phase.IDLE
    claim: Claim | None = None
    deadline: float = 0.0
    running: Claim | None = None

    @property
    def claims(self) -> tuple[Claim, ...]:
        """All claims that something is held for, oldest first."""
        return tuple(claim for claim in (self.running, self.claim) if claim is not None)


@dataclass(frozen=True, slots=True)
class Asked:
    """An owner asks to prepare an epoch; like everything promised, that lapses when the owner falls silent.

    beside: an earlier epoch of the same incarnation that runs here goes on meanwhile.
    """

    claim: Claim
    beside: bool = False


@dataclass(frozen=True, slots=True)
class Built:
    claim: Claim


@dataclass(frozen=True, slots=True)
class BuildFailed:
    claim: Claim
    reason: str


@dataclass(frozen=True, slots=True)
class StartAsked:
    claim: Claim


@dataclass(frozen=True, slots=True)
class Ended:
    """The owner aborts the epoch or stops the job."""

    claim: Claim
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """Any word from the owner."""

    owner: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Asked | Built | BuildFailed | StartAsked | Ended | Heard | Tick


@dataclass(frozen=True, slots=True)
class Build:
    """Fetch graph and plan, check them, and allocate the slices."""

    claim: Claim


@dataclass(frozen=True, slots=True)
class SayPrepared:
    claim: Claim


@dataclass(frozen=True, slots=True)
class SayRefused:
    claim: Claim
    reason: str


@dataclass(frozen=True, slots=True)
class Begin:
    """Run the slices, unless they run already, and say Started."""

    claim: Claim
    again: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """Forget everything about this claim.

    keep: its owner did not say so, and may come back: copies of its states stay.
    """

    claim: Claim
    reason: str
    keep: bool = False


@dataclass(frozen=True, slots=True)
class GoOn:
    """The epoch that ran on while its successor was prepared is not followed by it."""

    claim: Claim


Action = Build | SayPrepared | SayRefused | Begin | Drop | GoOn


def step(state: Tenure, event: Event, now: float) -> tuple[Tenure, tuple[Action, ...]]:
    """The next state and what to do; `now` in seconds of a monotonic clock."""
    match event:
        case Asked():
            return _asked(state, event, now)
        case Built(claim):
            return _built(state, claim)
        case BuildFailed(claim, reason):
            return (_without(state), (SayRefused(claim, reason), *_going_on(state))) if claim == state.claim else (state, ())
        case StartAsked(claim):
            return _start(state, claim, now)
        case Ended(claim, reason):
            return _ended(state, claim, reason)
        case Heard(owner):
            return _heard(state, owner, now)
        case Tick():
            return _tick(state, now)


def _asked(state: Tenure, event: Asked, now: float) -> tuple[Tenure, tuple[Action, ...]]:
    held, asked = state.claim, event.claim
    if held == asked:
        return state, (SayPrepared(asked),) if state.phase in (Phase.PREPARED, Phase.RUNNING) else ()
    if held is not None and (held.owner, held.job) != (asked.owner, asked.job):
        return state, (SayRefused(asked, f"serving another job ({held.job[:8]})"),)
    if held is not None and asked.age <= held.age:
        return state, (SayRefused(asked, f"serving incarnation {held.incarnation}, epoch {held.epoch} already"),)
    deadline = now + OWNER_SILENT_S
    current = state.claim if state.phase is Phase.RUNNING else state.running
    if event.beside and current is not None and current.incarnation == asked.incarnation:
        outdated = _dropped((held,) if held is not None and held != current else (), "replaced by a newer epoch")
        return Tenure(Phase.BUILDING, asked, deadline, current), (*outdated, Build(asked))
    return Tenure(Phase.BUILDING, asked, deadline), (
        *_dropped(state.claims, "replaced by a newer epoch", keep=True),
        Build(asked),
    )


def _dropped(claims: Iterable[Claim], reason: str, *, keep: bool = False) -> tuple[Drop, ...]:
    return tuple(Drop(claim, reason, keep) for claim in claims)


def _going_on(state: Tenure) -> tuple[GoOn, ...]:
    return () if state.running is None else (GoOn(state.running),)


def _without(state: Tenure) -> Tenure:
    """The newest claim is given up; what runs beside it goes on."""
    return Tenure() if state.running is None else Tenure(Phase.RUNNING, state.running, state.deadline)


def _built(state: Tenure, claim: Claim) -> tuple[Tenure, tuple[Action, ...]]:
    if claim != state.claim or state.phase is not Phase.BUILDING:
        return state, ()
    return replace(state, phase=Phase.PREPARED), (SayPrepared(claim),)


def _start(state: Tenure, claim: Claim, now: float) -> tuple[Tenure, tuple[Action, ...]]:
    if claim == state.running:
        return state, (Begin(claim, again=True),)
    if claim != state.claim or state.phase not in (Phase.PREPARED, Phase.RUNNING):
        return state, (SayRefused(claim, "this epoch was not prepared here"),)
    over = _dropped(state.claims[:-1], "followed by a newer epoch")
    again = state.phase is Phase.RUNNING
    return Tenure(Phase.RUNNING, claim, now + OWNER_SILENT_S), (*over, Begin(claim, again))


def _ended(state: Tenure, claim: Claim, reason: str) -> tuple[Tenure, tuple[Action, ...]]:
    held = state.claim
    if held is None or (held.owner, held.job) != (claim.owner, claim.job):
        return state, ()
    if claim == state.running:
        return Tenure(), _dropped(state.claims, reason)
    if claim.age < held.age:
        return state, ()
    return _without(state), (Drop(held, reason), *_going_on(state))


def _heard(state: Tenure, owner: PeerId, now: float) -> tuple[Tenure, tuple[Action, ...]]:
    if state.claim is None or state.claim.owner != owner:
        return state, ()
    return replace(state, deadline=max(state.deadline, now + OWNER_SILENT_S)), ()


def _tick(state: Tenure, now: float) -> tuple[Tenure, tuple[Action, ...]]:
    if state.claim is None or now < state.deadline:
        return state, ()
    return Tenure(), _dropped(state.claims, f"no word from the owner for {OWNER_SILENT_S:g} s", keep=True)
