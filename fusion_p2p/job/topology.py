"""Which edges a slice reads and writes, derived from the cut graph; the same on every peer that has graph and plan.

For a value with a gradient every reader sends one back, or an explicit nothing (`FrameKind.NONE`). A trainable parameter
held by several slices (tied) is answered for by the first of them, its home: the others send it their gradient once a step,
and it sends the sum back, so that all copies get the same update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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
    """The edges of every slice, by slice number. One pass over everything: the graph may be a stranger's."""
    holders = _holders(graph, cut)
    forward = [Edge(edge.value, edge.source, edge.target, Direction.FORWARD) for edge in cut.edges]
    backward = [_turned(edge, Direction.BACKWARD) for edge in forward if graph.types[edge.value].grad]
    to_home = [Edge(value, holder, all_[0], Direction.TIED) for value, all_ in holders.items() for holder in all_[1:]]
    from_home = [_turned(edge, Direction.TIED) for edge in to_home]
    every = {"forward": forward, "backward": backward, "to_home": to_home, "from_home": from_home}
    into = {name: _grouped(edges, by_target=True) for name, edges in every.items()}
    out_of = {name: _grouped(edges, by_target=False) for name, edges in every.items()}
    return tuple(
        SliceEdges(
            index=part.index,
            feeds=tuple(Edge(value, OWNER, part.index, Direction.FORWARD) for value in part.inputs or _trigger(part)),
            forward_in=into["forward"].get(part.index, ()),
            forward_out=out_of["forward"].get(part.index, ()),
            backward_in=into["backward"].get(part.index, ()),
            backward_out=out_of["backward"].get(part.index, ()),
            gradients_in=into["to_home"].get(part.index, ()),
            gradients_out=out_of["to_home"].get(part.index, ()),
            sums_in=into["from_home"].get(part.index, ()),
            sums_out=out_of["from_home"].get(part.index, ()),
            answers=tuple(value for value in part.parameters if value in holders and holders[value][0] == part.index),
        )
        for part in cut.slices
    )


def _holders(graph: Graph, cut: Cut) -> dict[int, tuple[int, ...]]:
    """The slices that hold each trainable parameter, in order."""
    held: dict[int, list[int]] = defaultdict(list)
    for part in cut.slices:
        for value in part.parameters:
            if graph.parameter(value).trainable:
                held[value].append(part.index)
    return {value: tuple(holders) for value, holders in sorted(held.items())}


def _grouped(edges: list[Edge], *, by_target: bool) -> dict[int, tuple[Edge, ...]]:
    """Edges by the slice they enter (or leave), ordered by value, then by the slice at the other end."""
    groups: dict[int, list[Edge]] = defaultdict(list)
    for edge in sorted(edges, key=lambda edge: (edge.value, edge.source, edge.target)):
        groups[edge.target if by_target else edge.source].append(edge)
    return {index: tuple(group) for index, group in groups.items()}


def _turned(edge: Edge, direction: Direction) -> Edge:
    return Edge(edge.value, edge.target, edge.source, direction)


def _trigger(part: Slice) -> tuple[int, ...]:
    return () if part.receives else (TRIGGER,)
