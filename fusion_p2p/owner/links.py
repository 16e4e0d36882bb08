"""The owner's control streams: one per peer, opened again when it breaks, watched for silence.

What must reach a peer is said with a key and said again on every new stream until it is settled; peers do the same with their
reports, so a reset loses nothing.

A stream that breaks and cannot be opened again at once, or 3 s without a word, makes a peer *suspect*: others are asked whether
they reach it (`observers`). When nobody does, it is gone at once; when somebody does, or nobody can be asked, it is given
PATIENCE_S to come back. An owner whose own event loop was late doubts itself first: everybody gets another 3 s.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fusion_p2p.errors import DeadlinePassed, NetworkError, PeerUnreachable, StreamClosed, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.net.reconnecting import MAX_RESETS, until_reset
from fusion_p2p.owner.observers import NoObservers, Observers
from fusion_p2p.wire.job_messages import JOB_MESSAGES, JOB_PROTOCOL, Pulse
from fusion_p2p.wire.messages import Message

PULSE_S = 1.0
SUSPECT_S = 3.0
"""Pulses come every second, also from a peer that computes: three missed in a row are suspicious."""
AHEAD_S = 0.5
"""Others are asked so long before a silence is suspicious: then their answer comes so much the sooner."""
PATIENCE_S = 8.0
"""A suspect that somebody else reaches is lost to us after so long: p2pd waits 5 s before it dials a failed address again."""
LATE_S = 1.5
"""A tick of ours that came so late says that it was us who did not listen."""
TICK_S = 0.25
LEAST_S = 0.01
FIRST_PAUSE_S = 0.05
FAREWELL_S = 2.0
"""How long a last word is waited for to be heard."""
PARTING_S = 600.0
"""For so long it is tried to tell a peer that was lost that it is no longer needed: as long as it keeps what it has."""


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


@dataclass(frozen=True, slots=True)
class Parted:
    """`peer` cannot send to `other`, though we hear both."""

    peer: PeerId
    other: PeerId
    reason: str


Event = Heard | Gone | Parted


@dataclass(slots=True)
class _Line:
    """What is to be said to one peer, and when it was last heard."""

    heard_at: float
    outgoing: asyncio.Queue[Message] = field(default_factory=asyncio.Queue)
    unsettled: dict[str, Message] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    dismissed: bool = False
    met: bool = False
    patience_s: float = PATIENCE_S


class Links:
    """Control streams to a changing set of peers. `inbox` receives what they say and when they are gone."""

    def __init__(self, transport: Transport, peers: Iterable[PeerId] = (), observers: Observers | None = None) -> None:
        self.inbox: asyncio.Queue[Event] = asyncio.Queue()
        self._transport, self._observers = transport, observers or NoObservers()
        self._lines: dict[PeerId, _Line] = {}
        self._leaving: dict[PeerId, _Line] = {}
        self._gone: dict[PeerId, str] = {}
        self._group: asyncio.TaskGroup | None = None
        self._excused_at = self._minded_at = 0.0
        self.add(peers)

    @property
    def peers(self) -> frozenset[PeerId]:
        """Who is linked, and not gone."""
        return frozenset(self._lines)

    @property
    def gone(self) -> Mapping[PeerId, str]:
        """Peers that are lost to this run, and why."""
        return self._gone

    def add(self, peers: Iterable[PeerId]) -> None:
        """Link these too; one that was gone is given another chance."""
        for peer in peers:
            if peer not in self._lines:
                self._gone.pop(peer, None)
                self._lines[peer] = line = _Line(_now())
                last_word = self._forget_parting(peer)
                if last_word is not None:
                    line.outgoing.put_nowait(last_word)  # it may not have been heard: what is said from now on comes after it
                self._keep_line(peer, line)

    def drop(self, peer: PeerId, last_word: Message | None) -> None:
        """End the link to a peer, lost or not; it is told `last_word` if it can be reached, without anybody waiting for it."""
        line = self._lines.pop(peer, None)
        self._gone.pop(peer, None)
        if last_word is None:
            if line is not None and line.task is not None:
                line.task.cancel()
            return
        if line is None:
            self._forget_parting(peer)
            line = _Line(_now(), patience_s=PARTING_S)
            self._keep_line(peer, line)
        line.dismissed = True
        line.unsettled = {"dismissed": last_word}
        line.outgoing.put_nowait(last_word)
        self._leaving[peer] = line

    async def run(self) -> None:
        """Keep all streams open until cancelled."""
        async with asyncio.TaskGroup() as self._group:
            for peer, line in (*self._lines.items(), *self._leaving.items()):
                self._keep_line(peer, line)
            await self._mind_ourselves()

    def say(self, peer: PeerId, message: Message, *, until_settled: str | None = None) -> None:
        """Send a message; with a key, again on every new stream until `settle` is called for it."""
        line = self._lines.get(peer)
        if line is None:
            return
        if until_settled is not None:
            line.unsettled.pop(until_settled, None)
            line.unsettled[until_settled] = message
        line.outgoing.put_nowait(message)

    def repeat(self, peer: PeerId, message: Message, key: str) -> None:
        """Say a message again on every new stream, though it was heard, until `settle` is called for its key."""
        if peer in self._lines:
            self._lines[peer].unsettled[key] = message

    def settle(self, peer: PeerId, key: str) -> None:
        """The peer has answered: what was said under this key need not be said again."""
        if peer in self._lines:
            self._lines[peer].unsettled.pop(key, None)

    def settle_all(self, key: str) -> None:
        """All peers have answered."""
        for peer in self._lines:
            self.settle(peer, key)

    def suspect(self, peer: PeerId, by: PeerId, reason: str) -> None:
        """Somebody cannot send to a peer any more: find out whether that one is gone, or only parted from who says so."""
        if self._group is not None and peer in self._lines:
            self._group.create_task(self._judge(peer, by, reason))

    async def dismiss(self, last_word: Message) -> None:
        """Say this to every peer that is not gone, and wait a little until each has ended its stream: so it was heard."""
        for peer in tuple(self._lines):
            self.drop(peer, last_word)
        tasks = [line.task for line in self._leaving.values() if line.task is not None and line.patience_s < PARTING_S]
        if tasks:
            await asyncio.wait(tasks, timeout=FAREWELL_S)

    def _forget_parting(self, peer: PeerId) -> Message | None:
        """Who was to be told that it is no longer needed, need not be; what it was to be told."""
        leaving = self._leaving.pop(peer, None)
        if leaving is None:
            return None
        if leaving.task is not None:
            leaving.task.cancel()
        return leaving.unsettled["dismissed"]

    def _keep_line(self, peer: PeerId, line: _Line) -> None:
        if self._group is not None and line.task is None:
            line.task = self._group.create_task(self._keep(peer, line))

    async def _mind_ourselves(self) -> None:
        self._minded_at = _now()
        while True:
            await asyncio.sleep(TICK_S)
            if _now() - self._minded_at > TICK_S + LATE_S:
                self._excused_at = _now()
            self._minded_at = _now()

    async def _judge(self, peer: PeerId, by: PeerId, reason: str) -> None:
        """What somebody says of another is believed only when others confirm it."""
        line = self._lines.get(peer)
        if line is not None and self._silent_s(line) > PULSE_S and await self._lost_to_all(peer):
            self._give_up(peer, line, f"{by} cannot send to it ({reason}), and nobody reaches it")
        elif line is self._lines.get(peer):
            self.inbox.put_nowait(Parted(by, peer, reason))

    async def _keep(self, peer: PeerId, line: _Line) -> None:
        resets: deque[float] = deque([-math.inf] * MAX_RESETS, maxlen=MAX_RESETS)
        try:
            while _now() - resets[0] > PATIENCE_S:
                await self._use(peer, line, MessageStream(await self._open(peer, line), JOB_MESSAGES))
                if line.dismissed:
                    break
                resets.append(_now())
            else:
                raise StreamClosed(f"{peer} closed its {JOB_PROTOCOL} stream {MAX_RESETS} times within {PATIENCE_S:g} s")
        except (NetworkError, WireError) as error:
            self._give_up(peer, line, str(error))
        if self._leaving.get(peer) is line:
            del self._leaving[peer]

    def _give_up(self, peer: PeerId, line: _Line, reason: str) -> None:
        if self._lines.get(peer) is not line:
            return
        del self._lines[peer]
        self._gone[peer] = reason
        self.inbox.put_nowait(Gone(peer, reason))
        if line.task is not None and line.task is not asyncio.current_task():
            line.task.cancel()

    async def _open(self, peer: PeerId, line: _Line) -> Stream:
        """A stream, after growing, jittered pauses if need be. NetworkError when the peer is lost."""
        began, pause, doubt = _now(), FIRST_PAUSE_S, None
        longest_pause = max(1.0, line.patience_s / 120)
        try:
            while True:
                left_s = line.patience_s - (_now() - began)
                try:
                    return await self._transport.open(peer, JOB_PROTOCOL, timeout_s=min(max(left_s, 0.5), SUSPECT_S))
                except NetworkError as error:
                    if left_s <= pause:
                        raise
                    failure = error
                if doubt is None and not line.dismissed:
                    doubt = asyncio.create_task(self._lost_to_all(peer))
                if not line.met:
                    await self._observers.find(peer)
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, longest_pause)
                if doubt is not None and doubt.done():
                    if doubt.result():
                        raise PeerUnreachable(f"{failure}; nobody else reaches it")
                    doubt = None
        finally:
            if doubt is not None:
                doubt.cancel()

    async def _use(self, peer: PeerId, line: _Line, messages: MessageStream) -> None:
        """Speak and listen until the stream is reset. NetworkError when the peer is lost, WireError for nonsense."""
        line.met = True
        for message in line.unsettled.values():
            line.outgoing.put_nowait(message)
        halves = self._speak(line.outgoing, messages), self._listen(peer, line, messages), self._watch(peer, line)
        await until_reset(messages.close, *halves)

    async def _speak(self, queue: asyncio.Queue[Message], messages: MessageStream) -> None:
        while True:
            try:
                async with asyncio.timeout(PULSE_S):
                    message = await queue.get()
            except TimeoutError:
                await messages.send(Pulse(progress=0))
                continue
            await messages.send(message)

    async def _listen(self, peer: PeerId, line: _Line, messages: MessageStream) -> None:
        while True:
            message = await messages.receive()  # `_watch` ends it
            line.heard_at = _now()
            if not line.dismissed:
                self.inbox.put_nowait(Heard(peer, message))

    async def _watch(self, peer: PeerId, line: _Line) -> None:
        """Ends when the peer is silent and the stream should be tried anew. DeadlinePassed when the peer is lost."""
        opened_at, bearable_s = _now(), line.patience_s if line.dismissed else SUSPECT_S

        def left_s() -> float:
            return bearable_s - min(self._silent_s(line), _now() - opened_at)

        while True:
            if left_s() > AHEAD_S:
                await asyncio.sleep(min(max(left_s() - AHEAD_S, LEAST_S), TICK_S))
                continue
            confirmed = await self._lost_to_all(peer)
            await asyncio.sleep(max(left_s(), LEAST_S))  # it may still speak
            silent_s = self._silent_s(line)
            if silent_s < bearable_s:
                continue
            if confirmed or silent_s > line.patience_s:
                others = ", and nobody else reaches it" if confirmed else ""
                raise DeadlinePassed(f"no word for {silent_s:.1f} s{others}")
            return

    def _silent_s(self, line: _Line) -> float:
        """How long a peer has said nothing, as far as that is its own fault."""
        if _now() - self._minded_at > TICK_S + LATE_S:
            return 0.0  # we have just woken up: what it said is still to be read
        return _now() - max(line.heard_at, self._excused_at)

    async def _lost_to_all(self, peer: PeerId) -> bool:
        """Whether others say that they do not reach a peer: of those that we hear ourselves."""
        others = [other for other, line in self._lines.items() if other != peer and self._silent_s(line) < SUSPECT_S]
        return bool(others) and await self._observers.nobody_reaches(peer, others)


def _now() -> float:
    return asyncio.get_running_loop().time()
