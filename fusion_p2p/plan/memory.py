"""How much device memory a slice needs: arithmetic on declared sizes, the same for planners and for the peer that consents.

parameters   trainable bytes x (1 value + 1 gradient + optimiser moments) + 2 x buffer bytes (the pending update is kept aside)
in flight    in_flight x (bytes saved for backward + bytes of what it reads and sends)
             with recomputation: in_flight x bytes of what it reads and sends + 1 x bytes saved
credits      credits x (bytes it receives + bytes of the gradients it receives)
working      2 x its largest value (a value and its gradient while a node runs)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Slice
from fusion_p2p.wire.job_messages import OptimiserSettings

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Holding:
    """What bounds a slice's memory besides its size: micro-batches in flight, credits per edge, and the optimiser's moments."""

    in_flight: int
    credits: int
    moments: int
    recompute: bool = False


def num_moments(optimiser: OptimiserSettings) -> int:
    """Tensors of a parameter's size that an optimiser keeps."""
    if optimiser.name == "sgd":
        return 1 if optimiser.momentum else 0
    return 2


def slice_bytes(graph: Graph, part: Slice, saved_bytes: Sequence[int], holding: Holding) -> int:
    """Bytes of device memory a slice needs at most; `saved_bytes[n]` are the bytes node n keeps for its backward pass."""
    saved = sum(saved_bytes[node] for node in part.nodes)
    crossing = _num_bytes(graph, (*part.receives, *part.inputs, *part.sends))
    kept = holding.in_flight * crossing + (saved if holding.recompute else holding.in_flight * saved)
    gradients = _num_bytes(graph, (value for value in part.sends if graph.types[value].grad))
    arriving = holding.credits * (_num_bytes(graph, part.receives) + gradients)
    return _state_bytes(graph, part, holding.moments) + kept + arriving + _working_bytes(graph, part)


def gib(num_bytes: int) -> str:
    """Bytes for people: `3.1 GiB`, and MiB below a tenth of that unit."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def _state_bytes(graph: Graph, part: Slice, moments: int) -> int:
    trainable = _num_bytes(graph, (value for value in part.parameters if graph.parameter(value).trainable))
    buffers = _num_bytes(graph, part.parameters) - trainable
    return (2 + moments) * trainable + 2 * buffers


def _working_bytes(graph: Graph, part: Slice) -> int:
    return 2 * max((graph.types[value].num_bytes for node in part.nodes for value in graph.nodes[node].outputs), default=0)


def _num_bytes(graph: Graph, values: Iterable[int]) -> int:
    return sum(graph.types[value].num_bytes for value in values)
