"""DT-FM (Yuan et al., arXiv 2206.01288), re-implemented for comparison: equal stages, each on a group of equally many peers.

Its cost, of data parallelism inside groups plus the pipeline between them:

    data      max over groups, over members i:  sum over the others j of 2 (alpha_ij + c_dp / (d beta_ij))
    pipeline  2 x the cheapest open path over groups; two groups cost their bottleneck matching under alpha_ij + c_pp / beta_ij
              (beta: bytes per second; d: peers in a group; c_dp, c_pp: bytes per step of gradients and of activations)

A genetic search over balanced partitions: an offspring takes some peers' groups from the other parent, is balanced again, then
improved by exchanging peers while that lowers the cost (a plain local search in place of their cyclic moves); it replaces the
worse parent if it is not worse. Partitions by site and across sites are among the first, in favour of DT-FM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
from scipy.optimize import linear_sum_assignment

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.request import Terms

POPULATION, OFFSPRING, TAKEN, EXCHANGES = 24, 120, 5, 12
EXACT_PATH = 8
WINDOW = 0.25

Group = tuple[int, ...]
Partition = tuple[Group, ...]


def dt_fm(chain: Chain, network: Network, terms: Terms, num_stages: int) -> Layout:
    """The layout with `num_stages` equal stages on equal groups; their number divides that of the peers."""
    count = len(network.peers)
    size = count // num_stages
    cuts = _cheap_equal_cuts(chain, num_stages)
    inner = chain.crossing[list(cuts[1:-1])]
    activations = float(inner.mean()) if len(inner) else 0.0
    gradients = float(chain.parameter_bytes[-1]) / num_stages
    costs = _Costs.of(network, gradients / size, activations * terms.micro_batches / size)
    best = _evolve(costs, _first(network, num_stages, terms.seed), terms.seed)
    order = costs.path(best)
    groups = _matched(costs, [best[index] for index in order])
    stages = tuple(Stage(first, last, group) for (first, last), group in zip(pairwise(cuts), groups, strict=True))
    return Layout("dt-fm", stages, recompute=terms.recompute)


@dataclass(frozen=True, eq=False, slots=True)
class _Costs:
    """The two kinds of link costs, (P, P) seconds, and what was computed with them."""

    data_s: Floats
    pipeline_s: Floats
    known: dict[tuple[Group, Group], float] = field(default_factory=dict)

    @classmethod
    def of(cls, network: Network, data_bytes: float, pipeline_bytes: float) -> _Costs:
        count = len(network.peers)
        alpha, beta = network.alpha_s[:count, :count], network.beta_s[:count, :count]
        return cls(2 * (alpha + beta * data_bytes), alpha + beta * pipeline_bytes)

    def total(self, partition: Partition) -> float:
        """Seconds of a partition."""
        data = max(float(self.data_s[np.ix_(group, group)].sum(axis=1).max()) for group in partition)
        order = self.path(partition)
        return data + 2 * sum(self.between(partition[one], partition[other]) for one, other in pairwise(order))

    def between(self, one: Group, other: Group) -> float:
        """The bottleneck matching of two groups."""
        key = (one, other) if one < other else (other, one)
        if key not in self.known:
            weights = self.pipeline_s[np.ix_(*key)]
            self.known[key] = float(weights[bottleneck_matching(weights)].max())
        return self.known[key]

    def path(self, partition: Partition) -> tuple[int, ...]:
        """The cheapest open path over the groups: by dynamic programming, of many groups the best greedy one."""
        count = len(partition)
        cost = np.zeros((count, count))
        for one in range(count):
            for other in range(one):
                cost[one, other] = cost[other, one] = self.between(partition[one], partition[other])
        return _held_karp(cost) if count <= EXACT_PATH else _greedy_path(cost)


def bottleneck_matching(weights: Floats) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of a perfect matching whose greatest weight is least."""
    levels = np.unique(weights)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        rows, columns = linear_sum_assignment(weights > levels[middle])
        if (weights[rows, columns] <= levels[middle]).all():
            high = middle
        else:
            low = middle + 1
    rows, columns = linear_sum_assignment(weights > levels[low])
    return rows, columns


def _held_karp(cost: Floats) -> tuple[int, ...]:
    count = len(cost)

    @cache
    def best(last: int, visited: int) -> tuple[float, tuple[int, ...]]:
        before = visited & ~(1 << last)
        if not before:
            return 0.0, (last,)
        ways = (best(other, before) for other in range(count) if before >> other & 1)
        return min((seconds + float(cost[path[-1], last]), (*path, last)) for seconds, path in ways)

    return min(best(last, (1 << count) - 1) for last in range(count))[1]


