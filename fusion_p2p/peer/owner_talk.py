"""What the coordinator says to one owner while it waits for its plan, and what it asks of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from fusion_p2p.clock import Clock
from fusion_p2p.errors import DeadlinePassed, NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.wire.swarm_messages import MAX_LINKS, LinkEntry, Links, MeasureLinks, Waiting

QUIET_S = 0.5
"""Work that takes no longer needs no word."""
OWNER_LINKS_S = 5.0
"""How long it waits for the owner's links: that one spends 3 s on it."""


class OwnerTalk:
    """Says the same thing to an owner only every few seconds, another thing at once."""

    def __init__(self, messages: MessageStream, clock: Clock, again_s: float) -> None:
        self.messages = messages
        self._clock = clock
        self._again_s = again_s
        self._said = ""
        self._said_at = 0.0
        self._asked = 0

    async def say(self, reason: str) -> None:
        """StreamClosed when the owner has gone."""
        now = self._clock.now()
        if reason != self._said or now - self._said_at >= self._again_s:
            self._said, self._said_at = reason, now
            await self.messages.send(Waiting(reason=reason[:1024]))

    async def until_done(self, task: asyncio.Task[Any], reason: str) -> None:
        """Wait for a task, and say what is done meanwhile if it takes long."""
        while not task.done():
            await asyncio.wait({task}, timeout=QUIET_S)
            if not task.done():
                await self.say(reason)

    async def links_to(self, peers: Sequence[PeerId]) -> tuple[LinkEntry, ...]:
        """What the owner measures of its links to these peers; nothing when it does not answer in time.

        What it still answers to an earlier question is not heard. StreamClosed when it has gone, WireError when it says
        something else.
        """
        self._asked += 1
        await self.messages.send(MeasureLinks(request=self._asked, peers=tuple(peers[:MAX_LINKS])))
        deadline = self._clock.now() + OWNER_LINKS_S
        while (left_s := deadline - self._clock.now()) > 0:
            try:
                answer = expect(await self.messages.receive(timeout_s=left_s), Links)
            except DeadlinePassed:
                break
            if answer.request == self._asked:
                return answer.entries
        return ()

    async def until_closed(self, timeout_s: float) -> None:
        """Until the owner closes, at most so long; what it says meanwhile comes too late."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self.messages.receive()
        except (NetworkError, TimeoutError):
            return
