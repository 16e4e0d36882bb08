"""The real network of a peer: one key, one daemon, streams and directory on it. The only package part that imports hivemind.

async with open_network(settings) as network:
    await network.transport.connect([...])      # bootstraps are dialled after the daemon is up, by whoever knows them
    await network.directory.join([peer, ...])
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fusion_p2p.net.addresses import Reach, parse_announce_address, parse_listen_address, parse_peer_address, reach
from fusion_p2p.net.hivemind_daemon import DaemonSettings
from fusion_p2p.net.hivemind_directory import HivemindDirectory, hivemind_directory
from fusion_p2p.net.hivemind_transport import HivemindTransport, hivemind_transport
from fusion_p2p.net.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """What a peer's network is made of."""

    network: str = "fusion"
    """Swarms of different names do not see each other."""
    identity_path: Path
    """Created when it does not exist."""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    """Addresses to tell others instead of those we listen on."""
    relays: tuple[str, ...] = ()
    """Full addresses of relays; when given, others are told to reach us through them only."""
    map_ports: bool = True
    """Ask the router for a port; never done when we listen on loopback only."""
    startup_timeout_s: float = 15.0


@dataclass(frozen=True, slots=True)
class Network:
    """A peer's running network."""

    identity: Identity
    transport: HivemindTransport
    directory: HivemindDirectory


@contextlib.asynccontextmanager
async def open_network(settings: NetworkSettings) -> AsyncIterator[Network]:
    """Bring the network up. ConfigError (identity, addresses, port taken) or NetworkError (the daemon does not start)."""
    daemon_settings = _daemon_settings(settings)
    identity = Identity.load_or_create(settings.identity_path)
    async with (
        hivemind_transport(daemon_settings) as transport,
        hivemind_directory(settings.network, identity, transport) as directory,
    ):
        yield Network(identity, transport, directory)


def _daemon_settings(settings: NetworkSettings) -> DaemonSettings:
    listen = tuple(parse_listen_address(address) for address in settings.listen)
    return DaemonSettings(
        identity_path=settings.identity_path,
        listen=listen,
        announce=tuple(parse_announce_address(address) for address in settings.announce),
        relays=tuple(parse_peer_address(address).text for address in settings.relays),
        map_ports=settings.map_ports and any(reach(address) is not Reach.LOOPBACK for address in listen),
        startup_timeout_s=settings.startup_timeout_s,
    )
