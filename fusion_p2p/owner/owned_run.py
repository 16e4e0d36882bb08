"""One run of an owner over a swarm: enlist peers, train epoch after epoch, recover; and say how to go on when it ends early."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from fusion_p2p.errors import GraphError, RunStopped, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.job.recovery import sources
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.owner import ledger as entries
from fusion_p2p.owner.admissions import Admissions
from fusion_p2p.owner.breaks import EpochBroken, PeerLost, Stalled
from fusion_p2p.owner.changing import Change, Changes, Finish, Reason, in_words
from fusion_p2p.owner.checkpoints import KeptCheckpoints
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.guarding import Guarding, Unguarded
from fusion_p2p.owner.launching import Launcher, States, Unlaunched
from fusion_p2p.owner.links import Event, Gone, Heard, Links
from fusion_p2p.owner.metrics import draw_loss
from fusion_p2p.owner.moving import Better, Enlist, Moving
from fusion_p2p.owner.observers import NoObservers, Observers
from fusion_p2p.owner.recovery import Helpers, Recovery
from fusion_p2p.owner.registering import Job, Registering
from fusion_p2p.owner.retuner import Retuner
from fusion_p2p.owner.run_folder import METRICS
from fusion_p2p.owner.showing import Showing
from fusion_p2p.owner.stage import RunContext, Stage
from fusion_p2p.owner.training import Company, Training
from fusion_p2p.peer.background import beside
from fusion_p2p.wire.blob_messages import FetchTensor
from fusion_p2p.wire.job_messages import Leaving, Stop
from fusion_p2p.wire.swarm_messages import Register

log = logging.getLogger(__name__)

DRAW_S = 30.0
"""Between two drawings of the loss curve."""
RETRY_S = 2.0
"""Between an aborted epoch and the next registration."""


@dataclass(frozen=True, slots=True)
class Partners:
    """Who helps a run from outside its plan.

    enlist: registers the job with the coordinator until a plan comes. better: asks it for one that pays more.
    observers: whom to ask about peers that are not heard. guards: who keeps copies of slices.
    """

    enlist: Enlist
    better: Better | None = None
    observers: Observers = field(default_factory=NoObservers)
    guards: Guarding = field(default_factory=Unguarded)


class OwnedRun:
    """Trains a job to its last step on whoever enlists."""

    def __init__(
        self,
        context: RunContext,
        job: Job,
        transport: Transport,
        blobs: BlobServer,
        partners: Partners,
        retuner: Retuner | None = None,
    ) -> None:
        """`blobs` is started by `finish`; `retuner` changes the codecs of the job later."""
        self._context, self._job, self._transport, self._blobs, self._partners = context, job, transport, blobs, partners
        self._config, self._folder, self._report = context.config, context.folder, context.report
        finish = Finish(context.config.finish_after)
        self._registering = Registering(job, context.config, blobs, finish.asked)
        self._launcher = Launcher(context, job, transport, self._registering)
        self._checkpoints = KeptCheckpoints(context.folder.checkpoints, job.checkpoint, context.report.say)
        reasons: Sequence[Reason] = [finish]
        steps = context.config.steps
        self._moving = Moving(self._registering, self._enlist, partners.better, steps, context.clock, partners.guards)
        self._changes = Changes(reasons if retuner is None else [retuner, *reasons], self._moving)
        self._retuner = retuner

    async def finish(self) -> None:
        """Train to the last step. RunStopped says why not, what is kept, and the command that resumes."""
        await self._blobs.start()
        self._blobs.offer_tensors(self._job.job, self._tensor)
        work = [self._keep_drawn(), self._moving.run(), self._partners.guards.run()]
        try:
            async with self._linked() as links, beside(*work, *([self._retuner.run()] if self._retuner is not None else [])):
                await self._train(links)
        except RunStopped as error:
            self._draw()
            raise RunStopped(f"{error}; {self._how_to_go_on()}") from None
        except asyncio.CancelledError:
            self._report.say(f"interrupted; {self._how_to_go_on()}")
            raise
        self._draw()

    async def _train(self, links: Links) -> None:
        """Train to the last step, epoch after epoch."""
        admissions = Admissions(self._job.job, self._job.incarnation, links)
        company = Company(links, self._partners.guards, self._changes, admissions, Showing(self._context))
        recovery = Recovery(
            self._context,
            Helpers(
                links,
                self._partners.guards,
                self._changes,
                admissions,
                self._launcher,
                self._registering,
                self._enlist,
                self._checkpoints,
            ),
        )
        stage, broken = await self._first(links)
        while True:
            try:
                if broken is not None:
                    stage, broken = await recovery.recover(stage, broken), None
                change = await Training(self._transport, stage, company, self._context).run()
            except EpochBroken as error:
                self._moving.broke()
                broken = error
                continue
            if change is None:
                break
            stage, broken = await self._changed(stage, change, company)
        self._folder.ledger.append(entries.End(step=self._config.steps))

    async def _first(self, links: Links) -> tuple[Stage, EpochBroken | None]:
        """Ask for a plan until one of them runs, or was broken when it had just begun."""
        while True:
            enlisted = await self._enlist(self._registering.anew())
            enlisted = replace(enlisted, plan=self._changes.started(self._job.state_step, enlisted.plan))
            try:
                draft = await asyncio.to_thread(self._launcher.understand, enlisted)
            except (GraphError, WireError) as error:
                await self._wait(f"the plan of {enlisted.coordinator} is refused: {error}")
                continue
            for line in draft.explanation:
                self._report.say(line)
            launched = await self._launcher.launch(links, draft, States(self._job.state_step, {}), _nothing, beside=False)
            if isinstance(launched, Stage):
                return launched, None
            if launched.stage is not None:
                return launched.stage, _broken(launched)
            for peer in links.peers:
                links.drop(peer, self._stop("the epoch was not started"))
            await self._wait(f"the plan could not be started: {launched.why.reason}")

    async def _changed(self, stage: Stage, change: Change, company: Company) -> tuple[Stage, EpochBroken | None]:
        """Go on in a new epoch, or in this one when a peer refuses; with what broke when the peers are in neither."""
        enlisted = self._launcher.again(change.plan) if change.enlisted is None else replace(change.enlisted, plan=change.plan)
        try:
            draft = await asyncio.to_thread(self._launcher.understand, enlisted)
        except (GraphError, WireError) as error:
            return self._unchanged(stage, change, f"the plan of {enlisted.coordinator} is refused: {error}", None), None
        lost: list[Gone] = []

        def aside(event: Event) -> None:
            self._meanwhile(stage, event, lost)

        holders = {index: part.members for index, part in enumerate(stage.plan.slices)}
        company.admissions.admit(stage.plan.peers | draft.plan.peers | company.guards.admitted, again=True)
        states = States(change.after, sources(stage.parts, draft.parts, holders))
        launched = await self._launcher.launch(company.links, draft, states, aside, beside=True)
        if isinstance(launched, Stage):
            self._report.say(f"new plan after step {change.after}: {in_words(stage.plan, change.plan)}")
            for peer in company.links.peers - launched.plan.peers - company.guards.admitted:
                company.links.drop(peer, self._stop("its slices have moved to other peers"))
            return launched, None
        if launched.stage is not None:
            return launched.stage, _broken(launched)
        lost += [Gone(peer, launched.why.reason) for peer in launched.why.gone & stage.plan.peers]
        if lost:
            return stage, EpochBroken(PeerLost(lost[0].peer, lost[0].reason), f"after step {change.after}")
        self._launcher.holders = stage.plan.peers
        return self._unchanged(stage, change, launched.why.reason, next(iter(launched.why.culprits), None)), None

    def _unchanged(self, stage: Stage, change: Change, reason: str, by: PeerId | None) -> Stage:
        self._report.say(f"the plan stays as it is: {reason}")
        self._changes.refused(change, by)
        return replace(stage, state_step=change.after)

    def _meanwhile(self, stage: Stage, event: Event, lost: list[Gone]) -> None:
        """What happens while the plan changes, and is not about that."""
        match event:
            case Gone(peer, reason) if peer in stage.plan.peers:
                lost.append(event)
            case Gone(peer, reason):
                self._partners.guards.gone(peer, reason)
            case Heard(peer, Leaving(reason=reason)):
                self._changes.leaves(peer, reason)
            case Heard(peer, message):
                self._partners.guards.heard(peer, message)

    async def _wait(self, reason: str) -> None:
        self._report.say(f"waiting: {reason}")
        await asyncio.sleep(RETRY_S)

    def _stop(self, reason: str) -> Stop:
        return Stop(job=self._job.job, reason=reason)

    async def _enlist(self, register: Register) -> Enlisted:
        return await self._partners.enlist(register)

    @contextlib.asynccontextmanager
    async def _linked(self) -> AsyncIterator[Links]:
        """Control streams to peers; when the run ends, however it ends, they are told to stop."""
        links = Links(self._transport, observers=self._partners.observers)
        keeping = asyncio.create_task(links.run())
        try:
            yield links
        finally:
            await links.dismiss(self._stop("the owner has ended the run"))
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _tensor(self, asker: PeerId, asked: FetchTensor) -> memoryview | None:
        """First values and restored state, for the peers of this run only: each question reads the disk."""
        return await self._checkpoints.tensor(asked) if asker in self._launcher.holders else None

    def _how_to_go_on(self) -> str:
        history = self._folder.ledger.history
        kept = f"the last checkpoint is of step {history.checkpoint_step}" if history.checkpoint_step else "no checkpoint yet"
        folder = shlex.quote(str(self._folder.path))
        command = f"fusion-peer train --resume {folder} --bootstrap {self._config.bootstrap[0]}"
        return f"step {history.step} was the last to count, {kept}; resume with: {command}"

    async def _keep_drawn(self) -> None:
        """Draw now and then: whoever is interrupted has no time for it."""
        while True:
            await asyncio.sleep(DRAW_S)
            await asyncio.to_thread(self._draw)

    def _draw(self) -> None:
        try:
            draw_loss(self._folder.path / METRICS, self._folder.loss_curve, f"{self._config.model} on {self._config.data}")
        except OSError as error:
            log.warning("the loss curve could not be drawn: %s", error)


def _nothing(event: Event) -> None:
    """Before the first epoch nothing else matters."""


def _broken(launched: Unlaunched) -> EpochBroken:
    """An epoch that was written down and broke at once."""
    why = launched.why
    peer = next(iter(sorted(why.culprits)), None)
    what = Stalled(why.reason) if peer is None else PeerLost(peer, why.reason)
    return EpochBroken(what, f"at the start of epoch {launched.stage.run.epoch}" if launched.stage is not None else "")
