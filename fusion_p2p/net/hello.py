"""Getting acquainted: versions, clock, reachability, and whether a peer id is used twice. Runs on any `Transport`.

Every peer is a host to those who greet it; a bootstrap node also dials back and knows relays.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import fusion_p2p
from fusion_p2p.clock import Clock
from fusion_p2p.errors import ConfigError, DeadlinePassed, Incompatible, NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.wire.hello_messages import (
    HELLO_MESSAGES,
    HELLO_PROTOCOL,
    MAX_ADDRESSES,
    DialBack,
    Hello,
    Here,
    StillThere,
    Taken,
    Versions,
    Welcome,
    WhoAreYou,
)

ANSWER_TIMEOUT_S = 5.0
WELCOME_TIMEOUT_S = 30.0
"""Dialling back takes a while."""
CHECK_INTERVAL_S = 30.0
STILL_THERE_TIMEOUT_S = 3.0
MAX_CLOCK_OFFSET_S = 120.0
MAX_GUESTS = 4096


@runtime_checkable
class _Located(Protocol):
    address: str


Reachability: TypeAlias = Literal["direct", "unreachable", "unknown"]


class DialsBack(Protocol):
    """Dials strangers to see whether they can be dialled."""

    async def dial_back(self, peer: PeerId, process: bytes, addresses: Sequence[str], seen_at: str) -> tuple[DialBack, ...]:
        """What came of each address. `seen_at` is where the peer's own connection comes from."""


@dataclass(slots=True)
class _Guest:
    """A peer that greeted us and whose stream is open."""

    process: bytes
    address: str
    stream: MessageStream
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def still_there(self) -> bool:
        """Whether the process behind the stream answers in time."""
        self.heard.clear()
        try:
            async with asyncio.timeout(STILL_THERE_TIMEOUT_S):
                await self.stream.send(StillThere())
                await self.heard.wait()
        except (TimeoutError, NetworkError):
            return False
        return True


class HelloHost:
    """Serves HELLO_PROTOCOL on a transport."""

    def __init__(
        self, clock: Clock, *, process: bytes, dialler: DialsBack | None = None, relays: Callable[[], Sequence[str]] = tuple
    ) -> None:
        self._clock = clock
        self._process = process
        self._dialler = dialler
        self._relays = relays
        self._guests: dict[PeerId, _Guest] = {}

    async def serve(self, transport: Transport) -> None:
        """Begin to answer greetings and probes."""
        await transport.serve(HELLO_PROTOCOL, self._answer)

    async def _answer(self, stream: Stream) -> None:
        messages = MessageStream(stream, HELLO_MESSAGES)
        first = await messages.receive(timeout_s=ANSWER_TIMEOUT_S)
        if isinstance(first, WhoAreYou):
            await messages.send(Here(process=self._process))
            return
        theirs = expect(first, Versions)
        await messages.send(our_versions())
        check_versions(theirs, "the greeting peer")
        hello = expect(await messages.receive(timeout_s=ANSWER_TIMEOUT_S), Hello)
        received_s = self._clock.wall()
        seen_at = address_of(stream)
        if (holder := await self._other_process(messages.remote, hello.process)) is not None:
            await messages.send(Taken(address=holder))
            return
        await self._welcome(messages, hello, seen_at, received_s)

    async def _welcome(self, messages: MessageStream, hello: Hello, seen_at: str, received_s: float) -> None:
        guest = _Guest(hello.process, seen_at, messages)
        self._guests[messages.remote] = guest
        while len(self._guests) > MAX_GUESTS:
            self._guests.pop(next(iter(self._guests)))
        try:
            dial_backs = await self._dial_back(messages.remote, hello, seen_at)
            welcome = Welcome(
                reachability=self._reachability(dial_backs),
                dial_backs=dial_backs,
                received_s=received_s,
                sent_s=self._clock.wall(),
                relays=tuple(self._relays())[:MAX_ADDRESSES],
            )
            await messages.send(welcome)
            await self._listen(messages, guest)
        finally:
            if self._guests.get(messages.remote) is guest:
                del self._guests[messages.remote]

    async def _listen(self, messages: MessageStream, guest: _Guest) -> None:
        """Until the guest leaves, or does not answer any more."""
        while True:
            try:
                expect(await messages.receive(timeout_s=CHECK_INTERVAL_S), Here)
            except DeadlinePassed:
                await messages.send(StillThere())
                expect(await messages.receive(timeout_s=STILL_THERE_TIMEOUT_S), Here)
            guest.heard.set()

    async def _other_process(self, peer: PeerId, process: bytes) -> str | None:
        """The address of another living process with this peer id."""
        guest = self._guests.get(peer)
        if guest is None or guest.process == process or not await guest.still_there():
            return None
        return guest.address

    async def _dial_back(self, peer: PeerId, hello: Hello, seen_at: str) -> tuple[DialBack, ...]:
        if self._dialler is None:
            return ()
        return await self._dialler.dial_back(peer, hello.process, hello.addresses, seen_at)

    def _reachability(self, dial_backs: Sequence[DialBack]) -> Reachability:
        if self._dialler is None:
            return "unknown"
        return "direct" if any(not dial_back.reason for dial_back in dial_backs) else "unreachable"


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a host said, and the stream that stays open."""

    welcome: Welcome
    clock_offset_s: float
    """Our clock minus the host's."""
    stream: MessageStream
    process: bytes

    async def stay(self) -> None:
        """Answer the host's questions until the stream ends, with StreamClosed or DeadlinePassed."""
        while True:
            expect(await self.stream.receive(timeout_s=3 * CHECK_INTERVAL_S), StillThere)
            await self.stream.send(Here(process=self.process))


