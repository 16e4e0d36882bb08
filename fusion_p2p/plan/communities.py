"""Who is near whom: communities of peers by bandwidth, and a path through them (Louvain, Blondel et al. 2008; OP-Fence step 1).

A link counts as fast as its slower direction. A community that still mixes links more than `SPREAD` times apart is split again.
Above `DENSE` peers only the fastest links of each are looked at, which finds the same communities at a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.plan.network import Floats, Network

if TYPE_CHECKING:
    import networkx as nx

SPREAD = 10.0
DENSE = 100
NEIGHBOURS = 16
EXACT = 8
"""Up to so many communities every path is tried."""
STARTS = 8
"""Above, a greedy path from so many of them, each improved in at most `SWEEPS` sweeps."""
SWEEPS = 20

Communities = tuple[tuple[int, ...], ...]


def paces(network: Network) -> Floats:
    """(P, P) seconds per byte from peer to peer over an otherwise idle network, sites' own limits respected."""
    count = len(network.peers)
    sites = network.sites[:count]
    beta = network.beta_s[:count, :count]
    limit = np.maximum(network.uplink_s[sites][:, None], network.downlink_s[sites][None, :])
    return np.where(sites[:, None] == sites[None, :], beta, np.maximum(beta, limit))


def bandwidth(network: Network) -> Floats:
    """(P, P) bytes per second between peers, the slower direction of each pair; 0 to itself."""
    pace = paces(network)
    fast = 1.0 / np.maximum(np.maximum(pace, pace.T), 1e-15)
    np.fill_diagonal(fast, 0.0)
    return fast


def communities(network: Network, seed: int = 0) -> Communities:
    """Groups of peers with fast links among each other; members ascending, every peer in one group."""
    if not network.peers:
        return ()
    return tuple(_split(bandwidth(network), tuple(range(len(network.peers))), seed))


def path_through(fast: Floats, groups: Communities) -> tuple[int, ...]:
    """The order of the groups whose slowest hop is fastest, and among those the least sum of 1 / bandwidth.

    fast: (P, P), from `bandwidth`. Exact up to `EXACT` groups, beyond them greedy with 2-opt.
    """
    count = len(groups)
    if count == 1:
        return (0,)
    hops = between(fast, groups, np.maximum)
    np.fill_diagonal(hops, 0.0)
    slow = 1.0 / np.maximum(hops, 1e-15)
    if count <= EXACT:
        return min((path for path in permutations(range(count)) if path[0] < path[-1]), key=lambda path: _cost(slow, path))
    starts = [_improved(slow, _greedy(hops, start)) for start in range(min(count, STARTS))]
    return min(starts, key=lambda path: _cost(slow, path))


def between(matrix: Floats, groups: Sequence[Sequence[int] | NDArray[np.int64]], best: np.ufunc) -> Floats:
    """(groups, groups) the best entry of (P, P) between the members of each two groups, `best` np.maximum or np.minimum."""
    order = np.concatenate([np.asarray(group, dtype=np.int64) for group in groups])
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    rows = best.reduceat(matrix[np.ix_(order, order)], starts, axis=0)
    found: Floats = best.reduceat(rows, starts, axis=1)
    return found


def order_along(fast: Floats, groups: Communities, speeds: Floats) -> tuple[tuple[int, ...], ...]:
    """The groups in the order given, each with its members ordered: fastest first, but the ends of a hop are its best link.

    speeds: (P,), the higher the faster.
    """
    ordered: list[tuple[int, ...]] = []
    for index, group in enumerate(groups):
        members = sorted(group, key=lambda peer: (-speeds[peer], peer))
        following = groups[index + 1] if index + 1 < len(groups) else None
        if following is not None:
            leaving = max(members, key=lambda peer: fast[peer, list(following)].max())
            members.remove(leaving)
            members.append(leaving)
        if ordered and len(members) > 1:
            previous = ordered[-1][-1]
            entering = max(members[:-1] if following is not None else members, key=lambda peer: fast[previous, peer])
            members.remove(entering)
            members.insert(0, entering)
        ordered.append(tuple(members))
    return tuple(ordered)


def _split(fast: Floats, nodes: tuple[int, ...], seed: int) -> Iterator[tuple[int, ...]]:
    within = fast[np.ix_(nodes, nodes)]
    links = within[np.triu_indices(len(nodes), 1)]
    if len(nodes) <= 2 or links.max() / max(links.min(), 1e-15) < SPREAD:
        yield nodes
        return
    import networkx as nx  # half a second to load, which a plan among alike links does not need

    found = nx.community.louvain_communities(_graph(within), weight="weight", seed=seed)
    if len(found) == 1:
        yield nodes
        return
    for group in found:
        yield from _split(fast, tuple(nodes[index] for index in sorted(group)), seed)


def _graph(fast: Floats) -> nx.Graph:
    import networkx as nx

    graph = nx.Graph()
    count = len(fast)
    graph.add_nodes_from(range(count))
    for one in range(count):
        others: Sequence[int] = range(one)
        if count > DENSE:
            others = [int(other) for other in np.argsort(-fast[one], kind="stable")[:NEIGHBOURS] if other != one]
        for other in others:
            if fast[one, other] > 0:
                graph.add_edge(one, other, weight=float(fast[one, other]))
    return graph


def _cost(slow: Floats, path: Sequence[int]) -> tuple[float, float]:
    hops = [float(slow[a, b]) for a, b in pairwise(path)]
    return max(hops), sum(hops)


def _greedy(hops: Floats, start: int) -> list[int]:
    path, left = [start], set(range(len(hops))) - {start}
    while left:
        following = max(left, key=lambda group: (hops[path[-1], group], -group))
        path.append(following)
        left.discard(following)
    return path


def _improved(slow: Floats, path: list[int]) -> tuple[int, ...]:
    """2-opt, on squares: they weigh the slowest hops most and still count the others."""
    weight = slow**2
    order = np.array(path, dtype=np.int64)
    for _ in range(SWEEPS):
        before = order.copy()
        for first in range(len(order) - 1):
            changes = _changes(weight, order, first)
            best = int(np.argmin(changes))
            if changes[best] < -1e-15 * weight.min():
                last = first + 1 + best
                order[first : last + 1] = order[first : last + 1][::-1]
        if np.array_equal(before, order):
            break
    return tuple(order.tolist())


def _changes(weight: Floats, order: NDArray[np.int64], first: int) -> Floats:
    """What reversing the part from `first` to each later place adds to the sum of weights."""
    ends, after = order[first + 1 :], order[first + 2 :]
    changes = np.zeros(len(ends))
    if first > 0:
        changes += weight[order[first - 1], ends] - weight[order[first - 1], order[first]]
    changes[:-1] += weight[order[first], after] - weight[ends[:-1], after]
    return changes
