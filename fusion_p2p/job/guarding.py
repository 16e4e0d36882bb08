"""How the owner keeps copies of all slices away from the peers that execute them; pure.

    a step is decided, a copy is due   AskCopy: its commit has every slice kept where it is executed        (the round begins)
    Kept by a member of a slice        SendGuard: another peer fetches it from there
    Fetching, more has come            that peer may go on, however slow it is
    Held by that peer                  once it holds for all slices, Durable: older copies may go           (the round ends)
    NotHeld, a guard lost or still     SendGuard to somebody else; with nobody left the round ends without Durable

There is at most one round at a time, and after one that failed the next begins soon. While an epoch is broken no round ends:
the run may be going back to an earlier step, whose copies have to stay. A guard never executes the slice that it guards. A
spare that holds nothing is no spare, so a new one, or a copy that was lost, makes the next round begin early.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusion_p2p.ids import PeerId
from fusion_p2p.job.copy_interval import BUDGET, LONGEST_S, URGENT_BUDGET, Laps, LossRate, interval_s, shortest_s
from fusion_p2p.job.guard_choice import Candidate, Load, choose
from fusion_p2p.job.guard_terms import (
    Action,
    AskCopy,
    Began,
    Broken,
    Copy,
    Deciding,
    Durable,
    Errand,
    Event,
    FetchingBy,
    GoBack,
    HeldBy,
    KeptBy,
    Lost,
    NotHeldBy,
    Part,
    Round,
    Seen,
    SendGuard,
    Tick,
)

KEPT_S = 20.0
KEEP_BYTES_PER_S = 20e6
"""A member has said within this time, for so many bytes, that it keeps a copy; or the round goes on without it."""
STILL_S = 10.0
HASH_BYTES_PER_S = 100e6
"""A guard to which nothing came for this time, and while it compares so many bytes, has lost its errand."""
AVOID_S = 10.0
"""A peer that could not guard is not asked again for so long: often it was its source that failed."""
RETRY_S = 5.0
"""After a round that failed the next one waits for so long, twice as long after every further one that fails."""
TICK_S = 1.0
"""`Tick` is expected this often."""
HELD_UP_S = 2 * TICK_S
"""When it comes later by more than this it was us who heard nothing."""
AS_IT_PAYS: None = None
"""The value of `every` that leaves the interval to measurements."""


@dataclass(frozen=True, slots=True)
class Guarding:
    """every: steps between copies, 0 for never, AS_IT_PAYS. early: the next round need not wait for its interval.

    broken: no epoch runs. begun, took_s: when the last round began and how long it took. failed: rounds in a row that were not
    completed; the next begins at `retry_at`. avoided: until when a peer is not asked. ticked_at: when `Tick` came last.
    """

    every: int | None = AS_IT_PAYS
    cut: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    candidates: Mapping[PeerId, Candidate] = field(default_factory=dict)
    avoided: Mapping[PeerId, float] = field(default_factory=dict)
    round: Round | None = None
    copies: frozenset[Copy] = frozenset()
    early: bool = True
    broken: bool = False
    begun: float = float("-inf")
    took_s: float = 0.0
    failed: int = 0
    retry_at: float = float("-inf")
    ticked_at: float | None = None
    laps: Laps = field(default_factory=Laps)
    losses: LossRate = field(default_factory=LossRate)
    counted_at: float | None = None

    @property
    def members(self) -> frozenset[PeerId]:
        """Everybody who executes something."""
        return frozenset(peer for part in self.parts for peer in part.members)

    @property
    def guards(self) -> frozenset[PeerId]:
        """Everybody who holds or fetches a copy, and executes nothing."""
        asked = [] if self.round is None else [errand.guard for errand in self.round.errands if errand.guard is not None]
        return frozenset([*asked, *(copy.peer for copy in self.copies)]) - self.members

    @property
    def covered(self) -> bool:
        """Whether every slice has a copy somewhere, of whatever step."""
        return {copy.slice for copy in self.copies} == set(range(len(self.parts)))

    @property
    def interval_s(self) -> float:
        """Seconds from the beginning of the last round to the next."""
        cost_s = self.laps.cost_s(max((part.num_bytes for part in self.parts), default=0), self.took_s)
        if self.early:
            return shortest_s(cost_s, self.took_s, BUDGET if self.covered else URGENT_BUDGET)
        return interval_s(cost_s, self.losses.mean_time_s(len(self.members)), self.took_s)


def step(state: Guarding, event: Event, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    """The next state and what to do; `now` in seconds of a monotonic clock."""
    state = _counted(state, now)
    match event:
        case Began():
            return _began(state, event, now)
        case Broken():
            return replace(state, broken=True), ()
        case Deciding(step=decided):
            return _deciding(state, decided, now)
        case KeptBy():
            return _kept(state, event, now)
        case FetchingBy():
            return _fetching(state, event, now), ()
        case HeldBy():
            return _held(state, event, now)
        case NotHeldBy():
            return _not_held(state, event, now)
        case Seen(candidates):
            return _seen(state, candidates), ()
        case Lost():
            return _lost(state, event, now)
        case Tick():
            return _tick(state, now)


def describe(state: Guarding) -> str:
    """The newest step of which most slices are held, in words."""
    if not state.copies:
        if state.every == 0:
            return "copies: off"
        return "copies: none yet" if state.candidates else "copies: nobody could hold one"
    slices_at = {copy.step: {other.slice for other in state.copies if other.step == copy.step} for copy in state.copies}
    newest = max(slices_at, key=lambda step: (len(slices_at[step]), step))
    holders = {copy.peer for copy in state.copies if copy.step == newest}
    kind = "peer" if holders & state.members else "spare"
    plural = "" if len(holders) == 1 else "s"
    return (
        f"copies of step {newest}: {len(slices_at[newest])} of {len(state.parts)} slices held by {len(holders)} {kind}{plural}"
    )


def _counted(state: Guarding, now: float) -> Guarding:
    """With the time of the peers at work up to now."""
    since = now if state.counted_at is None else state.counted_at
    peer_s = state.losses.peer_s + (now - since) * len(state.members)
    return replace(state, counted_at=now, losses=replace(state.losses, peer_s=peer_s))


def _began(state: Guarding, event: Began, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    """Keep the copies of this cut and of this past, at peers that were not sent away.

    A round goes on when the same peers execute the same slices: codecs may have changed.
    """
    dismissed = state.members - frozenset(peer for part in event.parts for peer in part.members)
    same = (event.cut, event.parts) == (state.cut, state.parts)
    current = state.round if same and state.round is not None and state.round.step <= event.state_step else None
    copies = frozenset(
        copy
        for copy in state.copies
        if event.cut == state.cut
        and copy.step <= event.state_step
        and copy.peer not in dismissed | event.parts[copy.slice].members
    )
    laps = state.laps.again(as_before=same)
    lost = copies != state.copies or current != state.round
    early = state.early or lost
    began = replace(state, cut=event.cut, parts=event.parts, copies=copies, round=current, laps=laps, early=early, broken=False)
    behind = _ahead_of(state, event.state_step) - began.members - dismissed
    began, ended = _ended(began, now)
    return began, (*([GoBack(event.state_step, behind)] if behind else []), *ended)


def _ahead_of(state: Guarding, of_step: int) -> frozenset[PeerId]:
    """Who may have a copy of a later step."""
    fetching = () if state.round is None or state.round.step <= of_step else state.round.errands
    return frozenset(
        [
            *(errand.guard for errand in fetching if errand.guard is not None),
            *(copy.peer for copy in state.copies if copy.step > of_step),
        ]
    )


def _deciding(state: Guarding, decided: int, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    state = replace(state, laps=state.laps.decided(decided, now, copying=state.round is not None))
    if not _is_due(state, decided, now):
        return state, ()
    errands: list[Errand] = []
    for part in state.parts:
        guard = _choose(state, part, errands, frozenset(), now)
        errands.append(Errand(guard, now + KEPT_S + part.num_bytes / KEEP_BYTES_PER_S))
    if not any(errand.is_open for errand in errands):
        return state, ()
    current = Round(decided, now, tuple(errands))
    return replace(state, round=current, begun=now, early=False, laps=state.laps.touch()), (AskCopy(decided),)


def _is_due(state: Guarding, decided: int, now: float) -> bool:
    if state.round is not None or not state.parts or state.every == 0:
        return False
    if state.failed and now < state.retry_at:
        return False
    if state.every is not None:
        return decided % state.every == 0 or state.failed > 0
    known = state.early or state.laps.know_quiet
    return known and now - state.begun >= state.interval_s


def _choose(state: Guarding, part: Part, errands: Iterable[Errand], failed: frozenset[PeerId], now: float) -> PeerId | None:
    """Who guards a slice, beside the errands that are given out already."""
    avoided = failed | {peer for peer, until in state.avoided.items() if now < until}
    candidates = [candidate for peer, candidate in state.candidates.items() if peer not in avoided]
    chosen = choose(part.num_bytes, part.members, candidates, _loads(state, errands))
    return None if chosen is None else chosen.peer


def _loads(state: Guarding, errands: Iterable[Errand]) -> dict[PeerId, Load]:
    loads: dict[PeerId, Load] = {}
    for part, errand in zip(state.parts, errands, strict=False):
        candidate = None if errand.guard is None else state.candidates.get(errand.guard)
        if candidate is not None:
            seconds = 0.0 if errand.held else candidate.fetching_s(part.num_bytes, part.members)
            loads[candidate.peer] = loads.get(candidate.peer, Load()).more(part.num_bytes, seconds)
    return loads


def _errand(state: Guarding, index: int, of_step: int) -> Errand | None:
    """A slice's errand in the round of this step, if there is one."""
    if state.round is None or state.round.step != of_step or index >= len(state.parts):
        return None
    return state.round.errands[index]


