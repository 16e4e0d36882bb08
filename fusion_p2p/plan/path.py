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

import numpy as np

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Stage
from fusion_p2p.plan.memory import CREDITS
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.path_kernel import INFINITE, Blocks, Groups, Ints, Limits, Links, least_fill
from fusion_p2p.plan.path_tables import Nodes, group_tables, link_tables
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.times import work

REACH = 32
"""At most so many places lie between two stages that follow each other."""
REPLICAS = (1, 2, 4, 8, 16)
LEAST_TOLERANCE = 1e-9


@dataclass(frozen=True, eq=False, slots=True)
class PathProblem:
    """What does not depend on the order of peers. `sizes` are the group sizes allowed; `use_all`: no peer may stay idle."""

    chain: Chain
    blocks: Blocks
    nodes: Nodes
    sizes: Ints
    limits: Limits


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
    feeds = chain.feed_bytes if len(chain.feed_bytes) else np.zeros(width)
    blocks = Blocks(
        work=seconds,
        rest_s=(seconds[:, -1:] - seconds).min(axis=0),
        forward_bytes=chain.crossing / ratio,
        backward_bytes=chain.crossing_back / ratio,
        kept_bytes=_floats(chain.crossing),
        returned_bytes=_floats(chain.crossing_back),
        state_bytes=(2 + terms.moments) * chain.parameter_bytes + 2.0 * chain.buffer_bytes,
        saved_bytes=_floats(chain.saved_bytes),
        parameter_bytes=_floats(chain.parameter_bytes),
        feed_bytes=_floats(feeds),
        in_flight=_floats(np.broadcast_to(in_flight, (width,))),
    )
    free = network.free_bytes if terms.respect_memory else np.full(num_peers, INFINITE)
    limits = Limits(
        bottleneck_s=INFINITE,
        fill_s=INFINITE,
        micro_batches=float(terms.micro_batches),
        credits=float(CREDITS),
        recompute=bool(terms.recompute),
        full_duplex=bool(network.full_duplex),
        use_all=use_all,
    )
    nodes = Nodes.of(network, _floats(seconds[:, -1]), _floats(free), terms.micro_batches)
    return PathProblem(chain, blocks, nodes, np.array(sizes, dtype=np.int64), limits)


def holding(problem: PathProblem, in_flight: float | Floats) -> PathProblem:
    """The same problem with another assumption about micro-batches in flight."""
    held = _floats(np.broadcast_to(in_flight, problem.blocks.in_flight.shape))
    return replace(problem, blocks=problem.blocks._replace(in_flight=held))


def best_path(problem: PathProblem, order: Sequence[int], *, tolerance: float = 0.004, below: float = math.inf) -> Path | None:
    """The pipeline of least estimate over peers in this order; None when none fits memory and takes less than `below` seconds.

    tolerance: the estimate is at most this much above the least there is, relatively.
    """
    search = _Search.of(problem, order, max(tolerance, LEAST_TOLERANCE), below)
    return search.best() if len(order) else None


@dataclass(frozen=True, eq=False, slots=True)
class _Search:
    """The arguments of one call of `best_path`, with the tables of its order."""

    problem: PathProblem
    order: Ints
    groups: Groups
    links: Links
    tolerance: float
    below: float

    @classmethod
    def of(cls, problem: PathProblem, order: Sequence[int], tolerance: float, below: float) -> _Search:
        peers = np.array(order, dtype=np.int64)
        groups = group_tables(peers, problem.sizes, problem.nodes)
        links = link_tables(peers, problem.sizes, problem.nodes, 1 if problem.limits.use_all else REACH)
        return cls(problem, peers, groups, links, tolerance, below)

    def best(self) -> Path | None:
        """Branch and bound over T. An interval of T is known by the least fill at its upper end."""
        more = self.problem.limits.micro_batches - 1
        best = self.run(self.below / more if more else INFINITE, self.below)
        if best is None:
            return None
        low = 1.0 / float((1.0 / self.problem.nodes.total_s[self.order]).sum())
        intervals = [(best.fill_s + more * low, low, best.bottleneck_s, best.fill_s)]
        while intervals:
            bound, low, high, fill = heappop(intervals)
            limit = min(best.step_s, self.below) / (1 + self.tolerance)
            if bound >= limit:
                break
            middle = math.sqrt(low * high)
            heappush(intervals, (fill + more * middle, middle, high, fill))
            found = self.run(middle, limit - more * low)
            if found is not None:
                best = min(best, found, key=lambda path: path.step_s)
                heappush(intervals, (found.fill_s + more * low, low, found.bottleneck_s, found.fill_s))
        return best if best.step_s < self.below else None

    def run(self, bottleneck_s: float, fill_s: float) -> Path | None:
        """The pipeline of least fill among those no slower than both limits."""
        limits = self.problem.limits._replace(bottleneck_s=min(bottleneck_s, INFINITE), fill_s=min(fill_s, INFINITE))
        fill, at, cuts, sources = least_fill(self.problem.blocks, self.groups, self.links, limits)
        return None if at < 0 else self._path(float(fill), int(at), cuts, sources)

    def _path(self, fill: float, row: int, cuts: Ints, sources: Ints) -> Path:
        """Follow the back pointers from the last stage to the first."""
        stages: list[Stage] = []
        bottleneck = 0.0
        last, after = self.problem.chain.num_blocks, -1
        while last > 0:
            place, which = divmod(row, len(self.problem.sizes))
            first = int(cuts[row, last])
            begins = place - int(self.problem.sizes[which]) + 1
            stages.append(Stage(first, last, tuple(int(peer) for peer in self.order[begins : place + 1])))
            bottleneck = max(bottleneck, self._stage_s(place, which, first, last), self._link_s(row, after, last))
            after, row, last = row, int(sources[row, first]), first
        more = self.problem.limits.micro_batches - 1
        return Path(tuple(reversed(stages)), fill, bottleneck, fill + more * bottleneck)

    def _stage_s(self, place: int, which: int, first: int, last: int) -> float:
        """Seconds per micro-batch that a stage is busy."""
        blocks, groups = self.problem.blocks, self.groups
        work_s = blocks.work[groups.slowest[place, which]]
        sync_s = groups.sync_s[place, which]
        sync_s += groups.sync_s_per_byte[place, which] * (blocks.parameter_bytes[last] - blocks.parameter_bytes[first])
        fed = (blocks.feed_bytes[last] - blocks.feed_bytes[first]) * groups.feed_s_per_byte[place, which]
        busy = (work_s[last] - work_s[first]) * groups.share[place, which] + sync_s / self.problem.limits.micro_batches
        return max(float(busy), float(fed / self.problem.sizes[which]))

    def _link_s(self, row: int, after: int, position: int) -> float:
        """Seconds per micro-batch that the link behind a stage is busy; `after` is the row of the next stage, or -1."""
        if after < 0:
            return 0.0
        (place, which), (next_place, next_which) = (divmod(index, len(self.problem.sizes)) for index in (row, after))
        distance = next_place - int(self.problem.sizes[next_which]) - place
        at = next_place, next_which, distance, which
        out = self.problem.blocks.forward_bytes[position] * self.links.forward_hold_s[at]
        back = self.problem.blocks.backward_bytes[position] * self.links.backward_hold_s[at]
        return float(max(out, back) if self.problem.limits.full_duplex else out + back)


def _floats(values: Floats) -> Floats:
    """A writable copy in order: the kernel is compiled anew for every other kind of array."""
    return np.array(values, dtype=np.float64, order="C")
