"""From a layout to a plan: slices of the real graph, who executes which micro-batch, and codecs; `plan.sizing` does the rest.

A scheduler's layout counts in blocks of a chain; here the exact memory of each slice decides. A plan that does not fit is no
plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Crossing, cut
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.coding import Way
from fusion_p2p.plan.idle import why_idle
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import num_moments
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.ratios import codec_of
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.sizing import all_in_flight, sized
from fusion_p2p.plan.times import deal, times

LONGEST_DEAL = 1024
"""A group repeats its pattern after so many micro-batches."""


def place(
    graph: Graph, costs: Sequence[NodeCost], chain: Chain, network: Network, layout: Layout, request: PlanRequest
) -> Plan | NoPlan:
    """The plan of a layout of `chain`, which is the chain of `graph`; NoPlan when a slice does not fit its peer."""
    borders = [int(chain.positions[stage.first]) for stage in layout.stages[1:]]
    slice_of = tuple(bisect_right(borders, node) for node in range(len(graph.nodes)))
    parts = cut(graph, slice_of)
    draft = Plan(
        graph=request.graph,
        scheduler=layout.scheduler,
        micro_batches=request.micro_batches,
        slice_of=slice_of,
        slices=tuple(_members(chain, network, stage, layout, request.micro_batches) for stage in layout.stages),
        edges=tuple(
            EdgePlan(edge.value, edge.source, edge.target, codec_on(network, layout, edge, request)) for edge in parts.edges
        ),
        idle=request.idle + why_idle(chain, network, layout),
        schedule=layout.schedule,
    )
    made = sized(graph, parts, costs, draft, network, num_moments(request.optimiser))
    if isinstance(made, NoPlan):
        return made
    return replace(made, predicted_step_s=simulate(pipeline_of_plan(graph, parts, costs, made, network)).step_s)


def codec_on(network: Network, layout: Layout, edge: Crossing, request: PlanRequest) -> str:
    """What the policy gives an edge, by the ratios of the boundaries that it spans and the slowest of its links."""
    pairs = product(layout.stages[edge.source].peers, layout.stages[edge.target].peers)
    source, target = max(pairs, key=lambda pair: network.pace(*pair) + network.pace(*pair[::-1]))
    sender_s, reader_s = (1.0 / float(network.memory_bytes_per_s[peer]) for peer in (source, target))
    way = Way(network.pace(source, target), network.pace(target, source), sender_s, reader_s)
    return codec_of(layout.ratios[edge.source : edge.target], request, way)


def _members(chain: Chain, network: Network, stage: Stage, layout: Layout, micro_batches: int) -> SlicePlan:
    """Who executes a stage and which micro-batches, all of them in flight; a member that would get none is left out."""
    known = times(chain, network)
    seconds = [known.both(peer, stage.first, stage.last, recompute=layout.recompute) for peer in stage.peers]
    dealt = deal(seconds, min(micro_batches, LONGEST_DEAL))
    used = sorted(set(dealt))
    first, *others = (network.peers[stage.peers[member]] for member in used)
    pattern = tuple(used.index(member) for member in dealt) if others else (0,)
    return all_in_flight(SlicePlan(first, 1, layout.recompute, tuple(others), pattern), micro_batches)
