"""Time as an argument: what reads a clock is given one, so that tests can run hours in milliseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings, both in seconds."""

    def now(self) -> float:
        """Monotonic time: for deadlines and durations."""

    def wall(self) -> float:
        """Unix time: for what is shown to people and written into announcements."""


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
