"""Joining a swarm, in phases that each have their own time and their own sentence.

    1  local daemon up        p2pd runs and listens
    2  bootstrap reached      one of the given or remembered addresses answers
    3  hello                  versions, clock, our peer id used once, dial-back
    4  relayed                only when nobody can dial us: the daemon starts anew behind a relay, with the same identity

What the rest of the house gets is a `Joined`: streams, directory, and how others reach us. It ends when the local daemon cannot
be kept running; then the body of `join_swarm` is cancelled and a NetworkError says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_p2p.clock import SystemClock
from fusion_p2p.config import CommonConfig, JoinConfig, StatusConfig, TrainConfig
from fusion_p2p.errors import FusionError, NetworkError, SwarmUnreachable, WireError
from fusion_p2p.net.addresses import PeerAddress, reach_warning
from fusion_p2p.net.bootstrapping import MAX_REMEMBERED, Report, reach_first, remember_peers, remembered_peers
from fusion_p2p.net.hello import Greeting, HelloHost, greet, new_process
from fusion_p2p.net.hivemind import Network, NetworkSettings, open_network
from fusion_p2p.net.hivemind_directory import HivemindDirectory
from fusion_p2p.net.hivemind_transport import HivemindTransport
from fusion_p2p.net.identity import Identity, unseal
from fusion_p2p.net.records import RECORD_DOMAIN
from fusion_p2p.peer.background import beside
from fusion_p2p.peer.preflight import check_machine
from fusion_p2p.swarm.announcement import decode_announcement
from fusion_p2p.wire.hello_messages import Welcome
from fusion_p2p.wire.swarm_messages import Reachability

logger = logging.getLogger(__name__)

RELAY_TIMEOUT_S = 20.0
"""A relay grants a reservation within 2 s (measured); then the dial-back through it works."""
RELAY_RETRY_S = 1.0
REMEMBER_INTERVAL_S = 60.0
RECONNECT_TIMEOUT_S = 10.0
MAX_RECONNECT_PAUSE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """How a process joins."""

    network: NetworkSettings
    bootstraps: tuple[str, ...]
    peers_file: Path
    """Where peers seen last time are remembered."""
    join_timeout_s: float = 60.0
    needs_reach: bool = True
    """Others must be able to dial us; if not even a relay helps, we are outbound-only."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A swarm that we are part of."""

    identity: Identity
    transport: HivemindTransport
    directory: HivemindDirectory
    reachability: Reachability
    clock_offset_s: float
    """Our clock minus the bootstrap's."""


@dataclass(slots=True)
class _Link:
    """A running network and the bootstrap that greeted us."""

    network: Network
    reached: tuple[PeerAddress, ...]
    greeting: Greeting


def join_as_peer(config: JoinConfig, report: Report) -> contextlib.AbstractAsyncContextManager[Joined]:
    """Join as `fusion-peer join` does."""
    return join_swarm(_settings(config, "join", config.bootstrap, config.join_timeout_s), report)


def join_as_owner(config: TrainConfig, report: Report) -> contextlib.AbstractAsyncContextManager[Joined]:
    """Join as `fusion-peer train` does."""
    return join_swarm(_settings(config, "train", config.bootstrap, config.join_timeout_s), report)


def join_as_guest(config: StatusConfig, report: Report) -> contextlib.AbstractAsyncContextManager[Joined]:
    """Join to ask questions only, as `fusion-peer status` does: nobody needs to dial us."""
    settings = _settings(config, "status", config.bootstrap, config.timeout_s)
    return join_swarm(replace(settings, needs_reach=False), report)


@contextlib.asynccontextmanager
async def join_swarm(settings: JoinSettings, report: Report) -> AsyncIterator[Joined]:
    """Join, and stay joined until the body ends.

    ConfigError (machine, addresses, identity in use), NetworkError (local daemon), SwarmUnreachable, Incompatible.
    """
    check_machine()
    process = new_process()
    async with contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(_linked(settings, process, report))
        reachability = _reachability(link.greeting.welcome)
        if reachability != "direct" and settings.needs_reach and (relays := link.greeting.welcome.relays):
            relay = _nearest_relay(relays, link.reached)
            report(f"no other machine can dial this peer ({_reasons(link.greeting.welcome)}): going through the relay {relay}")
            await stack.aclose()
            settings = replace(settings, network=replace(settings.network, relays=(relay,)))
            link = await stack.enter_async_context(_linked(settings, process, report))
            reachability = await _await_relay(link, settings, process)
        _report_reach(reachability, link, settings, report)
        await stack.enter_async_context(
            beside(
                link.network.transport.watch(), _keep_in_touch(link, settings, process), _remember(link, settings.peers_file)
            )
        )
        network = link.network
        yield Joined(network.identity, network.transport, network.directory, reachability, link.greeting.clock_offset_s)


