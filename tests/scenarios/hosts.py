"""Machines of a simulation: how one sees the network, what it sends, and that a few of its messages come twice."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion_p2p.errors import NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, StreamHandler
from fusion_p2p.net.memory import SimulatedDirectory, SimulatedTransport
from tests.scenarios.loop import Pausable

REPLAY_ANSWER_S = 2.0


@dataclass(eq=False)
class Host(Pausable):
    """One process. `counted`: bytes sent by protocol, and bytes of the directory."""

    counted: dict[str, int] = field(default_factory=dict)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run it in this host."""
        return asyncio.get_running_loop().create_task(work, context=self.context)

    def count(self, what: str, num_bytes: int) -> None:
        self.counted[what] = self.counted.get(what, 0) + num_bytes


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
        inner = await self._inner.open(peer, protocol, timeout_s=timeout_s)
        sent = functools.partial(self._replays.consider, self._inner, peer, protocol)
        return HostStream(inner, self._host, protocol, sent)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def _serve(handler: StreamHandler, stream: Stream) -> None:
    await handler(stream)


class HostStream:
    """A stream that counts what its host sends, and tells of it whoever opened it for a question."""

    def __init__(self, inner: Stream, host: Host, protocol: str, sent: Callable[[bytes], None] = lambda data: None) -> None:
        self._inner = inner
        self._host = host
        self._protocol = protocol
        self._sent = sent

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
        self._sent(bytes(data))
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
    """Sends some messages again, on a stream of their own up to so many seconds later, also after a restart of their sender."""

    def __init__(self, random: Any, probability: Mapping[str, float], within_s: float) -> None:
        self._random = random
        self._probability = probability
        self._within_s = within_s
        self._context = contextvars.copy_context()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False

    def consider(self, transport: SimulatedTransport, peer: PeerId, protocol: str, data: bytes) -> None:
        if not self._stopped and self._random.random() < self._probability.get(protocol, 0.0):
            again = self._again(transport, peer, protocol, data, self._random.uniform(0, self._within_s))
            task = asyncio.get_running_loop().create_task(again, context=self._context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Nothing comes again from now on."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _again(self, transport: SimulatedTransport, peer: PeerId, protocol: str, data: bytes, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        try:
            async with asyncio.timeout(REPLAY_ANSWER_S):
                stream = await transport.open(peer, protocol, timeout_s=REPLAY_ANSWER_S)
                try:
                    await stream.write(data)
                    await stream.read_exactly(1)
                finally:
                    await stream.close()
        except (NetworkError, TimeoutError):
            return
