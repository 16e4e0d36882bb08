"""The replicas of slices that one epoch gives to this peer, at work: mailboxes, the compute loop, and what the owner is told.

The event loop only moves payloads; `job.flow` decides what runs next, `peer.tasks` runs it on the compute thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor

from fusion_p2p.errors import SliceFailed, WireError
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.execute.handover import Handed
from fusion_p2p.execute.state import SliceState, Snapshot
from fusion_p2p.graph.schema import Graph, TensorType
from fusion_p2p.graph.slices import Cut
from fusion_p2p.ids import PeerId
from fusion_p2p.job import flow as flows
from fusion_p2p.job.flow import Fate, Flow, Task, TaskKind
from fusion_p2p.job.topology import TRIGGER, ReplicaEdges, edge_credits
from fusion_p2p.net.base import Transport
from fusion_p2p.net.values import Expected, Payload, ValueReceiver, ValueSender
from fusion_p2p.peer.coding import Coding, CodingFailed
from fusion_p2p.peer.edge_codecs import Coded, EdgeCodecs, codec_of, planned_codecs
from fusion_p2p.peer.tasks import Outcome, SliceTasks
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import OWNER, Direction, Edge, Moment, RunId
from fusion_p2p.wire.job_messages import Applied, Commit, EvalReport, Failed, Lost, Skip, StepReport, TrainingSettings
from fusion_p2p.wire.messages import Message

log = logging.getLogger(__name__)

SUMS_S = 1.5
"""What ends a decided step may need sums from others; a halted replica waits this long for them: who sends them may be lost."""
_TRIGGER_TYPE = TensorType((), "bool", False)
_URGENCY = [
    TaskKind.BACKWARD,
    TaskKind.UPDATE,
    TaskKind.SKIP,
    TaskKind.SHARE,
    TaskKind.REPORT,
    TaskKind.FORWARD,
    TaskKind.EVALUATE,
]


@dataclass(frozen=True, slots=True)
class BuiltEpoch:
    """An epoch that was checked and allocated: everything `EpochWork` runs on.

    `edges` are those of all replicas; `tasks` and `codecs` of ours, by number.
    """

    run: RunId
    owner: PeerId
    graph: Graph
    plan: Plan
    parts: Cut
    edges: tuple[ReplicaEdges, ...]
    tasks: dict[int, SliceTasks]
    codecs: dict[int, EdgeCodecs]
    settings: TrainingSettings
    state_step: int
    needed_bytes: int
    """Of device memory, at most."""

    @property
    def peer_of(self) -> dict[int, PeerId]:
        """Who executes each replica; the owner is a replica number of its own."""
        return {OWNER: self.owner} | {number: replica.peer for number, replica in enumerate(self.plan.replicas)}

    @property
    def slices(self) -> tuple[int, ...]:
        """The slices that are executed here."""
        return tuple(self.edges[number].slice for number in self.tasks)

    @property
    def states(self) -> dict[int, SliceState]:
        """The states of the slices that are executed here, by slice; they change with every update."""
        return {self.edges[number].slice: tasks.state for number, tasks in self.tasks.items()}

    def copied(self, step: int, name: str) -> Tensor | None:
        """A copy of a tensor of a state that is that of this step now. On the compute thread, which changes states."""
        copies = (state.copied(name) for state in self.states.values() if state.step == step)
        return next((copy for copy in copies if copy is not None), None)

    def flow(self, number: int) -> Flow:
        """A replica of ours before its first step."""
        edges, plan = self.edges[number], self.plan
        own = edges.own_turns.before(plan.micro_batches)
        return Flow(edges, own, plan.slices[edges.slice].in_flight, self.state_step + 1, plan.schedule)

    def keeps_snapshots(self, number: int) -> bool:
        """All replicas of a slice hold the same state: the first one keeps it for the owner."""
        return number == 0 or self.edges[number].slice != self.edges[number - 1].slice


@dataclass(slots=True)
class _Tally:
    """What a replica has done in the open step."""

    busy_s: float = 0.0
    losses: tuple[float, ...] = ()
    note: str = ""

    def add(self, outcome: Outcome, kind: TaskKind) -> None:
        self.busy_s += outcome.busy_s
        if outcome.loss is not None and kind is TaskKind.FORWARD:
            self.losses += (outcome.loss,)
        self.note = self.note or outcome.note


Tell = Callable[[Message, str | None], None]
"""Say something to the owner; with a key it is kept and said again after a reconnect, until the step is decided."""
Keep = Callable[[BuiltEpoch, int, Snapshot], None]
"""Keep a copy of the state of this slice."""


class _Undecodable(WireError):
    """What came on an edge is nothing that its codec could have made."""

    def __init__(self, edge: Edge, moment: Moment, reason: str) -> None:
        what = "gradient of value" if edge.direction is Direction.BACKWARD else "value"
        super().__init__(f"{what} {edge.value} of step {moment.step}, micro-batch {moment.micro_batch}: {reason}")
        self.edge = edge


async def _decoded(edge: Edge, moment: Moment, decoding: Future[Handed]) -> Handed:
    try:
        return await asyncio.wrap_future(decoding)
    except WireError as error:
        raise _Undecodable(edge, moment, str(error)) from None


class EpochWork:
    """Runs the slices until cancelled. `tell` reaches the owner."""

    def __init__(
        self,
        built: BuiltEpoch,
        transport: Transport,
        receiver: ValueReceiver,
        thread: ComputeThread,
        coding: ComputeThread | None,
        tell: Tell,
        keep: Keep,
    ) -> None:
        self._built, self._receiver, self._thread = built, receiver, thread
        self._tell, self._keep = tell, keep
        self._me = transport.peer_id
        self._credits = edge_credits(built.plan, built.edges)
        self._codecs = planned_codecs(built.plan, built.edges)
        self._peer_of = built.peer_of
        self._flows = {number: built.flow(number) for number in built.tasks}
        self._coding = Coding(built.codecs, coding or thread, send=self._send)
        self._mailbox: dict[tuple[Edge, Moment], Future[Handed]] = {}
        self._tallies = {index: _Tally() for index in built.tasks}
        self._decisions: dict[int, Commit | Skip] = {}
        self._wake, self._rest = asyncio.Event(), asyncio.Event()
        self._runs, self._stands = False, False
        self._halting = asyncio.Lock()
        ours = {edge: credits for edge, credits in self._credits.items() if edge.source in built.tasks}
        self._sender = ValueSender(transport, built.run, ours, self._peer_of, local=self._deliver_soon, lost=self._lost)
        self._traffic = (0, 0)
        self.progress = 0

    @property
    def step(self) -> int:
        """The last step that all replicas here have applied."""
        return min(flow.step for flow in self._flows.values()) - 1

    async def run(self) -> None:
        """Compute and send until cancelled, or until a replica cannot go on and the owner was told."""
        self._runs = True
        try:
            async with asyncio.TaskGroup() as group:
                sending = group.create_task(self._sender.run())
                working = [group.create_task(self._compute()), group.create_task(self._send_coded())]
                await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
                for task in (sending, *working):
                    task.cancel()
        finally:
            self._runs = False
            self._rest.set()

    async def halt(self) -> None:
        """Begin nothing more, let what runs end, apply what was decided, forget the open step: then the states stand still."""
        async with self._halting:
            if self._stands:
                return
            self._tell_flows(flows.Halt())
            if self._runs:
                self._rest.clear()
                self._wake.set()
                await self._rest.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SUMS_S):
                    while self._runs and any(flow.fate is not Fate.OPEN for flow in self._flows.values()):
                        self._rest.clear()
                        await self._rest.wait()
            self._stands = True
            aborts = [self._thread.submit(tasks.abort_step) for tasks in self._built.tasks.values()]
            await asyncio.shield(asyncio.gather(*map(asyncio.wrap_future, aborts)))

    def resume(self) -> None:
        """Go on where `halt` came between two steps; what was halted in the middle of one stays so."""
        if self._stands and any(flow.forwards for flow in self._flows.values()):
            return
        self._stands = False
        self._tell_flows(flows.Resume())
        self._wake.set()

    def _tell_flows(self, event: flows.Halt | flows.Resume) -> None:
        for number, flow in self._flows.items():
            self._flows[number], _ = flows.step(flow, event)

    @property
    def halted(self) -> bool:
        """Whether it has been halted, or is about to be."""
        return any(flow.halted for flow in self._flows.values())

    def expected(self, edge: Edge, moment: Moment, sender: PeerId) -> Expected:
        """Type and codec of the value that this peer sends now. WireError when it may not."""
        if edge.target not in self._flows or edge not in self._credits or self._peer_of[edge.source] != sender:
            raise WireError(f"{sender} may not send value {edge.value} to replica {edge.target}")
        if edge.direction is not Direction.EVALUATE and moment.micro_batch >= self._built.plan.micro_batches:
            raise WireError(f"micro-batch {moment.micro_batch} of {self._built.plan.micro_batches}")
        flows.refuse_without_credit(self._flows[edge.target], flows.Arrived(edge, moment, self._credits[edge]))
        if edge.value == TRIGGER:
            return Expected(_TRIGGER_TYPE)
        return Expected(self._built.graph.types[edge.value], codec_of(self._codecs, edge))

    def deliver(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        """Put a value into the mailbox. WireError when it is a nothing where a value belongs, or comes without credit."""
        if payload.type is None and edge.direction is not Direction.BACKWARD and edge.value != TRIGGER:
            raise WireError(f"nothing was sent where value {edge.value} belongs")
        event = flows.Arrived(edge, moment, self._credits[edge])
        flow, actions = flows.step(self._flows[edge.target], event)
        self._flows[edge.target] = flow
        for action in actions:
            match action:
                case flows.Keep():
                    self._mailbox[edge, moment] = self._coding.decode(edge, moment, payload)
                    self._wake.set()
                case flows.Acknowledge():
                    self._acknowledge(edge, moment)

    def decide(self, decision: Commit | Skip) -> None:
        """Take the owner's decision about a step. WireError when a replica has not reported it."""
        self._decisions[decision.step] = decision
        fate = Fate.COMMIT if isinstance(decision, Commit) else Fate.SKIP
        for index, flow in self._flows.items():
            if self._stands and decision.step >= flow.step:
                continue  # said again, too late to be applied
            self._flows[index], actions = flows.step(flow, flows.Decided(decision.step, fate))
            for action in actions:
                if isinstance(action, flows.AnswerApplied):
                    self._say_applied(index, action.step)
        self._wake.set()

    async def _compute(self) -> None:
        while True:
            index = self._most_urgent()
            if index is None:
                self._rest.set()
                self._wake.clear()
                await self._wake.wait()
            elif not await self._run_task(index):
                return

    def _most_urgent(self) -> int | None:
        ready = [(task, index) for index, flow in self._flows.items() if (task := flows.next_task(flow)) is not None]
        return min(ready, key=lambda pair: _URGENCY.index(pair[0].kind))[1] if ready else None

    async def _run_task(self, index: int) -> bool:
        """Run the next task of a replica; False when it has failed."""
        self._rest.clear()
        self._flows[index], actions = flows.step(self._flows[index], flows.Idle())
        task, taken = next((action.task, action.taken) for action in actions if isinstance(action, flows.Run))
        decoding = {edge: self._mailbox.pop((edge, moment)) for edge, moment in taken}
        for edge, moment in taken:
            self._acknowledge(edge, moment)
        decision = self._decision(index, task.moment.step)
        try:
            arrived = {edge: await _decoded(edge, task.moment, future) for edge, future in decoding.items()}
            outcome = await asyncio.wrap_future(self._thread.submit(self._built.tasks[index].perform, task, arrived, decision))
        except _Undecodable as error:
            self._blame(index, error)
            return False
        except (SliceFailed, WireError) as error:
            self._fail(index, str(error))
            return False
        self._flows[index], _ = flows.step(self._flows[index], flows.Finished())
        self.progress += 1
        self._tallies[index].add(outcome, task.kind)
        self._coding.encode(index, task.moment, outcome.sends)
        if task.kind is TaskKind.REPORT:
            await self._coding.settled()  # what a codec has to say belongs into the report
        self._report(index, task, outcome)
        return True

    async def _send_coded(self) -> None:
        """Offer values as they are encoded, until a codec cannot go on and the owner was told."""
        try:
            await self._coding.run()
        except CodingFailed as error:
            self._fail(error.replica, str(error))

    def _send(self, index: int, edge: Edge, moment: Moment, coded: Coded) -> None:
        tally = self._tallies[index]
        tally.note = tally.note or coded.note
        self._sender.offer(edge, moment, coded.payload)

    def _decision(self, index: int, step: int) -> Commit | Skip | None:
        """What the owner decided about a step, for a replica of ours."""
        decision = self._decisions.get(step)
        if decision is None or self._built.keeps_snapshots(index):
            return decision
        return decision.model_copy(update={"snapshot": False})

    def _report(self, index: int, task: Task, outcome: Outcome) -> None:
        match task.kind:
            case TaskKind.EVALUATE if outcome.loss is not None:
                report = EvalReport(
                    epoch=self._built.run.epoch, step=task.moment.step, micro_batch=task.moment.micro_batch, loss=outcome.loss
                )
                self._tell(report, f"eval {task.moment.micro_batch}")
            case TaskKind.REPORT:
                self._tell(self._step_report(index, task, outcome), f"report {index}")
            case TaskKind.UPDATE | TaskKind.SKIP:
                self._coding.forget(index, task.moment.step)
                if outcome.snapshot is not None:
                    self._keep(self._built, self._built.edges[index].slice, outcome.snapshot)
                self._tallies[index] = _Tally()
                self._say_applied(index, task.moment.step)

    def _step_report(self, index: int, task: Task, outcome: Outcome) -> StepReport:
        before, now = self._traffic, (self._sender.bytes_sent, self._receiver.bytes_received)
        self._traffic = now
        tally = self._tallies[index]
        return StepReport(
            epoch=self._built.run.epoch,
            step=task.moment.step,
            replica=index,
            squares=outcome.squares,
            losses=tally.losses,
            note=tally.note,
            busy_s=tally.busy_s,
            bytes_sent=now[0] - before[0],
            bytes_received=now[1] - before[1],
        )

    def _say_applied(self, index: int, step: int) -> None:
        self._tell(Applied(epoch=self._built.run.epoch, step=step, replica=index), None)
        if all(flow.step > step for flow in self._flows.values()):
            self._decisions.pop(step, None)

    def _acknowledge(self, edge: Edge, moment: Moment) -> None:
        sender = self._peer_of[edge.source]
        if sender == self._me and edge.source != OWNER:
            self._sender.acknowledged(edge, moment)
        else:
            self._receiver.acknowledge(self._built.run, sender, edge, moment)

    def _deliver_soon(self, edge: Edge, moment: Moment, payload: Payload) -> None:
        asyncio.get_running_loop().call_soon(self.deliver, edge, moment, payload)

    def _fail(self, index: int, reason: str) -> None:
        log.warning("slice failed slice=%d replica=%d reason=%s", self._built.edges[index].slice, index, reason)
        self._tell(Failed(epoch=self._built.run.epoch, replica=index, reason=reason[:1000]), "failed")

    def _blame(self, index: int, error: _Undecodable) -> None:
        """What cannot be decoded is the fault of the peer that sent it, not of the replica that reads it."""
        sender = self._peer_of[error.edge.source]
        if sender in (self._me, self._built.owner):
            self._fail(index, f"{sender} sent what cannot be read: {error}")
        else:
            self._lost(sender, f"it sent what cannot be read: {error}")

    def _lost(self, peer: PeerId, reason: str) -> None:
        if self.halted:
            return  # whoever halted this knows
        log.warning("lost neighbour peer=%s reason=%s", peer, reason)
        self._tell(Lost(epoch=self._built.run.epoch, peer=peer, reason=reason[:1000]), f"lost {peer}")
