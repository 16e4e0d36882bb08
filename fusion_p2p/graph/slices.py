"""Cutting a graph into slices: who computes which node, and which values cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_p2p.graph.schema import Graph


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


def cut(graph: Graph, slice_of: Sequence[int]) -> Cut:
    """Group nodes by slice; `slice_of[n]` is the slice of node n, slices numbered from 0 without gaps.

    Nodes that read no input, no parameter and no randomness are copied into every slice that reads them instead of sent.
    GraphError when an edge goes to a lower slice, a slice is empty, or an updated buffer would live in two slices.
    """
    raise NotImplementedError
