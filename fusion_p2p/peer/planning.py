"""Turning an owner's registration into a plan: fetch the graph, check it, count its work, call the scheduler."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fusion_p2p.errors import GraphError, NetworkError, WireError
from fusion_p2p.graph.check import check
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.schema import MAX_GRAPH_BYTES, Graph
from fusion_p2p.graph.workload import NodeWorkload, workload
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import fetch_content
from fusion_p2p.plan.measured import Links, network_of
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan, PeerCapability, PlanRequest
from fusion_p2p.plan.schedulers import plan
from fusion_p2p.wire.job_messages import Content
from fusion_p2p.wire.swarm_messages import Register

GRAPHS_KEPT = 4
FETCH_S = 60.0


@dataclass(frozen=True, slots=True)
class NotNow:
    """Why there is no plan at the moment, although the same peers may do later."""

    reason: str


@dataclass(frozen=True, slots=True)
class CheckedGraph:
    """A graph that passed its check, and the cost of its nodes."""

    graph: Graph
    costs: tuple[NodeWorkload, ...]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a worker thread gives back."""

    checked: CheckedGraph
    made: Plan | NoPlan


InThread = Callable[[Callable[[], Computed]], Awaitable[Computed]]
"""Runs a computation beside the event loop: `asyncio.to_thread`, except in virtual time."""


class Planner:
    """Plans for owners, remembering the graphs it has checked."""

    def __init__(self, transport: Transport, in_thread: InThread) -> None:
        self._transport = transport
        self._in_thread = in_thread
        self._checked: OrderedDict[str, CheckedGraph] = OrderedDict()

    async def plan(
        self,
        owner: PeerId,
        register: Register,
        peers: Sequence[PeerCapability],
        links: Links,
        idle: tuple[tuple[PeerId, str], ...],
    ) -> Plan | NoPlan | NotNow:
        """A plan over `peers` in this order, with the owner as a node; never raises because of what the owner sent."""
        request = PlanRequest(
            graph=Digest(register.graph.digest),
            micro_batches=register.micro_batches,
            optimiser=register.optimiser,
            recompute=register.recompute,
            idle=idle,
            schedule=register.schedule,
            codec=register.codec,
            ratio=register.ratio,
        )
        known = self._checked.get(register.graph.digest)
        try:
            encoded = b"" if known is not None else await self._fetch(owner, register.graph)
            computed = await self._in_thread(
                lambda: _compute(known, encoded, register.scheduler, network_of(peers, links, owner), request)
            )
        except NetworkError as error:
            return NotNow(f"the coordinator cannot fetch the graph: {error}")
        except (GraphError, WireError) as error:
            return NoPlan(f"the coordinator refuses the graph: {error}")
        self._remember(register.graph.digest, computed.checked)
        return computed.made

    async def _fetch(self, owner: PeerId, content: Content) -> bytes:
        if content.num_bytes > MAX_GRAPH_BYTES:
            raise WireError(f"it has {content.num_bytes} bytes, at most {MAX_GRAPH_BYTES} are allowed")
        digest = Digest(content.digest)
        return await fetch_content(self._transport, owner, digest, content.num_bytes, timeout_s=FETCH_S)

    def _remember(self, digest: str, checked: CheckedGraph) -> None:
        self._checked[digest] = checked
        self._checked.move_to_end(digest)
        while len(self._checked) > GRAPHS_KEPT:
            self._checked.popitem(last=False)


def _compute(known: CheckedGraph | None, encoded: bytes, scheduler: str, network: Network, request: PlanRequest) -> Computed:
    checked = known or _check(encoded)
    return Computed(checked, plan(scheduler, checked.graph, checked.costs, network, request))


def _check(encoded: bytes) -> CheckedGraph:
    graph = decode_graph(encoded)
    check(graph)
    return CheckedGraph(graph, workload(graph))
