"""A simulated network: a hundred peers in one event loop, with latency, bandwidth, partitions, freezes and crashes.

Under an event loop with virtual time (async-solipsism) hours pass in milliseconds, and the same seed gives the same run.

    async with SimulatedNetwork(seed=1) as network:
        a, b = network.join(), network.join()
        await a.transport.serve("/echo", handler)
        stream = await b.transport.open(a.peer_id, "/echo")
        network.partition([a.peer_id])      # or crash, freeze, set_link

As with p2pd: a crash is seen as the end of the stream; a partition is silence, and ends streams only after KEEPALIVE_S; a
frozen peer is silence for ever, though streams to it still open.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from fusion_p2p.errors import DeadlinePassed, FusionError, NetworkError, PeerUnreachable, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import one_peer
from fusion_p2p.net.base import StreamHandler
from fusion_p2p.net.identity import Identity
from fusion_p2p.net.memory_pipe import Link, Pipe, Wire
from fusion_p2p.net.pacing import Bandwidth
from fusion_p2p.net.records import MAX_LIFETIME_S, read_record

logger = logging.getLogger(__name__)

KEEPALIVE_S = 40.0
"""After this much silence of a partition a connection is given up (yamux's keep-alive, measured)."""


@dataclass(frozen=True, slots=True)
class SimulatedPeer:
    """What a peer has of the network."""

    identity: Identity
    transport: SimulatedTransport
    directory: SimulatedDirectory

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id


@dataclass(frozen=True, slots=True)
class _Stored:
    record: bytes
    sequence: int
    announced_at: float
    expires_at: float


class SimulatedNetwork:
    """All peers, the links between them, and the faults."""

    def __init__(self, seed: int, link: Link | None = None) -> None:
        self._rng = random.Random(seed)
        self._default_link = link or Link()
        self._wires: dict[tuple[PeerId, PeerId], Wire] = {}
        self._peers: dict[PeerId, SimulatedPeer] = {}
        self._listening: dict[str, PeerId] = {}
        """Who answers at which address."""
        self._numbers = itertools.count(1)
        self._groups: dict[PeerId, int] = {}
        self._partitioned_at = 0.0
        self._frozen: set[PeerId] = set()
        self._eased = asyncio.Event()
        self._streams: dict[SimulatedStream, None] = {}
        self._connections: set[frozenset[PeerId]] = set()
        self._records: dict[PeerId, _Stored] = {}

    async def __aenter__(self) -> SimulatedNetwork:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for peer in list(self._peers.values()):
            await peer.transport.close()

    def join(self, *, dialable: bool = True, identity: Identity | None = None) -> SimulatedPeer:
        """A new peer, or a crashed one's return with its identity. One that is not dialable can be reached only while it is
        connected. ValueError when its id is here already.
        """
        identity = identity or Identity.from_seed(self._rng.randbytes(32))
        if identity.peer_id in self._peers:
            raise ValueError(f"{identity.peer_id} has joined already")
        number = next(self._numbers)
        address = f"/ip4/10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}/tcp/4001"
        transport = SimulatedTransport(self, identity.peer_id, f"{address}/p2p/{identity.peer_id}", dialable)
        peer = SimulatedPeer(identity, transport, SimulatedDirectory(self, identity.peer_id))
        self._peers[identity.peer_id] = peer
        self._listening[address] = identity.peer_id
        return peer

    def set_link(self, a: PeerId, b: PeerId, link: Link) -> None:
        """Both directions between two peers, from now on."""
        for pair in ((a, b), (b, a)):
            self.wire(*pair).link = link

    def partition(self, *groups: Iterable[PeerId]) -> None:
        """Let the peers of each group, and all others as one more group, hear only each other."""
        self._groups = {peer: number for number, group in enumerate(groups, start=1) for peer in group}
        loop = asyncio.get_running_loop()
        self._partitioned_at = loop.time()
        loop.call_later(KEEPALIVE_S, self._give_up, self._partitioned_at)

    def heal(self) -> None:
        """End the partition; what was on its way arrives."""
        self._groups = {}
        self._pump()

    def reset_streams(self) -> int:
        """Break every open stream, as a relay does at its limit; peers and connections stay. How many ends there were."""
        streams = list(self._streams)
        for stream in streams:
            stream.break_now()
        return len(streams)

    def freeze(self, peer: PeerId) -> None:
        """The peer neither sends nor reads, but its connections stay."""
        self._frozen.add(peer)

    def thaw(self, peer: PeerId) -> None:
        self._frozen.discard(peer)
        self._pump()

    def crash(self, peer: PeerId) -> None:
        """The peer's process is gone: its streams end, nothing answers at its addresses. Its announcement lives on."""
        gone = self._peers.pop(peer)
        gone.transport.stop()
        self._listening = {address: listener for address, listener in self._listening.items() if listener != peer}
        for stream in [stream for stream in self._streams if stream.local == peer]:
            stream.end()
        self._connections = {pair for pair in self._connections if peer not in pair}

    def passes(self, source: PeerId, target: PeerId) -> bool:
        """Whether bytes get from one to the other now."""
        return not self._frozen & {source, target} and not self._parted(source, target)

    def wire(self, source: PeerId, target: PeerId) -> Wire:
        return self._wires.setdefault((source, target), Wire(self._default_link))

    async def dial(self, source: PeerId, target: PeerId) -> SimulatedPeer:
        """One round trip to a peer; PeerUnreachable, or never returns while the way is blocked."""
        await asyncio.sleep(self.wire(source, target).link.latency_s + self.wire(target, source).link.latency_s)
        while self._parted(source, target) or source in self._frozen:
            self._eased.clear()
            await self._eased.wait()
        if source == target:
            raise PeerUnreachable(f"{target} is this peer itself")
        peer, connection = self._peers.get(target), frozenset((source, target))
        if peer is None or source not in self._peers:
            raise PeerUnreachable(f"{target} cannot be dialled: refused: nothing listens there")
        if not peer.transport.dialable and connection not in self._connections:
            raise PeerUnreachable(f"{target} cannot be dialled: no answer")
        self._connections.add(connection)
        return peer

    def connect_stream(self, source: PeerId, target: SimulatedPeer, handler: StreamHandler) -> SimulatedStream:
        """The near end of a new stream; its far end is with `handler`."""
        there, back = self._pipe(source, target.peer_id), self._pipe(target.peer_id, source)
        there.opposite, back.opposite = back, there
        near = SimulatedStream(self, source, target.peer_id, back, there)
        far = SimulatedStream(self, target.peer_id, source, there, back)
        self._streams |= {near: None, far: None}
        target.transport.accept(far, handler)
        return near

    def forget(self, stream: SimulatedStream) -> None:
        self._streams.pop(stream, None)

    def at(self, address: str) -> PeerId | None:
        """Who answers at the address without its `/p2p/ID`."""
        return self._listening.get(address)

    def store(self, record: bytes, *, lifetime_s: float) -> None:
        """Put a sealed record into the directory, whoever sends it. WireError when forged; an older one changes nothing."""
        signer, sequence = read_record(record)
        now, stored = asyncio.get_running_loop().time(), self._records.get(signer)
        if stored is None or sequence >= stored.sequence:
            self._records[signer] = _Stored(record, sequence, now, now + lifetime_s)

    def records_seen_by(self, reader: PeerId) -> dict[PeerId, bytes]:
        """Living records; what is announced behind a partition is not seen."""
        now = asyncio.get_running_loop().time()
        return {
            peer: stored.record
            for peer, stored in self._records.items()
            if stored.expires_at > now and not (self._parted(reader, peer) and stored.announced_at >= self._partitioned_at)
        }

    def is_running(self, peer: PeerId) -> bool:
        return peer in self._peers

    def _parted(self, a: PeerId, b: PeerId) -> bool:
        return self._groups.get(a, 0) != self._groups.get(b, 0)

    def _pipe(self, source: PeerId, target: PeerId) -> Pipe:
        return Pipe(
            self.wire(source, target), self._rng, lambda: self.passes(source, target), lambda: target not in self._frozen
        )

    def _pump(self) -> None:
        self._eased.set()
        for stream in list(self._streams):
            stream.pump()

    def _give_up(self, partitioned_at: float) -> None:
        """Keep-alives were not answered: what the partition parts is closed, unless it has healed."""
        if self._groups and self._partitioned_at == partitioned_at:
            for stream in list(self._streams):
                if self._parted(stream.local, stream.remote):
                    stream.break_now()
            self._connections = {pair for pair in self._connections if not self._parted(*pair)}


class SimulatedStream:
    """One end of a simulated stream."""

    def __init__(self, network: SimulatedNetwork, local: PeerId, remote: PeerId, incoming: Pipe, outgoing: Pipe) -> None:
        self._network = network
        self.local = local
        self._remote = remote
        self._incoming = incoming
        self._outgoing = outgoing
        self._gone = f"{remote} closed the stream"

    @property
    def remote(self) -> PeerId:
        return self._remote

    async def read_exactly(self, count: int) -> bytes:
        data = await self._incoming.read(count, self._gone) if count else b""
        if len(data) == count:
            return data
        buffer = bytearray(data.ljust(count))
        await self.read_into(memoryview(buffer)[len(data) :])
        return bytes(buffer)

    async def read_some(self, buffer: memoryview) -> int:
        data = await self._incoming.read(len(buffer), self._gone)
        buffer[: len(data)] = data
        return len(data)

    async def read_into(self, buffer: memoryview) -> None:
        filled = 0
        while filled < len(buffer):
            filled += await self.read_some(buffer[filled:])

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        await self._outgoing.write(data, self._gone)

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """No more from here; the other side learns it after what was written."""
        self._outgoing.finish()
        self._incoming.discard()
        self._network.forget(self)

    def pump(self) -> None:
        self._incoming.pump()
        self._outgoing.pump()

    def break_now(self) -> None:
        self._incoming.break_now()
        self._outgoing.break_now()
        self._network.forget(self)


class SimulatedTransport:
    """A `Transport` of the simulated network."""

    def __init__(self, network: SimulatedNetwork, peer_id: PeerId, address: str, dialable: bool) -> None:
        self._network = network
        self._peer_id = peer_id
        self._address = address
        self.dialable = dialable
        self.bandwidth = Bandwidth()
        self._handlers: dict[str, StreamHandler] = {}
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def peer_id(self) -> PeerId:
        return self._peer_id

    @property
    def addresses(self) -> Sequence[str]:
        return (self._address,)

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        if protocol in self._handlers:
            raise ValueError(f"{protocol} is already served")
        self._handlers[protocol] = handler

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float = 10.0) -> SimulatedStream:
        try:
            async with asyncio.timeout(timeout_s):
                target = await self._network.dial(self._peer_id, peer)
        except TimeoutError:
            raise DeadlinePassed(f"{peer} did not take a {protocol} stream within {timeout_s:g} s") from None
        handler = target.transport.handler(protocol)
        if handler is None:
            raise PeerUnreachable(f"{peer} does not serve {protocol}")
        return self._network.connect_stream(self._peer_id, target, handler)

    async def connect(self, addresses: Sequence[str], *, timeout_s: float = 10.0) -> PeerId:
        targets = one_peer(addresses, own=self._peer_id)
        reasons = {}
        for target in targets:
            if (found := self._network.at(target.dial)) not in (target.peer, None):
                reasons[target.text] = f"other peer id: {found} answers there"
                continue
            try:
                async with asyncio.timeout(timeout_s):
                    await self._network.dial(self._peer_id, target.peer)
                return target.peer
            except TimeoutError:
                reasons[target.text] = f"no answer within {timeout_s:g} s"
            except PeerUnreachable as error:
                reasons[target.text] = str(error)
        raise PeerUnreachable("; ".join(f"{text}: {reason}" for text, reason in reasons.items()))

    def remember(self, addresses: Sequence[str]) -> None:
        one_peer(addresses, own=self._peer_id)  # every way is known here

    async def close(self) -> None:
        """Leave: the streams end for the others after what was written."""
        if self._network.is_running(self._peer_id):
            self._network.crash(self._peer_id)
        if self._serving:
            await asyncio.wait(self._serving)

    def handler(self, protocol: str) -> StreamHandler | None:
        return self._handlers.get(protocol)

    def accept(self, stream: SimulatedStream, handler: StreamHandler) -> None:
        task = asyncio.get_running_loop().create_task(_serve(stream, handler))
        self._serving.add(task)
        task.add_done_callback(self._served)

    def stop(self) -> None:
        """Cancel what serves streams; the handlers of a crashed peer run no further."""
        for task in self._serving:
            task.cancel()

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"{self._peer_id}: a stream handler failed", "exception": error, "task": task}
            asyncio.get_running_loop().call_exception_handler(context)


