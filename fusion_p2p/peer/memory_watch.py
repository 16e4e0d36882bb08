"""Other programs take memory and give it back: what an idle peer offers follows, so that nobody plans with what is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

WATCH_S = 15.0
CHANGE = 0.1
"""What changed by less is not announced,"""
CHANGE_BYTES = 256 << 20
"""nor what changed by less than this."""


class MemoryWatch:
    """Looks at the free memory now and then. While slices lie here it is theirs, and nothing is measured."""

    def __init__(
        self,
        offered_bytes: int,
        measure: Callable[[], Awaitable[int]],
        idle: Callable[[], bool],
        offer: Callable[[int], None],
    ) -> None:
        """`measure` tells what could be offered now; `offer` announces it."""
        self._offered_bytes = offered_bytes
        self._measure, self._idle, self._offer = measure, idle, offer

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(WATCH_S)
            if not self._idle():
                continue
            free_bytes = await self._measure()
            # It may have begun to work meanwhile: then what was measured is what its slices have left.
            if self._idle() and differs(self._offered_bytes, free_bytes):
                self._offered_bytes = free_bytes
                self._offer(free_bytes)


def differs(offered_bytes: int, free_bytes: int) -> bool:
    """Whether that is worth an announcement."""
    change = abs(free_bytes - offered_bytes)
    return change > CHANGE * offered_bytes and change > CHANGE_BYTES