def _kept(state: Guarding, event: KeptBy, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    errand = _errand(state, event.slice, event.step)
    if errand is None or event.peer not in state.parts[event.slice].members or event.peer in errand.sources:
        return state, ()
    if errand.digest is None:
        errand = replace(errand, digest=event.digest, sources=(event.peer,), deadline=_heard_by(state, now))
        return _with(state, event.slice, errand), _sending(event.slice, event.step, errand)
    if event.digest != errand.digest:
        return state, ()
    return _with(state, event.slice, replace(errand, sources=(*errand.sources, event.peer))), ()


def _fetching(state: Guarding, event: FetchingBy, now: float) -> Guarding:
    """Whoever moves may go on; of who does not, the deadlines stay."""
    for index in event.slices:
        errand = _errand(state, index, event.step)
        if errand is not None and errand.guard == event.peer and errand.digest is not None and event.pieces > errand.pieces:
            state = _with(state, index, replace(errand, pieces=event.pieces, deadline=_heard_by(state, now)))
    return state


def _held(state: Guarding, event: HeldBy, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    errand = _errand(state, event.slice, event.step)
    if errand is None or not errand.is_open or errand.guard != event.peer or errand.digest is None:
        return state, ()
    if event.digest != errand.digest:
        return _reassigned(state, [event.slice], now)
    copies = state.copies | {Copy(event.slice, event.step, event.peer)}
    return _ended(replace(_with(state, event.slice, replace(errand, held=True)), copies=copies), now)


def _not_held(state: Guarding, event: NotHeldBy, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    copies = state.copies - {Copy(event.slice, event.step, event.peer)}
    state = replace(state, early=state.early or copies != state.copies, copies=copies)
    errand = _errand(state, event.slice, event.step)
    return _reassigned(state, [event.slice], now) if errand is not None and errand.guard == event.peer else (state, ())


def _seen(state: Guarding, candidates: tuple[Candidate, ...]) -> Guarding:
    spares = {candidate.peer for candidate in candidates if candidate.spare}
    known = {peer for peer, candidate in state.candidates.items() if candidate.spare}
    new = spares - known - {copy.peer for copy in state.copies}
    return replace(state, candidates={candidate.peer: candidate for candidate in candidates}, early=state.early or bool(new))


def _lost(state: Guarding, event: Lost, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    peer = event.peer
    losses = state.losses.losses + (peer in state.members and not event.left)
    copies = frozenset(copy for copy in state.copies if copy.peer != peer)
    state = replace(
        state,
        early=state.early or copies != state.copies,
        copies=copies,
        candidates={other: candidate for other, candidate in state.candidates.items() if other != peer},
        losses=replace(state.losses, losses=losses),
    )
    errands = () if state.round is None else state.round.errands
    for index, errand in enumerate(errands):
        state = _with(state, index, replace(errand, sources=tuple(source for source in errand.sources if source != peer)))
    bereft = [index for index, errand in enumerate(errands) if errand.guard == peer]
    return _reassigned(state, bereft, now)


def _tick(state: Guarding, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    since_s = TICK_S if state.ticked_at is None else now - state.ticked_at
    state = replace(state, ticked_at=now, avoided={peer: until for peer, until in state.avoided.items() if now < until})
    if since_s > TICK_S + HELD_UP_S:
        state = _excused(state, since_s)
    errands = () if state.round is None else state.round.errands
    late = [index for index, errand in enumerate(errands) if errand.is_open and now >= errand.deadline]
    return _reassigned(state, late, now)


def _excused(state: Guarding, seconds: float) -> Guarding:
    """We heard nobody for so long: what was said meanwhile is still to be read."""
    errands = () if state.round is None else state.round.errands
    for index, errand in enumerate(errands):
        state = _with(state, index, replace(errand, deadline=errand.deadline + seconds))
    return state


def _reassigned(state: Guarding, indices: Sequence[int], now: float) -> tuple[Guarding, tuple[Action, ...]]:
    """These slices need other guards; the round ends when that leaves nothing to wait for."""
    actions: tuple[Action, ...] = ()
    for index in indices:
        state, sent = _replaced(state, index, now)
        actions += sent
    state, ended = _ended(state, now)
    return state, (*actions, *ended)


def _replaced(state: Guarding, index: int, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    """Another guard for a slice; nobody when its members said nothing in time, or are gone: then there is no copy."""
    current = state.round
    if current is None:
        return state, ()
    errand = current.errands[index]
    failed = errand.failed if errand.guard is None else errand.failed | {errand.guard}
    errand = replace(errand, guard=None, held=False, failed=failed, pieces=-1)
    if errand.sources or (errand.digest is None and now < errand.deadline):
        avoided = {**state.avoided, **dict.fromkeys(failed, now + AVOID_S)}
        others = [*current.errands[:index], errand, *current.errands[index + 1 :]]
        guard = _choose(state, state.parts[index], others, failed, now)
        deadline = errand.deadline if errand.digest is None else _heard_by(state, now)
        state, errand = replace(state, avoided=avoided), replace(errand, guard=guard, deadline=deadline)
    return _with(state, index, errand), _sending(index, current.step, errand)


def _heard_by(state: Guarding, now: float) -> float:
    """When a guard has to have moved on: nothing comes to it while it compares what came."""
    return now + STILL_S + max(part.num_bytes for part in state.parts) / HASH_BYTES_PER_S


def _sending(index: int, of_step: int, errand: Errand) -> tuple[Action, ...]:
    if errand.guard is None or errand.digest is None:
        return ()
    return (SendGuard(errand.guard, index, of_step, errand.digest, errand.sources),)


def _with(state: Guarding, index: int, errand: Errand) -> Guarding:
    if state.round is None:
        return state
    errands = state.round.errands
    return replace(state, round=replace(state.round, errands=(*errands[:index], errand, *errands[index + 1 :])))


def _ended(state: Guarding, now: float) -> tuple[Guarding, tuple[Action, ...]]:
    """End the round when nothing more can come of it."""
    current = state.round
    if current is None or state.broken or any(errand.is_open for errand in current.errands):
        return state, ()
    state = replace(state, round=None, took_s=now - current.begun)
    if not all(errand.held for errand in current.errands):
        return _failed(state, current, now), ()
    return replace(state, failed=0, copies=frozenset(copy for copy in state.copies if copy.step >= current.step)), (
        Durable(current.step),
    )


def _failed(state: Guarding, current: Round, now: float) -> Guarding:
    """A round has ended without all copies: another soon, unless nobody could have held them to begin with."""
    if not any(errand.failed for errand in current.errands):
        return state
    pause_s = min(LONGEST_S, RETRY_S * 2**state.failed)
    return replace(state, early=True, failed=state.failed + 1, retry_at=now + pause_s)