async def _serve(stream: SimulatedStream, handler: StreamHandler) -> None:
    try:
        await handler(stream)
    except StreamClosed as error:  # how every fetch ends
        logger.debug("incoming stream ended: %s", error)
    except FusionError as error:
        logger.info("incoming stream ended: %s", error)
    finally:
        await stream.close()


class SimulatedDirectory:
    """A `Directory` of the simulated network: as if every record were stored with everybody who can be heard."""

    def __init__(self, network: SimulatedNetwork, peer_id: PeerId) -> None:
        self._network = network
        self._peer_id = peer_id

    async def announce(self, record: bytes, *, lifetime_s: float) -> None:
        signer, _ = read_record(record)
        if signer != self._peer_id or not 0 < lifetime_s <= MAX_LIFETIME_S:
            raise ValueError(f"a directory publishes its own peer's records, for at most {MAX_LIFETIME_S:g} s")
        await self._round_trip()
        self._network.store(record, lifetime_s=lifetime_s)

    async def lookup(self) -> Mapping[PeerId, bytes]:
        await self._round_trip()
        return self._network.records_seen_by(self._peer_id)

    async def _round_trip(self) -> None:
        await asyncio.sleep(2 * self._network.wire(self._peer_id, self._peer_id).link.latency_s)
        if not self._network.is_running(self._peer_id):
            raise NetworkError("the directory does not answer")
