"""Turning an owner's registration into a plan: fetch graph and plan, check them, count the work, call the scheduler.

A job that begins gets a plan by its scheduler; one that lost peers the least change of its plan (`plan.mending`), or if nothing
mends it a new plan; one that runs a better plan where that pays (`plan.improvement`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from fusion_p2p.clock import Clock
from fusion_p2p.errors import GraphError, NetworkError, WireError
from fusion_p2p.graph.check import check
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.schema import MAX_GRAPH_BYTES, Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import NodeWorkload, workload
from fusion_p2p.ids import Digest, PeerId, digest_of
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import fetch_content
from fusion_p2p.plan.encoding import MAX_PLAN_BYTES, check_plan, decode_plan, encode_plan
from fusion_p2p.plan.improvement import Asked, about_equal, improved
from fusion_p2p.plan.measured import Links, network_of
from fusion_p2p.plan.mending import mend
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.replan import Keep, Running
from fusion_p2p.plan.request import NoPlan, PeerCapability, PlanRequest
from fusion_p2p.plan.schedulers import plan
from fusion_p2p.wire.job_messages import Content
from fusion_p2p.wire.swarm_messages import Current, Register

REMEMBERED = 4
"""Graphs, plans, and answers that are remembered, of each so many."""
FETCH_S = 60.0
CONFIRM_S = 3.0
"""A better plan that is found has to be better still so much later."""
AGAIN_S, SHARE = 30.0, 0.05
"""Something better is not looked for again so soon among the same peers, however much their links change; and where looking
takes long so much later that it takes no more than this share of a peer's time."""
MAX_TASKS = 4_000_000
"""Of a step of a plan that an owner wants mended or improved: it is simulated here."""
T = TypeVar("T")


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
class Told:
    """What the coordinator knows for one plan: who may be used, fastest first, their links, and who is left out."""

    owner: PeerId
    peers: tuple[PeerCapability, ...]
    links: Links
    left_out: tuple[tuple[PeerId, str], ...] = ()

    def network(self) -> Network:
        return network_of(self.peers, self.links, self.owner)


@dataclass(frozen=True, slots=True)
class Computed:
    """What a worker thread gives back."""

    checked: CheckedGraph
    running: Running | None
    made: Plan | NoPlan | Keep
    network: Network
    proposed: tuple[str, Running] | None = None
    """A new plan, by its digest."""


@dataclass(frozen=True, slots=True)
class Before:
    """What is known of a job from earlier: the plan that runs, and one that looked better."""

    running: Running | None
    promising: Plan | None


@dataclass(frozen=True, slots=True)
class _Answered:
    """For which plan and network nothing better was found, why, and until when that is not doubted.

    Or nothing better yet: then it is looked at again from `until` on.
    """

    plan: str
    network: Network
    until: float
    keep: Keep
    gain: float


InThread = Callable[[Callable[[], Computed]], Awaitable[Computed]]
"""Runs a computation beside the event loop: `asyncio.to_thread`, except in virtual time."""


class Planner:
    """Plans for owners, remembering the graphs and plans it has checked."""

    def __init__(self, transport: Transport, clock: Clock, in_thread: InThread) -> None:
        self._transport = transport
        self._clock = clock
        self._in_thread = in_thread
        self._checked: OrderedDict[str, CheckedGraph] = OrderedDict()
        self._running: OrderedDict[str, Running] = OrderedDict()
        self._answered: OrderedDict[str, _Answered] = OrderedDict()

    async def plan(self, register: Register, told: Told) -> Plan | NoPlan | NotNow | Keep:
        """What the owner asks for, with it as a node of the network; never raises because of what the owner sent."""
        current = register.current
        if (known := self._same_answer(register, told)) is not None:
            return known
        checked = self._checked.get(register.graph.digest)
        running = self._running.get(current.plan.digest) if current is not None else None
        try:
            encoded = b"" if checked is not None else await self._fetch(told.owner, register.graph, MAX_GRAPH_BYTES)
            encoded_plan = b""
            if current is not None and running is None:
                encoded_plan = await self._fetch(told.owner, current.plan, MAX_PLAN_BYTES)
            began = self._clock.now()
            before = Before(running, self._promising(register))
            computed = await self._in_thread(lambda: _compute(register, told, checked or _check(encoded), before, encoded_plan))
        except NetworkError as error:
            return NotNow(f"the coordinator cannot fetch the graph: {error}")
        except (GraphError, WireError) as error:
            return NoPlan(f"the coordinator refuses the graph{' or the plan in use' if current else ''}: {error}")
        self._remember(register, computed, self._clock.now() - began)
        return computed.made

    def _same_answer(self, register: Register, told: Told) -> Keep | None:
        """The answer of last time, when nothing has changed since that could change it."""
        last = self._answered.get(register.job)
        if last is None or register.current is None or register.current.purpose != "improve":
            return None
        current, soon = register.current, self._clock.now() < last.until
        if (current.plan.digest, current.gain) != (last.plan, last.gain):
            return None
        if tuple(peer.peer for peer in told.peers) != last.network.peers:
            return None
        if last.keep.promising is not None:
            return last.keep if soon else None
        return last.keep if soon or about_equal(told.network(), last.network) else None

    def _promising(self, register: Register) -> Plan | None:
        """What was found to be better than the plan that runs, when it was last looked."""
        last, current = self._answered.get(register.job), register.current
        return last.keep.promising if last is not None and current is not None and current.plan.digest == last.plan else None

    def _remember(self, register: Register, computed: Computed, took_s: float) -> None:
        _keep(self._checked, register.graph.digest, computed.checked)
        if computed.proposed is not None:
            _keep(self._running, *computed.proposed)
        current = register.current
        if current is not None and computed.running is not None:
            _keep(self._running, current.plan.digest, computed.running)
            if isinstance(computed.made, Keep):
                pause_s = max(AGAIN_S, took_s / SHARE) if computed.made.promising is None else CONFIRM_S
                until = self._clock.now() + pause_s
                answered = _Answered(current.plan.digest, computed.network, until, computed.made, current.gain)
                _keep(self._answered, register.job, answered)

    async def _fetch(self, owner: PeerId, content: Content, most: int) -> bytes:
        if content.num_bytes > most:
            raise WireError(f"it has {content.num_bytes} bytes, at most {most} are allowed")
        digest = Digest(content.digest)
        return await fetch_content(self._transport, owner, digest, content.num_bytes, timeout_s=FETCH_S)


