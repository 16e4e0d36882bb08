"""Joining over the real network in one process: bootstrap, relay, one id twice, a bootstrap that comes and goes."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from fusion_p2p.errors import ConfigError, NetworkError, SwarmUnreachable
from fusion_p2p.net.bootstrapping import remember_peers
from fusion_p2p.net.hivemind import NetworkSettings
from fusion_p2p.peer.bootstrap_node import BootstrapSettings, open_bootstrap
from fusion_p2p.peer.joining import Joined, JoinSettings, join_swarm
from fusion_p2p.peer.relay_child import RelayChildSettings
from tests.conformance.harness import echo, eventually
from tests.conformance.test_transport import exchange

PROTOCOL = "/test/echo/1"
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


def bootstrap_settings(folder: Path, *, relay: bool = False, listen: str = LOOPBACK) -> BootstrapSettings:
    child = RelayChildSettings(
        listen=LOOPBACK, identity_path=folder / "relay.key", reservations=9, circuits=9, duration_s=600, num_bytes=1 << 30
    )
    network = NetworkSettings(identity_path=folder / "boot.key", listen=(listen,))
    return BootstrapSettings(network=network, relay=child if relay else None)


def join_settings(folder: Path, name: str, *bootstraps: str, announce: tuple[str, ...] = ()) -> JoinSettings:
    network = NetworkSettings(identity_path=folder / f"{name}.key", listen=(LOOPBACK,), announce=announce)
    return JoinSettings(network=network, bootstraps=bootstraps, peers_file=folder / f"{name}.json", join_timeout_s=20)


async def talk(a: Joined, b: Joined) -> None:
    """Both ways."""
    for one, other in ((a, b), (b, a)):
        await one.transport.connect(other.transport.addresses)
        stream = await one.transport.open(other.transport.peer_id, PROTOCOL)
        await exchange(stream)
        await stream.close()


@pytest.mark.row(2)
@pytest.mark.row(3)
async def test_joining_says_what_it_does_and_what_others_can_dial(tmp_path: Path):
    lines: list[str] = []
    async with (
        open_bootstrap(bootstrap_settings(tmp_path)) as node,
        join_swarm(join_settings(tmp_path, "a", node.addresses[0]), lines.append) as joined,
    ):
        assert joined.reachability == "direct"
        assert abs(joined.clock_offset_s) < 1
        said = "\n".join(lines)
        for fragment in ("local daemon up", "bootstrap reached", "reachable: direct, at /ip4/127.0.0.1/", "only this machine"):
            assert fragment in said


@pytest.mark.slow
@pytest.mark.row(4)
async def test_a_peer_behind_a_relay_and_a_direct_one_talk_both_ways(tmp_path: Path):
    lines: list[str] = []
    async with open_bootstrap(bootstrap_settings(tmp_path, relay=True)) as node:
        hidden = join_settings(tmp_path, "hidden", node.addresses[0], announce=("/ip4/192.0.2.1/tcp/4001",))
        direct = join_settings(tmp_path, "direct", node.addresses[0])
        async with join_swarm(hidden, lines.append) as a, join_swarm(direct, lines.append) as b:
            assert (a.reachability, b.reachability) == ("relayed", "direct")
            assert a.transport.addresses == (f"{node.relays[0]}/p2p-circuit/p2p/{a.transport.peer_id}",)
            for joined in (a, b):
                await joined.transport.serve(PROTOCOL, echo)
            await talk(a, b)


@pytest.mark.row(4)
async def test_a_peer_that_no_relay_helps_is_outbound_only_and_told_so(tmp_path: Path):
    lines: list[str] = []
    async with open_bootstrap(bootstrap_settings(tmp_path)) as node:
        hidden = join_settings(tmp_path, "hidden", node.addresses[0], announce=("/ip4/192.0.2.1/tcp/4001",))
        async with join_swarm(hidden, lines.append) as joined:
            assert joined.reachability == "outbound-only"
            assert any("outbound-only" in line and "192.0.2.1" in line for line in lines)


@pytest.mark.row(8)
async def test_the_second_process_with_one_identity_is_refused_and_a_restart_is_not(tmp_path: Path):
    async with open_bootstrap(bootstrap_settings(tmp_path)) as node:
        settings = join_settings(tmp_path, "a", node.addresses[0])
        async with join_swarm(settings, print) as first:
            port = first.transport.addresses[0].split("/")[4]
            with pytest.raises(ConfigError, match=rf"identity in use by /ip4/127\.0\.0\.1/tcp/{port}"):
                async with join_swarm(settings, print):
                    pass
        async with join_swarm(settings, print) as again:
            assert again.reachability == "direct"


@pytest.mark.row(1)
async def test_remembered_peers_are_a_way_in_when_every_bootstrap_is_gone(tmp_path: Path):
    async with open_bootstrap(bootstrap_settings(tmp_path)) as node:
        gone = node.addresses[0]
        async with join_swarm(join_settings(tmp_path, "old", gone), print) as old:
            node.network.transport._supervisor.cancel()  # type: ignore[union-attr]
            os.kill(node.network.transport.daemon.pid, signal.SIGKILL)
            settings = join_settings(tmp_path, "new", gone)
            remember_peers(settings.peers_file, [gone, *old.transport.addresses])
            async with join_swarm(settings, print) as new:
                assert await new.directory.lookup() == {}
                assert new.reachability == "outbound-only", "an ordinary peer does not dial back"


@pytest.mark.row(1)
async def test_nobody_there_is_one_sentence_with_the_reason(tmp_path: Path):
    stranger = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
    settings = join_settings(tmp_path, "a", f"/ip4/127.0.0.1/tcp/9/p2p/{stranger}")
    hasty = JoinSettings(
        network=settings.network, bootstraps=settings.bootstraps, peers_file=settings.peers_file, join_timeout_s=2
    )
    with pytest.raises(SwarmUnreachable, match="refused") as caught:
        async with join_swarm(hasty, print):
            pass
    assert "\n" not in str(caught.value)


@pytest.mark.slow
async def test_a_bootstrap_that_was_away_is_met_again(tmp_path: Path):
    """Its guests come back by themselves, though nobody tells them."""
    async with (
        open_bootstrap(bootstrap_settings(tmp_path)) as node,
        join_swarm(join_settings(tmp_path, "a", node.addresses[0]), print) as joined,
    ):
        transport, first = node.network.transport, node.network.transport.daemon.pid
        os.kill(first, signal.SIGKILL)  # its daemon comes back on the same port; the greeting broke
        await eventually(lambda: transport.daemon.alive and transport.daemon.pid != first)
        async with asyncio.timeout(30):
            while joined.transport.peer_id not in await transport.daemon.control.peers():  # noqa: ASYNC110 - with a deadline
                await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.row(23)
async def test_a_daemon_that_cannot_be_kept_ends_the_body_with_one_sentence(tmp_path: Path):
    async def live() -> None:
        async with join_swarm(join_settings(tmp_path, "a", node.addresses[0]), print) as joined:
            transport = joined.transport
            while True:
                await eventually(lambda: transport.daemon.alive)
                os.kill(transport.daemon.pid, signal.SIGKILL)
                await eventually(lambda: not transport.daemon.alive)

    async with open_bootstrap(bootstrap_settings(tmp_path)) as node:
        with pytest.raises(NetworkError, match="p2pd died"):
            async with asyncio.timeout(40):
                await live()


@pytest.mark.row(22)
async def test_the_relay_child_is_restarted_on_its_port_and_ends_with_the_node(tmp_path: Path):
    async with open_bootstrap(bootstrap_settings(tmp_path, relay=True)) as node:
        relay = node.relay
        assert relay is not None
        first, addresses = relay.pid, node.relays
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await eventually(lambda: relay.pid not in (first, None), timeout_s=30)
        await eventually(lambda: node.relays == addresses)
    assert relay.pid is None
