"""Serving and fetching bytes: content by its digest, tensors by job, step and name (`wire/blob_messages.py`).

Every wait is bounded: a holder that sends nothing for `IDLE_TIMEOUT_S` is given up. Sizes are known to the asker beforehand, so
nothing is allocated because a stranger says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fusion_p2p.errors import DeadlinePassed, NetworkError, WireError
from fusion_p2p.ids import Digest, JobId, PeerId, digest_of
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.net.reconnecting import open_patiently
from fusion_p2p.wire.blob_messages import BLOB_MESSAGES, BLOB_PROTOCOL, Blob, FetchContent, FetchTensor, Missing
from fusion_p2p.wire.frames import MAX_CHUNK_BYTES
from fusion_p2p.wire.messages import Message

IDLE_TIMEOUT_S = 20.0
WRITE_TIMEOUT_S = 60.0
"""A reader that takes no piece for so long is lost: the stream is up, but nobody is there."""
ASKER_IDLE_S = 120.0
"""A stream on which nothing is asked for so long is closed by the holder."""

TensorSource = Callable[[PeerId, FetchTensor], Awaitable[memoryview | None]]
"""Gives the bytes of a tensor to a peer, or None when it has none for that peer."""


class BlobServer:
    """What this process gives to others that ask."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._contents: dict[Digest, bytes] = {}
        self._sources: dict[JobId, TensorSource] = {}

    async def start(self) -> None:
        await self._transport.serve(BLOB_PROTOCOL, self._serve)

    def offer(self, data: bytes) -> Digest:
        """Serve these bytes by their digest until withdrawn."""
        digest = digest_of(data)
        self._contents[digest] = data
        return digest

    def offered(self, digest: Digest) -> bytes | None:
        """What is served under a digest."""
        return self._contents.get(digest)

    def withdraw(self, digest: Digest) -> None:
        self._contents.pop(digest, None)

    def offer_tensors(self, job: JobId, source: TensorSource) -> None:
        """Serve a job's tensors from `source`, which decides per asker."""
        self._sources[job] = source

    def withdraw_tensors(self, job: JobId) -> None:
        self._sources.pop(job, None)

    async def _serve(self, stream: Stream) -> None:
        messages = MessageStream(stream, BLOB_MESSAGES)
        while True:
            asked = await messages.receive(timeout_s=ASKER_IDLE_S)
            found = await self._find(stream.remote, asked)
            if found is None:
                await messages.send(Missing(reason="not held here"))
            else:
                await messages.send(Blob(num_bytes=len(found)))
                await write_chunks(stream, found)

    async def _find(self, asker: PeerId, asked: Message) -> memoryview | None:
        if isinstance(asked, FetchContent):
            data = self._contents.get(Digest(asked.digest))
            return None if data is None else memoryview(data)
        if isinstance(asked, FetchTensor):
            source = self._sources.get(JobId(asked.job))
            return None if source is None else await source(asker, asked)
        raise WireError(f"{asked.kind} is not a request")


class BlobReader:
    """Fetches from one holder over one stream, one request after another. Use as an async context manager."""

    def __init__(self, transport: Transport, holder: PeerId) -> None:
        self._transport = transport
        self._holder = holder

    async def __aenter__(self) -> BlobReader:
        self._stream = await open_patiently(self._transport, self._holder, BLOB_PROTOCOL)
        self._messages = MessageStream(self._stream, BLOB_MESSAGES)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stream.close()

    async def content(self, digest: Digest, num_bytes: int) -> bytes:
        """The bytes of a digest. NetworkError when not held, WireError when the bytes are not those."""
        data = bytes(await self._fetch(FetchContent(digest=digest), num_bytes))
        if digest_of(data) != digest:
            raise WireError(f"{self._holder} sent other bytes than {digest[:12]}")
        return data

    async def tensor(self, request: FetchTensor, num_bytes: int) -> bytearray:
        """The raw bytes of one tensor of a known size."""
        return await self._fetch(request, num_bytes)

    async def _fetch(self, request: FetchContent | FetchTensor, num_bytes: int) -> bytearray:
        await self._messages.send(request)
        answer = await self._messages.receive(timeout_s=IDLE_TIMEOUT_S)
        if isinstance(answer, Missing):
            raise NetworkError(f"{self._holder} does not hold what was asked for: {answer.reason}")
        offered = expect(answer, Blob).num_bytes
        if offered != num_bytes:
            raise WireError(f"{self._holder} offers {offered} bytes where {num_bytes} were expected")
        return await read_chunks(self._stream, num_bytes)


async def fetch_content(transport: Transport, peer: PeerId, digest: Digest, num_bytes: int, *, timeout_s: float) -> bytes:
    """One content from one peer, all of it within the deadline. NetworkError or WireError."""
    try:
        async with asyncio.timeout(timeout_s), BlobReader(transport, peer) as reader:
            return await reader.content(digest, num_bytes)
    except TimeoutError:
        raise DeadlinePassed(f"{peer} did not deliver {num_bytes} bytes within {timeout_s:g} s") from None


async def write_chunks(stream: Stream, data: memoryview) -> None:
    """Write in pieces small enough for back-pressure to bound what is in flight; DeadlinePassed when one is not taken."""
    flat = data.cast("B")
    for start in range(0, len(flat), MAX_CHUNK_BYTES):
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await stream.write(flat[start : start + MAX_CHUNK_BYTES])
        except TimeoutError:
            raise DeadlinePassed(f"{stream.remote} took no byte for {WRITE_TIMEOUT_S:g} s") from None


async def read_chunks(stream: Stream, num_bytes: int, progressed: Callable[[], None] = lambda: None) -> bytearray:
    """Read exactly `num_bytes` into one buffer; DeadlinePassed when a piece takes too long. Tells of every piece."""
    buffer = bytearray(num_bytes)
    view = memoryview(buffer)
    for start in range(0, num_bytes, MAX_CHUNK_BYTES):
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                await stream.read_into(view[start : start + MAX_CHUNK_BYTES])
            progressed()
        except TimeoutError:
            raise DeadlinePassed(f"{stream.remote} stopped sending at byte {start} of {num_bytes}") from None
    return buffer
