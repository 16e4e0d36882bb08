"""The order in which one replica of a slice runs its tasks; pure.

    F<m>  forward of micro-batch m      B<m>  its backward       S  share gradients with their homes
    E<m>  validation micro-batch m      U, K  update or skip, once the owner has decided      R  report (sums of shared ones)

Forward and backward tasks run in the order of this replica's micro-batches, a ready backward before the next forward (1f1b) or
after the last one (gpipe), at most `in_flight` micro-batches between the two; so no plan can deadlock, memory is bounded, and
sums have one order (design: order of tasks). What is shared leaves before the report, which waits for what others share: so
homes may lie anywhere. Values may arrive early and in any order; duplicates are dropped; more than an edge's credits allow is
a broken protocol.

A halted replica begins nothing more, except for the end of a step that is decided: its update may have been applied elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from fusion_p2p.errors import WireError
from fusion_p2p.job.topology import ReplicaEdges
from fusion_p2p.plan.plan import Schedule
from fusion_p2p.wire.frames import Direction, Edge, Moment


class TaskKind(Enum):
    FORWARD = "F"
    BACKWARD = "B"
    SHARE = "S"
    EVALUATE = "E"
    REPORT = "R"
    UPDATE = "U"
    SKIP = "K"


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of a replica; prints as `F3` or `U`."""

    kind: TaskKind
    moment: Moment

    def __repr__(self) -> str:
        numbered = self.kind in (TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.EVALUATE)
        return f"{self.kind.value}{self.moment.micro_batch if numbered else ''}"


class Fate(Enum):
    """What the owner decided about a step."""

    OPEN = "open"
    COMMIT = "commit"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Flow:
    """Where a replica is. `step` is the one it works on, with `micro_batches` of its own; counters are of tasks begun in it."""

    edges: ReplicaEdges
    micro_batches: int
    in_flight: int
    step: int
    schedule: Schedule = "1f1b"
    forwards: int = 0
    backwards: int = 0
    evaluations: int = 0
    shared: bool = False
    reported: bool = False
    fate: Fate = Fate.OPEN
    running: Task | None = None
    halted: bool = False
    arrived: frozenset[tuple[Edge, Moment]] = field(default=frozenset())


@dataclass(frozen=True, slots=True)
class Arrived:
    """A value is in the mailbox; `credits` is what its edge allows to wait there."""

    edge: Edge
    moment: Moment
    credits: int


@dataclass(frozen=True, slots=True)
class Decided:
    """The owner decided the fate of a step."""

    step: int
    fate: Fate


@dataclass(frozen=True, slots=True)
class Idle:
    """The compute thread could take a task of this replica."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The running task has ended."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Begin nothing more but the end of a decided step."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Go on as before."""


Event = Arrived | Decided | Idle | Finished | Halt | Resume


@dataclass(frozen=True, slots=True)
class Run:
    """Run this task with these values, which leave the mailbox."""

    task: Task
    taken: tuple[tuple[Edge, Moment], ...]


@dataclass(frozen=True, slots=True)
class Keep:
    """Put the value that arrived into the mailbox."""


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Say (again) that this value has been taken."""

    edge: Edge
    moment: Moment


@dataclass(frozen=True, slots=True)
class AnswerApplied:
    """The decision about this step was carried out long ago; its answer was lost."""

    step: int


Action = Run | Keep | Acknowledge | AnswerApplied


def step(flow: Flow, event: Event) -> tuple[Flow, tuple[Action, ...]]:
    """The next state and what to do. WireError when an arrival breaks its edge's credits or names a step far away."""
    match event:
        case Arrived():
            return _arrived(flow, event)
        case Decided():
            return _decided(flow, event)
        case Idle():
            return _idle(flow)
        case Finished():
            return _finished(flow), ()
        case Halt():
            return replace(flow, halted=True), ()
        case Resume():
            return replace(flow, halted=False), ()


def next_task(flow: Flow) -> Task | None:
    """The task this replica would run now, if any."""
    if flow.running is not None:
        return None
    for kind, micro_batch in _candidates(flow):
        task = Task(kind, Moment(flow.step, micro_batch))
        if all(key in flow.arrived for key in needs(flow, task)):
            return task
    return None


def needs(flow: Flow, task: Task) -> tuple[tuple[Edge, Moment], ...]:
    """What a task takes out of the mailbox, in the order of the replica's edges."""
    match task.kind:
        case TaskKind.FORWARD:
            wanted = flow.edges.arrivals(Direction.FORWARD, task.moment.micro_batch)
        case TaskKind.BACKWARD:
            wanted = flow.edges.arrivals(Direction.BACKWARD, task.moment.micro_batch)
        case TaskKind.EVALUATE:
            wanted = flow.edges.arrivals(Direction.EVALUATE, task.moment.micro_batch)
        case TaskKind.SHARE:
            wanted = ()
        case TaskKind.REPORT:
            wanted = flow.edges.gradients_in
        case TaskKind.UPDATE | TaskKind.SKIP:
            wanted = flow.edges.sums_in
    return tuple((edge, task.moment) for edge in wanted)


