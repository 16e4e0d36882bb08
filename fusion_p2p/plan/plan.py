"""A plan: which peer executes which slice, how much may be in flight, and which codec each edge uses. Pure data."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal

from fusion_p2p.ids import Digest, PeerId

Schedule = Literal["gpipe", "1f1b"]
"""gpipe: all forward passes of a step, then all backward passes. 1f1b: a ready backward before the next forward."""

FEED_CREDITS = 2
"""Values of one graph input that may wait at a replica: what the owner feeds obeys credits too."""


@dataclass(frozen=True, slots=True)
class Turns:
    """The micro-batches that one member of a slice executes: every m with `m % period` among `places`, which ascend."""

    places: tuple[int, ...] = (0,)
    period: int = 1

    def __contains__(self, micro_batch: int) -> bool:
        return self.places[self.before(micro_batch) % len(self.places)] == micro_batch % self.period

    def nth(self, turn: int) -> int:
        """The micro-batch after `turn` others of this member."""
        rounds, index = divmod(turn, len(self.places))
        return rounds * self.period + self.places[index]

    def before(self, micro_batch: int) -> int:
        """How many of this member's micro-batches are lower than `micro_batch`."""
        rounds, rest = divmod(micro_batch, self.period)
        return rounds * len(self.places) + bisect_left(self.places, rest)

    def meets(self, other: Turns) -> bool:
        """Whether any micro-batch, however late, is executed by both."""
        common = gcd(self.period, other.period)
        return not {place % common for place in self.places}.isdisjoint(place % common for place in other.places)


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a slice at work. Replicas are numbered through a plan in (slice, member) order."""

    slice: int
    peer: PeerId
    turns: Turns


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """One slice: who executes it, how many micro-batches each member may hold in flight (>= 1), whether it recomputes.

    A slice with `replicas` is executed by several peers of one site, each on its own micro-batches; their gradients are summed
    in member order before the update, so that all copies stay equal (stage replicas, design of FusionLLM's data parallelism).
    `deal` says who executes micro-batch m: `members[deal[m % len(deal)]]`; every member occurs in it.
    """

    peer: PeerId
    in_flight: int
    recompute: bool = False
    replicas: tuple[PeerId, ...] = ()
    deal: tuple[int, ...] = (0,)

    @property
    def members(self) -> tuple[PeerId, ...]:
        """All peers that execute this slice."""
        return (self.peer, *self.replicas)

    @property
    def turns(self) -> tuple[Turns, ...]:
        """What each member executes."""
        return _turns(len(self.members), self.deal)


@dataclass(frozen=True, slots=True)
class EdgePlan:
    """One edge of the cut graph, in the order of `Cut.edges`: its codec, and the credits (>= 1) its receiver grants."""

    value: int
    source: int
    target: int
    codec: str = "none"
    credits: int = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """A cut of one graph over peers. `slice_of[n]` is the slice of node n; edges go to the same or a higher slice."""

    graph: Digest
    scheduler: str
    micro_batches: int
    slice_of: tuple[int, ...]
    slices: tuple[SlicePlan, ...]
    edges: tuple[EdgePlan, ...]
    idle: tuple[tuple[PeerId, str], ...] = ()
    """Peers left in the backup pool, each with the reason."""
    predicted_step_s: float = 0.0
    schedule: Schedule = "1f1b"

    @property
    def peers(self) -> frozenset[PeerId]:
        """Everybody who executes something."""
        return frozenset(peer for part in self.slices for peer in part.members)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All copies of all slices, by replica number; in a plan without groups that is the slice's number."""
        return _replicas(self.slices)

    def replicas_of(self, peer: PeerId) -> tuple[int, ...]:
        """The numbers of the replicas that a peer executes, in order."""
        return tuple(number for number, replica in enumerate(self.replicas) if replica.peer == peer)

    def slices_of(self, peer: PeerId) -> tuple[int, ...]:
        """The slices that a peer executes, in order."""
        return tuple(index for index, part in enumerate(self.slices) if peer in part.members)


@lru_cache(maxsize=1024)
def _turns(members: int, deal: tuple[int, ...]) -> tuple[Turns, ...]:
    places: list[list[int]] = [[] for _ in range(members)]
    for place, member in enumerate(deal):
        places[member].append(place)
    return tuple(Turns(tuple(own), len(deal)) for own in places)


@lru_cache(maxsize=16)
def _replicas(slices: tuple[SlicePlan, ...]) -> tuple[Replica, ...]:
    return tuple(
        Replica(index, peer, turns)
        for index, part in enumerate(slices)
        for peer, turns in zip(part.members, part.turns, strict=True)
    )
