"""Who could keep copies of a run's slices: what the swarm's coordinator lists, and what those peers announce of their lines."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Protocol

from fusion_p2p.errors import AddressError, NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.job.guard_choice import Candidate
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.owner.enlistment import status_by
from fusion_p2p.owner.finder import Finder
from fusion_p2p.peer.link_tables import same_place
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.wire.job_messages import Contact
from fusion_p2p.wire.swarm_messages import PeerStatus

LOOK_S = 5.0
"""How long somebody is asked who is here."""
DIAL_S = 5.0
MAX_ADDRESSES = 8


class Surroundings(Protocol):
    """Where guards come from."""

    async def look(self, members: frozenset[PeerId]) -> tuple[Candidate, ...]:
        """Everybody who could guard a slice of a run that `members` execute. SwarmUnreachable, Incompatible or NetworkError."""

    async def meet(self, peer: PeerId) -> None:
        """Learn the way to a candidate. One that cannot be dialled shows when a stream is opened."""

    def contacts(self, peers: Iterable[PeerId]) -> tuple[Contact, ...]:
        """How others may dial these peers, as far as known."""


class Swarm:
    """The surroundings of a real run."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self._transport = transport
        self._finder = Finder(transport, directory)

    async def look(self, members: frozenset[PeerId]) -> tuple[Candidate, ...]:
        """The peers in standby, and the members themselves."""
        status = await status_by(self._finder, LOOK_S)
        able = [peer for peer in status.peers if peer.state == "standby" or PeerId(peer.peer) in members]
        return tuple(self._candidate(peer, members) for peer in able if PeerId(peer.peer) != self._transport.peer_id)

    async def meet(self, peer: PeerId) -> None:
        """Dial what it announces."""
        for contact in self.contacts([peer]):
            with contextlib.suppress(NetworkError, AddressError):
                await self._transport.connect(contact.addresses, timeout_s=DIAL_S)

    def contacts(self, peers: Iterable[PeerId]) -> tuple[Contact, ...]:
        """What they announce."""
        known = {peer: self._finder.others.announcement(peer) for peer in peers}
        return tuple(
            Contact(peer=peer, addresses=announced.addresses[:MAX_ADDRESSES])
            for peer, announced in known.items()
            if announced is not None
        )

    def _candidate(self, status: PeerStatus, members: frozenset[PeerId]) -> Candidate:
        peer = PeerId(status.peer)
        announced = self._finder.others.announcement(peer)
        others = {other: found for other in members if (found := self._finder.others.announcement(other)) is not None}
        spare = status.state == "standby" and peer not in members
        if announced is None:
            return Candidate(peer, spare, status.free_bytes)
        near = frozenset(other for other, found in others.items() if same_place(announced.addresses, found.addresses))
        return Candidate(peer, spare, status.free_bytes, _rates(peer, announced, others, near), near)


def _rates(
    peer: PeerId, announced: Announcement, others: Mapping[PeerId, Announcement], near: frozenset[PeerId]
) -> dict[PeerId, float]:
    """Bytes per second to `peer` from others: as either end measured it, else as their lines allow where they are apart."""
    rates: dict[PeerId, float] = {}
    for other, found in others.items():
        told = [link.back for link in announced.line.links if link.peer == other]
        told += [link.out for link in found.line.links if link.peer == peer]
        lines = [found.line.up_bytes_per_s, announced.line.down_bytes_per_s]
        ends = [rate for rate in lines if rate is not None] if other not in near else []
        if told or ends:
            rates[other] = max(told) if told else min(ends)
    return rates
