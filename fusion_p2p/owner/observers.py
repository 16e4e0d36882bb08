"""What other peers tell an owner about a peer that it does not hear itself, and the way to peers it has not met."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Sequence
from typing import Protocol

from fusion_p2p.clock import SystemClock
from fusion_p2p.errors import AddressError, NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.net.messaging import expect
from fusion_p2p.wire.swarm_messages import Probe, ProbeReply

log = logging.getLogger(__name__)

OBSERVERS = 2
"""So many others are asked about a suspect."""
CONFIRM_S = 2.0
"""They try for 1.5 s themselves."""
DIAL_S = 5.0


class Observers(Protocol):
    """Whom an owner can ask about others."""

    async def nobody_reaches(self, suspect: PeerId, others: Sequence[PeerId]) -> bool:
        """Whether some of the others answered, and none of them reaches the suspect."""

    async def find(self, peer: PeerId) -> None:
        """Learn the way to a peer, if anybody knows it."""


class NoObservers:
    """Nobody can be asked: nothing is confirmed."""

    async def nobody_reaches(self, suspect: PeerId, others: Sequence[PeerId]) -> bool:
        """Nobody says so."""
        return False

    async def find(self, peer: PeerId) -> None:
        """Only who is connected is found."""


class SwarmObservers:
    """The peers of the swarm, by its own protocol and directory."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self._others = Acquaintances(transport, None, SystemClock())
        self._transport, self._directory = transport, directory

    async def nobody_reaches(self, suspect: PeerId, others: Sequence[PeerId]) -> bool:
        """Ask OBSERVERS of the others at once."""
        asked = random.sample(others, min(OBSERVERS, len(others)))
        answers = await asyncio.gather(*(self._reaches(observer, suspect) for observer in asked))
        log.info("suspect=%s asked=%s reached=%s", suspect, asked, answers)
        heard = [answer for answer in answers if answer is not None]
        return bool(heard) and not any(heard)

    async def find(self, peer: PeerId) -> None:
        """Look it up and dial what it announces."""
        try:
            if self._others.announcement(peer) is None:
                self._others.replace_by(await self._directory.lookup(), self._others.peers)
            announcement = self._others.announcement(peer)
            if announcement is not None:
                await self._transport.connect(announcement.addresses, timeout_s=DIAL_S)
        except (NetworkError, AddressError) as error:
            log.debug("no way to peer=%s: %s", peer, error)

    async def _reaches(self, observer: PeerId, suspect: PeerId) -> bool | None:
        """What one observer says; None when it says nothing."""
        with contextlib.suppress(NetworkError, WireError):
            return expect(await self._others.ask(observer, Probe(peer=suspect), timeout_s=CONFIRM_S), ProbeReply).heard
        return None
