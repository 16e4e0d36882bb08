"""Real daemons and processes that are killed, stopped and come back: how soon it is noticed, and how soon they are reached."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import psutil
import pytest

from fusion_p2p.errors import NetworkError, PeerUnreachable, StreamClosed
from fusion_p2p.net.base import Stream
from fusion_p2p.net.hivemind import Network, NetworkSettings, open_network
from fusion_p2p.net.hivemind_control import ControlSocket
from fusion_p2p.net.hivemind_transport import CHECK_S, HivemindTransport
from tests.conformance.echo_peer import PROTOCOL
from tests.conformance.harness import connected, echo, eventually
from tests.conformance.test_transport import exchange

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

SOON_S = 4.0
"""On a machine that tests fill. What must not show is p2pd's pause of 5 s after a failed dial; otherwise it is milliseconds."""
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
BLACK_HOLE = "/ip4/192.0.2.1/tcp/4001"


@dataclass
class EchoPeer:
    """Another process."""

    process: subprocess.Popen[str]
    daemon: psutil.Process
    address: str

    @property
    def peer(self) -> str:
        return self.address.rsplit("/", 1)[1]

    @property
    def listen(self) -> str:
        return self.address.split("/p2p/")[0]


@contextlib.contextmanager
def echo_peer(identity: Path, *others: str, listen: str = LOOPBACK) -> Iterator[EchoPeer]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.conformance.echo_peer", str(identity), listen, *others]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid, address = process.stdout.readline().split()
            yield EchoPeer(process, psutil.Process(int(pid)), address)
        finally:
            process.kill()


