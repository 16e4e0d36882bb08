"""The owner's control streams to the holders of its slices: one per peer, opened again when it breaks, watched for silence.

What must reach a peer is said with a key and said again on every new stream until it is settled; peers do the same with their
reports, so a reset loses nothing. A peer that cannot be reached again, or says nothing for `SILENCE_S`, is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fusion_p2p.errors import DeadlinePassed, NetworkError, StreamClosed, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.net.reconnecting import keep_open, until_reset
from fusion_p2p.wire.job_messages import JOB_MESSAGES, JOB_PROTOCOL, Pulse
from fusion_p2p.wire.messages import Message

PULSE_S = 1.0
SILENCE_S = 7.0
"""Pulses come every second, also from a peer that computes: seven missed in a row are no accident."""


@dataclass(frozen=True, slots=True)
class Heard:
    """A peer said something."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class Gone:
    """A peer is lost to this run."""

    peer: PeerId
    reason: str


class Links:
    """Control streams to a set of peers. `inbox` receives what they say and when they are gone."""

    def __init__(self, transport: Transport, peers: Iterable[PeerId]) -> None:
        self.inbox: asyncio.Queue[Heard | Gone] = asyncio.Queue()
        self._transport = transport
        self._outgoing: dict[PeerId, asyncio.Queue[Message]] = {peer: asyncio.Queue() for peer in peers}
        self._unsettled: dict[PeerId, dict[str, Message]] = {peer: {} for peer in self._outgoing}
        self._gone: dict[PeerId, str] = {}
        self._dismissing = False

    @property
    def gone(self) -> Mapping[PeerId, str]:
        """Peers that are lost to this run, and why."""
        return self._gone

    async def run(self) -> None:
        """Keep all streams open until cancelled."""
        async with asyncio.TaskGroup() as group:
            for peer in self._outgoing:
                group.create_task(self._keep(peer))

    def say(self, peer: PeerId, message: Message, *, until_settled: str | None = None) -> None:
        """Send a message; with a key, again on every new stream until `settle` is called for it."""
        if until_settled is not None:
            self._unsettled[peer][until_settled] = message
        self._outgoing[peer].put_nowait(message)

    def settle(self, peer: PeerId, key: str) -> None:
        """The peer has answered: what was said under this key need not be said again."""
        self._unsettled[peer].pop(key, None)

    def settle_all(self, key: str) -> None:
        """All peers have answered."""
        for peer in self._unsettled:
            self.settle(peer, key)

    async def dismiss(self, last_word: Message) -> None:
        """Say this to every peer that is not gone, and wait until each has ended its stream: so it was heard."""
        self._dismissing = True
        staying = self._outgoing.keys() - self._gone.keys()
        for peer in staying:
            self.say(peer, last_word, until_settled="dismissed")
        while staying - self._gone.keys():
            await self.inbox.get()

    async def _keep(self, peer: PeerId) -> None:
        async def use(stream: Stream) -> None:
            await self._use(peer, MessageStream(stream, JOB_MESSAGES))
            if self._dismissing:
                raise StreamClosed(f"{peer} was dismissed")

        try:
            await keep_open(self._transport, peer, JOB_PROTOCOL, use)
        except DeadlinePassed:
            self._give_up(peer, f"no word for {SILENCE_S:g} s")
        except (NetworkError, WireError) as error:
            self._give_up(peer, str(error))

    def _give_up(self, peer: PeerId, reason: str) -> None:
        self._gone[peer] = reason
        self.inbox.put_nowait(Gone(peer, reason))

    async def _use(self, peer: PeerId, messages: MessageStream) -> None:
        """Speak and listen until the stream is reset. DeadlinePassed after too long a silence, WireError for nonsense."""
        for message in self._unsettled[peer].values():
            self._outgoing[peer].put_nowait(message)
        await until_reset(messages.close, self._speak(self._outgoing[peer], messages), self._listen(peer, messages))

    async def _speak(self, queue: asyncio.Queue[Message], messages: MessageStream) -> None:
        while True:
            try:
                async with asyncio.timeout(PULSE_S):
                    message = await queue.get()
            except TimeoutError:
                await messages.send(Pulse(progress=0))
                continue
            await messages.send(message)

    async def _listen(self, peer: PeerId, messages: MessageStream) -> None:
        while True:
            self.inbox.put_nowait(Heard(peer, await messages.receive(timeout_s=SILENCE_S)))
