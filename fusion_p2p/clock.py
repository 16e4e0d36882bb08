"""Time as an argument: what reads a clock is given one, so that tests can run hours in milliseconds."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from typing import Protocol

OFTEN_S, SELDOM_S = 0.25, 1.0
"""Between the moments at which a process looks after what comes round again and again: within a second, or not as often."""
LENIENCY_S = 0.02
"""A pause is rather that much longer than cut by a second because a clock is not exact."""


class Clock(Protocol):
    """Two readings, both in seconds, and how long to pause between two rounds of something, so that a process wakes seldom."""

    def now(self) -> float:
        """Monotonic time: for deadlines and durations."""

    def wall(self) -> float:
        """Unix time: for what is shown to people and written into announcements."""

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        """How long to pause for about so long, such that many pauses end at one moment; often: at any in a second.

        To wake a process that idles costs more than most of what it is woken for.
        """

    def keep_step(self, moment: float) -> None:
        """From now on pauses end in step with this moment, on the clock of `now`."""


class SystemClock:
    """The machine's own clocks. Pauses end at whole seconds, shorter ones at whole quarters, in the phase of this process.

    All clocks of a process have one phase, because it is the process that wakes; peers of one machine have different ones.
    """

    _phase_s = random.uniform(0.0, SELDOM_S)

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        return rounded_s(self.now() - SystemClock._phase_s, about_s, often=often)

    def keep_step(self, moment: float) -> None:
        SystemClock._phase_s = moment % SELDOM_S


def rounded_s(now: float, about_s: float, *, often: bool = False) -> float:
    """From `now` to the nearest quarter of a second about so much later; to the last whole second until then if it is longer.

    Pauses shorter than a quarter stay as they are.
    """
    if about_s < OFTEN_S:
        return about_s
    if about_s < SELDOM_S or often:
        return round((now + about_s) / OFTEN_S) * OFTEN_S - now
    return math.floor((now + about_s + LENIENCY_S) / SELDOM_S) * SELDOM_S - now


async def pause_unless(event: asyncio.Event, clock: Clock, about_s: float) -> None:
    """Pause for about so long, or until the event; at least once let others run."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(clock.pause_s(max(0.0, about_s))):
            await event.wait()
