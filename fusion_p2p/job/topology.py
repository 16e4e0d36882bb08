"""Which edges a slice reads and writes, derived from the cut graph; the same on every peer that has graph and plan.

For a value with a gradient every reader sends one back, or an explicit nothing (`FrameKind.NONE`). A trainable parameter
held by several slices (tied) is answered for by the first of them, its home: the others send it their gradient once a step,
and it sends the sum back, so that all copies get the same update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, Slice
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import OWNER, Direction, Edge

TRIGGER = 0xFFFF_FFFF
"""The pseudo-value that the owner feeds to a slice that waits for nothing else: without it the slice would not know when."""


@dataclass(frozen=True, slots=True)
class SliceEdges:
    """The edges of one slice, each tuple in (value, slice) order.

    feeds: graph inputs from the owner (or its trigger); forward_in, forward_out: values from and to other slices.
    backward_in: gradients of `forward_out` from their readers; backward_out: gradients of what it received.
    gradients_in, sums_out: of tied parameters at their home; gradients_out, sums_in: at the other holders.
    answers: trainable parameters whose sum of squares this slice reports, in graph order.
    """

    index: int
    feeds: tuple[Edge, ...]
    forward_in: tuple[Edge, ...]
    forward_out: tuple[Edge, ...]
    backward_in: tuple[Edge, ...]
    backward_out: tuple[Edge, ...]
    gradients_in: tuple[Edge, ...]
    gradients_out: tuple[Edge, ...]
    sums_in: tuple[Edge, ...]
    sums_out: tuple[Edge, ...]
    answers: tuple[int, ...]

    @property
    def evaluate_out(self) -> tuple[Edge, ...]:
        """`forward_out` in validation."""
        return tuple(as_evaluation(edge) for edge in self.forward_out)

    def arrivals(self, direction: Direction) -> tuple[Edge, ...]:
        """What a forward, validation or backward task waits for."""
        if direction is Direction.BACKWARD:
            return self.backward_in
        forward = self.feeds + self.forward_in
        return tuple(as_evaluation(edge) for edge in forward) if direction is Direction.EVALUATE else forward


FEED_CREDITS = 2
"""Values of one graph input that may wait at a slice."""


def edge_credits(plan: Plan, edges: Sequence[SliceEdges]) -> dict[Edge, int]:
    """How many values may be on the way or waiting, for every edge of the plan: its own and those that follow from them."""
    planned = {(edge.value, edge.source, edge.target): edge.credits for edge in plan.edges}
    credits: dict[Edge, int] = {}
    for part in edges:
        for edge in part.feeds + part.forward_in:
            allowed = planned.get((edge.value, edge.source, edge.target), FEED_CREDITS)
            credits[edge] = credits[as_evaluation(edge)] = allowed
        for edge in part.backward_in:
            credits[edge] = planned[edge.value, edge.target, edge.source]
        credits |= dict.fromkeys(part.gradients_in + part.sums_in, 1)
    return credits


def as_evaluation(edge: Edge) -> Edge:
    """The edge that carries the same value in validation."""
    return Edge(edge.value, edge.source, edge.target, Direction.EVALUATE)


def slice_edges(graph: Graph, cut: Cut) -> tuple[SliceEdges, ...]:
    """The edges of every slice, by slice number."""
    homes = tied_holders(graph, cut)
    return tuple(_edges_of(graph, cut, homes, index) for index in range(len(cut.slices)))


def tied_holders(graph: Graph, cut: Cut) -> dict[int, tuple[int, ...]]:
    """Trainable parameters held by more than one slice, with their holders; the first is the home."""
    trainable = [value for value in range(graph.first_parameter, graph.first_node_value) if graph.parameter(value).trainable]
    return {value: holders for value in trainable if len(holders := cut.holders(value)) > 1}


def _edges_of(graph: Graph, cut: Cut, tied: Mapping[int, tuple[int, ...]], index: int) -> SliceEdges:
    part = cut.slices[index]
    here = [edge for edge in cut.edges if index in (edge.source, edge.target)]
    crossing = [Edge(edge.value, edge.source, edge.target, Direction.FORWARD) for edge in here]
    gradients = [
        Edge(edge.value, edge.target, edge.source, Direction.BACKWARD) for edge in here if graph.types[edge.value].grad
    ]
    to_home = [Edge(value, holder, all_[0], Direction.TIED) for value, all_ in tied.items() for holder in all_[1:]]
    from_home = [Edge(edge.value, edge.target, edge.source, Direction.TIED) for edge in to_home]
    trainable = [value for value in part.parameters if graph.parameter(value).trainable]
    return SliceEdges(
        index=index,
        feeds=tuple(Edge(value, OWNER, index, Direction.FORWARD) for value in part.inputs or _trigger(part)),
        forward_in=_into(crossing, index),
        forward_out=_out_of(crossing, index),
        backward_in=_into(gradients, index),
        backward_out=_out_of(gradients, index),
        gradients_in=_into(to_home, index),
        gradients_out=_out_of(to_home, index),
        sums_in=_into(from_home, index),
        sums_out=_out_of(from_home, index),
        answers=tuple(value for value in trainable if cut.holders(value)[0] == index),
    )


def _trigger(part: Slice) -> tuple[int, ...]:
    return () if part.receives else (TRIGGER,)


def _into(edges: list[Edge], index: int) -> tuple[Edge, ...]:
    return tuple(sorted((edge for edge in edges if edge.target == index), key=lambda edge: (edge.value, edge.source)))


def _out_of(edges: list[Edge], index: int) -> tuple[Edge, ...]:
    return tuple(sorted((edge for edge in edges if edge.source == index), key=lambda edge: (edge.value, edge.target)))
