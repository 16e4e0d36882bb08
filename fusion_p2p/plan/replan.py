"""Whether a running job should change to a better plan, and the change that moves least.

Of peers that are alike for the plan, each keeps what it holds as far as possible. What has to move is parameters with the
optimiser's moments, and buffers; gradients and activations are not carried over an epoch. It moves tensor by tensor, each from
a peer that holds it now and sends it fastest, and from the owner's checkpoint only where nobody does. A change pays if

    new step + moving / steps to come  <  (1 - gain) * old step

where the gain that is wanted is a tenth at least.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.plan import Plan, SlicePlan

GAIN = 0.1
"""A step has to become shorter by this share of it, or nothing moves."""
ALIKE = 0.05
"""Measured figures of equal machines differ by so much, relatively."""
GONE = -1
"""Stands in a stage of a layout for a peer that the network does not have."""


@dataclass(frozen=True, slots=True)
class Running:
    """A plan, and the cut of its graph that it makes."""

    plan: Plan
    parts: Cut


@dataclass(frozen=True, slots=True)
class Keep:
    """Stay as it is, and why: one sentence.

    promising: a plan that pays by what is known so far.
    """

    reason: str
    promising: Plan | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """Change to this plan, made with the same peers or with others that are alike; moving takes so many bytes and seconds."""

    plan: Plan
    moved_bytes: float
    move_s: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds per step of the current and of the candidate plan on the network as it is now, and how many steps are to come.

    current_s is infinite when the current plan cannot run any more. gain: the share of a step that has to be gained.
    """

    current_s: float
    candidate_s: float
    steps: int
    gain: float = GAIN

    def refusal(self, move_s: float) -> str | None:
        """Why it does not pay to move for so long, if it does not."""
        if self.candidate_s + move_s / max(1, self.steps) < (1 - self.gain) * self.current_s:
            return None
        return (
            f"changing would take a step from {self.current_s:.3g} s to {self.candidate_s:.3g} s, "
            f"moving {move_s:.3g} s for {self.steps} steps to come: too little, {self.gain:.0%} is wanted"
        )


def replan(
    graph: Graph, network: Network, moments: int, current: Running, candidate: Running, predicted: Predicted
) -> Keep | Change:
    """The least change from `current` to something as fast as `candidate`, if it pays. Both are plans of `graph`.

    moments: tensors of a parameter's size that the optimiser keeps. The network has all peers of the candidate; peers of the
    current plan that it lacks are lost.
    """
    holdings = _Holdings(graph, network, moments, current)
    aligned = holdings.aligned(candidate)
    if _who(aligned.plan) == _who(current.plan):
        return Keep("the best plan now is the one in use")
    moved_bytes, move_s = holdings.cost(aligned)
    change = Change(aligned.plan, moved_bytes, move_s)
    if math.isinf(predicted.current_s) or not current.plan.peers <= set(network.peers):
        return change
    refusal = predicted.refusal(move_s)
    return change if refusal is None else Keep(refusal)


def layout_of(plan: Plan, chain: Chain, network: Network) -> Layout:
    """The layout that a plan came from, without ratios; peers that the network lacks are GONE. `chain` is that of its graph."""
    numbers = {peer: number for number, peer in enumerate(network.peers)}
    borders = [0, *(plan.slice_of.index(part) for part in range(1, len(plan.slices))), len(plan.slice_of)]
    at = np.searchsorted(chain.positions, borders)
    stages = tuple(
        Stage(int(at[index]), int(at[index + 1]), tuple(numbers.get(peer, GONE) for peer in part.members))
        for index, part in enumerate(plan.slices)
    )
    return Layout(plan.scheduler, stages, schedule=plan.schedule, recompute=any(part.recompute for part in plan.slices))


def _who(plan: Plan) -> object:
    """What makes two plans the same but for codecs and limits, which are not worth moving for."""
    return plan.slice_of, plan.schedule, [(part.members, part.deal, part.recompute) for part in plan.slices]


def _with_peers(plan: Plan, becomes: Mapping[PeerId, PeerId]) -> Plan:
    """The plan with peers exchanged."""

    def renamed(part: SlicePlan) -> SlicePlan:
        first, *others = (becomes.get(peer, peer) for peer in part.members)
        return replace(part, peer=first, replicas=tuple(others))

    idle = tuple((becomes.get(peer, peer), reason) for peer, reason in plan.idle)
    return replace(plan, slices=tuple(map(renamed, plan.slices)), idle=idle)


