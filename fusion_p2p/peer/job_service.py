"""A peer at an owner's service: at most one job at a time, over one control stream that may break and come back.

`job.tenure` says what was promised to whom; this turns its actions into fetching, building, running and answering. What the
owner must not miss (reports, failures) is kept until the step is decided, and said again when the owner opens a new stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fusion_p2p.clock import Clock
from fusion_p2p.errors import FusionError, NetworkError, WireError
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import tenure as tenures
from fusion_p2p.job.progress import PeerSample
from fusion_p2p.job.tenure import Claim, Tenure
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.net.values import ValueReceiver
from fusion_p2p.peer.building import Bench, build_epoch
from fusion_p2p.peer.epoch_work import BuiltEpoch, EpochWork
from fusion_p2p.peer.voice import Voice
from fusion_p2p.wire.blob_messages import FetchTensor
from fusion_p2p.wire.job_messages import (
    JOB_MESSAGES,
    JOB_PROTOCOL,
    Abort,
    Commit,
    EvalReport,
    Failed,
    Prepare,
    Prepared,
    Pulse,
    Refused,
    Skip,
    Start,
    Started,
    StepReport,
    Stop,
)
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import Holding

log = logging.getLogger(__name__)

PULSE_S = 1.0
LEAVE_S = 1.0
"""How long a peer that leaves waits for its owner to let it go."""


@dataclass(slots=True)
class _Engagement:
    """Everything about the claim that is being served."""

    claim: Claim
    prepare: Prepare
    built: BuiltEpoch | None = None
    work: EpochWork | None = None
    task: asyncio.Task[None] | None = None


class JobService:
    """Serves JOB_PROTOCOL while `run` runs."""

    def __init__(self, transport: Transport, blobs: BlobServer, bench: Bench, clock: Clock) -> None:
        self._transport, self._blobs, self._bench, self._clock = transport, blobs, bench, clock
        self._receiver = ValueReceiver(transport)
        self._tenure = Tenure()
        self._asked: dict[Claim, Prepare] = {}
        self._engagements: dict[Claim, _Engagement] = {}
        """What is held, oldest first: one, or one that runs and its successor."""
        self._done_before = 0
        self._voices: dict[PeerId, Voice] = {}
        self._unsettled: dict[str, Message] = {}
        self._group: asyncio.TaskGroup | None = None
        self._released = asyncio.Event()

    @property
    def _engaged(self) -> _Engagement | None:
        """The one that counts: what runs, or is the first to."""
        return next(iter(self._engagements.values()), None)

    def observe_rates(self, observed: Callable[[PeerId, float], None]) -> None:
        """Tell `observed` how many bytes per second large values come in with, and from whom."""
        self._receiver.observed = observed

    def holding(self) -> Holding | None:
        """The job and slices that this peer is engaged for; None when it is free."""
        engaged = self._engaged
        if engaged is None:
            return None
        return Holding(job=engaged.claim.job, slices=engaged.built.slices if engaged.built is not None else ())

    def progress(self) -> int:
        """Tasks done and pieces of values received since the start of the process: alive without progress is suspect."""
        working = sum(engaged.work.progress for engaged in self._engagements.values() if engaged.work is not None)
        return self._done_before + working + self._receiver.chunks_received

    def sample(self, *, members: int, coordinating: bool) -> PeerSample:
        """This peer's numbers, with what the caller knows of the swarm."""
        holding = self.holding()
        return PeerSample(
            slices=len(holding.slices) if holding is not None else 0,
            progress=self.progress(),
            bytes_received=self._receiver.bytes_received,
            members=members,
            coordinating=coordinating,
        )

    def describe(self) -> str:
        """What this peer does, in one line for its volunteer."""
        engaged = self._engaged
        if engaged is None:
            return "standby: no slice is assigned to this peer"
        job = f"job {engaged.claim.job[:8]} of owner {engaged.claim.owner}"
        if engaged.built is None:
            return f"preparing for {job}"
        slices = ", ".join(map(str, engaged.built.slices))
        return f"training: slice {slices} of {len(engaged.built.plan.slices)}, {job}"

    async def run(self) -> None:
        """Serve owners until cancelled; then take leave of the one whose slices are held."""
        try:
            async with asyncio.TaskGroup() as self._group:
                await self._receiver.start()
                await self._transport.serve(JOB_PROTOCOL, self._serve)
                self._group.create_task(self._tick())
        finally:
            await self._leave()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            self._step(tenures.Tick())
            if self._engaged is not None:
                self._say(self._engaged.claim.owner, Pulse(progress=self.progress()))

    async def _leave(self) -> None:
        """Tell the owner, who would learn it from our silence only, and give it a moment to let us go."""
        engaged = self._engaged
        voice = self._voices.get(engaged.claim.owner) if engaged is not None else None
        if engaged is None or voice is None:
            return
        self._released.clear()
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await voice.say_now(Refused(epoch=engaged.claim.epoch, reason="it leaves the swarm"))
                await self._released.wait()

    async def _serve(self, stream: Stream) -> None:
        messages, owner = MessageStream(stream, JOB_MESSAGES), stream.remote
        self._voices[owner] = voice = Voice(messages)
        speaking = asyncio.create_task(voice.run())
        if self._engaged is not None and self._engaged.claim.owner == owner:
            for unsettled in self._unsettled.values():
                self._say(owner, unsettled)
        try:
            message: Message | None = None
            while not isinstance(message, Stop):  # ending the stream then tells the owner that it was heard
                message = await messages.receive(timeout_s=tenures.OWNER_SILENT_S)
                self._step(tenures.Heard(owner))
                self._obey(owner, message)
        finally:
            speaking.cancel()
            if self._voices.get(owner) is voice:
                del self._voices[owner]
                self._released.set()

    def _obey(self, owner: PeerId, message: Message) -> None:
        match message:
            case Prepare():
                claim = Claim(owner, JobId(message.job), message.incarnation, message.epoch)
                self._asked[claim] = message
                self._step(tenures.Asked(claim, message.beside))
                self._asked.pop(claim, None)
            case Start() | Abort() | Stop() | Commit() | Skip():
                self._obey_engaged(owner, message)
            case Pulse():
                pass
            case _:
                raise WireError(f"{message.kind} is not for a peer to receive")

    def _obey_engaged(self, owner: PeerId, message: Start | Abort | Stop | Commit | Skip) -> None:
        first = self._engaged
        if first is None or first.claim.owner != owner:
            epoch = message.epoch if isinstance(message, Start) else 0
            self._say(owner, Refused(epoch=epoch, reason="nothing of this run is held here"))
        elif isinstance(message, Stop):
            if message.job == first.claim.job:
                self._step(tenures.Ended(first.claim, message.reason))
        else:
            self._obey_in_epoch(message)

    def _obey_in_epoch(self, message: Start | Abort | Commit | Skip) -> None:
        engaged = next((one for one in self._engagements.values() if one.claim.epoch == message.epoch), None)
        if engaged is None:
            log.info("stale %s for epoch=%d", message.kind, message.epoch)
        elif isinstance(message, Start):
            self._step(tenures.StartAsked(engaged.claim))
        elif isinstance(message, Abort):
            self._step(tenures.Ended(engaged.claim, message.reason))
        elif engaged.work is not None:
            decided = message.step
            self._unsettled = {key: said for key, said in self._unsettled.items() if _outlives(said, decided)}
            engaged.work.decide(message)

    def _step(self, event: tenures.Event) -> None:
        self._tenure, actions = tenures.step(self._tenure, event, self._clock.now())
        for action in actions:
            self._act(action)

    def _act(self, action: tenures.Action) -> None:
        match action:
            case tenures.Build(claim):
                engaged = self._engagements[claim] = _Engagement(claim, self._asked[claim])
                engaged.task = self._spawn(engaged, functools.partial(self._build, engaged))
            case tenures.SayPrepared(claim):
                self._say(claim.owner, Prepared(epoch=claim.epoch))
            case tenures.SayRefused(claim, reason):
                self._say(claim.owner, Refused(epoch=claim.epoch, reason=reason[:1000]))
                if claim not in self._tenure.claims:
                    self._engagements.pop(claim, None)
            case tenures.Begin(claim, again):
                if not again:
                    self._begin(self._engagements[claim])
                self._say(claim.owner, Started(epoch=claim.epoch))
            case tenures.Drop(claim, reason):
                log.info("dropping job=%s: %s", claim.job[:8], reason)
                self._drop(claim)

    async def _build(self, engaged: _Engagement) -> None:
        claim, prepare = engaged.claim, engaged.prepare
        running = self._engagements.get(self._tenure.running) if self._tenure.running is not None else None
        before = running.built if running is not None else None
        try:
            built = await build_epoch(self._transport, self._bench, claim.owner, prepare, self._progressed, before)
        except FusionError as error:
            log.warning("cannot take job=%s: %s", claim.job[:8], error)
            self._step(tenures.BuildFailed(claim, str(error)))
            return
        engaged.built = built
        engaged.work = EpochWork(built, self._transport, self._receiver, self._bench.thread, self._bench.coding, self._tell)
        self._receiver.open_inlet(built.run, engaged.work)
        self._blobs.offer_tensors(claim.job, self._tensor)
        self._step(tenures.Built(claim))

    def _progressed(self) -> None:
        self._done_before += 1

    def _begin(self, engaged: _Engagement) -> None:
        if engaged.work is not None:
            engaged.task = self._spawn(engaged, engaged.work.run)

    def _drop(self, claim: Claim) -> None:
        if self._engaged is not None and self._engaged.claim == claim:
            self._unsettled.clear()
        engaged = self._engagements.pop(claim, None)
        if not self._engagements:
            self._released.set()
            self._blobs.withdraw_tensors(claim.job)
        if engaged is None:
            return
        self._done_before += engaged.work.progress if engaged.work is not None else 0
        if engaged.task is not None:
            engaged.task.cancel()
        if engaged.built is not None:
            self._receiver.close_inlet(engaged.built.run)

    def _tell(self, message: Message, key: str | None) -> None:
        """Say something to the owner of the job; with a key, until the step is decided."""
        if self._engaged is None:
            return
        if key is not None:
            self._unsettled[key] = message
        self._say(self._engaged.claim.owner, message)

    def _say(self, owner: PeerId, message: Message) -> None:
        """Without a stream of this owner it is lost: what counts is unsettled, and said again on the next one."""
        voice = self._voices.get(owner)
        if voice is not None:
            voice.say(message)

    async def _tensor(self, asker: PeerId, asked: FetchTensor) -> memoryview | None:
        engaged = self._engaged
        if engaged is None or engaged.work is None or asker != engaged.claim.owner:
            return None
        return engaged.work.snapshot_bytes(asked.step, asked.name)

    def _spawn(self, engaged: _Engagement, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        if self._group is None:
            raise RuntimeError("the job service does not run")
        return self._group.create_task(self._supervise(engaged, work))

    async def _supervise(self, engaged: _Engagement, work: Callable[[], Awaitable[None]]) -> None:
        """A fault of ours in one job must not take the volunteer's process with it: the job ends, the peer lives on."""
        try:
            await work()
        except Exception as error:
            log.exception("job ended by an unexpected error")
            if engaged is self._engagements.get(engaged.claim):
                reason = f"unexpected {type(error).__name__}: {error}"[:1000]
                self._say(engaged.claim.owner, Failed(epoch=engaged.claim.epoch, replica=0, reason=reason))
                self._step(tenures.Ended(engaged.claim, reason))


def _outlives(said: Message, decided: int) -> bool:
    """Whether something said to the owner still matters after a step was decided: what is of a later step, or of none."""
    return not isinstance(said, StepReport | EvalReport) or said.step > decided
