"""What every `Transport` promises."""

from __future__ import annotations

import asyncio
import random

import pytest

from fusion_p2p.errors import AddressError, DeadlinePassed, PeerUnreachable, StreamClosed, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from tests.conformance.harness import Harness, echo, eventually

STRANGER = PeerId("12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq")
PROTOCOL = "/conformance/1"


async def test_both_ends_know_who_the_other_is(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    seen: asyncio.Queue[PeerId] = asyncio.Queue()

    async def handler(stream: Stream) -> None:
        seen.put_nowait(stream.remote)

    await a.transport.serve(PROTOCOL, handler)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    assert stream.remote == a.identity.peer_id == a.transport.peer_id
    async with asyncio.timeout(10):
        assert await seen.get() == b.identity.peer_id
    await stream.close()


async def test_bytes_arrive_whole_and_in_order(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    await a.transport.serve(PROTOCOL, echo)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    rng = random.Random(5)
    for size in (0, 1, 100, 65_536, 300_000, 7):
        message = rng.randbytes(size)
        writing = asyncio.create_task(stream.write(size.to_bytes(4, "big") + message))
        assert await stream.read_exactly(size) == message
        await writing
    await stream.close()


@pytest.mark.row(37)
async def test_five_megabytes_written_before_the_close_arrive(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    data = random.Random(6).randbytes(5 << 20)

    async def send_and_close(stream: Stream) -> None:
        await stream.write(data)

    await a.transport.serve(PROTOCOL, send_and_close)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    buffer = bytearray(len(data))
    async with asyncio.timeout(30):
        await stream.read_into(memoryview(buffer))
        assert buffer == data
        with pytest.raises(StreamClosed):
            await stream.read_exactly(1)
    await stream.close()


async def test_many_streams_at_once(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    await a.transport.serve(PROTOCOL, echo)

    async def one(number: int) -> bytes:
        stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
        await stream.write((4).to_bytes(4, "big") + number.to_bytes(4, "big"))
        answer = await stream.read_exactly(4)
        await stream.close()
        return answer

    answers = await asyncio.gather(*(one(number) for number in range(40)))
    assert answers == [number.to_bytes(4, "big") for number in range(40)]


async def test_a_slow_reader_stops_the_writer(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    go_on = asyncio.Event()
    received = 0

    async def slow(stream: Stream) -> None:
        nonlocal received
        await go_on.wait()
        while True:
            received += len(await stream.read_exactly(1 << 16))

    await a.transport.serve(PROTOCOL, slow)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    written = await write_until_stuck(stream, limit=64 << 20)
    assert written < 8 << 20, "the writer must wait for its reader"
    go_on.set()
    await eventually(lambda: received >= written)
    await stream.close()


async def test_streams_do_not_wait_for_each_other(harness: Harness):
    """A stream whose reader sleeps does not stop another between the same peers: control flows beside stuck bulk."""
    a, b = await harness.peer(), await harness.peer()

    async def never_reads(stream: Stream) -> None:
        await asyncio.Event().wait()

    await a.transport.serve("/stuck/1", never_reads)
    await a.transport.serve(PROTOCOL, echo)
    stuck = await b.transport.open(a.transport.peer_id, "/stuck/1")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await stuck.write(bytes(16 << 20))
    free = await b.transport.open(a.transport.peer_id, PROTOCOL)
    async with asyncio.timeout(5):
        await free.write((2).to_bytes(4, "big") + b"ok")
        assert await free.read_exactly(2) == b"ok"
    await free.close()
    await stuck.close()


async def test_a_close_ends_both_directions(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    ended = asyncio.Event()

    async def until_end(stream: Stream) -> None:
        try:
            await stream.read_exactly(1)
        except StreamClosed:
            ended.set()
            raise

    await a.transport.serve(PROTOCOL, until_end)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    await stream.close()
    async with asyncio.timeout(10):
        await ended.wait()
    await stream.close()
    with pytest.raises(StreamClosed):
        await stream.write(b"late")


@pytest.mark.parametrize("end", ["return", "raise"])
async def test_the_stream_ends_with_its_handler(harness: Harness, end: str):
    a, b = await harness.peer(), await harness.peer()

    async def handler(stream: Stream) -> None:
        await stream.read_exactly(1)
        if end == "raise":
            raise WireError("the other side broke the protocol")

    await a.transport.serve(PROTOCOL, handler)
    for _ in range(2):  # the first failure must not touch the second stream
        stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
        await stream.write(b"x")
        with pytest.raises(StreamClosed):
            async with asyncio.timeout(10):
                await stream.read_exactly(1)
        with pytest.raises(StreamClosed):
            async with asyncio.timeout(10):
                await write_until_closed(stream)
        await stream.close()


@pytest.mark.row(12)
async def test_a_remote_crash_ends_reads_and_writes(harness: Harness):
    a, b = await harness.peer(), await harness.peer()

    async def wait(stream: Stream) -> None:
        await asyncio.Event().wait()

    await a.transport.serve(PROTOCOL, wait)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    reading = asyncio.create_task(stream.read_exactly(1))
    await asyncio.sleep(0)
    await harness.crash(a)
    with pytest.raises(StreamClosed, match=a.transport.peer_id):
        async with asyncio.timeout(10):
            await reading
    with pytest.raises(StreamClosed):
        async with asyncio.timeout(10):
            await write_until_closed(stream)
    with pytest.raises((PeerUnreachable, DeadlinePassed)):
        await b.transport.open(a.transport.peer_id, PROTOCOL, timeout_s=5)
    await stream.close()


async def test_an_unknown_protocol_is_refused(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    with pytest.raises(PeerUnreachable, match="does not serve /other/1"):
        await b.transport.open(a.transport.peer_id, "/other/1")


async def test_an_unknown_peer_is_unreachable(harness: Harness):
    a = await harness.peer()
    with pytest.raises((PeerUnreachable, DeadlinePassed), match=STRANGER):
        await a.transport.open(STRANGER, PROTOCOL, timeout_s=5)


async def test_open_and_connect_keep_their_deadlines(harness: Harness):
    """Nobody answers at 192.0.2.1 (reserved for documentation): silence, refusal or a deadline, but never a hang."""
    a = await harness.peer()
    address = f"/ip4/192.0.2.1/tcp/4001/p2p/{STRANGER}"
    async with asyncio.timeout(6):
        with pytest.raises(PeerUnreachable, match=r"192\.0\.2\.1"):
            await a.transport.connect([address], timeout_s=1)
        with pytest.raises((PeerUnreachable, DeadlinePassed)):
            await a.transport.open(STRANGER, PROTOCOL, timeout_s=1)


async def test_connect_says_who_answers_instead(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    wrong = a.transport.addresses[0].replace(f"/p2p/{a.transport.peer_id}", f"/p2p/{STRANGER}")
    with pytest.raises(PeerUnreachable, match=f"{a.transport.peer_id}|does not know"):
        await b.transport.connect([wrong], timeout_s=5)


async def test_connect_takes_the_addresses_of_one_peer(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    assert await b.transport.connect(a.transport.addresses) == a.transport.peer_id
    for wrong in ([], [*a.transport.addresses, f"/ip4/192.0.2.1/tcp/1/p2p/{STRANGER}"], b.transport.addresses):
        with pytest.raises(AddressError):
            await b.transport.connect(wrong)


async def test_a_protocol_is_served_once(harness: Harness):
    a = await harness.peer()
    await a.transport.serve(PROTOCOL, echo)
    with pytest.raises(ValueError, match="already served"):
        await a.transport.serve(PROTOCOL, echo)


async def test_closing_the_transport_ends_its_streams(harness: Harness):
    a, b = await harness.peer(), await harness.peer()
    await a.transport.serve(PROTOCOL, echo)
    stream = await b.transport.open(a.transport.peer_id, PROTOCOL)
    await exchange(stream)
    async with asyncio.timeout(10):
        await a.transport.close()
        with pytest.raises(StreamClosed):
            await stream.read_exactly(1)
    await stream.close()


async def exchange(stream: Stream) -> None:
    await stream.write((2).to_bytes(4, "big") + b"hi")
    assert await stream.read_exactly(2) == b"hi"


async def write_until_closed(stream: Stream) -> None:
    """The first writes after the other side ended may still be taken."""
    while True:
        await stream.write(bytes(1024))
        await asyncio.sleep(0.001)


async def write_until_stuck(stream: Stream, *, limit: int) -> int:
    """How many bytes were taken before one write waited for a second."""
    written, chunk = 0, bytes(1 << 16)
    while written < limit:
        try:
            async with asyncio.timeout(1.0):
                await stream.write(chunk)
        except TimeoutError:
            break
        written += len(chunk)
    return written
