"""One direction of a simulated stream: bytes that take their time, in order, in a bounded buffer."""

from __future__ import annotations

import asyncio
import functools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from fusion_p2p.errors import StreamClosed

CHUNK_BYTES = 64 << 10
TIMER_SLACK_S = 1e-6
"""Event loops call timers early by up to their clock's resolution, and rounding makes virtual ones early too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two peers."""

    latency_s: float = 0.01
    jitter_s: float = 0.0
    """Uniform from 0 to this, besides the latency."""
    bytes_per_s: float = 1e9
    loss: float = 0.0
    """Probability that a chunk is lost and sent again: it comes late, and all behind it too."""
    buffer_bytes: int = 256 << 10
    """What fits between writer and reader of one stream; then the writer waits."""

    @property
    def resend_s(self) -> float:
        """How late a lost chunk is: TCP's least retransmission time, or a round trip."""
        return max(0.2, 2 * self.latency_s)


@dataclass(slots=True)
class Wire:
    """The state of one direction between two peers, shared by all their streams."""

    link: Link
    free_at: float = 0.0

    def arrival(self, num_bytes: int, now: float, rng: random.Random) -> float:
        """When the last byte of a chunk sent now is there."""
        self.free_at = max(self.free_at, now) + num_bytes / self.link.bytes_per_s
        delay = self.link.latency_s + rng.uniform(0, self.link.jitter_s)
        if self.link.loss and rng.random() < self.link.loss:
            delay += self.link.resend_s
        return self.free_at + delay


class Pipe:
    """Carries chunks from a writer to a reader over a wire; an empty chunk is the end.

    `passes` says whether bytes get through now, `awake` whether the reader runs.
    """

    def __init__(self, wire: Wire, rng: random.Random, passes: Callable[[], bool], awake: Callable[[], bool]) -> None:
        self._wire = wire
        self._rng = rng
        self._passes = passes
        self._awake = awake
        self.opposite: Pipe | None = None
        """The other direction: a reader that met the end may write no more, for there is no half-close."""
        self._loop = asyncio.get_running_loop()
        self._travelling: deque[tuple[float, bytes]] = deque()
        self._arrived = bytearray()
        self._buffered_bytes = 0
        self._last_arrival = 0.0
        self._ended = False
        """Nothing more will arrive."""
        self._cut = False
        """The writer may write no more."""
        self._changed = asyncio.Event()

    async def write(self, data: bytes | bytearray | memoryview, why: str) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), CHUNK_BYTES):
            chunk = bytes(view[start : start + CHUNK_BYTES])
            if not self._may_write(len(chunk)):
                await self._until(functools.partial(self._may_write, len(chunk)))
            if self._cut:
                raise StreamClosed(why)
            self._buffered_bytes += len(chunk)
            self._send(chunk)
        if self._cut:
            raise StreamClosed(why)

    async def read(self, limit: int, why: str) -> bytes:
        """Some bytes, at most `limit`; StreamClosed at the end."""
        await self._until(self._may_read)
        if not self._arrived:
            raise StreamClosed(why)
        data = bytes(self._arrived[:limit])
        del self._arrived[:limit]
        self._buffered_bytes -= len(data)
        self._wake()
        return data

    def finish(self) -> None:
        """End after what was written: the reader sees the end when it has read the rest."""
        if not self._cut:
            self._cut = True
            self._send(b"")
            self._wake()

    def discard(self) -> None:
        """The reader has left: what arrives is dropped."""
        self._ended = True
        self._arrived.clear()
        self._wake()

    def break_now(self) -> None:
        """End at once on both sides; what was travelling is lost."""
        self._cut = self._ended = True
        self._travelling.clear()
        self._wake()

    def pump(self) -> None:
        """Deliver what is due, unless the way is blocked; called again when it is free."""
        due = self._loop.time() + TIMER_SLACK_S
        while self._travelling and self._travelling[0][0] <= due and self._passes():
            _, chunk = self._travelling.popleft()
            if not chunk:
                self._arrive_end()
            elif not self._ended:
                self._arrived += chunk
        self._wake()

    def _arrive_end(self) -> None:
        self._ended = True
        if self.opposite is not None:
            self.opposite._cut = True
            self.opposite._wake()

    def _send(self, chunk: bytes) -> None:
        arrival = self._wire.arrival(len(chunk), self._loop.time(), self._rng)
        self._last_arrival = max(self._last_arrival, arrival)
        self._travelling.append((self._last_arrival, chunk))
        self._loop.call_at(self._last_arrival, self.pump)

    def _may_read(self) -> bool:
        return (bool(self._arrived) or self._ended) and self._awake()

    def _may_write(self, size: int) -> bool:
        """There is room, or no sense in waiting for it."""
        return self._cut or self._buffered_bytes + size <= max(self._wire.link.buffer_bytes, size)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
