"""What followed a fault, from the times at which lines came into a run's ledger. Pure."""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Noted:
    """A line of a ledger, and when it was first seen there."""

    at_s: float
    entry: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.entry["kind"])


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What one fault cost."""

    steps_repeated: int = 0
    seconds_lost: float = 0.0
    """Beyond the usual time of a step, in waits for a step that had never been made: those in which it, or an epoch, began."""
    epochs: int = 0
    """Started after it and before the next."""


def aftermaths(faults_s: Sequence[float], noted: Sequence[Noted]) -> list[Aftermath]:
    """What followed each of the faults at these times, which ascend.

    A wait that begins before a fault and ends after it is that fault's; when several lie in it, the first one's. One in which
    an epoch begins is the last fault's before it, and so are the steps that the epoch makes again. Other waits are nobody's.
    """
    repeated, lost, epochs = [0] * len(faults_s), [0.0] * len(faults_s), [0] * len(faults_s)
    usual_s, returns = usual_step_s(noted), _returns(noted)
    for begin, end in _waits(noted):
        at = bisect_left(faults_s, begin)
        struck = at < len(faults_s) and faults_s[at] <= end
        whose = at if struck else at - 1
        if whose >= 0 and (struck or any(begin < at_s <= end for at_s, _ in returns)):
            lost[whose] += max(0.0, end - begin - usual_s)
    for at_s, steps in returns:
        whose = bisect_left(faults_s, at_s) - 1
        if whose >= 0:
            repeated[whose] += steps
            epochs[whose] += 1
    return [Aftermath(*one) for one in zip(repeated, lost, epochs, strict=True)]


def first_commit_after(noted: Sequence[Noted], at_s: float) -> float | None:
    """When the first step was committed after this time; None when none was."""
    return next((one.at_s for one in noted if one.kind == "commit" and one.at_s > at_s), None)


def longest_wait_s(noted: Sequence[Noted], begin_s: float, end_s: float) -> float:
    """The longest time without a commit between two times; 0 when there was none at all."""
    commits = [one.at_s for one in noted if one.kind == "commit"]
    waits = [after - before for before, after in itertools.pairwise(commits) if begin_s < after <= end_s]
    return max(waits, default=0.0)


def usual_step_s(noted: Sequence[Noted]) -> float:
    """The median time from one commit to the next."""
    commits = [one.at_s for one in noted if one.kind == "commit"]
    return statistics.median([after - before for before, after in itertools.pairwise(commits)] or [0.0])


def _waits(noted: Sequence[Noted]) -> list[tuple[float, float]]:
    """From each step made for the first time to the next one that is."""
    news: list[float] = []
    highest = 0
    for one in noted:
        if one.kind in ("commit", "skip") and one.entry["step"] > highest:
            highest = one.entry["step"]
            news.append(one.at_s)
    return list(itertools.pairwise(news))


def _returns(noted: Sequence[Noted]) -> list[tuple[float, int]]:
    """When each epoch but the first began, and how many steps it took back."""
    found: list[tuple[float, int]] = []
    last: int | None = None
    for one in noted:
        if one.kind in ("commit", "skip"):
            last = one.entry["step"]
        elif one.kind == "start":
            if last is not None:
                found.append((one.at_s, last - one.entry["state_step"]))
            last = one.entry["state_step"]
    return found
