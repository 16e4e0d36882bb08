"""A libp2p circuit relay (v2) on py-libp2p: what it grants is configured, not left to chance.

It holds reservations of peers that cannot be dialled and joins two streams, one from each side, into a circuit; it sees only
encrypted bytes. The only module that imports libp2p, which cannot share a process with hivemind.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import Any

import multiaddr
import trio
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.tools.anyio_service import background_trio_service

from fusion_p2p.net.identity import Identity

STALLED_S = 300
"""A circuit whose reader takes nothing for so long is cut; less would cut peers that compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaySettings:
    """What the relay offers."""

    listen: tuple[str, ...]
    reservations: int
    """Peers that may be reached through it at once."""
    circuits: int
    """Circuits open at once per peer."""
    duration_s: int
    """Age at which a circuit is reset."""
    num_bytes: int
    """Bytes, both directions together, after which a circuit is reset."""


class SeparateCircuits(CircuitV2Protocol):
    """The protocol of py-libp2p, whose circuits end one by one.

    It remembers circuits by peer, and when one ends it closes whichever it remembers: a peer's reconnect died with what it
    replaced, and one of its neighbours' circuits with another's. Here each circuit closes its own two streams.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._active_relays = _RemembersNothing()

    async def _relay_data(self, src_stream: INetStream, dst_stream: INetStream, *circuit: Any) -> None:
        try:
            await super()._relay_data(src_stream, dst_stream, *circuit)
        finally:
            for stream in (dst_stream, src_stream):
                await self._close_stream(stream)


class _RemembersNothing(dict[ID, Any]):
    def __setitem__(self, peer: ID, streams: Any) -> None:
        pass


async def run_relay(settings: RelaySettings, identity: Identity) -> None:
    """Serve until standard input ends, which it does when the parent process is gone; print the address once it is up."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)  # it reports each end of a stream as an error
    host = new_host(key_pair=create_new_key_pair(identity.seed))
    limits = RelayLimits(
        duration=settings.duration_s,
        data=settings.num_bytes,
        max_circuit_conns=settings.circuits,
        max_reservations=settings.reservations,
    )
    protocol = SeparateCircuits(host, limits=limits, allow_hop=True, write_timeout=STALLED_S)
    listen = [multiaddr.Multiaddr(address) for address in settings.listen]
    async with host.run(listen_addrs=listen), background_trio_service(protocol):
        await protocol.event_started.wait()
        addresses = [str(address) for address in host.get_addrs()]
        print(json.dumps({"peer_id": identity.peer_id, "addresses": addresses}), flush=True)
        await _until_input_ends()


async def _until_input_ends() -> None:
    async with trio.lowlevel.FdStream(os.dup(0)) as parent:
        while await parent.receive_some(64):
            pass
