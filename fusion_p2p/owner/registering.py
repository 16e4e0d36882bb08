"""What an owner says to the coordinator when it wants a plan: for a start, for the least change, or for a better one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fusion_p2p.config import TrainConfig
from fusion_p2p.graph.schema import Graph
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job.recovery import Holders
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.owner.checkpoint import Checkpoint
from fusion_p2p.plan.encoding import encode_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.job_messages import Content, TrainingSettings
from fusion_p2p.wire.swarm_messages import Current, HeldAt, Register

MAX_HELD = 1024


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained, under which incarnation, and from which checkpoint it goes on (None: from the graph's rules)."""

    job: JobId
    incarnation: int
    graph: Graph
    graph_bytes: bytes
    settings: TrainingSettings
    checkpoint: Checkpoint | None

    @property
    def state_step(self) -> int:
        """The step whose state the run goes on from."""
        return 0 if self.checkpoint is None else self.checkpoint.step


@dataclass(frozen=True, slots=True)
class SoFar:
    """What a run knows of its steps: how long one takes, how many are to come, what share of one a move has to gain."""

    step_s: float
    steps_left: int
    gain: float


class Registering:
    """Makes the registrations of one run. The owner serves its graph and plans by their digests."""

    def __init__(self, job: Job, config: TrainConfig, blobs: BlobServer, asked: Callable[[Plan], Plan]) -> None:
        """`asked` gives a plan the codecs that were asked for, where the run has changed them since."""
        self._job, self._config, self._blobs, self.asked = job, config, blobs, asked
        self.graph = Content(digest=blobs.offer(job.graph_bytes), num_bytes=len(job.graph_bytes))
        self.base_epoch = 0
        """The newest number of an epoch that was given out."""

    @property
    def job(self) -> JobId:
        return self._job.job

    def offer(self, plan: Plan) -> Content:
        """Serve a plan."""
        encoded = encode_plan(plan)
        return Content(digest=self._blobs.offer(encoded), num_bytes=len(encoded))

    def anew(self) -> Register:
        """A plan for a job that runs on nothing."""
        return self._register(None)

    def mend(self, plan: Plan, without: frozenset[PeerId], holders: Holders, steps_left: int) -> Register:
        """The least change of this plan that leaves out some peers. holders: who has the state of each slice."""
        return self._register(
            Current(
                purpose="mend",
                plan=self.offer(self.asked(plan)),
                without=tuple(sorted(without)),
                held=_held(plan, holders),
                steps_left=steps_left,
            )
        )

    def improve(self, plan: Plan, without: frozenset[PeerId], holders: Holders, so_far: SoFar) -> Register:
        """A plan that pays more than it costs to move there. holders: who keeps copies, for the status of the swarm."""
        return self._register(
            Current(
                purpose="improve",
                plan=self.offer(self.asked(plan)),
                without=tuple(sorted(without)),
                held=_held(plan, holders),
                step_s=so_far.step_s,
                steps_left=so_far.steps_left,
                gain=so_far.gain,
            )
        )

    def _register(self, current: Current | None) -> Register:
        config = self._config
        return Register(
            job=self._job.job,
            incarnation=self._job.incarnation,
            graph=self.graph,
            micro_batches=config.micro_batches,
            optimiser=self._job.settings.optimiser,
            precision=config.precision,
            base_epoch=self.base_epoch,
            peers=config.peers,
            scheduler=config.scheduler,
            recompute=config.recompute,
            schedule=config.pipeline,
            codec=config.codec,
            ratio=config.most_ratio,
            current=current,
        )


def _held(plan: Plan, holders: Holders) -> tuple[HeldAt, ...]:
    """Who has the state of a slice without executing it, as far as a message carries it."""
    held = [
        HeldAt(slice=index, peer=peer)
        for index, peers in holders.items()
        for peer in peers
        if index < len(plan.slices) and peer not in plan.slices[index].members
    ]
    return tuple(held[:MAX_HELD])
