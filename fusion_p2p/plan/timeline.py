"""What the simulator says about one step: how long it took, who was busy, and if traced, every task and message. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fusion_p2p.plan.network import Queue

TaskKind = Literal["F", "B"]


@dataclass(frozen=True, slots=True)
class TaskSpan:
    """Forward or backward of one micro-batch on a member of a stage, in seconds since the step began."""

    stage: int
    member: int
    kind: TaskKind
    micro_batch: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class TransferSpan:
    """One message on the link between two nodes: it occupies the link from start to end and arrives later.

    edge: index into `Pipeline.edges`; `kind` F carries values forward, B gradients back.
    """

    edge: int
    kind: TaskKind
    micro_batch: int
    source: int
    target: int
    start_s: float
    end_s: float
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """What one step took.

    busy_s, peak_in_flight: for every stage, for every member. queue_busy_s: for every link that carried something; on a
    half-duplex network pairs have one entry, by the lower node first, for both directions. queue_shared_s: what gradients of
    shared parameters and their sums took of that. Spans are kept only when traced, by start; shared gradients have none.
    """

    step_s: float
    busy_s: tuple[tuple[float, ...], ...]
    peak_in_flight: tuple[tuple[int, ...], ...]
    queue_busy_s: dict[Queue, float]
    queue_shared_s: dict[Queue, float]
    tasks: tuple[TaskSpan, ...] = ()
    transfers: tuple[TransferSpan, ...] = ()

    @property
    def link_busy_s(self) -> dict[tuple[int, int], float]:
        """Of `queue_busy_s` the pairs of nodes."""
        return {(source, target): busy_s for (way, source, target), busy_s in self.queue_busy_s.items() if way == "pair"}
