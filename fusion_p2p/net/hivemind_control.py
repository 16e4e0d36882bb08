"""What is said to p2pd over its control socket, a Unix socket: one short connection per question, each closed again.

hivemind's own client leaves connections open when the daemon refuses or the caller gives up; so the questions are asked here,
with hivemind's messages. Of the two address types, hivemind's writes `/p2p/...` wrongly and py-multiaddr's `/unix/...`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import base58
from multiaddr import Multiaddr

from fusion_p2p.errors import NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.hivemind_parts import HivemindMultiaddr, p2pd_pb2, read_pbmsg_safe

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process when it is imported

READ_BUFFER_BYTES = 256 << 10
"""A stream stops reading from the daemon when it holds twice this."""


MAX_IDS = 4096
"""Whose two forms are remembered: base58 takes longer than anything else here."""


class DaemonRefused(NetworkError):
    """The daemon answered with an error; the text is the daemon's."""


class DaemonGone(NetworkError):
    """The daemon does not answer: it has died or is being restarted."""


@dataclass(frozen=True, slots=True)
class RawStream:
    """A stream as the daemon hands it over."""

    remote: PeerId
    address: str
    """The remote end of its connection, as the daemon sees it."""
    protocol: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class ControlSocket:
    """The questions p2pd answers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.answered_at = time.monotonic()
        """When it last did,"""
        self.carried_at = self.answered_at
        """and when it last handed us what somebody else sent on a stream: it lives, asked or not."""

    async def identify(self) -> tuple[PeerId, tuple[str, ...]]:
        """The daemon's peer id and the addresses it announces."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        addresses = (_address_text(data) for data in response.identify.addrs)
        return _peer_text(response.identify.id), tuple(address for address in addresses if address)

    async def connect(self, peer: PeerId, dials: Sequence[str]) -> None:
        """Dial a peer at addresses without their `/p2p/ID`. DaemonRefused with the reasons."""
        request = p2pd_pb2.ConnectRequest(peer=_peer_bytes(peer), addrs=[Multiaddr(dial).to_bytes() for dial in dials])
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=request))

    async def is_connected(self, peer: PeerId) -> bool:
        """Whether there is a connection to a peer."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        wanted = _peer_bytes(peer)
        return any(connected.id == wanted for connected in response.peers)

    async def disconnect(self, peer: PeerId) -> None:
        request = p2pd_pb2.DisconnectRequest(peer=_peer_bytes(peer))
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=request))

    async def peers(self) -> tuple[PeerId, ...]:
        """Who is connected."""
        response = await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS))
        return tuple(_peer_text(peer.id) for peer in response.peers)

    async def serve(self, protocol: str, listener: Path) -> None:
        """Hand incoming streams of `protocol` to the Unix socket `listener`."""
        request = p2pd_pb2.StreamHandlerRequest(
            addr=HivemindMultiaddr(f"/unix{listener}").to_bytes(), proto=[protocol], balanced=False
        )
        await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=request))

    async def open(self, peer: PeerId, protocol: str) -> RawStream:
        """A stream to a peer; the connection to the daemon becomes the stream."""
        request = p2pd_pb2.StreamOpenRequest(peer=_peer_bytes(peer), proto=[protocol])
        reader, writer = await self._connection()
        try:
            response = await self._exchange(
                reader, writer, p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=request)
            )
        except BaseException:  # cancelled or refused: nobody else knows of this connection
            writer.transport.abort()
            raise
        return _raw_stream(response.streamInfo, reader, writer)

    async def _ask(self, request: p2pd_pb2.Request) -> p2pd_pb2.Response:
        reader, writer = await self._connection()
        try:
            return await self._exchange(reader, writer, request)
        finally:
            writer.transport.abort()

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            return await asyncio.open_unix_connection(str(self._path), limit=READ_BUFFER_BYTES)
        except OSError as error:
            raise DaemonGone(f"the local network daemon p2pd does not answer: {error.strerror}") from None

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: p2pd_pb2.Request
    ) -> p2pd_pb2.Response:
        response = p2pd_pb2.Response()
        try:
            writer.write(_framed(request))
            await writer.drain()
            await read_pbmsg_safe(reader, response)
        except (OSError, EOFError, ValueError) as error:
            raise DaemonGone(f"the local network daemon p2pd broke off: {type(error).__name__}") from None
        self.answered_at = time.monotonic()
        if response.type == p2pd_pb2.Response.ERROR:
            raise DaemonRefused(response.error.msg)
        return response


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RawStream:
    """The head of an incoming stream, written by the daemon. DaemonGone when it is cut off."""
    info = p2pd_pb2.StreamInfo()
    try:
        await read_pbmsg_safe(reader, info)
    except (OSError, EOFError, ValueError) as error:
        raise DaemonGone(f"an incoming stream broke off before it began: {type(error).__name__}") from None
    return _raw_stream(info, reader, writer)


def _raw_stream(info: p2pd_pb2.StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> RawStream:
    return RawStream(_peer_text(info.peer), _address_text(info.addr), info.proto, reader, writer)


def _framed(request: p2pd_pb2.Request) -> bytes:
    """In one piece, for every write wakes the daemon: the length in seven bits a byte, then the message."""
    body: bytes = request.SerializeToString()
    head = bytearray()
    left = len(body)
    while left > 0x7F:
        head.append(left & 0x7F | 0x80)
        left >>= 7
    head.append(left)
    return bytes(head) + body


@functools.lru_cache(MAX_IDS)
def _peer_bytes(peer: PeerId) -> bytes:
    return bytes(base58.b58decode(peer))


@functools.lru_cache(MAX_IDS)
def _peer_text(data: bytes) -> PeerId:
    return PeerId(base58.b58encode(data).decode())


def _address_text(data: bytes) -> str:
    """The address in text; empty for one of a kind that py-multiaddr does not know."""
    try:
        return str(Multiaddr(data))
    except ValueError:
        return ""
