"""`Transport` on hivemind's p2pd: binary streams over one daemon that is watched and restarted.

A restart keeps identity and ports and serves the same protocols again; streams that were open fail with StreamClosed, as
they do when the other side goes. A daemon that does not answer any more is ended and counts as dead. More than MAX_RESTARTS
within RESTART_WINDOW_S are not a hiccup: then the transport has failed, and whoever waits in `watch` learns it in one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from fusion_p2p.clock import SystemClock
from fusion_p2p.errors import DeadlinePassed, FusionError, NetworkError, PeerUnreachable, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import by_reach, circuit_address, is_peer_id, is_relayed, on_all_hosts, one_peer
from fusion_p2p.net.base import StreamHandler
from fusion_p2p.net.hivemind_connections import Connections
from fusion_p2p.net.hivemind_control import READ_BUFFER_BYTES, DaemonGone, DaemonRefused, accept
from fusion_p2p.net.hivemind_daemon import Daemon, DaemonSettings, socket_folder
from fusion_p2p.net.hivemind_stream import CLOSE_TIMEOUT_S, HivemindStream
from fusion_p2p.net.pacing import Bandwidth
from fusion_p2p.net.ports import machine_hosts, reserved_ports

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW_S = 60.0
CHECK_S = 2.0
"""How often the daemon is looked after: whether it carried something, or else still answers,"""
ASK_S = 30.0
"""and how often it is asked even if it carries: it might do that only."""
ANSWER_S = 2.0
MAX_MISSED = 2
"""One answer that did not come in time is an accident: we may have been stopped together with it."""
RESTART_S = 30.0
HEAD_TIMEOUT_S = 5.0
"""The daemon writes the head of an incoming stream at once, or not at all."""


class HivemindTransport:
    """A `Transport` on one watched p2pd. Made by `hivemind_transport`."""

    def __init__(self, settings: DaemonSettings, folder: Path, daemon: Daemon) -> None:
        self.bandwidth = Bandwidth()
        self._clock = SystemClock()
        self._settings = settings
        self._folder = folder
        self._daemon = daemon
        self._listener = folder / "l"
        self._server: asyncio.Server | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._opened: weakref.WeakSet[HivemindStream] = weakref.WeakSet()
        self._serving: set[asyncio.Task[None]] = set()
        self._connections = Connections(lambda: self._daemon.control)
        self._meeting: asyncio.Task[None] | None = None
        self._addresses: tuple[str, ...] = ()
        self._restarted: list[Callable[[Daemon], Awaitable[None]]] = []

    @property
    def peer_id(self) -> PeerId:
        return self._daemon.peer_id

    @property
    def addresses(self) -> Sequence[str]:
        return self._addresses

    @property
    def daemon(self) -> Daemon:
        """The daemon of the moment, for the directory and for tests that kill it."""
        return self._daemon

    @property
    def is_relayed(self) -> bool:
        """Whether others reach us through a relay only."""
        return bool(self._settings.relays)

    def on_restart(self, callback: Callable[[Daemon], Awaitable[None]]) -> None:
        """Call back with each new daemon, before streams are opened on it."""
        self._restarted.append(callback)

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._accept, str(self._listener), limit=READ_BUFFER_BYTES)
        await self._read_addresses()
        self._supervisor = asyncio.create_task(self._supervise())

    async def watch(self) -> None:
        """Returns when the transport is closed; NetworkError when its daemon cannot be kept running."""
        if self._supervisor is not None:
            await asyncio.wait([self._supervisor])
            if not self._supervisor.cancelled():
                self._supervisor.result()

    def renew(self) -> None:
        """End the daemon so that a fresh one takes its place; counts as a death."""
        self._daemon.terminate()

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        if protocol in self._handlers:
            raise ValueError(f"{protocol} is already served")
        self._handlers[protocol] = handler
        await self._daemon.control.serve(protocol, self._listener)

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float = 10.0) -> HivemindStream:
        if not is_peer_id(peer):  # ids come from strangers, too
            raise PeerUnreachable(f"{peer[:40]!r} is no peer id")
        try:
            async with asyncio.timeout(timeout_s):
                stream = HivemindStream(await self._connections.open(peer, protocol, timeout_s), self._daemon.control)
        except TimeoutError:
            raise DeadlinePassed(f"{peer} did not take a {protocol} stream within {timeout_s:g} s") from None
        self._opened.add(stream)
        self._connections.ways.met(peer, time.monotonic())
        return stream

    async def connect(self, addresses: Sequence[str], *, timeout_s: float = 10.0) -> PeerId:
        targets = one_peer(addresses, own=self.peer_id)
        self._connections.ways.dialling(targets)
        await self._connections.dial(targets[0].peer, [target.dial for target in targets], timeout_s)
        return targets[0].peer

    def remember(self, addresses: Sequence[str]) -> None:
        self._connections.ways.heard(one_peer(addresses, own=self.peer_id))

    async def disconnect(self, peer: PeerId) -> None:
        """Drop the connections to a peer, so that the next dial is a fresh one."""
        await self._connections.disconnect(peer)

    async def close(self) -> None:
        background = [task for task in (self._supervisor, self._meeting) if task is not None]
        for task in background:
            task.cancel()
        if background:
            await asyncio.wait(background)
        if self._server is not None:
            self._server.close()
        for stream in list(self._opened):
            stream.abort()
        for task in self._serving:
            task.cancel()
        if self._serving:
            await asyncio.wait(self._serving, timeout=2 * CLOSE_TIMEOUT_S)
        if self._daemon.alive:
            await self._daemon.stop()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream; whatever its handler meets ends this stream only."""
        task = asyncio.current_task()
        if task is None:  # asyncio runs this in a task of its own
            return
        self._serving.add(task)
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                raw = await accept(reader, writer)
            stream = HivemindStream(raw, self._daemon.control)
            self._connections.ways.met(raw.remote, time.monotonic())
            await self._handlers[raw.protocol](stream)
        except StreamClosed as error:  # how every fetch ends
            logger.debug("incoming stream ended: %s", error)
        except (FusionError, TimeoutError) as error:
            logger.info("incoming stream ended: %s", error)
        except asyncio.CancelledError:
            writer.transport.abort()  # we are closing down; the task must not be reported as failed
        finally:
            self._serving.discard(task)
            writer.close()

    async def _read_addresses(self) -> None:
        if self.is_relayed:
            self._addresses = by_reach(circuit_address(relay, self.peer_id) for relay in self._settings.relays)
            return
        _, seen = await self._daemon.control.identify()
        direct = [address for address in seen if not is_relayed(address)]
        if not self._settings.announce:
            direct = [*on_all_hosts(direct, self._settings.listen, machine_hosts())]
        self._addresses = by_reach(f"{address}/p2p/{self.peer_id}" for address in direct)

    async def _supervise(self) -> None:
        """Keep a daemon running until cancelled; NetworkError when that cannot be done."""
        restarts: deque[float] = deque(maxlen=MAX_RESTARTS)
        while True:
            said = await self._until_dead()
            now = time.monotonic()
            if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW_S:
                raise NetworkError(
                    f"the local network daemon p2pd died {MAX_RESTARTS + 1} times in {RESTART_WINDOW_S:g} s; it said: {said}"
                )
            restarts.append(now)
            logger.warning("the local network daemon p2pd died (%s): starting it again", said)
            try:
                async with asyncio.timeout(RESTART_S):
                    await self._restart()
            except NetworkError as error:  # it died again meanwhile, which the next turn counts
                logger.warning("%s", error)
            except TimeoutError:
                self._daemon.kill()

    async def _until_dead(self) -> str:
        """Until the daemon ends, or must be ended because it hangs; the last thing it said."""
        ending = asyncio.ensure_future(self._daemon.wait())
        missed = 0
        try:
            while not ending.done():
                await asyncio.wait([ending], timeout=self._clock.pause_s(CHECK_S))
                missed = 0 if ending.done() or await self._answers() else missed + 1
                if missed == MAX_MISSED:
                    self._daemon.kill()
                    await ending
                    return f"it did not answer for {MAX_MISSED * ANSWER_S:g} s"
            return ending.result()
        finally:
            ending.cancel()

    async def _answers(self) -> bool:
        now, control = time.monotonic(), self._daemon.control
        if now - control.answered_at < (ASK_S if now - control.carried_at < CHECK_S else CHECK_S):
            return True
        try:
            async with asyncio.timeout(ANSWER_S):
                await control.identify()
        except TimeoutError:
            return False
        except (DaemonRefused, DaemonGone):
            return True  # it ends, which is noticed anyway
        return True

    async def _restart(self) -> None:
        await self._daemon.stop()
        self._daemon = await Daemon.start(self._settings, self._folder)
        for protocol in self._handlers:
            await self._daemon.control.serve(protocol, self._listener)
        await self._read_addresses()
        self._meeting = asyncio.create_task(self._connections.meet_again(time.monotonic()))
        for callback in self._restarted:
            await callback(self._daemon)


@contextlib.asynccontextmanager
async def hivemind_transport(settings: DaemonSettings) -> AsyncIterator[HivemindTransport]:
    """A running transport, closed at the end. ConfigError or NetworkError when the daemon does not start."""
    with socket_folder() as folder, reserved_ports(settings.listen) as listen:
        settings = dataclasses.replace(settings, listen=listen)
        transport = HivemindTransport(settings, folder, await Daemon.start(settings, folder))
        try:
            await transport.start()
            yield transport
        finally:
            await transport.close()
