"""The papers' baseline: F / P FLOPs for each of P peers, in graph order (FusionLLM, arXiv 2410.12707, "equal-compute").

Nodes stay in graph order, so every cut is contiguous and every edge goes forward. A border lies at the legal node boundary
nearest to its share; a boundary between the nodes that read and update one buffer is not legal, because an updated buffer
lives in one slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, constant_nodes, cut
from fusion_p2p.plan.memory import Holding, gib, num_moments, slice_bytes
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import NodeCost, NoPlan, PeerCapability, PlanRequest

CREDITS = 2
"""Values per edge that a receiver lets come ahead of what it works on: one in use, one on its way."""
NAME = "equal-compute"


def equal_compute(
    graph: Graph, costs: Sequence[NodeCost], peers: Sequence[PeerCapability], request: PlanRequest
) -> Plan | NoPlan:
    """One slice per peer in the order of `peers`, of equal FLOPs; NoPlan when there is no peer or a slice does not fit."""
    if not peers:
        return NoPlan("no peer is free")
    flops = [cost.forward_flops + cost.backward_flops for cost in costs]
    borders = choose_borders(flops, legal_boundaries(graph), len(peers))
    slice_of = tuple(sum(border <= node for border in borders) for node in range(len(graph.nodes)))
    parts = cut(graph, slice_of)
    slices = _size_slices(_Sizing(graph, parts, [cost.saved_bytes for cost in costs], request), peers)
    if isinstance(slices, NoPlan):
        return slices
    spare = tuple((peer.peer, "the graph has fewer places to cut than there are peers") for peer in peers[len(slices) :])
    return Plan(
        graph=request.graph,
        scheduler=NAME,
        micro_batches=request.micro_batches,
        slice_of=slice_of,
        slices=slices,
        edges=tuple(EdgePlan(edge.value, edge.source, edge.target, credits=CREDITS) for edge in parts.edges),
        idle=request.idle + spare,
        predicted_step_s=_predict(flops, slice_of, peers, request.micro_batches),
    )


def legal_boundaries(graph: Graph) -> tuple[int, ...]:
    """Every b so that nodes before b and nodes from b on may lie in different slices, ascending, without the two ends.

    Node b and a node before the first boundary are not constant, so that no slice between boundaries computes nothing.
    """
    constants = constant_nodes(graph)
    working = [index for index in range(len(graph.nodes)) if index not in constants]
    blocked = [0] * (len(graph.nodes) + 1)
    for first, last in _buffer_spans(graph):
        blocked[first + 1] += 1
        blocked[last + 1] -= 1
    depth = list(accumulate(blocked))
    return tuple(boundary for boundary in working[1:] if depth[boundary] == 0)


def choose_borders(flops: Sequence[float], legal: Sequence[int], num_slices: int) -> tuple[int, ...]:
    """Up to `num_slices - 1` of the legal boundaries, ascending, each the nearest possible to its share of the FLOPs."""
    before = [0.0, *accumulate(flops)]
    count = min(num_slices - 1, len(legal))
    chosen: list[int] = []
    start = 0
    for index in range(count):
        share = before[-1] * (index + 1) / (count + 1)
        candidates = range(start, len(legal) - (count - index) + 1)
        best = min(candidates, key=lambda position: abs(before[legal[position]] - share))
        chosen.append(legal[best])
        start = best + 1
    return tuple(chosen)


def default_in_flight(index: int, num_slices: int, micro_batches: int) -> int:
    """Micro-batches a slice may hold: enough that a gradient's way there and back is hidden, fewer towards the loss."""
    return max(1, min(micro_batches, 2 * (num_slices - index)))


@dataclass(frozen=True, slots=True)
class _Sizing:
    graph: Graph
    parts: Cut
    saved_bytes: Sequence[int]
    request: PlanRequest

    def need(self, index: int, in_flight: int) -> int:
        moments = num_moments(self.request.optimiser)
        holding = Holding(in_flight, CREDITS, moments, self.request.recompute)
        return slice_bytes(self.graph, self.parts.slices[index], self.saved_bytes, holding)


def _size_slices(sizing: _Sizing, peers: Sequence[PeerCapability]) -> tuple[SlicePlan, ...] | NoPlan:
    """For each slice as many micro-batches in flight as its peer's memory allows, at most the default."""
    slices: list[SlicePlan] = []
    total = len(sizing.parts.slices)
    for index, peer in zip(range(total), peers, strict=False):
        most = default_in_flight(index, total, sizing.request.micro_batches)
        fits = next((held for held in range(most, 0, -1) if sizing.need(index, held) <= peer.free_bytes), None)
        if fits is None:
            need = sizing.need(index, 1)
            missing = gib(need - peer.free_bytes)
            return NoPlan(f"slice {index} needs {missing} more ({gib(need)} on {peer.peer}, {gib(peer.free_bytes)} free)")
        slices.append(SlicePlan(peer.peer, fits, sizing.request.recompute))
    return tuple(slices)


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


def _predict(flops: Sequence[float], slice_of: Sequence[int], peers: Sequence[PeerCapability], micro_batches: int) -> float:
    """Seconds per step of the pipeline without its links: the slowest slice for each micro-batch, the others once."""
    seconds = [0.0] * (max(slice_of, default=0) + 1)
    for node, index in enumerate(slice_of):
        seconds[index] += flops[node] / max(peers[index].flops_per_s, 1.0)
    return sum(seconds) + (micro_batches - 1) * max(seconds)
