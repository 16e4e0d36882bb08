"""What this peer is engaged for: from an owner's order to slices that are built, run, halted and dropped.

`job.tenure` says what was promised to whom; this turns its actions into work and answers. One epoch is held, or one that runs
and its successor beside it; before the successor takes states over, the one that runs is halted.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_p2p.clock import Clock
from fusion_p2p.errors import FusionError
from fusion_p2p.execute.state import Snapshot
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import tenure as tenures
from fusion_p2p.job.tenure import Claim, Tenure
from fusion_p2p.net.base import Transport
from fusion_p2p.net.values import ValueReceiver
from fusion_p2p.peer.building import Bench, build_epoch
from fusion_p2p.peer.copies import Lineage
from fusion_p2p.peer.epoch_work import BuiltEpoch, EpochWork
from fusion_p2p.peer.keeping import Keeping
from fusion_p2p.peer.supervision import Supervisor
from fusion_p2p.peer.voice import Say
from fusion_p2p.wire.job_messages import (
    Abort,
    Commit,
    EvalReport,
    Failed,
    Halt,
    Halted,
    Kept,
    Prepare,
    Prepared,
    Refused,
    Skip,
    Start,
    Started,
    StepReport,
)
from fusion_p2p.wire.messages import Message

log = logging.getLogger(__name__)

NOTHING_HERE = "nothing of this run is held here"
InEpoch = Start | Abort | Halt | Commit | Skip


@dataclass(slots=True)
class Engagement:
    """Everything about one claim. told_to_halt: by its owner, so that only a newer epoch goes on from here."""

    claim: Claim
    prepare: Prepare
    built: BuiltEpoch | None = None
    work: EpochWork | None = None
    task: asyncio.Task[None] | None = None
    halting: asyncio.Task[None] | None = None
    told_to_halt: bool = False

    @property
    def lineage(self) -> Lineage:
        return Lineage(self.claim.owner, self.claim.job, self.claim.incarnation)

    def cancel(self) -> None:
        for task in (self.task, self.halting):
            if task is not None:
                task.cancel()


class Engagements:
    """The claims that are served, one job at a time. `say` reaches owners."""

    def __init__(
        self, transport: Transport, receiver: ValueReceiver, bench: Bench, clock: Clock, tasks: Supervisor, say: Say
    ) -> None:
        self._transport, self._receiver, self._bench, self._clock = transport, receiver, bench, clock
        self._tasks, self._say = tasks, say
        self._tenure = Tenure()
        self._asked: dict[Claim, Prepare] = {}
        self._held: dict[Claim, Engagement] = {}
        self._unsettled: dict[str, Message] = {}
        self._done_before = 0
        self.free = asyncio.Event()
        """Set while nothing is held."""
        self.free.set()

    def bind(self, keeping: Keeping) -> None:
        """Where copies of states go to and come from."""
        self._keeping = keeping

    @property
    def first(self) -> Engagement | None:
        """The one that counts: what runs, or is the first to."""
        return next(iter(self._held.values()), None)

    @property
    def progress(self) -> int:
        """Tasks and pieces of building that were done."""
        return self._done_before + sum(held.work.progress for held in self._held.values() if held.work is not None)

    @property
    def computing(self) -> bool:
        """Whether steps are being run, and not halted."""
        return any(held.work is not None and not held.work.halted for held in self._held.values())

    def at_work(self) -> Mapping[Lineage, Sequence[BuiltEpoch]]:
        """The run that is held, and its epochs that are built."""
        built: dict[Lineage, list[BuiltEpoch]] = defaultdict(list)
        for held in self._held.values():
            built[held.lineage] += [held.built] if held.built is not None else []
        return built

    def unsettled(self, owner: PeerId) -> Sequence[Message]:
        """What an owner has to be told again when it opens a new stream."""
        first = self.first
        return tuple(self._unsettled.values()) if first is not None and first.claim.owner == owner else ()

    def heard(self, owner: PeerId) -> None:
        self._step(tenures.Heard(owner))

    def tick(self) -> None:
        self._step(tenures.Tick())

    def prepare(self, owner: PeerId, message: Prepare) -> None:
        """An owner asks to prepare an epoch."""
        claim = Claim(owner, JobId(message.job), message.incarnation, message.epoch)
        self._asked[claim] = message
        self._step(tenures.Asked(claim, message.beside))
        self._asked.pop(claim, None)

    def stop(self, owner: PeerId, job: str, reason: str) -> None:
        """An owner has ended its run, or needs this peer no more."""
        first = self.first
        if first is not None and (first.claim.owner, first.claim.job) == (owner, job):
            self._step(tenures.Ended(first.claim, reason))

    def obey(self, owner: PeerId, message: InEpoch) -> None:
        """An owner's word about an epoch."""
        first = self.first
        if first is None or first.claim.owner != owner:
            self._refuse(owner, message)
            return
        engaged = next((held for held in self._held.values() if held.claim.epoch == message.epoch), None)
        if engaged is not None:
            self._obey(engaged, message)
        elif isinstance(message, Halt):
            self._say(owner, Halted(epoch=message.epoch, stock=self._keeping.guarded(owner)))
        else:
            log.info("stale %s for epoch=%d", message.kind, message.epoch)

    def _refuse(self, owner: PeerId, message: InEpoch) -> None:
        """Nothing of the owner's run is at work here, but copies may lie here."""
        stock = self._keeping.guarded(owner)
        if isinstance(message, Start):
            self._keeping.went_back(owner, message.state_step)
        if isinstance(message, Halt) and stock:
            self._say(owner, Halted(epoch=message.epoch, stock=stock))
        else:
            epoch = message.epoch if isinstance(message, Start | Halt) else 0
            self._say(owner, Refused(epoch=epoch, reason=NOTHING_HERE))

    def _obey(self, engaged: Engagement, message: InEpoch) -> None:
        match message:
            case Start():
                self._step(tenures.StartAsked(engaged.claim))
            case Abort():
                self._step(tenures.Ended(engaged.claim, message.reason))
            case Halt():
                self._halt(engaged)
            case Commit() | Skip() if engaged.work is not None:
                decided = message.step
                self._unsettled = {key: said for key, said in self._unsettled.items() if _outlives(said, decided)}
                engaged.work.decide(message)

    def _halt(self, engaged: Engagement) -> None:
        engaged.told_to_halt = True
        if engaged.halting is None or engaged.halting.done():
            engaged.halting = self._spawn(engaged, self._halted(engaged))

    async def _halted(self, engaged: Engagement) -> None:
        """Halt and say what lies here; when it stands still already, say it again."""
        claim = engaged.claim
        if engaged.work is not None:
            await engaged.work.halt()
        stock = self._keeping.stock(engaged.built) if engaged.built is not None else self._keeping.guarded(claim.owner)
        self._say(claim.owner, Halted(epoch=claim.epoch, stock=stock))

    def _step(self, event: tenures.Event) -> None:
        self._tenure, actions = tenures.step(self._tenure, event, self._clock.now())
        for action in actions:
            self._act(action)

    def _act(self, action: tenures.Action) -> None:
        match action:
            case tenures.Build(claim):
                self.free.clear()
                engaged = self._held[claim] = Engagement(claim, self._asked[claim])
                engaged.task = self._spawn(engaged, self._build(engaged))
            case tenures.SayPrepared(claim):
                self._say(claim.owner, Prepared(epoch=claim.epoch))
            case tenures.SayRefused(claim, reason):
                self._say(claim.owner, Refused(epoch=claim.epoch, reason=reason[:1000]))
                if claim not in self._tenure.claims:
                    self._let_go(claim)
            case tenures.Begin(claim, again):
                if not again:
                    self._begin(self._held[claim])
                self._say(claim.owner, Started(epoch=claim.epoch))
            case tenures.GoOn(claim):
                self._go_on(self._held[claim])
            case tenures.Drop(claim, reason, keep):
                log.info("dropping job=%s: %s", claim.job[:8], reason)
                self._drop(claim, keep=keep)

    async def _build(self, engaged: Engagement) -> None:
        claim, prepare = engaged.claim, engaged.prepare
        running = self._held.get(self._tenure.running) if self._tenure.running is not None else None
        before = running.built if running is not None else None
        try:
            if running is not None and running.work is not None:
                await running.work.halt()
            kept = await self._keeping.at_hand(engaged.lineage, prepare.state_step)
            built = await build_epoch(self._transport, self._bench, claim.owner, prepare, self._progressed, before, kept)
        except FusionError as error:
            log.warning("cannot take job=%s: %s", claim.job[:8], error)
            self._step(tenures.BuildFailed(claim, str(error)))
            return
        engaged.built = built
        thread, coding = self._bench.thread, self._bench.coding
        engaged.work = EpochWork(built, self._transport, self._receiver, thread, coding, self._tell, self._keep)
        self._receiver.open_inlet(built.run, engaged.work)
        self._keeping.offer(claim.job)
        self._step(tenures.Built(claim))

    def _progressed(self) -> None:
        self._done_before += 1

    def _begin(self, engaged: Engagement) -> None:
        if engaged.work is not None:
            self._keeping.copies.rolled_back(engaged.lineage, engaged.prepare.state_step)
            engaged.task = self._spawn(engaged, engaged.work.run())

    def _go_on(self, engaged: Engagement) -> None:
        if engaged.work is not None and not engaged.told_to_halt:
            engaged.work.resume()

    def _drop(self, claim: Claim, *, keep: bool) -> None:
        if self.first is not None and self.first.claim == claim:
            self._unsettled.clear()
        engaged = self._let_go(claim)
        if engaged is None:
            return
        self._done_before += engaged.work.progress if engaged.work is not None else 0
        engaged.cancel()
        if engaged.built is not None:
            self._receiver.close_inlet(engaged.built.run)
            if keep:
                self._keeping.retire(engaged.lineage, engaged.built)

    def _let_go(self, claim: Claim) -> Engagement | None:
        engaged = self._held.pop(claim, None)
        if not self._held:
            self.free.set()
        return engaged

    def _keep(self, built: BuiltEpoch, index: int, snapshot: Snapshot) -> None:
        """Keep a copy of a slice of our own, and tell its owner when its digest is known."""
        lineage = Lineage(built.owner, built.run.job, built.run.incarnation)
        copy = self._keeping.keep(lineage, index, snapshot)

        def tell(kept: Kept) -> None:
            self._tell(kept, f"kept {index}")

        self._tasks.spawn(self._keeping.tell_kept(built, copy, tell))

    def _tell(self, message: Message, key: str | None) -> None:
        """Say something to the owner of the job; with a key, until the step is decided."""
        if self.first is None:
            return
        if key is not None:
            self._unsettled[key] = message
        self._say(self.first.claim.owner, message)

    def _spawn(self, engaged: Engagement, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def failed(reason: str) -> None:
            if engaged is self._held.get(engaged.claim):
                self._say(engaged.claim.owner, Failed(epoch=engaged.claim.epoch, replica=0, reason=reason))
                self._step(tenures.Ended(engaged.claim, reason))

        return self._tasks.spawn(work, failed)


def _outlives(said: Message, decided: int) -> bool:
    """Whether something said to the owner still matters after a step was decided: what is of a later step, or of none."""
    return not isinstance(said, StepReport | EvalReport) or said.step > decided
