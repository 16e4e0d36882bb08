"""How often states are copied to other peers: as often as loses the least time; pure.

Copying costs time, and so do the steps that a loss makes the run repeat. With a copy that costs C seconds of training and a
mean time M between losses the sum is least at an interval of sqrt(2 C M) (Young 1974, Daly 2006). Both are measured: C by how
much longer steps take while a copy is on its way, M by the losses seen, from a prior of one loss per peer and hour.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

PRIOR_LOSSES = 1.0
PRIOR_PEER_S = 3600.0
"""Before anything was seen: one loss in an hour of one peer, worth as much as an hour of experience."""
LONGEST_S = 600.0
"""Between two copies, however reliable the peers seem."""
BUDGET = 0.04
"""Copies may take this share of the time, however often peers are lost."""
URGENT_BUDGET = 0.2
"""The same while a slice has no copy, as after a loss."""
MEMORY_BYTES_PER_S = 1e9
"""Copying and hashing a state on the way: the least that a copy costs, until it is measured."""
LEAST_COST_S = 0.02
UNMEASURED_SHARE = 0.25
"""Of the time that a copy is on its way, until it is measured how much of it is lost to training."""
LEAST_QUIET = 3
"""Steps without a copy that have to be seen before it is known what a copy costs."""
MAX_QUIET = 20
MAX_COSTS = 5


@dataclass(frozen=True, slots=True)
class LossRate:
    """How often peers of this run were lost: `losses` in `peer_s` seconds of one peer."""

    losses: int = 0
    peer_s: float = 0.0

    def mean_time_s(self, num_peers: int) -> float:
        """Between two losses among so many peers: the mean of the Gamma posterior's rate, inverted."""
        rate = (PRIOR_LOSSES + self.losses) / (PRIOR_PEER_S + self.peer_s)
        return 1.0 / (rate * max(1, num_peers))


@dataclass(frozen=True, slots=True)
class Laps:
    """Durations of steps, with and without a copy on its way, taken at the moments when steps are decided.

    quiet_s: the newest without. copied_s: the sum over `copied` laps, of `rounds` whose cost is not known yet. costs_s: of the
    newest that is.
    """

    step: int = -1
    at: float = 0.0
    touched: bool = False
    rounds: int = 0
    copied: int = 0
    copied_s: float = 0.0
    quiet_s: tuple[float, ...] = ()
    costs_s: tuple[float, ...] = ()

    def decided(self, step: int, now: float, *, copying: bool) -> Laps:
        """A step was decided; `copying`: a copy is on its way, as at any moment since `touch` was called."""
        follows = step == self.step + 1
        laps = replace(self, step=step, at=now, touched=copying)
        if not follows:
            return laps if copying else replace(laps, rounds=0, copied=0, copied_s=0.0)
        if not self.touched and not copying:
            return replace(laps, quiet_s=(*self.quiet_s, now - self.at)[-MAX_QUIET:])._closed()
        laps = replace(laps, copied=self.copied + 1, copied_s=self.copied_s + now - self.at)
        return laps if copying else laps._closed()

    def touch(self) -> Laps:
        """A copy begins now."""
        return replace(self, touched=True, rounds=self.rounds + 1)

    @property
    def know_quiet(self) -> bool:
        """Whether enough steps without a copy were seen."""
        return len(self.quiet_s) >= LEAST_QUIET

    def again(self, *, as_before: bool) -> Laps:
        """For a new epoch, in which steps take as long as before, or not."""
        return Laps(quiet_s=self.quiet_s if as_before else (), costs_s=self.costs_s)

    def cost_s(self, num_bytes: int, took_s: float) -> float:
        """Seconds of training that a copy costs: of all slices, the largest of `num_bytes`, on its way for `took_s`."""
        least = LEAST_COST_S + num_bytes / MEMORY_BYTES_PER_S
        return max(least, median(self.costs_s)) if self.costs_s else least + UNMEASURED_SHARE * took_s

    def _closed(self) -> Laps:
        """No round is under way: what the last one took beyond other steps is its cost, as soon as these are known."""
        without = replace(self, rounds=0, copied=0, copied_s=0.0)
        if not self.rounds:
            return without
        if not self.know_quiet:
            return self
        cost = (self.copied_s - self.copied * median(self.quiet_s)) / self.rounds
        return replace(without, costs_s=(*self.costs_s, cost)[-MAX_COSTS:])


def interval_s(cost_s: float, mean_time_s: float, last_s: float) -> float:
    """Seconds from the beginning of one copy to that of the next; the last one was on its way for `last_s`."""
    return max(shortest_s(cost_s, last_s), min(LONGEST_S, math.sqrt(2.0 * cost_s * mean_time_s)))


def shortest_s(cost_s: float, last_s: float, budget: float = BUDGET) -> float:
    """The least interval, whatever happened: within the budget, and not before the last copy has arrived."""
    return max(cost_s / budget, last_s)
