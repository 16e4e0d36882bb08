"""A cut model trained in one process, as owner and peers do together, with the real slices and codecs but without a network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fusion_p2p.compress.codec import EdgeCodec
from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Crossing, cut
from fusion_p2p.job.clipping import clip_coefficient
from fusion_p2p.wire.codecs import parse
from fusion_p2p.wire.frames import Moment
from fusion_p2p.wire.job_messages import TrainingSettings

HOST = torch.device("cpu")
NOTHING = "nothing"
"""Not a codec: the value and its gradient arrive as zeros. A control."""
NO_STEP = Moment(0, 0)
"""Steps count from 1: what crosses outside of them."""
Batch = Mapping[str, Tensor]
Cross = Callable[[Crossing, Tensor], Tensor]
Task = Callable[[int, int, Mapping[int, Tensor]], dict[int, Tensor]]


@dataclass(slots=True)
class Traffic:
    """Bytes of payloads that have a gradient, by the slice before the border, there and back, over `micro_batches`."""

    forward: dict[int, int] = field(default_factory=dict)
    backward: dict[int, int] = field(default_factory=dict)
    micro_batches: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(self.forward.values()) + sum(self.backward.values())


class CodedRun:
    """All slices; every value with a gradient and every gradient passes the codec of its edge."""

    def __init__(
        self,
        graph: Graph,
        slice_of: Sequence[int],
        settings: TrainingSettings,
        weights: Mapping[str, Tensor],
        micro_batches: int,
    ) -> None:
        self.graph, self.cut = graph, cut(graph, slice_of)
        self.micro_batches = micro_batches
        self.slices = [
            SliceExecutor(
                graph,
                part,
                SliceState.initial(graph, part, settings, HOST, weights),
                settings,
                micro_batches=micro_batches,
                recompute=False,
            )
            for part in self.cut.slices
        ]
        self.forward_s = [0.0] * len(self.slices)
        self.backward_s = [0.0] * len(self.slices)
        self.traffic = Traffic()
        self._spec: dict[Crossing, str] = {}
        self._codecs: dict[Crossing, tuple[EdgeCodec, EdgeCodec]] = {}

    def use(self, codecs: Sequence[str]) -> None:
        """From now on the edges out of slice i have codec i (the last one when there are fewer)."""
        self._spec, self._codecs = {}, {}
        for edge in self.cut.edges:
            self._spec[edge] = text = codecs[min(edge.source, len(codecs) - 1)]
            spec, key = parse("none" if text == NOTHING else text), (edge.value, edge.source, edge.target)
            kind = self.graph.types[edge.value]
            self._codecs[edge] = EdgeCodec(spec, kind, HOST, key), EdgeCodec(spec, kind, HOST, key)

    def train(self, step: int, batches: Sequence[Batch], rate: float, max_norm: float) -> float:
        """One whole step; the mean loss of its micro-batches."""
        losses = []
        for index, batch in enumerate(batches):
            losses.append(self._forward(Moment(step, index), batch))
            self._backward(Moment(step, index))
        self.traffic.micro_batches += len(batches)
        clip = clip_coefficient(self._squares(), max_norm)
        for executor in self.slices:
            executor.update(step, clip, rate)
        return math.fsum(losses) / len(losses)

    def evaluate(self, batches: Sequence[Batch], *, coded: bool) -> float:
        """The mean loss in evaluation, with codecs on the edges or as the exported model has it: without.

        Cuts that carry nothing do so in the exported model, too.
        """
        losses = []
        for index, batch in enumerate(batches):
            at = Moment(self.slices[0].state.step + 1, index)
            cross = self._evaluated if coded else self._as_exported
            losses.append(self._through(at, batch, cross, lambda executor: executor.evaluate))
        return math.fsum(losses) / len(losses)

    def _through(self, at: Moment, batch: Batch, cross: Cross, task: Callable[[SliceExecutor], Task]) -> float:
        made: dict[int, Tensor] = {number: batch[name] for number, name in enumerate(self.graph.inputs)}
        for part, executor in zip(self.cut.slices, self.slices, strict=True):
            arrived = {value: made[value] for value in part.inputs}
            for edge in self.cut.edges:
                if edge.target == part.index:
                    arrived[edge.value] = cross(edge, made[edge.value])
            begun = time.thread_time()
            run = task(executor)
            made |= run(at.step, at.micro_batch, arrived)
            if run == executor.forward:
                self.forward_s[part.index] += time.thread_time() - begun
        return float(made[self.graph.outputs[0]])

    def _forward(self, at: Moment, batch: Batch) -> float:
        return self._through(
            at, batch, lambda edge, tensor: self._forwarded(edge, at, tensor), lambda executor: executor.forward
        )

    def _forwarded(self, edge: Crossing, at: Moment, tensor: Tensor) -> Tensor:
        if self._spec[edge] == NOTHING:
            return torch.zeros_like(tensor)
        sender, reader = self._codecs[edge]
        payload = sender.encode_forward(at, tensor)
        self._count(self.traffic.forward, edge, len(payload))
        return reader.decode_forward(at, payload)

    def _as_exported(self, edge: Crossing, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor) if self._spec[edge] == NOTHING else tensor

    def _evaluated(self, edge: Crossing, tensor: Tensor) -> Tensor:
        if self._spec[edge] == NOTHING:
            return torch.zeros_like(tensor)
        sender, reader = self._codecs[edge]
        arrived = reader.decode_forward(NO_STEP, sender.encode_forward(NO_STEP, tensor))
        for end in (sender, reader):
            end.drop(NO_STEP)
        return arrived

    def _backward(self, at: Moment) -> None:
        returned: dict[Crossing, Tensor | None] = {}
        for part, executor in zip(reversed(self.cut.slices), reversed(self.slices), strict=True):
            wanted = {
                value: [returned[edge] for edge in self.cut.edges if edge.value == value]
                for value in part.sends
                if self.graph.types[value].grad
            }
            begun = time.thread_time()
            gradients = executor.backward(at.step, at.micro_batch, wanted)
            self.backward_s[part.index] += time.thread_time() - begun
            for edge in self.cut.edges:
                if edge.target == part.index and edge.value in gradients:
                    returned[edge] = self._backwarded(edge, at, gradients[edge.value])

    def _backwarded(self, edge: Crossing, at: Moment, gradient: Tensor | None) -> Tensor | None:
        if gradient is None or self._spec[edge] == NOTHING:
            return None
        sender, reader = self._codecs[edge]
        payload = reader.encode_backward(at, gradient)
        self._count(self.traffic.backward, edge, len(payload))
        return sender.decode_backward(at, payload)

    def _count(self, way: dict[int, int], edge: Crossing, num_bytes: int) -> None:
        if self.graph.types[edge.value].grad:
            way[edge.source] = way.get(edge.source, 0) + num_bytes

    def _squares(self) -> list[float]:
        """Of every trainable parameter's gradient, each held by one slice."""
        found: list[float] = []
        for part, executor in zip(self.cut.slices, self.slices, strict=True):
            trained = [value for value in part.parameters if self.graph.parameter(value).trainable]
            found += executor.squares(trained)
        return found
