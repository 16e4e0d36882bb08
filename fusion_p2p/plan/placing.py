"""From a layout to a plan: slices of the real graph, who executes which micro-batch, codecs, and what memory allows.

A scheduler's layout counts in blocks of a chain; here the exact memory of each slice decides. A slice starts from the limit in
flight that hides its round trip and from the credits with which no link pauses (`plan.actions`), and gives up both, credits
first, until it fits its peer. Under gpipe it holds all of its micro-batches. A plan that does not fit is no plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Crossing, Cut, cut
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.actions import rtt_caps, wanted_credits
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.coding import Way
from fusion_p2p.plan.idle import why_idle
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import CREDITS, Holding, num_moments, remembered_places, shortage, slice_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.ratios import codec_of
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest
from fusion_p2p.plan.sharing import exchange_bytes
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.times import deal, times

LONGEST_DEAL = 1024
"""A group repeats its pattern after so many micro-batches."""


def place(
    graph: Graph, costs: Sequence[NodeCost], chain: Chain, network: Network, layout: Layout, request: PlanRequest
) -> Plan | NoPlan:
    """The plan of a layout of `chain`, which is the chain of `graph`; NoPlan when a slice does not fit its peer."""
    borders = [int(chain.positions[stage.first]) for stage in layout.stages[1:]]
    slice_of = tuple(bisect_right(borders, node) for node in range(len(graph.nodes)))
    parts = cut(graph, slice_of)
    draft = Plan(
        graph=request.graph,
        scheduler=layout.scheduler,
        micro_batches=request.micro_batches,
        slice_of=slice_of,
        slices=tuple(_members(chain, network, stage, layout, request.micro_batches) for stage in layout.stages),
        edges=tuple(
            EdgePlan(edge.value, edge.source, edge.target, codec_on(network, layout, edge, request)) for edge in parts.edges
        ),
        idle=request.idle + why_idle(chain, network, layout),
        schedule=layout.schedule,
    )
    pipeline = pipeline_of_plan(graph, parts, costs, draft, network)
    sized = _Sizing.of(graph, parts, costs, draft, network, pipeline, num_moments(request.optimiser)).sized()
    if isinstance(sized, NoPlan):
        return sized
    return replace(sized, predicted_step_s=simulate(pipeline_of_plan(graph, parts, costs, sized, network)).step_s)


def codec_on(network: Network, layout: Layout, edge: Crossing, request: PlanRequest) -> str:
    """What the policy gives an edge, by the ratios of the boundaries that it spans and the slowest of its links."""
    pairs = product(layout.stages[edge.source].peers, layout.stages[edge.target].peers)
    source, target = max(pairs, key=lambda pair: network.pace(*pair) + network.pace(*pair[::-1]))
    sender_s, reader_s = (1.0 / float(network.memory_bytes_per_s[peer]) for peer in (source, target))
    way = Way(network.pace(source, target), network.pace(target, source), sender_s, reader_s)
    return codec_of(layout.ratios[edge.source : edge.target], request, way)


def _members(chain: Chain, network: Network, stage: Stage, layout: Layout, micro_batches: int) -> SlicePlan:
    """Who executes a stage and which micro-batches, all of them in flight; a member that would get none is left out."""
    known = times(chain, network)
    seconds = [known.both(peer, stage.first, stage.last, recompute=layout.recompute) for peer in stage.peers]
    dealt = deal(seconds, min(micro_batches, LONGEST_DEAL))
    used = sorted(set(dealt))
    first, *others = (network.peers[stage.peers[member]] for member in used)
    pattern = tuple(used.index(member) for member in dealt) if others else (0,)
    turns = [pattern[index % len(pattern)] for index in range(micro_batches)]
    return SlicePlan(first, max(Counter(turns).values()), layout.recompute, tuple(others), pattern)


@dataclass(frozen=True, slots=True)
class _Sizing:
    """How much each slice may hold. limits: in flight, per slice. credits: per pair of slices, where they send."""

    graph: Graph
    parts: Cut
    saved_bytes: Sequence[int]
    draft: Plan
    free_bytes: Mapping[PeerId, float]
    limits: Sequence[int]
    credits: Mapping[tuple[int, int], int]
    moments: int
    shared_bytes: Sequence[int]
    places: Sequence[int]

    @classmethod
    def of(
        cls,
        graph: Graph,
        parts: Cut,
        costs: Sequence[NodeCost],
        draft: Plan,
        network: Network,
        pipeline: Pipeline,
        moments: int,
    ) -> _Sizing:
        """What the draft would like to hold."""
        own = [part.in_flight for part in draft.slices]
        limits = own if draft.schedule == "gpipe" else [min(pair) for pair in zip(own, rtt_caps(pipeline), strict=True)]
        wanted = zip(pipeline.edges, wanted_credits(pipeline), strict=True)
        credits = {(edge.source, edge.target): credits for edge, credits in wanted if edge.source != OWNER_STAGE}
        free = dict(zip(network.peers, map(float, network.free_bytes), strict=True))
        shared = exchange_bytes(graph, parts, [len(part.members) for part in draft.slices])
        places = [remembered_places(graph, draft, index) for index in range(len(draft.slices))]
        return cls(graph, parts, [cost.saved_bytes for cost in costs], draft, free, limits, credits, moments, shared, places)

    def sized(self) -> Plan | NoPlan:
        """The draft with what fits; every peer pays for all of its slices."""
        holdings: list[Holding] = []
        used: Counter[PeerId] = Counter()
        for index, part in enumerate(self.draft.slices):
            poorest = min(part.members, key=lambda peer: self.free_bytes[peer] - used[peer])
            free = self.free_bytes[poorest] - used[poorest]
            holding = next((held for held in self._choices(index) if self._need(index, held) <= free), None)
            if holding is None:
                return shortage(index, poorest, self._need(index, self._least(index)), free)
            holdings.append(holding)
            used.update(dict.fromkeys(part.members, self._need(index, holding)))
        slices = tuple(replace(part, in_flight=held.in_flight) for part, held in zip(self.draft.slices, holdings, strict=True))
        return replace(self.draft, slices=slices, edges=tuple(self._with_credits(edge, holdings) for edge in self.draft.edges))

    def _choices(self, index: int) -> Sequence[Holding]:
        """From what slice `index` would like to hold to the least."""
        wanted = max((credits for pair, credits in self.credits.items() if index in pair), default=CREDITS)
        recompute = self.draft.slices[index].recompute
        least = self._least(index).in_flight
        return [
            Holding(in_flight, credits, self.moments, recompute, places=self.places[index])
            for in_flight in range(self.limits[index], least - 1, -1)
            for credits in sorted({wanted, CREDITS}, reverse=True)
        ]

    def _least(self, index: int) -> Holding:
        in_flight = self.limits[index] if self.draft.schedule == "gpipe" else 1
        return Holding(in_flight, CREDITS, self.moments, self.draft.slices[index].recompute, places=self.places[index])

    def _need(self, index: int, holding: Holding) -> int:
        return slice_bytes(self.graph, self.parts.slices[index], self.saved_bytes, holding) + self.shared_bytes[index]

    def _with_credits(self, edge: EdgePlan, holdings: Sequence[Holding]) -> EdgePlan:
        """What its link needs, if both ends have room for it."""
        room = min(holdings[edge.source].credits, holdings[edge.target].credits)
        return replace(edge, credits=min(self.credits[edge.source, edge.target], room))
