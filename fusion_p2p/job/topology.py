"""Which edges a replica reads and writes, derived from graph, cut and plan; the same on every peer that has them.

A value goes from each replica of the slice that computes it to each replica that reads it, but only for the micro-batches that
both execute. For a value with a gradient every reader sends one back, or an explicit nothing (`FrameKind.NONE`).

Of what several replicas hold one is the home (`plan.sharing`): the others send it their gradient once a step, and it sends the
sum back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, Slice
from fusion_p2p.plan.plan import FEED_CREDITS, Plan, Turns
from fusion_p2p.plan.sharing import Groups, groups_of, holders_of, homes_of
from fusion_p2p.wire.frames import OWNER, Direction, Edge

TRIGGER = 0xFFFF_FFFF
"""The pseudo-value that the owner feeds to a replica that waits for nothing else: without it, it would not know when."""
EVERY = Turns()
"""The turns of the owner, and of a slice's only member."""


@dataclass(frozen=True, slots=True)
class ReplicaEdges:
    """The edges of one replica, each tuple in (value, replica at the other end) order.

    feeds: graph inputs from the owner (or its trigger); forward_in, forward_out: values from and to other slices.
    backward_in: gradients of `forward_out` from their readers; backward_out: gradients of what it received.
    gradients_in, sums_out: of shared parameters and buffers at their home; gradients_out, sums_in: at the other holders.
    answers: trainable parameters whose sum of squares this replica reports, in graph order.
    turns: the micro-batches of this replica and of those it exchanges values with; who is not named executes all.
    """

    replica: int
    slice: int
    feeds: tuple[Edge, ...] = ()
    forward_in: tuple[Edge, ...] = ()
    forward_out: tuple[Edge, ...] = ()
    backward_in: tuple[Edge, ...] = ()
    backward_out: tuple[Edge, ...] = ()
    gradients_in: tuple[Edge, ...] = ()
    gradients_out: tuple[Edge, ...] = ()
    sums_in: tuple[Edge, ...] = ()
    sums_out: tuple[Edge, ...] = ()
    answers: tuple[int, ...] = ()
    turns: Mapping[int, Turns] = field(default_factory=dict)
    _carried: dict[tuple[Direction, bool, int], tuple[Edge, ...]] = field(default_factory=dict, repr=False, compare=False)
    """Answers of `arrivals` and `departures`: they are asked for again and again."""

    @property
    def own_turns(self) -> Turns:
        """The micro-batches that this replica executes."""
        return self.turns_of(self.replica)

    def turns_of(self, replica: int) -> Turns:
        """The micro-batches that another one executes, or the owner feeds."""
        return self.turns.get(replica, EVERY)

    def carries(self, edge: Edge, micro_batch: int) -> bool:
        """Whether this micro-batch's value crosses the edge: both ends execute it. What is said once a step is numbered 0."""
        if edge.direction is Direction.TIED:
            return micro_batch == 0
        return all(micro_batch in self.turns_of(end) for end in (edge.source, edge.target))

    def arrivals(self, direction: Direction, micro_batch: int) -> tuple[Edge, ...]:
        """What a forward, validation or backward task waits for."""
        edges = self.backward_in if direction is Direction.BACKWARD else self.feeds + self.forward_in
        return self._carrying(edges, (direction, True, micro_batch))

    def departures(self, direction: Direction, micro_batch: int) -> tuple[Edge, ...]:
        """Where the values of a forward, validation or backward task go."""
        edges = self.backward_out if direction is Direction.BACKWARD else self.forward_out
        return self._carrying(edges, (direction, False, micro_batch))

    def _carrying(self, edges: tuple[Edge, ...], asked: tuple[Direction, bool, int]) -> tuple[Edge, ...]:
        found = self._carried.get(asked)
        if found is None:
            direction, _, micro_batch = asked
            carrying = (edge for edge in edges if self.carries(edge, micro_batch))
            found = tuple(as_evaluation(edge) for edge in carrying) if direction is Direction.EVALUATE else tuple(carrying)
            self._carried[asked] = found
        return found


