"""What the path planner's kernel reads about an order of peers: groups that may hold a stage, and the links between them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fusion_p2p.plan import path_kernel as kernel
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.path_kernel import Ints


class Nodes(NamedTuple):
    """A network as the tables need it.

    total_s: (P,) seconds of the whole chain. sites: (n,), alpha_s, beta_s: (n, n) as in `Network`. shared_s: (n, n) seconds per
    byte that all links between two sites share, 0 if nothing. pairs: (n, n, 5) alpha in both directions together, beta there
    and back, shared there and back. owner: its node, or None.
    """

    total_s: Floats
    free_bytes: Floats
    sites: Ints
    alpha_s: Floats
    beta_s: Floats
    shared_s: Floats
    pairs: Floats
    owner: int | None
    micro_batches: int

    @classmethod
    def of(cls, network: Network, total_s: Floats, free_bytes: Floats, micro_batches: int) -> Self:
        sites, alpha, beta = network.sites, network.alpha_s, network.beta_s
        shared = np.maximum(network.uplink_s[sites][:, None], network.downlink_s[sites][None, :])
        shared = np.where(sites[:, None] == sites[None, :], 0.0, shared)
        pairs = np.stack([alpha + alpha.T, beta, beta.T, shared, shared.T], axis=2)
        return cls(total_s, free_bytes, sites, alpha, beta, shared, pairs, network.owner, micro_batches)


def group_tables(order: Ints, sizes: Ints, nodes: Nodes) -> tuple[Ints, Floats]:
    """`slowest` and `groups` of the kernel: groups are consecutive peers of one site."""
    slowest = np.full((len(order), len(sizes)), -1, dtype=np.int64)
    groups = np.zeros((len(order), len(sizes), 7))
    groups[:, :, kernel.SIZE] = sizes
    groups[:, :, kernel.SHARE] = 1.0
    for which, size in enumerate(sizes.tolist()):
        if size <= min(len(order), nodes.micro_batches):
            _fill_groups(slowest, groups, which, order[:, None] if size == 1 else sliding_window_view(order, size), nodes)
    return slowest, groups


def link_tables(order: Ints, sizes: Ints, nodes: Nodes, reach: int) -> Floats:
    """`links` of the kernel: of every two groups that may follow each other with at most `reach - 1` peers between them."""
    links = np.zeros((len(order), len(sizes), reach, len(sizes), 5))
    worst = _Worst(nodes.pairs[np.ix_(order, order)] if len(sizes) > 1 else nodes.pairs)
    for which, size in enumerate(sizes.tolist()):
        for other, before in enumerate(sizes.tolist()):
            place, distance, begins, sources = _pairs(len(order), size, before, reach)
            if not len(place):
                continue
            if size == before == 1:
                pairs = nodes.pairs[order[sources], order[begins]]
            else:
                pairs = worst.of(before, size)[sources, begins]
            own, shared = pairs[:, 1:3], pairs[:, 3:5]
            figures = [pairs[:, :1], np.maximum(own, shared), np.maximum(own / min(size, before), shared)]
            links[place, which, distance, other] = np.concatenate(figures, axis=1)
    return links


@lru_cache(maxsize=64)
def _pairs(count: int, size: int, before: int, reach: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Every group of `size` with every group of `before` that may precede it: where the first ends, how many places lie between
    them, and where both begin.
    """
    place, distance = np.meshgrid(np.arange(count), np.arange(reach), indexing="ij")
    begins = place - size + 1
    sources = begins - distance - before
    possible = sources >= 0
    return place[possible], distance[possible], begins[possible], sources[possible]


def _fill_groups(slowest: Ints, groups: Floats, which: int, windows: Ints, nodes: Nodes) -> None:
    """Column `which` of both tables; `windows` are (places, size) peers."""
    size = windows.shape[1]
    rows = np.flatnonzero((nodes.sites[windows] == nodes.sites[windows[:, :1]]).all(axis=1))
    members, places = windows[rows], rows + size - 1
    seconds = nodes.total_s[members]
    slowest[places, which] = np.take_along_axis(members, seconds.argmax(axis=1)[:, None], axis=1)[:, 0]
    groups[places, which, kernel.FREE_BYTES] = nodes.free_bytes[members].min(axis=1)
    if size > 1:
        shares = _makespan(seconds, nodes.micro_batches) / nodes.micro_batches / seconds.max(axis=1)
        after = np.roll(members, -1, axis=1)
        groups[places, which, kernel.SHARE] = shares
        groups[places, which, kernel.SYNC_S] = 2 * (size - 1) * nodes.alpha_s[members, after].max(axis=1)
        per_byte = 2 * (size - 1) / size * nodes.beta_s[members, after].max(axis=1)
        groups[places, which, kernel.SYNC_S_PER_BYTE] = per_byte
    if nodes.owner is not None:
        per_byte = np.maximum(nodes.beta_s[nodes.owner, members], nodes.shared_s[nodes.owner, members])
        groups[places, which, kernel.FEED_S_PER_BYTE] = per_byte.max(axis=1)
        groups[places, which, kernel.FEED_ALPHA_S] = nodes.alpha_s[nodes.owner, members].max(axis=1)


def _makespan(seconds: Floats, jobs: int) -> Floats:
    """(rows,) time for equal jobs on machines that need `seconds`, (rows, machines), each where it would end first."""
    ends = np.zeros_like(seconds)
    rows = np.arange(len(seconds))
    for _ in range(jobs):
        machine = (ends + seconds).argmin(axis=1)
        ends[rows, machine] += seconds[rows, machine]
    return np.asarray(ends.max(axis=1, initial=0.0))


class _Worst:
    """Of matrices, (n, n, K), the greatest entries of every block of so many rows and columns, by doubling: sizes are powers of
    two.
    """

    def __init__(self, matrices: Floats) -> None:
        self._known = {(1, 1): matrices}

    def of(self, rows: int, columns: int) -> Floats:
        """Entry [x, y] is the greatest of rows x to x + rows - 1 and columns y to y + columns - 1."""
        if (rows, columns) not in self._known:
            if rows > 1:
                half, step = self.of(rows // 2, columns), rows // 2
                self._known[rows, columns] = np.maximum(half[: len(half) - step], half[step:])
            else:
                half, step = self.of(rows, columns // 2), columns // 2
                self._known[rows, columns] = np.maximum(half[:, : half.shape[1] - step], half[:, step:])
        return self._known[rows, columns]
