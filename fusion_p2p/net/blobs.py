"""Serving and fetching bytes: content by its digest, tensors by job, step and name (`wire/blob_messages.py`).

Every wait is bounded: a holder that sends nothing for `IDLE_TIMEOUT_S` is given up. Sizes are known to the asker beforehand, so
nothing is allocated because a stranger says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from fusion_p2p.errors import DeadlinePassed, NetworkError, WireError
from fusion_p2p.ids import Digest, JobId, PeerId, digest_of
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.bulk import IDLE_TIMEOUT_S, Outgoing, read_bulk, together
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.net.pacing import Pace
from fusion_p2p.net.reconnecting import RECONNECT_S, open_patiently
from fusion_p2p.wire.blob_messages import BLOB_MESSAGES, BLOB_PROTOCOL, Arrived, Blob, FetchContent, FetchTensor, Missing
from fusion_p2p.wire.messages import Message

ASKER_IDLE_S = 120.0
"""A stream on which nothing is asked for so long is closed by the holder."""

MAX_ASKED = 64
"""So many questions may wait for their answer on one stream."""
SHARE = 0.5
"""Of what may be on its way to an asker: it may stop reading for a while, and values must not wait for that."""
AHEAD = 8
"""So many tensors are asked for before the first has come: the way there and back takes as long as a small one."""

TensorSource = Callable[[PeerId, FetchTensor], Awaitable[memoryview | None]]
"""Gives the bytes of a tensor to a peer, or None when it has none for that peer."""


class NotThere(NetworkError):
    """The holder answers, but does not hold what was asked for; or not for us."""


class BlobServer:
    """What this process gives to others that ask."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._contents: dict[Digest, bytes] = {}
        self._sources: dict[JobId, TensorSource] = {}
        self.pace_for: Callable[[PeerId], Pace | None] = lambda asker: None
        """How fast tensors may leave for an asker; None: as fast as the link takes them."""

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
        messages, outgoing = MessageStream(stream, BLOB_MESSAGES), Outgoing(stream, self._transport.bandwidth, SHARE)
        asked: asyncio.Queue[Message] = asyncio.Queue(MAX_ASKED)
        try:
            await together(_listen(messages, asked, outgoing), self._give(messages, asked, outgoing))
        finally:
            outgoing.end()

    async def _give(self, messages: MessageStream, questions: asyncio.Queue[Message], outgoing: Outgoing) -> None:
        while True:
            asked = await questions.get()
            found = await self._find(messages.remote, asked)
            if found is None:
                await messages.send(Missing(reason="not held here"))
            else:
                await messages.send(Blob(num_bytes=len(found)))
                await outgoing.write(found, self.pace_for(messages.remote) if isinstance(asked, FetchTensor) else None)

    async def _find(self, asker: PeerId, asked: Message) -> memoryview | None:
        if isinstance(asked, FetchContent):
            data = self._contents.get(Digest(asked.digest))
            return None if data is None else memoryview(data)
        if isinstance(asked, FetchTensor):
            source = self._sources.get(JobId(asked.job))
            return None if source is None else await source(asker, asked)
        raise WireError(f"{asked.kind} is not a request")


class BlobReader:
    """Fetches from one holder over one stream, one request after another. Use as an async context manager.

    A holder that cannot be reached for `patience_s`, or sends nothing for `idle_s`, is given up. `progressed` hears of pieces.
    """

    def __init__(
        self,
        transport: Transport,
        holder: PeerId,
        *,
        patience_s: float = RECONNECT_S,
        idle_s: float = IDLE_TIMEOUT_S,
        progressed: Callable[[], None] = lambda: None,
    ) -> None:
        self._transport, self._holder = transport, holder
        self._patience_s, self._idle_s, self._progressed = patience_s, idle_s, progressed

    async def __aenter__(self) -> BlobReader:
        self._stream = await open_patiently(self._transport, self._holder, BLOB_PROTOCOL, self._patience_s)
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

    async def tensors(self, requests: Sequence[tuple[FetchTensor, int]]) -> AsyncIterator[bytearray | None]:
        """The raw bytes of tensors of known sizes, in order, AHEAD asked for at a time; None for one that is not held."""
        asked = 0
        for number, (_, num_bytes) in enumerate(requests):
            while asked < min(len(requests), number + AHEAD):
                await self._messages.send(requests[asked][0])
                asked += 1
            try:
                data = await self._answer(num_bytes)
            except NotThere:
                data = None
            yield data

    async def _fetch(self, request: FetchContent | FetchTensor, num_bytes: int) -> bytearray:
        await self._messages.send(request)
        return await self._answer(num_bytes)

    async def _answer(self, num_bytes: int) -> bytearray:
        answer = await self._messages.receive(timeout_s=self._idle_s)
        if isinstance(answer, Missing):
            raise NotThere(f"{self._holder} does not hold what was asked for: {answer.reason}")
        offered = expect(answer, Blob).num_bytes
        if offered != num_bytes:
            raise WireError(f"{self._holder} offers {offered} bytes where {num_bytes} were expected")

        async def arrived(size: int) -> None:
            self._progressed()
            await self._messages.send(Arrived(num_bytes=size))

        return await read_bulk(self._stream, num_bytes, self._transport.bandwidth.down, arrived, self._idle_s)


async def _listen(messages: MessageStream, questions: asyncio.Queue[Message], outgoing: Outgoing) -> None:
    """Hear what the asker asks for, and how much of it has arrived."""
    while True:
        heard = await messages.receive(timeout_s=ASKER_IDLE_S)
        if isinstance(heard, Arrived):
            outgoing.arrived(heard.num_bytes)
        elif questions.full():
            raise WireError(f"{messages.remote} asks for more than {MAX_ASKED} things at once")
        else:
            questions.put_nowait(heard)


async def fetch_content(transport: Transport, peer: PeerId, digest: Digest, num_bytes: int, *, timeout_s: float) -> bytes:
    """One content from one peer, all of it within the deadline. NetworkError or WireError."""
    try:
        async with asyncio.timeout(timeout_s), BlobReader(transport, peer) as reader:
            return await reader.content(digest, num_bytes)
    except TimeoutError:
        raise DeadlinePassed(f"{peer} did not deliver {num_bytes} bytes within {timeout_s:g} s") from None
