"""What only the real network can get wrong: its daemon, its ports, its sockets, and what strangers put into its DHT."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from fusion_p2p.errors import ConfigError, NetworkError, PeerUnreachable, StreamClosed
from fusion_p2p.net.hivemind import Network, NetworkSettings, open_network
from fusion_p2p.net.hivemind_daemon import socket_folder
from fusion_p2p.net.hivemind_transport import MAX_RESTARTS
from fusion_p2p.net.identity import Identity, seal
from fusion_p2p.net.records import RECORD_DOMAIN, stamp
from tests.conformance.harness import connected, echo, eventually
from tests.conformance.test_directory import looked_up
from tests.conformance.test_transport import exchange

PROTOCOL = "/test/echo/1"


def settings(folder: Path, name: str, listen: str = "/ip4/127.0.0.1/tcp/0") -> NetworkSettings:
    return NetworkSettings(identity_path=folder / f"{name}.key", listen=(listen,))


@contextlib.asynccontextmanager
async def two_networks(folder: Path) -> AsyncIterator[tuple[Network, Network]]:
    async with open_network(settings(folder, "a")) as a, open_network(settings(folder, "b")) as b:
        await b.transport.connect(a.transport.addresses)
        await b.directory.join([a.transport.peer_id])
        yield a, b


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a Unix socket; those of pytest may not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.row(23)
async def test_a_dead_daemon_is_replaced_with_the_same_identity_port_and_records(tmp_path: Path):
    async with two_networks(tmp_path) as (a, b):
        await a.transport.serve(PROTOCOL, echo)
        record = seal(a.identity, bytes(8) + b"here", domain=RECORD_DOMAIN)
        await a.directory.announce(record, lifetime_s=60)
        stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
        await exchange(stream)
        addresses, first_pid = a.transport.addresses, a.transport.daemon.pid
        os.kill(first_pid, signal.SIGKILL)
        with pytest.raises(StreamClosed):
            async with asyncio.timeout(5):
                await stream.read_exactly(1)
        await stream.close()
        await eventually(lambda: a.transport.daemon.alive and a.transport.daemon.pid != first_pid)
        await connected(b.transport, addresses)
        stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
        await exchange(stream)
        await stream.close()
        assert a.transport.addresses == addresses
        await looked_up(b.directory, {a.identity.peer_id: record})


@pytest.mark.row(23)
async def test_a_daemon_that_keeps_dying_is_given_up_with_one_sentence(tmp_path: Path):
    async with open_network(settings(tmp_path, "a")) as a:
        failing = asyncio.create_task(a.transport.watch())
        for _ in range(MAX_RESTARTS + 1):
            await eventually(lambda: a.transport.daemon.alive)
            os.kill(a.transport.daemon.pid, signal.SIGKILL)
            await eventually(lambda: not a.transport.daemon.alive or failing.done())
        with pytest.raises(NetworkError, match="p2pd died"):
            async with asyncio.timeout(10):
                await failing
        with pytest.raises(NetworkError):
            await a.transport.open(a.transport.peer_id, PROTOCOL, timeout_s=3)


@pytest.mark.row(9)
@pytest.mark.parametrize("by", ["another program", "another peer"])
async def test_a_port_that_is_taken_is_named(tmp_path: Path, by: str):
    """Two p2pd would share a port without a word, so the second is kept out before it starts."""
    async with contextlib.AsyncExitStack() as stack:
        if by == "another peer":
            other = await stack.enter_async_context(open_network(settings(tmp_path, "other")))
            port = int(other.transport.addresses[0].split("/")[4])
        else:
            port = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            async with open_network(settings(tmp_path, "late", f"/ip4/127.0.0.1/tcp/{port}")):
                pass


async def test_a_host_that_is_not_ours_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"/ip4/192\.0\.2\.1/tcp/4001"):
        async with open_network(settings(tmp_path, "a", "/ip4/192.0.2.1/tcp/4001")):
            pass


@pytest.mark.row(2)
async def test_a_daemon_that_does_not_come_up_is_the_phase_that_failed(tmp_path: Path):
    slow = NetworkSettings(identity_path=tmp_path / "key", listen=("/ip4/127.0.0.1/tcp/0",), startup_timeout_s=0.0)
    with pytest.raises(NetworkError, match="local network daemon") as caught:
        async with open_network(slow):
            pass
    assert "no other machine was asked" in str(caught.value)


@pytest.mark.row(10)
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_temp_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    monkeypatch.setattr("tempfile.tempdir", str(closed))
    with pytest.raises(ConfigError, match="TMPDIR"), socket_folder():
        pass


@pytest.mark.row(10)
def test_a_temp_folder_with_too_long_a_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(ConfigError, match="TMPDIR"), socket_folder():
        pass


CHILD = """
import asyncio, sys
from pathlib import Path
from fusion_p2p.net.hivemind import NetworkSettings, open_network
async def main():
    async with open_network(NetworkSettings(identity_path=Path(sys.argv[1]), listen=("/ip4/127.0.0.1/tcp/0",))) as network:
        print(network.transport.daemon.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.row(22)
def test_nothing_outlives_a_killed_process_for_long(short_folder: Path):
    """The daemon goes by itself; the sockets go at the next start."""
    environment = {**os.environ, "TMPDIR": str(short_folder), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", CHILD, str(short_folder / "key")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        daemon = psutil.Process(int(process.stdout.readline()))
        [parent] = short_folder.glob("fusion-p2p-*")
        [stale] = parent.iterdir()
        assert stale.name.startswith(f"{process.pid}-")
        started = time.monotonic()
        process.kill()
        gone, _ = psutil.wait_procs([daemon], timeout=5)
    assert gone or daemon.status() == psutil.STATUS_ZOMBIE
    assert time.monotonic() - started < 5
    assert stale.exists()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not stale.exists()
        process.send_signal(signal.SIGTERM)


@pytest.mark.row(38)
async def test_a_record_that_nobody_stores_is_the_callers_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def refused(*arguments: object, **options: object) -> bool:
        return False

    async with two_networks(tmp_path) as (a, _):
        monkeypatch.setattr(a.directory._running(), "store", refused)
        record = seal(a.identity, (1).to_bytes(8, "big"), domain=RECORD_DOMAIN)
        with pytest.raises(NetworkError, match="nobody in the directory stored our announcement"):
            await a.directory.announce(record, lifetime_s=60)


@pytest.mark.row(39)
async def test_the_directory_refuses_what_is_not_the_subkeys_own(tmp_path: Path):
    """A stranger with a changed client: forged, replayed with a longer life, under another's name, too large."""
    stranger = Identity.from_seed(bytes(range(32)))
    async with two_networks(tmp_path) as (a, b):
        record = seal(b.identity, (1).to_bytes(8, "big"), domain=RECORD_DOMAIN)
        await b.directory.announce(record, lifetime_s=60)
        node, key = a.directory._running(), b.directory._key_of(b.identity.peer_id)
        later = time.time() + 300
        own = seal(stranger, (2).to_bytes(8, "big"), domain=RECORD_DOMAIN)
        attempts = {
            "somebody else's record": stamp(stranger, own, later),
            "stamped by a stranger": stamp(stranger, record, later),
            "not sealed": b"noise",
            "no bytes": {"a": 1},
            "an old stamp with a longer life": stamp(b.identity, record, later - 100),
            "too large": stamp(b.identity, seal(b.identity, bytes(4000), domain=RECORD_DOMAIN), later),
        }
        for what, value in attempts.items():
            assert not await node.store(key, value, later, subkey=str(b.identity.peer_id)), what
        assert not await node.store(key, stamp(stranger, own, later), later), "without a subkey"
        year = time.time() + 365 * 86_400
        assert not await node.store(key, stamp(b.identity, record, year), year, subkey=str(b.identity.peer_id)), "for a year"
        assert await a.directory.lookup() == await b.directory.lookup() == {b.identity.peer_id: record}


async def test_swarms_of_other_names_do_not_see_each_other(tmp_path: Path):
    async with two_networks(tmp_path) as (a, _):
        other = NetworkSettings(network="other", identity_path=tmp_path / "c.key", listen=("/ip4/127.0.0.1/tcp/0",))
        async with open_network(other) as c:
            await c.transport.connect(a.transport.addresses)
            await c.directory.join([a.transport.peer_id])
            await c.directory.announce(seal(c.identity, bytes(8), domain=RECORD_DOMAIN), lifetime_s=60)
            assert c.identity.peer_id in await c.directory.lookup()
            assert await a.directory.lookup() == {}


async def test_why_a_dial_failed_is_said_per_address(tmp_path: Path):
    async with two_networks(tmp_path) as (a, b):
        stranger = Identity.from_seed(bytes(32)).peer_id
        port = a.transport.addresses[0].split("/")[4]
        wrong = {
            f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}": f"other peer id: {a.transport.peer_id}",
            f"/ip4/127.0.0.1/tcp/9/p2p/{stranger}": "refused",
            f"/dns4/no-such-host.invalid/tcp/9/p2p/{stranger}": "name not found",
        }
        for _ in range(2):  # p2pd does not dial again at once: the reason stays known
            for address, reason in wrong.items():
                with pytest.raises(PeerUnreachable) as caught:
                    await b.transport.connect([address], timeout_s=5)
                assert reason in str(caught.value)
        with pytest.raises(PeerUnreachable) as caught:
            await b.transport.connect(list(wrong), timeout_s=5)
        for address, reason in wrong.items():
            assert f"{address}: {reason}" in str(caught.value)
