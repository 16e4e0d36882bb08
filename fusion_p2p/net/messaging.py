"""Control messages over a stream: length-prefixed, strict, with a deadline on every wait."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from fusion_p2p.errors import DeadlinePassed, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.wire.messages import LENGTH_BYTES, Message, MessageSet, body_length

M = TypeVar("M", bound=Message)


class MessageStream:
    """Sends and receives the messages of one protocol on a stream. Sends from several tasks do not interleave."""

    def __init__(self, stream: Stream, messages: MessageSet) -> None:
        self._stream = stream
        self._messages = messages
        self._sending = asyncio.Lock()

    @property
    def remote(self) -> PeerId:
        return self._stream.remote

    async def send(self, message: Message) -> None:
        """StreamClosed when the other side has gone."""
        data = self._messages.encode(message)
        async with self._sending:
            await self._stream.write(data)

    async def receive(self, *, timeout_s: float | None = None) -> Message:
        """The next message. WireError, StreamClosed, or DeadlinePassed when none came in time."""
        if timeout_s is None:
            return self._messages.decode(await self._read_body())
        try:
            async with asyncio.timeout(timeout_s):
                body = await self._read_body()
        except TimeoutError:
            raise DeadlinePassed(f"{self.remote} said nothing for {timeout_s:g} s") from None
        return self._messages.decode(body)

    async def _read_body(self) -> bytes:
        prefix = await self._stream.read_exactly(LENGTH_BYTES)
        return await self._stream.read_exactly(body_length(prefix))

    async def close(self) -> None:
        await self._stream.close()


async def request(
    transport: Transport, peer: PeerId, protocol: str, messages: MessageSet, message: Message, *, timeout_s: float
) -> Message:
    """One question, one answer, on a stream of its own. NetworkError or WireError; the deadline covers all of it."""
    try:
        async with asyncio.timeout(timeout_s):
            stream = MessageStream(await transport.open(peer, protocol, timeout_s=timeout_s), messages)
            try:
                await stream.send(message)
                return await stream.receive()
            finally:
                await stream.close()
    except TimeoutError:
        raise DeadlinePassed(f"{peer} did not answer {message.kind} within {timeout_s:g} s") from None


def expect(message: Message, kind: type[M]) -> M:
    """The message, if it is of this kind; WireError otherwise."""
    if not isinstance(message, kind):
        raise WireError(f"expected {kind.kind}, got {message.kind}")
    return message
