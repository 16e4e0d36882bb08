"""Many real presences on the simulated network, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

import async_solipsism

import fusion_p2p
from fusion_p2p.clock import rounded_s
from fusion_p2p.ids import PeerId
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.peer.background import beside
from fusion_p2p.peer.coordination import Coordination
from fusion_p2p.peer.link_watch import LinkWatch
from fusion_p2p.peer.planning import Computed
from fusion_p2p.peer.presence import Presence
from fusion_p2p.swarm.announcement import MeasuredRates, Profile, Versions
from fusion_p2p.swarm.settings import WAN, SwarmSettings
from fusion_p2p.wire.swarm_messages import Holding

PROFILE = Profile(
    network="fusion",
    reachability="direct",
    versions=Versions(protocol=fusion_p2p.PROTOCOL, fusion="0.1.0", torch="2.13.0", python="3.11.7", codecs=("none",)),
    device="cpu",
    rates=MeasuredRates(matmul_flops=1e10, convolution_flops=1e10, attention_flops=1e10, memory_bytes_per_s=1e10),
    free_bytes=1 << 30,
)


def in_virtual_time(work: Coroutine[Any, Any, None]) -> None:
    """Run a test in which hours pass in milliseconds."""
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        runner.run(work)


class LoopClock:
    """The clock of the running event loop; its wall clock may be wrong."""

    def __init__(self, offset_s: float = 0.0) -> None:
        self._offset_s = offset_s

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 1.7e9 + self._offset_s + asyncio.get_running_loop().time()

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        return about_s

    def keep_step(self, moment: float) -> None:
        """Nobody pauses for its sake."""


class WakingClock(LoopClock):
    """One that has pauses end together, as the clock of a process does, in a phase of its own."""

    def __init__(self, phase_s: float, offset_s: float = 0.0) -> None:
        super().__init__(offset_s)
        self._phase_s = phase_s

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        return rounded_s(self.now() - self._phase_s, about_s, often=often)

    def keep_step(self, moment: float) -> None:
        self._phase_s = moment


async def at_once(compute: Callable[[], Computed]) -> Computed:
    """Virtual time has no worker threads."""
    return compute()


async def _live(presence: Presence, blobs: BlobServer, watch: LinkWatch | None) -> None:
    await blobs.start()
    async with beside(*([watch.run()] if watch else [])):
        await presence.run()


class Work:
    """What a peer of a test is doing."""

    def __init__(self) -> None:
        self.held: Holding | None = None
        self.done = 7

    def holding(self) -> Holding | None:
        return self.held

    def progress(self) -> int:
        return self.done


class World:
    """Peers by number of arrival. Use as an async context manager."""

    def __init__(self, seed: int, settings: SwarmSettings = WAN, *, measuring: bool = False) -> None:
        self.network = SimulatedNetwork(seed)
        self.settings = settings
        self.presences: dict[PeerId, Presence] = {}
        self.measuring = measuring
        self.work: dict[PeerId, Work] = {}
        self.nodes: dict[PeerId, SimulatedPeer] = {}
        self._tasks: dict[PeerId, asyncio.Task[None]] = {}

    async def __aenter__(self) -> World:
        await self.network.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self._tasks):
            await self.stop(peer)
        await self.network.__aexit__(kind, error, trace)

    def add(self, profile: Profile = PROFILE, back: SimulatedPeer | None = None, clock: LoopClock | None = None) -> Presence:
        """Start a peer, or one that crashed with its old identity."""
        node = self.network.join(identity=back.identity if back else None)
        work = Work()
        clock = clock or LoopClock()
        presence = Presence(node.transport, node.directory, node.identity, clock, profile, work, self.settings)
        self.presences[node.peer_id], self.work[node.peer_id], self.nodes[node.peer_id] = presence, work, node
        blobs = BlobServer(node.transport)
        Coordination(node.transport, presence, blobs, clock, self.settings, in_thread=at_once)
        watch = LinkWatch(node.transport, presence, work, clock) if self.measuring else None
        self._tasks[node.peer_id] = asyncio.get_running_loop().create_task(_live(presence, blobs, watch))
        return presence

    async def stop(self, peer: PeerId) -> None:
        """Ctrl+C: it says goodbye. A presence that failed fails the test here."""
        task = self._tasks.pop(peer)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        del self.presences[peer]

    async def kill(self, peer: PeerId) -> SimulatedPeer:
        """SIGKILL: everything of it ends without a word."""
        self.network.crash(peer)
        await self.stop(peer)
        return self.nodes[peer]

    def coordinators(self) -> list[Presence]:
        return [presence for presence in self.presences.values() if presence.coordinating]

    def agreed(self) -> bool:
        """One coordinator, followed by all."""
        return len(self.coordinators()) == 1 and len({presence.coordinator for presence in self.presences.values()}) == 1

    def complete(self) -> bool:
        """Agreed, and the coordinator hears exactly the living."""
        return self.agreed() and {peer.peer for peer in self.coordinators()[0].members()} == set(self.presences)

    def known_to_all(self) -> bool:
        """Complete, and everybody believes in exactly the living."""
        return self.agreed() and all({p.peer for p in one.members()} == set(self.presences) for one in self.presences.values())

    @property
    def leader(self) -> Presence:
        (leader,) = self.coordinators()
        return leader


async def eventually(condition: Callable[[], bool], within_s: float) -> float:
    """Wait until a condition holds; how long it took. AssertionError when it does not come true in time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while not condition():
        assert loop.time() - began < within_s, f"not within {within_s} s"
        await asyncio.sleep(0.05)
    return loop.time() - began


async def always(condition: Callable[[], bool], for_s: float) -> None:
    """A condition holds all the time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    while loop.time() - began < for_s:
        assert condition(), f"broken after {loop.time() - began:.2f} s"
        await asyncio.sleep(0.05)
