"""What is still to be said on one control stream: bounded, so that an owner that does not listen holds up nobody but itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fusion_p2p.errors import NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.wire.messages import Message

log = logging.getLogger(__name__)

MAX_WAITING = 1024
SEND_TIMEOUT_S = 10.0

Say = Callable[[PeerId, Message], None]
"""Say something to an owner; without a stream of it this is lost."""


class Voice:
    """Says messages on a stream in order. When one is not taken in time the stream is closed: its owner opens another."""

    def __init__(self, messages: MessageStream) -> None:
        self._messages = messages
        self._waiting: asyncio.Queue[Message] = asyncio.Queue(MAX_WAITING)
        self._overflowed = False
        self.ended = asyncio.Event()
        """Set when the stream is over."""

    def say(self, message: Message) -> None:
        """Say this after what was said before."""
        if self._waiting.full():
            self._overflowed = True
        else:
            self._waiting.put_nowait(message)

    async def say_now(self, message: Message) -> None:
        """Say this before anything that waits. NetworkError when the stream is gone."""
        await self._messages.send(message)

    async def run(self) -> None:
        """Speak until cancelled, or until the other side no longer listens."""
        try:
            while not self._overflowed:
                message = await self._waiting.get()
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await self._messages.send(message)
        except (NetworkError, TimeoutError) as error:
            log.info("owner=%s does not listen: %s", self._messages.remote, error or f"no byte taken for {SEND_TIMEOUT_S:g} s")
        await self._messages.close()
