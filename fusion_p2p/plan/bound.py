"""A closed-form bound to judge plans by: what no chain of single peers can beat.

For every set U of sites that a plan may use:

    T    >= max( the least time in which U shares out all work,  the slowest hop of the cheapest tree over U )
    step >= each operator on whoever of U is fastest + both ways over every hop of that tree + (micro-batches - 1) * T

with every message as small as the cheapest cut and the largest ratio allow. A tree, because whatever way micro-batches take
through all of U contains one. Memory and feeds are left out, so the bound may be out of reach.

A hop takes alpha + bytes * beta, as in the cost model of FusionLLM (arXiv 2410.12707). Latency does not occupy a link, so
a plan with many micro-batches in flight may pass that bound; `strict` counts the bytes alone. Replicas of a stage work side by
side on different micro-batches: where these are few and the pipeline is short, they may beat either by part of the first term.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.communities import between, paces
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.ratios import most
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.times import work

Ints = NDArray[np.int64]
MOST_SITES = 10
"""Up to so many sites every set is tried. Above, sites count fastest first and hops are the fastest there are."""


def bound_s(chain: Chain, network: Network, terms: Terms, *, strict: bool = False) -> float:
    """Seconds that a step takes at least (see above for what that means); 0 if there is nobody."""
    count = len(network.peers)
    if not count:
        return 0.0
    numbers, site_of = np.unique(network.sites[:count], return_inverse=True)
    sites = [np.flatnonzero(site_of == site) for site in range(len(numbers))]
    blocks, kind = np.unique(np.diff(work(chain, network, terms.recompute), axis=1), axis=0, return_inverse=True)
    peers = np.zeros((len(sites), len(blocks)))
    np.add.at(peers, (site_of, kind.ravel()), 1)
    hops = _Hops.of(chain, network, sites, most(terms), strict=strict)
    return min(
        _computing(blocks, peers[list(chosen)].sum(axis=0), slowest, ways, terms.micro_batches)
        for chosen, (slowest, ways) in _sets(blocks, peers, hops)
    )


def _computing(blocks: Floats, peers: Floats, slowest_hop_s: float, ways_s: float, micro_batches: int) -> float:
    """The bound for one set of peers. blocks: (kinds, N) seconds there and back. peers: (kinds,) how many of each there are."""
    seconds, alike = blocks[peers > 0], peers[peers > 0]
    speeds = 1.0 / np.maximum(seconds.sum(axis=1), 1e-30)
    weights = speeds / (speeds * alike).sum()
    pace = float(np.min(weights[:, None] * seconds, axis=0).sum())  # linear programming dual: no division of work does better
    return float(seconds.min(axis=0).sum()) + ways_s + (micro_batches - 1) * max(pace, slowest_hop_s)


def _sets(blocks: Floats, peers: Floats, hops: _Hops) -> Iterator[tuple[Sequence[int], tuple[float, float]]]:
    """Sets of sites that a plan may use, with the slowest hop and the sum of the ways. peers: (sites, kinds)."""
    count = len(peers)
    if count <= MOST_SITES:
        for size in range(1, count + 1):
            for chosen in combinations(range(count), size):
                yield chosen, hops.tree(chosen)
        return
    speeds = peers @ (1.0 / np.maximum(blocks.sum(axis=1), 1e-30))
    fastest = np.argsort(-speeds, kind="stable").tolist()
    slowest, ways = hops.fastest()
    for size in range(1, count + 1):
        yield fastest[:size], (slowest[size - 1], ways[size - 1])


@dataclass(frozen=True, eq=False, slots=True)
class _Hops:
    """(sites, sites) seconds that a hop is busy per micro-batch, and seconds of both messages; symmetric."""

    busy_s: Floats
    ways_s: Floats

    @classmethod
    def of(cls, chain: Chain, network: Network, sites: Sequence[Ints], ratio: float, *, strict: bool) -> _Hops:
        """Over the best pair of peers, at the cheapest cut."""
        inner = slice(1, max(2, chain.num_blocks))
        there, back = float(np.min(chain.crossing[inner])) / ratio, float(np.min(chain.crossing_back[inner])) / ratio
        pace, alpha = paces(network), network.alpha_s[: len(network.peers), : len(network.peers)]
        best_pace = between(np.minimum(pace, pace.T), sites, np.minimum)
        best_alpha = between(np.minimum(alpha, alpha.T), sites, np.minimum)
        load = max(there, back) if network.full_duplex else there + back
        latency = 0.0 if strict else best_alpha * (1 if network.full_duplex else 2)
        return cls(latency + load * best_pace, 2 * best_alpha + (there + back) * best_pace)

    def tree(self, chosen: Sequence[int]) -> tuple[float, float]:
        """The slowest hop and the sum of the ways, each over the tree for which it is least."""
        return max(_tree(self.busy_s, chosen), default=0.0), sum(_tree(self.ways_s, chosen))

    def fastest(self) -> tuple[list[float], list[float]]:
        """The same over the fastest hops between any sites: 0, 1, ... of them."""
        pairs = np.triu_indices(len(self.busy_s), 1)
        slowest = np.sort(self.busy_s[pairs])[: len(self.busy_s) - 1]
        ways = np.cumsum(np.sort(self.ways_s[pairs])[: len(self.busy_s) - 1])
        return [0.0, *slowest.tolist()], [0.0, *ways.tolist()]


def _tree(cost: Floats, nodes: Sequence[int]) -> Iterator[float]:
    """The edges of the cheapest spanning tree (Prim)."""
    reach = {node: float(cost[nodes[0], node]) for node in nodes[1:]}
    while reach:
        node = min(reach, key=lambda other: reach[other])
        yield reach.pop(node)
        for other in reach:
            reach[other] = min(reach[other], float(cost[node, other]))
