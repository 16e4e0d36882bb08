"""Small changes to a good layout, kept when the simulator says that they make it faster.

A border moves, a peer is dropped, comes in, or changes places with another one. Changes are ranked by the closed formula; those
that it does not call much slower are simulated, the most promising first, and more of them where a simulation costs little.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fusion_p2p.plan.judging import Judge
from fusion_p2p.plan.layout import Stage
from fusion_p2p.plan.times import work

LOOKED_AT = 250
"""Changes per round that are estimated."""
ROUNDS = 24
"""Rounds of all improving together."""
TASKS = 60_000
"""Simulated tasks that all improving together may cost."""
TASKS_PER_ROUND = 10_000
"""Of them, before giving up on a layout."""
DOUBTED = 1.15
"""A change that the formula calls so many times slower is not simulated."""
SHIFTS = (1, 2, 4, 8)
STARTS = 3
"""Layouts that are changed, the fastest first."""
NEWCOMERS = 4
WORTH = 0.9999
NAME = "improved"

Stages = tuple[Stage, ...]


def improve(judge: Judge) -> None:
    """Change the fastest layouts that the judge knows until nothing helps or enough was simulated."""
    allowed = judge.tasks + TASKS
    starts = sorted(judge.seen, key=lambda key: judge.seen[key])[:STARTS]
    rounds = ROUNDS
    for start in starts:
        current: tuple[Stages, bool] | None = start
        while current is not None and judge.tasks < allowed and rounds > 0:
            current = _faster(judge, *current)
            rounds -= 1


def _faster(judge: Judge, stages: Stages, recompute: bool) -> tuple[Stages, bool] | None:
    """The first changed layout found that is faster."""
    allowed = judge.tasks + TASKS_PER_ROUND
    limit = judge.seen[stages, recompute] * WORTH
    for changed in _promising(judge, stages, recompute):
        if judge.tasks > allowed:
            break
        if judge.stages(NAME, changed, recompute=recompute) < limit:
            return changed, recompute
    return None


def _promising(judge: Judge, stages: Stages, recompute: bool) -> list[Stages]:
    """Changed layouts, best first by the formula; of very many a random part."""
    limit = DOUBTED * judge.estimate(stages, recompute=recompute)
    changed = list(changes(judge, stages))
    if len(changed) > LOOKED_AT:
        chosen = np.random.default_rng(judge.terms.seed).choice(len(changed), LOOKED_AT, replace=False)
        changed = [changed[number] for number in sorted(chosen.tolist())]
    fresh = [one for one in changed if (one, recompute) not in judge.seen]
    ranked = sorted((judge.estimate(one, recompute=recompute), number) for number, one in enumerate(fresh))
    return [fresh[number] for seconds, number in ranked if seconds <= limit]


def changes(judge: Judge, stages: Stages) -> Iterator[Stages]:
    """All neighbours of a layout."""
    yield from _shifted(stages)
    yield from _dropped(stages)
    yield from _exchanged(stages)
    yield from _joined_by(stages, _newcomers(judge, stages))
    yield from _doubled(judge, stages)


def _shifted(stages: Stages) -> Iterator[Stages]:
    """Each border moved."""
    for index in range(len(stages) - 1):
        left, right = stages[index], stages[index + 1]
        for border in (left.last + sign * shift for shift in SHIFTS for sign in (-1, 1)):
            if left.first < border < right.last:
                moved = replace(left, last=border), replace(right, first=border)
                yield stages[:index] + moved + stages[index + 2 :]


def _dropped(stages: Stages) -> Iterator[Stages]:
    """Each stage given to a neighbour, each group without one of its members."""
    for index, stage in enumerate(stages):
        if index > 0:
            yield (*stages[: index - 1], replace(stages[index - 1], last=stage.last), *stages[index + 1 :])
        if index + 1 < len(stages):
            yield (*stages[:index], replace(stages[index + 1], first=stage.first), *stages[index + 2 :])
        if len(stage.peers) > 1:
            for peer in stage.peers:
                fewer = replace(stage, peers=tuple(other for other in stage.peers if other != peer))
                yield (*stages[:index], fewer, *stages[index + 1 :])


def _exchanged(stages: Stages) -> Iterator[Stages]:
    """The peers of each two stages exchanged."""
    for one in range(len(stages)):
        for other in range(one + 1, len(stages)):
            swapped = list(stages)
            swapped[one] = replace(stages[one], peers=stages[other].peers)
            swapped[other] = replace(stages[other], peers=stages[one].peers)
            yield tuple(swapped)


def _joined_by(stages: Stages, newcomers: tuple[int, ...]) -> Iterator[Stages]:
    """Each newcomer in the place of a stage's peers, or with a part of its blocks, before or behind it."""
    for index, stage in enumerate(stages):
        before, after = stages[:index], stages[index + 1 :]
        for peer in newcomers:
            yield (*before, replace(stage, peers=(peer,)), *after)
            for border in _inner(stage):
                first, last = replace(stage, last=border), replace(stage, first=border)
                yield (*before, replace(first, peers=(peer,)), last, *after)
                yield (*before, first, replace(last, peers=(peer,)), *after)


def _doubled(judge: Judge, stages: Stages) -> Iterator[Stages]:
    """Each stage with one more member, the fastest that is idle in its site."""
    used = {peer for stage in stages for peer in stage.peers}
    sites, seconds = judge.network.sites, work(judge.chain, judge.network)[:, -1]
    for index, stage in enumerate(stages):
        site = np.flatnonzero(sites[: len(seconds)] == sites[stage.peers[0]]).tolist()
        idle = [peer for peer in site if peer not in used]
        if idle and len(stage.peers) < judge.terms.micro_batches:
            more = replace(stage, peers=(*stage.peers, min(idle, key=lambda peer: float(seconds[peer]))))
            yield (*stages[:index], more, *stages[index + 1 :])


def _inner(stage: Stage) -> list[int]:
    """Some positions inside a stage: the middle, and near both ends."""
    near = [stage.first + shift for shift in SHIFTS] + [stage.last - shift for shift in SHIFTS]
    return sorted({border for border in (*near, (stage.first + stage.last) // 2) if stage.first < border < stage.last})


def _newcomers(judge: Judge, stages: Stages) -> tuple[int, ...]:
    """Idle peers to try: the fastest, of each kind of peer in each site one."""
    used = {peer for stage in stages for peer in stage.peers}
    seconds = work(judge.chain, judge.network)[:, -1]
    tried: dict[tuple[int, float], int] = {}
    for peer in np.argsort(seconds, kind="stable").tolist():
        if peer not in used:
            tried.setdefault((int(judge.network.sites[peer]), float(seconds[peer])), peer)
    return tuple(tried.values())[:NEWCOMERS]
