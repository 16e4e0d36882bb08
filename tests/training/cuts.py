"""Random legal cuts of a graph: any assignment of nodes to slices in which every edge goes to the same or a higher slice."""

from __future__ import annotations

import random

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, constant_nodes


def random_cut(graph: Graph, rng: random.Random, num_slices: int, disorder: float) -> list[int]:
    """Slice of each node, for `graph.slices.cut`, with at most `num_slices` slices and no gaps.

    With `disorder` 0 the cut is contiguous in topological order; otherwise a node's place is off by up to that share of the
    graph, as far as what it reads allows: so cuts run through residual and attention branches.
    """
    constants = constant_nodes(graph)
    place: dict[int, int] = {}
    wanted: dict[int, int] = {}
    for index, node in enumerate(graph.nodes):
        if index in constants:
            continue
        share = index / len(graph.nodes) + disorder * rng.uniform(-1, 1)
        low = max((place[value] for value in node.reads() if value in place), default=0)
        wanted[index] = max(low, min(num_slices - 1, max(0, int(share * num_slices))))
        place.update(dict.fromkeys(node.outputs, wanted[index]))
    number = {part: rank for rank, part in enumerate(sorted(set(wanted.values())))}
    return [number[wanted[index]] if index in wanted else 0 for index in range(len(graph.nodes))]


def is_contiguous(graph: Graph, slice_of: list[int]) -> bool:
    """Whether the cut is a list of places in topological order, as cuts of layers are; constant nodes aside."""
    constants = constant_nodes(graph)
    order = [part for index, part in enumerate(slice_of) if index not in constants]
    return order == sorted(order)


def skips_or_branches(cut: Cut) -> bool:
    """Whether some value passes over a slice or has readers in several: an edge of a residual branch was cut."""
    readers: dict[int, int] = {}
    for edge in cut.edges:
        readers[edge.value] = readers.get(edge.value, 0) + 1
    return any(edge.target - edge.source > 1 for edge in cut.edges) or any(count > 1 for count in readers.values())


def random_cuts(graph: Graph, seed: int, count: int = 24) -> list[list[int]]:
    """Cuts of 1 to 12 slices in turn; two of three are not contiguous in topological order (one slice always is)."""
    rng = random.Random(seed)
    cuts: list[list[int]] = []
    while len(cuts) < count:
        num_slices = len(cuts) % 12 + 1
        contiguous = num_slices == 1 or len(cuts) % 3 == 0
        cuts.append(_cut_like(graph, rng, num_slices, contiguous=contiguous))
    return cuts


def _cut_like(graph: Graph, rng: random.Random, num_slices: int, *, contiguous: bool) -> list[int]:
    for attempt in range(1000):
        disorder = 0.0 if contiguous else rng.uniform(0.02, 0.1 + attempt / 1000)
        slice_of = random_cut(graph, rng, num_slices + attempt // 100, disorder)
        if max(slice_of) + 1 == num_slices and is_contiguous(graph, slice_of) == contiguous:
            return slice_of
    raise AssertionError(f"no cut into {num_slices} slices found")
