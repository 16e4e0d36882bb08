"""Measuring the links to another peer: bounded in bytes and seconds, one probe at a time (`wire/probe_messages.py`).

The receiver of a burst times it, from the message that precedes the bytes to the last byte, so the latency does not count.
Bursts grow until one lasted long enough to be believed, or the budget is used up; each waits for the answer to the last, so
that what is on its way never takes a slow line longer than it has proved to carry.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from fusion_p2p.clock import Clock
from fusion_p2p.errors import DeadlinePassed, StreamClosed, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.net.pacing import Bandwidth, Pace
from fusion_p2p.wire.probe_messages import (
    MAX_DIRECTION_BYTES,
    MAX_ROUND_BYTES,
    PING_BYTES,
    PROBE_MESSAGES,
    PROBE_PROTOCOL,
    BeginProbe,
    Bulk,
    EndProbe,
    Ping,
    Pong,
    ProbeBusy,
    ProbeReady,
    Pull,
    Received,
)

PINGS = 5
"""The first one also opens the way and does not count."""
MORE_PINGS = 8
MORE_PINGS_S = 0.05
"""More on close links, where they cost nothing and everything else disturbs: as long as all together took no longer."""
FIRST_ROUND_BYTES = 64 << 10
GROWTH = 4
"""Of a burst over the last: few round trips, and a line is never asked for more than 4 times what it has proved."""
LAST_BURSTS = 3
"""Of the largest size."""
ENOUGH_S = 0.25
"""A burst that lasted so long says the rate within a few per cent."""
DIRECTION_S = 1.0
"""No burst is begun that would, at the rate of the last, end later than this after the first."""
DOUBT = 2.0
"""A host that claims to have received so many times faster than its answer came is not believed."""
SESSION_S = 10.0
"""A probe that takes longer is given up by both sides: such a link carries less than 64 KiB in so many seconds."""
OPEN_S = 5.0
PER_REMOTE = 3
"""Probes that one peer may have of us in a minute."""
PER_MINUTE = 24
"""Probes that all together may have: 192 MiB at most, and that only on lines that are fast."""
STRANGERS_PER_MINUTE = 8
"""Of these at most so many for strangers, owners among them: their ids are free, and members measure too."""
STRANGER_S = 3.0
"""A probe by a stranger that takes longer is given up: an owner has no more time for all its links."""
MINUTE_S = 60.0
PIECE_BYTES = 64 << 10
"""Of a burst, as the caps see it."""
_NOISE = random.Random(0).randbytes(PIECE_BYTES)
"""Nothing on the way can compress it."""

Open = Callable[[PeerId, str, float], Awaitable[Stream]]
"""Opens a stream of a protocol to a peer within so many seconds, dialling it if need be. NetworkError."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The links between us and a peer: seconds one way, bytes per second to it and from it."""

    latency_s: float
    out_bytes_per_s: float
    in_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """The peer, or we, cannot measure now; not before so many seconds."""

    retry_s: float


@dataclass
class _Allowance:
    """How often others may have themselves probed. begun: when, by whom, and whether that was a stranger."""

    begun: list[tuple[float, PeerId, bool]] = field(default_factory=list)

    def wait_s(self, peer: PeerId, now: float, *, stranger: bool) -> float:
        """0 and one probe taken off, or how long to wait."""
        since = now - MINUTE_S
        self.begun = [one for one in self.begun if one[0] > since]
        everybody = [at for at, _, _ in self.begun]
        mine = [at for at, other, _ in self.begun if other == peer]
        strangers = [at for at, _, strange in self.begun if strange]
        limits = [(mine, PER_REMOTE), (everybody, PER_MINUTE), *([(strangers, STRANGERS_PER_MINUTE)] if stranger else [])]
        wait_s = max((times[-most] - since for times, most in limits if len(times) >= most), default=0.0)
        if wait_s == 0.0:
            self.begun.append((now, peer, stranger))
        return wait_s


