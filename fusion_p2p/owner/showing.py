"""What the owner shows of a step: the line of metrics, the view of the run, and once what limits it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from fusion_p2p.ids import PeerId
from fusion_p2p.job import transaction as transactions
from fusion_p2p.job.flow import Fate
from fusion_p2p.job.progress import PeerLoad, RunSnapshot
from fusion_p2p.owner.stage import RunContext, Stage
from fusion_p2p.plan import advice
from fusion_p2p.plan.plan import Replica
from fusion_p2p.wire.job_messages import StepReport

ADVISED_AFTER = 5
"""Steps after which it shows what limits a run; the first ones take longer."""


class Showing:
    """Shows the steps of a run, over all its epochs."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.validation_loss: float | None = None
        """The newest one."""
        self._shown = 0
        self.copies = ""
        """Who holds copies of slices, in words."""
        self.pending: transactions.Decide | None = None
        """What was decided, but not shown yet: its epoch may have been broken before all had applied it."""

    def began(self, state_step: int) -> None:
        """An epoch goes on from this step; what was validated later did not happen."""
        if state_step < self._shown:
            self.validation_loss = None

    def show(self, stage: Stage, rate: float, step_s: float, reports: Mapping[int, StepReport]) -> None:
        """The pending step was applied by all."""
        decision, self.pending = self.pending, None
        if decision is None:
            return
        context, committed = self._context, decision.fate is Fate.COMMIT
        units = context.data.units_per_micro_batch * stage.plan.micro_batches
        snapshot = RunSnapshot(
            step=decision.step,
            steps=context.config.steps,
            epoch=stage.run.epoch,
            loss=decision.loss if committed else None,
            validation_loss=self.validation_loss,
            rate=rate,
            step_s=step_s,
            units_per_s=units / step_s if step_s > 0 else 0.0,
            unit=context.data.unit,
            peers=_loads(stage.plan.replicas, reports, step_s),
            copies=self.copies,
        )
        context.folder.metrics.append(snapshot, context.clock.wall(), decision.norm if committed else None)
        context.report.show(snapshot)
        self._shown = decision.step
        if decision.step == stage.state_step + ADVISED_AFTER:
            found = advice.in_a_run(stage.graph, stage.plan, [peer.busy_share for peer in snapshot.peers])
            if found is not None:
                context.report.say(found)


def _loads(replicas: Sequence[Replica], reports: Mapping[int, StepReport], step_s: float) -> tuple[PeerLoad, ...]:
    """What each peer did in a step, from the reports of its replicas."""
    by_peer: dict[PeerId, list[StepReport]] = defaultdict(list)
    for index, report in sorted(reports.items()):
        by_peer[replicas[index].peer].append(report)
    return tuple(
        PeerLoad(
            peer,
            tuple(replicas[report.replica].slice for report in own),
            min(1.0, sum(report.busy_s for report in own) / step_s) if step_s > 0 else 0.0,
            sum(report.bytes_sent for report in own),
            sum(report.bytes_received for report in own),
        )
        for peer, own in by_peer.items()
    )
