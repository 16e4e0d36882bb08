"""What peers say during an epoch, and when it is to be believed that nothing moves any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fusion_p2p.clock import Clock
from fusion_p2p.errors import RunStopped
from fusion_p2p.ids import PeerId
from fusion_p2p.owner.links import Gone, Heard, Links
from fusion_p2p.wire.job_messages import Pulse

STALL_S = 60.0
STALL_STEPS = 10.0
"""No task done anywhere for max(STALL_S, STALL_STEPS x the longest step so far): something hangs."""


class Hearing:
    """Listens to the peers of an epoch. `describe` names a peer in sentences."""

    def __init__(self, links: Links, clock: Clock, describe: Callable[[PeerId], str], longest_s: float) -> None:
        self._links, self._clock, self._describe = links, clock, describe
        self._progress: dict[PeerId, int] = {}
        self._moved = clock.now()
        self.longest_s = longest_s
        self.patient = False
        """Something is waited for whose every wait has a deadline of its own."""

    async def next(self) -> Heard:
        """The next thing a peer says. RunStopped when one is gone, or nothing moves any more."""
        while True:
            if self.patient:
                self._moved = self._clock.now()
            allowed = max(STALL_S, STALL_STEPS * self.longest_s) - (self._clock.now() - self._moved)
            try:
                async with asyncio.timeout(max(allowed, 0.0)):
                    heard = await self._links.inbox.get()
            except TimeoutError:
                raise RunStopped(f"no task was finished for {self._clock.now() - self._moved:.0f} s") from None
            if isinstance(heard, Gone):
                raise RunStopped(f"{self._describe(heard.peer)} was lost: {heard.reason}")
            if not isinstance(heard.message, Pulse):
                self._moved = self._clock.now()
                return heard
            if heard.message.progress != self._progress.get(heard.peer):
                self._progress[heard.peer] = heard.message.progress
                self._moved = self._clock.now()
