"""The named schedulers behind one function. A name from the wire is only ever a key of this table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from fusion_p2p.graph.schema import Graph
from fusion_p2p.plan.equal_compute import equal_compute
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NodeCost, NoPlan, PeerCapability, PlanRequest, Scheduler

SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType({"equal-compute": equal_compute})


def plan(
    scheduler: str, graph: Graph, costs: Sequence[NodeCost], peers: Sequence[PeerCapability], request: PlanRequest
) -> Plan | NoPlan:
    """A plan by the named scheduler; NoPlan, with the reason, when the name is unknown or nothing fits."""
    function = SCHEDULERS.get(scheduler)
    if function is None:
        return NoPlan(f"no scheduler {scheduler[:40]!r} here; there is {', '.join(SCHEDULERS)}")
    return function(graph, costs, peers, request)
