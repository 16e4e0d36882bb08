"""`Transport` on hivemind's p2pd: binary streams over one daemon that is watched and restarted.

A restart keeps identity and ports and serves the same protocols again; streams that were open fail with StreamClosed, as
they do when the other side goes. More than MAX_RESTARTS within RESTART_WINDOW_S are not a hiccup: then the transport has
failed, and whoever waits in `watch` learns it in one sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from fusion_p2p.errors import AddressError, DeadlinePassed, FusionError, NetworkError, PeerUnreachable, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import (
    PeerAddress,
    by_reach,
    circuit_address,
    is_peer_id,
    is_relayed,
    on_all_hosts,
    parse_peer_address,
)
from fusion_p2p.net.base import StreamHandler
from fusion_p2p.net.dialling import NAME_NOT_FOUND, reason_of, reasons_by_address
from fusion_p2p.net.hivemind_control import READ_BUFFER_BYTES, DaemonGone, DaemonRefused, RawStream, accept
from fusion_p2p.net.hivemind_daemon import Daemon, DaemonSettings, socket_folder
from fusion_p2p.net.ports import machine_hosts, reserved_ports
from fusion_p2p.wire.frames import MAX_CHUNK_BYTES

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
RESTART_WINDOW_S = 60.0
HEAD_TIMEOUT_S = 5.0
"""The daemon writes the head of an incoming stream at once, or not at all."""
CLOSE_TIMEOUT_S = 1.0
REUSE_TIMEOUT_S = 2.0
"""For a stream over a connection that is said to be there."""
STALE_CONNECTION = "connection failed"
"""What p2pd says of a connection that is closed, and that it would list as open for 2 s more."""
MAX_WAYS = 4096
"""Peers whose addresses we remember; the oldest are forgotten."""


class HivemindStream:
    """A `Stream` over p2pd."""

    def __init__(self, raw: RawStream) -> None:
        self._raw = raw

    @property
    def remote(self) -> PeerId:
        return self._raw.remote

    @property
    def address(self) -> str:
        """Where the other end is, as our daemon sees it; through a relay it ends in /p2p-circuit."""
        return self._raw.address

    async def read_exactly(self, count: int) -> bytes:
        try:
            return await self._raw.reader.readexactly(count)
        except (OSError, EOFError) as error:
            raise self._closed(error) from None

    async def read_into(self, buffer: memoryview) -> None:
        reader, filled = self._raw.reader, 0
        try:
            while filled < len(buffer):
                data = await reader.read(len(buffer) - filled)
                if not data:
                    raise EOFError
                buffer[filled : filled + len(data)] = data
                filled += len(data)
        except (OSError, EOFError) as error:
            raise self._closed(error) from None

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        writer, view = self._raw.writer, memoryview(data)
        try:
            for start in range(0, len(view), MAX_CHUNK_BYTES):
                writer.write(view[start : start + MAX_CHUNK_BYTES])
                await writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: asyncio's word for a transport that is closed already
            raise self._closed(error) from None

    async def close(self) -> None:
        writer = self._raw.writer
        writer.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await writer.wait_closed()
        except TimeoutError:
            writer.transport.abort()
        except OSError:
            return  # the other side was first

    def abort(self) -> None:
        """End the stream at once, whatever was still to be sent."""
        self._raw.writer.transport.abort()

    def _closed(self, error: Exception) -> StreamClosed:
        return StreamClosed(f"{self.remote} closed the stream {self._raw.protocol} ({type(error).__name__})")


class HivemindTransport:
    """A `Transport` on one watched p2pd. Made by `hivemind_transport`."""

    def __init__(self, settings: DaemonSettings, folder: Path, daemon: Daemon) -> None:
        self._settings = settings
        self._folder = folder
        self._daemon = daemon
        self._listener = folder / "l"
        self._server: asyncio.Server | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._handlers: dict[str, StreamHandler] = {}
        self._opened: weakref.WeakSet[HivemindStream] = weakref.WeakSet()
        self._serving: set[asyncio.Task[None]] = set()
        self._ways: dict[PeerId, tuple[str, ...]] = {}
        self._reasons: dict[str, str] = {}
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
                stream = HivemindStream(await self._open(peer, protocol))
        except TimeoutError:
            raise DeadlinePassed(f"{peer} did not take a {protocol} stream within {timeout_s:g} s") from None
        self._opened.add(stream)
        return stream

    async def connect(self, addresses: Sequence[str], *, timeout_s: float = 10.0) -> PeerId:
        targets = [parse_peer_address(address, own=self.peer_id) for address in addresses]
        if len({target.peer for target in targets}) != 1:
            raise AddressError(f"these addresses are not those of one peer: {', '.join(addresses) or 'none given'}")
        peer, dials = targets[0].peer, [target.dial for target in targets]
        self._remember(peer, dials)
        reasons = await self._names_not_found(targets)
        known = [dial for dial in dials if dial not in reasons]
        try:
            async with asyncio.timeout(timeout_s):
                if known:
                    await self._daemon.control.connect(peer, known)
                    return peer
        except TimeoutError:
            reasons |= dict.fromkeys(known, f"no answer within {timeout_s:g} s")
        except DaemonRefused as error:
            reasons |= reasons_by_address(str(error), known, self._reasons)
            self._reasons |= {dial: reasons[dial] for dial in known}
        except DaemonGone as error:
            reasons |= dict.fromkeys(known, str(error))
        raise PeerUnreachable("; ".join(f"{target.text}: {reasons[target.dial]}" for target in targets))

    async def disconnect(self, peer: PeerId) -> None:
        """Drop the connections to a peer, so that the next dial is a fresh one."""
        with contextlib.suppress(DaemonRefused, DaemonGone):
            await self._daemon.control.disconnect(peer)

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
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

    async def _open(self, peer: PeerId, protocol: str) -> RawStream:
        """A stream over the connection there is, or else over a new one by the way we know.

        p2pd finds a way itself, too, but not one through a relay, and it tries addresses that swallow everything for 5 s.
        """
        control, dials = self._daemon.control, self._ways.get(peer)
        try:
            if dials is None or (stream := await self._open_connected(peer, protocol)) is None:
                if dials is not None:
                    await control.connect(peer, dials)
                return await control.open(peer, protocol)
        except DaemonRefused as error:
            raise self._unreachable(peer, protocol, str(error)) from None
        except DaemonGone as error:
            raise PeerUnreachable(f"{peer}: {error}") from None
        return stream

    async def _open_connected(self, peer: PeerId, protocol: str) -> RawStream | None:
        """A stream over the connection there is; None when there is none, or it is gone and p2pd does not know it yet."""
        control = self._daemon.control
        if peer not in await control.peers():
            return None
        try:
            async with asyncio.timeout(REUSE_TIMEOUT_S):
                return await control.open(peer, protocol)
        except TimeoutError:
            return None
        except DaemonRefused as error:
            if STALE_CONNECTION not in str(error):
                raise
        await control.disconnect(peer)
        return None

    def _unreachable(self, peer: PeerId, protocol: str, said: str) -> PeerUnreachable:
        if "protocols not supported" in said:
            return PeerUnreachable(f"{peer} does not serve {protocol}")
        dials = self._ways.get(peer, ())
        if not dials or "dial" not in said:
            return PeerUnreachable(f"{peer} cannot be reached: {reason_of(said)}")
        reasons = reasons_by_address(said, dials, self._reasons)
        return PeerUnreachable(f"{peer} cannot be dialled: " + "; ".join(f"{dial}: {why}" for dial, why in reasons.items()))

    def _remember(self, peer: PeerId, dials: Sequence[str]) -> None:
        self._ways.pop(peer, None)
        self._ways[peer] = tuple(dials)
        while len(self._ways) > MAX_WAYS:
            self._ways.pop(next(iter(self._ways)))

    async def _names_not_found(self, targets: Sequence[PeerAddress]) -> dict[str, str]:
        """p2pd drops names that do not resolve without a word: find them first."""
        loop, reasons = asyncio.get_running_loop(), {}
        for target in targets:
            _, kind, host, *_ = target.dial.split("/")
            if kind.startswith("dns"):
                try:
                    await loop.getaddrinfo(host, None)
                except socket.gaierror:
                    reasons[target.dial] = NAME_NOT_FOUND
        return reasons

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one incoming stream; whatever its handler meets ends this stream only."""
        task = asyncio.current_task()
        if task is None:  # asyncio runs this in a task of its own
            return
        self._serving.add(task)
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                raw = await accept(reader, writer)
            stream = HivemindStream(raw)
            await self._handlers[raw.protocol](stream)
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
            said = await self._daemon.wait()
            now = time.monotonic()
            if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW_S:
                raise NetworkError(
                    f"the local network daemon p2pd died {MAX_RESTARTS + 1} times in {RESTART_WINDOW_S:g} s; it said: {said}"
                )
            restarts.append(now)
            logger.warning("the local network daemon p2pd died (%s): starting it again", said)
            try:
                await self._restart()
            except NetworkError as error:  # it died again meanwhile, which the next turn counts
                logger.warning("%s", error)

    async def _restart(self) -> None:
        await self._daemon.stop()
        self._daemon = await Daemon.start(self._settings, self._folder)
        for protocol in self._handlers:
            await self._daemon.control.serve(protocol, self._listener)
        await self._read_addresses()
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
