"""What a run looks like from outside at one moment: made by the owner's driver, shown by the monitor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from fusion_p2p.ids import PeerId


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One peer of the plan during the last step. `busy_share` is its compute time by the time of the step, 0 to 1."""

    peer: PeerId
    slices: tuple[int, ...]
    busy_share: float
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The state of a run after a step.

    loss: mean over the micro-batches of the step; None before the first one and when the step was skipped.
    validation_loss: the newest one. units_per_s: tokens or images per second, over the last steps.
    """

    step: int
    steps: int
    epoch: int
    loss: float | None
    validation_loss: float | None
    rate: float
    step_s: float
    units_per_s: float
    unit: str
    peers: tuple[PeerLoad, ...]
    copies: str = ""
    """Who holds copies of the slices, in words."""

    @property
    def remaining_s(self) -> float:
        """Time to the last step at the speed of the last one, in seconds."""
        return (self.steps - self.step) * self.step_s


@dataclass(frozen=True, slots=True)
class PeerSample:
    """A peer's numbers at one moment, for a page of metrics; each field's `help` says what it counts."""

    slices: int = field(metadata={"help": "slices that this peer executes"})
    progress: int = field(metadata={"help": "tasks done and pieces of values received since the start"})
    bytes_received: int = field(metadata={"help": "bytes of values received since the start"})
    members: int = field(metadata={"help": "peers of the swarm heard lately, this one included"})
    coordinating: bool = field(metadata={"help": "1 while this peer coordinates the swarm"})


class RunReport(Protocol):
    """Where a driver says what happens."""

    def say(self, line: str) -> None:
        """One line for people: a phase, what is waited for, the plan, a warning."""

    def show(self, snapshot: RunSnapshot) -> None:
        """A step has been committed or skipped."""
