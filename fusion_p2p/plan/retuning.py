"""Codecs that follow the links of a running job: when to look again, and which change is worth a new epoch. Pure.

The cut and the peers stay; only codecs of edges change. The policy is asked as for a new plan (`plan.ratios`), by the links as
they are now, and its answer is taken in two steps, whose thresholds lie so far apart that noise in measured figures does not
make a run change to and fro:

    lossier codecs     if the predicted step gets more than `GAIN` shorter
    less lossy codecs  if it gets less than `COST` longer
    neither            within `PAUSE_S` after a change
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.plan.chain import chain_of
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.placing import codec_on
from fusion_p2p.plan.plan import EdgePlan, Plan
from fusion_p2p.plan.ratios import nominal_ratio, with_ratios
from fusion_p2p.plan.replan import layout_of
from fusion_p2p.plan.request import NodeCost, PlanRequest
from fusion_p2p.plan.schedulers import terms_of
from fusion_p2p.plan.simulate import simulate

GAIN, COST = 0.10, 0.02
EVERY_S, PAUSE_S, LEAST_S = 30.0, 60.0, 5.0
"""Links are looked at so often; not within so long after a change; never sooner than so after the last look."""
SLOW, SLOW_STEPS = 1.15, 3
"""So many steps in a row that took so much longer than predicted call for a look before its time."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """When the links were last looked at, until when nothing changes, and how many steps in a row were slow.

    streak_s: the shortest of those. usual_s: what steps took when they last called for a look; as much calls for no other.
    """

    looked_at: float = 0.0
    quiet_until: float = 0.0
    slow: int = 0
    streak_s: float = math.inf
    usual_s: float = 0.0

    def due(self, now: float) -> bool:
        """Whether to look now."""
        since = now - self.looked_at
        return now >= self.quiet_until and (since >= EVERY_S or (self.slow >= SLOW_STEPS and since >= LEAST_S))

    def took(self, step_s: float, predicted_s: float) -> Rhythm:
        """After a step; a prediction of 0 is none."""
        if not 0 < predicted_s < step_s / SLOW or step_s <= SLOW * self.usual_s:
            return replace(self, slow=0, streak_s=math.inf)
        return replace(self, slow=self.slow + 1, streak_s=min(self.streak_s, step_s))

    def looked(self, now: float) -> Rhythm:
        """After a look."""
        usual_s = self.streak_s if self.slow >= SLOW_STEPS else self.usual_s
        return replace(self, looked_at=now, slow=0, streak_s=math.inf, usual_s=usual_s)

    def changed(self, now: float) -> Rhythm:
        """After a change."""
        return Rhythm(self.looked_at, quiet_until=now + PAUSE_S)


def retuned(graph: Graph, costs: Sequence[NodeCost], plan: Plan, network: Network, request: PlanRequest) -> Plan:
    """The plan with the codecs that its links call for now, or `plan` itself when that is not worth it.

    `network` has all of the plan's peers.
    """
    if any(before > after for before, after in pairwise(plan.slice_of)):
        return plan  # a cut through branches is no layout of a chain, and no policy knows its links
    parts = cut(graph, plan.slice_of)
    chain = chain_of(graph, costs)
    layout = with_ratios(chain, network, layout_of(plan, chain, network), terms_of(request))
    wanted = [codec_on(network, layout, edge, request) for edge in parts.edges]

    def step_s(candidate: Plan) -> float:
        return simulate(pipeline_of_plan(graph, parts, costs, candidate, network)).step_s

    now_s, found = step_s(plan), plan
    if (lossier := _with(plan, wanted, lossier=True)) != plan and (shorter_s := step_s(lossier)) < (1 - GAIN) * now_s:
        now_s, found = shorter_s, lossier
    if (finer := _with(found, wanted, lossier=False)) != found and (longer_s := step_s(finer)) < (1 + COST) * now_s:
        now_s, found = longer_s, finer
    return plan if found == plan else replace(found, predicted_step_s=now_s)


def _with(plan: Plan, wanted: Sequence[str], *, lossier: bool) -> Plan:
    """The plan with those of the wanted codecs that are lossier than its own, or less lossy."""

    def changed(edge: EdgePlan, codec: str) -> EdgePlan:
        old, new = nominal_ratio(edge.codec), nominal_ratio(codec)
        return replace(edge, codec=codec) if (new > old if lossier else new < old) else edge

    return replace(plan, edges=tuple(changed(edge, codec) for edge, codec in zip(plan.edges, wanted, strict=True)))