def _keep(memory: OrderedDict[str, T], key: str, value: T) -> None:
    memory[key] = value
    memory.move_to_end(key)
    while len(memory) > REMEMBERED:
        memory.popitem(last=False)


def _compute(register: Register, told: Told, checked: CheckedGraph, before: Before, encoded_plan: bytes) -> Computed:
    current, request, network = register.current, _request(register, told), told.network()
    graph, costs = checked.graph, checked.costs
    if current is None:
        made: Plan | NoPlan | Keep = plan(register.scheduler, graph, costs, network, request)
        return Computed(checked, None, made, network, _proposed(graph, made, None))
    running = before.running or _understood(graph, encoded_plan)
    if (running.plan.graph, running.plan.micro_batches) != (register.graph.digest, register.micro_batches):
        raise WireError("the plan in use is for something else")
    if current.purpose == "mend":
        made = _mended(register, current, told, checked, running)
    else:
        asked = Asked(running, current.step_s, current.steps_left, register.peers, current.gain, before.promising)
        made = improved(register.scheduler, graph, costs, network, request, asked)
    return Computed(checked, running, made, network, _proposed(graph, made, running))


def _proposed(graph: Graph, made: Plan | NoPlan | Keep, running: Running | None) -> tuple[str, Running] | None:
    """What is remembered of a plan that is proposed: its owner may soon ask to have it mended."""
    if not isinstance(made, Plan):
        return None
    same = running is not None and running.plan.slice_of == made.slice_of
    return digest_of(encode_plan(made)), Running(made, running.parts if running and same else cut(graph, made.slice_of))


def _mended(register: Register, current: Current, told: Told, checked: CheckedGraph, running: Running) -> Plan | NoPlan:
    """The plan mended; or a new one over all that are here; or what is missing to mend it."""
    without = frozenset(map(PeerId, current.without))
    held: dict[int, set[PeerId]] = {}
    for copy in current.held:
        held.setdefault(copy.slice, set()).add(PeerId(copy.peer))
    request, graph, costs = _request(register, told), checked.graph, checked.costs
    network = _with_staying(told, running.plan, without).network()
    made = mend(graph, running.parts, costs, running.plan, network, request, without, held)
    if isinstance(made, Plan) or not told.peers:
        return made
    fastest = sorted(told.peers, key=lambda peer: -peer.flops_per_s)[: register.peers]
    anew = plan(register.scheduler, graph, costs, replace(told, peers=tuple(fastest)).network(), request)
    return anew if isinstance(anew, Plan) else made


def _with_staying(told: Told, current: Plan, without: frozenset[PeerId]) -> Told:
    """With those peers of the plan that stay and that we have not heard yet: the owner has, but they get nothing more."""
    unheard = sorted(current.peers - without - {peer.peer for peer in told.peers})
    rates = sorted(peer.flops_per_s for peer in told.peers) or [0.0]
    usual = rates[len(rates) // 2]
    added = tuple(PeerCapability(peer, free_bytes=0, flops_per_s=usual) for peer in unheard)
    return replace(told, peers=(*told.peers, *added))


def _request(register: Register, told: Told) -> PlanRequest:
    return PlanRequest(
        graph=Digest(register.graph.digest),
        micro_batches=register.micro_batches,
        optimiser=register.optimiser,
        recompute=register.recompute,
        idle=told.left_out,
        schedule=register.schedule,
        codec=register.codec,
        ratio=register.ratio,
    )


def _understood(graph: Graph, encoded: bytes) -> Running:
    current = decode_plan(encoded)
    if len(current.slice_of) != len(graph.nodes):
        raise WireError("the plan in use is for something else")
    tasks = 2 * current.micro_batches * len(current.replicas)
    if tasks > MAX_TASKS:
        raise WireError(f"the plan in use has {tasks} tasks a step, at most {MAX_TASKS} are judged")
    parts = cut(graph, current.slice_of)
    check_plan(current, graph, parts)
    return Running(current, parts)


def _check(encoded: bytes) -> CheckedGraph:
    graph = decode_graph(encoded)
    check(graph)
    return CheckedGraph(graph, workload(graph))
