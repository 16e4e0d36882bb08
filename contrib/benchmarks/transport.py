"""What our framing costs: one-way frames of 1 MiB between two processes, against hivemind's raw binary stream.

Both ways use the same two p2pd daemons, one after the other in turn, so that a noisy machine disturbs both alike. The framed
way is that of value lanes: a header, checked, then the payload in pieces, each drained, read into one buffer. The raw way is
`P2P.call_binary_stream_handler` with whole 1 MiB writes. Also: how much a sender grows while its reader reads nothing.

    python -m contrib.benchmarks.transport
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psutil
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from fusion_p2p.errors import WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import JobId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.bulk import Outgoing, read_bulk
from fusion_p2p.net.hivemind_daemon import DaemonSettings
from fusion_p2p.net.hivemind_transport import HivemindTransport, hivemind_transport
from fusion_p2p.net.identity import Identity
from fusion_p2p.wire.frames import (
    HEADER_BYTES,
    Direction,
    Edge,
    FrameKind,
    Header,
    Moment,
    RunId,
    decode_header,
    encode_header,
)

NUM_PAIRS = 10
PAIR_S = 2.0
FRAME_BYTES = 1 << 20
FRAMED, RAW, STUCK = "/bench/framed/1", "/bench/raw/1", "/bench/stuck/1"
TYPE = TensorType((FRAME_BYTES // 4,), "float32", False)
HEADER = Header(
    kind=FrameKind.VALUE,
    run=RunId(JobId("0" * 32), 1, 1),
    moment=Moment(1, 0),
    edge=Edge(1, 0, 1, Direction.FORWARD),
    type=TYPE,
    payload_bytes=FRAME_BYTES,
)
STUCK_S = 1.0


def measure(num_pairs: int = NUM_PAIRS, pair_s: float = PAIR_S) -> dict[str, float]:
    """frame_rate_ratio: framed by raw bytes/s, median of pairs; both rates in MB/s; growth with a stuck reader in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        receiver = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "contrib.benchmarks.transport", "--receive", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with receiver:
            if receiver.stdout is None or receiver.stdin is None:
                raise RuntimeError("the receiver has no pipes")
            addresses = json.loads(receiver.stdout.readline())
            figures = asyncio.run(_send(Path(folder), addresses, num_pairs, pair_s))
            receiver.stdin.close()
    return figures


async def _send(folder: Path, addresses: list[str], num_pairs: int, pair_s: float) -> dict[str, float]:
    async with _transport(folder / "sender") as transport:
        peer = await transport.connect(addresses)
        framed, raw = [], []
        for _ in range(num_pairs):
            framed.append(await _framed_rate(transport, await transport.open(peer, FRAMED), pair_s))
            raw.append(await _raw_rate(transport, PeerID.from_base58(peer), pair_s))
        grown = await _stuck_growth(transport, await transport.open(peer, STUCK))
    ratios = [one / other for one, other in zip(framed, raw, strict=True)]
    return {
        "frame_rate_ratio": statistics.median(ratios),
        "frame_mb_per_s": statistics.median(framed) / 1e6,
        "raw_mb_per_s": statistics.median(raw) / 1e6,
        "slow_reader_growth_mib": grown / (1 << 20),
    }


async def _framed_rate(transport: HivemindTransport, stream: Stream, duration_s: float) -> float:
    payload, outgoing = memoryview(bytearray(FRAME_BYTES)), Outgoing(stream, transport.bandwidth)
    sent = arrived = 0
    ended = encode_header(Header(kind=FrameKind.NONE, run=HEADER.run, moment=HEADER.moment, edge=HEADER.edge))

    async def listen() -> None:
        nonlocal arrived
        while True:
            size = int.from_bytes(await stream.read_exactly(8), "big")
            outgoing.arrived(size)
            arrived += size

    async def one() -> None:
        nonlocal sent
        await stream.write(encode_header(HEADER))
        await outgoing.write(payload)
        sent += FRAME_BYTES

    async def finish() -> int:
        await stream.write(ended)
        await asyncio.gather(listening, return_exceptions=True)  # the receiver closes the stream when it has everything
        if arrived != sent:
            raise WireError(f"{arrived} of {sent} bytes have arrived")
        return arrived

    listening = asyncio.create_task(listen())
    rate = await _rate(one, finish, duration_s)
    outgoing.end()
    await stream.close()
    return rate


