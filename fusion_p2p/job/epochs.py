"""How the owner turns a proposal into a running epoch; pure.

    IDLE --Proposed--> PREPARING --all Prepared--> STARTING --all Started--> RUNNING
             any Refused, a lost peer, or the lease running out: Abort, which uses the number up; but once the start is
             written down, the epoch has begun and is broken: the next one goes on from where it would have

A proposal is taken when it is built on the newest epoch and its (term, coordinator) is not older than the newest seen: two
coordinators can waste work, but never corrupt a run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from fusion_p2p.ids import PeerId


class Phase(Enum):
    IDLE = "idle"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Epochs:
    """`epoch` is the newest number given out; `waiting` are the peers whose answer is due before `deadline`."""

    epoch: int = 0
    phase: Phase = Phase.IDLE
    newest: tuple[int, PeerId] = (0, PeerId(""))
    """(term, coordinator) of the newest proposal that all its peers were ready for."""
    proposed: tuple[int, PeerId] = (0, PeerId(""))
    peers: frozenset[PeerId] = frozenset()
    waiting: frozenset[PeerId] = frozenset()
    deadline: float = 0.0
    lease_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Proposed:
    term: int
    coordinator: PeerId
    base_epoch: int
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class PeerPrepared:
    peer: PeerId
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerStarted:
    peer: PeerId
    epoch: int


@dataclass(frozen=True, slots=True)
class PeerGone:
    """A peer refused, or was lost."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerProgressed:
    """A peer has fetched or allocated another piece: the lease begins anew."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Proposed | PeerPrepared | PeerStarted | PeerGone | PeerProgressed | Tick


@dataclass(frozen=True, slots=True)
class SendPrepare:
    epoch: int
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class RecordStart:
    """Write Start(epoch) into the ledger, then send it to these peers."""

    epoch: int
    peers: frozenset[PeerId]


@dataclass(frozen=True, slots=True)
class SendAbort:
    epoch: int
    peers: frozenset[PeerId]
    reason: str
    culprits: frozenset[PeerId] = frozenset()
    """Because of whom."""


@dataclass(frozen=True, slots=True)
class EpochBroke:
    """The start is written down, but not all of its peers will run it."""

    epoch: int
    reason: str
    culprits: frozenset[PeerId] = frozenset()


@dataclass(frozen=True, slots=True)
class EpochRuns:
    epoch: int


@dataclass(frozen=True, slots=True)
class ProposalRefused:
    reason: str


Action = SendPrepare | RecordStart | SendAbort | EpochBroke | EpochRuns | ProposalRefused


def step(state: Epochs, event: Event, now: float) -> tuple[Epochs, tuple[Action, ...]]:
    """The next state and what to do; `now` in seconds of a monotonic clock."""
    match event:
        case Proposed():
            return _proposed(state, event, now)
        case PeerPrepared(peer, epoch):
            return _answered(state, Phase.PREPARING, peer, epoch, now)
        case PeerStarted(peer, epoch):
            return _answered(state, Phase.STARTING, peer, epoch, now)
        case PeerGone(peer, reason):
            return _gone(state, peer, reason)
        case PeerProgressed(peer):
            return (replace(state, deadline=now + state.lease_s) if peer in state.waiting else state), ()
        case Tick():
            return _tick(state, now)


def _proposed(state: Epochs, event: Proposed, now: float) -> tuple[Epochs, tuple[Action, ...]]:
    token = (event.term, event.coordinator)
    if state.phase in (Phase.PREPARING, Phase.STARTING):
        return state, (ProposalRefused(f"epoch {state.epoch} is being prepared"),)
    if token < state.newest:
        return state, (ProposalRefused(f"term {event.term} is older than term {state.newest[0]}"),)
    if event.base_epoch != state.epoch:
        return state, (ProposalRefused(f"built on epoch {event.base_epoch}, but {state.epoch} is the newest"),)
    epoch = state.epoch + 1
    preparing = replace(
        state,
        epoch=epoch,
        phase=Phase.PREPARING,
        proposed=token,
        peers=event.peers,
        waiting=event.peers,
        deadline=now + state.lease_s,
    )
    return preparing, (SendPrepare(epoch, event.peers),)


def _answered(state: Epochs, phase: Phase, peer: PeerId, epoch: int, now: float) -> tuple[Epochs, tuple[Action, ...]]:
    if state.phase is not phase or epoch != state.epoch or peer not in state.waiting:
        return state, ()
    waiting = state.waiting - {peer}
    if waiting:
        return replace(state, waiting=waiting), ()
    if phase is Phase.STARTING:
        return replace(state, phase=Phase.RUNNING, waiting=waiting), (EpochRuns(epoch),)
    starting = replace(state, phase=Phase.STARTING, newest=state.proposed, waiting=state.peers, deadline=now + state.lease_s)
    return starting, (RecordStart(epoch, state.peers),)


def _gone(state: Epochs, peer: PeerId, reason: str) -> tuple[Epochs, tuple[Action, ...]]:
    if peer not in state.peers or state.phase not in (Phase.PREPARING, Phase.STARTING):
        return state, ()
    return _end(state, state.peers - {peer}, f"{peer}: {reason}", frozenset({peer}))


def _tick(state: Epochs, now: float) -> tuple[Epochs, tuple[Action, ...]]:
    if state.phase not in (Phase.PREPARING, Phase.STARTING) or now < state.deadline:
        return state, ()
    silent = ", ".join(sorted(state.waiting))
    return _end(state, state.peers, f"no answer within {state.lease_s:g} s from {silent}", state.waiting)


def _end(state: Epochs, told: frozenset[PeerId], reason: str, culprits: frozenset[PeerId]) -> tuple[Epochs, tuple[Action, ...]]:
    idle = replace(state, phase=Phase.IDLE, peers=frozenset(), waiting=frozenset())
    if state.phase is Phase.STARTING:
        return idle, (EpochBroke(state.epoch, reason, culprits),)
    return idle, (SendAbort(state.epoch, told, reason, culprits),)
