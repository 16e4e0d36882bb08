"""Large pieces of data on streams: sent within what may be on its way to the peer and within the caps, told of as they come.

The sender calls `Outgoing.arrived` with what the receiver tells it, which each protocol carries in its own way.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fusion_p2p.errors import DeadlinePassed, WireError
from fusion_p2p.net.base import Stream
from fusion_p2p.net.flight import Piece
from fusion_p2p.net.pacing import Bandwidth, Pace

IDLE_TIMEOUT_S = 20.0
"""Nothing came for so long: nobody is there."""
WRITE_TIMEOUT_S = 60.0
"""A reader that takes no piece for so long is lost: the stream is up, but nobody is there."""
MUCH_BYTES = 256 << 10
"""Read and not told: the sender is told at once."""
SOME_BYTES = 16 << 10
"""Read and not told: the sender is told when nothing more came for SOME_S, or was told nothing for as long."""
SOME_S = 0.002
LITTLE_S = 0.02
"""Less than that is told of when nothing more came for so long."""


class Outgoing:
    """The bulk data that goes out on one stream. `end` it with the stream."""

    def __init__(self, stream: Stream, bandwidth: Bandwidth, share: float = 1.0) -> None:
        """`share`: how much of what may be on its way to the peer this stream may take, whose reader pauses now and then."""
        self._stream = stream
        self._share = share
        self._pace = bandwidth.up
        self._flight = bandwidth.flight_to(stream.remote)
        self._pieces: deque[Piece] = deque()
        self._on_its_way = 0
        """Bytes of all pieces."""
        self._of_oldest = 0
        """Bytes of the oldest piece that have arrived."""
        self._moved = asyncio.Event()

    async def write(self, data: memoryview, pace: Pace | None = None) -> None:
        """Send all of it, no faster than `pace`. StreamClosed, or DeadlinePassed when no piece is taken for too long."""
        flat, start = data.cast("B"), 0
        while start < len(flat):
            size = min(self._flight.piece_bytes(), len(flat) - start)
            if pace is not None:
                await pace.take(size)
            await self._pace.take(size)
            async with _taking(self._stream):
                await self._has_share(size)
                self._pieces.append(await self._flight.send(size))
                self._on_its_way += size
                await self._stream.write(flat[start : start + size])
            start += size

    def arrived(self, num_bytes: int) -> None:
        """The receiver has read so many more bytes. WireError when more than were sent."""
        if num_bytes > self._on_its_way:
            raise WireError(f"{self._stream.remote} received what was not sent")
        self._on_its_way -= num_bytes
        self._of_oldest += num_bytes
        self._flight.arrived(num_bytes)
        self._moved.set()
        while self._pieces and self._of_oldest >= self._pieces[0].num_bytes:
            piece = self._pieces.popleft()
            self._of_oldest -= piece.num_bytes
            self._flight.completed(piece)

    def end(self) -> None:
        """The stream has ended, and with it what was on its way."""
        self._flight.lost(self._on_its_way)
        self._on_its_way = self._of_oldest = 0
        self._pieces.clear()

    async def _has_share(self, num_bytes: int) -> None:
        """Wait for our own share, before we wait in line with others."""
        while self._on_its_way and self._on_its_way + num_bytes > self._share * self._flight.window_bytes():
            self._moved.clear()
            await self._moved.wait()


async def write_small(stream: Stream, data: bytes) -> None:
    """Send what never waits in line. StreamClosed, or DeadlinePassed when it is not taken."""
    async with _taking(stream):
        await stream.write(data)


async def read_bulk(
    stream: Stream, num_bytes: int, pace: Pace, arrived: Callable[[int], Awaitable[None]], idle_s: float = IDLE_TIMEOUT_S
) -> bytearray:
    """Read exactly `num_bytes` into one buffer, no faster than `pace`; `arrived` tells the sender of every byte, soon.

    DeadlinePassed when nothing comes for `idle_s`.
    """
    clock = asyncio.get_running_loop().time
    buffer, start, untold, told_at = bytearray(num_bytes), 0, 0, clock()
    view = memoryview(buffer)
    while start < num_bytes:
        patience_s = idle_s if not untold else SOME_S if untold >= SOME_BYTES else LITTLE_S
        try:
            async with asyncio.timeout(patience_s):
                size = await stream.read_some(view[start : start + MUCH_BYTES])
        except TimeoutError:
            if not untold:
                raise DeadlinePassed(f"{stream.remote} stopped sending at byte {start} of {num_bytes}") from None
        else:
            await pace.take(size)
            start, untold = start + size, untold + size
            overdue = untold >= SOME_BYTES and clock() - told_at >= SOME_S
            if start < num_bytes and untold < MUCH_BYTES and not overdue:
                continue
        await arrived(untold)
        untold, told_at = 0, clock()
    return buffer


async def together(*halves: Coroutine[Any, Any, None]) -> None:
    """Run all to their end. When one fails, the others are cancelled, and its error is raised."""
    tasks = [asyncio.ensure_future(half) for half in halves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _taking(stream: Stream) -> AsyncIterator[None]:
    """DeadlinePassed when the body takes too long."""
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            yield
    except TimeoutError:
        raise DeadlinePassed(f"{stream.remote} took no byte for {WRITE_TIMEOUT_S:g} s") from None
