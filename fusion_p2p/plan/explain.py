"""A plan in words: who computes what, what crosses, and who is idle and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, Slice
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.memory import Holding, gib, num_moments, slice_bytes
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NodeCost
from fusion_p2p.wire.job_messages import OptimiserSettings

SHORT_PEER = 8


def explain(plan: Plan, graph: Graph, parts: Cut, costs: Sequence[NodeCost], optimiser: OptimiserSettings) -> tuple[str, ...]:
    """Lines of text: one per slice, one per pair of slices with traffic, per tied parameter and per idle peer."""
    return (
        f"{plan.scheduler}: {len(plan.slices)} slices on {len({part.peer for part in plan.slices})} peers, "
        f"{plan.micro_batches} micro-batches, about {plan.predicted_step_s:.2f} s of compute a step",
        *_slice_lines(plan, graph, parts, costs, num_moments(optimiser)),
        *_edge_lines(plan, graph),
        *_tied_lines(graph, parts),
        *(f"idle {short_peer(peer)}: {reason}" for peer, reason in plan.idle),
    )


def short_peer(peer: PeerId) -> str:
    """The end of a peer id: its beginning is the same for all Ed25519 keys."""
    return peer[-SHORT_PEER:]


def _slice_lines(plan: Plan, graph: Graph, parts: Cut, costs: Sequence[NodeCost], moments: int) -> Iterator[str]:
    flops = [sum(costs[node].forward_flops + costs[node].backward_flops for node in part.nodes) for part in parts.slices]
    total = sum(flops) or 1.0
    saved = [cost.saved_bytes for cost in costs]
    for part, placed, work in zip(parts.slices, plan.slices, flops, strict=True):
        credits = max((edge.credits for edge in plan.edges if part.index in (edge.source, edge.target)), default=0)
        need = slice_bytes(graph, part, saved, Holding(placed.in_flight, credits, moments, placed.recompute))
        yield (
            f"slice {part.index} on {short_peer(placed.peer)}: {_layers(graph, part)}, {len(part.nodes)} nodes, "
            f"{work / total:.0%} of the FLOPs, {gib(need)}, {placed.in_flight} in flight"
            + (", recomputes" if placed.recompute else "")
        )


def _edge_lines(plan: Plan, graph: Graph) -> Iterator[str]:
    crossing: dict[tuple[int, int], list[int]] = {}
    for index, edge in enumerate(plan.edges):
        crossing.setdefault((edge.source, edge.target), []).append(index)
    for (source, target), indices in sorted(crossing.items()):
        types = [graph.types[plan.edges[index].value] for index in indices]
        forward = sum(value.num_bytes for value in types)
        backward = sum(value.num_bytes for value in types if value.grad)
        codecs = ", ".join(sorted({plan.edges[index].codec for index in indices}))
        yield (
            f"edge {source} -> {target}: {len(indices)} values, {forward} bytes forward and {backward} back "
            f"per micro-batch, codec {codecs}"
        )


def _tied_lines(graph: Graph, parts: Cut) -> Iterator[str]:
    """Trainable parameters that several slices hold: their gradients are summed, so that the copies stay equal."""
    for value in range(graph.first_parameter, graph.first_node_value):
        holders = parts.holders(value)
        if len(holders) > 1 and graph.parameter(value).trainable:
            slices = " and ".join(map(str, holders))
            size = gib(graph.types[value].num_bytes)
            yield f"tied {graph.parameter(value).name}: held by slices {slices}, {size} of gradient summed each step"


def _layers(graph: Graph, part: Slice) -> str:
    """First and last module path among the nodes of a slice."""
    paths = [graph.nodes[node].module for node in part.nodes if graph.nodes[node].module]
    if not paths:
        return "unnamed layers"
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}"
