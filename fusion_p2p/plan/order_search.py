"""In which order peers should form a pipeline: permutations of communities, then simulated annealing over single peers.

Every order is judged by the path planner, which decides for itself whom of it to use. The search counts steps and not seconds,
so that the same seed finds the same order on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np

from fusion_p2p.plan.communities import Communities, bandwidth, path_through
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.path import Path, PathProblem, best_path
from fusion_p2p.plan.path_kernel import FORWARD_BYTES, Ints

Order = tuple[int, ...]
Numbers = np.random.Generator
PERMUTED = 5
"""Up to so many communities every order of them is tried."""
ROUGH = 0.02
"""Tolerance of an estimate that only has to rank orders."""
RUNS = 5
"""Of the kernel, for each step of a random walk."""
GREEDY_STARTS = 10
FAST_WEIGHTS = (0.0, 0.3, 1.0, 3.0)
CHEAP_CUT = 0.1
"""Which of all cuts, from the cheapest, stands for those a good plan makes."""
HEAT = 0.05
"""The first temperature, as a share of the first estimate."""


def community_orders(network: Network, groups: Communities, speeds: Floats) -> tuple[Order, ...]:
    """Orders of all peers, community by community, fastest members first in every other one: all orders of few communities,
    of many only the path of fastest hops, both ways. speeds: (P,), the higher the faster.
    """
    members = [sorted(group, key=lambda peer: (-speeds[peer], peer)) for group in groups]
    if len(groups) <= PERMUTED:
        sequences = list(permutations(range(len(groups))))
    else:
        along = path_through(bandwidth(network), groups)
        sequences = [along, along[::-1]]
    return tuple(_joined([members[group] for group in sequence]) for sequence in sequences)


def greedy_orders(problem: PathProblem) -> tuple[Order, ...]:
    """Orders that go from each peer to the one that is nearest and fast, for several weights of fast; each both ways.

    Near is the time of both messages over a cheap cut; fast the time of an equal share of the chain. For networks in which no
    communities show.
    """
    nodes, cuts = problem.nodes, problem.blocks[FORWARD_BYTES, 1:-1]
    count = len(nodes.total_s)
    cheap = float(np.quantile(cuts, CHEAP_CUT)) if len(cuts) else 0.0
    pace = np.maximum(nodes.beta_s, nodes.shared_s)[:count, :count]
    near = nodes.alpha_s[:count, :count] + cheap * pace
    near = near + near.T
    starts = np.argsort(nodes.total_s, kind="stable")[:GREEDY_STARTS]
    orders = [_nearest_next(near + weight * nodes.total_s / count, int(start)) for weight in FAST_WEIGHTS for start in starts]
    return tuple(dict.fromkeys(order for along in orders for order in (along, along[::-1])))


def best_orders(problem: PathProblem, orders: Sequence[Order], count: int) -> list[tuple[Path, Order]]:
    """The `count` orders of least estimate, best first; fewer where orders have no plan."""
    found: list[tuple[Path, Order]] = []
    for order in orders:
        below = found[-1][0].step_s if len(found) == count else math.inf
        path = best_path(problem, order, tolerance=ROUGH, below=below)
        if path is not None:
            found = sorted([*found, (path, order)], key=lambda pair: pair[0].step_s)[:count]
    return found


def anneal(problem: PathProblem, start: tuple[Path, Order], steps: int, seed: int) -> tuple[Path, Order]:
    """The best order met on a random walk from `start` that at first also accepts worse ones, and its path."""
    numbers = np.random.default_rng(seed)
    current = best = start
    sites = problem.nodes.sites
    refused: dict[Order, float] = {}
    known = {start[1]: start[0]}
    for step in range(steps if len(start[1]) > 1 else 0):
        temperature = HEAT * start[0].step_s * (1 - step / steps) ** 2
        accepted = current[0].step_s - temperature * math.log(1 - numbers.random())
        order = _moved(current, sites, numbers)
        if order not in known and refused.get(order, 0.0) < accepted:
            path = best_path(problem, order, tolerance=ROUGH, below=accepted, most_runs=RUNS)
            if path is None:
                refused[order] = accepted
            else:
                known[order] = path
        if order in known and known[order].step_s < accepted:
            current = known[order], order
            best = min(best, current, key=lambda pair: pair[0].step_s)
    return best


def _nearest_next(cost: Floats, start: int) -> Order:
    """From `start` always to the peer of least cost that is left. cost: (P, P)."""
    cost = cost.copy()
    cost[:, start] = np.inf
    order = [start]
    while len(order) < len(cost):
        order.append(int(cost[order[-1]].argmin()))
        cost[:, order[-1]] = np.inf
    return tuple(order)


def _joined(members: Sequence[Sequence[int]]) -> Order:
    return tuple(peer for index, group in enumerate(members) for peer in (group[::-1] if index % 2 else group))


def _moved(current: tuple[Path, Order], sites: Ints, numbers: Numbers) -> Order:
    """A neighbour of an order. One end of what changes is a peer in use, mostly; half of the changes keep sites whole."""
    path, order = current
    first, last = _span(path, order, numbers)
    if numbers.random() < 0.5:
        first, last = _whole_sites(order, sites, first, last)
    move = MOVES[int(numbers.integers(len(MOVES)))]
    return move(order, first, last, numbers)


def _span(path: Path, order: Order, numbers: Numbers) -> tuple[int, int]:
    one, other = (int(index) for index in numbers.choice(len(order), 2, replace=False))
    if numbers.random() < 0.7:
        used = path.stages[int(numbers.integers(len(path.stages)))].peers
        one = order.index(used[int(numbers.integers(len(used)))])
    if one == other:
        other = (one + 1) % len(order)
    return min(one, other), max(one, other)


def _whole_sites(order: Order, sites: Ints, first: int, last: int) -> tuple[int, int]:
    while first > 0 and sites[order[first - 1]] == sites[order[first]]:
        first -= 1
    while last < len(order) - 1 and sites[order[last + 1]] == sites[order[last]]:
        last += 1
    return first, last


def _swap(order: Order, first: int, last: int, numbers: Numbers) -> Order:
    changed = list(order)
    changed[first], changed[last] = changed[last], changed[first]
    return tuple(changed)


def _reverse(order: Order, first: int, last: int, numbers: Numbers) -> Order:
    return order[:first] + order[first : last + 1][::-1] + order[last + 1 :]


def _insert(order: Order, first: int, last: int, numbers: Numbers) -> Order:
    if numbers.random() < 0.5:
        return (*order[:first], order[last], *order[first:last], *order[last + 1 :])
    return (*order[:first], *order[first + 1 : last + 1], order[first], *order[last + 1 :])


def _transplant(order: Order, first: int, last: int, numbers: Numbers) -> Order:
    """Move a segment, of a quarter of all peers at most, to another place."""
    last = min(last, first + max(1, len(order) // 4))
    rest = order[:first] + order[last + 1 :]
    place = int(numbers.integers(len(rest) + 1))
    return rest[:place] + order[first : last + 1] + rest[place:]


MOVES: tuple[Callable[[Order, int, int, Numbers], Order], ...] = (_swap, _reverse, _insert, _transplant)