def _candidates(flow: Flow) -> list[tuple[TaskKind, int]]:
    """The next task of each kind whose turn it is, the most urgent first."""
    if flow.halted:
        return [(kind, 0) for kind in _endings(flow)] if flow.reported else []
    turns, found = flow.edges.own_turns, list[tuple[TaskKind, int]]()
    all_forward = flow.forwards == flow.micro_batches
    if flow.backwards < flow.forwards and (all_forward or flow.schedule != "gpipe"):
        found.append((TaskKind.BACKWARD, turns.nth(flow.backwards)))
    if flow.backwards == flow.micro_batches:
        found += [(kind, 0) for kind in _endings(flow)]
    if not all_forward and flow.forwards - flow.backwards < flow.in_flight:
        found.append((TaskKind.FORWARD, turns.nth(flow.forwards)))
    if flow.forwards == 0:
        found.append((TaskKind.EVALUATE, turns.nth(flow.evaluations)))
    return found


def _endings(flow: Flow) -> list[TaskKind]:
    """What follows a step's last backward."""
    if flow.edges.gradients_out and not flow.shared:
        return [TaskKind.SHARE]
    if not flow.reported:
        return [TaskKind.REPORT]
    return [] if flow.fate is Fate.OPEN else [TaskKind.UPDATE if flow.fate is Fate.COMMIT else TaskKind.SKIP]


def _arrived(flow: Flow, event: Arrived) -> tuple[Flow, tuple[Action, ...]]:
    key = (event.edge, event.moment)
    if key in flow.arrived:
        return flow, ()
    if was_taken(flow, event.edge, event.moment):
        return flow, (Acknowledge(event.edge, event.moment),)
    refuse_without_credit(flow, event)
    return replace(flow, arrived=flow.arrived | {key}), (Keep(),)


def refuse_without_credit(flow: Flow, event: Arrived) -> None:
    """WireError when a value that is not a repetition may not be sent yet: asked before its bytes are read."""
    key = (event.edge, event.moment)
    if key in flow.arrived or was_taken(flow, event.edge, event.moment):
        return
    if not flow.edges.carries(event.edge, event.moment.micro_batch):
        raise WireError(f"micro-batch {event.moment.micro_batch} is not for replica {flow.edges.replica}")
    waiting = sum(edge == event.edge for edge, _ in flow.arrived)
    if waiting >= event.credits or event.moment.step > flow.step + 1:
        raise WireError(f"value {event.edge.value} of step {event.moment.step} came without credit (at step {flow.step})")


def was_taken(flow: Flow, edge: Edge, moment: Moment) -> bool:
    """Whether a task has already taken this value."""
    if moment.step != flow.step:
        return moment.step < flow.step
    turn = flow.edges.own_turns.before(moment.micro_batch)
    match edge.direction:
        case Direction.FORWARD:
            return turn < flow.forwards
        case Direction.BACKWARD:
            return turn < flow.backwards
        case Direction.EVALUATE:
            return turn < flow.evaluations
        case Direction.TIED:
            ends = (flow.running.kind if flow.running else None) in (TaskKind.UPDATE, TaskKind.SKIP)
            return flow.reported if edge in flow.edges.gradients_in else ends


def _decided(flow: Flow, event: Decided) -> tuple[Flow, tuple[Action, ...]]:
    if event.step < flow.step:
        return flow, (AnswerApplied(event.step),)
    if event.step > flow.step or not flow.reported:
        raise WireError(f"step {event.step} was decided before this replica reported it (at step {flow.step})")
    return replace(flow, fate=event.fate), ()


def _idle(flow: Flow) -> tuple[Flow, tuple[Action, ...]]:
    task = next_task(flow)
    if task is None:
        return flow, ()
    taken = needs(flow, task)
    begun = replace(flow, running=task, arrived=flow.arrived - set(taken))
    match task.kind:
        case TaskKind.FORWARD:
            begun = replace(begun, forwards=flow.forwards + 1)
        case TaskKind.BACKWARD:
            begun = replace(begun, backwards=flow.backwards + 1)
        case TaskKind.EVALUATE:
            begun = replace(begun, evaluations=flow.evaluations + 1)
        case TaskKind.SHARE:
            begun = replace(begun, shared=True)
        case TaskKind.REPORT:
            begun = replace(begun, reported=True)
        case TaskKind.UPDATE | TaskKind.SKIP:
            pass
    return begun, (Run(task, taken), *(Acknowledge(edge, moment) for edge, moment in taken))


def _finished(flow: Flow) -> Flow:
    if flow.running is not None and flow.running.kind in (TaskKind.UPDATE, TaskKind.SKIP):
        after = Flow(flow.edges, flow.micro_batches, flow.in_flight, flow.step + 1, flow.schedule)
        return replace(after, halted=flow.halted, arrived=flow.arrived)
    return replace(flow, running=None)
