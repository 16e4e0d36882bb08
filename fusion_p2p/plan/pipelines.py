"""From layouts and plans to pipelines that the simulator can judge.

A layout is judged as schedulers see a model: a chain, whose stages send each other what crosses their border. A plan is judged
as it will run: every slice with its own nodes, every edge with the bytes of its frames and its credits, the owner's feeds, tied
parameters, the sums over replicas, the owner's decision and the update.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np

from fusion_p2p.graph.kinds import KINDS
from fusion_p2p.graph.schema import Graph, TensorType
from fusion_p2p.graph.slices import Cut, Slice
from fusion_p2p.plan.actions import rtt_caps, with_caps
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.coding import coding_passes
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import least_holding, stage_bytes
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge, PipelineExchange, PipelineStage
from fusion_p2p.plan.plan import FEED_CREDITS, EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import NodeCost, Terms
from fusion_p2p.plan.times import deal, operator_seconds, times
from fusion_p2p.wire import codecs
from fusion_p2p.wire.frames import HEADER_BYTES

UPDATE_PASSES = 7
"""How often an optimiser step passes over the bytes of a parameter: Adam reads four tensors of its size and writes three."""


def pipeline_of_layout(chain: Chain, network: Network, layout: Layout, terms: Terms) -> Pipeline:
    """One step of a layout of a chain. In flight: what hides the round trip, or all under gpipe, as far as memory allows.

    A stage holds at least one micro-batch: whether that fits is for `plan.memory.within_memory` to say.
    """
    stages = tuple(_stage(chain, network, stage, layout, terms) for stage in layout.stages)
    edges = [
        PipelineEdge(OWNER_STAGE, i, num_bytes, 0.0, credits=FEED_CREDITS) for i, num_bytes in _fed(chain, network, layout)
    ]
    for index, stage in enumerate(layout.stages[:-1]):
        ratio = layout.ratios[index] if layout.ratios else 1.0
        there, back = float(chain.crossing[stage.last]), float(chain.crossing_back[stage.last])
        edges.append(PipelineEdge(index, index + 1, there / ratio, back / ratio))
    exchanges = tuple(_shared(chain, layout))
    pipeline = Pipeline(network, stages, tuple(edges), terms.micro_batches, layout.schedule, exchanges)
    if layout.schedule == "gpipe":
        return pipeline
    caps = rtt_caps(pipeline)
    if terms.respect_memory:
        caps = tuple(_held(chain, network, stage, layout, terms, cap) for stage, cap in zip(layout.stages, caps, strict=True))
    return with_caps(pipeline, caps)


def group_sum_s(network: Network, nodes: Sequence[int], num_bytes: float) -> float:
    """Seconds in which a group sums its gradients and every member has the sums: a ring at the pace of its slowest link."""
    members = len(nodes)
    if members == 1:
        return 0.0
    ring = list(zip(nodes, [*nodes[1:], nodes[0]], strict=True))
    pace, alpha_s = max(network.pace(*pair) for pair in ring), max(float(network.alpha_s[pair]) for pair in ring)
    return 2 * (members - 1) * (num_bytes / members * pace + alpha_s)


def _stage(chain: Chain, network: Network, stage: Stage, layout: Layout, terms: Terms) -> PipelineStage:
    known = times(chain, network)
    first, last, recompute = stage.first, stage.last, layout.recompute
    dealt = deal([known.both(peer, first, last) for peer in stage.peers], terms.micro_batches)
    return PipelineStage(
        nodes=stage.peers,
        forward_s=tuple(known.forward(peer, first, last) for peer in stage.peers),
        backward_s=tuple(known.backward(peer, first, last, recompute=recompute) for peer in stage.peers),
        in_flight=terms.micro_batches,
        deal=dealt,
        finish_s=group_sum_s(network, stage.peers, float(chain.parameter_bytes[last] - chain.parameter_bytes[first])),
    )


def _shared(chain: Chain, layout: Layout) -> Iterator[PipelineExchange]:
    """Tied parameters: every copy's gradient goes to the first stage that holds one."""
    for tied in chain.tied:
        home, *others = chain.holders(tied, [stage.first for stage in layout.stages])
        for stage in others:
            for member in range(len(layout.stages[stage].peers)):
                yield PipelineExchange((stage, member), (home, 0), tied.num_bytes)


