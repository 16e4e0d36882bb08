"""A plan: which peer executes which slice, how much may be in flight, and which codec each edge uses. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.ids import Digest, PeerId


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """One slice: who executes it, how many micro-batches it may hold in flight (>= 1), whether it recomputes its forward."""

    peer: PeerId
    in_flight: int
    recompute: bool = False


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

    def slices_of(self, peer: PeerId) -> tuple[int, ...]:
        """The slices that a peer executes, in order."""
        return tuple(index for index, part in enumerate(self.slices) if part.peer == peer)
