"""Small changes to a good layout, kept when the simulator says that they make it faster.

A border moves, a peer is dropped, comes in, or changes places with another one. Changes are ranked by the closed formula; only
those that it does not call slower are simulated, the most promising first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from fusion_p2p.plan.estimate import step_estimate
from fusion_p2p.plan.judging import Judge
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.ratios import with_ratios
from fusion_p2p.plan.times import work

TASKS = 120_000
"""Simulated tasks that all improving together may cost."""
SIMULATED = 6
"""Changes per round that are simulated."""
DOUBTED = 1.02
"""A change that the formula calls so many times slower is not simulated."""
SHIFTS = (1, 2, 4, 8)
NEWCOMERS = 4

Stages = tuple[Stage, ...]


def improve(judge: Judge) -> None:
    """Change the judge's best layout until nothing helps or enough was simulated."""
    spent = judge.tasks + TASKS
    while judge.best is not None and judge.tasks < spent:
        current = judge.best_s
        for stages in _promising(judge, judge.best):
            if judge.stages(judge.best.scheduler, stages, recompute=judge.best.recompute) < current * 0.9999:
                break
        if judge.best_s >= current * 0.9999:
            return


def _promising(judge: Judge, layout: Layout) -> list[Stages]:
    """Changed layouts, best first by the formula."""
    limit = DOUBTED * _estimate(judge, layout, layout.stages)
    fresh = [stages for stages in changes(judge, layout.stages) if (stages, layout.recompute) not in judge.seen]
    ranked = [(_estimate(judge, layout, stages), number) for number, stages in enumerate(fresh)]
    return [fresh[number] for seconds, number in sorted(ranked)[:SIMULATED] if seconds <= limit]


def _estimate(judge: Judge, layout: Layout, stages: Stages) -> float:
    changed = with_ratios(judge.chain, judge.network, replace(layout, stages=stages), judge.terms)
    return step_estimate(judge.chain, judge.network, changed, judge.terms.micro_batches)


def changes(judge: Judge, stages: Stages) -> Iterator[Stages]:
    """All neighbours of a layout."""
    yield from _shifted(stages)
    yield from _dropped(stages)
    yield from _exchanged(stages)
    yield from _joined_by(stages, _newcomers(judge, stages))


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
    """Each newcomer in the place of a stage's peers, or with a half of its blocks, before or behind it."""
    for index, stage in enumerate(stages):
        middle = (stage.first + stage.last) // 2
        for peer in newcomers:
            before, after = stages[:index], stages[index + 1 :]
            yield (*before, replace(stage, peers=(peer,)), *after)
            if stage.first < middle < stage.last:
                first, last = replace(stage, last=middle), replace(stage, first=middle)
                yield (*before, replace(first, peers=(peer,)), last, *after)
                yield (*before, first, replace(last, peers=(peer,)), *after)


def _newcomers(judge: Judge, stages: Stages) -> tuple[int, ...]:
    """Idle peers to try: the fastest, of each kind of peer in each site one."""
    used = {peer for stage in stages for peer in stage.peers}
    seconds = work(judge.chain, judge.network)[:, -1]
    tried: dict[tuple[int, float], int] = {}
    for peer in np.argsort(seconds, kind="stable").tolist():
        if peer not in used:
            tried.setdefault((int(judge.network.sites[peer]), float(seconds[peer])), peer)
    return tuple(tried.values())[:NEWCOMERS]
