"""Keeps copies of a run's slices at other peers: finds who could hold them, tells them to, and knows who does.

`job.guarding` decides; this moves messages. It shares the owner's `Links` with the step loop, which hands over what concerns
guards. Guards execute nothing of this run and promise nothing: they may be serving another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from fusion_p2p.clock import Clock
from fusion_p2p.errors import Incompatible, NetworkError, SwarmUnreachable, WireError
from fusion_p2p.execute.state import required_tensors
from fusion_p2p.ids import Digest, JobId, PeerId
from fusion_p2p.job import guard_terms as terms
from fusion_p2p.job import guarding
from fusion_p2p.job.guarding import Guarding
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.owner.admissions import ADMITTED
from fusion_p2p.owner.guard_links import GuardLinks
from fusion_p2p.owner.links import Links
from fusion_p2p.owner.spares import Surroundings
from fusion_p2p.owner.stage import Stage
from fusion_p2p.wire.job_messages import (
    Admit,
    Content,
    Durable,
    Fetching,
    Guard,
    Held,
    Kept,
    NotHeld,
    Pulse,
    Refused,
    Start,
    Stop,
)
from fusion_p2p.wire.manifest import encode_manifest, state_bytes
from fusion_p2p.wire.messages import Message

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
OFF = 0
"""The value of `every` without copies."""
BACK = "back"


class Guards:
    """Copies of the slices of one run, over all its epochs."""

    def __init__(
        self,
        job: JobId,
        incarnation: int,
        blobs: BlobServer,
        surroundings: Surroundings,
        clock: Clock,
        every: int | None,
        say: Callable[[str], None],
    ) -> None:
        """every: steps between two copies, OFF, or None for as often as it pays. `say` hears when more or fewer are held."""
        self._job, self._incarnation = job, incarnation
        self._blobs, self._surroundings, self._clock, self._say = blobs, surroundings, clock, say
        self._links = GuardLinks(surroundings)
        self._state = Guarding(every=every)
        self._stage: Stage | None = None
        self._manifests: tuple[Content, ...] = ()
        self._sizes: tuple[int, ...] = ()
        self._asked_in = 0
        self._begun = asyncio.Event()
        self._covered: tuple[int, int] = (0, 0)

    @property
    def held(self) -> Mapping[int, tuple[tuple[PeerId, int], ...]]:
        """For each slice of the newest epoch who holds a copy of it, and of which step; newest first."""
        copies = sorted(self._state.copies, key=lambda copy: (-copy.step, copy.peer))
        return {
            index: tuple((copy.peer, copy.step) for copy in copies if copy.slice == index)
            for index in range(len(self._state.parts))
        }

    @property
    def admitted(self) -> frozenset[PeerId]:
        """Peers that execute nothing and may fetch states of this run, because they guard some."""
        return self._state.guards

    @property
    def line(self) -> str:
        """What is held, in words."""
        return guarding.describe(self._state)

    def began(self, stage: Stage, links: Links) -> None:
        """An epoch runs, over these links."""
        before, self._stage = self._stage, stage
        if before is None or before.plan.slice_of != stage.plan.slice_of:
            self._offer_manifests(stage)
        self._links.began(links, stage.plan.peers)
        self._begun.set()
        self._covered = (0, 0)
        members = (frozenset(planned.members) for planned in stage.plan.slices)
        parts = tuple(terms.Part(peers, size) for peers, size in zip(members, self._sizes, strict=True))
        self._step(terms.Began(stage.plan.slice_of, parts, stage.state_step))

    def broke(self) -> None:
        """No epoch runs: what is held has to stay until one does again."""
        self._step(terms.Broken())

    def wants_copy(self, step: int) -> bool:
        """Whether the members of every slice are to keep its state after this step: asked once, when its fate is told."""
        self._step(terms.Deciding(step))
        return self._state.round is not None and self._state.round.step == step

    def heard(self, peer: PeerId, message: Message) -> bool:
        """Take in what a peer says, if that is for us: all that guards say, and what members keep."""
        match message:
            case Kept(epoch=epoch):
                if epoch >= self._asked_in:
                    self._step(terms.KeptBy(peer, message.slice, message.step, Digest(message.digest)))
            case Fetching() if self._is_ours(message):
                self._step(terms.FetchingBy(peer, message.slices, message.step, message.pieces))
            case Held() if self._is_ours(message):
                self._step(terms.HeldBy(peer, message.slice, message.step, Digest(message.digest)))
            case NotHeld() if self._is_ours(message):
                self._links.settle(peer, _key(message.slice))
                self._step(terms.NotHeldBy(peer, message.slice, message.step))
            case Fetching() | Held() | NotHeld():
                pass
            case Pulse():
                return peer in self._links.linked
            case Refused(epoch=epoch):
                self._links.settle(peer, BACK)  # it executes nothing, and has heard to which step the run went back
                return peer in self._links.linked and self._stage is not None and epoch <= self._stage.run.epoch
            case _:
                return False
        return True

    def gone(self, peer: PeerId, reason: str, *, left: bool = False) -> None:
        """A peer is lost, or has left on purpose: a guard, or one that executes slices."""
        self._links.gone(peer)
        self._step(terms.Lost(peer, left))

    async def run(self) -> None:
        """Look for guards, and mind deadlines, until cancelled."""
        if self._state.every == OFF:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._links.run())
            group.create_task(self._keep_looking())
            while True:
                await asyncio.sleep(guarding.TICK_S)
                self._step(terms.Tick())

    async def _keep_looking(self) -> None:
        await self._begun.wait()
        while True:
            try:
                self._step(terms.Seen(await self._surroundings.look(self._state.members)))
            except (NetworkError, WireError, SwarmUnreachable, Incompatible) as error:
                log.info("nobody says who could hold copies, what was known still holds: %s", error)
            await asyncio.sleep(LOOK_EVERY_S)

    def _offer_manifests(self, stage: Stage) -> None:
        for manifest in self._manifests:
            self._blobs.withdraw(Digest(manifest.digest))
        states = [required_tensors(stage.graph, part, stage.settings) for part in stage.parts.slices]
        encoded = [encode_manifest(tensors) for tensors in states]
        self._sizes = tuple(state_bytes(tensors) for tensors in states)
        self._manifests = tuple(Content(digest=self._blobs.offer(data), num_bytes=len(data)) for data in encoded)

    def _is_ours(self, message: Fetching | Held | NotHeld) -> bool:
        return (message.job, message.incarnation) == (self._job, self._incarnation)

    def _step(self, event: terms.Event) -> None:
        before = self._state.guards
        self._state, actions = guarding.step(self._state, event, self._clock.now())
        self._links.keep(self._state.guards, Stop(job=self._job, reason="its copies are no longer needed"))
        for peer in self._state.guards - before:
            self._links.say(peer, self._admit(), ADMITTED)
        for action in actions:
            self._act(action)
        self._tell()

    def _act(self, action: terms.Action) -> None:
        match action:
            case terms.AskCopy():
                self._asked_in = 0 if self._stage is None else self._stage.run.epoch
            case terms.SendGuard(peer, index):
                self._links.say(peer, self._guard(action), _key(index))
            case terms.Durable(step):
                self._end_round(step)
            case terms.GoBack(step, peers) if self._stage is not None:
                for peer in peers:
                    self._links.say(peer, Start(epoch=self._stage.run.epoch, state_step=step), BACK)

    def _end_round(self, step: int) -> None:
        """Older copies may go. Who holds one is asked for it again on every new stream: it may have been started anew."""
        durable = Durable(job=self._job, incarnation=self._incarnation, step=step)
        for peer in self._state.members | self._state.guards:
            self._links.say(peer, durable, "durable")
            for index in range(len(self._state.parts)):
                if terms.Copy(index, step, peer) not in self._state.copies:
                    self._links.settle(peer, _key(index))

    def _guard(self, sent: terms.SendGuard) -> Guard:
        return Guard(
            job=self._job,
            incarnation=self._incarnation,
            slice=sent.slice,
            step=sent.step,
            digest=sent.digest,
            manifest=self._manifests[sent.slice],
            sources=sent.sources[:64],
            contacts=self._surroundings.contacts(sent.sources[:64]),
        )

    def _admit(self) -> Admit:
        """Who may fetch from a guard, as far as we know; the owner says more when it moves slices."""
        admitted = sorted(self._state.members | self._state.guards)
        return Admit(job=self._job, incarnation=self._incarnation, peers=tuple(admitted))

    def _tell(self) -> None:
        """Say how many slices are held, by how many, whenever that has changed."""
        if self._state.round is not None:
            return
        covered = len({copy.slice for copy in self._state.copies}), len({copy.peer for copy in self._state.copies})
        if covered != self._covered:
            self._covered = covered
            self._say(self.line)


def _key(index: int) -> str:
    return f"guard/{index}"
