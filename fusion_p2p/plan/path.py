"""The best pipeline for peers in a given order: which to use, which as replicas of one stage, and where to cut the chain.

An estimate of the step is least (section "cost model" of ARCHITECTURE):

    J = sum of stage seconds + sum of both messages over every link + (micro-batches - 1) * T
    T = the most that any stage or link is busy per micro-batch (latency occupies nothing)

For a limit on T the kernel finds the least of the two sums; J is then least over T by branch and bound: the sums do not grow
with T, so between two limits J is at least the sums at the upper one plus (micro-batches - 1) times the lower one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fusion_p2p.plan import path_kernel as kernel
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Stage
from fusion_p2p.plan.memory import CREDITS
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.path_kernel import INFINITE, Ints
from fusion_p2p.plan.path_tables import Nodes, group_tables, link_tables
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.times import work

REACH = 32
"""At most so many places lie between two stages that follow each other."""
REPLICAS = (1, 2, 4, 8, 16)
LEAST_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class PathProblem:
    """What does not depend on the order of peers.

    work, blocks, limits: as the kernel takes them. sizes: the group sizes allowed.
    """

    chain: Chain
    work: Floats
    blocks: Floats
    nodes: Nodes
    sizes: Ints
    limits: Floats

    @property
    def rest_s(self) -> Floats:
        """(N + 1,) the least seconds for all blocks after a position."""
        rest: Floats = self.blocks[kernel.REST_S]
        return rest

    @property
    def more(self) -> float:
        """Micro-batches that follow the first."""
        return float(self.limits[kernel.MICRO_BATCHES]) - 1


@dataclass(frozen=True, slots=True)
class Path:
    """A pipeline: its stages, the sums and the bottleneck in seconds, and the estimate of a step."""

    stages: tuple[Stage, ...]
    fill_s: float
    bottleneck_s: float
    step_s: float


def prepare(
    chain: Chain,
    network: Network,
    terms: Terms,
    *,
    ratio: float = 1.0,
    sizes: Sequence[int] = (1,),
    in_flight: float | Floats = 1.0,
    use_all: bool = False,
) -> PathProblem:
    """The problem for a chain and a network.

    ratio: what every cut's bytes are assumed to be divided by. in_flight: micro-batches that a stage is assumed to hold in
    memory, for all stages or (N + 1,) for a stage that begins at each position.
    """
    seconds = _floats(work(chain, network, terms.recompute))
    num_peers, width = seconds.shape
    blocks = np.zeros((10, width))
    blocks[kernel.REST_S] = (seconds[:, -1:] - seconds).min(axis=0)
    blocks[kernel.FORWARD_BYTES] = chain.crossing / ratio
    blocks[kernel.BACKWARD_BYTES] = chain.crossing_back / ratio
    blocks[kernel.KEPT_BYTES] = chain.crossing
    blocks[kernel.RETURNED_BYTES] = chain.crossing_back
    blocks[kernel.STATE_BYTES] = (2 + terms.moments) * chain.parameter_bytes + 2.0 * chain.buffer_bytes
    blocks[kernel.SAVED_BYTES] = chain.saved_bytes
    blocks[kernel.PARAMETER_BYTES] = chain.parameter_bytes
    blocks[kernel.FEED_BYTES] = chain.feed_bytes if len(chain.feed_bytes) else 0.0
    blocks[kernel.IN_FLIGHT] = in_flight
    limits = np.zeros(7)
    limits[kernel.MICRO_BATCHES] = terms.micro_batches
    limits[kernel.CREDITS] = CREDITS
    limits[kernel.RECOMPUTE] = terms.recompute
    limits[kernel.FULL_DUPLEX] = network.full_duplex
    limits[kernel.USE_ALL] = use_all
    free = network.free_bytes if terms.respect_memory else np.full(num_peers, INFINITE)
    nodes = Nodes.of(network, _floats(seconds[:, -1]), _floats(free), terms.micro_batches)
    return PathProblem(chain, seconds, blocks, nodes, np.array(sizes, dtype=np.int64), limits)


def holding(problem: PathProblem, in_flight: float | Floats) -> PathProblem:
    """The same problem with another assumption about micro-batches in flight."""
    blocks = problem.blocks.copy()
    blocks[kernel.IN_FLIGHT] = in_flight
    return replace(problem, blocks=blocks)


def best_path(
    problem: PathProblem,
    order: Sequence[int],
    *,
    tolerance: float = 0.004,
    below: float = math.inf,
    most_runs: int | None = None,
) -> Path | None:
    """The pipeline of least estimate over peers in this order; None when none fits memory and takes less than `below` seconds.

    tolerance: the estimate is at most this much above the least there is, relatively; or more, where that takes more than
    `most_runs` runs of the kernel.
    """
    search = _Search.of(problem, order, max(tolerance, LEAST_TOLERANCE), below)
    return search.best(most_runs) if len(order) else None


class _Found(NamedTuple):
    """A pipeline by the rows of its groups, and the positions where each begins and after the last, in order."""

    step_s: float
    fill_s: float
    bottleneck_s: float
    rows: Ints
    borders: Ints


@dataclass(frozen=True, eq=False, slots=True)
class _Search:
    """The arguments of one call of `best_path`, with the tables of its order."""

    problem: PathProblem
    order: Ints
    slowest: Ints
    groups: Floats
    links: Floats
    tolerance: float
    below: float

    @classmethod
    def of(cls, problem: PathProblem, order: Sequence[int], tolerance: float, below: float) -> _Search:
        peers = np.array(order, dtype=np.int64)
        slowest, groups = group_tables(peers, problem.sizes, problem.nodes)
        links = link_tables(peers, problem.sizes, problem.nodes, 1 if problem.limits[kernel.USE_ALL] else REACH)
        return cls(problem, peers, slowest, groups, links, tolerance, below)

    def best(self, most_runs: int | None = None) -> Path | None:
        """Branch and bound over T. An interval of T is known by the least fill at its upper end."""
        more = self.problem.more
        best = self.run(self.below / more if more else INFINITE, self.below)
        if best is None:
            return None
        low = 1.0 / float((1.0 / self.problem.nodes.total_s[self.order]).sum())
        intervals = [(best.fill_s + more * low, low, best.bottleneck_s, best.fill_s)]
        runs = 1
        while intervals and runs != most_runs:
            runs += 1
            bound, low, high, fill = heappop(intervals)
            limit = min(best.step_s, self.below) / (1 + self.tolerance)
            if bound >= limit:
                break
            middle = math.sqrt(low * high)
            heappush(intervals, (fill + more * middle, middle, high, fill))
            found = self.run(middle, limit - more * low)
            if found is not None:
                best = min(best, found, key=lambda one: one.step_s)
                heappush(intervals, (found.fill_s + more * low, low, found.bottleneck_s, found.fill_s))
        return self._path(best) if best.step_s < self.below else None

    def run(self, bottleneck_s: float, fill_s: float) -> _Found | None:
        """The pipeline of least fill among those no slower than both limits."""
        problem = self.problem
        limits = problem.limits.copy()
        limits[kernel.BOTTLENECK_S], limits[kernel.FILL_S] = min(bottleneck_s, INFINITE), min(fill_s, INFINITE)
        reach = np.full((self.slowest.size + 1, problem.work.shape[1]), INFINITE)
        pointers = np.zeros((3, self.slowest.size, problem.work.shape[1]), dtype=np.int64)
        fill, row = kernel.least_fill(
            problem.work, self.slowest, problem.blocks, self.groups, self.links, limits, reach, pointers
        )
        return None if row < 0 else self._followed(float(fill), int(row), pointers)

    def _followed(self, fill: float, row: int, pointers: Ints) -> _Found:
        """Follow the back pointers from the last stage to the first."""
        rows, borders = [row], [self.problem.chain.num_blocks]
        while True:
            borders.append(int(pointers[kernel.CUT, rows[-1], borders[-1]]))
            if borders[-1] == 0:
                break
            rows.append(int(pointers[kernel.SOURCE, rows[-1], borders[-1]]))
        in_order = np.array(rows[::-1]), np.array(borders[::-1])
        bottleneck = max(self._stages_s(*in_order), self._links_s(*in_order))
        return _Found(fill + self.problem.more * bottleneck, fill, bottleneck, *in_order)

    def _path(self, found: _Found) -> Path:
        places, which = np.divmod(found.rows, len(self.problem.sizes))
        ends = (places + 1).tolist()
        begins = (places + 1 - self.problem.sizes[which]).tolist()
        peers = [tuple(self.order[begin:end].tolist()) for begin, end in zip(begins, ends, strict=True)]
        stages = tuple(Stage(*both, group) for both, group in zip(pairwise(found.borders.tolist()), peers, strict=True))
        return Path(stages, found.fill_s, found.bottleneck_s, found.step_s)

    def _stages_s(self, rows: Ints, borders: Ints) -> float:
        """The most seconds per micro-batch that a stage is busy."""
        blocks, groups = self.problem.blocks, self.groups.reshape(-1, self.groups.shape[2])[rows]
        work_s = self.problem.work[self.slowest.ravel()[rows]]
        every = np.arange(len(rows))
        seconds = work_s[every, borders[1:]] - work_s[every, borders[:-1]]
        parameters, fed = (np.diff(blocks[name, borders]) for name in (kernel.PARAMETER_BYTES, kernel.FEED_BYTES))
        sync_s = groups[:, kernel.SYNC_S] + groups[:, kernel.SYNC_S_PER_BYTE] * parameters
        busy = seconds * groups[:, kernel.SHARE] + sync_s / self.problem.limits[kernel.MICRO_BATCHES]
        feeds = fed * groups[:, kernel.FEED_S_PER_BYTE] / groups[:, kernel.SIZE]
        return float(max(busy.max(), feeds.max()))

    def _links_s(self, rows: Ints, borders: Ints) -> float:
        """The most seconds per micro-batch that a link is busy."""
        places, which = np.divmod(rows, len(self.problem.sizes))
        distances = np.diff(places) - self.problem.sizes[which[1:]]
        links = self.links[places[1:], which[1:], distances, which[:-1]]
        inner = borders[1:-1]
        out = self.problem.blocks[kernel.FORWARD_BYTES, inner] * links[:, kernel.FORWARD_HOLD_S]
        back = self.problem.blocks[kernel.BACKWARD_BYTES, inner] * links[:, kernel.BACKWARD_HOLD_S]
        held = np.maximum(out, back) if self.problem.limits[kernel.FULL_DUPLEX] else out + back
        return float(held.max(initial=0.0))


def _floats(values: Floats) -> Floats:
    """A writable copy in order: the kernel is compiled anew for every other kind of array."""
    return np.array(values, dtype=np.float64, order="C")
