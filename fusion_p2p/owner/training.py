"""The owner's step loop over one epoch: feed, collect reports, decide, have it applied, validate, keep checkpoints.

`job.transaction` decides; this moves messages. A decision is in the ledger, on the disk, before any peer hears of it. A
checkpoint is collected while the next step already runs, but that step is not committed before it is on the disk: so the last
checkpoint is never more than `checkpoint_every` steps old.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import transaction as transactions
from fusion_p2p.job.flow import Fate
from fusion_p2p.job.learning_rate import RateSettings, rate
from fusion_p2p.net.base import Transport
from fusion_p2p.owner import ledger as entries
from fusion_p2p.owner.admissions import Admissions
from fusion_p2p.owner.breaks import EpochBroken, PeerFailed, PeerLost, PeersParted, Stalled
from fusion_p2p.owner.changing import Change, Changes
from fusion_p2p.owner.collecting import collect, collection
from fusion_p2p.owner.feeding import Feeder
from fusion_p2p.owner.guarding import Guarding
from fusion_p2p.owner.hearing import Hearing
from fusion_p2p.owner.links import Event, Gone, Heard, Links, Parted
from fusion_p2p.owner.showing import Showing
from fusion_p2p.owner.stage import RunContext, Stage
from fusion_p2p.owner.step_book import StepBook
from fusion_p2p.wire.job_messages import (
    Abort,
    Applied,
    Commit,
    EvalReport,
    Failed,
    Halted,
    Kept,
    Leaving,
    Lost,
    Prepared,
    Refused,
    Skip,
    Started,
    StepReport,
)
from fusion_p2p.wire.messages import Message

DECISION = "decision"
RUNNING = "running"
ARE_YOU_THERE = Abort(epoch=0, reason="who has nothing of this run says so")
"""Said on every new stream: there is no such epoch, but a peer that was started anew answers that it has nothing."""


@dataclass(frozen=True, slots=True)
class Company:
    """Whom the step loop deals with: the peers of the plan, those that keep copies, and who wants the plan changed."""

    links: Links
    guards: Guarding
    changes: Changes
    admissions: Admissions
    showing: Showing


class Training:
    """Runs the steps of one epoch. EpochBroken when a peer or slice is lost; nothing is half-committed then."""

    def __init__(self, transport: Transport, stage: Stage, company: Company, context: RunContext) -> None:
        self._transport, self._stage, self._context = transport, stage, context
        self._links, self._guards, self._changes = company.links, company.guards, company.changes
        self._admissions, self._showing = company.admissions, company.showing
        self._config, self._data, self._folder, self._clock = context.config, context.data, context.folder, context.clock
        config = context.config
        self._rates = RateSettings(config.learning_rate, config.schedule, config.warmup, config.steps)
        self._book = StepBook(stage, config.clip, context.folder.ledger.history.skips, self._completed)
        self._feeder = Feeder(
            transport, stage.run, stage.graph, stage.plan, stage.edges, data=context.data, lost=self._lane_lost
        )
        self._what = collection(
            JobId(stage.run.job), stage.run.incarnation, stage.graph, stage.parts, stage.plan, stage.settings
        )
        self._collecting: asyncio.Task[Path] | None = None
        self._hearing = Hearing(company.links, context.clock, stage.plan.predicted_step_s)
        self._fed = stage.state_step

    async def run(self) -> Change | None:
        """Train to the last step, or to one after which the plan changes; keep the checkpoint of what was trained."""
        self._begin()
        try:
            async with self._feeding():
                return await self._run_steps()
        except EpochBroken as broken:
            raise EpochBroken(broken.what, self._where()) from None

    async def _run_steps(self) -> Change | None:
        first, change = self._stage.state_step, None
        if self._checkpoints(first) and first > self._folder.ledger.history.checkpoint_step:
            self._collect(first)  # the epoch before was to keep it, but was broken
            await self._collected()
        if first == 0 and self._validates(0):
            await self._validate(0)
        await self._catch_up(first)
        for step in range(first + 1, self._config.steps + 1):
            change = await self._run_step(step)
            if change is not None:
                break
        await self._collected()
        return change

    async def _catch_up(self, step: int) -> None:
        """Show the step that the epoch before had decided, but could not show."""
        pending = self._showing.pending
        if pending is None or pending.step != step:
            self._showing.pending = None
            return
        if self._validates(step):
            await self._validate(step)
        self._showing.show(self._stage, rate(self._rates, step), 0.0, {})

    def _begin(self) -> None:
        self._showing.began(self._stage.state_step)
        self._links.settle_all(RUNNING)
        for peer in self._stage.plan.peers:
            self._links.repeat(peer, ARE_YOU_THERE, RUNNING)
        self._changes.began(self._stage)
        self._guards.began(self._stage, self._links)
        self._admit(again=True)

    def _admit(self, *, again: bool = False) -> None:
        """Who executes slices and who guards them may fetch states from each other."""
        self._admissions.admit(self._stage.plan.peers | self._guards.admitted, again=again)

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

    async def _run_step(self, step: int) -> Change | None:
        """One step; what changes after it."""
        begun = self._clock.now()
        self._feed(step)
        decision = await self._decided()
        await self._collected()
        self._publish(decision)
        last = step == self._config.steps
        change = None if last else self._changes.wanted(step, self._stage.plan)
        if not last and change is None and not self._validates(step):
            self._feed(step + 1)
        while self._book.step == step:
            self._act(await self._hearing.next())
        step_s = self._clock.now() - begun
        self._hearing.longest_s = max(self._hearing.longest_s, step_s)
        self._changes.took(self._stage.plan, step_s)
        if self._checkpoints(step):
            self._collect(step)
        if self._validates(step):
            await self._validate(step)
        self._showing.show(self._stage, rate(self._rates, step), step_s, self._book.reports(step))
        return change

    def _feed(self, step: int) -> None:
        if step > self._fed:
            self._feeder.feed_step(step)
            self._fed = step

    async def _decided(self) -> transactions.Decide:
        while (decision := self._book.decision()) is None:
            self._act(await self._hearing.next())
        return decision

    def _publish(self, decision: transactions.Decide) -> None:
        """Write the fate of a step down, then tell every peer."""
        epoch, step, self._showing.pending = self._stage.run.epoch, decision.step, decision
        snapshot = self._guards.wants_copy(step) or self._checkpoints(step)
        self._showing.copies = self._guards.line
        self._admit()
        message: Commit | Skip
        if decision.fate is Fate.COMMIT:
            now = rate(self._rates, step)
            self._folder.ledger.append(entries.Commit(epoch=epoch, step=step, clip=decision.clip, rate=now, loss=decision.loss))
            message = Commit(epoch=epoch, step=step, clip=decision.clip, rate=now, snapshot=snapshot)
        else:
            self._folder.ledger.append(entries.Skip(epoch=epoch, step=step))
            said = f"step {step} is skipped: its loss or gradient is not finite{self._book.notes(step)}"
            self._context.report.say(said)
            message = Skip(epoch=epoch, step=step, snapshot=snapshot)
        for peer in sorted(self._stage.plan.peers):
            self._links.say(peer, message, until_settled=DECISION)

    def _completed(self) -> None:
        self._links.settle_all(DECISION)

    def _collect(self, step: int) -> None:
        self._collecting = asyncio.create_task(collect(self._transport, self._what, step, self._folder.checkpoints))

    async def _collected(self) -> None:
        """Wait for the checkpoint that is being collected, and for no longer than its peers live."""
        collecting = self._collecting
        if collecting is None:
            return
        try:
            path = await self._while_heard(collecting)
        except (NetworkError, WireError) as error:
            raise EpochBroken(Stalled(f"the last checkpoint could not be collected: {error}")) from None
        self._collecting = None
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
        self._book.open_validation(step + 1)
        self._feeder.feed_validation(step + 1, count)
        while len(self._book.validation) < count:
            self._act(await self._hearing.next())
        self._showing.validation_loss = sum(self._book.validation.values()) / count

    def _validates(self, step: int) -> bool:
        every = self._config.validate_every
        return every > 0 and (step % every == 0 or step == self._config.steps) and self._data.num_validation > 0

    def _checkpoints(self, step: int) -> bool:
        return step > 0 and (step % self._config.checkpoint_every == 0 or step == self._config.steps)

    def _act(self, event: Event) -> None:
        """Take in what has happened to a peer. EpochBroken when this epoch cannot go on after it."""
        peer = event.peer
        match event:
            case Gone(reason=reason) if peer in self._stage.plan.peers:
                raise EpochBroken(PeerLost(peer, reason))
            case Gone(reason=reason):
                self._guards.gone(peer, reason)
                self._admit()
            case Parted(other=other, reason=reason):
                if other in self._stage.plan.peers:
                    raise EpochBroken(PeersParted(peer, other, reason))
            case Heard(message=message):
                try:
                    self._take(peer, message)
                except WireError as error:
                    raise EpochBroken(PeerFailed(peer, None, f"it broke the protocol: {error}")) from None

    def _take(self, peer: PeerId, message: Message) -> None:
        epoch = self._stage.run.epoch
        if self._guards.heard(peer, message):
            self._admit()
            return
        if peer not in self._stage.plan.peers:
            return
        match message:
            case StepReport() | Applied() | EvalReport():
                self._book.take(peer, message)
            case Failed(epoch=at, replica=replica, reason=reason) if at == epoch:
                raise EpochBroken(PeerFailed(peer, self._slice_of(peer, replica), reason))
            case Lost(epoch=at, peer=other, reason=reason) if at == epoch:
                self._links.suspect(PeerId(other), peer, reason)
            case Refused(epoch=at, reason=reason) if at in (0, epoch):
                raise EpochBroken(PeerLost(peer, f"it no longer serves this run: {reason}"))
            case Leaving(reason=reason):
                self._changes.leaves(peer, reason)
            case Prepared() | Started() | Halted() | Kept() | Failed() | Lost() | Refused():
                pass  # said again by a peer whose stream was reset or that was frozen while an earlier epoch ended
            case other:
                raise WireError(f"unexpected {other.kind}")

    def _slice_of(self, peer: PeerId, replica: int) -> int:
        """The slice that a peer speaks of; its first one when it speaks of another's."""
        mine = self._stage.plan.replicas_of(peer)
        return self._stage.plan.replicas[replica if replica in mine else mine[0]].slice

    def _lane_lost(self, peer: PeerId, reason: str) -> None:
        self._links.suspect(peer, self._transport.peer_id, f"feeding it failed: {reason}")

    def _where(self) -> str:
        step = self._book.step
        if not self._book.undecided:
            return f"after step {step}"
        return f"at step {step}, micro-batch {self._feeder.reached(step)}"
