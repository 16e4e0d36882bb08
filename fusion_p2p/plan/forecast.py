"""What a plan means in figures: who holds what, what crosses each edge and how long that takes, what limits the step.

`plan.explain` turns a forecast into sentences, `plan.charts` into pictures; JSON takes it as it is. Without a network there are
bytes and shares of FLOPs; with one also seconds and the shares of the step that devices and links are busy, by simulation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from fusion_p2p.graph.cut_layers import State, state_of
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, Slice
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.memory import holding_of, num_moments, slice_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, Schedule
from fusion_p2p.plan.request import NodeCost
from fusion_p2p.plan.sharing import exchange_bytes
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.timeline import Timeline
from fusion_p2p.wire import codecs
from fusion_p2p.wire.job_messages import OptimiserSettings


@dataclass(frozen=True, slots=True)
class SliceForecast:
    """One slice. busy: for each member, the share of the step in which its device works on this slice; empty: unknown."""

    index: int
    members: tuple[PeerId, ...]
    layers: str
    num_nodes: int
    flops_share: float
    num_bytes: int
    in_flight: int
    recompute: bool
    busy: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EdgeForecast:
    """All values from one slice (OWNER_STAGE: the owner's feeds) to another, per micro-batch.

    codecs: those that really apply. dense_bytes: both directions as they are in memory. forward_s, backward_s: one message over
    the slowest of the links between members, otherwise idle; None: unknown.
    """

    source: int
    target: int
    num_values: int
    codecs: tuple[str, ...]
    dense_bytes: int
    forward_bytes: int
    backward_bytes: int
    forward_s: float | None = None
    backward_s: float | None = None

    @property
    def ratio(self) -> float:
        """By how much codecs divide the bytes."""
        return self.dense_bytes / max(1, self.forward_bytes + self.backward_bytes)


@dataclass(frozen=True, slots=True)
class TiedForecast:
    """A trainable parameter that several slices hold: bytes of gradient summed each step; seconds there and back, alone."""

    name: str
    holders: tuple[int, ...]
    num_bytes: int
    exchange_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """What is busiest in a step, and its busy share; `shared` is what agreeing on shared parameters takes of that.

    A device, a link between two network nodes, or the uplink or downlink of a site (source and target are one, then).
    """

    way: Literal["device", "pair", "up", "down"]
    source: int
    target: int
    busy: float
    shared: float = 0.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """A plan in figures. step_s: by simulation where there is a network, else what the plan was proposed with."""

    scheduler: str
    schedule: Schedule
    micro_batches: int
    step_s: float
    slices: tuple[SliceForecast, ...]
    edges: tuple[EdgeForecast, ...]
    tied: tuple[TiedForecast, ...]
    idle: tuple[tuple[PeerId, str], ...]
    limit: Limit | None = None
    bound_s: float | None = None
    cut_layers: State = "impossible"

    @property
    def peers(self) -> frozenset[PeerId]:
        """Everybody who executes something."""
        return frozenset(peer for part in self.slices for peer in part.members)


def forecast(
    plan: Plan,
    graph: Graph,
    parts: Cut,
    costs: Sequence[NodeCost],
    optimiser: OptimiserSettings,
    network: Network | None = None,
) -> Forecast:
    """The figures of a plan; `parts` is the cut of the graph that it makes. The network has to know all of its peers."""
    timeline = None if network is None else simulate(pipeline_of_plan(graph, parts, costs, plan, network))
    return forecast_of(plan, graph, parts, costs, optimiser, network, timeline)


def forecast_of(
    plan: Plan,
    graph: Graph,
    parts: Cut,
    costs: Sequence[NodeCost],
    optimiser: OptimiserSettings,
    network: Network | None,
    timeline: Timeline | None,
) -> Forecast:
    """The same for a step that was simulated already."""
    return Forecast(
        scheduler=plan.scheduler,
        schedule=plan.schedule,
        micro_batches=plan.micro_batches,
        step_s=plan.predicted_step_s if timeline is None else timeline.step_s,
        slices=tuple(_slices(plan, graph, parts, costs, num_moments(optimiser), timeline)),
        edges=(*_feeds(plan, graph, parts, network), *_edges(plan, graph, network)),
        tied=tuple(_tied(plan, graph, parts, network)),
        idle=plan.idle,
        limit=None if network is None or timeline is None else _limit(plan, network, timeline),
        cut_layers=state_of(graph),
    )


def _slices(
    plan: Plan, graph: Graph, parts: Cut, costs: Sequence[NodeCost], moments: int, timeline: Timeline | None
) -> list[SliceForecast]:
    flops = [sum(costs[node].forward_flops + costs[node].backward_flops for node in part.nodes) for part in parts.slices]
    saved = [cost.saved_bytes for cost in costs]
    shared = exchange_bytes(graph, parts, [len(placed.members) for placed in plan.slices])
    found = []
    for part, placed in zip(parts.slices, plan.slices, strict=True):
        found.append(
            SliceForecast(
                index=part.index,
                members=placed.members,
                layers=_layers(graph, part),
                num_nodes=len(part.nodes),
                flops_share=flops[part.index] / (sum(flops) or 1.0),
                num_bytes=slice_bytes(graph, part, saved, holding_of(graph, plan, part.index, moments)) + shared[part.index],
                in_flight=placed.in_flight,
                recompute=placed.recompute,
                busy=_shares(timeline, part.index),
            )
        )
    return found


def _shares(timeline: Timeline | None, index: int) -> tuple[float, ...]:
    if timeline is None or timeline.step_s <= 0:
        return ()
    return tuple(busy_s / timeline.step_s for busy_s in timeline.busy_s[index])


def _edges(plan: Plan, graph: Graph, network: Network | None) -> list[EdgeForecast]:
    between: dict[tuple[int, int], list[EdgePlan]] = defaultdict(list)
    for edge in plan.edges:
        between[edge.source, edge.target].append(edge)
    return [_edge(plan, graph, network, between[pair]) for pair in sorted(between)]


def _edge(plan: Plan, graph: Graph, network: Network | None, edges: Sequence[EdgePlan]) -> EdgeForecast:
    typed = [(graph.types[edge.value], codecs.parse(edge.codec)) for edge in edges]
    source, target = edges[0].source, edges[0].target
    forward = sum(codecs.forward_bytes(spec, kind) for kind, spec in typed)
    backward = sum(codecs.backward_bytes(spec, kind) for kind, spec in typed)
    senders, readers = _nodes(plan, network, source), _nodes(plan, network, target)
    return EdgeForecast(
        source=source,
        target=target,
        num_values=len(edges),
        codecs=tuple(sorted({str(codecs.effective(spec, kind)) for kind, spec in typed})),
        dense_bytes=sum(kind.num_bytes * (2 if kind.grad else 1) for kind, _ in typed),
        forward_bytes=forward,
        backward_bytes=backward,
        forward_s=_link_s(network, senders, readers, forward),
        backward_s=_link_s(network, readers, senders, backward) if backward else None,
    )


def _feeds(plan: Plan, graph: Graph, parts: Cut, network: Network | None) -> list[EdgeForecast]:
    """What the owner sends to each slice, where the owner's links are known."""
    if network is None or network.owner is None:
        return []
    found = []
    for part in parts.slices:
        if part.inputs:
            num_bytes = sum(graph.types[value].num_bytes for value in part.inputs)
            seconds = _link_s(network, [network.owner], _nodes(plan, network, part.index), num_bytes)
            found.append(
                EdgeForecast(OWNER_STAGE, part.index, len(part.inputs), ("none",), num_bytes, num_bytes, 0, seconds, None)
            )
    return found


def _nodes(plan: Plan, network: Network | None, index: int) -> list[int]:
    return [] if network is None else [network.peers.index(peer) for peer in plan.slices[index].members]


def _link_s(network: Network | None, senders: Sequence[int], readers: Sequence[int], num_bytes: int) -> float | None:
    """Seconds over the slowest link between two groups."""
    if network is None:
        return None
    return max(network.link_s(source, target, num_bytes) for source in senders for target in readers)


def _limit(plan: Plan, network: Network, timeline: Timeline) -> Limit:
    """Of devices and links the one that is busiest; a device adds up what all of its slices ask of it."""
    step_s = timeline.step_s or 1.0
    devices: dict[int, float] = defaultdict(float)
    for index, members in enumerate(timeline.busy_s):
        for node, busy_s in zip(_nodes(plan, network, index), members, strict=True):
            devices[node] += busy_s
    limits = [Limit("device", node, node, busy_s / step_s) for node, busy_s in devices.items()]
    for queue, busy_s in timeline.queue_busy_s.items():
        limits.append(Limit(*queue, busy_s / step_s, timeline.queue_shared_s.get(queue, 0.0) / step_s))
    return max(limits, key=lambda limit: limit.busy)


def _tied(plan: Plan, graph: Graph, parts: Cut, network: Network | None) -> Iterator[TiedForecast]:
    """Trainable parameters that several slices hold: their gradients are summed, so that the copies stay equal."""
    for value in range(graph.first_parameter, graph.first_node_value):
        holders = parts.holders(value)
        if not graph.parameter(value).trainable or len(holders) == 1:
            continue
        num_bytes = graph.types[value].num_bytes
        home, *others = (_nodes(plan, network, holder) for holder in holders)
        both = [(_link_s(network, other, home, num_bytes), _link_s(network, home, other, num_bytes)) for other in others]
        there_and_back = max((there + back for there, back in both if there is not None and back is not None), default=None)
        yield TiedForecast(graph.parameter(value).name, holders, num_bytes, there_and_back)


def _layers(graph: Graph, part: Slice) -> str:
    """First and last module path among the nodes of a slice."""
    paths = [graph.nodes[node].module for node in part.nodes if graph.nodes[node].module]
    if not paths:
        return "unnamed layers"
    return paths[0] if paths[0] == paths[-1] else f"{paths[0]} .. {paths[-1]}"
