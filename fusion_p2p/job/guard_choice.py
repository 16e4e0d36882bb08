"""Which peer guards a copy of which slice; pure.

Spares come before peers at work, those in another place before those in the same; among equals the one that would be done
first, counting what it is to fetch already: so fast links are used and copies spread. Nobody guards a slice that it executes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fusion_p2p.ids import PeerId

UNKNOWN_BYTES_PER_S = 2e6
"""Of a link that nobody has measured."""
ROOM = 2
"""A guard has the old copy of a slice until all slices of the new one are held."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could guard.

    spare: it executes nothing. rates: bytes per second to it from other peers, where known. near: peers in the same place.
    """

    peer: PeerId
    spare: bool
    free_bytes: int
    rates: Mapping[PeerId, float] = field(default_factory=dict)
    near: frozenset[PeerId] = frozenset()

    def fetching_s(self, num_bytes: int, sources: Iterable[PeerId]) -> float:
        """How long it takes to fetch so much from the best of these peers."""
        best = max((self.rates.get(peer, UNKNOWN_BYTES_PER_S) for peer in sources), default=UNKNOWN_BYTES_PER_S)
        return num_bytes / max(best, 1.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a guard is to fetch already."""

    num_bytes: int = 0
    seconds: float = 0.0

    def more(self, num_bytes: int, seconds: float) -> Load:
        return Load(self.num_bytes + num_bytes, self.seconds + seconds)


def choose(
    num_bytes: int,
    members: frozenset[PeerId],
    candidates: Iterable[Candidate],
    loads: Mapping[PeerId, Load],
) -> Candidate | None:
    """Who guards a state of `num_bytes` that `members` execute; None when nobody has room."""

    def rank(candidate: Candidate) -> tuple[bool, bool, float, PeerId]:
        together = not candidate.spare and not candidate.near.isdisjoint(members)
        done_s = loads.get(candidate.peer, Load()).seconds + candidate.fetching_s(num_bytes, members)
        return not candidate.spare, together, done_s, candidate.peer

    def fits(candidate: Candidate) -> bool:
        return ROOM * (loads.get(candidate.peer, Load()).num_bytes + num_bytes) <= candidate.free_bytes

    able = [candidate for candidate in candidates if candidate.peer not in members and fits(candidate)]
    return min(able, key=rank, default=None)
