"""What peers say during an epoch, and when it is to be believed that nothing moves any more."""

from __future__ import annotations

import asyncio

from fusion_p2p.clock import Clock
from fusion_p2p.ids import PeerId
from fusion_p2p.owner.breaks import EpochBroken, Stalled
from fusion_p2p.owner.links import Event, Heard, Links
from fusion_p2p.wire.job_messages import Pulse

STALL_S = 60.0
STALL_STEPS = 10.0
"""No task done anywhere for max(STALL_S, STALL_STEPS x the longest step so far): something hangs."""


class Hearing:
    """Listens to the peers of an epoch."""

    def __init__(self, links: Links, clock: Clock, longest_s: float) -> None:
        self._links, self._clock = links, clock
        self._progress: dict[PeerId, int] = {}
        self._moved = clock.now()
        self.longest_s = longest_s
        self.patient = False
        """Something is waited for whose every wait has a deadline of its own."""

    async def next(self) -> Event:
        """The next thing that happens to a peer, pulses left out. EpochBroken when nothing moves any more."""
        while True:
            if self.patient:
                self._moved = self._clock.now()
            allowed = max(STALL_S, STALL_STEPS * self.longest_s) - (self._clock.now() - self._moved)
            try:
                async with asyncio.timeout(max(allowed, 0.0)):
                    event = await self._links.inbox.get()
            except TimeoutError:
                raise EpochBroken(Stalled(f"no task was finished for {self._clock.now() - self._moved:.0f} s")) from None
            if not isinstance(event, Heard) or not isinstance(event.message, Pulse):
                self._moved = self._clock.now()
                return event
            if event.message.progress != self._progress.get(event.peer):
                self._progress[event.peer] = event.message.progress
                self._moved = self._clock.now()
