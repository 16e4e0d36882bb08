"""From a layout to a plan: slices of the real graph, who executes which micro-batch, and how much memory allows in flight.

A scheduler's layout counts in blocks of a chain; here the exact memory of each slice decides. A slice starts from the limit in
flight that hides its round trip and gives up micro-batches until it fits its peer; a plan that does not fit is no plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, cut
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import CREDITS, Holding, num_moments, shortage, slice_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import NodeCost, NoPlan, PlanRequest
from fusion_p2p.plan.times import deal, times


def place(
    graph: Graph, costs: Sequence[NodeCost], chain: Chain, network: Network, layout: Layout, request: PlanRequest
) -> Plan | NoPlan:
    """The plan of a layout of `chain`, which is the chain of `graph`; NoPlan when a slice does not fit its peer."""
    borders = [int(chain.positions[stage.first]) for stage in layout.stages[1:]]
    slice_of = tuple(bisect_right(borders, node) for node in range(len(graph.nodes)))
    parts = cut(graph, slice_of)
    placing = _Placing(graph, parts, [cost.saved_bytes for cost in costs], chain, network, layout, request)
    slices = placing.slices()
    if isinstance(slices, NoPlan):
        return slices
    busy = {peer for part in slices for peer in part.members}
    spare = tuple((peer, "the plan is faster without it") for peer in network.peers if peer not in busy)
    return Plan(
        graph=request.graph,
        scheduler=layout.scheduler,
        micro_batches=request.micro_batches,
        slice_of=slice_of,
        slices=slices,
        edges=tuple(EdgePlan(edge.value, edge.source, edge.target, credits=CREDITS) for edge in parts.edges),
        idle=request.idle + spare,
        predicted_step_s=placing.predict(),
        schedule=layout.schedule,
    )


def default_in_flight(index: int, num_slices: int, micro_batches: int) -> int:
    """Micro-batches a slice may hold: enough that a gradient's way there and back is hidden, fewer towards the loss."""
    return max(1, min(micro_batches, 2 * (num_slices - index)))


@dataclass(frozen=True, slots=True)
class _Placing:
    """The arguments of one call of `place`."""

    graph: Graph
    parts: Cut
    saved_bytes: Sequence[int]
    chain: Chain
    network: Network
    layout: Layout
    request: PlanRequest

    def slices(self) -> tuple[SlicePlan, ...] | NoPlan:
        """For each stage its members, and as many micro-batches in flight as their memory allows, at most the default."""
        placed: list[SlicePlan] = []
        used: Counter[int] = Counter()
        for index, stage in enumerate(self.layout.stages):
            part = self._slice(index, stage, used)
            if isinstance(part, NoPlan):
                return part
            placed.append(part)
        return tuple(placed)

    def _slice(self, index: int, stage: Stage, used: Counter[int]) -> SlicePlan | NoPlan:
        dealt = self._deal(stage)
        members = sorted(set(dealt))
        free = {peer: float(self.network.free_bytes[peer]) - used[peer] for peer in (stage.peers[member] for member in members)}
        poorest = min(free, key=lambda peer: free[peer])
        all_own = max(Counter(dealt).values())
        most = all_own if self.layout.schedule == "gpipe" else min(all_own, self._wanted(index))
        least = most if self.layout.schedule == "gpipe" else 1
        fits = next((held for held in range(most, least - 1, -1) if self.need(index, held) <= free[poorest]), None)
        if fits is None:
            return shortage(index, self.network.peers[poorest], self.need(index, least), free[poorest])
        for peer in free:
            used[peer] += self.need(index, fits)
        first, *replicas = (self.network.peers[stage.peers[member]] for member in members)
        pattern = tuple(members.index(member) for member in dealt) if replicas else (0,)
        return SlicePlan(first, fits, self.layout.recompute, tuple(replicas), pattern)

    def need(self, index: int, in_flight: int) -> int:
        """Bytes of a slice with so many micro-batches in flight."""
        holding = Holding(in_flight, CREDITS, num_moments(self.request.optimiser), self.layout.recompute)
        return slice_bytes(self.graph, self.parts.slices[index], self.saved_bytes, holding)

    def predict(self) -> float:
        """Seconds per step of the pipeline without its links: the slowest slice for each micro-batch, the others once."""
        known = times(self.chain, self.network)
        recompute = self.layout.recompute
        seconds = [known.both(part.peers[0], part.first, part.last, recompute=recompute) for part in self.layout.stages]
        return sum(seconds) + (self.request.micro_batches - 1) * max(seconds)

    def _wanted(self, index: int) -> int:
        return default_in_flight(index, len(self.layout.stages), self.request.micro_batches)

    def _deal(self, stage: Stage) -> tuple[int, ...]:
        known = times(self.chain, self.network)
        seconds = [known.both(peer, stage.first, stage.last) for peer in stage.peers]
        return deal(seconds, self.request.micro_batches)
