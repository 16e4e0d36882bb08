"""Dials a peer back from a daemon of its own, which the peer has never heard of, as a stranger would.

Only places the peer itself can be at are dialled: the host its own connection comes from, or our relays. Otherwise anybody
could make us knock at other people's doors. When its connection comes from our own network, what it announces is dialled as is.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fusion_p2p.errors import AddressError, NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import CIRCUIT, Reach, is_relayed, parse_peer_address, reach
from fusion_p2p.net.hello import ask_who
from fusion_p2p.net.hivemind_daemon import DaemonSettings, socket_folder
from fusion_p2p.net.hivemind_transport import HivemindTransport, hivemind_transport
from fusion_p2p.net.identity import Identity
from fusion_p2p.wire.hello_messages import DialBack

DIAL_TIMEOUT_S = 5.0
MAX_PARALLEL = 8


class Dialler:
    """Dials back over a transport that nobody else uses. Made by `open_dialler`."""

    def __init__(self, transport: HivemindTransport, relays: Callable[[], Sequence[str]]) -> None:
        self._transport = transport
        self._relays = relays
        self._turns: defaultdict[PeerId, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._places = asyncio.Semaphore(MAX_PARALLEL)

    async def dial_back(self, peer: PeerId, process: bytes, addresses: Sequence[str], seen_at: str) -> tuple[DialBack, ...]:
        """What came of each address, dialled one after the other and afresh."""
        turn = self._turns[peer]
        try:
            async with turn, self._places:
                return tuple([await self._one(peer, process, address, seen_at) for address in addresses])
        finally:
            if not turn.locked():
                self._turns.pop(peer, None)

    async def _one(self, peer: PeerId, process: bytes, address: str, seen_at: str) -> DialBack:
        try:
            if not await self._may_dial(peer, address, seen_at):
                return DialBack(address=address, reason="not dialled: that is not where your connection comes from")
            await self._transport.disconnect(peer)
            await self._transport.connect([address], timeout_s=DIAL_TIMEOUT_S)
            found = await ask_who(self._transport, peer)
        except (AddressError, NetworkError, WireError) as error:
            return DialBack(address=address, reason=_reason(address, error))
        finally:
            await self._transport.disconnect(peer)
        reason = "" if found == process else "another process with your peer id answers there"
        return DialBack(address=address, reason=reason)

    async def _may_dial(self, peer: PeerId, address: str, seen_at: str) -> bool:
        target = parse_peer_address(address)
        if target.peer != peer:
            return False
        if is_relayed(address):
            return address.split(CIRCUIT)[0] in self._relays()
        source = _host(seen_at)
        if source is None:
            return False
        if not source.is_global:
            return True
        if reach(address) is not Reach.PUBLIC:
            return False
        return source in await _hosts(address)


@asynccontextmanager
async def open_dialler(relays: Callable[[], Sequence[str]]) -> AsyncIterator[Dialler]:
    """A dialler on a daemon of its own, with a key of its own; it listens nowhere."""
    with socket_folder() as folder:
        identity_path = folder / "key"
        Identity.load_or_create(identity_path)
        async with hivemind_transport(DaemonSettings(identity_path=identity_path, listen=(), find_peers=False)) as transport:
            yield Dialler(transport, relays)


def _host(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The numeric host an address begins with; None for a relayed one and for names."""
    parts = address.split("/")
    if is_relayed(address) or len(parts) < 3 or parts[1] not in ("ip4", "ip6"):
        return None
    return ipaddress.ip_address(parts[2])


async def _hosts(address: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The hosts that a direct address means."""
    if (host := _host(address)) is not None:
        return {host}
    try:
        found = await asyncio.get_running_loop().getaddrinfo(address.split("/")[2], None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return set()
    return {ipaddress.ip_address(str(entry[4][0])) for entry in found}


def _reason(address: str, error: Exception) -> str:
    """Why, without repeating the address; as long as a message may carry."""
    return str(error).removeprefix(f"{address}: ")[:200]