def _greedy_path(cost: Floats) -> tuple[int, ...]:
    found = []
    for start in range(len(cost)):
        path, left = [start], set(range(len(cost))) - {start}
        while left:
            path.append(min(left, key=lambda other: (cost[path[-1], other], other)))
            left.discard(path[-1])
        found.append((sum(float(cost[pair]) for pair in pairwise(path)), tuple(path)))
    return min(found)[1]


def _first(network: Network, num_groups: int, seed: int) -> list[Partition]:
    """Random balanced partitions, one by site, one across sites."""
    numbers = np.random.default_rng(seed)
    count = len(network.peers)
    by_site = np.argsort(network.sites[:count], kind="stable")
    across = by_site.reshape(-1, num_groups).T if count % num_groups == 0 else by_site[None]
    shuffled = [numbers.permutation(count) for _ in range(POPULATION - 2)]
    return [_groups(order, num_groups) for order in (by_site, across.ravel(), *shuffled)]


def _groups(order: np.ndarray, num_groups: int) -> Partition:
    return tuple(tuple(sorted(int(peer) for peer in part)) for part in np.split(order, num_groups))


def _evolve(costs: _Costs, population: list[Partition], seed: int) -> Partition:
    numbers = np.random.default_rng(seed + 1)
    scores = [costs.total(partition) for partition in population]
    for _ in range(OFFSPRING):
        one, other = (int(index) for index in numbers.choice(len(population), 2, replace=False))
        child = _improved(costs, _crossed(population[one], population[other], numbers), numbers)
        score = costs.total(child)
        worse = one if scores[one] >= scores[other] else other
        if score <= scores[worse]:
            population[worse], scores[worse] = child, score
    return population[int(np.argmin(scores))]


def _crossed(one: Partition, other: Partition, numbers: np.random.Generator) -> Partition:
    """`other` with some peers in the groups where `one` has them, in exchange for peers from there."""
    label = {peer: index for index, group in enumerate(other) for peer in group}
    wanted = {peer: index for index, group in enumerate(one) for peer in group}
    for peer in numbers.choice(len(label), TAKEN, replace=False).tolist():
        home, target = label[peer], wanted[peer]
        guest = int(numbers.choice([guest for guest, group in label.items() if group == target]))
        label[guest], label[peer] = home, target
    return tuple(tuple(sorted(peer for peer, group in label.items() if group == index)) for index in range(len(one)))


def _improved(costs: _Costs, partition: Partition, numbers: np.random.Generator) -> Partition:
    """Exchanges of two random peers of two groups that lower the cost."""
    best, score = partition, costs.total(partition)
    for _ in range(EXCHANGES if len(partition) > 1 else 0):
        one, other = (int(index) for index in numbers.choice(len(best), 2, replace=False))
        here, there = int(numbers.choice(best[one])), int(numbers.choice(best[other]))
        changed = list(best)
        changed[one] = tuple(sorted({*best[one], there} - {here}))
        changed[other] = tuple(sorted({*best[other], here} - {there}))
        if (after := costs.total(tuple(changed))) < score:
            best, score = tuple(changed), after
    return best


def _matched(costs: _Costs, groups: Sequence[Group]) -> list[Group]:
    """Members in such an order that equal places in neighbouring groups are matched: a micro-batch stays on its chain."""
    ordered = [groups[0]]
    for group in groups[1:]:
        rows, columns = bottleneck_matching(costs.pipeline_s[np.ix_(ordered[-1], group)])
        ordered.append(tuple(group[column] for column in columns[np.argsort(rows)]))
    return ordered


def _cheap_equal_cuts(chain: Chain, num_stages: int) -> tuple[int, ...]:
    """Cuts at equal shares of the FLOPs, each moved to the cheapest position within a quarter of a share."""
    before = chain.work()
    share = before[-1] / num_stages
    cuts = [0]
    for index in range(1, num_stages):
        off = np.abs(before - share * index)
        later = np.arange(cuts[-1] + 1, len(before) - (num_stages - index))
        near = later[off[later] <= WINDOW * share]
        allowed = near if len(near) else later[[np.argmin(off[later])]]
        cuts.append(int(min(allowed, key=lambda position: (chain.crossing[position], off[position]))))
    return (*cuts, chain.num_blocks)
