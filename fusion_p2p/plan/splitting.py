"""Cutting a chain at given shares, and the layouts that come of it. The baselines and op-fence share this."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Floats
from fusion_p2p.plan.plan import Schedule
from fusion_p2p.plan.request import Terms


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


def one_each(scheduler: str, cuts: Sequence[int], peers: Sequence[int], terms: Terms) -> Layout:
    """One stage for every peer, in order, between neighbouring cuts."""
    borders = zip(cuts[:-1], cuts[1:], peers, strict=True)
    stages = tuple(Stage(first, last, (peer,)) for first, last, peer in borders)
    return Layout(scheduler, stages, (1.0,) * (len(stages) - 1), schedule_of(terms), terms.recompute)


def schedule_of(terms: Terms) -> Schedule:
    """What a scheduler that does not compare schedules takes."""
    return "1f1b" if terms.schedule == "auto" else terms.schedule
