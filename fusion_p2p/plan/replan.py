"""Whether a running job should change to a better layout, and the change that moves least.

Of peers that are alike for the plan, each keeps what it holds as far as possible. What has to move is parameters with the
optimiser's moments, and buffers; gradients and activations are not carried over an epoch. It comes from the owner, out of the
checkpoint that the change follows: with the same cut, peers keep the slices that they have; with another cut all of it is
fetched. A change pays if

    new step + moving / steps to come  <  WORTH * old step

so that noise in measured figures does not make a job move to and fro.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
from scipy.optimize import linear_sum_assignment

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import Terms

WORTH = 0.9
ALIKE = 0.05
"""Measured figures of equal machines differ by so much, relatively."""
GONE = -1
"""Stands in a stage of a layout for a peer that the network does not have."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Stay as it is, and why: one sentence."""

    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """Change to this layout; moving takes so many bytes and seconds."""

    layout: Layout
    moved_bytes: float
    move_s: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds per step of the current and of the candidate layout on the network as it is now, and how many steps are to come.

    current_s is infinite when the current layout cannot run any more.
    """

    current_s: float
    candidate_s: float
    steps: int


def replan(
    chain: Chain, network: Network, terms: Terms, current: Layout, candidate: Layout, predicted: Predicted
) -> Keep | Change:
    """The least change from `current` to something as fast as `candidate`, if it pays. Both are layouts of `chain`."""
    holdings = _Holdings(chain, network, terms, current)
    aligned = holdings.aligned(candidate)
    if aligned.stages == current.stages and aligned.schedule == current.schedule and aligned.ratios == current.ratios:
        return Keep("the best layout now is the one in use")
    moved_bytes, move_s = holdings.cost(aligned)
    change = Change(aligned, moved_bytes, move_s)
    if math.isinf(predicted.current_s) or any(GONE in stage.peers for stage in current.stages):
        return change
    with_moving_s = predicted.candidate_s + move_s / max(1, predicted.steps)
    if with_moving_s < WORTH * predicted.current_s:
        return change
    return Keep(
        f"changing would take a step from {predicted.current_s:.3g} s to {predicted.candidate_s:.3g} s, "
        f"moving {move_s:.3g} s for {predicted.steps} steps to come: too little"
    )


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


@dataclass(frozen=True, eq=False, slots=True)
class _Holdings:
    """Who holds which blocks now."""

    chain: Chain
    network: Network
    terms: Terms
    current: Layout

    def aligned(self, candidate: Layout) -> Layout:
        """The candidate with alike peers exchanged so that as many bytes as possible stay where they are."""
        becomes: dict[int, int] = {}
        for alike in _alike(self.network):
            held = [self._blocks(self.current, peer) for peer in alike]
            kept = np.array([[self._common(self._blocks(candidate, peer), blocks) for blocks in held] for peer in alike])
            places, peers = linear_sum_assignment(kept, maximize=True)
            becomes.update({alike[place]: alike[peer] for place, peer in zip(places, peers, strict=True)})
        stages = tuple(replace(stage, peers=tuple(becomes[peer] for peer in stage.peers)) for stage in candidate.stages)
        return replace(candidate, stages=stages)

    def cost(self, candidate: Layout) -> tuple[float, float]:
        """Bytes that move, and seconds until the last has arrived; infinite where the owner's links are unknown."""
        cuts = [[(stage.first, stage.last) for stage in layout.stages] for layout in (self.current, candidate)]
        fetched: dict[int, float] = defaultdict(float)
        for before, stage in zip_longest(self.current.stages if cuts[0] == cuts[1] else (), candidate.stages):
            for peer in stage.peers:
                if before is None or peer not in before.peers:
                    fetched[peer] += self._state_bytes(stage.first, stage.last)
        return sum(fetched.values()), self._from_owner_s(fetched)

    def _from_owner_s(self, fetched: Mapping[int, float]) -> float:
        """All peers fetch at once: each over its own link, and all over the owner's uplink, which is as fast as the fastest."""
        owner, network = self.network.owner, self.network
        if not fetched:
            return 0.0
        if owner is None:
            return math.inf
        paces = {peer: network.pace(owner, peer) for peer in range(len(network.peers))}
        slowest_s = max(float(network.alpha_s[owner, peer]) + num_bytes * paces[peer] for peer, num_bytes in fetched.items())
        return max(slowest_s, sum(fetched.values()) * min(paces.values()))

    def _blocks(self, layout: Layout, peer: int) -> list[tuple[int, int]]:
        return [(stage.first, stage.last) for stage in layout.stages if peer in stage.peers]

    def _common(self, wanted: Sequence[tuple[int, int]], held: Sequence[tuple[int, int]]) -> float:
        """Bytes that are in both."""
        overlaps = [(max(a, c), min(b, d)) for a, b in wanted for c, d in held]
        return sum(self._state_bytes(first, last) for first, last in overlaps if first < last)

    def _state_bytes(self, first: int, last: int) -> float:
        parameters = self.chain.parameter_bytes[last] - self.chain.parameter_bytes[first]
        buffers = self.chain.buffer_bytes[last] - self.chain.buffer_bytes[first]
        return float((1 + self.terms.moments) * parameters + buffers)


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
