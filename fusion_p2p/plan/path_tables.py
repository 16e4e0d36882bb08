"""What the path planner's kernel reads about an order of peers: groups that may hold a stage, and the links between them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Self

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.path_kernel import Groups, Ints, Links


class Nodes(NamedTuple):
    """A network as the tables need it.

    total_s: (P,) seconds of the whole chain. sites: (n,), alpha_s, beta_s: (n, n) as in `Network`. shared_s: (n, n) seconds per
    byte that all links between two sites share, 0 if nothing. owner: its node, or None.
    """

    total_s: Floats
    free_bytes: Floats
    sites: Ints
    alpha_s: Floats
    beta_s: Floats
    shared_s: Floats
    owner: int | None
    micro_batches: int

    @classmethod
    def of(cls, network: Network, total_s: Floats, free_bytes: Floats, micro_batches: int) -> Self:
        sites = network.sites
        shared = np.maximum(network.uplink_s[sites][:, None], network.downlink_s[sites][None, :])
        shared = np.where(sites[:, None] == sites[None, :], 0.0, shared)
        return cls(total_s, free_bytes, sites, network.alpha_s, network.beta_s, shared, network.owner, micro_batches)


def group_tables(order: Ints, sizes: Ints, nodes: Nodes) -> Groups:
    """For every place where a group of consecutive peers of one site may end, and every size, what the group costs."""
    shape = len(order), len(sizes)
    groups = Groups(
        sizes=sizes,
        allowed=np.zeros(shape, dtype=np.bool_),
        slowest=np.zeros(shape, dtype=np.int64),
        share=np.ones(shape),
        sync_s=np.zeros(shape),
        sync_s_per_byte=np.zeros(shape),
        free_bytes=np.zeros(shape),
        feed_alpha_s=np.zeros(shape),
        feed_s_per_byte=np.zeros(shape),
    )
    for which, size in enumerate(sizes.tolist()):
        if size <= min(len(order), nodes.micro_batches):
            _fill_groups(groups, which, order[:, None] if size == 1 else sliding_window_view(order, size), nodes)
    return groups


def link_tables(order: Ints, sizes: Ints, nodes: Nodes, reach: int) -> Links:
    """The worst link between every two groups that may follow each other with at most `reach - 1` peers between them."""
    shape = len(order), len(sizes), reach, len(sizes)
    links = Links(*(np.zeros(shape) for _ in Links._fields))
    pairs = np.ix_(order, order)
    alpha = _Worst(nodes.alpha_s[pairs] + nodes.alpha_s.T[pairs])
    forward, backward = _Worst(nodes.beta_s[pairs]), _Worst(nodes.beta_s.T[pairs])
    shared = nodes.shared_s[pairs]
    for which, size in enumerate(sizes.tolist()):
        for other, before in enumerate(sizes.tolist()):
            place, distance, begins, sources = _pairs(len(order), size, before, reach)
            at = place, which, distance, other
            links.alpha_s[at] = alpha.of(before, size)[sources, begins]
            beside = min(size, before)
            for worst, common, seconds, hold in (
                (forward, shared, links.forward_s, links.forward_hold_s),
                (backward, shared.T, links.backward_s, links.backward_hold_s),
            ):
                per_byte, limit = worst.of(before, size)[sources, begins], common[sources, begins]
                seconds[at] = np.maximum(per_byte, limit)
                hold[at] = np.maximum(per_byte / beside, limit)
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


def _fill_groups(groups: Groups, which: int, windows: Ints, nodes: Nodes) -> None:
    """Columns `which` of all tables; `windows` are (places, size) peers."""
    size = windows.shape[1]
    rows = np.flatnonzero((nodes.sites[windows] == nodes.sites[windows[:, :1]]).all(axis=1))
    members, places = windows[rows], rows + size - 1
    seconds = nodes.total_s[members]
    slow = seconds.argmax(axis=1)
    groups.allowed[places, which] = True
    groups.slowest[places, which] = np.take_along_axis(members, slow[:, None], axis=1)[:, 0]
    groups.free_bytes[places, which] = nodes.free_bytes[members].min(axis=1)
    if size > 1:
        groups.share[places, which] = _makespan(seconds, nodes.micro_batches) / nodes.micro_batches / seconds.max(axis=1)
        after = np.roll(members, -1, axis=1)
        groups.sync_s[places, which] = 2 * (size - 1) * nodes.alpha_s[members, after].max(axis=1)
        groups.sync_s_per_byte[places, which] = 2 * (size - 1) / size * nodes.beta_s[members, after].max(axis=1)
    if nodes.owner is not None:
        per_byte = np.maximum(nodes.beta_s[nodes.owner, members], nodes.shared_s[nodes.owner, members])
        groups.feed_s_per_byte[places, which] = per_byte.max(axis=1)
        groups.feed_alpha_s[places, which] = nodes.alpha_s[nodes.owner, members].max(axis=1)


def _makespan(seconds: Floats, jobs: int) -> Floats:
    """(rows,) time for equal jobs on machines that need `seconds`, (rows, machines), each where it would end first."""
    ends = np.zeros_like(seconds)
    rows = np.arange(len(seconds))
    for _ in range(jobs):
        machine = (ends + seconds).argmin(axis=1)
        ends[rows, machine] += seconds[rows, machine]
    return np.asarray(ends.max(axis=1, initial=0.0))


class _Worst:
    """Of a matrix, the greatest entry of every block of so many rows and columns, by doubling: sizes are powers of two."""

    def __init__(self, matrix: Floats) -> None:
        self._known = {(1, 1): matrix}

    def of(self, rows: int, columns: int) -> Floats:
        """Entry [x, y] is the greatest of rows x to x + rows - 1 and columns y to y + columns - 1."""
        if (rows, columns) not in self._known:
            axis = 0 if rows > 1 else 1
            half = self.of(rows // 2, columns) if axis == 0 else self.of(rows, columns // 2)
            step = (rows if axis == 0 else columns) // 2
            length = half.shape[axis] - step
            first, second = np.take(half, np.arange(length), axis), np.take(half, np.arange(length) + step, axis)
            self._known[rows, columns] = np.maximum(first, second)
        return self._known[rows, columns]
