"""A swarm of real presences on the simulated network, for scenarios: started, hurt, healed and looked at by its peers' ids."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import random
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass
from typing import Any
from unittest import mock

from fusion_p2p.errors import Incompatible, NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net import acquaintances
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.hello import HelloHost, greet, new_process
from fusion_p2p.net.identity import Identity
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer, SimulatedTransport
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.peer.background import beside
from fusion_p2p.peer.coordination import Coordination
from fusion_p2p.peer.presence import Presence
from fusion_p2p.peer.swarm_view import WorkView
from fusion_p2p.swarm.settings import WAN, SwarmSettings
from fusion_p2p.wire.swarm_messages import SWARM_PROTOCOL
from tests.protocol.swarm_world import PROFILE, LoopClock, WakingClock, Work, at_once
from tests.scenarios.hosts import Host, HostDirectory, HostTransport, Replays

FEWEST = 2
"""Nothing takes a peer away that is one of the last so many."""
REPLAY_WITHIN_S = 12.0
MAX_PEERS = 1000


@dataclass(eq=False)
class Machine:
    """One running peer."""

    host: Host
    presence: Presence
    work: WorkView
    task: asyncio.Task[None]
    started_at: float


class Swarm:
    """Use as an async context manager. `log` has a line per thing that was done."""

    def __init__(self, seed: int, link: Link, duplicates: float, settings: SwarmSettings = WAN) -> None:
        self.rng = random.Random(seed)
        self.link = link
        self.network = SimulatedNetwork(seed, link)
        self.settings = settings
        self.machines: dict[PeerId, Machine] = {}
        self._known: dict[PeerId, None] = {}
        """Everybody who has ever been here, and may come back."""
        self.log: list[str] = []
        self.broken: list[str] = []
        self.replays = Replays(random.Random(seed), {SWARM_PROTOCOL: duplicates}, REPLAY_WITHIN_S)
        # A sealed announcement is as good for one peer as for another; checking it costs more than all else here.
        self._checked_once = mock.patch.multiple(
            acquaintances,
            unseal=functools.lru_cache(4 * MAX_PEERS)(acquaintances.unseal),
            decode_announcement=functools.lru_cache(4 * MAX_PEERS)(acquaintances.decode_announcement),
        )
        self._nowhere = contextvars.copy_context()
        self._group_of: dict[PeerId, int] = {}
        self._doing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Swarm:
        self._checked_once.start()
        asyncio.get_running_loop().set_exception_handler(self._failed)
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everybody leaves; the swarm is broken when something is left behind."""
        await self.all_done()
        for peer in list(self.machines):
            self.resume(peer)
            self.leave(peer)
        await self.all_done()
        await self.replays.stop()
        await self.network.__aexit__(None, None, None)
        self._checked_once.stop()
        await asyncio.sleep(0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            self.broken.append(f"{len(left)} tasks left behind: {sorted(str(task.get_coro()) for task in left)[:3]}")
        if self.network._streams:
            self.broken.append(f"{len(self.network._streams)} streams left behind")

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that takes its time, while others go on; in no host, so that no pause stops it."""
        task = asyncio.get_running_loop().create_task(work, context=self._nowhere)
        self._doing.add(task)
        task.add_done_callback(self._doing.discard)

    async def all_done(self) -> None:
        """Until everything has been done that takes its time."""
        while self._doing:
            await asyncio.wait(self._doing)

    def note(self, what: str) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():8.2f} {what}")

    def start(self, skew_s: float = 0.0, identity: Identity | None = None) -> PeerId:
        """A new peer, or one that comes back with its identity."""
        node = self.network.join(identity=identity)
        host, clock = Host(), WakingClock(random.Random(node.peer_id).random(), skew_s)
        transport = HostTransport(node.transport, host, self.replays)
        self.machines[node.peer_id] = self._boot(node, host, transport, clock)
        self._known[node.peer_id] = None
        self.note(f"start {node.peer_id[-4:]}{' again' if identity else ''}, clock {skew_s:+.1f} s")
        return node.peer_id

    def _boot(self, node: SimulatedPeer, host: Host, transport: HostTransport, clock: LoopClock) -> Machine:
        """Everything of a peer, and its work if it has any."""
        blobs, hello = BlobServer(transport), HelloHost(clock, process=new_process())
        work = self._work(host, transport, blobs, clock)
        directory = HostDirectory(node.directory, host)
        presence = Presence(transport, directory, node.identity, clock, PROFILE, work, self.settings)
        Coordination(transport, presence, blobs, clock, self.settings, in_thread=at_once)

        async def live() -> None:
            await hello.serve(transport)
            await blobs.start()
            async with beside(*self._tasks_of(work)):
                await presence.run()

        return Machine(host, presence, work, host.start(live()), asyncio.get_running_loop().time())

    def _work(self, host: Host, transport: HostTransport, blobs: BlobServer, clock: LoopClock) -> WorkView:
        """What a peer does beside being here."""
        return Work()

    def _tasks_of(self, work: WorkView) -> list[Coroutine[Any, Any, None]]:
        return []

    def crash(self, peer: PeerId) -> Identity:
        """SIGKILL, also of a process that is paused."""
        self.note(f"crash {peer[-4:]}")
        node = self.network._peers[peer]
        self.network.crash(peer)
        self.do(self._end(self.machines.pop(peer), None))
        return node.identity

    def leave(self, peer: PeerId) -> None:
        self.note(f"leave {peer[-4:]}")
        self.do(self._end(self.machines.pop(peer), self.network._peers[peer].transport))

    async def _end(self, machine: Machine, transport: SimulatedTransport | None) -> None:
        machine.host.resume()
        machine.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await machine.task
        if transport is not None:
            await transport.close()

    def pause(self, peer: PeerId) -> None:
        self.note(f"pause {peer[-4:]}")
        self.machines[peer].host.pause()

    def resume(self, peer: PeerId) -> None:
        if peer in self.machines and self.machines[peer].host.paused:
            self.note(f"resume {peer[-4:]}")
            self.machines[peer].host.resume()

    def partition(self, group: Iterable[PeerId]) -> None:
        """These hear only each other, and so do all others; also those who come later."""
        group = list(group)
        self.note(f"partition: {' '.join(peer[-4:] for peer in group)}")
        self._group_of = dict.fromkeys(group, 1)
        self.network.partition(group)

    def heal(self) -> None:
        self.note("heal")
        self._group_of = {}
        self.network.heal()

    def set_link(self, peer: PeerId, link: Link) -> None:
        """To and from this peer; also for those who are away and come back."""
        self.note(f"link of {peer[-4:]}: {link.latency_s:g} s, loss {link.loss:g}")
        for other in self._known:
            if other != peer:
                self.network.set_link(peer, other, link)

    async def join_with_wrong_clock(self, wrong_s: float) -> None:
        """Whoever is an hour off is told by how much and does not join."""
        self.note(f"join with a clock wrong by {wrong_s:+.0f} s")
        hosts = [peer for peer in self.machines if self._group_of.get(peer, 0) == 0]
        if not hosts:
            return
        node = self.network.join()
        try:
            clock = LoopClock(wrong_s)
            greeting = await greet(node.transport, self.rng.choice(hosts), clock, network="fusion", process=new_process())
            self.broken.append(f"a clock wrong by {wrong_s:.0f} s was welcome: {greeting.clock_offset_s:.1f} s")
            await greeting.stream.close()
        except Incompatible as refusal:
            if not any(f" {abs(wrong_s) + off:.0f} s" in str(refusal) for off in range(-50, 51)):
                self.broken.append(f"wrong seconds in: {refusal}")
        except (NetworkError, WireError) as error:
            self.note(f"nobody looked at that clock: {error}")
        finally:
            await node.transport.close()

    def here(self) -> list[PeerId]:
        return sorted(self.machines)

    def coordinators(self) -> list[PeerId]:
        return [peer for peer, machine in sorted(self.machines.items()) if machine.presence.coordinating]

    def components(self) -> list[set[PeerId]]:
        """The peers that reach each other."""
        parts: dict[int, set[PeerId]] = {}
        for peer in self.machines:
            parts.setdefault(self._group_of.get(peer, 0), set()).add(peer)
        return list(parts.values())

    def why_unsettled(self) -> str:
        """Empty when each component has one coordinator, whom all follow, and all know who is here."""
        return next(filter(None, map(self._why_unsettled, self.components())), "")

    def _why_unsettled(self, component: set[PeerId]) -> str:
        tokens = {peer: self.machines[peer].presence.coordinator for peer in sorted(component)}
        leaders = [peer for peer in component if self.machines[peer].presence.coordinating]
        if len(leaders) != 1:
            return f"{len(leaders)} coordinators among {len(component)} peers"
        if len(set(tokens.values())) != 1:
            said = sorted(f"{peer[-4:]} follows {token.peer[-4:] if token else 'nobody'}" for peer, token in tokens.items())
            return ", ".join(said)
        for peer in [*leaders, *sorted(component)]:
            seen = self.machines[peer].presence.peers
            if seen != component:
                role = "coordinator" if peer in leaders else "follower"
                missing, extra = sorted(p[-4:] for p in component - seen), sorted(p[-4:] for p in seen - component)
                return f"{role} {peer[-4:]} of {len(component)} misses {missing}, believes in {extra}"
        return ""

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.broken.append(f"{context.get('message')}: {context.get('exception')!r}")
