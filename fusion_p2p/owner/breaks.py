"""What ends an epoch before its time. The run goes on in the next one; `recovery` says how."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.errors import FusionError
from fusion_p2p.ids import PeerId


@dataclass(frozen=True, slots=True)
class PeerLost:
    """A peer of the plan is gone, or no longer serves this run."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """A peer cannot execute one of its slices, or breaks the protocol (no slice): it is not used again by this run."""

    peer: PeerId
    slice: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class PeersParted:
    """`peer` cannot send to `other`, though the owner hears both."""

    peer: PeerId
    other: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class Stalled:
    """Nothing moves, and nobody is to blame."""

    reason: str


Break = PeerLost | PeerFailed | PeersParted | Stalled


class EpochBroken(FusionError):
    """An epoch cannot go on. Inside the owner only: the run either recovers or ends with RunStopped.

    at: where the run was, in words.
    """

    def __init__(self, what: Break, at: str = "") -> None:
        super().__init__(what.reason)
        self.what = what
        self.at = at
