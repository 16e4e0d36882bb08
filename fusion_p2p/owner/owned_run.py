"""One run of an owner over a swarm: enlist peers, start an epoch, train; and say how to go on when something ends it early."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from fusion_p2p.compress.dense import to_bytes
from fusion_p2p.errors import AddressError, GraphError, NetworkError, RunStopped, WireError
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Cut, cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import epochs
from fusion_p2p.job.topology import ReplicaEdges, replica_edges
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.owner import ledger as entries
from fusion_p2p.owner.changing import Change, Changes, Finish, in_words
from fusion_p2p.owner.checkpoint import Checkpoint
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.epoch_start import EpochStart
from fusion_p2p.owner.links import Links
from fusion_p2p.owner.metrics import draw_loss
from fusion_p2p.owner.retuner import Retuner
from fusion_p2p.owner.run_folder import METRICS
from fusion_p2p.owner.training import RunContext, Stage, Training
from fusion_p2p.peer.background import beside
from fusion_p2p.plan.encoding import check_plan, encode_plan
from fusion_p2p.plan.explain import explain
from fusion_p2p.wire.blob_messages import FetchTensor
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import Contact, Content, Prepare, Stop, TrainingSettings
from fusion_p2p.wire.swarm_messages import Register

log = logging.getLogger(__name__)

FAREWELL_S = 2.0
"""How long the owner waits for its last words to be heard."""
DRAW_S = 30.0
"""Between two drawings of the loss curve."""
DIAL_S = 5.0
RETRY_S = 2.0
"""Between an aborted epoch and the next registration."""


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
class _Draft:
    """A proposal, checked and cut."""

    parts: Cut
    edges: tuple[ReplicaEdges, ...]
    explanation: tuple[str, ...]


class OwnedRun:
    """Trains a job to its last step on whoever enlists."""

    def __init__(
        self,
        context: RunContext,
        job: Job,
        transport: Transport,
        enlist: Callable[[Register], Awaitable[Enlisted]],
        retuner: Retuner | None = None,
    ) -> None:
        """`enlist` registers the job with the swarm's coordinator until a plan comes; `retuner` changes its codecs later."""
        self._context, self._job, self._transport, self._enlist = context, job, transport, enlist
        self._config, self._folder, self._report = context.config, context.folder, context.report
        self._blobs = BlobServer(transport)
        self._holders: frozenset[PeerId] = frozenset()
        started = self._folder.ledger.history.start
        self._starting = EpochStart(context.clock, started.epoch if started is not None else 0)
        self._retuner = retuner
        finish = Finish(context.config.finish_after)
        self._changes = Changes([retuner, finish] if retuner is not None else [finish])

    async def finish(self) -> None:
        """Train to the last step. RunStopped says why not, what is kept, and the command that resumes."""
        await self._blobs.start()
        graph = Content(digest=self._blobs.offer(self._job.graph_bytes), num_bytes=len(self._job.graph_bytes))
        self._blobs.offer_tensors(self._job.job, self._tensor)
        try:
            async with beside(self._keep_drawn(), *([self._retuner.run()] if self._retuner is not None else [])):
                await self._train_with_whoever_enlists(graph)
        except RunStopped as error:
            self._draw()
            raise RunStopped(f"{error}; {self._how_to_go_on()}") from None
        except asyncio.CancelledError:
            self._report.say(f"interrupted; {self._how_to_go_on()}")
            raise
        self._draw()

    async def _train_with_whoever_enlists(self, graph: Content) -> None:
        while True:
            enlisted = await self._enlist(self._registration(graph))
            if await self._try_epoch(graph, enlisted):
                return
            await asyncio.sleep(RETRY_S)

    def _registration(self, graph: Content) -> Register:
        config = self._config
        return Register(
            job=self._job.job,
            incarnation=self._job.incarnation,
            graph=graph,
            micro_batches=config.micro_batches,
            optimiser=self._job.settings.optimiser,
            precision=config.precision,
            base_epoch=self._starting.state.epoch,
            peers=config.peers,
            scheduler=config.scheduler,
            recompute=config.recompute,
            schedule=config.pipeline,
            codec=config.codec,
            ratio=config.most_ratio,
        )

    async def _try_epoch(self, graph: Content, enlisted: Enlisted) -> bool:
        """Start the proposal's epoch and train in it; False when it could not be started."""
        enlisted = replace(enlisted, plan=self._changes.started(self._job.state_step, enlisted.plan))
        try:
            draft = await asyncio.to_thread(self._understand, enlisted)
        except (GraphError, WireError) as error:
            return self._wait(f"the plan of {enlisted.coordinator} is refused: {error}")
        for line in draft.explanation:
            self._report.say(line)
        peers = enlisted.plan.peers
        self._holders = peers
        await self._meet(enlisted.contacts)
        async with self._linked(sorted(peers)) as links:
            order = self._order(graph, enlisted, self._job.state_step)
            reason = await self._start(links, order, enlisted, draft)
            if reason is not None:
                return self._wait(f"the plan could not be started: {reason}")
            await self._train(self._stage(order, enlisted, draft), links, enlisted, graph)
        return True

    async def _start(self, links: Links, order: Prepare, enlisted: Enlisted, draft: _Draft) -> str | None:
        """Start the epoch of an order; or why that could not be done."""
        base = self._starting.state.epoch
        proposed = epochs.Proposed(enlisted.term, enlisted.coordinator, base, enlisted.plan.peers)
        return await self._starting.start(links, proposed, order, self._recorder(order, enlisted, draft))

    def _stage(self, order: Prepare, enlisted: Enlisted, draft: _Draft) -> Stage:
        run = RunId(self._job.job, self._job.incarnation, order.epoch)
        return Stage(run, self._job.graph, enlisted.plan, draft.parts, draft.edges, self._job.settings, order.state_step)

    def _wait(self, reason: str) -> bool:
        self._report.say(f"waiting: {reason}")
        return False

    def _understand(self, enlisted: Enlisted) -> _Draft:
        """Check and cut: GraphError or WireError when the proposal is not a plan for our graph."""
        graph, plan = self._job.graph, enlisted.plan
        parts = cut(graph, plan.slice_of)
        check_plan(plan, graph, parts)
        explanation = explain(plan, graph, parts, workload(graph), self._job.settings.optimiser)
        return _Draft(parts, replica_edges(graph, parts, plan), tuple(explanation))

    async def _meet(self, contacts: Sequence[Contact]) -> None:
        """Learn the way to the peers. One that cannot be dialled shows when its control stream is opened."""

        async def dial(contact: Contact) -> None:
            with contextlib.suppress(NetworkError, AddressError):
                await self._transport.connect(contact.addresses, timeout_s=DIAL_S)

        await asyncio.gather(*(dial(contact) for contact in contacts))

    def _order(self, graph: Content, enlisted: Enlisted, state_step: int, *, beside: bool = False) -> Prepare:
        """What every peer is asked to prepare; its epoch is the one that is given out when it is sent."""
        encoded = encode_plan(enlisted.plan)
        return Prepare(
            job=self._job.job,
            incarnation=self._job.incarnation,
            epoch=self._starting.state.epoch + 1,
            graph=graph,
            plan=Content(digest=self._blobs.offer(encoded), num_bytes=len(encoded)),
            settings=self._job.settings,
            state_step=state_step,
            contacts=enlisted.contacts,
            beside=beside,
        )

    def _recorder(self, order: Prepare, enlisted: Enlisted, draft: _Draft) -> Callable[[], None]:
        """Keeps the plan and writes the start of its epoch into the ledger."""
        start = entries.Start(
            epoch=order.epoch,
            state_step=order.state_step,
            plan=order.plan.digest,
            coordinator=enlisted.coordinator,
            term=enlisted.term,
            codecs=tuple(edge.codec for edge in enlisted.plan.edges),
        )

        def record() -> None:
            self._folder.write_plan(enlisted.plan, draft.explanation, order.epoch)
            self._folder.ledger.append(start)

        return record

    async def _train(self, stage: Stage, links: Links, enlisted: Enlisted, graph: Content) -> None:
        """Train to the last step, epoch after epoch."""
        while True:
            change = await Training(self._transport, stage, links, self._context, self._changes).run()
            if change is None:
                break
            stage = await self._changed(stage, change, links, enlisted, graph)
        self._folder.ledger.append(entries.End(step=self._config.steps))

    async def _changed(self, stage: Stage, change: Change, links: Links, enlisted: Enlisted, graph: Content) -> Stage:
        """Go on in a new epoch under another plan for the same slices, or in this one when a peer refuses.

        RunStopped when the peers are in neither.
        """
        changed = replace(enlisted, plan=change.plan)
        draft = await asyncio.to_thread(self._understand, changed)
        order = self._order(graph, changed, change.after, beside=True)
        reason = await self._start(links, order, changed, draft)
        if reason is None:
            self._report.say(f"new plan after step {change.after}: {in_words(stage.plan, change.plan)}")
            return self._stage(order, changed, draft)
        started = self._folder.ledger.history.start
        if links.gone or (started is not None and started.epoch == order.epoch):
            raise RunStopped(f"the plan could not be changed: {reason}")
        self._report.say(f"the plan stays as it is: {reason}")
        self._changes.refused(change)
        return replace(stage, state_step=change.after)

    @contextlib.asynccontextmanager
    async def _linked(self, peers: list[PeerId]) -> AsyncIterator[Links]:
        """Control streams to the peers; when the run ends, however it ends, they are told to stop."""
        links = Links(self._transport, peers)
        keeping = asyncio.create_task(links.run())
        try:
            yield links
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await links.dismiss(Stop(job=self._job.job, reason="the owner has ended the run"))
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    async def _tensor(self, asker: PeerId, asked: FetchTensor) -> memoryview | None:
        """First values and restored state, for the peers of this run only: each question reads the disk."""
        checkpoint = self._job.checkpoint
        if (
            checkpoint is None
            or asker not in self._holders
            or asked.step != checkpoint.step
            or asked.name not in checkpoint.names
        ):
            return None
        return to_bytes(await asyncio.to_thread(checkpoint.tensor, asked.name))

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