class Prober:
    """Probes peers and, after `serve`, is probed by them; never two at once, so that none disturbs the other.

    `measured` is told what peers that probe us found; `occupied` says for how many seconds we have no ear for them, 0 for none;
    `is_member` whether we know a peer: strangers get less, and nobody is told what they found. What the caps of `bandwidth`
    allow is all that is ever found.
    """

    def __init__(
        self,
        clock: Clock,
        measured: Callable[[PeerId, Measured], None] = lambda peer, found: None,
        occupied: Callable[[], float] = lambda: 0.0,
        is_member: Callable[[PeerId], bool] = lambda peer: True,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self._clock = clock
        self._measured = measured
        self._occupied = occupied
        self._is_member = is_member
        self._bandwidth = bandwidth or Bandwidth()
        self._allowance = _Allowance()
        self._until: float | None = None
        """When the probe that is going on ends at the latest."""

    async def serve(self, transport: Transport) -> None:
        """Answer probes from now on."""
        await transport.serve(PROBE_PROTOCOL, self._serve)

    async def probe(self, open_stream: Open, peer: PeerId, budget_s: float = DIRECTION_S) -> Measured | Busy:
        """Measure both directions, about `budget_s` each. NetworkError or WireError; never longer than SESSION_S + OPEN_S."""
        if (wait_s := self._own_wait_s()) > 0:
            return Busy(wait_s)
        async with self._alone(peer, SESSION_S):
            stream = await open_stream(peer, PROBE_PROTOCOL, OPEN_S)
            try:
                return await _Asking(stream, self._clock, budget_s, self._bandwidth).run()
            finally:
                await stream.close()

    def _own_wait_s(self) -> float:
        return 0.0 if self._until is None else max(0.1, min(1.0, self._until - self._clock.now()))

    @contextlib.asynccontextmanager
    async def _alone(self, peer: PeerId, most_s: float) -> AsyncIterator[None]:
        """One probe at a time, and that not for ever."""
        self._until = self._clock.now() + most_s
        try:
            async with asyncio.timeout(most_s):
                yield
        except TimeoutError:
            raise DeadlinePassed(f"probing the links with {peer} took longer than {most_s:g} s") from None
        finally:
            self._until = None

    async def _serve(self, stream: Stream) -> None:
        messages = MessageStream(stream, PROBE_MESSAGES)
        expect(await messages.receive(timeout_s=OPEN_S), BeginProbe)
        stranger = not self._is_member(stream.remote)
        wait_s = max(self._own_wait_s(), self._occupied())
        wait_s = wait_s or self._allowance.wait_s(stream.remote, self._clock.now(), stranger=stranger)
        if wait_s > 0:
            await messages.send(ProbeBusy(retry_s=wait_s))
            return
        async with self._alone(stream.remote, STRANGER_S if stranger else SESSION_S):
            await messages.send(ProbeReady())
            found = await _Answering(stream, messages, self._clock, self._bandwidth).run()
        if not stranger:
            self._measured(stream.remote, found)


class _Asking:
    """The side that asks."""

    def __init__(self, stream: Stream, clock: Clock, budget_s: float, bandwidth: Bandwidth) -> None:
        self._stream = stream
        self._bandwidth = bandwidth
        self._messages = MessageStream(stream, PROBE_MESSAGES)
        self._clock = clock
        self._budget_s = min(budget_s, DIRECTION_S)
        self._round_trip_s = 0.0

    async def run(self) -> Measured | Busy:
        await self._messages.send(BeginProbe())
        answer = await self._messages.receive()
        if isinstance(answer, ProbeBusy):
            return Busy(answer.retry_s)
        expect(answer, ProbeReady)
        self._round_trip_s = 2 * await self._latency_s()
        found = Measured(self._round_trip_s / 2, await self._rate(self._push), await self._rate(self._pull))
        await self._messages.send(
            EndProbe(latency_s=found.latency_s, out_bytes_per_s=found.out_bytes_per_s, in_bytes_per_s=found.in_bytes_per_s)
        )
        with contextlib.suppress(StreamClosed):
            await self._messages.receive()  # the host closes when it has read what we found
        return found

    async def _latency_s(self) -> float:
        """Half of the best round trip: whatever else goes on only ever adds to it."""
        began, times = self._clock.now(), list[float]()
        while len(times) < PINGS or (len(times) < PINGS + MORE_PINGS and self._clock.now() - began < MORE_PINGS_S):
            data, sent = secrets.token_bytes(PING_BYTES), self._clock.now()  # nobody can answer before it is there
            await self._messages.send(Ping(data=data))
            if expect(await self._messages.receive(), Pong).data != data:
                raise WireError(f"{self._stream.remote} answered another ping")
            times.append(self._clock.now() - sent)
        return min(times[1:]) / 2

    async def _rate(self, burst: Callable[[int], Awaitable[float]]) -> float:
        """Bytes per second of the best of the largest bursts."""
        size, began, times = FIRST_ROUND_BYTES, self._clock.now(), list[float]()
        while True:
            times.append(max(await burst(size), 1e-6))
            growth = GROWTH if GROWTH * size <= MAX_ROUND_BYTES else 1
            ends_s = self._clock.now() - began + growth * times[-1]
            if times[-1] >= ENOUGH_S or ends_s > self._budget_s or (growth == 1 and len(times) == LAST_BURSTS):
                return min(size / min(times), 1e12)
            if growth > 1:
                size, times = growth * size, []

    async def _push(self, num_bytes: int) -> float:
        """What the host says, as far as that can be: its word came later, by a round trip at most and some waiting."""
        began = self._clock.now()
        await _send_burst(self._stream, self._messages, num_bytes, self._bandwidth.up)
        told_s = expect(await self._messages.receive(), Received).seconds
        return max(told_s, (self._clock.now() - began - self._round_trip_s) / DOUBT)

    async def _pull(self, num_bytes: int) -> float:
        await self._messages.send(Pull(num_bytes=num_bytes))
        if expect(await self._messages.receive(), Bulk).num_bytes != num_bytes:
            raise WireError(f"{self._stream.remote} sends another number of bytes than was asked for")
        return await _time_burst(self._stream, self._clock, num_bytes, self._bandwidth.down)


class _Answering:
    """The side that is asked; it gives no more than it would take."""

    def __init__(self, stream: Stream, messages: MessageStream, clock: Clock, bandwidth: Bandwidth) -> None:
        self._stream = stream
        self._bandwidth = bandwidth
        self._messages = messages
        self._clock = clock
        self._taken = 0
        self._given = 0
        self._largest = (0, 0.0)
        """Bytes of the largest burst that came, and the least seconds that one of this size took."""

    async def run(self) -> Measured:
        """Answer until the asker has found out; as seen from here. WireError when it asks for too much."""
        while True:
            match await self._messages.receive():
                case Ping(data=data):
                    await self._messages.send(Pong(data=data))
                case Bulk(num_bytes=num_bytes):
                    self._taken = self._bounded(self._taken + num_bytes)
                    seconds = await _time_burst(self._stream, self._clock, num_bytes, self._bandwidth.down)
                    self._note(num_bytes, seconds)
                    await self._messages.send(Received(seconds=seconds))
                case Pull(num_bytes=num_bytes):
                    self._given = self._bounded(self._given + num_bytes)
                    await _send_burst(self._stream, self._messages, num_bytes, self._bandwidth.up)
                case EndProbe(latency_s=latency_s, out_bytes_per_s=there, in_bytes_per_s=back):
                    return Measured(latency_s, out_bytes_per_s=back, in_bytes_per_s=min(there, self._in_bytes_per_s()))
                case other:
                    raise WireError(f"{other.kind} is no part of a probe")

    def _note(self, num_bytes: int, seconds: float) -> None:
        size, least_s = self._largest
        if num_bytes >= size:
            self._largest = (num_bytes, min(seconds, least_s) if num_bytes == size else seconds)

    def _in_bytes_per_s(self) -> float:
        """As we saw it ourselves, whatever the asker says."""
        num_bytes, seconds = self._largest
        return num_bytes / max(seconds, 1e-6)

    def _bounded(self, num_bytes: int) -> int:
        if num_bytes > MAX_DIRECTION_BYTES:
            raise WireError(f"{self._stream.remote} asks for a probe of more than {MAX_DIRECTION_BYTES} bytes a direction")
        return num_bytes


async def _send_burst(stream: Stream, messages: MessageStream, num_bytes: int, pace: Pace) -> None:
    await messages.send(Bulk(num_bytes=num_bytes))
    noise = memoryview(_NOISE)
    for start in range(0, num_bytes, PIECE_BYTES):
        piece = noise[: min(PIECE_BYTES, num_bytes - start)]
        await pace.take(len(piece))
        await stream.write(piece)


async def _time_burst(stream: Stream, clock: Clock, num_bytes: int, pace: Pace) -> float:
    """Seconds until all of it has come; nothing of it is kept."""
    began, buffer = clock.now(), memoryview(bytearray(min(num_bytes, PIECE_BYTES)))
    for start in range(0, num_bytes, len(buffer)):
        piece = buffer[: num_bytes - start]
        await stream.read_into(piece)
        await pace.take(len(piece))
    return clock.now() - began
