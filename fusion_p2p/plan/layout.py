"""A layout: how the chain of a model's operators is cut into stages, and which peers execute each. Pure data.

Schedulers search over layouts, because positions and indices are cheap; `plan.placing` turns the chosen one into a `Plan`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.plan.plan import Schedule


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks `first` to `last - 1` of a chain on `peers`: indices into `Network.peers`, several if the stage has replicas."""

    first: int
    last: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """Stages in order, without gaps. `ratios[i]` divides the bytes that cross from stage i to i + 1 (1: as they are)."""

    scheduler: str
    stages: tuple[Stage, ...]
    ratios: tuple[float, ...] = ()
    schedule: Schedule = "1f1b"
    recompute: bool = False

    @property
    def peers(self) -> frozenset[int]:
        """Everybody who executes something."""
        return frozenset(peer for stage in self.stages for peer in stage.peers)
