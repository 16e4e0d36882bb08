"""The named schedulers behind one function. A name from the wire is only ever a key of this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fusion_p2p.graph.schema import Graph
from fusion_p2p.plan.chain import Chain, chain_of
from fusion_p2p.plan.equal_compute import NAME as EQUAL_COMPUTE
from fusion_p2p.plan.equal_compute import equal_compute
from fusion_p2p.plan.equal_number import NAME as EQUAL_NUMBER
from fusion_p2p.plan.equal_number import equal_number
from fusion_p2p.plan.fence import NAME as OP_FENCE
from fusion_p2p.plan.fence import op_fence
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.memory import num_moments
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.placing import place
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest, Terms

Scheduler = Callable[[Chain, Network, Terms], Layout | NoPlan]
"""A pure function: the same arguments give the same layout."""

SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    {EQUAL_NUMBER: equal_number, EQUAL_COMPUTE: equal_compute, OP_FENCE: op_fence}
)


def plan(scheduler: str, graph: Graph, costs: Sequence[NodeCost], network: Network, request: PlanRequest) -> Plan | NoPlan:
    """A plan by the named scheduler; NoPlan, with the reason, when the name is unknown or nothing fits."""
    function = SCHEDULERS.get(scheduler)
    if function is None:
        return NoPlan(f"no scheduler {scheduler[:40]!r} here; there is {', '.join(SCHEDULERS)}")
    chain = chain_of(graph, costs)
    layout = function(chain, network, terms_of(request))
    return layout if isinstance(layout, NoPlan) else place(graph, costs, chain, network, layout, request)


def terms_of(request: PlanRequest) -> Terms:
    """What a request means for schedulers."""
    return Terms(
        micro_batches=request.micro_batches,
        moments=num_moments(request.optimiser),
        recompute=request.recompute,
        schedule=request.schedule,
        codec=request.codec,
        ratio=request.ratio,
        seed=request.seed,
    )
