"""What a run of an owner consists of: what it was started with, and the epoch that runs."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.clock import Clock
from fusion_p2p.config import TrainConfig
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId
from fusion_p2p.job.progress import RunReport
from fusion_p2p.job.topology import ReplicaEdges
from fusion_p2p.owner.data import DataSet
from fusion_p2p.owner.run_folder import RunFolder
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import TrainingSettings


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a run was started with: its settings, data, files, where it reports, and the clock."""

    config: TrainConfig
    data: DataSet
    folder: RunFolder
    report: RunReport
    clock: Clock


@dataclass(frozen=True, slots=True)
class Stage:
    """An epoch that runs: who it is, on what, with whom. It goes on from the states after `state_step`."""

    run: RunId
    graph: Graph
    plan: Plan
    parts: Cut
    edges: tuple[ReplicaEdges, ...]
    settings: TrainingSettings
    state_step: int

    @property
    def loss_slice(self) -> int:
        return next(part.index for part in self.parts.slices if part.outputs)

    @property
    def losses(self) -> tuple[tuple[int, ...], ...]:
        """For each replica the micro-batches whose losses it computes."""
        every = range(self.plan.micro_batches)
        return tuple(
            tuple(m for m in every if m in part.own_turns) if part.slice == self.loss_slice else () for part in self.edges
        )

    def describe(self, peer: PeerId) -> str:
        """A peer by its id and slices, for sentences."""
        slices = ", ".join(map(str, self.plan.slices_of(peer)))
        return f"peer {peer} (slice {slices})"
