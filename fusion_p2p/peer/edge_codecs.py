"""The codecs of all edges of one replica: tensors to payloads and back, on the thread that codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.compress.codec import EdgeCodec
from fusion_p2p.compress.dense import from_bytes, to_bytes
from fusion_p2p.errors import SliceFailed
from fusion_p2p.execute.handover import Handed, SideStream, hand_over
from fusion_p2p.execute.interpreter import describe
from fusion_p2p.execute.slice import first_non_finite
from fusion_p2p.graph.opset import OPERATOR_ERRORS
from fusion_p2p.graph.schema import Graph
from fusion_p2p.job.topology import ReplicaEdges
from fusion_p2p.net.values import NOTHING, Payload
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.codecs import NONE, CodecSpec, parse
from fusion_p2p.wire.frames import Direction, Edge, Moment

CODED = frozenset({Direction.FORWARD, Direction.BACKWARD})
"""What codecs apply to: training. Validation is of the model as it is exported, without them, so its values travel dense."""


def planned_codecs(plan: Plan, edges: Sequence[ReplicaEdges]) -> dict[Edge, CodecSpec]:
    """What the plan says of every edge between replicas, by its forward direction."""
    planned = {(edge.value, edge.source, edge.target): parse(edge.codec) for edge in plan.edges}
    slice_of = {part.replica: part.slice for part in edges}
    return {edge: planned[edge.value, slice_of[edge.source], part.slice] for part in edges for edge in part.forward_in}


def as_forward(edge: Edge) -> Edge:
    """The edge on which the value travels that this one carries, or carries the gradient of."""
    ends = (edge.target, edge.source) if edge.direction is Direction.BACKWARD else (edge.source, edge.target)
    return Edge(edge.value, *ends, Direction.FORWARD)


def codec_of(planned: Mapping[Edge, CodecSpec], edge: Edge) -> CodecSpec:
    """The codec of what travels on an edge in its direction."""
    return planned.get(as_forward(edge), NONE) if edge.direction in CODED else NONE


_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Coded:
    """A payload to send, and what is wrong with the tensor if its codec refused it."""

    payload: Payload
    note: str = ""


class EdgeCodecs:
    """One codec per edge to or from a replica; feeds, sums of gradients and validation travel as they are.

    All calls belong on one thread, which need not be the one that computes.
    """

    def __init__(self, graph: Graph, edges: ReplicaEdges, planned: Mapping[Edge, CodecSpec], device: torch.device) -> None:
        self._graph, self._device = graph, device
        self._stream = SideStream(device)
        self._codecs = {
            edge: EdgeCodec(planned[edge], graph.types[edge.value], device, (edge.value, edge.source, edge.target))
            for edge in edges.forward_in + edges.forward_out
        }

    def encode(self, edge: Edge, moment: Moment, handed: Handed) -> Coded:
        """What is sent; without a tensor an explicit nothing. SliceFailed when memory runs out."""
        with self._working(edge, moment):
            tensor = handed.take()
            payload = self._encode(edge, moment, tensor)
            refused = (
                tensor is not None and payload.codec != "none" and not payload.data and edge.direction is Direction.BACKWARD
            )
            return Coded(payload, self._complaint(edge.value, tensor) if refused and tensor is not None else "")

    def decode(self, edge: Edge, moment: Moment, payload: Payload) -> Handed:
        """What arrived. WireError for what no encoder could have made, SliceFailed when memory runs out."""
        with self._working(edge, moment):
            return hand_over(self._decode(edge, moment, payload))

    @contextmanager
    def _working(self, edge: Edge, moment: Moment) -> Iterator[None]:
        try:
            with self._stream.used():
                yield
        except OPERATOR_ERRORS as error:
            where = f"value {edge.value} at step {moment.step}, micro-batch {moment.micro_batch}"
            raise SliceFailed(f"cannot code {where}: {describe(error)}") from None

    def _encode(self, edge: Edge, moment: Moment, tensor: Tensor | None) -> Payload:
        codec = self._of(edge)
        if tensor is None:
            if codec is not None:
                codec.drop(moment)
            return NOTHING
        type_ = self._graph.types[edge.value]
        if codec is None:
            return Payload(type_, to_bytes(tensor))
        encode = codec.encode_forward if edge.direction is Direction.FORWARD else codec.encode_backward
        return Payload(type_, encode(moment, tensor), codec.family)

    def _decode(self, edge: Edge, moment: Moment, payload: Payload) -> Tensor | None:
        codec = self._of(edge)
        if payload.type is None:
            if codec is not None:
                codec.drop(moment)
            return None
        if codec is None:
            # What is shared waits for the end of the step: on the host, where it does not take the device's memory.
            return from_bytes(payload.data, payload.type, _HOST if edge.direction is Direction.TIED else self._device)
        decode = codec.decode_forward if edge.direction is Direction.FORWARD else codec.decode_backward
        return decode(moment, payload.data)

    def _complaint(self, value: int, gradient: Tensor) -> str:
        """What is wrong with a gradient that its codec refused."""
        return f"gradient of {first_non_finite(self._graph, {value: gradient}) or f'value {value} is refused'}"

    def forget(self, step: int) -> None:
        """This step is over."""
        for codec in self._codecs.values():
            codec.forget(step)

    def _of(self, edge: Edge) -> EdgeCodec | None:
        return self._codecs.get(as_forward(edge)) if edge.direction in CODED else None
