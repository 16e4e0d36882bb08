"""The named schedulers behind one function. A name from the wire is only ever a key of this table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from fusion_p2p.graph.schema import Graph
from fusion_p2p.plan.chain import Chain, chain_of
from fusion_p2p.plan.equal_compute import NAME as EQUAL_COMPUTE
from fusion_p2p.plan.equal_compute import equal_compute
from fusion_p2p.plan.equal_number import NAME as EQUAL_NUMBER
from fusion_p2p.plan.equal_number import equal_number
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.memory import num_moments
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.placing import place
from fusion_p2p.plan.plan import Plan, Schedule
from fusion_p2p.plan.ratios import why_unknown
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest, Terms

Scheduler = Callable[[Chain, Network, Terms], Layout | NoPlan]
"""A pure function: the same arguments give the same layout."""

ATTEMPTS = 4
"""How often a scheduler is asked when exact memory refuses its layout: with less for one peer, then for all."""

AUTO, OP_FENCE = "auto", "op-fence"


def auto(chain: Chain, network: Network, terms: Terms) -> Layout | NoPlan:
    """The scheduler of `plan.auto`. Loaded when it is needed: it brings numba and networkx, a second and 80 MB."""
    from fusion_p2p.plan import auto as search

    return search.auto(chain, network, terms)


def op_fence(chain: Chain, network: Network, terms: Terms) -> Layout | NoPlan:
    """The scheduler of `plan.fence`, loaded when it is needed, too."""
    from fusion_p2p.plan import fence

    return fence.op_fence(chain, network, terms)


SCHEDULERS: Mapping[str, Scheduler] = MappingProxyType(
    {AUTO: auto, EQUAL_NUMBER: equal_number, EQUAL_COMPUTE: equal_compute, OP_FENCE: op_fence}
)

FIXED = frozenset({EQUAL_NUMBER, EQUAL_COMPUTE, OP_FENCE})
"""Their layouts do not depend on memory: whether one fits is for placing to say, which counts exactly."""


def plan(scheduler: str, graph: Graph, costs: Sequence[NodeCost], network: Network, request: PlanRequest) -> Plan | NoPlan:
    """A plan by the named scheduler; NoPlan, with the reason, when the name is unknown or nothing fits.

    Of the schedules that the request allows the faster one by simulation is taken. `auto` is the fastest of all schedulers'
    plans also when they are simulated as they will run, with every value on its own way instead of along the chain.
    """
    function = SCHEDULERS.get(scheduler)
    if function is None:
        return NoPlan(f"no scheduler {scheduler[:40]!r} here; there is {', '.join(SCHEDULERS)}")
    unknown = why_unknown(request.codec)
    if unknown is not None:
        return NoPlan(unknown)
    planning = _Planning(graph, costs, chain_of(graph, costs), network, request)
    made = planning.by(function, exact=scheduler in FIXED)
    if scheduler != AUTO:
        return made
    others = (planning.by(SCHEDULERS[name], exact=True) for name in sorted(FIXED))
    plans = [other for other in (made, *others) if isinstance(other, Plan)]
    return replace(min(plans, key=lambda one: one.predicted_step_s), scheduler=AUTO) if plans else made


@dataclass(frozen=True, eq=False, slots=True)
class _Planning:
    """The arguments of one call of `plan`, and the chain of its graph."""

    graph: Graph
    costs: Sequence[NodeCost]
    chain: Chain
    network: Network
    request: PlanRequest

    def by(self, scheduler: Scheduler, *, exact: bool) -> Plan | NoPlan:
        """The plan of a scheduler. exact: placing alone judges memory; else the scheduler is asked again when that refuses.

        A refusal speaks of the memory that there is: later ones, by a scheduler that was told of less, are not passed on.
        """
        terms = replace(terms_of(self.request), respect_memory=not exact)
        pretended = self.network
        refusal: NoPlan | None = None
        for attempt in range(1, ATTEMPTS + 1):
            layout = scheduler(self.chain, pretended, terms)
            made = layout if isinstance(layout, NoPlan) else self.placed(layout)
            if isinstance(made, Plan):
                return made
            refusal = refusal or made
            if exact or made.lacking is None:
                break
            lacking = [pretended.peers.index(made.lacking)] if attempt == 1 else range(len(pretended.peers))
            pretended = _with_less(pretended, lacking, made.missing_bytes)
        return refusal or NoPlan("no layout fits the memory of the peers")

    def placed(self, layout: Layout) -> Plan | NoPlan:
        """The plan of a layout under the faster schedule of those allowed."""
        allowed: tuple[Schedule, ...] = (self.request.schedule,) if self.request.schedule != "auto" else ("1f1b", "gpipe")
        made = [
            place(self.graph, self.costs, self.chain, self.network, replace(layout, schedule=schedule), self.request)
            for schedule in allowed
        ]
        plans = [one for one in made if isinstance(one, Plan)]
        return min(plans, key=lambda one: one.predicted_step_s) if plans else made[0]


def _with_less(network: Network, peers: Sequence[int], num_bytes: float) -> Network:
    """The network as if peers offered so much less: the sums of a chain said that something fits which did not."""
    free = network.free_bytes.copy()
    free[list(peers)] -= num_bytes
    return replace(network, free_bytes=free)


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
