"""`fusion-peer bootstrap`: the node that others know the address of. It holds no model and sees no data.

It is a node of the directory, greets whoever joins (`net.hello`), dials them back as a stranger would, and runs a circuit relay
in a child process for those that nobody can dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_p2p.clock import SystemClock
from fusion_p2p.config import BootstrapConfig
from fusion_p2p.errors import NetworkError, SwarmUnreachable
from fusion_p2p.net.addresses import Reach, parse_listen_address, parse_peer_address, reach, reach_warning
from fusion_p2p.net.bootstrapping import reach_first
from fusion_p2p.net.dial_back import open_dialler
from fusion_p2p.net.hello import HelloHost, new_process
from fusion_p2p.net.hivemind import Network, NetworkSettings, open_network
from fusion_p2p.peer.background import beside
from fusion_p2p.peer.preflight import check_machine
from fusion_p2p.peer.relay_child import RelayChild, RelayChildSettings

logger = logging.getLogger(__name__)

MEBIBYTE = 1 << 20
OTHERS_TIMEOUT_S = 30.0
OTHERS_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapSettings:
    """What a bootstrap node is made of."""

    network: NetworkSettings
    others: tuple[str, ...] = ()
    """Full addresses of other bootstrap nodes."""
    relay: RelayChildSettings | None = None


@dataclass(frozen=True, slots=True)
class BootstrapNode:
    """A running bootstrap node."""

    network: Network
    relay: RelayChild | None

    @property
    def addresses(self) -> Sequence[str]:
        """What to give to `--bootstrap`, best first."""
        return self.network.transport.addresses

    @property
    def relays(self) -> Sequence[str]:
        return self.relay.addresses(self.addresses) if self.relay else ()


async def run_bootstrap(config: BootstrapConfig) -> int:
    """Serve until cancelled. ConfigError (addresses, port taken) or NetworkError (daemon or relay do not stay up)."""
    async with open_bootstrap(bootstrap_settings(config)) as node:
        for address in node.addresses:
            print(f"bootstrap node at {address}", flush=True)
        for address in node.relays:
            print(f"relay at {address}", flush=True)
        if warning := reach_warning(node.addresses):
            print(f"warning: {warning}", flush=True)
        print(f"join with: fusion-peer join --bootstrap {node.addresses[0]}", flush=True)
        await asyncio.Event().wait()
    return 0


@contextlib.asynccontextmanager
async def open_bootstrap(settings: BootstrapSettings) -> AsyncIterator[BootstrapNode]:
    """A running node, ended with the body; what cannot be kept running ends the body with its error."""
    check_machine()
    for address in settings.others:
        parse_peer_address(address)
    async with contextlib.AsyncExitStack() as stack:
        network = await stack.enter_async_context(open_network(settings.network))
        relay = await stack.enter_async_context(_running(settings.relay)) if settings.relay else None
        node = BootstrapNode(network, relay)
        dialler = await stack.enter_async_context(open_dialler(lambda: node.relays))
        host = HelloHost(SystemClock(), process=new_process(), dialler=dialler, relays=lambda: node.relays)
        await host.serve(network.transport)
        work = [network.transport.watch(), _meet_others(network, settings.others)]
        if relay is not None:
            work.append(relay.watch())
        await stack.enter_async_context(beside(*work))
        yield node


def bootstrap_settings(config: BootstrapConfig) -> BootstrapSettings:
    """The settings that a configuration means. AddressError for its addresses."""
    identity_path = config.identity or config.state_directory / "bootstrap.key"
    network = NetworkSettings(
        network=config.network,
        identity_path=identity_path,
        listen=config.listen,
        announce=config.announce,
        map_ports=not config.no_nat,
    )
    relay = None if config.no_relay else _relay_settings(config, identity_path)
    return BootstrapSettings(network=network, others=config.bootstrap, relay=relay)


def _relay_settings(config: BootstrapConfig, identity_path: Path) -> RelayChildSettings:
    return RelayChildSettings(
        listen=_relay_listen(config),
        identity_path=identity_path.with_name(f"{identity_path.stem}-relay.key"),
        reservations=config.relay_reservations,
        circuits=config.relay_circuits,
        duration_s=int(config.relay_duration_s),
        num_bytes=config.relay_mebibytes * MEBIBYTE,
    )


def _relay_listen(config: BootstrapConfig) -> str:
    """Where the relay listens: a node that is for this machine only has a relay that is, too."""
    listen = parse_listen_address(config.relay_listen)
    own = [parse_listen_address(address) for address in config.listen]
    if any(reach(address) is not Reach.LOOPBACK for address in own):
        return listen
    return "/".join([*own[0].split("/")[:3], *listen.split("/")[3:]])


@contextlib.asynccontextmanager
async def _running(settings: RelayChildSettings) -> AsyncIterator[RelayChild]:
    relay = RelayChild(settings)
    try:
        await relay.start()
        yield relay
    finally:
        await relay.stop()


async def _meet_others(network: Network, others: Sequence[str]) -> None:
    """Stay connected with the other bootstrap nodes, so that there is one directory."""
    while others:
        try:
            reached = await reach_first(network.transport, others, (), timeout_s=OTHERS_TIMEOUT_S, report=logger.info)
            await network.directory.join(dict.fromkeys(target.peer for target in reached))
        except (SwarmUnreachable, NetworkError) as error:
            logger.warning("other bootstrap nodes: %s", error)
        await asyncio.sleep(OTHERS_PAUSE_S)
