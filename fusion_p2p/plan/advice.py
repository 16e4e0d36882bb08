"""Advice for slow networks: cut layers, said where a link limits the plan, and in a run where peers mostly wait."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_p2p.graph.cut_layers import state_of
from fusion_p2p.graph.schema import Graph
from fusion_p2p.plan.plan import Plan

CUT_LAYERS = (
    "--cut-embedding --bottleneck RANK --codec int8 sends about 31 times less than float32 at an eighth of the width, and "
    "changes the model: each cut gets a projection and an embedding, which are trained and exported with it"
)
MOSTLY_WAITING = 0.5
"""Peers mostly wait for links if the busiest is so much less busy than in a pipeline that only fills and drains."""


def in_a_run(graph: Graph, plan: Plan, busy_shares: Sequence[float]) -> str | None:
    """One sentence for the owner of a run whose peers wait for the network; `busy_shares`: of the peers' time in a step."""
    if len(plan.slices) == 1 or not busy_shares or state_of(graph) != "possible":
        return None
    filling_only = plan.micro_batches / (plan.micro_batches + len(plan.slices) - 1)
    if max(busy_shares) > MOSTLY_WAITING * filling_only:
        return None
    return (
        f"advice: the network is slow for this plan, its busiest peer computes {max(busy_shares):.0%} of the time; "
        f"a new run with {CUT_LAYERS}"
    )