def _fed(chain: Chain, network: Network, layout: Layout) -> list[tuple[int, float]]:
    """The stages that the owner feeds, with the bytes."""
    if network.owner is None:
        return []
    fed = [(index, chain.feed(stage.first, stage.last)) for index, stage in enumerate(layout.stages)]
    return [(index, num_bytes) for index, num_bytes in fed if num_bytes]


def _held(chain: Chain, network: Network, stage: Stage, layout: Layout, terms: Terms, cap: int) -> int:
    """The most micro-batches up to `cap` that fit the stage's poorest member; bytes grow linearly with their number."""
    none, one = (
        stage_bytes(chain, stage.first, stage.last, replace(least_holding(stage, layout, terms), in_flight=held))
        for held in (0, 1)
    )
    free = min(float(network.free_bytes[peer]) for peer in stage.peers) - none
    return max(1, int(min(cap, free / (one - none)))) if one > none else cap


def pipeline_of_plan(graph: Graph, parts: Cut, costs: Sequence[NodeCost], plan: Plan, network: Network) -> Pipeline:
    """One step of a plan as it will run: the period from step to step. `parts` is the cut of the graph that the plan makes.

    A step begins with the owner's decision on the last one on its way, together with the first feeds; updates follow. It ends
    when the owner has the last report. KeyError when the network lacks a peer of the plan.
    """
    return PlannedStep(graph, parts, costs, plan, network).pipeline()


