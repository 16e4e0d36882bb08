"""One replica's tasks on the compute thread: payloads in, payloads out. No network, no asyncio."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.compress.codec import CODECS
from fusion_p2p.errors import SliceFailed
from fusion_p2p.execute.slice import SliceExecutor, first_non_finite
from fusion_p2p.execute.state import Snapshot
from fusion_p2p.graph.opset import OPERATOR_ERRORS
from fusion_p2p.graph.schema import Graph
from fusion_p2p.job.flow import Task, TaskKind
from fusion_p2p.job.topology import TRIGGER, ReplicaEdges
from fusion_p2p.net.values import NOTHING, Payload
from fusion_p2p.wire.frames import Direction, Edge
from fusion_p2p.wire.job_messages import Commit, Skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task made: values to send, and for the owner a loss, sums of squares, or a snapshot."""

    sends: tuple[tuple[Edge, Payload], ...] = ()
    loss: float | None = None
    squares: tuple[float, ...] = ()
    snapshot: Snapshot | None = None
    note: str = ""
    busy_s: float = 0.0


class SliceTasks:
    """Runs the tasks of one replica of a slice. All calls belong on the compute thread."""

    def __init__(
        self, graph: Graph, edges: ReplicaEdges, executor: SliceExecutor, device: torch.device, codec_of: Mapping[Edge, str]
    ) -> None:
        """`codec_of` names the codec of edges that do not send their values dense."""
        self._graph, self._edges, self._executor, self._device, self._codec_of = graph, edges, executor, device, codec_of
        self._loss = graph.outputs[0]

    def perform(self, task: Task, taken: Mapping[Edge, Payload], decision: Commit | Skip | None) -> Outcome:
        """Run one task with the values it took from the mailbox. SliceFailed when it cannot be done."""
        begun = time.perf_counter()
        try:
            outcome = self._perform(task, taken, decision)
        except OPERATOR_ERRORS as error:
            where = f"slice {self._edges.slice} at step {task.moment.step}, task {task}"
            raise SliceFailed(f"{where}: {type(error).__name__}: {error}") from None
        busy_s = time.perf_counter() - begun
        return Outcome(outcome.sends, outcome.loss, outcome.squares, outcome.snapshot, outcome.note, busy_s)

    def abort(self) -> None:
        """Forget the open step."""
        self._executor.abort_step()

    def _perform(self, task: Task, taken: Mapping[Edge, Payload], decision: Commit | Skip | None) -> Outcome:
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

    def _forward(self, task: Task, taken: Mapping[Edge, Payload]) -> Outcome:
        arrived = {edge.value: self._decode(edge, payload) for edge, payload in taken.items() if edge.value != TRIGGER}
        training = task.kind is TaskKind.FORWARD
        run = self._executor.forward if training else self._executor.evaluate
        values = run(task.moment.step, task.moment.micro_batch, arrived)
        direction = Direction.FORWARD if training else Direction.EVALUATE
        edges = self._edges.departures(direction, task.moment.micro_batch)
        sends = tuple((edge, self._encode(edge, values[edge.value])) for edge in edges)
        loss = float(values[self._loss]) if self._loss in values else None
        return Outcome(sends, loss, note=first_non_finite(self._graph, values) or "")

    def _backward(self, task: Task, taken: Mapping[Edge, Payload]) -> Outcome:
        gradients: dict[int, list[Tensor | None]] = defaultdict(list)
        for edge, payload in taken.items():
            gradients[edge.value].append(None if payload.type is None else self._decode(edge, payload))
        received = self._executor.backward(task.moment.step, task.moment.micro_batch, gradients)
        leaving = self._edges.departures(Direction.BACKWARD, task.moment.micro_batch)
        return Outcome(tuple((edge, self._encode(edge, received.get(edge.value))) for edge in leaving))

    def _report(self, taken: Mapping[Edge, Payload]) -> Outcome:
        """As the home of shared parameters agree on them, in the order of replicas, and send that; then the squares."""
        others: dict[int, dict[int, Tensor]] = defaultdict(dict)
        for edge in self._edges.gradients_in:
            others[edge.value][edge.source] = self._decode(edge, taken[edge])
        for value, terms in others.items():
            terms[self._edges.replica] = self._executor.shared(value)
            holders = sorted(terms)
            counts = [self._edges.turns_of(holder).before(self._executor.micro_batches) for holder in holders]
            self._executor.set_shared(value, self._executor.combine(value, [terms[holder] for holder in holders], counts))
        return Outcome(self._share(self._edges.sums_out), squares=self._executor.squares(self._edges.answers))

    def _share(self, edges: Sequence[Edge]) -> tuple[tuple[Edge, Payload], ...]:
        """Copies, once per parameter: an update must not change what is still being sent."""
        copies = {edge.value: self._encode(edge, self._executor.shared(edge.value).clone()) for edge in edges}
        return tuple((edge, copies[edge.value]) for edge in edges)

    def _take_sums(self, taken: Mapping[Edge, Payload]) -> None:
        for edge in self._edges.sums_in:
            self._executor.set_shared(edge.value, self._decode(edge, taken[edge]))

    def _decode(self, edge: Edge, payload: Payload) -> Tensor:
        return CODECS[payload.codec].decode(payload.data, self._graph.types[edge.value], self._device)

    def _encode(self, edge: Edge, tensor: Tensor | None) -> Payload:
        if tensor is None:
            return NOTHING
        codec = self._codec_of.get(edge, "none")
        return Payload(self._graph.types[edge.value], CODECS[codec].encode(tensor), codec)
