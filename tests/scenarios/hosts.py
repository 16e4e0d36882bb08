"""Machines of a simulation: what runs in a host's context stands still while the host is paused, as a stopped process does.

The event loop looks at the context of every callback: those of a paused host are kept and run, late, when it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import async_solipsism

from fusion_p2p.errors import NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, StreamHandler
from fusion_p2p.net.memory import SimulatedDirectory, SimulatedTransport
from fusion_p2p.net.memory_pipe import Pipe

REPLAY_ANSWER_S = 2.0
TICK_S = 1e-5
"""Timers fall due at multiples of this: well over the resolution of the clock."""


@dataclass(eq=False)
class Host:
    """One process. `counted`: bytes sent by protocol, and bytes of the directory."""

    paused: bool = False
    held: list[asyncio.Handle] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.context = contextvars.copy_context()
        self.context.run(_HOST.set, self)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it in this host."""
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def count(self, what: str, num_bytes: int) -> None:
        self.counted[what] = self.counted.get(what, 0) + num_bytes

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        """What fell due meanwhile runs now, in the order in which it fell due."""
        self.paused = False
        loop = asyncio.get_running_loop()
        assert isinstance(loop, PausableLoop)
        held, self.held = self.held, []
        loop.run_again(held)


_HOST: contextvars.ContextVar[Host | None] = contextvars.ContextVar("host", default=None)


def _holds(handle: asyncio.Handle) -> bool:
    """Keep a callback of a paused host for later. What is on the wire arrives though its sender has been stopped."""
    host = handle._context.get(_HOST)  # type: ignore[attr-defined]
    if host is None or not host.paused or isinstance(getattr(handle._callback, "__self__", None), Pipe):  # type: ignore[attr-defined]
        return False
    host.held.append(handle)
    return True


class _Handle(asyncio.Handle):
    __slots__ = ()

    def _run(self) -> None:
        if not _holds(self):
            super()._run()  # type: ignore[misc]


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def _run(self) -> None:
        if not _holds(self):
            super()._run()  # type: ignore[misc]


class PausableLoop(async_solipsism.EventLoop):  # type: ignore[misc]
    """Virtual time with hosts that can be paused."""

    def _call_soon(self, callback: Any, args: Any, context: contextvars.Context | None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        when = math.ceil(when / TICK_S) * TICK_S
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_again(self, handles: Sequence[asyncio.Handle]) -> None:
        """Run callbacks that were held, unless somebody cancels them first."""
        self._ready.extend(handle for handle in handles if not handle.cancelled())


class HostTransport:
    """A host's `Transport`: streams are served in the host, bytes are counted, and some questions arrive once more, late."""

    def __init__(self, inner: SimulatedTransport, host: Host, replays: Replays) -> None:
        self._inner = inner
        self._host = host
        self._replays = replays

    @property
    def peer_id(self) -> PeerId:
        return self._inner.peer_id

    @property
    def addresses(self) -> Sequence[str]:
        return self._inner.addresses

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def in_host(stream: Stream) -> None:
            await self._host.start(_serve(handler, HostStream(stream, self._host, protocol)))

        await self._inner.serve(protocol, in_host)

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        stream = HostStream(await self._inner.open(peer, protocol, timeout_s=timeout_s), self._host, protocol)
        self._replays.consider(self._inner, peer, protocol, stream)
        return stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def _serve(handler: StreamHandler, stream: Stream) -> None:
    await handler(stream)


class HostStream:
    """A stream that counts what its host sends and remembers the first message."""

    def __init__(self, inner: Stream, host: Host, protocol: str) -> None:
        self._inner = inner
        self._host = host
        self._protocol = protocol
        self.first = b""

    @property
    def remote(self) -> PeerId:
        return self._inner.remote

    async def read_exactly(self, count: int) -> bytes:
        return await self._inner.read_exactly(count)

    async def read_some(self, buffer: memoryview) -> int:
        return await self._inner.read_some(buffer)

    async def read_into(self, buffer: memoryview) -> None:
        await self._inner.read_into(buffer)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._host.count(self._protocol, len(data))
        self.first = self.first or bytes(data)
        await self._inner.write(data)

    async def close(self) -> None:
        await self._inner.close()


class HostDirectory:
    """A host's `Directory`, which counts what it costs without the DHT's own upkeep."""

    def __init__(self, inner: SimulatedDirectory, host: Host) -> None:
        self._inner = inner
        self._host = host

    async def announce(self, record: bytes, *, lifetime_s: float) -> None:
        await self._inner.announce(record, lifetime_s=lifetime_s)
        self._host.count("announced", len(record))

    async def lookup(self) -> Mapping[PeerId, bytes]:
        found = await self._inner.lookup()
        self._host.count("looked up", sum(map(len, found.values())))
        return found


class Replays:
    """Sends some first messages of streams again, up to so many seconds later, also after a restart of their sender."""

    def __init__(self, random: Any, probability: Mapping[str, float], within_s: float) -> None:
        self._random = random
        self._probability = probability
        self._within_s = within_s
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()

    def consider(self, transport: SimulatedTransport, peer: PeerId, protocol: str, stream: HostStream) -> None:
        if self._random.random() < self._probability.get(protocol, 0.0):
            again = self._again(transport, peer, protocol, stream, self._random.uniform(0, self._within_s))
            task = asyncio.get_running_loop().create_task(again, context=self._context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _again(
        self, transport: SimulatedTransport, peer: PeerId, protocol: str, original: HostStream, wait_s: float
    ) -> None:
        await asyncio.sleep(wait_s)
        try:
            async with asyncio.timeout(REPLAY_ANSWER_S):
                stream = await transport.open(peer, protocol, timeout_s=REPLAY_ANSWER_S)
                try:
                    await stream.write(original.first)
                    await stream.read_exactly(1)
                finally:
                    await stream.close()
        except (NetworkError, TimeoutError):
            return
