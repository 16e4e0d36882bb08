"""Whether a running job should change to a better layout, and the change that moves least.

Of peers that are alike for the plan, each keeps what it holds as far as possible. What still has to move is parameters with the
optimiser's moments, and buffers; gradients and activations are not carried over an epoch. A change pays if

    new step + moving / steps to come  <  WORTH * old step

so that noise in measured figures does not make a job move to and fro.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
        """Bytes that move, and seconds until the last has arrived when all links carry at once."""
        busy: dict[Hashable, float] = defaultdict(float)
        moved, latency_s = 0.0, 0.0
        for stage in candidate.stages:
            for peer in stage.peers:
                for first, last in self._missing(stage, peer):
                    source, num_bytes = self._source(peer, first, last), self._state_bytes(first, last)
                    moved += num_bytes
                    if source is None or not num_bytes:
                        continue
                    latency_s = max(latency_s, float(self.network.alpha_s[source, peer]))
                    for queue in self.network.queues(source, peer):
                        busy[queue] += num_bytes * self.network.pace(source, peer)
        return moved, max(busy.values(), default=0.0) + latency_s

    def _missing(self, stage: Stage, peer: int) -> list[tuple[int, int]]:
        """Runs of blocks of a stage that a peer does not hold, divided where current stages end."""
        held = self._blocks(self.current, peer)
        borders = sorted({stage.first, stage.last, *(s.last for s in self.current.stages if stage.first < s.last < stage.last)})
        runs: list[tuple[int, int]] = []
        for first, last in pairwise(borders):
            if not any(one <= first and last <= other for one, other in held):
                runs.append((first, last))
        return runs

    def _source(self, peer: int, first: int, last: int) -> int | None:
        """Who sends blocks: the holder nearest to the peer, or the owner with its checkpoint; None if nobody is known."""
        holders = [
            holder
            for stage in self.current.stages
            if stage.first <= first and last <= stage.last
            for holder in stage.peers
            if holder not in (GONE, peer)
        ]
        if not holders and self.network.owner is not None:
            holders = [self.network.owner]
        return min(holders, key=lambda holder: self.network.link_s(holder, peer, self._state_bytes(first, last)), default=None)

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
