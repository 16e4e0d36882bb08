"""Finding the first peer, in virtual time: all at once, reasons per address, back-off, spares."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fusion_p2p.errors import AddressError, SwarmUnreachable
from fusion_p2p.net.bootstrapping import MAX_REMEMBERED, reach_first, remember_peers, remembered_peers
from fusion_p2p.net.memory import SimulatedNetwork
from tests.protocol.swarm_world import in_virtual_time

STRANGER = "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"
NOBODY = f"/ip4/192.0.2.1/tcp/4001/p2p/{STRANGER}"


@pytest.mark.row(1)
def test_each_address_gets_its_own_reason_once():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            peer, other, hidden = network.join(), network.join(), network.join(dialable=False)
            changed = other.transport.addresses[0].replace(other.peer_id, STRANGER)
            given = [NOBODY, changed, hidden.transport.addresses[0]]
            lines: list[str] = []
            started = asyncio.get_running_loop().time()
            with pytest.raises(SwarmUnreachable) as caught:
                await reach_first(peer.transport, given, (), timeout_s=20, report=lines.append)
            assert asyncio.get_running_loop().time() - started == pytest.approx(20)
            assert "20 s" in str(caught.value)
            for address, reason in zip(given, ("refused", f"other peer id: {other.peer_id}", "no answer"), strict=True):
                assert address in str(caught.value)
                assert [line for line in lines if address in line and reason in line], (address, lines)
            assert len(lines) == 3, "a reason that does not change is said once"

    in_virtual_time(scenario())


@pytest.mark.row(1)
def test_a_bootstrap_that_is_down_for_a_while_is_waited_for():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            peer, boot = network.join(), network.join()
            address, identity = boot.transport.addresses[0], boot.identity
            network.crash(boot.peer_id)
            asyncio.get_running_loop().call_later(20, lambda: network.join(identity=identity))
            started = asyncio.get_running_loop().time()
            reached = await reach_first(peer.transport, [address], (), timeout_s=60, report=lambda line: None)
            assert [target.peer for target in reached] == [identity.peer_id]
            assert 20 <= asyncio.get_running_loop().time() - started < 30

    in_virtual_time(scenario())


@pytest.mark.row(1)
def test_one_silent_address_does_not_hold_up_the_others():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            peer, silent, boot = network.join(), network.join(), network.join()
            network.partition([silent.peer_id])
            given = [silent.transport.addresses[0], boot.transport.addresses[0]]
            started = asyncio.get_running_loop().time()
            reached = await reach_first(peer.transport, given, (), timeout_s=60, report=lambda line: None)
            assert [target.peer for target in reached] == [boot.peer_id]
            assert asyncio.get_running_loop().time() - started < 2

    in_virtual_time(scenario())


@pytest.mark.row(1)
def test_peers_seen_last_time_serve_as_bootstraps():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            peer, old = network.join(), network.join()
            remembered = ["nonsense", peer.transport.addresses[0], old.transport.addresses[0]]
            reached = await reach_first(peer.transport, [NOBODY], remembered, timeout_s=60, report=lambda line: None)
            assert [target.peer for target in reached] == [old.peer_id]

    in_virtual_time(scenario())


@pytest.mark.row(7)
def test_our_own_address_is_no_bootstrap():
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            peer = network.join()
            with pytest.raises(AddressError, match="own"):
                await reach_first(peer.transport, peer.transport.addresses, (), timeout_s=60, report=lambda line: None)

    in_virtual_time(scenario())


def test_remembered_peers_survive_and_damage_is_no_error(tmp_path: Path):
    path = tmp_path / "state" / "peers.json"
    assert remembered_peers(path) == []
    remember_peers(path, [f"/a/{number % 40}" for number in range(200)])
    assert remembered_peers(path) == [f"/a/{number}" for number in range(MAX_REMEMBERED)]
    for damage in ("", "{", "{}", '[1, "/ok", null]', "\xff"):
        path.write_text(damage)
        assert remembered_peers(path) in ([], ["/ok"])
