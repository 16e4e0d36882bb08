"""How much this process sends and receives: a volunteer's caps, kept by everything that moves much, and how much it was.

There is one `Bandwidth` per transport (`Transport.bandwidth`). Its caps may be changed at any time; what they do not cover is
small: control messages, and what p2pd adds.
"""

from __future__ import annotations

import asyncio
import contextlib

from fusion_p2p.ids import PeerId
from fusion_p2p.net.flight import Flight

DEPTH_S = 0.05
"""After a pause so many seconds' worth of bytes may be moved at once."""
LEAST_WAIT_S = 0.001
"""Less than a clock may be wrong by."""
MAX_FLIGHTS = 1024
"""Peers whose links we remember; the oldest are forgotten."""


class Pace:
    """A token bucket that all callers share, served in the order in which they came. None: no limit."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self.taken = 0
        """Bytes so far."""
        self._bytes_per_s = bytes_per_s
        self._owed = 0.0
        self._owed_at = 0.0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def bytes_per_s(self) -> float | None:
        return self._bytes_per_s

    def set_rate(self, bytes_per_s: float | None) -> None:
        """Another limit from now on, also for those who wait. ValueError when it is not above 0."""
        if bytes_per_s is not None and bytes_per_s <= 0:
            raise ValueError(f"a pace is above 0, not {bytes_per_s:g} bytes per second")
        self._settle()
        self._bytes_per_s = bytes_per_s
        self._changed.set()

    async def take(self, num_bytes: int) -> None:
        """Wait until so many bytes may be moved. More than the bucket holds may be, and then others wait the longer."""
        if self._bytes_per_s is not None or self._turn.locked():
            async with self._turn:
                while (wait_s := self._wait_s()) > LEAST_WAIT_S:
                    await self._sleep(wait_s)
                self._owed += num_bytes
        self.taken += num_bytes

    def _wait_s(self) -> float:
        self._settle()
        return 0.0 if self._bytes_per_s is None else self._owed / self._bytes_per_s - DEPTH_S

    def _settle(self) -> None:
        """Pay off what was taken, at the rate that held since the last time."""
        now = asyncio.get_running_loop().time()
        paid = float("inf") if self._bytes_per_s is None else (now - self._owed_at) * self._bytes_per_s
        self._owed, self._owed_at = max(0.0, self._owed - paid), now

    async def _sleep(self, wait_s: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._changed.wait()


class Bandwidth:
    """What one transport may send and receive, and what is on its way to each peer."""

    def __init__(self, up_bytes_per_s: float | None = None, down_bytes_per_s: float | None = None) -> None:
        self.up = Pace(up_bytes_per_s)
        self.down = Pace(down_bytes_per_s)
        self._flights: dict[PeerId, Flight] = {}

    def flight_to(self, peer: PeerId) -> Flight:
        """The bulk data on its way to a peer."""
        flight = self._flights.pop(peer, None) or Flight()
        self._flights[peer] = flight
        while len(self._flights) > MAX_FLIGHTS:
            self._flights.pop(next(iter(self._flights)))
        return flight