@contextlib.asynccontextmanager
async def _linked(settings: JoinSettings, process: bytes, report: Report) -> AsyncIterator[_Link]:
    """Phases 1 to 3."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    async with open_network(settings.network) as network:
        listening = network.transport.addresses
        report(f"local daemon up after {loop.time() - started:.1f} s: {listening[0] if listening else 'not listening'}")
        await HelloHost(SystemClock(), process=process).serve(network.transport)
        started = loop.time()
        link = await _meet(network, settings, process, report, settings.join_timeout_s)
        report(f"bootstrap reached after {loop.time() - started:.1f} s: {link.reached[0].text}")
        try:
            yield link
        finally:
            await link.greeting.stream.close()


async def _meet(network: Network, settings: JoinSettings, process: bytes, report: Report, timeout_s: float) -> _Link:
    """Dial, greet the first host that answers, and enter the directory once it is known that our peer id is ours alone."""
    remembered = remembered_peers(settings.peers_file)
    reached = await reach_first(network.transport, settings.bootstraps, remembered, timeout_s=timeout_s, report=report)
    greeting = await _best_greeting(network, settings, process, reached)
    await network.directory.join(dict.fromkeys(target.peer for target in reached))
    return _Link(network, tuple(reached), greeting)


async def _best_greeting(network: Network, settings: JoinSettings, process: bytes, reached: Sequence[PeerAddress]) -> Greeting:
    """That of the first host that dialled us back; a peer remembered from last time greets, but cannot say who reaches us."""
    said: list[str] = []
    unsure: Greeting | None = None
    for target in reached:
        try:
            greeting = await greet(
                network.transport, target.peer, SystemClock(), network=settings.network.network, process=process
            )
        except (NetworkError, WireError) as error:
            said.append(f"{target.text}: {error}")
            continue
        if unsure is not None:
            await unsure.stream.close()
        unsure = greeting
        if greeting.welcome.reachability != "unknown":
            break
    if unsure is None:
        raise SwarmUnreachable(f"bootstraps answered but did not greet us: {'; '.join(said)}")
    return unsure


async def _await_relay(link: _Link, settings: JoinSettings, process: bytes) -> Reachability:
    """Greet again until the dial-back through the relay works; outbound-only when it does not in time."""
    transport, host = link.network.transport, link.greeting.stream.remote
    with contextlib.suppress(TimeoutError, NetworkError, WireError):
        async with asyncio.timeout(RELAY_TIMEOUT_S):
            while link.greeting.welcome.reachability != "direct":
                await asyncio.sleep(RELAY_RETRY_S)
                await link.greeting.stream.close()
                link.greeting = await greet(transport, host, SystemClock(), network=settings.network.network, process=process)
    return "relayed" if link.greeting.welcome.reachability == "direct" else "outbound-only"


async def _keep_in_touch(link: _Link, settings: JoinSettings, process: bytes) -> None:
    """Stay greeted: when the host goes away, find it or another one again; behind a relay, get a new reservation."""
    while True:
        try:
            await link.greeting.stay()
        except (NetworkError, WireError) as error:
            logger.info("the bootstrap's greeting ended: %s", error)
        await link.greeting.stream.close()
        pause_s = 1.0
        while True:
            try:
                new = await _meet(link.network, settings, process, logger.info, RECONNECT_TIMEOUT_S)
            except FusionError as error:
                logger.warning("no bootstrap to be had, trying again in %.0f s: %s", pause_s, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RECONNECT_PAUSE_S)
            else:
                break
        link.reached, link.greeting = new.reached, new.greeting
        if settings.network.relays and await _await_relay(link, settings, process) != "relayed":
            link.network.transport.renew()  # p2pd itself asks a relay that failed again only after an hour


async def _remember(link: _Link, path: Path) -> None:
    """Write down now and then who is here: as somebody looked it up anyway, for a look-up asks many nodes."""
    while True:
        addresses, directory = [target.text for target in link.reached], link.network.directory
        with contextlib.suppress(NetworkError):
            found = directory.found or await directory.lookup()
            for record in itertools.islice(found.values(), MAX_REMEMBERED):
                addresses += _announced(record)
        remember_peers(path, addresses)
        await asyncio.sleep(REMEMBER_INTERVAL_S)


@functools.lru_cache(2 * MAX_REMEMBERED)
def _announced(record: bytes) -> tuple[str, ...]:
    """Where its peer is; remembered, because most records are those of the last time, and a signature takes long to check."""
    try:
        _, payload = unseal(record, domain=RECORD_DOMAIN)
        return decode_announcement(payload)[1].addresses[:1]
    except WireError:
        return ()


def _reachability(welcome: Welcome) -> Reachability:
    return "direct" if welcome.reachability == "direct" else "outbound-only"


def _reasons(welcome: Welcome) -> str:
    said = [f"{dial.address}: {dial.reason}" for dial in welcome.dial_backs if dial.reason]
    return "; ".join(said[:2]) or "nobody dialled back"


def _nearest_relay(relays: Sequence[str], reached: Sequence[PeerAddress]) -> str:
    """The relay address on the host by which we reached the bootstrap, for others surely reach that too."""
    hosts = {target.text.split("/")[2] for target in reached}
    return next((relay for relay in relays if relay.split("/")[2] in hosts), relays[0])


def _report_reach(reachability: Reachability, link: _Link, settings: JoinSettings, report: Report) -> None:
    if not settings.needs_reach:
        return
    addresses = link.network.transport.addresses
    if reachability == "direct":
        report(f"reachable: direct, at {addresses[0]}")
    elif reachability == "relayed":
        report(f"reachable: relayed, at {addresses[0]}")
    else:
        report(f"reachable: outbound-only, no other machine can dial this peer ({_reasons(link.greeting.welcome)})")
    if warning := reach_warning(addresses):
        report(f"warning: {warning}")


def _settings(config: CommonConfig, command: str, bootstraps: tuple[str, ...], join_timeout_s: float) -> JoinSettings:
    network = NetworkSettings(
        network=config.network,
        identity_path=config.identity or config.state_directory / f"{command}.key",
        listen=config.listen,
        announce=config.announce,
        map_ports=not config.no_nat,
    )
    peers_file = config.state_directory / f"peers-{config.network.encode().hex()}.json"
    return JoinSettings(network=network, bootstraps=bootstraps, peers_file=peers_file, join_timeout_s=join_timeout_s)
