"""OP-Fence (FusionLLM, arXiv 2410.12707): communities by bandwidth, few cheap cuts between them, balanced shares inside.

1. Communities of peers, on the path through them whose slowest hop is fastest.
2. Between two communities the fence: the position with the fewest crossing bytes within `WINDOW` of the smaller neighbour's
   share around the cut that splits the FLOPs in proportion to speed.
3. Inside, a stage for every peer, in proportion to its speed.

All peers are used. The paper's body is not public; this is our reconstruction from its abstract and follow-ups.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.communities import bandwidth, communities, order_along, path_through
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.plan.splitting import one_each, split
from fusion_p2p.plan.times import work

NAME = "op-fence"
WINDOW = 0.25


def op_fence(chain: Chain, network: Network, terms: Terms) -> Layout | NoPlan:
    """One stage for every peer, the fastest ones if the chain has fewer blocks than there are peers."""
    if not network.peers:
        return NoPlan("no peer is free")
    speeds = speeds_on(chain, network)
    chosen = np.sort(np.argsort(-speeds, kind="stable")[: chain.num_blocks])
    part = network.select([int(peer) for peer in chosen])
    groups, fast = communities(part, terms.seed), bandwidth(part)
    along = tuple(groups[index] for index in path_through(fast, groups))
    ordered = order_along(fast, along, speeds[chosen])
    cuts = _cuts(chain, [speeds[chosen][list(group)] for group in ordered])
    peers = [int(chosen[peer]) for group in ordered for peer in group]
    return one_each(NAME, chain, network, cuts, peers, terms)


def speeds_on(chain: Chain, network: Network) -> Floats:
    """(P,) how many times each peer could compute the whole chain, there and back, in a second."""
    return 1.0 / np.maximum(work(chain, network)[:, -1], 1e-30)


def _cuts(chain: Chain, speeds: Sequence[Floats]) -> tuple[int, ...]:
    """All positions 0 to N: fences between the groups, and inside each one cut per peer. speeds: of each group's members."""
    before = chain.work()
    fences = _fences(before, chain.crossing, speeds)
    inner = (
        tuple(first + cut for cut in split(before[first : last + 1], list(group))[:-1])
        for first, last, group in zip(fences[:-1], fences[1:], speeds, strict=True)
    )
    return (*(cut for cuts in inner for cut in cuts), chain.num_blocks)


def _fences(before: Floats, crossing: Floats, speeds: Sequence[Floats]) -> tuple[int, ...]:
    shares = [float(group.sum() / sum(group.sum() for group in speeds)) for group in speeds]
    sizes = [len(group) for group in speeds]
    fences = [0]
    for index in range(len(speeds) - 1):
        target = before[-1] * sum(shares[: index + 1])
        window = before[-1] * WINDOW * min(shares[index], shares[index + 1])
        first, last = fences[-1] + sizes[index], len(before) - 1 - sum(sizes[index + 1 :])
        fences.append(_fence(before, crossing, range(first, last + 1), target, window))
    return (*fences, len(before) - 1)


def _fence(before: Floats, crossing: Floats, allowed: range, target: float, window: float) -> int:
    """The cheapest position near the target, the nearest of the cheapest."""
    positions = np.arange(allowed.start, allowed.stop)
    off = np.abs(before[positions] - target)
    near = positions[off <= window]
    if not len(near):
        return int(np.clip(np.argmin(np.abs(before - target)), allowed.start, allowed.stop - 1))
    cheap = near[crossing[near] <= crossing[near].min() * 1.0001]
    return int(cheap[np.argmin(np.abs(before[cheap] - target))])
