"""The planner against optima, on networks small enough to try everything.

In a given order: the path planner against every subsequence and every cut, both by the closed formula. Over all orders, subsets
and cuts: `auto` against the fastest there is, both simulated. The search for the latter leaves out only what a lower bound on
every simulation shows to be slower than the best known.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.auto import auto
from fusion_p2p.plan.chain import Chain, Operator, chain_of_operators
from fusion_p2p.plan.estimate import step_estimate
from fusion_p2p.plan.judging import Judge
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import within_memory
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.path import best_path, prepare
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.times import Times, times

CASES = 60
BLOCKS = 8
MICRO_BATCHES = (4, 8, 16)
SIZES = (4, 5, 6, 7)


def measure(cases: int = CASES) -> dict[str, float]:
    """The gaps, as shares of the optimum."""
    path_gaps, auto_gaps = [], []
    for number in range(cases):
        chain, network = random_chain(number), random_network(number, SIZES[number % len(SIZES)])
        terms = Terms(MICRO_BATCHES[number % len(MICRO_BATCHES)])
        path_gaps.append(path_gap(chain, network, terms))
        found = auto(chain, network, terms)
        if not isinstance(found, Layout):
            raise SystemExit(f"case {number}: {found.reason}")
        auto_s = Judge(chain, network, terms).offer(found)
        auto_gaps.append(auto_s / Optimum(chain, network, terms, auto_s).find() - 1)
    return {
        "path_gap_max": max(path_gaps),
        "small_gap_mean": float(np.mean(auto_gaps)),
        "small_gap_max": max(auto_gaps),
    }


def path_gap(chain: Chain, network: Network, terms: Terms) -> float:
    """How far the path planner's estimate in listed order is from the least of all, relatively."""
    found = best_path(prepare(chain, network, terms), range(len(network.peers)), tolerance=0.0)
    least = min(step_estimate(chain, network, layout, terms.micro_batches) for layout in _in_order(chain, network, terms))
    return abs(found.step_s / least - 1) if found is not None else math.inf


@dataclass(eq=False, slots=True)
class Optimum:
    """The least simulated step over all orders, subsets and cuts with one peer a stage, or `best_s` if nothing is faster."""

    chain: Chain
    network: Network
    terms: Terms
    best_s: float
    known: Times = field(init=False)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.known = times(self.chain, self.network)
        self.judge = Judge(self.chain, self.network, self.terms)

    def find(self) -> float:
        """Depth first: a stage after the other."""
        self._extend((), 0, 0.0, 0.0)
        return self.best_s

    def _extend(self, stages: tuple[Stage, ...], first: int, fill_s: float, bound_s: float) -> None:
        """fill_s: the first micro-batch to the end of the last stage and back; bound_s: what the step takes at least."""
        if first == self.chain.num_blocks:
            self.best_s = min(self.best_s, self.judge.stages("optimum", stages, recompute=False))
            return
        used = {peer for stage in stages for peer in stage.peers}
        for peer in range(len(self.network.peers)):
            if peer in used:
                continue
            reached_s, reached_bound_s = self._over_link(stages, peer, first, fill_s, bound_s)
            left = used | {peer}
            for last in range(first + 1, self.chain.num_blocks + 1):
                seconds = self.known.both(peer, first, last)
                after_s = reached_s + seconds
                bound = max(reached_bound_s, after_s + (self.terms.micro_batches - 1) * seconds)
                if max(bound, self._rest_s(left, last, after_s)) < self.best_s:
                    self._extend((*stages, Stage(first, last, (peer,))), last, after_s, bound)

    def _over_link(
        self, stages: tuple[Stage, ...], peer: int, first: int, fill_s: float, bound_s: float
    ) -> tuple[float, float]:
        if not stages:
            return fill_s, bound_s
        before, num_bytes = stages[-1].peers[0], float(self.chain.crossing[first])
        reached = fill_s + self.network.link_s(before, peer, num_bytes) + self.network.link_s(peer, before, num_bytes)
        busy = num_bytes * self.network.pace(before, peer)
        return reached, max(bound_s, reached + (self.terms.micro_batches - 1) * busy)

    def _rest_s(self, used: set[int], first: int, fill_s: float) -> float:
        """At least this long if blocks from `first` on go to peers that are not used."""
        if first == self.chain.num_blocks:
            return fill_s
        whole = [
            self.known.both(peer, first, self.chain.num_blocks) for peer in range(len(self.network.peers)) if peer not in used
        ]
        if not whole:
            return math.inf
        shared = 1.0 / sum(1.0 / seconds for seconds in whole)
        return fill_s + max(min(whole), shared * self.terms.micro_batches)


def random_chain(seed: int) -> Chain:
    """Uneven blocks, each reading the one before."""
    random = np.random.default_rng(seed)
    flops, sizes = random.lognormal(0, 0.5, BLOCKS) * 1e11, random.lognormal(0, 0.7, BLOCKS) * 2e6
    return chain_of_operators(
        f"random {seed}",
        [
            Operator(f"{index}", float(flops[index]), float(sizes[index]), (index - 1,) if index else (), 2e7, 2e7)
            for index in range(BLOCKS)
        ],
    )


def random_network(seed: int, num_peers: int) -> Network:
    """Every peer a site of its own; links lognormal around 60 Mbit/s, the same both ways."""
    random = np.random.default_rng(10_000 + seed)
    shape = (num_peers, num_peers)
    rate, latency = np.clip(random.lognormal(np.log(60), 1.0, shape), 8, 1000), random.uniform(0.01, 0.08, shape)
    beta, alpha = np.tril(8e-6 / rate, -1), np.tril(latency, -1)
    flops = random.choice([1.0, 2.0, 4.0, 8.0], num_peers) * 1e12
    return Network(
        peers=tuple(PeerId(f"peer-{index}") for index in range(num_peers)),
        flops_per_s=np.repeat(flops[:, None], 3, axis=1),
        memory_bytes_per_s=np.full(num_peers, np.inf),
        free_bytes=random.uniform(1.0, 4.0, num_peers) * 1e9,
        sites=np.arange(num_peers),
        alpha_s=alpha + alpha.T,
        beta_s=beta + beta.T,
        uplink_s=np.zeros(num_peers),
        downlink_s=np.zeros(num_peers),
    )


def _in_order(chain: Chain, network: Network, terms: Terms) -> Iterator[Layout]:
    """Every layout with one peer a stage, peers in listed order, that fits with one micro-batch in flight."""
    ends = range(1, chain.num_blocks)
    for count in range(1, len(network.peers) + 1):
        for peers in combinations(range(len(network.peers)), count):
            for cuts in combinations(ends, count - 1):
                borders = pairwise((0, *cuts, chain.num_blocks))
                stages = tuple(Stage(first, last, (peer,)) for (first, last), peer in zip(borders, peers, strict=True))
                layout = Layout("brute force", stages)
                if isinstance(within_memory(chain, network, layout, terms), Layout):
                    yield layout


if __name__ == "__main__":
    print(measure())