@dataclass(frozen=True, eq=False, slots=True)
class _Holdings:
    """Who holds which parameters and buffers now."""

    graph: Graph
    network: Network
    moments: int
    current: Running

    def aligned(self, candidate: Running) -> Running:
        """The candidate with alike peers exchanged so that as many bytes as possible stay where they are."""
        becomes: dict[PeerId, PeerId] = {}
        for group in _alike(self.network):
            alike = [self.network.peers[node] for node in group]
            held = [_tensors(self.current, peer) for peer in alike]
            wanted = [_tensors(candidate, peer) for peer in alike]
            kept = np.array([[self._bytes(one & other) for other in held] for one in wanted])
            from scipy.optimize import linear_sum_assignment  # takes half a second to load, which no peer needs that only works

            places, peers = linear_sum_assignment(kept, maximize=True)
            becomes.update({alike[place]: alike[peer] for place, peer in zip(places, peers, strict=True)})
        return Running(_with_peers(candidate.plan, becomes), candidate.parts)

    def cost(self, candidate: Running) -> tuple[float, float]:
        """Bytes that move, and seconds until the last has arrived; infinite where nobody can send them."""
        nodes = {peer: node for node, peer in enumerate(self.network.peers)}
        holders = self._holders()
        sending: dict[int, float] = defaultdict(float)
        receiving: dict[int, float] = defaultdict(float)
        moved_bytes = latency_s = 0.0
        for peer in sorted(candidate.plan.peers):
            target = nodes[peer]
            for value in sorted(_tensors(candidate, peer) - _tensors(self.current, peer)):
                num_bytes = self._bytes({value})
                moved_bytes += num_bytes
                source = self._sender(holders.get(value, []), target, num_bytes, sending)
                if source is None:
                    return moved_bytes, math.inf
                seconds = num_bytes * self.network.pace(source, target)
                sending[source] += seconds
                receiving[target] += seconds
                latency_s = max(latency_s, float(self.network.alpha_s[source, target]))
        return moved_bytes, latency_s + max((*sending.values(), *receiving.values()), default=0.0)

    def _holders(self) -> dict[int, list[int]]:
        """The nodes that hold each parameter and buffer."""
        found: dict[int, list[int]] = defaultdict(list)
        for node, peer in enumerate(self.network.peers):
            for value in _tensors(self.current, peer):
                found[value].append(node)
        return found

    def _sender(self, holders: list[int], target: int, num_bytes: float, sending: Mapping[int, float]) -> int | None:
        """Who is first to have sent a tensor to a node, after what it sends already; the owner if nobody holds it."""
        if not holders:
            return self.network.owner
        return min(holders, key=lambda node: sending.get(node, 0.0) + num_bytes * self.network.pace(node, target))

    def _bytes(self, values: frozenset[int] | set[int]) -> float:
        """Of parameters with their moments, and of buffers."""
        return float(
            sum(
                self.graph.types[value].num_bytes * (1 + self.moments if self.graph.parameter(value).trainable else 1)
                for value in values
            )
        )


def _tensors(running: Running, peer: PeerId) -> frozenset[int]:
    """The parameters and buffers that a peer holds."""
    slices = running.plan.slices_of(peer)
    return frozenset(value for index in slices for value in running.parts.slices[index].parameters)


def _alike(network: Network) -> list[list[int]]:
    """Peers that may stand for each other: of one site, with about equal rates, memory, and links to everybody else."""
    groups: list[list[int]] = []
    for peer in range(len(network.peers)):
        same = next((group for group in groups if _exchangeable(network, group[0], peer)), None)
        if same is None:
            groups.append([peer])
        else:
            same.append(peer)
    return groups


def _exchangeable(network: Network, one: int, other: int) -> bool:
    if network.sites[one] != network.sites[other]:
        return False
    figures = np.column_stack([network.flops_per_s, network.memory_bytes_per_s, network.free_bytes])
    if not np.allclose(figures[one], figures[other], rtol=ALIKE, atol=0.0):
        return False
    others = np.array([node for node in range(len(network.sites)) if node not in (one, other)], dtype=np.int64)
    links: tuple[Floats, ...] = (network.alpha_s, network.alpha_s.T, network.beta_s, network.beta_s.T)
    return all(np.allclose(matrix[one, others], matrix[other, others], rtol=ALIKE, atol=0.0) for matrix in links)
