"""A better plan for a job that runs: the scheduler's best over all that are free or its own, if changing to it pays.

Both plans are judged by the simulator on the network as it is now. Where the owner has measured what its steps really take,
both are taken to depart from the simulation by the same factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.plan.memory import num_moments
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.replan import Keep, Predicted, Running, replan
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest
from fusion_p2p.plan.schedulers import plan
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.sizing import all_in_flight, sized

ALIKE = 0.1
"""Links and rates that differ by less, relatively, are the same as before."""
ALIKE_LATENCY_S, ALIKE_S_PER_BYTE = 1e-3, 4e-9
"""Or by less than this: nobody moves a slice for a millisecond, or for a link of 4 Gbit/s instead of 2."""
SAME_RATE = 1.2
"""A peer has to be so many times faster than one that works for the job already to be looked at instead of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What runs, and how: seconds per step as measured (0: not known), steps to come, how many peers the owner wants."""

    current: Running
    step_s: float = 0.0
    steps_left: int = 0
    peers: int | None = None


def improved(
    scheduler: str, graph: Graph, costs: Sequence[NodeCost], network: Network, request: PlanRequest, asked: Asked
) -> Plan | Keep:
    """A plan that is worth changing to, or why there is none."""
    current = asked.current
    missing = sorted(current.plan.peers - set(network.peers))
    if missing:
        return Keep(f"peer {missing[0]} of the plan has not reported lately")
    made = plan(scheduler, graph, costs, network.select(_chosen(network, asked)), request)
    if isinstance(made, NoPlan):
        return Keep(f"there is no other plan: {made.reason}")
    moments = num_moments(request.optimiser)
    current_s = simulate(pipeline_of_plan(graph, current.parts, costs, current.plan, network)).step_s
    bias = asked.step_s / current_s if asked.step_s > 0 < current_s else 1.0
    predicted = Predicted(current_s * bias, made.predicted_step_s * bias, asked.steps_left)
    candidate = Running(made, cut(graph, made.slice_of))
    decision = replan(graph, network, moments, current, candidate, predicted)
    if isinstance(decision, Keep):
        return decision
    slices = tuple(all_in_flight(part, made.micro_batches) for part in decision.plan.slices)
    aligned = sized(graph, candidate.parts, costs, replace(decision.plan, slices=slices), network, moments)
    return made if isinstance(aligned, NoPlan) else aligned


def about_equal(one: Network, other: Network) -> bool:
    """Whether two networks call for the same plan, as far as can be said without making it."""
    if one.peers != other.peers or not np.array_equal(one.sites, other.sites):
        return False
    close = [
        (one.flops_per_s, other.flops_per_s, 0.0),
        (one.memory_bytes_per_s, other.memory_bytes_per_s, 0.0),
        (one.free_bytes, other.free_bytes, 0.0),
        (one.alpha_s, other.alpha_s, ALIKE_LATENCY_S),
        (one.beta_s, other.beta_s, ALIKE_S_PER_BYTE),
        (one.uplink_s, other.uplink_s, ALIKE_S_PER_BYTE),
        (one.downlink_s, other.downlink_s, ALIKE_S_PER_BYTE),
    ]
    return all(np.allclose(a, b, rtol=ALIKE, atol=least) for a, b, least in close)


def _chosen(network: Network, asked: Asked) -> list[int]:
    """The peers to plan with, in listed order: all, or the fastest, of about equal ones those that work for the job already."""
    count = len(network.peers)
    if asked.peers is None or asked.peers >= count:
        return list(range(count))
    working = asked.current.plan.peers

    def place(node: int) -> tuple[float, int]:
        rate = float(network.flops_per_s[node, 0])
        return -rate * (SAME_RATE if network.peers[node] in working else 1.0), node

    return sorted(sorted(range(count), key=place)[: asked.peers])
