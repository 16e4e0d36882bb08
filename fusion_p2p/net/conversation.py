"""Questions asked every second, on a stream that stays open between them.

A new stream costs both peers, their daemons included, several times what a question costs on an open one.
"""

from __future__ import annotations

from fusion_p2p.errors import StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.wire.messages import Message


class Conversation:
    """With one peer at a time, one question after the other. Not for several tasks at once."""

    def __init__(self, others: Acquaintances) -> None:
        self._others = others
        self._messages: MessageStream | None = None

    async def ask(self, peer: PeerId, message: Message, *, timeout_s: float) -> Message:
        """The answer. NetworkError or WireError, after which the next question has a stream of its own again."""
        async with self._others.asking(peer, message, timeout_s):
            try:
                answer = await self._ask_on_open(peer, message)
                return await self._ask_anew(peer, message, timeout_s) if answer is None else answer
            except BaseException:  # an answer that comes later would be taken for the next question's
                await self.end()
                raise

    async def end(self) -> None:
        """Nothing more is asked for now."""
        messages, self._messages = self._messages, None
        if messages is not None:
            await messages.close()

    async def _ask_on_open(self, peer: PeerId, message: Message) -> Message | None:
        """None when there is no stream to this peer, or it has ended meanwhile, as relays and restarts end streams."""
        if self._messages is None or self._messages.remote != peer:
            return None
        try:
            await self._messages.send(message)
            return await self._messages.receive()
        except StreamClosed:
            return None

    async def _ask_anew(self, peer: PeerId, message: Message, timeout_s: float) -> Message:
        await self.end()
        self._messages = await self._others.open(peer, timeout_s=timeout_s)
        await self._messages.send(message)
        return await self._messages.receive()
