"""A step is a transaction: the owner collects a report from every replica, decides once, waits until all applied it; pure.

The gradient norm is taken over all slices, parameters in graph order, shared ones once (their home reports them). A step with a
loss or gradient that is not finite is skipped; `MAX_SKIPS` in a row stop the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType

from fusion_p2p.errors import WireError
from fusion_p2p.job.clipping import clip_coefficient, gradient_norm
from fusion_p2p.job.flow import Fate

MAX_SKIPS = 3
LARGEST_SQUARE = 1e280
"""A sum of squares from here on (or NaN) counts as not finite: thousands of them still add up without overflow."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the owner knows of a plan, per replica: the parameters it answers for and the micro-batches whose losses it has."""

    answers: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[int, ...], ...]
    max_norm: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """One replica's part: sums of squares of its `Terms.answers`, and the losses of its `Terms.losses`."""

    squares: tuple[float, ...]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Transaction:
    """The open step, or the decided one that not every replica has applied yet."""

    terms: Terms
    step: int
    reports: Mapping[int, Report] = field(default_factory=lambda: MappingProxyType({}))
    fate: Fate = Fate.OPEN
    applied: frozenset[int] = frozenset()
    skips: int = 0
    early: Mapping[int, Report] = field(default_factory=lambda: MappingProxyType({}))
    """Reports of the next step: a replica may be there before the owner knows that all have applied this one."""


@dataclass(frozen=True, slots=True)
class Reported:
    replica: int
    step: int
    report: Report


@dataclass(frozen=True, slots=True)
class Applied:
    replica: int
    step: int


Event = Reported | Applied


@dataclass(frozen=True, slots=True)
class Decide:
    """Write this into the ledger, then tell every replica. `loss`: mean of micro-batches; `norm`: of all gradients."""

    step: int
    fate: Fate
    clip: float
    loss: float
    norm: float


@dataclass(frozen=True, slots=True)
class Complete:
    """Every replica has applied the step."""

    step: int


@dataclass(frozen=True, slots=True)
class StopRun:
    """The run cannot go on."""

    reason: str


Action = Decide | Complete | StopRun


def step(state: Transaction, event: Event) -> tuple[Transaction, tuple[Action, ...]]:
    """The next state and what to do. Repetitions are ignored; WireError when a report is not the one that is due."""
    match event:
        case Reported(index, at, report) if at == state.step:
            return _reported(state, index, report)
        case Reported(index, at, report) if at == state.step + 1 and state.fate is not Fate.OPEN:
            return replace(state, early={**state.early, index: report}), ()
        case Applied(index, at) if at == state.step:
            return _applied(state, index)
    return state, ()


def _reported(state: Transaction, index: int, report: Report) -> tuple[Transaction, tuple[Action, ...]]:
    terms = state.terms
    if index in state.reports or state.fate is not Fate.OPEN:
        return state, ()
    if len(report.squares) != len(terms.answers[index]) or len(report.losses) != len(terms.losses[index]):
        raise WireError(f"replica {index} reported {len(report.squares)} gradients and {len(report.losses)} losses")
    if any(square < 0 for square in report.squares):
        raise WireError(f"replica {index} reported a negative sum of squares")
    state = replace(state, reports={**state.reports, index: report})
    if len(state.reports) < len(terms.answers):
        return state, ()
    return _decide(state)


def _decide(state: Transaction) -> tuple[Transaction, tuple[Action, ...]]:
    terms = state.terms
    squares = squares_in_graph_order(state)
    losses = _in_order(terms.losses, {index: report.losses for index, report in state.reports.items()})
    norm = gradient_norm(squares) if all(square < LARGEST_SQUARE for square in squares) else math.inf
    loss = sum(losses) / len(losses)
    finite = math.isfinite(loss) and math.isfinite(norm)
    fate = Fate.COMMIT if finite else Fate.SKIP
    skips = 0 if finite else state.skips + 1
    clip = clip_coefficient(squares, terms.max_norm) if finite and terms.max_norm is not None else 1.0
    decide = Decide(state.step, fate, clip, loss, norm)
    stop = (StopRun(f"{MAX_SKIPS} steps in a row had a loss or gradient that is not finite"),) if skips >= MAX_SKIPS else ()
    return replace(state, fate=fate, skips=skips), (decide, *stop)


def squares_in_graph_order(state: Transaction) -> list[float]:
    """The sums of squares of all trainable parameters, each once, ordered by their number in the graph."""
    return _in_order(state.terms.answers, {index: report.squares for index, report in state.reports.items()})


def _in_order(numbers: Sequence[Sequence[int]], reported: Mapping[int, Sequence[float]]) -> list[float]:
    """What replicas reported, ordered by the numbers of what it belongs to."""
    pairs = [pair for index, values in reported.items() for pair in zip(numbers[index], values, strict=True)]
    return [value for _, value in sorted(pairs, key=itemgetter(0))]


def _applied(state: Transaction, index: int) -> tuple[Transaction, tuple[Action, ...]]:
    if state.fate is Fate.OPEN:
        raise WireError(f"replica {index} applied step {state.step} before it was decided")
    applied = state.applied | {index}
    if len(applied) < len(state.terms.answers):
        return replace(state, applied=applied), ()
    opened, actions = Transaction(state.terms, state.step + 1, skips=state.skips), list[Action]([Complete(state.step)])
    for early_index, report in state.early.items():
        opened, further = _reported(opened, early_index, report)
        actions += further
    return opened, tuple(actions)
