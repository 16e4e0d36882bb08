"""Who is here, as one peer knows it: the state of `swarm.membership`.

Named tuples, because each beat and each tick makes a new one: they are copied several times faster than frozen data classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.settings import SwarmSettings

MAX_PATIENCE = 3.0
"""The longest silence borne, in suspect times."""
DOUBT_S = 60.0
"""A wrong suspicion is held against the observer this long."""


class Member(NamedTuple):
    """A peer that is here: in which incarnation, when it was last heard, and since when it is suspected.

    beaten_at: when its last beat came; gap_s, gap_deviation_s: between its beats, smoothed as TCP does with round trips.
    version: the roster's number when it joined or last changed what others have to know of it.
    told_gone: the coordinator said that it is gone when we had just heard it, and we have not heard it since.
    """

    incarnation: int
    heard_at: float
    holds: bool
    sequence: int = 0
    suspected_at: float | None = None
    beaten_at: float | None = None
    gap_s: float = 0.0
    gap_deviation_s: float = 0.0
    version: int = 0
    told_gone: bool = False


@dataclass(frozen=True, slots=True)
class Following:
    """The coordinator's roster as far as it was told to us: all on it were alive at `heard_at`."""

    source: PeerId
    version: int
    peers: frozenset[PeerId]
    heard_at: float


class Membership(NamedTuple):
    """State: the living, the highest incarnation of those that are gone, and whether all beat to us.

    gathering: a roster told from its beginning, of which the last piece has not come; until then we follow the one before.
    version counts the changes of our own roster; `departed` says at which one a peer went, complete after `departed_since`.
    doubt: how often we lately suspected somebody wrongly.
    """

    members: Mapping[PeerId, Member] = MappingProxyType({})
    gone: Mapping[PeerId, int] = MappingProxyType({})
    ticked_at: float | None = None
    observing: bool = False
    version: int = 1
    departed: Mapping[PeerId, int] = MappingProxyType({})
    departed_since: int = 0
    following: Following | None = None
    gathering: Following | None = None
    doubt: int = 0
    doubted_at: float = 0.0

    def heard_at(self, peer: PeerId) -> float:
        """When we, or the coordinator that we follow, last knew this member to be alive."""
        heard_at = self.members[peer].heard_at
        if self.following is not None and peer in self.following.peers:
            return max(heard_at, self.following.heard_at)
        return heard_at

    def heard_since(self, earliest: float) -> frozenset[PeerId]:
        """Peers known to be alive at `earliest` or later."""
        heard = frozenset(peer for peer, member in self.members.items() if member.heard_at >= earliest)
        if self.following is None or self.following.heard_at < earliest:
            return heard
        return heard.union(peer for peer in self.following.peers if peer in self.members)

    def is_gone(self, peer: PeerId, incarnation: int) -> bool:
        """Whether this incarnation was evicted or has left."""
        return incarnation <= self.gone.get(peer, -1)

    def superseded_by(self, peer: PeerId, incarnation: int) -> int | None:
        """The incarnation that a peer has to exceed to be heard; None when this one is heard."""
        if self.is_gone(peer, incarnation):
            return self.gone[peer]
        known = self.members.get(peer)
        return known.incarnation if known is not None and incarnation < known.incarnation else None

    def is_late(self, peer: PeerId, incarnation: int, sequence: int) -> bool:
        """Whether this member has said something newer than a beat of this number."""
        known = self.members.get(peer)
        return known is not None and (incarnation, sequence) <= (known.incarnation, known.sequence)

    def followed_version(self, source: PeerId) -> int:
        """Up to which number we know the roster of this peer; 0: not at all, or we forgot some that are on it."""
        known = next((k for k in (self.gathering, self.following) if k is not None and k.source == source), None)
        if known is None:
            return 0
        # Changes would never name again whom we forgot, for instance while we did not reach the coordinator for long.
        return known.version if known.peers <= self.members.keys() else 0

    def patience_s(self, member: Member, now: float, settings: SwarmSettings) -> float:
        """How long this member may be silent before it is suspected."""
        doubt = self.doubt if now - self.doubted_at < DOUBT_S else 0
        measured = settings.beat_s + member.gap_s + 4 * member.gap_deviation_s
        patience = max(settings.suspect_after_s, measured) * (1 + doubt / 2)
        return min(patience, MAX_PATIENCE * settings.suspect_after_s)
