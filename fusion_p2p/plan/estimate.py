"""The closed formula for a step: the planner's fast proxy for the simulator.

    C_s   seconds there and back of one micro-batch on the slowest member of stage s
    R_i   seconds of one message over boundary i, the worst pair of members: alpha + bytes * beta
    T     the most that any peer or link is busy per micro-batch: members share a stage's work, and pay for the sum of their
          gradients; a boundary has as many links at once as its smaller side has members, if its sites' lines carry them
    step  sum of C_s + sum of R_i there and back + feed of the first stage + (micro-batches - 1) * T

Full duplex: the two directions of a link are busy at once, half duplex: one after the other. Latency occupies nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.pipelines import group_sum_s
from fusion_p2p.plan.times import deal, times


@dataclass(frozen=True, eq=False, slots=True)
class Formula:
    """What the formula needs of a layout, so that it can be asked for many ratios. Arrays: one entry per boundary.

    latency_s: alpha. forward_s, backward_s: wire seconds of the dense messages. links: parallel links.
    """

    stage_s: float
    stage_fill_s: float
    latency_s: Floats
    forward_s: Floats
    backward_s: Floats
    links: Floats
    micro_batches: int
    full_duplex: bool

    @property
    def message_s(self) -> Floats:
        """R of the larger message, dense: latency and wire."""
        return self.latency_s + np.maximum(self.forward_s, self.backward_s)

    def bottleneck_s(self, ratios: Floats) -> Floats:
        """(...) T when boundary i's bytes are divided by `ratios[..., i]`."""
        busy = np.maximum(self.forward_s, self.backward_s) if self.full_duplex else self.forward_s + self.backward_s
        slowest: Floats = np.max(busy / self.links / ratios, axis=-1, initial=self.stage_s)
        return slowest

    def steps_s(self, ratios: Floats) -> Floats:
        """(...) seconds per step when boundary i's bytes are divided by `ratios[..., i]`."""
        ways = 2 * self.latency_s.sum() + ((self.forward_s + self.backward_s) / ratios).sum(axis=-1)
        seconds: Floats = self.stage_fill_s + ways + (self.micro_batches - 1) * self.bottleneck_s(ratios)
        return seconds

    def step_s(self, ratios: Floats) -> float:
        """The same for one choice of ratios."""
        return float(self.steps_s(ratios))


def formula(chain: Chain, network: Network, layout: Layout, micro_batches: int) -> Formula:
    """The formula of a layout."""
    stages = layout.stages
    seconds = [_member_seconds(chain, network, stage, layout.recompute) for stage in stages]
    shared = [_shared_s(chain, network, stage, each, micro_batches) for stage, each in zip(stages, seconds, strict=True)]
    feeds = [_feed_s(chain, network, stage) for stage in stages]
    ways = np.array([_way(network, one, other) for one, other in pairwise(stages)]).reshape(-1, 3)
    cuts = [stage.last for stage in stages[:-1]]
    busy: Counter[int] = Counter()
    for stage, each in zip(stages, shared, strict=True):
        busy.update(dict.fromkeys(stage.peers, each))
    return Formula(
        stage_s=max([*busy.values(), *(wire for _, wire in feeds)]),
        stage_fill_s=sum(max(each) for each in seconds) + sum(feeds[0]),
        latency_s=ways[:, 0],
        forward_s=chain.crossing[cuts] * ways[:, 1],
        backward_s=chain.crossing_back[cuts] * ways[:, 1],
        links=ways[:, 2],
        micro_batches=micro_batches,
        full_duplex=network.full_duplex,
    )


def step_estimate(chain: Chain, network: Network, layout: Layout, micro_batches: int) -> float:
    """Seconds per step of a layout by the formula, with its own ratios."""
    ratios = np.array(layout.ratios or (1.0,) * (len(layout.stages) - 1))
    return formula(chain, network, layout, micro_batches).step_s(ratios)


def _member_seconds(chain: Chain, network: Network, stage: Stage, recompute: bool) -> list[float]:
    known = times(chain, network)
    return [known.both(peer, stage.first, stage.last, recompute=recompute) for peer in stage.peers]


def _shared_s(chain: Chain, network: Network, stage: Stage, seconds: list[float], micro_batches: int) -> float:
    """Busy seconds per micro-batch of the busiest member, the sum of gradients among them."""
    if len(seconds) == 1:
        return seconds[0]
    gradient = float(chain.parameter_bytes[stage.last] - chain.parameter_bytes[stage.first])
    dealt = np.bincount(deal(seconds, micro_batches), minlength=len(seconds))
    return (float(np.max(dealt * np.array(seconds))) + group_sum_s(network, stage.peers, gradient)) / micro_batches


def _feed_s(chain: Chain, network: Network, stage: Stage) -> tuple[float, float]:
    """Latency and wire seconds per micro-batch of what the owner sends to a stage."""
    owner, num_bytes = network.owner, chain.feed(stage.first, stage.last)
    if owner is None or not num_bytes:
        return 0.0, 0.0
    latency = max(float(network.alpha_s[owner, peer]) for peer in stage.peers)
    return latency, num_bytes * max(network.pace(owner, peer) for peer in stage.peers)


def _way(network: Network, one: Stage, other: Stage) -> tuple[float, float, float]:
    """Worst latency, worst seconds per byte, and parallel links between two stages, both directions considered."""
    if len(one.peers) == len(other.peers) == 1:
        (i,), (j,) = one.peers, other.peers
        latency = max(float(network.alpha_s[i, j]), float(network.alpha_s[j, i]))
        return latency, max(network.pace(i, j), network.pace(j, i)), 1.0
    there = [(i, j) for i in one.peers for j in other.peers]
    pairs = [*there, *((j, i) for i, j in there)]
    latency = max(float(network.alpha_s[pair]) for pair in pairs)
    alone = max(network.pace(*pair) for pair in pairs)
    together = max(
        max(float(network.beta_s[pair]) / min(len(one.peers), len(other.peers)), _line(network, *pair)) for pair in pairs
    )
    return latency, alone, alone / together if together else 1.0


def _line(network: Network, source: int, target: int) -> float:
    """Seconds per byte of the lines of two sites, 0 if nothing there is shared."""
    leaves, enters = network.sites[source], network.sites[target]
    return max(float(network.uplink_s[leaves]), float(network.downlink_s[enters])) if leaves != enters else 0.0