async def _raw_rate(transport: HivemindTransport, peer: PeerID, duration_s: float) -> float:
    _, reader, writer = await transport.daemon.p2p.call_binary_stream_handler(peer, RAW)
    payload = bytes(FRAME_BYTES)

    async def one() -> None:
        writer.write(payload)
        await writer.drain()

    async def finish() -> int:
        writer.write(bytes([1]) * FRAME_BYTES)
        await writer.drain()
        return int.from_bytes(await reader.readexactly(8), "big")

    rate = await _rate(one, finish, duration_s)
    writer.close()
    return rate


async def _rate(one: Callable[[], Awaitable[None]], finish: Callable[[], Awaitable[int]], duration_s: float) -> float:
    """Payload bytes per second from the first write to the receiver's count of all of them."""
    started = time.perf_counter()
    while time.perf_counter() - started < duration_s:
        await one()
    num_bytes = await finish()
    return num_bytes / (time.perf_counter() - started)


async def _stuck_growth(transport: HivemindTransport, stream: Stream) -> int:
    """Bytes this process grows by until its reader, who reads nothing, has stopped it."""
    process, payload = psutil.Process(), memoryview(bytearray(FRAME_BYTES))
    outgoing = Outgoing(stream, transport.bandwidth)
    before = process.memory_info().rss
    try:
        while True:
            async with asyncio.timeout(STUCK_S):
                await outgoing.write(payload)
    except TimeoutError:
        return int(process.memory_info().rss - before)


async def _receive(folder: Path) -> None:
    async with _transport(folder / "receiver") as transport:
        await transport.serve(FRAMED, partial(_receive_framed, transport))
        await transport.serve(STUCK, _receive_nothing)
        await transport.daemon.p2p.add_binary_stream_handler(RAW, _receive_raw)
        print(json.dumps(transport.addresses), flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def _receive_framed(transport: HivemindTransport, stream: Stream) -> None:
    async def arrived(size: int) -> None:
        await stream.write(size.to_bytes(8, "big"))

    while (header := decode_header(await stream.read_exactly(HEADER_BYTES))).kind is FrameKind.VALUE:
        if header.type != TYPE or header.payload_bytes != FRAME_BYTES:
            raise WireError("a frame of another type than declared")
        await read_bulk(stream, header.payload_bytes, transport.bandwidth.down, arrived)


async def _receive_nothing(stream: Stream) -> None:
    await asyncio.Event().wait()


async def _receive_raw(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    num_bytes, ended = 0, False
    while not ended:
        data = await reader.readexactly(FRAME_BYTES)
        ended = data[0] == 1
        num_bytes += FRAME_BYTES
    writer.write(num_bytes.to_bytes(8, "big"))
    await writer.drain()
    await reader.read(1)
    writer.close()


@asynccontextmanager
async def _transport(identity_path: Path) -> AsyncIterator[HivemindTransport]:
    Identity.load_or_create(identity_path)
    settings = DaemonSettings(identity_path=identity_path, listen=("/ip4/127.0.0.1/tcp/0",), find_peers=False)
    async with hivemind_transport(settings) as transport:
        yield transport


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receive", type=Path, help="be the receiver, with its key in this folder (used by the sender)")
    arguments = parser.parse_args()
    if arguments.receive:
        asyncio.run(_receive(arguments.receive))
        return
    from contrib.benchmarks.report import print_figures, write_figures

    figures = measure()
    print_figures("Transport", figures)
    write_figures("bench-main", figures)


if __name__ == "__main__":
    main()