class PlannedStep:
    """The tables of one call of `pipeline_of_plan`."""

    def __init__(self, graph: Graph, parts: Cut, costs: Sequence[NodeCost], plan: Plan, network: Network) -> None:
        self.graph, self.parts, self.plan, self.network = graph, parts, plan, network
        node_of = {peer: index for index, peer in enumerate(network.peers)}
        self.nodes = [tuple(node_of[peer] for peer in part.members) for part in plan.slices]
        self.kinds = np.array([KINDS.index(cost.kind) for cost in costs], dtype=np.int64)
        self.moved = np.array([cost.bytes_moved for cost in costs], dtype=np.float64)
        self.forward_flops = np.array([cost.forward_flops for cost in costs], dtype=np.float64)
        self.backward_flops = np.array([cost.backward_flops for cost in costs], dtype=np.float64)

    def pipeline(self) -> Pipeline:
        stages = tuple(self._stage(*both) for both in zip(self.parts.slices, self.plan.slices, strict=True))
        edges = (*self.feeds(), *self.edges())
        exchanges = (*self._within_groups(), *self._tied())
        return Pipeline(self.network, stages, edges, self.plan.micro_batches, self.plan.schedule, exchanges)

    def _stage(self, part: Slice, planned: SlicePlan) -> PipelineStage:
        nodes = self.nodes[part.index]
        both = [self.seconds(part, node, recompute=planned.recompute) for node in nodes]
        slowest = min(float(self.network.memory_bytes_per_s[node]) for node in nodes)
        return PipelineStage(
            nodes=nodes,
            forward_s=tuple(forward for forward, _ in both),
            backward_s=tuple(backward for _, backward in both),
            in_flight=planned.in_flight,
            deal=tuple(planned.deal[index % len(planned.deal)] for index in range(self.plan.micro_batches)),
            finish_s=self._owner_alpha(nodes, towards=True),
            start_s=self._owner_alpha(nodes, towards=False),
            update_s=UPDATE_PASSES * self._trained_bytes(part) / max(slowest, 1.0),
        )

    def seconds(self, part: Slice, node: int, *, recompute: bool) -> tuple[float, float]:
        """Forward and backward of a slice on a peer, per micro-batch."""
        rates: Floats = np.append(self.network.flops_per_s[node], self.network.memory_bytes_per_s[node])
        own = list(part.nodes)
        kinds, moved = self.kinds[own], self.moved[own]
        forward = float(operator_seconds(kinds, self.forward_flops[own], moved, rates).sum())
        backward = operator_seconds(kinds, self.backward_flops[own], 2 * moved * (self.backward_flops[own] > 0), rates).sum()
        return forward, float(backward) + (forward if recompute else 0.0)

    def _owner_alpha(self, nodes: Sequence[int], *, towards: bool) -> float:
        """The latency between the owner and the farthest member."""
        owner, alpha_s = self.network.owner, self.network.alpha_s
        if owner is None:
            return 0.0
        return max(float(alpha_s[node, owner] if towards else alpha_s[owner, node]) for node in nodes)

    def feeds(self) -> list[PipelineEdge]:
        """What the owner sends to each slice; one that waits for nothing else gets a frame without payload."""
        if self.network.owner is None:
            return []
        feeds = []
        for part in self.parts.slices:
            if part.inputs or not part.receives:
                num_bytes = sum(HEADER_BYTES + self._num_bytes(value) for value in part.inputs) or HEADER_BYTES
                feeds.append(PipelineEdge(OWNER_STAGE, part.index, num_bytes, 0.0, credits=FEED_CREDITS))
        return feeds

    def edges(self) -> list[PipelineEdge]:
        """The frames between each pair of slices as one edge; they leave together."""
        between: dict[tuple[int, int], list[EdgePlan]] = defaultdict(list)
        for edge in self.plan.edges:
            between[edge.source, edge.target].append(edge)
        return [self._edge(source, target, edges) for (source, target), edges in sorted(between.items())]

    def _edge(self, source: int, target: int, edges: Sequence[EdgePlan]) -> PipelineEdge:
        typed = [(self.graph.types[edge.value], codecs.parse(edge.codec)) for edge in edges]
        returning = [(kind, spec) for kind, spec in typed if kind.grad]
        return PipelineEdge(
            source,
            target,
            forward_bytes=sum(HEADER_BYTES + codecs.forward_bytes(spec, kind) for kind, spec in typed),
            backward_bytes=sum(HEADER_BYTES + codecs.backward_bytes(spec, kind) for kind, spec in returning),
            gradient=bool(returning),
            credits=min(edge.credits for edge in edges),
            forward_coding=_coding(typed, backward=False),
            backward_coding=_coding(returning, backward=True),
        )

    def _within_groups(self) -> Iterator[PipelineExchange]:
        """Each member of a group is the home of an equal share of its parameters, but for those tied to a lower slice."""
        for part, nodes in zip(self.parts.slices, self.nodes, strict=True):
            own = [value for value in self._trained(part) if self.parts.holders(value)[0] == part.index]
            share = sum(map(self._num_bytes, own)) / len(nodes)
            for source, home in permutations(range(len(nodes)), 2):
                yield PipelineExchange((part.index, source), (part.index, home), share)

    def _tied(self) -> Iterator[PipelineExchange]:
        """A parameter that several slices hold has its home in the first of them."""
        for part, nodes in zip(self.parts.slices, self.nodes, strict=True):
            for value in self._trained(part):
                first = self.parts.holders(value)[0]
                if first != part.index:
                    for member in range(len(nodes)):
                        yield PipelineExchange((part.index, member), (first, 0), HEADER_BYTES + self._num_bytes(value))

    def _trained(self, part: Slice) -> list[int]:
        return [value for value in part.parameters if self.graph.parameter(value).trainable]

    def _trained_bytes(self, part: Slice) -> int:
        return sum(map(self._num_bytes, self._trained(part)))

    def _num_bytes(self, value: int) -> int:
        return self.graph.types[value].num_bytes


def _coding(typed: Sequence[tuple[TensorType, codecs.CodecSpec]], *, backward: bool) -> tuple[float, float]:
    """Bytes that the device of the sender moves to encode these values, or their gradients, and the reader's to decode them."""
    passes = [(kind.num_bytes, coding_passes(codecs.effective(spec, kind), backward=backward)) for kind, spec in typed]
    return sum(size * each.encode for size, each in passes), sum(size * each.decode for size, each in passes)
