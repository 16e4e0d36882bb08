"""What the owner's step loop needs of whatever keeps copies of its slices elsewhere; and the run that has no such thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fusion_p2p.ids import PeerId
from fusion_p2p.owner.links import Links
from fusion_p2p.owner.stage import Stage
from fusion_p2p.wire.messages import Message


class Guarding(Protocol):
    """Keeps copies of slices at peers that do not execute them."""

    @property
    def held(self) -> Mapping[int, tuple[tuple[PeerId, int], ...]]:
        """For each slice who holds a copy of it, and of which step."""

    @property
    def admitted(self) -> frozenset[PeerId]:
        """Peers that may fetch states of this run because they guard some."""

    @property
    def line(self) -> str:
        """What is held, in words."""

    def began(self, stage: Stage, links: Links) -> None:
        """An epoch runs, over these links."""

    def broke(self) -> None:
        """No epoch runs."""

    def wants_copy(self, step: int) -> bool:
        """Whether peers shall keep a copy of the states after this step, which is being decided."""

    def heard(self, peer: PeerId, message: Message) -> bool:
        """Take a message; False when it does not concern copies."""

    def gone(self, peer: PeerId, reason: str) -> None:
        """A peer is lost."""

    async def run(self) -> None:
        """Work until cancelled."""


class Unguarded:
    """Nobody keeps copies: a run that loses a peer goes back to its checkpoint."""

    held: Mapping[int, tuple[tuple[PeerId, int], ...]] = {}
    admitted: frozenset[PeerId] = frozenset()
    line: str = ""

    def began(self, stage: Stage, links: Links) -> None:
        """Nothing is to be done."""

    def broke(self) -> None:
        """Nothing is to be done."""

    def wants_copy(self, step: int) -> bool:
        """Never."""
        return False

    def heard(self, peer: PeerId, message: Message) -> bool:
        """Nothing concerns it."""
        return False

    def gone(self, peer: PeerId, reason: str) -> None:
        """It did not guard anything."""

    async def run(self) -> None:
        """There is no work."""
