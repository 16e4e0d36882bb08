"""The two things the rest of the house knows of a network: streams to a peer by its id, and a directory of announcements.

Three implementations pass one conformance suite (`tests/conformance`): `memory.py` (simulated, virtual time), `hivemind.py`
(p2pd and its DHT), and hivemind through a circuit relay.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from fusion_p2p.ids import PeerId
from fusion_p2p.net.pacing import Bandwidth


class Stream(Protocol):
    """An authenticated, ordered, back-pressured, bidirectional byte stream. There is no half-close: end with a message."""

    @property
    def remote(self) -> PeerId:
        """Who is at the other end; proved by the transport, not claimed."""

    async def read_exactly(self, count: int) -> bytes:
        """The next `count` bytes. StreamClosed when the other side ended first."""

    async def read_some(self, buffer: memoryview) -> int:
        """What has come, at least one byte and at most the buffer: how many bytes. StreamClosed at the end."""

    async def read_into(self, buffer: memoryview) -> None:
        """Fill `buffer` from the stream, without a copy of the whole. StreamClosed when the other side ended first."""

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send, and wait while the other side is too slow (back-pressure). StreamClosed when it has gone."""

    async def close(self) -> None:
        """End the stream after what was written; never raises, never waits long."""


StreamHandler = Callable[[Stream], Awaitable[None]]
"""Serves one incoming stream; when it returns or raises, the stream is closed."""


class Transport(Protocol):
    """Streams between peers by peer id. Use as an async context manager or call `close`."""

    @property
    def peer_id(self) -> PeerId:
        """Our own id."""

    @property
    def addresses(self) -> Sequence[str]:
        """Full multiaddrs (`/ip4/.../tcp/.../p2p/ID`) by which others may dial us; best first."""

    @property
    def bandwidth(self) -> Bandwidth:
        """The caps on what is sent and received, and the bulk data on its way; kept by whoever moves bulk data."""

    async def serve(self, protocol: str, handler: StreamHandler) -> None:
        """Accept streams of `protocol`. ValueError when it is already served."""

    async def open(self, peer: PeerId, protocol: str, *, timeout_s: float = 10.0) -> Stream:
        """Open a stream. PeerUnreachable (not dialable, protocol not served) or DeadlinePassed; never hangs."""

    async def connect(self, addresses: Sequence[str], *, timeout_s: float = 10.0) -> PeerId:
        """Dial one peer at any of these addresses and remember the way. PeerUnreachable says why, per address."""

    def remember(self, addresses: Sequence[str]) -> None:
        """Note a way to a peer without dialling it now. AddressError as for `connect`."""

    async def close(self) -> None:
        """End all streams and whatever runs underneath."""


class Directory(Protocol):
    """Signed announcements that expire. Liveness never comes from here."""

    async def announce(self, record: bytes, *, lifetime_s: float) -> None:
        """Publish our sealed record (`identity.seal`), replacing the last. NetworkError when nobody stored it."""

    async def lookup(self) -> Mapping[PeerId, bytes]:
        """Every living record found, by the peer that signed it; invalid ones are left out."""
