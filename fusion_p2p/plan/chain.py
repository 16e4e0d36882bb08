"""A model as a chain of blocks: what schedulers cut. Every cut position knows what it costs to cut there.

Operators stay in topological order, so any set of positions is an acyclic cut. Position p lies before operator `positions[p]`;
what crosses it is every distinct value made before and read at or after it, once (a skip over a whole stage is counted at each
position it spans, FusionLLM's chain view of a DAG).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.graph.cut_layers import narrow_places
from fusion_p2p.graph.kinds import KINDS
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import constant_nodes
from fusion_p2p.plan.network import Floats
from fusion_p2p.plan.request import NodeCost


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A trainable parameter that several operators read: stages that hold a copy exchange its gradient once a step."""

    num_bytes: float
    readers: tuple[int, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """M operators, N blocks, N + 1 positions (position 0 and N are the ends). All figures are for one micro-batch.

    kinds: (M,) index into `graph.kinds.KINDS`. forward_flops, backward_flops, bytes_moved: (M,) per operator; the backward
    pass moves twice the bytes. positions: (N + 1,) ascending operator indices, 0 and M at the ends.
    crossing, crossing_back: (N + 1,) bytes forward and of gradients back at each position, 0 at the ends.
    parameter_bytes, buffer_bytes, saved_bytes: (N + 1,) sums over all operators before the position; a value is counted once,
    a parameter where it is first read. feed_bytes: (N + 1,) likewise, inputs that the owner sends; empty: none.
    tied: trainable parameters that several operators read.
    """

    name: str
    kinds: NDArray[np.int64]
    forward_flops: Floats
    backward_flops: Floats
    bytes_moved: Floats
    positions: NDArray[np.int64]
    crossing: Floats
    crossing_back: Floats
    parameter_bytes: Floats
    buffer_bytes: Floats
    saved_bytes: Floats
    feed_bytes: Floats = field(default_factory=lambda: np.zeros(0))
    tied: tuple[TiedParameter, ...] = ()

    @property
    def num_blocks(self) -> int:
        """N, the number of blocks between positions."""
        return len(self.positions) - 1

    def feed(self, first: int, last: int) -> float:
        """Bytes per micro-batch that the owner sends to a stage of blocks `first` to `last - 1`."""
        return float(self.feed_bytes[last] - self.feed_bytes[first]) if len(self.feed_bytes) else 0.0

    def work(self) -> Floats:
        """(N + 1,) FLOPs forward and backward of all operators before each position."""
        return _before(self.forward_flops + self.backward_flops)[self.positions]

    def holders(self, tied: TiedParameter, borders: Sequence[int]) -> list[int]:
        """The stages that hold a parameter, ascending, where stage i begins at position `borders[i]`."""
        starts = self.positions[list(borders)]
        return sorted({int(np.searchsorted(starts, reader, side="right")) - 1 for reader in tied.readers})

    def keep(self, kept: NDArray[np.int64]) -> Chain:
        """The same operators with only these of the positions, ascending, both ends among them."""
        return replace(
            self,
            positions=self.positions[kept],
            crossing=self.crossing[kept],
            crossing_back=self.crossing_back[kept],
            parameter_bytes=self.parameter_bytes[kept],
            buffer_bytes=self.buffer_bytes[kept],
            saved_bytes=self.saved_bytes[kept],
            feed_bytes=self.feed_bytes[kept] if len(self.feed_bytes) else self.feed_bytes,
        )


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator of a model that is given as a list, with the operators whose output it reads; for one micro-batch."""

    name: str
    forward_flops: float
    output_bytes: float
    predecessors: tuple[int, ...]
    parameter_bytes: float = 0.0
    saved_bytes: float = 0.0


def chain_of(graph: Graph, costs: Sequence[NodeCost], name: str = "") -> Chain:
    """The chain of a captured graph with the costs of its nodes on one micro-batch; O(nodes + values read).

    What is sent is what a cut sends (`graph.slices`): constants are copied instead, graph inputs come from the owner, and
    parameters stay where they are. A position lies at every legal boundary.
    """
    count = len(graph.nodes)
    positions = np.array([0, *legal_boundaries(graph), count], dtype=np.int64)
    read = _Reads.of(graph)
    parameters = range(graph.first_parameter, graph.first_node_value)
    trainable = [value for value in parameters if graph.parameter(value).trainable]
    buffers = [value for value in parameters if not graph.parameter(value).trainable]
    sent = {value: span for value, span in read.sent(graph).items() if span[1] > span[0]}
    back = {value: span for value, span in sent.items() if graph.types[value].grad}
    return Chain(
        name=name,
        kinds=np.array([KINDS.index(cost.kind) for cost in costs], dtype=np.int64),
        forward_flops=np.array([cost.forward_flops for cost in costs], dtype=np.float64),
        backward_flops=np.array([cost.backward_flops for cost in costs], dtype=np.float64),
        bytes_moved=np.array([cost.bytes_moved for cost in costs], dtype=np.float64),
        positions=positions,
        crossing=_alive(sent, _sizes(graph), count)[positions],
        crossing_back=_alive(back, _sizes(graph), count)[positions],
        parameter_bytes=_before(read.first_read_bytes(graph, trainable))[positions],
        buffer_bytes=_before(read.first_read_bytes(graph, buffers))[positions],
        saved_bytes=_before(np.array([cost.saved_bytes for cost in costs], dtype=np.float64))[positions],
        feed_bytes=_before(read.first_read_bytes(graph, range(graph.first_parameter)))[positions],
        tied=tuple(
            TiedParameter(graph.types[value].num_bytes, tuple(read.nodes[value]))
            for value in trainable
            if len(read.nodes.get(value, ())) > 1
        ),
    )


def chain_of_operators(name: str, operators: Sequence[Operator]) -> Chain:
    """The chain of a model given as operators in topological order; a backward pass is twice its forward pass.

    Bytes moved are taken as none, so FLOPs alone decide the time, as in the papers. Every boundary is a position.
    """
    count = len(operators)
    forward = np.array([operator.forward_flops for operator in operators], dtype=np.float64)
    spans = {index: (index, index) for index in range(count)}
    for index, operator in enumerate(operators):
        for source in operator.predecessors:
            spans[source] = (source, max(index, spans[source][1]))
    crossing = _alive(spans, {index: operator.output_bytes for index, operator in enumerate(operators)}, count)
    return Chain(
        name=name,
        kinds=np.zeros(count, dtype=np.int64),
        forward_flops=forward,
        backward_flops=2 * forward,
        bytes_moved=np.zeros(count),
        positions=np.arange(count + 1, dtype=np.int64),
        crossing=crossing,
        crossing_back=crossing.copy(),
        parameter_bytes=_before(np.array([operator.parameter_bytes for operator in operators], dtype=np.float64)),
        buffer_bytes=np.zeros(count + 1),
        saved_bytes=_before(np.array([operator.saved_bytes for operator in operators], dtype=np.float64)),
    )


def coarsen(chain: Chain, max_blocks: int) -> Chain:
    """At most `max_blocks` blocks: of positions that lie close together only the cheapest to cut at, then one per FLOP share.

    Close is within 1 / (20 max_blocks) of all FLOPs. A chain that is short enough stays as it is.
    """
    if chain.num_blocks <= max_blocks:
        return chain
    work = chain.work()
    kept = _cheapest_of_close(work, chain.crossing, work[-1] / (20 * max(50, max_blocks)))
    if len(kept) - 1 > max_blocks:
        kept = _cheapest_per_share(work, chain.crossing, kept, max_blocks)
    return chain.keep(np.array(kept, dtype=np.int64))


def legal_boundaries(graph: Graph) -> tuple[int, ...]:
    """Every b so that nodes before b and nodes from b on may lie in different slices, ascending, without the two ends.

    Node b and a node before the first boundary are not constant, so that no slice between boundaries computes nothing; no
    boundary lies between nodes that read or update one buffer, because an updated buffer lives in one slice. A graph with cut
    layers is cut nowhere else.
    """
    constants = constant_nodes(graph)
    working = [index for index in range(len(graph.nodes)) if index not in constants]
    blocked = [0] * (len(graph.nodes) + 1)
    for first, last in _buffer_spans(graph):
        blocked[first + 1] += 1
        blocked[last + 1] -= 1
    depth = list(accumulate(blocked))
    legal = tuple(boundary for boundary in working[1:] if depth[boundary] == 0)
    after = [[boundary for boundary in legal if boundary >= place] for place in narrow_places(graph)]
    return tuple(sorted({found[0] for found in after if found})) or legal


@dataclass(frozen=True, slots=True)
class _Reads:
    """The nodes that read each value, ascending."""

    nodes: dict[int, list[int]]

    @classmethod
    def of(cls, graph: Graph) -> _Reads:
        nodes: dict[int, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            for value in set(node.reads()):
                nodes.setdefault(value, []).append(index)
        return cls(nodes)

    def sent(self, graph: Graph) -> dict[int, tuple[int, int]]:
        """For every value that a cut would send, the node that makes it and the last that reads it."""
        constants = constant_nodes(graph)
        made = ((index, node) for index, node in enumerate(graph.nodes) if index not in constants)
        return {value: (index, self.nodes.get(value, [index])[-1]) for index, node in made for value in node.outputs}

    def first_read_bytes(self, graph: Graph, values: Sequence[int]) -> Floats:
        """(M,) bytes of those values that each node is the first to read; what no node reads counts at the first."""
        at_node = np.zeros(len(graph.nodes))
        for value in values:
            at_node[self.nodes.get(value, [0])[0]] += graph.types[value].num_bytes
        return at_node


def _sizes(graph: Graph) -> dict[int, float]:
    return {value: float(graph.types[value].num_bytes) for value in range(graph.first_node_value, len(graph.types))}


def _before(at_operator: Floats) -> Floats:
    """(M + 1,) sums of all that comes before each boundary."""
    return np.concatenate([np.zeros(1), np.cumsum(at_operator)])


def _alive(spans: Mapping[int, tuple[int, int]], sizes: Mapping[int, float], count: int) -> Floats:
    """(M + 1,) bytes of the values that are made before each boundary and read at or after it, by differences."""
    change = np.zeros(count + 2)
    for value, (maker, reader) in spans.items():
        change[maker + 1] += sizes[value]
        change[reader + 1] -= sizes[value]
    return np.cumsum(change)[: count + 1]


def _cheapest_of_close(work: Floats, crossing: Floats, span: float) -> list[int]:
    kept = [0]
    start, end = 1, len(work) - 1
    while start < end:
        stop = max(start + 1, min(end, int(np.searchsorted(work, work[start] + span, side="right"))))
        best = start + int(np.argmin(crossing[start:stop]))
        kept.append(best)
        start = stop
    return [*kept, end]


def _cheapest_per_share(work: Floats, crossing: Floats, kept: Sequence[int], max_blocks: int) -> list[int]:
    """Of the positions in each of `max_blocks` equal shares of the FLOPs the one with the fewest bytes."""
    inner = np.array(kept[1:-1], dtype=np.int64)
    share = np.ceil(work[inner] / work[-1] * max_blocks)
    chosen = [group[np.argmin(crossing[group])] for group in (inner[share == number] for number in np.unique(share))]
    return [0, *(int(position) for position in chosen[: max_blocks - 1]), kept[-1]]


def _buffer_spans(graph: Graph) -> Iterator[tuple[int, int]]:
    """First and last node that read or update each updated buffer."""
    touched: dict[int, list[int]] = {}
    updated = {graph.first_parameter + i: p.update for i, p in enumerate(graph.parameters) if p.update is not None}
    producers = {update: value for value, update in updated.items()}
    for index, node in enumerate(graph.nodes):
        for value in (*node.reads(), *node.outputs):
            buffer = value if value in updated else producers.get(value) if value in node.outputs else None
            if buffer is not None:
                touched.setdefault(buffer, []).append(index)
    for nodes in touched.values():
        yield nodes[0], nodes[-1]