def is_gone(process: psutil.Process) -> bool:
    """Ended, though perhaps nobody has taken note of it."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


@contextlib.asynccontextmanager
async def network(folder: Path, name: str) -> AsyncIterator[Network]:
    async with open_network(NetworkSettings(identity_path=folder / f"{name}.key", listen=(LOOPBACK,))) as opened:
        yield opened


async def ended(stream: Stream) -> float:
    """Seconds until the stream is seen to end."""
    began = time.monotonic()
    with pytest.raises(StreamClosed):
        async with asyncio.timeout(20):
            await stream.read_exactly(1)
    return time.monotonic() - began


async def reached(transport: HivemindTransport, peer: str) -> float:
    """Seconds until a stream to the peer works, tried again and again."""
    began = time.monotonic()
    async with asyncio.timeout(60):
        while True:
            try:
                stream = await transport.open(peer, PROTOCOL, timeout_s=5)  # type: ignore[arg-type]
                try:
                    await exchange(stream)
                    return time.monotonic() - began
                finally:
                    await stream.close()
            except NetworkError:
                await asyncio.sleep(0.05)


async def refused(transport: HivemindTransport, peer: str, timeout_s: float = 5.0) -> float:
    """Seconds until it is said that the peer cannot be reached."""
    began = time.monotonic()
    with pytest.raises(NetworkError):
        await transport.open(peer, PROTOCOL, timeout_s=timeout_s)  # type: ignore[arg-type]
    return time.monotonic() - began


@pytest.mark.row(23)
async def test_a_killed_daemon_is_back_in_seconds_for_peers_that_try_all_the_time(tmp_path: Path) -> None:
    async with network(tmp_path, "a") as a, network(tmp_path, "b") as b:
        await a.transport.serve(PROTOCOL, echo)
        await b.transport.connect(a.transport.addresses)
        await a.transport.connect(b.transport.addresses)
        stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
        await exchange(stream)
        first = a.transport.daemon
        first.kill()
        end_s = await ended(stream)
        await stream.close()
        trying = asyncio.ensure_future(reached(b.transport, a.transport.peer_id))
        await eventually(lambda: a.transport.daemon is not first, timeout_s=30)
        up = time.monotonic()
        back_s = await trying
        up_s = time.monotonic() - up
        print(f"p2pd killed: stream ended after {end_s:.3f} s, reached {back_s:.2f} s later, {up_s:.2f} s after p2pd was up")
        assert end_s < SOON_S
        assert up_s < SOON_S, "p2pd does not dial for 5 s what it failed to dial"


@pytest.mark.row(23)
async def test_a_daemon_that_hangs_is_replaced(tmp_path: Path) -> None:
    async with network(tmp_path, "a") as a, network(tmp_path, "b") as b:
        await a.transport.serve(PROTOCOL, echo)
        await b.transport.connect(a.transport.addresses)
        hung, began = a.transport.daemon.pid, time.monotonic()
        os.kill(hung, signal.SIGSTOP)
        await eventually(lambda: a.transport.daemon.pid != hung, timeout_s=20)
        print(f"p2pd stopped: replaced after {time.monotonic() - began:.1f} s")
        await reached(b.transport, a.transport.peer_id)


async def test_a_daemon_that_carries_is_not_asked_whether_it_answers(tmp_path: Path) -> None:
    """What it is asked costs an idle peer more than everything else it does in that second."""
    async with network(tmp_path, "a") as a, network(tmp_path, "b") as b:
        await a.transport.serve(PROTOCOL, echo)
        await b.transport.connect(a.transport.addresses)
        stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
        with mock.patch.object(ControlSocket, "identify", autospec=True, side_effect=ControlSocket.identify) as asked:
            until = time.monotonic() + 2.5 * CHECK_S
            while time.monotonic() < until:
                await exchange(stream)
            assert asked.call_count == 0
            await stream.close()
            await eventually(lambda: asked.call_count > 0, timeout_s=3 * CHECK_S)


@pytest.mark.row(12)
async def test_a_killed_process_is_noticed_at_once_and_reached_as_soon_as_it_is_back(tmp_path: Path) -> None:
    async with network(tmp_path, "b") as b:
        with echo_peer(tmp_path / "a.key") as a:
            await b.transport.connect([a.address])
            stream = await b.transport.open(a.peer, PROTOCOL)  # type: ignore[arg-type]
            await exchange(stream)
            killed = time.monotonic()
            a.process.kill()
            end_s = await ended(stream)
            await eventually(lambda: is_gone(a.daemon))
            daemon_s = time.monotonic() - killed
            refusals = [await refused(b.transport, a.peer) for _ in range(5)]
        print(f"killed: stream ended after {end_s:.3f} s, daemon after {daemon_s:.3f} s, refused in {max(refusals):.3f} s")
        assert end_s < SOON_S
        assert daemon_s < SOON_S
        assert statistics.median(refusals) < 0.3
        trying = asyncio.ensure_future(reached(b.transport, a.peer))
        with contextlib.ExitStack() as stack:
            again = await asyncio.to_thread(stack.enter_context, echo_peer(tmp_path / "a.key", listen=a.listen))
            up = time.monotonic()
            assert again.peer == a.peer
            await trying
            print(f"restarted: reached {time.monotonic() - up:.3f} s after it said that it is up")
            assert time.monotonic() - up < SOON_S


async def test_a_black_hole_keeps_the_deadline_and_does_not_spoil_the_next_dial(tmp_path: Path) -> None:
    async with network(tmp_path, "a") as a, network(tmp_path, "b") as b:
        await a.transport.serve(PROTOCOL, echo)
        hole = f"{BLACK_HOLE}/p2p/{a.transport.peer_id}"
        began = time.monotonic()
        with pytest.raises(PeerUnreachable):
            await b.transport.connect([hole], timeout_s=0.5)
        assert time.monotonic() - began < SOON_S
        began = time.monotonic()
        await b.transport.connect([hole, *a.transport.addresses], timeout_s=5)
        assert time.monotonic() - began < SOON_S
        await reached(b.transport, a.transport.peer_id)


@pytest.mark.row(12)
async def test_a_process_that_stands_still_takes_little_from_the_others(tmp_path: Path) -> None:
    """Its daemon still accepts streams; what it is sent is bounded, and others are reached as before."""
    async with network(tmp_path, "b") as b, network(tmp_path, "c") as c:
        await c.transport.serve(PROTOCOL, echo)
        await b.transport.connect(c.transport.addresses)
        with echo_peer(tmp_path / "a.key") as a:
            await b.transport.connect([a.address])
            await reached(b.transport, a.peer)
            a.process.send_signal(signal.SIGSTOP)
            before = a.daemon.memory_info().rss
            try:
                for _ in range(150):
                    with contextlib.suppress(NetworkError, TimeoutError):
                        async with asyncio.timeout(0.2):
                            stream = await b.transport.open(a.peer, PROTOCOL, timeout_s=0.2)  # type: ignore[arg-type]
                            try:
                                await stream.write(bytes(1000))
                            finally:
                                await stream.close()
                assert await reached(b.transport, c.transport.peer_id) < SOON_S
                grown = a.daemon.memory_info().rss - before
                print(f"150 streams to a stopped process: its daemon grew by {grown >> 10} KiB")
                assert grown < 40 << 20
            finally:
                a.process.send_signal(signal.SIGCONT)
            assert await reached(b.transport, a.peer) < SOON_S


@pytest.mark.row(24)
async def test_nothing_grows_over_two_hundred_broken_streams_and_two_restarts(tmp_path: Path) -> None:
    async with network(tmp_path, "a") as a, network(tmp_path, "b") as b:
        await a.transport.serve(PROTOCOL, echo)
        await b.transport.connect(a.transport.addresses)
        await a.transport.connect(b.transport.addresses)
        us = psutil.Process()

        async def break_streams(count: int) -> None:
            for number in range(count):
                stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
                await exchange(stream)
                if number % 2:
                    stream.abort()
                await stream.close()

        def open_files() -> list[int]:
            return [us.num_fds(), *(psutil.Process(each.transport.daemon.pid).num_fds() for each in (a, b))]

        await break_streams(20)
        await eventually(lambda: not a.transport._serving)
        gc.collect()
        files, threads, memory = open_files(), threading.active_count(), us.memory_info().rss
        await break_streams(200)
        for _ in range(2):
            a.transport.daemon.kill()
            await reached(b.transport, a.transport.peer_id)
        await connected(b.transport, a.transport.addresses)
        await eventually(lambda: not a.transport._serving)
        gc.collect()
        await eventually(lambda: all(now <= before + 3 for now, before in zip(open_files(), files, strict=True)))
        assert threading.active_count() <= threads + 1
        assert us.memory_info().rss - memory < 8 << 20
