"""How much a better plan has to promise before a running job moves, by what earlier moves brought. Pure.

    usually                              GAIN of a step
    within PAUSE_S after a move          HASTY_GAIN; the pause is twice as long after every further move that brought nothing
    per move in a row that brought none  GAIN more

What a move brought is measured: seconds per step before it, and the median of the first steps after it. So a job settles even
where predictions are wrong, and a peer that is very much faster is used at once, whenever it comes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median

from fusion_p2p.plan.replan import GAIN

HASTY_GAIN, MOST_GAIN = 0.4, 0.5
PAUSE_S, LONGEST_PAUSE_S = 60.0, 3600.0
WARMING_STEPS, COMPARED_STEPS = 2, 8
"""After a move the first steps are not counted, so many others are."""
BROUGHT = 0.05
"""A move that made steps shorter by less than this share of them brought nothing."""


@dataclass(frozen=True, slots=True)
class Reluctance:
    """What a run remembers of its moves.

    vain: moves in a row that brought nothing. quiet_until: the end of the pause after the last one. before_s: seconds per step
    before the last move, as long as what it brought is not known. after_s: of the steps since.
    """

    vain: int = 0
    quiet_until: float = -math.inf
    before_s: float | None = None
    after_s: tuple[float, ...] = ()

    def gain(self, now: float) -> float:
        """The share of a step that a plan has to gain now."""
        usual = min(MOST_GAIN, (1 + self.vain) * GAIN)
        return max(usual, HASTY_GAIN) if now < self.quiet_until else usual

    def moved(self, before_s: float, now: float) -> Reluctance:
        """After a move for a gain; a step took so long before it."""
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0**self.vain)
        return Reluctance(self.vain, now + pause_s, before_s)

    def took(self, step_s: float, now: float) -> Reluctance:
        """After one more step. When enough are known, the last move is judged."""
        if self.before_s is None:
            return self
        after_s = (*self.after_s, step_s)
        if len(after_s) < WARMING_STEPS + COMPARED_STEPS:
            return replace(self, after_s=after_s)
        if median(after_s[WARMING_STEPS:]) < (1 - BROUGHT) * self.before_s:
            return Reluctance(quiet_until=self.quiet_until)
        pause_s = min(LONGEST_PAUSE_S, PAUSE_S * 2.0 ** (self.vain + 1))
        return Reluctance(self.vain + 1, now + pause_s)

    def disturbed(self) -> Reluctance:
        """Something else changed: what the last move brought cannot be told any more."""
        return replace(self, before_s=None, after_s=())
