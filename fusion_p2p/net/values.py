"""Value streams: tensors from the slice that computes them to the slices that read them (`wire/frames.py`).

A *lane* is one stream from one process to another for one class of values, so that gradients never wait behind activations.
The sender obeys the reader's credits (`job.credits`), keeps what is not acknowledged, and after a reset opens the lane anew
and sends that again: a reset is a reconnect at the same micro-batch, not a death. The reader never waits for compute or
credit: what it reads has room by its credits, and is compared with the declared type before a byte is allocated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import PeerId
from fusion_p2p.job import credits as outboxes
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.bulk import Outgoing, read_bulk, write_small
from fusion_p2p.net.reconnecting import keep_open, until_reset
from fusion_p2p.wire.codecs import NONE, CodecSpec, accepts, effective, payload_bytes
from fusion_p2p.wire.frames import HEADER_BYTES, Direction, Edge, FrameKind, Header, Moment, RunId, decode_header, encode_header

VALUES_PROTOCOL = "/fusion/values/1"
MAX_ANSWERS = 4096
FIRST_FRAME_S = 120.0
"""A lane that carries nothing for so long after it was opened is closed; its sender opens it again when needed."""
MEASURED_BYTES = 256 << 10
MEASURED_S = 0.05
"""A value so large that took so long says how fast the link is; what came sooner was waiting in buffers."""
_GRADIENTS = (Direction.BACKWARD, Direction.TIED)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Payload:
    """A value as it crosses: its raw bytes, or no type and no bytes for an explicit nothing."""

    type: TensorType | None
    data: memoryview
    codec: str = "none"


NOTHING = Payload(None, memoryview(b""))


def lane_of(peer: PeerId, edge: Edge) -> tuple[PeerId, bool]:
    """Which stream to a peer carries an edge: (peer, whether it is the one for gradients)."""
    return peer, edge.direction in _GRADIENTS


class ValueSender:
    """Sends a run's values from this process. `lost` is told when a lane cannot go on.

    `credits` are those of all edges that begin here. Values for slices of this same process go to `local`, under the same
    credits, without a stream.
    """

    def __init__(
        self,
        transport: Transport,
        run: RunId,
        credits: Mapping[Edge, int],
        peer_of: Mapping[int, PeerId],
        *,
        local: Callable[[Edge, Moment, Payload], None],
        lost: Callable[[PeerId, str], None],
    ) -> None:
        self._transport, self._run, self._local, self._lost = transport, run, local, lost
        self._outbox = outboxes.Outbox(credits)
        self._kept: dict[tuple[Edge, Moment], Payload] = {}
        self._lane_of = {edge: lane_of(peer_of[edge.target], edge) for edge in credits}
        self._queues: dict[tuple[PeerId, bool], asyncio.Queue[outboxes.Send]] = {
            lane: asyncio.Queue() for lane in self._lane_of.values() if lane[0] != transport.peer_id
        }
        self.bytes_sent = 0

    @property
    def not_taken(self) -> Iterator[Moment]:
        """The moments of all values that their readers have not taken."""
        return (moment for _, moment in self._kept)

    async def run(self) -> None:
        """Keep all lanes open until cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._queues:
                group.create_task(self._keep_lane(lane))

    def offer(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        """Send this value as soon as its edge has a credit."""
        self._kept[edge, moment] = payload
        self._step(outboxes.Offered(edge, moment))

    def acknowledged(self, edge: Edge, moment: Moment) -> None:
        """A task here has taken a value that came from here."""
        self._step(outboxes.Acknowledged(edge, moment))

    def _step(self, event: outboxes.Event) -> None:
        self._outbox, actions = outboxes.step(self._outbox, event)
        for action in actions:
            match action:
                case outboxes.Send(edge, moment):
                    self._send(action, self._lane_of[edge])
                case outboxes.Forget(edge, moment):
                    self._kept.pop((edge, moment), None)

    def _send(self, action: outboxes.Send, lane: tuple[PeerId, bool]) -> None:
        if lane in self._queues:
            self._queues[lane].put_nowait(action)
        else:
            self._local(action.edge, action.moment, self._kept[action.edge, action.moment])

    async def _keep_lane(self, lane: tuple[PeerId, bool]) -> None:
        peer, _ = lane

        async def use(stream: Stream) -> None:
            self._refill(lane)
            outgoing = Outgoing(stream, self._transport.bandwidth)
            try:
                await until_reset(
                    stream.close, self._write(stream, self._queues[lane], outgoing), self._read_answers(stream, outgoing)
                )
            finally:
                outgoing.end()

        try:
            await keep_open(self._transport, peer, VALUES_PROTOCOL, use)
        except (NetworkError, WireError) as error:
            self._lost(peer, str(error))

    def _refill(self, lane: tuple[PeerId, bool]) -> None:
        queue = self._queues[lane]
        while not queue.empty():
            queue.get_nowait()
        self._step(outboxes.Reconnected(frozenset(edge for edge, other in self._lane_of.items() if other == lane)))

    async def _write(self, stream: Stream, queue: asyncio.Queue[outboxes.Send], outgoing: Outgoing) -> None:
        while True:
            send = await queue.get()
            payload = self._kept.get((send.edge, send.moment))
            if payload is None:
                continue
            kind = FrameKind.NONE if payload.type is None else FrameKind.VALUE
            header = Header(kind, self._run, send.moment, send.edge, payload.type, payload.codec, len(payload.data))
            await write_small(stream, encode_header(header))
            await outgoing.write(payload.data)
            self.bytes_sent += HEADER_BYTES + len(payload.data)

    async def _read_answers(self, stream: Stream, outgoing: Outgoing) -> None:
        while True:
            header = decode_header(await stream.read_exactly(HEADER_BYTES))
            if header.kind is FrameKind.ARRIVED:
                outgoing.arrived(header.payload_bytes)
                continue
            if header.kind is not FrameKind.CREDIT or header.run != self._run or header.edge not in self._lane_of:
                raise WireError(f"{stream.remote} acknowledged what was not sent")
            self._step(outboxes.Acknowledged(header.edge, header.moment))


@dataclass(slots=True)
class _Incoming:
    """The stream of a lane that comes in, and what is still to be answered on it."""

    stream: Stream
    answers: asyncio.Queue[Header]
    untold_bytes: int = 0
    """Read, but the sender was not told yet; then an ARRIVED frame is among the answers."""

    def arrived(self, run: RunId, edge: Edge, num_bytes: int) -> None:
        """WireError when the sender has not read thousands of answers: it does not want to know."""
        if not self.untold_bytes:
            if self.answers.full():
                raise WireError(f"{self.stream.remote} reads no answers")
            self.answers.put_nowait(Header(FrameKind.ARRIVED, run, Moment(0, 0), edge))
        self.untold_bytes += num_bytes

    async def next_answer(self) -> Header:
        header = await self.answers.get()
        if header.kind is FrameKind.ARRIVED:
            header = replace(header, payload_bytes=self.untold_bytes)
            self.untold_bytes = 0
        return header


@dataclass(frozen=True, slots=True)
class Expected:
    """What a payload must be: a value of this type, or its gradient, under this codec of the plan."""

    type: TensorType
    codec: CodecSpec = NONE


class Inlet(Protocol):
    """A run that takes values here."""

    def expected(self, edge: Edge, moment: Moment, sender: PeerId) -> Expected:
        """Type and codec of the value that this peer sends now. WireError when it may not, or has no credit for it."""

    def deliver(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        """Take the value, or answer with an acknowledgement. WireError when it breaks the edge's credits."""


class ValueReceiver:
    """Reads value streams for the runs that this process takes part in."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.observed: Callable[[PeerId, float], None] = lambda peer, bytes_per_s: None
        """Told how many bytes per second a large value came with."""
        self._inlets: dict[RunId, Inlet] = {}
        self._lanes: dict[tuple[PeerId, bool], _Incoming] = {}
        self.bytes_received = 0
        self.chunks_received = 0

    async def start(self) -> None:
        await self._transport.serve(VALUES_PROTOCOL, self._serve)

    def open_inlet(self, run: RunId, inlet: Inlet) -> None:
        """Accept values of a run from now on."""
        self._inlets[run] = inlet

    def close_inlet(self, run: RunId) -> None:
        """Refuse values of a run from now on: they are stale."""
        self._inlets.pop(run, None)

    def acknowledge(self, run: RunId, sender: PeerId, edge: Edge, moment: Moment) -> None:
        """Tell the sender that a task has taken this value. Lost with its stream; the sender then asks again.

        Dropped when the sender has not read thousands before: an honest one reads all the time.
        """
        incoming = self._lanes.get(lane_of(sender, edge))
        if incoming is not None and not incoming.answers.full():
            incoming.answers.put_nowait(Header(FrameKind.CREDIT, run, moment, edge))

    async def _serve(self, stream: Stream) -> None:
        try:
            async with asyncio.timeout(FIRST_FRAME_S):
                first = decode_header(await stream.read_exactly(HEADER_BYTES))
        except TimeoutError:
            return
        lane = lane_of(stream.remote, first.edge)
        incoming = _Incoming(stream, asyncio.Queue(MAX_ANSWERS))
        replaced, self._lanes[lane] = self._lanes.get(lane), incoming
        if replaced is not None:  # a sender has one stream per lane: what the old one still holds is sent again
            await replaced.stream.close()
        writing = asyncio.create_task(self._write_answers(incoming))
        try:
            await self._read(incoming, first, lane)
        finally:
            writing.cancel()
            if self._lanes.get(lane) is incoming:
                del self._lanes[lane]

    async def _read(self, incoming: _Incoming, header: Header, lane: tuple[PeerId, bool]) -> None:
        stream = incoming.stream
        while True:
            if lane_of(stream.remote, header.edge) != lane:
                raise WireError(f"{stream.remote} mixed activations and gradients on one stream")
            await self._receive(incoming, header)
            header = decode_header(await stream.read_exactly(HEADER_BYTES))

    async def _receive(self, incoming: _Incoming, header: Header) -> None:
        stream = incoming.stream
        inlet = self._inlets.get(header.run)
        if inlet is None:
            raise WireError(f"{stream.remote} sent a value of epoch {header.run.epoch}, which does not run here")
        expected = inlet.expected(header.edge, header.moment, stream.remote)
        inlet.deliver(header.edge, header.moment, await self._payload(incoming, header, expected))

    async def _payload(self, incoming: _Incoming, header: Header, expected: Expected) -> Payload:
        if header.kind is FrameKind.NONE:
            return NOTHING
        declared, stream = expected.type, incoming.stream
        _check(stream.remote, header, expected)
        began = asyncio.get_running_loop().time()

        async def arrived(num_bytes: int) -> None:
            self.chunks_received += 1
            incoming.arrived(header.run, header.edge, num_bytes)

        data = memoryview(await read_bulk(stream, header.payload_bytes, self._transport.bandwidth.down, arrived))
        seconds = asyncio.get_running_loop().time() - began
        if len(data) >= MEASURED_BYTES and seconds >= MEASURED_S:
            self.observed(stream.remote, len(data) / seconds)
        self.bytes_received += HEADER_BYTES + len(data)
        return Payload(declared, data, header.codec)

    async def _write_answers(self, incoming: _Incoming) -> None:
        try:
            while True:
                await write_small(incoming.stream, encode_header(await incoming.next_answer()))
        except NetworkError as error:
            log.info("cannot acknowledge to peer=%s: %s", incoming.stream.remote, error)
            await incoming.stream.close()


def _check(sender: PeerId, header: Header, expected: Expected) -> None:
    """WireError unless a payload is of the declared type, under the planned codec, and of a size that this codec makes."""
    declared = expected.type
    if header.type is None or replace(header.type, grad=declared.grad) != declared:
        raise WireError(f"{sender} sent value {header.edge.value} as {header.type}, declared {declared}")
    codec = effective(expected.codec, declared).family
    if header.codec != codec:
        raise WireError(f"{sender} sent value {header.edge.value} coded as {header.codec}, planned is {codec}")
    backward = header.edge.direction is Direction.BACKWARD
    if not accepts(expected.codec, declared, header.payload_bytes, backward=backward):
        most = payload_bytes(expected.codec, declared, backward=backward)[1]
        raise WireError(f"{sender} sent {header.payload_bytes} bytes for a value of {most}")
