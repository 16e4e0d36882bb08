"""How much each slice of a plan may hold, as memory allows: micro-batches in flight, and credits for what comes.

A slice starts from the limit in flight that hides its round trip and from the credits with which no link pauses
(`plan.actions`), and gives up both, credits first, until it fits its peer beside the least of the peer's other slices. Under
gpipe it holds all of its micro-batches. A plan that does not fit is no plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.actions import rtt_caps, wanted_credits
from fusion_p2p.plan.memory import CREDITS, Holding, remembered_places, shortage, slice_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import NodeCost, NoPlan
from fusion_p2p.plan.sharing import exchange_bytes


def sized(graph: Graph, parts: Cut, costs: Sequence[NodeCost], draft: Plan, network: Network, moments: int) -> Plan | NoPlan:
    """The draft with what fits, where a slice holds at most what the draft says; `parts` is the cut that it makes."""
    pipeline = pipeline_of_plan(graph, parts, costs, draft, network)
    return _Sizing.of(graph, parts, costs, draft, network, pipeline, moments).sized()


def all_in_flight(part: SlicePlan, micro_batches: int) -> SlicePlan:
    """The slice with everything in flight that any of its members executes in a step: what a draft says."""
    turns = Counter(part.deal[index % len(part.deal)] for index in range(micro_batches))
    return replace(part, in_flight=max(turns.values()))


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
        used, to_come = Counter[PeerId](), self._least_of_all()
        for index, part in enumerate(self.draft.slices):
            least = self._need(index, self._least(index))
            to_come.subtract(dict.fromkeys(part.members, least))
            rooms = {peer: self.free_bytes[peer] - used[peer] - to_come[peer] for peer in part.members}
            poorest = min(part.members, key=lambda peer: rooms[peer])
            holding = next((held for held in self._choices(index) if self._need(index, held) <= rooms[poorest]), None)
            if holding is None:
                return shortage(index, poorest, least, rooms[poorest])
            holdings.append(holding)
            used.update(dict.fromkeys(part.members, self._need(index, holding)))
        slices = tuple(replace(part, in_flight=held.in_flight) for part, held in zip(self.draft.slices, holdings, strict=True))
        return replace(self.draft, slices=slices, edges=tuple(self._with_credits(edge, holdings) for edge in self.draft.edges))

    def _least_of_all(self) -> Counter[PeerId]:
        """The least bytes that every peer needs for all of its slices."""
        needed = Counter[PeerId]()
        for index, part in enumerate(self.draft.slices):
            needed.update(dict.fromkeys(part.members, self._need(index, self._least(index))))
        return needed

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