def edge_credits(plan: Plan, edges: Sequence[ReplicaEdges]) -> dict[Edge, int]:
    """How many values may be on the way or waiting, for every edge of the plan: its own and those that follow from them."""
    planned = {(edge.value, edge.source, edge.target): edge.credits for edge in plan.edges}
    slice_of = {part.replica: part.slice for part in edges} | {OWNER: OWNER}
    credits: dict[Edge, int] = {}
    for part in edges:
        for edge in part.feeds + part.forward_in:
            allowed = planned.get((edge.value, slice_of[edge.source], part.slice), FEED_CREDITS)
            credits[edge] = credits[as_evaluation(edge)] = allowed
        for edge in part.backward_in:
            credits[edge] = planned[edge.value, part.slice, slice_of[edge.source]]
        credits |= dict.fromkeys(part.gradients_in + part.sums_in, 1)
    return credits


def as_evaluation(edge: Edge) -> Edge:
    """The edge that carries the same value in validation."""
    return Edge(edge.value, edge.source, edge.target, Direction.EVALUATE)


def replica_edges(graph: Graph, cut: Cut, plan: Plan) -> tuple[ReplicaEdges, ...]:
    """The edges of every replica, by replica number. `plan` has been checked: that bounds the work, a stranger's too."""
    replicas = plan.replicas
    turns = {number: replica.turns for number, replica in enumerate(replicas)}
    groups = groups_of([len(part.members) for part in plan.slices])
    holders = holders_of(graph, cut, groups)
    homes = homes_of(graph, holders, groups)
    forward = _forward(cut, groups, turns)
    backward = [_turned(edge, Direction.BACKWARD) for edge in forward if graph.types[edge.value].grad]
    to_home = [
        Edge(value, holder, homes[value], Direction.TIED)
        for value, all_ in holders.items()
        for holder in all_
        if holder != homes[value]
    ]
    every = [forward, backward, to_home, [_turned(edge, Direction.TIED) for edge in to_home]]
    forward_in, backward_in, gradients_in, sums_in = (_grouped(edges, by_target=True) for edges in every)
    forward_out, backward_out, gradients_out, sums_out = (_grouped(edges, by_target=False) for edges in every)
    answers = _answers(graph, homes)
    return tuple(
        ReplicaEdges(
            replica=number,
            slice=replica.slice,
            feeds=tuple(Edge(value, OWNER, number, Direction.FORWARD) for value in _fed(cut.slices[replica.slice])),
            forward_in=forward_in[number],
            forward_out=forward_out[number],
            backward_in=backward_in[number],
            backward_out=backward_out[number],
            gradients_in=gradients_in[number],
            gradients_out=gradients_out[number],
            sums_in=sums_in[number],
            sums_out=sums_out[number],
            answers=tuple(answers[number]),
            turns=turns,
        )
        for number, replica in enumerate(replicas)
    )


def _forward(cut: Cut, groups: Groups, turns: Mapping[int, Turns]) -> list[Edge]:
    """An edge of the cut for each pair of replicas that ever work on the same micro-batch."""
    pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, target in {(edge.source, edge.target) for edge in cut.edges}:
        every = product(groups[source], groups[target])
        pairs[source, target] = [(one, other) for one, other in every if turns[one].meets(turns[other])]
    return [
        Edge(edge.value, source, target, Direction.FORWARD)
        for edge in cut.edges
        for source, target in pairs[edge.source, edge.target]
    ]


def _answers(graph: Graph, homes: Mapping[int, int]) -> dict[int, list[int]]:
    """The trainable parameters that each replica is the home of, in graph order."""
    answers: dict[int, list[int]] = defaultdict(list)
    for value in sorted(homes):
        if graph.parameter(value).trainable:
            answers[homes[value]].append(value)
    return answers


def _grouped(edges: list[Edge], *, by_target: bool) -> dict[int, tuple[Edge, ...]]:
    """Edges by the replica they enter (or leave), ordered by value, then by the replica at the other end."""
    groups: dict[int, list[Edge]] = defaultdict(list)
    for edge in sorted(edges, key=lambda edge: (edge.value, edge.source, edge.target)):
        groups[edge.target if by_target else edge.source].append(edge)
    return defaultdict(tuple, {index: tuple(group) for index, group in groups.items()})


def _turned(edge: Edge, direction: Direction) -> Edge:
    return Edge(edge.value, edge.target, edge.source, direction)


def _fed(part: Slice) -> tuple[int, ...]:
    """What the owner feeds to a slice."""
    return part.inputs or (() if part.receives else (TRIGGER,))