async def greet(transport: Transport, host: PeerId, clock: Clock, *, network: str, process: bytes) -> Greeting:
    """Say hello. Incompatible (protocol or clock), ConfigError (our identity is in use), NetworkError or WireError."""
    stream = MessageStream(await transport.open(host, HELLO_PROTOCOL, timeout_s=ANSWER_TIMEOUT_S), HELLO_MESSAGES)
    try:
        await stream.send(our_versions())
        check_versions(expect(await stream.receive(timeout_s=ANSWER_TIMEOUT_S), Versions), str(host))
        before_s = clock.wall()
        await stream.send(Hello(network=network, process=process, addresses=tuple(transport.addresses)[:MAX_ADDRESSES]))
        answer = await stream.receive(timeout_s=WELCOME_TIMEOUT_S)
        if isinstance(answer, Taken):
            raise ConfigError(
                f"identity in use by {answer.address}: another running process has the same peer id {transport.peer_id}; "
                "give this one another key file with --identity"
            )
        welcome = expect(answer, Welcome)
        offset_s = ((before_s - welcome.received_s) + (clock.wall() - welcome.sent_s)) / 2
        check_clock(offset_s)
    except BaseException:
        await stream.close()
        raise
    return Greeting(welcome, offset_s, stream, process)


async def ask_who(transport: Transport, peer: PeerId) -> bytes:
    """The process nonce of whoever answers for a peer id. NetworkError or WireError."""
    stream = MessageStream(await transport.open(peer, HELLO_PROTOCOL, timeout_s=ANSWER_TIMEOUT_S), HELLO_MESSAGES)
    try:
        await stream.send(WhoAreYou())
        return expect(await stream.receive(timeout_s=ANSWER_TIMEOUT_S), Here).process
    finally:
        await stream.close()


def new_process() -> bytes:
    """A nonce for this process."""
    return secrets.token_bytes(16)


def our_versions() -> Versions:
    return Versions(protocol=fusion_p2p.PROTOCOL, fusion=fusion_p2p.__version__)


def check_versions(theirs: Versions, who: str) -> None:
    """Incompatible when the protocol numbers differ; nothing else matters."""
    ours = our_versions()
    if theirs.protocol == ours.protocol:
        return
    older, newest = ("this side", theirs.fusion) if ours.protocol < theirs.protocol else (who, ours.fusion)
    raise Incompatible(
        f"this is protocol {ours.protocol} (fusion_p2p {ours.fusion}), but {who} speaks protocol {theirs.protocol} "
        f"(fusion_p2p {theirs.fusion!r}): upgrade {older} to fusion-p2p {newest!r}"
    )


def check_clock(offset_s: float) -> None:
    """Incompatible when the clocks differ by more than MAX_CLOCK_OFFSET_S."""
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        way = "ahead of" if offset_s > 0 else "behind"
        raise Incompatible(
            f"this machine's clock is {abs(offset_s):.0f} s {way} the bootstrap's; {MAX_CLOCK_OFFSET_S:g} s are allowed: "
            "set it, for example by switching NTP on, and join again"
        )


def address_of(stream: Stream) -> str:
    """Where the other end of a stream is, when its transport knows."""
    address = stream.address if isinstance(stream, _Located) else ""
    return address or f"/p2p/{stream.remote}"
