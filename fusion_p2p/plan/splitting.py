"""Cutting a chain at given shares, and the layouts that come of it. The baselines and op-fence share this."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import within_memory
from fusion_p2p.plan.network import Floats, Network
from fusion_p2p.plan.plan import Schedule
from fusion_p2p.plan.ratios import with_ratios
from fusion_p2p.plan.request import NoPlan, Terms


def split(before: Floats, shares: Sequence[float]) -> tuple[int, ...]:
    """Positions 0 to N that cut `before`, sums before each of N + 1 positions, nearest to `shares` of its whole.

    shares: of each part, positive; at most N of them. No part is empty.
    """
    end, parts = len(before) - 1, len(shares)
    targets = before[0] + (before[-1] - before[0]) * np.cumsum(shares) / np.sum(shares)
    cuts = [0]
    for index, target in enumerate(targets[:-1]):
        nearest = int(np.argmin(np.abs(before - target)))
        cuts.append(max(cuts[-1] + 1, min(nearest, end - (parts - 1 - index))))
    return (*cuts, end)


def one_each(
    scheduler: str, chain: Chain, network: Network, cuts: Sequence[int], peers: Sequence[int], terms: Terms
) -> Layout | NoPlan:
    """One stage for every peer, in order, between neighbouring cuts, compressed as the terms say, unless memory is short."""
    borders = zip(cuts[:-1], cuts[1:], peers, strict=True)
    stages = tuple(Stage(first, last, (peer,)) for first, last, peer in borders)
    layout = Layout(scheduler, stages, (), schedule_of(terms), terms.recompute)
    return within_memory(chain, network, with_ratios(chain, network, layout, terms), terms)


def schedule_of(terms: Terms) -> Schedule:
    """What a scheduler that does not compare schedules takes."""
    return "1f1b" if terms.schedule == "auto" else terms.schedule
