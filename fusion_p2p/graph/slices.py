"""Cutting a graph into slices: who computes which node, and which values cross."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_p2p.errors import GraphError
from fusion_p2p.graph.schema import MAX_NODES, Graph, is_random

MAX_COPIES = 4 * MAX_NODES
"""Constant nodes are copied into each slice that reads them; a stranger's cut must not make millions of them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One slice of a cut graph. All tuples are ascending; `nodes` are indices into `graph.nodes`, the rest are value numbers.

    nodes: what it computes, copies of constant nodes included.
    receives: values that lower slices compute and this one reads.
    sends: values computed here that higher slices read.
    inputs: graph inputs it reads (fed by the owner).
    parameters: parameters and buffers it reads or updates.
    outputs: graph outputs (the loss) computed here.
    """

    index: int
    nodes: tuple[int, ...]
    receives: tuple[int, ...]
    sends: tuple[int, ...]
    inputs: tuple[int, ...]
    parameters: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value computed by slice `source` and read by the higher slice `target`."""

    value: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Cut:
    """All slices and all crossings, crossings ordered by (value, target)."""

    slices: tuple[Slice, ...]
    edges: tuple[Crossing, ...]

    def holders(self, parameter: int) -> tuple[int, ...]:
        """The slices that hold a copy of a parameter; the first of several answers for it (tied parameters)."""
        return tuple(part.index for part in self.slices if parameter in part.parameters)


def constant_nodes(graph: Graph) -> frozenset[int]:
    """Indices of the nodes that read no input, no parameter and no randomness, directly or through others."""
    constant_values: set[int] = set()
    found: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if not is_random(node) and all(value in constant_values for value in node.reads()):
            found.add(index)
            constant_values.update(node.outputs)
    return frozenset(found)


def cut(graph: Graph, slice_of: Sequence[int]) -> Cut:
    """Group nodes by slice; `slice_of[n]` is the slice of node n, slices numbered from 0 without gaps.

    Nodes that read no input, no parameter and no randomness are copied into every slice that reads them instead of sent.
    GraphError when an edge goes to a lower slice, a slice is empty, or an updated buffer would live in two slices.
    """
    if len(slice_of) != len(graph.nodes):
        raise GraphError(f"the cut names a slice for {len(slice_of)} nodes, but the graph has {len(graph.nodes)}")
    if not slice_of or min(slice_of) < 0:
        raise GraphError("a cut needs at least one node, and slices are numbered from 0")
    return _Cutting(graph, slice_of).cut()


class _Cutting:
    """The tables that one call of `cut` fills."""

    def __init__(self, graph: Graph, slice_of: Sequence[int]) -> None:
        self.graph = graph
        self.slice_of = slice_of
        self.constants = constant_nodes(graph)
        self.producer = {value: index for index, node in enumerate(graph.nodes) for value in node.outputs}
        self.members: list[set[int]] = [set() for _ in range(max(slice_of) + 1)]
        """Node indices of each slice."""
        self.copies = 0
        self.readers: dict[int, set[int]] = defaultdict(set)
        """For each value that crosses, the slices that receive it."""

    def cut(self) -> Cut:
        for index, part in enumerate(self.slice_of):
            if index not in self.constants:
                self.members[part].add(index)
        holder = self._buffer_holders()
        self._place_constant_results(holder)
        for part in range(len(self.members)):
            self._copy_constants(part)
            self._find_crossings(part)
        edges = tuple(
            Crossing(value, self.slice_of[self.producer[value]], target)
            for value in sorted(self.readers)
            for target in sorted(self.readers[value])
        )
        return Cut(tuple(self._slice(part, holder) for part in range(len(self.members))), edges)

    def _buffer_holders(self) -> dict[int, int]:
        """The one slice of each updated buffer: where it is read, which must be where its new value is computed."""
        readers: dict[int, set[int]] = defaultdict(set)
        for part, nodes in enumerate(self.members):
            for value in self._read_by(nodes):
                readers[value].add(part)
        holder: dict[int, int] = {}
        for value in range(self.graph.first_parameter, self.graph.first_node_value):
            update = self.graph.parameter(value).update
            if update is None:
                continue
            source = self.producer[update]
            places = set(readers[value])
            if source not in self.constants or not places:
                places.add(self.slice_of[source])
            if len(places) > 1:
                name = self.graph.parameter(value).name
                raise GraphError(f"buffer {name!r} is updated, so slices {sorted(places)} cannot each hold a copy of it")
            holder[value] = places.pop()
        return holder

    def _place_constant_results(self, holder: dict[int, int]) -> None:
        """A constant node that is a graph output or a new buffer value has to run somewhere even if no node reads it."""
        for value in self.graph.outputs:
            source = self.producer.get(value)
            if source in self.constants:
                self.members[self.slice_of[source]].add(source)
        for buffer, part in holder.items():
            update = self.graph.parameter(buffer).update
            if update is not None and self.producer[update] in self.constants:
                self.members[part].add(self.producer[update])

    def _copy_constants(self, part: int) -> None:
        todo = list(self.members[part])
        while todo:
            for value in self.graph.nodes[todo.pop()].reads():
                source = self.producer.get(value)
                if source in self.constants and source not in self.members[part]:
                    self.members[part].add(source)
                    todo.append(source)
                    self._count_copy()

    def _count_copy(self) -> None:
        self.copies += 1
        if self.copies > MAX_COPIES:
            raise GraphError(f"the slices would need more than {MAX_COPIES} copies of constant nodes; use fewer slices")

    def _find_crossings(self, part: int) -> None:
        for index in self.members[part]:
            for value in self.graph.nodes[index].reads():
                source = self.producer.get(value)
                if source is None or source in self.members[part]:
                    continue
                if self.slice_of[source] > part:
                    raise GraphError(
                        f"node {index} ({self.graph.nodes[index].op}) in slice {part} reads value {value} "
                        f"of the higher slice {self.slice_of[source]}; edges go to the same or a higher slice"
                    )
                self.readers[value].add(part)

    def _read_by(self, nodes: Iterable[int]) -> set[int]:
        return {value for index in nodes for value in self.graph.nodes[index].reads()}

    def _slice(self, part: int, holder: dict[int, int]) -> Slice:
        nodes = sorted(self.members[part])
        if not nodes:
            raise GraphError(f"slice {part} of {len(self.members)} computes nothing; slices are numbered without gaps")
        reads = self._read_by(nodes)
        made = {value for index in nodes for value in self.graph.nodes[index].outputs}
        updated = {buffer for buffer, place in holder.items() if place == part}
        outputs = {value for value in self.graph.outputs if value in made and self.slice_of[self.producer[value]] == part}
        return Slice(
            index=part,
            nodes=tuple(nodes),
            receives=tuple(sorted(value for value in reads - made if value >= self.graph.first_node_value)),
            sends=tuple(sorted(value for value in made if value in self.readers and self._computes(part, value))),
            inputs=tuple(sorted(value for value in reads if self.graph.is_input(value))),
            parameters=tuple(sorted({value for value in reads if self.graph.is_parameter(value)} | updated)),
            outputs=tuple(sorted(outputs)),
        )

    def _computes(self, part: int, value: int) -> bool:
        return self.slice_of[self.producer[value]] == part
