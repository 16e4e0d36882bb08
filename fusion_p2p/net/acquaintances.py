"""The peers this one knows of by their announcements, and asking them things."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence

import fusion_p2p
from fusion_p2p.clock import Clock
from fusion_p2p.errors import AddressError, DeadlinePassed, NetworkError, PeerUnreachable, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.identity import unseal
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.net.records import RECORD_DOMAIN
from fusion_p2p.swarm.announcement import Announcement, decode_announcement
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import SWARM_MESSAGES, SWARM_PROTOCOL

logger = logging.getLogger(__name__)

MAX_KNOWN = 4096


class Acquaintances:
    """Announcements by peer, newest sequence number only, of one network (None: of any) and our protocol version only."""

    def __init__(self, transport: Transport, network: str | None, clock: Clock) -> None:
        self._transport = transport
        self._network = network
        self._clock = clock
        self._known: dict[PeerId, tuple[int, Announcement]] = {}
        self._looked_up: Mapping[PeerId, bytes] = {}
        self._refused: dict[PeerId, str] = {}
        self._failed_at: dict[PeerId, float] = {}
        self._failures: dict[PeerId, str] = {}

    def learn(self, record: bytes) -> PeerId | None:
        """Keep a sealed announcement and say whose it is; None when it is not for us. WireError when it is malformed."""
        signer, payload = unseal(record, domain=RECORD_DOMAIN)
        sequence, announcement = decode_announcement(payload)
        refusal = self._why_refused(announcement)
        if refusal is not None:
            self._note_refusal(signer, refusal)
            return None
        known = self._known.get(signer)
        if (known is None and len(self._known) < MAX_KNOWN) or (known is not None and sequence > known[0]):
            self._known[signer] = (sequence, announcement)
            self._failed_at.pop(signer, None)  # what it says now may be another way to it
            if announcement.addresses:
                with contextlib.suppress(AddressError):  # it is a stranger that announces them, or ourselves
                    self._transport.remember(announcement.addresses)
        return signer

    def replace_by(self, records: Mapping[PeerId, bytes], keep: frozenset[PeerId]) -> None:
        """Take what a directory look-up found; forget others except `keep`, the peers heard lately."""
        for peer, record in records.items():
            if peer in self._known and self._looked_up.get(peer) == record:
                continue  # a signature costs more to check than anything else here
            try:
                self.learn(record)
            except WireError as error:
                logger.debug("announcement of %s: %s", peer, error)
        self._looked_up = records
        self._known = {peer: known for peer, known in self._known.items() if peer in records or peer in keep}
        self._failed_at = {peer: at for peer, at in self._failed_at.items() if peer in self._known}

    def announcement(self, peer: PeerId) -> Announcement | None:
        known = self._known.get(peer)
        return known[1] if known else None

    def sequence(self, peer: PeerId) -> int:
        """The number of the newest announcement of a peer; 0 when there is none."""
        known = self._known.get(peer)
        return known[0] if known else 0

    @property
    def peers(self) -> frozenset[PeerId]:
        return frozenset(self._known)

    @property
    def refused(self) -> Mapping[PeerId, str]:
        """Peers seen that cannot be talked to, and why."""
        return self._refused

    def failed_since(self, earliest: float) -> frozenset[PeerId]:
        """Peers that did not answer us at `earliest` or later."""
        return frozenset(peer for peer, at in self._failed_at.items() if at >= earliest)

    def why_silent(self) -> tuple[str, ...]:
        """Who did not answer the last question or cannot be talked to, and why, a line each."""
        failures = (f"dialled {peer}: {self._failures[peer]}" for peer in sorted(self._failed_at))
        refusals = (f"left out {peer}: {reason}" for peer, reason in sorted(self._refused.items()))
        return (*failures, *refusals)

    async def ask(self, peer: PeerId, message: Message, *, timeout_s: float) -> Message:
        """One question, one answer on the swarm protocol. NetworkError or WireError."""
        async with self.asking(peer, message, timeout_s):
            messages = await self.open(peer, timeout_s=timeout_s)
            try:
                await messages.send(message)
                return await messages.receive()
            finally:
                await messages.close()

    @contextlib.asynccontextmanager
    async def asking(self, peer: PeerId, message: Message, timeout_s: float) -> AsyncIterator[None]:
        """Around one question: its deadline, and whether the peer answers is remembered."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            self._note_failure(peer, f"no answer within {timeout_s:g} s")
            raise DeadlinePassed(f"{peer} did not answer {message.kind} within {timeout_s:g} s") from None
        except NetworkError as error:
            self._note_failure(peer, str(error))
            raise
        self._failed_at.pop(peer, None)

    async def open(self, peer: PeerId, *, timeout_s: float, hints: Sequence[str] = ()) -> MessageStream:
        """A stream of the swarm protocol, as `open_stream` opens it."""
        stream = await self.open_stream(peer, SWARM_PROTOCOL, timeout_s, hints)
        return MessageStream(stream, SWARM_MESSAGES)

    async def open_stream(self, peer: PeerId, protocol: str, timeout_s: float, hints: Sequence[str] = ()) -> Stream:
        """A stream over whatever connection there is; without one, dial what the peer announces, or else the hints.

        NetworkError when that fails.
        """
        try:
            return await self._transport.open(peer, protocol, timeout_s=timeout_s)
        except PeerUnreachable:
            announcement = self.announcement(peer)
            addresses = announcement.addresses if announcement else tuple(hints)
            if not addresses:
                raise
        try:
            await self._transport.connect(addresses, timeout_s=timeout_s)
        except AddressError as error:  # announced by a stranger, so it is no fault of our user's configuration
            raise PeerUnreachable(f"{peer} announces an address that is none: {error}") from None
        return await self._transport.open(peer, protocol, timeout_s=timeout_s)

    def _why_refused(self, announcement: Announcement) -> str | None:
        if self._network is not None and announcement.network != self._network:
            return "it belongs to another network"
        if announcement.versions.protocol != fusion_p2p.PROTOCOL:
            return f"it speaks protocol {announcement.versions.protocol}, we speak {fusion_p2p.PROTOCOL}"
        return None

    def _note_failure(self, peer: PeerId, reason: str) -> None:
        if len(self._failed_at) < MAX_KNOWN:
            self._failed_at[peer], self._failures[peer] = self._clock.now(), reason

    def _note_refusal(self, peer: PeerId, reason: str) -> None:
        if self._refused.get(peer) != reason and len(self._refused) < MAX_KNOWN:
            self._refused[peer] = reason
            logger.warning("peer %s is left out: %s", peer, reason)
