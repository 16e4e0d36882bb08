"""A better plan for a job that runs: the scheduler's best over all that are free or its own, if changing to it pays.

Measured figures of equal peers differ, and so do those of one peer from one time to the next. A scheduler finds the very plan
that gains most by such differences, so a job that believed it would move to and fro. It changes only to a plan that pays

* by the figures as they are, and also by the same figures without what measuring alone can make of them (`plan.noise`);
* when it is found, and when it is judged once more by later figures: until then it is `Keep.promising`;
* compared with what steps really take. Both plans are simulated; what the running one takes longer than simulated, the other
  takes longer, too, and what it takes less, the other takes less in proportion: the less favourable of two readings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.plan.memory import num_moments
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.noise import ALIKE_LATENCY_S, ALIKE_S_PER_BYTE, evened
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.replan import GAIN, Change, Keep, Predicted, Running, replan
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest
from fusion_p2p.plan.schedulers import plan
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.sizing import all_in_flight, sized

ALIKE = 0.1
"""Links and rates that differ by less, relatively, are the same as before."""
SAME_RATE = 1.2
"""A peer has to be so many times faster than one that works for the job already to be looked at instead of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What runs, and how: seconds per step as measured (0: not known), steps to come, how many peers the owner wants.

    gain: the share of a step that has to be gained. promising: a plan that paid by earlier figures.
    """

    current: Running
    step_s: float = 0.0
    steps_left: int = 0
    peers: int | None = None
    gain: float = GAIN
    promising: Plan | None = None


def improved(
    scheduler: str, graph: Graph, costs: Sequence[NodeCost], network: Network, request: PlanRequest, asked: Asked
) -> Plan | Keep:
    """A plan that is worth changing to, or why there is none, or none yet."""
    missing = sorted(asked.current.plan.peers - set(network.peers))
    if missing:
        return Keep(f"peer {missing[0]} of the plan has not reported lately")
    judging = _Judging(graph, costs, network, num_moments(request.optimiser), asked)
    if asked.promising is not None and asked.promising.peers <= set(network.peers):
        again = judging.decided(asked.promising)
        if isinstance(again, Change):
            return judging.fitting(again.plan, asked.promising)
    made = plan(scheduler, graph, costs, network.select(_chosen(network, asked)), request)
    if isinstance(made, NoPlan):
        return Keep(f"there is no other plan: {made.reason}")
    decision = judging.decided(made)
    if isinstance(decision, Keep):
        return decision
    return Keep("another plan pays by these figures: whether it still does by later ones is seen soon", made)


@dataclass(frozen=True, eq=False, slots=True)
class _Judging:
    """One question: whether plans pay, compared with the one that runs."""

    graph: Graph
    costs: Sequence[NodeCost]
    network: Network
    moments: int
    asked: Asked

    def decided(self, candidate: Plan) -> Change | Keep:
        """The least change to the plan, or to one as good, if that pays by the figures evened and as they are."""
        even, candidate_parts = evened(self.network), cut(self.graph, candidate.slice_of)
        found = Running(candidate, candidate_parts)
        predicted = self._predicted(found, even)
        decision = replan(self.graph, even, self.moments, self.asked.current, found, predicted)
        if isinstance(decision, Keep):
            return decision
        refusal = self._predicted(Running(decision.plan, candidate_parts), self.network).refusal(decision.move_s)
        return decision if refusal is None else Keep(refusal)

    def fitting(self, *wanted: Plan) -> Plan | Keep:
        """The first of these plans whose peers have room for it, with what each may hold and what its step takes now."""
        refusal = ""
        for made in wanted:
            slices = tuple(all_in_flight(part, made.micro_batches) for part in made.slices)
            parts = cut(self.graph, made.slice_of)
            fitting = sized(self.graph, parts, self.costs, replace(made, slices=slices), self.network, self.moments)
            if isinstance(fitting, Plan):
                return replace(fitting, predicted_step_s=self._simulated_s(Running(fitting, parts), self.network))
            refusal = fitting.reason
        return Keep(f"a better plan does not fit: {refusal}")

    def _predicted(self, candidate: Running, network: Network) -> Predicted:
        current_s, candidate_s = self._simulated_s(self.asked.current, network), self._simulated_s(candidate, network)
        step_s = self.asked.step_s or current_s
        longer_s = step_s - current_s
        really_s = candidate_s + longer_s if longer_s > 0 else candidate_s * step_s / current_s
        return Predicted(step_s, really_s, self.asked.steps_left, self.asked.gain)

    def _simulated_s(self, running: Running, network: Network) -> float:
        return simulate(pipeline_of_plan(self.graph, running.parts, self.costs, running.plan, network)).step_s


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
