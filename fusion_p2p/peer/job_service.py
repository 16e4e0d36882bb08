"""A peer at an owner's service: control streams that may break and come back, and what is said and heard on them.

What is ordered goes to `engagements` (slices at work), `keeping` (copies of states) and `guarding` (copies for others). What
the owner must not miss (reports, failures) is kept until the step is decided, and said again on the next stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from fusion_p2p.clock import Clock
from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job import tenure as tenures
from fusion_p2p.job.progress import PeerSample
from fusion_p2p.net.base import Stream, Transport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.net.pacing import Pace
from fusion_p2p.net.values import ValueReceiver
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.copies import Copy, Lineage
from fusion_p2p.peer.engagements import Engagements
from fusion_p2p.peer.guarding import Guarding
from fusion_p2p.peer.keeping import Keeping
from fusion_p2p.peer.supervision import Supervisor
from fusion_p2p.peer.voice import Voice
from fusion_p2p.swarm.announcement import Line
from fusion_p2p.wire.job_messages import (
    JOB_MESSAGES,
    JOB_PROTOCOL,
    Abort,
    Admit,
    Commit,
    Durable,
    Guard,
    Halt,
    Leaving,
    NotHeld,
    Prepare,
    Pulse,
    Refused,
    Skip,
    Start,
    Stop,
)
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import Holding

log = logging.getLogger(__name__)

PULSE_S = 1.0
LEAVE_S = 1.0
"""How long a peer that leaves waits for its owner to let it go."""
COPY_SHARE = 0.25
"""Of the uplink, for copies of states while this peer trains."""
LEAST_BYTES_PER_S = 128e3
"""But this much: slower, and who fetches them takes us for dead."""
ASK_AGAIN_S = 2.0
"""A peer that wants to hand its slices over says so this often: a new epoch may have come in between."""
MOST_UNHEARD = 4
"""An owner that was not linked so many times in a row will not hear of it."""


class JobService:
    """Serves JOB_PROTOCOL while `run` runs."""

    def __init__(self, transport: Transport, blobs: BlobServer, bench: Bench, clock: Clock) -> None:
        self._transport = transport
        self._receiver = ValueReceiver(transport)
        self._voices: dict[PeerId, Voice] = {}
        self._tasks = Supervisor()
        self._clock = clock
        self._engagements = Engagements(transport, self._receiver, bench, clock, self._tasks, self._say)
        self._keeping = Keeping(blobs, bench, clock, self._tasks, self._engagements.at_work)
        self._engagements.bind(self._keeping)
        self._guarding = Guarding(transport, self._keeping, self._tasks, self._say)
        self._closed = ""
        self.standing: Callable[[], str] = str
        """What the coordinator says of us while we are free."""
        self.is_near: Callable[[PeerId], bool] = lambda peer: False
        """Whether what is sent to a peer does not take this peer's line."""
        blobs.pace_for = self._pace_for

    @property
    def copies(self) -> Sequence[Copy]:
        """The copies of states that lie here."""
        return tuple(self._keeping.copies)

    def line_is(self, line: Line) -> None:
        """What this peer's line carries: copies get COPY_SHARE of it while values need the rest."""
        up = line.up_bytes_per_s
        self._keeping.pace.set_rate(None if up is None else max(COPY_SHARE * up, LEAST_BYTES_PER_S))

    def observe_rates(self, observed: Callable[[PeerId, float], None]) -> None:
        """Tell `observed` how many bytes per second large values come in with, and from whom."""
        self._receiver.observed = observed

    def holding(self) -> Holding | None:
        """The job and slices that this peer is engaged for; None when it is free."""
        engaged = self._engagements.first
        if engaged is None:
            return None
        return Holding(job=engaged.claim.job, slices=engaged.built.slices if engaged.built is not None else ())

    def progress(self) -> int:
        """Tasks done and pieces received since the start of the process: alive without progress is suspect."""
        return self._engagements.progress + self._receiver.chunks_received + self._guarding.pieces

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
        engaged = self._engagements.first
        if engaged is None:
            return f"standby: {self.standing() or 'no slice is assigned to this peer'}{self._guarded()}"
        job = f"job {engaged.claim.job[:8]} of owner {engaged.claim.owner}"
        if engaged.built is None:
            return f"preparing for {job}"
        slices = ", ".join(map(str, engaged.built.slices))
        doing = "halted" if engaged.told_to_halt else "training"
        return f"{doing}: slice {slices} of {len(engaged.built.plan.slices)}, {job}{self._guarded()}"

    def _guarded(self) -> str:
        newest = {copy.key.slice: copy.key.step for copy in self.copies if not copy.own}
        kept = ", ".join(f"{index} (step {step})" for index, step in sorted(newest.items()))
        return f"; keeps copies of slice {kept}" if kept else ""

    async def drain(self, reason: str, timeout_s: float) -> bool:
        """Ask the owner to have our slices taken over; True once it has let us go, or if nothing is held."""
        self._closed, unheard = reason, 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while (engaged := self._engagements.first) is not None and unheard < MOST_UNHEARD:
                    unheard = 0 if engaged.claim.owner in self._voices else unheard + 1
                    self._say(engaged.claim.owner, Leaving(job=engaged.claim.job, reason=reason))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(ASK_AGAIN_S):
                            await self._engagements.free.wait()
        return self._engagements.first is None

    def close(self, reason: str) -> None:
        """Give up what is held still, and take nothing new until `reopen`."""
        self._closed = reason
        engaged = self._engagements.first
        if engaged is not None:
            self._say(engaged.claim.owner, Refused(epoch=engaged.claim.epoch, reason=reason[:1000]))
            self._engagements.stop(engaged.claim.owner, engaged.claim.job, reason)
        self._guarding.give_up(reason)

    def reopen(self) -> None:
        """Take slices again."""
        self._closed = ""

    async def run(self) -> None:
        """Serve owners until cancelled; then take leave of the one whose slices are held."""
        try:
            async with asyncio.TaskGroup() as group:
                self._tasks.use(group)
                await self._receiver.start()
                await self._transport.serve(JOB_PROTOCOL, self._serve)
                group.create_task(self._tick())
        finally:
            await self._leave()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._clock.pause_s(PULSE_S))
            self._engagements.tick()
            self._keeping.tidy()
            self._guarding.report()
            for owner in self._voices:
                self._say(owner, Pulse(progress=self.progress()))

    async def _leave(self) -> None:
        """Tell the owner, who would learn it from our silence only, and give it a moment to let us go."""
        engaged = self._engagements.first
        voice = self._voices.get(engaged.claim.owner) if engaged is not None else None
        if engaged is None or voice is None:
            return
        with contextlib.suppress(NetworkError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await voice.say_now(Refused(epoch=engaged.claim.epoch, reason="it leaves the swarm"))
                await voice.ended.wait()

    async def _serve(self, stream: Stream) -> None:
        messages, owner = MessageStream(stream, JOB_MESSAGES), stream.remote
        self._voices[owner] = voice = Voice(messages)
        speaking = asyncio.create_task(voice.run())
        for unsettled in self._engagements.unsettled(owner):
            self._say(owner, unsettled)
        try:
            message: Message | None = None
            while not isinstance(message, Stop):  # ending the stream then tells the owner that it was heard
                message = await messages.receive(timeout_s=tenures.OWNER_SILENT_S)
                self._engagements.heard(owner)
                self._keeping.heard(owner)
                self._obey(owner, message)
        finally:
            speaking.cancel()
            voice.ended.set()
            if self._voices.get(owner) is voice:
                del self._voices[owner]

    def _obey(self, owner: PeerId, message: Message) -> None:
        match message:
            case Prepare() if self._refuses(owner, message.job):
                self._say(owner, Refused(epoch=message.epoch, reason=self._closed[:1000]))
            case Prepare():
                self._engagements.prepare(owner, message)
            case Start() | Abort() | Halt() | Commit() | Skip():
                self._engagements.obey(owner, message)
                if isinstance(message, Start):
                    self._guarding.went_back(owner, message.state_step)
                if isinstance(message, Start | Abort):
                    self._make_room()
            case Guard() if self._closed:
                self._say(owner, _not_held(message, self._closed))
            case Guard():
                self._guarding.guard(owner, message)
            case Admit():
                self._keeping.admit(owner, message)
            case Durable():
                self._keeping.copies.durable(Lineage(owner, JobId(message.job), message.incarnation), message.step)
            case Stop():
                self._guarding.ended(owner)
                self._engagements.stop(owner, message.job, message.reason)
                self._keeping.ended(owner, message.job)
                self._make_room()
            case Pulse():
                pass
            case _:
                raise WireError(f"{message.kind} is not for a peer to receive")

    def _refuses(self, owner: PeerId, job: str) -> bool:
        """A peer that is about to leave takes nothing new; a run that it serves may still go on here."""
        engaged = self._engagements.first
        return bool(self._closed) and (engaged is None or (engaged.claim.owner, engaged.claim.job) != (owner, job))

    def _make_room(self) -> None:
        """Copies that others asked for lie in memory that slices do not need."""
        for copy in self._keeping.make_room():
            self._guarding.gave_up(copy, "its memory is needed for slices")

    def _pace_for(self, asker: PeerId) -> Pace | None:
        """While we compute, copies must not take the line from values; who is halted, or idle, has nothing better to do."""
        return self._keeping.pace if self._engagements.computing and not self.is_near(asker) else None

    def _say(self, owner: PeerId, message: Message) -> None:
        """Without a stream of this owner it is lost: what counts is unsettled, and said again on the next one."""
        voice = self._voices.get(owner)
        if voice is not None:
            voice.say(message)


def _not_held(asked: Guard, reason: str) -> NotHeld:
    return NotHeld(job=asked.job, incarnation=asked.incarnation, slice=asked.slice, step=asked.step, reason=reason[:1000])
