"""Counts what crosses the streams of a transport, whoever uses them: for caps on a volunteer's traffic.

What the daemon says by itself - handshakes, the directory's upkeep, the framing of encrypted packets - is not seen here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, StreamHandler, Transport
from fusion_p2p.net.pacing import Bandwidth


@dataclass(slots=True)
class Meter:
    """Bytes since the start, both ways together."""

    num_bytes: int = 0


class MeteredStream:
    """A stream whose bytes are counted: `net.base.Stream`."""

    def __init__(self, stream: Stream, meter: Meter) -> None:
        self._stream, self._meter = stream, meter

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    async def read_exactly(self, count: int) -> bytes:
        data = await self._stream.read_exactly(count)
        self._meter.num_bytes += count
        return data

    async def read_some(self, buffer: memoryview) -> int:
        size = await self._stream.read_some(buffer)
        self._meter.num_bytes += size
        return size

    async def read_into(self, buffer: memoryview) -> None:
        await self._stream.read_into(buffer)
        self._meter.num_bytes += buffer.nbytes

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        self._meter.num_bytes += memoryview(data).nbytes
        await self._stream.write(data)

    async def close(self) -> None:
        await self._stream.close()


class MeteredTransport:
    """A transport all of whose streams are counted: `net.base.Transport`."""

    def __init__(self, transport: Transport, meter: Meter) -> None:
        self._transport, self._meter = transport, meter

    @property
    def peer_id(self) -> PeerId:
        return self._transport.peer_id

    @property
    def addresses(self) -> Sequence[str]:
        return self._transport.addresses

    @property
    def bandwidth(self) -> Bandwidth:
        return self._transport.bandwidth

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        async def metered(stream: Stream) -> None:
            await handler(MeteredStream(stream, self._meter))

        await self._transport.serve(protocol, metered)

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        return MeteredStream(await self._transport.open(peer, protocol, timeout_s=timeout_s), self._meter)

    async def connect(self, addresses: Sequence[str], *, timeout_s: float = 10.0) -> PeerId:
        return await self._transport.connect(addresses, timeout_s=timeout_s)

    def remember(self, addresses: Sequence[str]) -> None:
        self._transport.remember(addresses)

    async def close(self) -> None:
        await self._transport.close()
