"""One replica's tasks on the compute thread: tensors in, tensors out. No network, no asyncio."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fusion_p2p.errors import SliceFailed, WireError
from fusion_p2p.execute.handover import Handed, hand_over
from fusion_p2p.execute.slice import SliceExecutor, first_non_finite
from fusion_p2p.execute.state import SliceState, Snapshot
from fusion_p2p.graph.opset import OPERATOR_ERRORS
from fusion_p2p.graph.schema import Graph
from fusion_p2p.job.flow import Task, TaskKind
from fusion_p2p.job.topology import TRIGGER, ReplicaEdges
from fusion_p2p.wire.frames import Direction, Edge
from fusion_p2p.wire.job_messages import Commit, Skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task made: values to send, and for the owner a loss, sums of squares, or a snapshot."""

    sends: tuple[tuple[Edge, Handed], ...] = ()
    loss: float | None = None
    squares: tuple[float, ...] = ()
    snapshot: Snapshot | None = None
    note: str = ""
    busy_s: float = 0.0


class SliceTasks:
    """Runs the tasks of one replica of a slice. All calls belong on the compute thread."""

    def __init__(self, graph: Graph, edges: ReplicaEdges, executor: SliceExecutor) -> None:
        self._graph, self._edges, self._executor = graph, edges, executor
        self._loss = graph.outputs[0]

    @property
    def state(self) -> SliceState:
        """The state of the slice, which the next update changes."""
        return self._executor.state

    def abort_step(self) -> None:
        """Forget the open step; the state is that of the last one that was applied."""
        self._executor.abort_step()

    def perform(self, task: Task, taken: Mapping[Edge, Handed], decision: Commit | Skip | None) -> Outcome:
        """Run one task with the values it took from the mailbox. SliceFailed or WireError when it cannot be done."""
        begun = time.perf_counter()
        try:
            outcome = self._perform(task, {edge: handed.take() for edge, handed in taken.items()}, decision)
        except OPERATOR_ERRORS as error:
            where = f"slice {self._edges.slice} at step {task.moment.step}, task {task}"
            raise SliceFailed(f"{where}: {type(error).__name__}: {error}") from None
        busy_s = time.perf_counter() - begun
        return Outcome(outcome.sends, outcome.loss, outcome.squares, outcome.snapshot, outcome.note, busy_s)

    def _perform(self, task: Task, taken: Mapping[Edge, Tensor | None], decision: Commit | Skip | None) -> Outcome:
        match task.kind:
            case TaskKind.FORWARD | TaskKind.EVALUATE:
                return self._forward(task, taken)
            case TaskKind.BACKWARD:
                return self._backward(task, taken)
            case TaskKind.SHARE:
                return Outcome(self._share(self._edges.gradients_out))
            case TaskKind.REPORT:
                return self._report(taken)
            case TaskKind.UPDATE | TaskKind.SKIP:
                if isinstance(decision, Commit):
                    self._take_sums(taken)
                    self._executor.update(task.moment.step, decision.clip, decision.rate)
                else:
                    self._executor.skip(task.moment.step)
                wanted = decision is not None and decision.snapshot
                return Outcome(snapshot=self._executor.state.snapshot() if wanted else None)

    def _forward(self, task: Task, taken: Mapping[Edge, Tensor | None]) -> Outcome:
        arrived = _all_there({edge: tensor for edge, tensor in taken.items() if edge.value != TRIGGER})
        training = task.kind is TaskKind.FORWARD
        run = self._executor.forward if training else self._executor.evaluate
        values = run(task.moment.step, task.moment.micro_batch, {edge.value: tensor for edge, tensor in arrived.items()})
        direction = Direction.FORWARD if training else Direction.EVALUATE
        edges = self._edges.departures(direction, task.moment.micro_batch)
        sends = tuple((edge, hand_over(values[edge.value])) for edge in edges)
        loss = float(values[self._loss]) if self._loss in values else None
        return Outcome(sends, loss, note=first_non_finite(self._graph, values) or "")

    def _backward(self, task: Task, taken: Mapping[Edge, Tensor | None]) -> Outcome:
        gradients: dict[int, list[Tensor | None]] = defaultdict(list)
        for edge, gradient in taken.items():
            gradients[edge.value].append(gradient)
        received = self._executor.backward(task.moment.step, task.moment.micro_batch, gradients)
        leaving = self._edges.departures(Direction.BACKWARD, task.moment.micro_batch)
        return Outcome(tuple((edge, hand_over(received.get(edge.value))) for edge in leaving))

    def _report(self, taken: Mapping[Edge, Tensor | None]) -> Outcome:
        """As the home of shared parameters agree on them, in the order of replicas, and send that; then the squares."""
        others: dict[int, dict[int, Tensor]] = defaultdict(dict)
        for edge, tensor in _all_there(taken).items():
            others[edge.value][edge.source] = tensor
        for value, terms in others.items():
            terms[self._edges.replica] = self._executor.shared(value)
            holders = sorted(terms)
            counts = [self._edges.turns_of(holder).before(self._executor.micro_batches) for holder in holders]
            self._executor.set_shared(value, self._executor.combine(value, [terms[holder] for holder in holders], counts))
        return Outcome(self._share(self._edges.sums_out), squares=self._executor.squares(self._edges.answers))

    def _share(self, edges: Sequence[Edge]) -> tuple[tuple[Edge, Handed], ...]:
        """Copies, once per parameter: an update must not change what is still being sent."""
        copies = {value: hand_over(self._executor.shared(value).clone()) for value in {edge.value for edge in edges}}
        return tuple((edge, copies[edge.value]) for edge in edges)

    def _take_sums(self, taken: Mapping[Edge, Tensor | None]) -> None:
        for edge, tensor in _all_there(taken).items():
            self._executor.set_shared(edge.value, tensor)


def _all_there(taken: Mapping[Edge, Tensor | None]) -> dict[Edge, Tensor]:
    """Values that arrived. WireError for an explicit nothing, which has a place among gradients only."""
    tensors: dict[Edge, Tensor] = {}
    for edge, tensor in taken.items():
        if tensor is None:
            raise WireError(f"nothing was sent where value {edge.value} belongs")
        tensors[edge] = tensor
    return tensors
