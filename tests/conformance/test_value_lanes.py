"""Values from one end to another, on every transport: order, credits, declared types, resets, readers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from fusion_p2p.errors import StreamClosed, WireError
from fusion_p2p.graph.schema import TensorType
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.values import NOTHING, VALUES_PROTOCOL, Expected, Payload, ValueReceiver, ValueSender
from fusion_p2p.wire.codecs import NONE, CodecSpec, forward_bytes, parse
from fusion_p2p.wire.frames import HEADER_BYTES, Direction, Edge, FrameKind, Header, Moment, RunId, encode_header
from tests.conformance.harness import Harness, eventually

RUN = RunId(JobId("5" * 32), 1, 1)
EDGE = Edge(9, 0, 1, Direction.FORWARD)
BACK = Edge(9, 0, 1, Direction.BACKWARD)
TYPE = TensorType((256, 1024), "float32", True)
CREDITS = 2


@dataclass
class Reader:
    """Takes values as a slice does: keeps `CREDITS` of an edge, acknowledges when told to."""

    sender: PeerId
    declared: TensorType = TYPE
    codec: CodecSpec = NONE
    got: list[tuple[Edge, Moment, bytes]] = field(default_factory=list)
    asked: int = 0

    def expected(self, edge: Edge, moment: Moment, sender: PeerId) -> Expected:
        self.asked += 1
        if sender != self.sender:
            raise WireError(f"{sender} is not {self.sender}")
        return Expected(self.declared, self.codec)

    def deliver(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        if (edge, moment) not in [(known, at) for known, at, _ in self.got]:
            self.got.append((edge, moment, bytes(payload.data)))


@dataclass
class Ends:
    """A sender, a receiver and what became of them."""

    sender: ValueSender
    receiver: ValueReceiver
    reader: Reader
    here: PeerId
    lost: list[str] = field(default_factory=list)


@contextlib.asynccontextmanager
async def ends(harness: Harness, declared: TensorType = TYPE) -> AsyncIterator[Ends]:
    there, here = await harness.peer(), await harness.peer()
    me, to = here.identity.peer_id, there.identity.peer_id
    receiver, reader, lost = ValueReceiver(there.transport), Reader(me, declared), []
    await receiver.start()
    receiver.open_inlet(RUN, reader)
    sender = ValueSender(
        here.transport,
        RUN,
        {EDGE: CREDITS, BACK: CREDITS},
        {1: to},
        local=lambda edge, moment, payload: None,
        lost=lambda peer, reason: lost.append(reason),
    )
    running = asyncio.create_task(sender.run())
    try:
        yield Ends(sender, receiver, reader, me, lost)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def value(number: int) -> Payload:
    return Payload(TYPE, memoryview(bytes([number]) * TYPE.num_bytes))


async def test_values_arrive_once_in_order_as_credits_come_back(harness: Harness) -> None:
    async with ends(harness) as both:
        for number in range(6):
            both.sender.offer(EDGE, Moment(1, number), value(number))
        both.sender.offer(BACK, Moment(1, 0), NOTHING)
        for taken in range(6):
            await eventually(lambda: len([edge for edge, _, _ in both.reader.got if edge == EDGE]) > taken)  # noqa: B023
            both.receiver.acknowledge(RUN, both.here, EDGE, Moment(1, taken))
        forward = [(moment.micro_batch, data[0]) for edge, moment, data in both.reader.got if edge == EDGE]
        assert forward == [(number, number) for number in range(6)]
        await eventually(lambda: (BACK, Moment(1, 0), b"") in both.reader.got)


@pytest.mark.row(37)
async def test_a_reader_that_takes_nothing_is_sent_its_credits_and_no_more(harness: Harness) -> None:
    async with ends(harness) as both:
        shared, process = value(7), psutil.Process()
        both.sender.offer(BACK, Moment(1, 0), NOTHING)
        await eventually(lambda: len(both.reader.got) == 1)
        before = process.memory_info().rss
        for number in range(64):
            both.sender.offer(EDGE, Moment(1, number), shared)
        await eventually(lambda: len(both.reader.got) == 1 + CREDITS)
        both.sender.offer(BACK, Moment(1, 1), NOTHING)
        await eventually(lambda: len(both.reader.got) == 2 + CREDITS)
        assert both.sender.bytes_sent == CREDITS * (TYPE.num_bytes + HEADER_BYTES) + 2 * HEADER_BYTES
        in_the_reader = 2 * CREDITS * TYPE.num_bytes  # it lives in this process too: its buffer, and the copy it keeps
        assert process.memory_info().rss - before <= CREDITS * TYPE.num_bytes + in_the_reader + (2 << 20)


@pytest.mark.row(5)
async def test_what_was_not_acknowledged_is_sent_again_on_a_new_stream(harness: Harness) -> None:
    async with ends(harness) as both:
        streams: list[Stream] = []
        keep_streams(both.receiver, streams)
        for number in range(4):
            both.sender.offer(EDGE, Moment(1, number), value(number))
        await eventually(lambda: len(both.reader.got) == CREDITS)
        asked = both.reader.asked
        await streams[0].close()
        await eventually(lambda: both.reader.asked >= asked + CREDITS)
        for taken in range(4):
            await eventually(lambda: len(both.reader.got) > taken)  # noqa: B023
            both.receiver.acknowledge(RUN, both.here, EDGE, Moment(1, taken))
        assert [moment.micro_batch for _, moment, _ in both.reader.got] == [0, 1, 2, 3]
        assert not both.lost


def keep_streams(receiver: ValueReceiver, streams: list[Stream]) -> None:
    """Note every stream that carries values from now on."""
    read = receiver._read

    async def noted(incoming: Any, header: Header, lane: tuple[PeerId, bool]) -> None:
        streams.append(incoming.stream)
        await read(incoming, header, lane)

    receiver._read = noted  # type: ignore[method-assign]


@pytest.mark.row(31)
@pytest.mark.row(37)
async def test_another_type_than_declared_is_refused_and_the_sender_given_up(harness: Harness) -> None:
    async with ends(harness, TensorType((256, 1024), "float16", True)) as both:
        both.sender.offer(EDGE, Moment(1, 0), value(1))
        await eventually(lambda: bool(both.lost), timeout_s=30)
        assert "closed its" in both.lost[0]
        assert not both.reader.got


async def test_a_header_that_claims_four_gigabytes_allocates_nothing(harness: Harness) -> None:
    there, here = await harness.peer(), await harness.peer()
    receiver, reader = ValueReceiver(there.transport), Reader(here.identity.peer_id)
    await receiver.start()
    receiver.open_inlet(RUN, reader)
    before = psutil.Process().memory_info().rss
    for kind, declared, size in [
        (FrameKind.VALUE, TensorType((1 << 15, 1 << 15), "float32", False), 4 << 30),
        (FrameKind.VALUE, TYPE, 4 << 30),
    ]:
        stream = await opened(here.transport, there.identity.peer_id)
        header = encode_header(Header(kind, RUN, Moment(1, 0), EDGE, declared, "none", size))
        await stream.write(header)
        with pytest.raises(StreamClosed):
            async with asyncio.timeout(10):
                await stream.read_exactly(1)
        await stream.close()
    assert psutil.Process().memory_info().rss - before < 64 << 20
    assert not reader.got


async def test_only_the_planned_codec_and_its_size_are_read(harness: Harness) -> None:
    there, here = await harness.peer(), await harness.peer()
    receiver, reader = ValueReceiver(there.transport), Reader(here.identity.peer_id, codec=parse("int8"))
    await receiver.start()
    receiver.open_inlet(RUN, reader)
    right = forward_bytes(parse("int8"), TYPE)
    for codec, size in [("none", TYPE.num_bytes), ("bf16", TYPE.num_bytes // 2), ("int8", 1), ("int8", right + 1)]:
        stream = await opened(here.transport, there.identity.peer_id)
        await stream.write(encode_header(Header(FrameKind.VALUE, RUN, Moment(1, 0), EDGE, TYPE, codec, size)))
        with pytest.raises(StreamClosed):
            async with asyncio.timeout(10):
                await stream.read_exactly(1)
        await stream.close()
    assert not reader.got
    stream = await opened(here.transport, there.identity.peer_id)
    for micro_batch, size in enumerate([right, 0]):  # an empty payload says that the sender refused the value
        await stream.write(encode_header(Header(FrameKind.VALUE, RUN, Moment(1, micro_batch), EDGE, TYPE, "int8", size)))
        await stream.write(bytes(size))
    await eventually(lambda: len(reader.got) == 2, timeout_s=30)
    assert [len(data) for _, _, data in reader.got] == [right, 0]
    await stream.close()


async def opened(transport: Transport, peer: PeerId) -> Stream:
    return await transport.open(peer, VALUES_PROTOCOL)
