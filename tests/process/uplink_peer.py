"""One end of a narrow line: `give` sends values and a blob, and beats beside them; `take` says how late those were.

    python -m tests.process.uplink_peer take IDENTITY LISTEN
    python -m tests.process.uplink_peer give IDENTITY LISTEN ADDRESS_OF_THE_TAKER SECONDS

The taker prints its address, and at the end the figures as JSON. Both read the one clock of this machine.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import Digest, JobId, PeerId, digest_of
from fusion_p2p.net.base import Stream
from fusion_p2p.net.blobs import BlobReader, BlobServer
from fusion_p2p.net.hivemind import Network, NetworkSettings, open_network
from fusion_p2p.net.values import Expected, Payload, ValueReceiver, ValueSender
from fusion_p2p.wire.frames import Direction, Edge, Moment, RunId

PULSES, BEATS = "/test/pulses/1", "/test/beats/1"
RUN = RunId(JobId("5" * 32), 1, 1)
EDGE = Edge(9, 0, 1, Direction.FORWARD)
TYPE = TensorType((1 << 16,), "float32", True)
CREDITS = 3
BLOB = bytes(32 << 20)
PULSE_S = 0.1


@asynccontextmanager
async def network(identity: str, listen: str) -> AsyncIterator[Network]:
    async with open_network(NetworkSettings(identity_path=Path(identity), listen=(listen,), map_ports=False)) as opened:
        yield opened


class Taker:
    """Takes values, downloads the blob, and notes how late pulses and beats are and how many bytes come."""

    def __init__(self, here: Network) -> None:
        self._here = here
        self._receiver = ValueReceiver(here.transport)
        self._downloading: asyncio.Task[None] | None = None
        self.pulses: list[float] = []
        self.beats: list[float] = []
        self.ended = asyncio.Event()

    async def start(self) -> None:
        await self._receiver.start()
        self._receiver.open_inlet(RUN, self)
        await self._here.transport.serve(PULSES, self._hear_pulses)
        await self._here.transport.serve(BEATS, self._hear_beat)

    def expected(self, edge: Edge, moment: Moment, sender: PeerId) -> Expected:
        self._sender = sender
        return Expected(TYPE)

    def deliver(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        self._receiver.acknowledge(RUN, self._sender, edge, moment)

    async def _hear_pulses(self, stream: Stream) -> None:
        self._downloading = asyncio.create_task(self._download(stream.remote))
        try:
            while True:
                self.pulses.append(time.monotonic() - float(await stream.read_exactly(20)))
        finally:
            self._downloading.cancel()
            self.ended.set()

    async def _hear_beat(self, stream: Stream) -> None:
        self.beats.append(time.monotonic() - float(await stream.read_exactly(20)))
        await stream.write(b".")

    async def _download(self, holder: PeerId) -> None:
        async with BlobReader(self._here.transport, holder) as reader:
            await reader.content(Digest(digest_of(BLOB)), len(BLOB))

    def figures(self, seconds: float) -> dict[str, float]:
        down = self._here.transport.bandwidth.down.taken
        late = {"pulse_s": max(self.pulses), "beat_s": max(self.beats), "pulses": len(self.pulses), "beats": len(self.beats)}
        return {**late, "bytes_per_s": down / seconds}


async def take(identity: str, listen: str) -> None:
    async with network(identity, listen) as here:
        taker = Taker(here)
        await taker.start()
        print(here.transport.addresses[0], flush=True)
        began = time.monotonic()
        while not taker.pulses:
            began = time.monotonic()
            await asyncio.sleep(0.01)
        await taker.ended.wait()
        print(json.dumps(taker.figures(time.monotonic() - began)), flush=True)


async def give(identity: str, listen: str, address: str, seconds: str) -> None:
    async with network(identity, listen) as here:
        transport = here.transport
        taker = await transport.connect([address])
        blobs = BlobServer(transport)
        await blobs.start()
        blobs.offer(BLOB)
        sender = ValueSender(transport, RUN, {EDGE: CREDITS}, {1: taker}, local=_never, lost=lambda peer, why: None)
        for number in range(1000):
            sender.offer(EDGE, Moment(1, number), Payload(TYPE, memoryview(bytes(TYPE.num_bytes))))
        work = [asyncio.create_task(one) for one in (sender.run(), _pulse(here, taker), _beat(here, taker))]
        await asyncio.wait(work, timeout=float(seconds))
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)


def _never(edge: Edge, moment: Moment, payload: Payload) -> None:
    raise AssertionError("nothing is local here")


async def _pulse(here: Network, taker: PeerId) -> None:
    """On a stream that stays open, as an owner's."""
    stream = await here.transport.open(taker, PULSES)
    try:
        while True:
            await stream.write(f"{time.monotonic():020.6f}".encode())
            await asyncio.sleep(PULSE_S)
    finally:
        await stream.close()


async def _beat(here: Network, taker: PeerId) -> None:
    """On a stream of its own each, as those of the swarm; how late it is counts from before it is opened."""
    while True:
        said = f"{time.monotonic():020.6f}".encode()
        stream = await here.transport.open(taker, BEATS, timeout_s=20)
        await stream.write(said)
        await stream.read_exactly(1)
        await stream.close()
        await asyncio.sleep(5 * PULSE_S)


if __name__ == "__main__":
    asyncio.run({"take": take, "give": give}[sys.argv[1]](*sys.argv[2:]))
