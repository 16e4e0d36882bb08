"""The owner's step loop over one epoch: feed, collect reports, decide, have it applied, validate, keep checkpoints.

`job.transaction` decides; this moves messages. A decision is in the ledger, on the disk, before any peer hears of it. A
checkpoint is collected while the next step already runs, but that step is not committed before it is on the disk: so the last
checkpoint is never more than `checkpoint_every` steps old.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_p2p.clock import Clock
from fusion_p2p.config import TrainConfig
from fusion_p2p.errors import NetworkError, RunStopped, WireError
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import transaction as transactions
from fusion_p2p.job.flow import Fate
from fusion_p2p.job.learning_rate import RateSettings, rate
from fusion_p2p.job.progress import PeerLoad, RunReport, RunSnapshot
from fusion_p2p.job.topology import ReplicaEdges
from fusion_p2p.job.transaction import Terms, Transaction
from fusion_p2p.net.base import Transport
from fusion_p2p.owner import ledger as entries
from fusion_p2p.owner.changing import Change, Changes
from fusion_p2p.owner.collecting import collect, collection
from fusion_p2p.owner.data import DataSet
from fusion_p2p.owner.feeding import Feeder
from fusion_p2p.owner.hearing import Hearing
from fusion_p2p.owner.links import Gone, Heard, Links
from fusion_p2p.owner.run_folder import RunFolder
from fusion_p2p.plan import advice
from fusion_p2p.plan.plan import Plan, Replica
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import (
    Applied,
    Commit,
    EvalReport,
    Failed,
    Lost,
    Prepared,
    Refused,
    Skip,
    Started,
    StepReport,
    TrainingSettings,
)
from fusion_p2p.wire.messages import Message

DECISION = "decision"
ADVISED_AFTER = 5
"""Steps after which it shows what limits a run; the first ones take longer."""


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
    """An epoch that runs: who it is, on what, with whom."""

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


class Training:
    """Runs steps until the last one. RunStopped when a peer or slice is lost; nothing is half-committed then."""

    def __init__(self, transport: Transport, stage: Stage, links: Links, context: RunContext, changes: Changes) -> None:
        self._changes = changes
        self._change: Change | None = None
        self._transport, self._stage, self._links, self._config = transport, stage, links, context.config
        self._data, self._folder, self._report, self._clock = context.data, context.folder, context.report, context.clock
        config, data, clock = context.config, context.data, context.clock
        self._rates = RateSettings(config.learning_rate, config.schedule, config.warmup, config.steps)
        self._replicas = stage.plan.replicas
        terms = Terms(tuple(part.answers for part in stage.edges), stage.losses, config.clip)
        self._transaction = Transaction(terms, stage.state_step + 1)
        self._feeder = Feeder(transport, stage.run, stage.graph, stage.plan, stage.edges, data=data, lost=self._lane_lost)
        self._what = collection(
            JobId(stage.run.job), stage.run.incarnation, stage.graph, stage.parts, stage.plan, stage.settings
        )
        self._reports: dict[int, dict[int, StepReport]] = defaultdict(dict)
        self._decision: transactions.Decide | None = None
        self._validating = 0
        self._validation: dict[int, float] = {}
        self._validation_loss: float | None = None
        self._collecting: asyncio.Task[Path] | None = None
        self._hearing = Hearing(links, clock, stage.describe, stage.plan.predicted_step_s)
        self._fed = stage.state_step

    async def run(self) -> Change | None:
        """Train to the last step, or to one after which the plan changes; keep the checkpoint of what was trained."""
        async with self._feeding():
            if self._validates(self._stage.state_step) and self._stage.state_step == 0:
                await self._validate(0)
            for step in range(self._stage.state_step + 1, self._config.steps + 1):
                await self._run_step(step)
                if self._change is not None:
                    break
            await self._collected()
        return self._change

    @contextlib.asynccontextmanager
    async def _feeding(self) -> AsyncIterator[None]:
        feeding = asyncio.create_task(self._feeder.run())
        try:
            yield
        finally:
            tasks = [task for task in (feeding, self._collecting) if task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_step(self, step: int) -> None:
        begun = self._clock.now()
        self._feed(step)
        decision = await self._decided()
        await self._collected()
        self._publish(decision)
        last = step == self._config.steps
        self._change = None if last else self._changes.wanted(step, self._stage.plan)
        if not last and self._change is None and not self._validates(step):
            self._feed(step + 1)
        while self._transaction.step == step:
            self._act(await self._hearing.next())
        step_s = self._clock.now() - begun
        self._hearing.longest_s = max(self._hearing.longest_s, step_s)
        self._changes.took(self._stage.plan, step_s)
        if self._checkpoints(step):
            self._collecting = asyncio.create_task(collect(self._transport, self._what, step, self._folder.checkpoints))
        if self._validates(step):
            await self._validate(step)
        self._show(decision, step_s)

    def _feed(self, step: int) -> None:
        if step > self._fed:
            self._feeder.feed_step(step)
            self._fed = step

    async def _decided(self) -> transactions.Decide:
        while self._decision is None:
            self._act(await self._hearing.next())
        decision, self._decision = self._decision, None
        return decision

    def _publish(self, decision: transactions.Decide) -> None:
        """Write the fate of a step down, then tell every peer."""
        epoch, step = self._stage.run.epoch, decision.step
        message: Commit | Skip
        if decision.fate is Fate.COMMIT:
            now = rate(self._rates, step)
            self._folder.ledger.append(entries.Commit(epoch=epoch, step=step, clip=decision.clip, rate=now, loss=decision.loss))
            message = Commit(epoch=epoch, step=step, clip=decision.clip, rate=now, snapshot=self._checkpoints(step))
        else:
            self._folder.ledger.append(entries.Skip(epoch=epoch, step=step))
            self._report.say(f"step {step} is skipped: its loss or gradient is not finite{self._notes(step)}")
            message = Skip(epoch=epoch, step=step, snapshot=self._checkpoints(step))
        for peer in self._peers():
            self._links.say(peer, message, until_settled=DECISION)

    def _notes(self, step: int) -> str:
        for index, report in sorted(self._reports[step].items()):
            if report.note:
                replica = self._replicas[index]
                return f" (slice {replica.slice}, {replica.peer}: {report.note})"
        return ""

    async def _collected(self) -> None:
        """Wait for the checkpoint that is being collected, and for no longer than its peers live."""
        collecting, self._collecting = self._collecting, None
        if collecting is None:
            return
        try:
            path = await self._while_heard(collecting)
        except (NetworkError, WireError) as error:
            raise RunStopped(f"the last checkpoint could not be collected: {error}") from None
        self._folder.ledger.append(entries.CheckpointWritten(step=int(path.name.rpartition("-")[2])))

    async def _while_heard(self, task: asyncio.Task[Path]) -> Path:
        self._hearing.patient = True
        while not task.done():
            hearing = asyncio.create_task(self._hearing.next())
            try:
                await asyncio.wait([task, hearing], return_when=asyncio.FIRST_COMPLETED)
                if hearing.done():
                    self._act(hearing.result())
            finally:
                if not hearing.done():
                    hearing.cancel()
        self._hearing.patient = False
        return task.result()

    async def _validate(self, step: int) -> None:
        """The mean loss over the validation micro-batches, of the model after `step`."""
        count = min(self._config.validation_batches, self._data.num_validation)
        self._validation.clear()
        self._validating = step + 1
        self._feeder.feed_validation(step + 1, count)
        while len(self._validation) < count:
            self._act(await self._hearing.next())
        self._validation_loss = sum(self._validation.values()) / count

    def _validates(self, step: int) -> bool:
        every = self._config.validate_every
        return every > 0 and (step % every == 0 or step == self._config.steps) and self._data.num_validation > 0

    def _checkpoints(self, step: int) -> bool:
        return step % self._config.checkpoint_every == 0 or step == self._config.steps

    def _act(self, heard: Heard) -> None:
        """Take in one message. RunStopped when the peer breaks the protocol or reports the end of something."""
        try:
            self._take(heard.peer, heard.message)
        except WireError as error:
            raise RunStopped(f"{self._stage.describe(heard.peer)} broke the protocol: {error}") from None

    def _take(self, peer: PeerId, message: Message) -> None:
        match message:
            case Prepared() | Started():
                pass
            case StepReport(epoch=epoch) | Applied(epoch=epoch) | EvalReport(epoch=epoch) if epoch < self._stage.run.epoch:
                pass  # said again by a peer whose stream was reset while that epoch ended
            case StepReport() as report if self._holds(peer, report.replica, report.epoch):
                if report.step in (self._transaction.step, self._transaction.step + 1):
                    self._reports[report.step][report.replica] = report
                told = transactions.Report(report.squares, report.losses)
                self._step(transactions.Reported(report.replica, report.step, told))
            case Applied(replica=index, step=step, epoch=epoch) if self._holds(peer, index, epoch):
                self._step(transactions.Applied(index, step))
            case EvalReport() as report if self._validates_for(peer, report):
                if report.step == self._validating:
                    self._validation[report.micro_batch] = report.loss
            case Failed(epoch=epoch) | Lost(epoch=epoch) if epoch != self._stage.run.epoch:
                pass  # said again by a peer that was frozen while that epoch ended
            case Failed(reason=reason):
                raise RunStopped(f"{self._stage.describe(peer)} failed: {reason}")
            case Lost(peer=other, reason=reason):
                raise RunStopped(f"{self._stage.describe(PeerId(other))} was lost to {peer}: {reason}")
            case Refused(epoch=epoch) if epoch not in (0, self._stage.run.epoch):
                pass  # a change of the plan that another peer had refused before
            case Refused(reason=reason):
                raise RunStopped(f"{self._stage.describe(peer)} no longer serves this run: {reason}")
            case other:
                raise WireError(f"unexpected {other.kind}")

    def _holds(self, peer: PeerId, index: int, epoch: int) -> bool:
        """Whether a peer may speak for a replica in this epoch. WireError when it is not its."""
        if index >= len(self._replicas) or self._replicas[index].peer != peer:
            raise WireError(f"spoke for replica {index}, which it does not hold")
        return epoch == self._stage.run.epoch

    def _validates_for(self, peer: PeerId, report: EvalReport) -> bool:
        """Whether the loss comes from who executes that micro-batch, in this epoch. WireError when not."""
        for index, replica in enumerate(self._replicas):
            if replica.slice == self._stage.loss_slice and report.micro_batch in replica.turns:
                return self._holds(peer, index, report.epoch)
        raise WireError(f"spoke of micro-batch {report.micro_batch}, which is nobody's")

    def _step(self, event: transactions.Event) -> None:
        self._transaction, actions = transactions.step(self._transaction, event)
        for action in actions:
            match action:
                case transactions.Decide():
                    self._decision = action
                case transactions.StopRun(reason):
                    raise RunStopped(f"{reason}{self._notes(self._transaction.step)}")
                case transactions.Complete():
                    self._links.settle_all(DECISION)

    def _lane_lost(self, peer: PeerId, reason: str) -> None:
        self._links.inbox.put_nowait(Gone(peer, f"feeding it failed: {reason}"))

    def _peers(self) -> list[PeerId]:
        return sorted(self._stage.plan.peers)

    def _show(self, decision: transactions.Decide, step_s: float) -> None:
        committed = decision.fate is Fate.COMMIT
        units = self._data.units_per_micro_batch * self._stage.plan.micro_batches
        snapshot = RunSnapshot(
            step=decision.step,
            steps=self._config.steps,
            epoch=self._stage.run.epoch,
            loss=decision.loss if committed else None,
            validation_loss=self._validation_loss,
            rate=rate(self._rates, decision.step),
            step_s=step_s,
            units_per_s=units / step_s if step_s > 0 else 0.0,
            unit=self._data.unit,
            peers=_loads(self._replicas, self._reports.pop(decision.step, {}), step_s),
        )
        self._folder.metrics.append(snapshot, self._clock.wall(), decision.norm if committed else None)
        self._report.show(snapshot)
        if decision.step == self._stage.state_step + ADVISED_AFTER:
            found = advice.in_a_run(self._stage.graph, self._stage.plan, [peer.busy_share for peer in snapshot.peers])
            if found is not None:
                self._report.say(found)


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
