"""What the suite needs of an implementation besides the interfaces: making peers, crashing one, waiting for a condition."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fusion_p2p.errors import PeerUnreachable
from fusion_p2p.net.base import Directory, Stream, Transport
from fusion_p2p.net.identity import Identity
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.memory_pipe import Link


@dataclass(frozen=True)
class Peer:
    """One peer of whatever implementation."""

    identity: Identity
    transport: Transport
    directory: Directory


class Harness(Protocol):
    """An implementation under test."""

    async def peer(self) -> Peer:
        """A new peer that has met all earlier ones."""

    async def crash(self, peer: Peer) -> None:
        """End the peer as SIGKILL of its process would."""


class MemoryHarness:
    def __init__(self, network: SimulatedNetwork) -> None:
        self._network = network

    async def peer(self) -> Peer:
        peer = self._network.join()
        return Peer(peer.identity, peer.transport, peer.directory)

    async def crash(self, peer: Peer) -> None:
        self._network.crash(peer.identity.peer_id)


class HivemindHarness:
    """Peers of one process on loopback, each with its own p2pd; the first may dial the others only through `relay`."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack, relay: str | None = None) -> None:
        self._folder = folder
        self._stack = stack
        self._relay = relay
        self._peers: list[Peer] = []

    async def peer(self) -> Peer:
        from fusion_p2p.net.hivemind import NetworkSettings, open_network

        settings = NetworkSettings(
            identity_path=self._folder / f"{len(self._peers)}.key",
            listen=("/ip4/127.0.0.1/tcp/0",),
            relays=(self._relay,) if self._relay and not self._peers else (),
        )
        network = await self._stack.enter_async_context(open_network(settings))
        for other in self._peers:
            await connected(network.transport, other.transport.addresses)
        if self._peers:
            await network.directory.join([other.identity.peer_id for other in self._peers])
        if self._relay and self._peers:  # a relayed peer only asks the directory, so nobody meets it unless it asks
            await self._peers[0].directory.join([network.transport.peer_id])  # type: ignore[attr-defined]
        peer = Peer(network.identity, network.transport, network.directory)
        self._peers.append(peer)
        return peer

    async def crash(self, peer: Peer) -> None:
        transport = peer.transport
        transport._supervisor.cancel()  # type: ignore[attr-defined]  # a killed process does not restart its daemon
        os.kill(transport.daemon.pid, signal.SIGKILL)  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def memory() -> AsyncIterator[MemoryHarness]:
    async with SimulatedNetwork(seed=7, link=Link(latency_s=0.001)) as network:
        yield MemoryHarness(network)


@contextlib.asynccontextmanager
async def hivemind(folder: Path, relay: str | None = None) -> AsyncIterator[HivemindHarness]:
    async with contextlib.AsyncExitStack() as stack:
        yield HivemindHarness(folder, stack, relay)


async def connected(transport: Transport, addresses: Sequence[str]) -> None:
    """Dial until it works: a relay needs a second until it has granted the other side its reservation."""

    async def connects() -> bool:
        try:
            await transport.connect(addresses, timeout_s=5)
        except PeerUnreachable:
            return False
        return True

    await eventually(connects, timeout_s=20)


async def eventually(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 10.0) -> None:
    """Wait until a condition holds; TimeoutError when it does not in time."""
    async with asyncio.timeout(timeout_s):
        while True:
            holds = condition()
            if await holds if isinstance(holds, Awaitable) else holds:
                return
            await asyncio.sleep(0.01)  # any condition can be waited for: none is told of


async def echo(stream: Stream) -> None:
    """Send back every message: 4 bytes of length, then as many bytes."""
    while True:
        size = int.from_bytes(await stream.read_exactly(4), "big")
        await stream.write(await stream.read_exactly(size))
