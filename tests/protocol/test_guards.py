"""The owner finds guards, tells them what to hold, and knows who does: over the simulated network, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from fusion_p2p.execute.state import required_tensors
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, JobId, PeerId, digest_of
from fusion_p2p.job.guard_choice import Candidate
from fusion_p2p.net.base import Stream
from fusion_p2p.net.blobs import BlobServer, fetch_content
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.owner.guards import Guards
from fusion_p2p.owner.links import Gone, Heard, Links
from fusion_p2p.owner.stage import Stage
from fusion_p2p.peer.background import beside
from fusion_p2p.plan.plan import Plan, SlicePlan
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import (
    JOB_MESSAGES,
    JOB_PROTOCOL,
    Admit,
    Contact,
    Durable,
    Fetching,
    Guard,
    Held,
    Kept,
    NotHeld,
    OptimiserSettings,
    Pulse,
    Refused,
    Start,
    Stop,
    TrainingSettings,
)
from fusion_p2p.wire.manifest import decode_manifest
from fusion_p2p.wire.messages import Message
from tests.protocol.swarm_world import LoopClock, in_virtual_time
from tests.unit.chain_graphs import chain

JOB = JobId("a" * 32)
SETTINGS = TrainingSettings(seed=0, optimiser=OptimiserSettings(name="adam"))
GRAPH = chain(4)
SLICE_OF = (0, 0, 1, 1, 1)
PARTS = cut(GRAPH, SLICE_OF)
LARGE = 1 << 30


@dataclass
class Scripted:
    """A peer that notes what it is told, and answers `Guard` as it was told to."""

    peer: SimulatedPeer
    refuses: bool = False
    forgets: bool = False
    slow_s: float = 0.0
    pieces: int = 0
    heard: list[Message] = field(default_factory=list)

    @property
    def id(self) -> PeerId:
        return self.peer.peer_id

    def told(self, kind: type[Message]) -> list[Message]:
        return [message for message in self.heard if isinstance(message, kind)]

    async def serve(self, stream: Stream) -> None:
        messages = MessageStream(stream, JOB_MESSAGES)
        async with beside(self._pulse(messages)):
            while True:
                message = await messages.receive()
                if not isinstance(message, Pulse):
                    self.heard.append(message)
                if isinstance(message, Guard) and not self.forgets:
                    await self._fetch(messages, message)
                if isinstance(message, Start):
                    await messages.send(Refused(epoch=message.epoch, reason="nothing is at work here"))
                if isinstance(message, Stop):
                    return

    async def _fetch(self, messages: MessageStream, asked: Guard) -> None:
        for _ in range(int(self.slow_s)):
            await asyncio.sleep(1.0)
            self.pieces += 1
            job, incarnation, step = asked.job, asked.incarnation, asked.step
            await messages.send(Fetching(job=job, incarnation=incarnation, step=step, slices=(0, 1), pieces=self.pieces))
        await messages.send(self._answer(asked))

    async def _pulse(self, messages: MessageStream) -> None:
        while True:
            await messages.send(Pulse(progress=0))
            await asyncio.sleep(1.0)

    def _answer(self, asked: Guard) -> Message:
        job, incarnation, index, step = asked.job, asked.incarnation, asked.slice, asked.step
        if self.refuses:
            return NotHeld(job=job, incarnation=incarnation, slice=index, step=step, reason="full")
        return Held(job=job, incarnation=incarnation, slice=index, step=step, digest=asked.digest)


class ByHand:
    """Surroundings that a test arranges."""

    def __init__(self, peers: Iterable[Scripted]) -> None:
        self.peers = list(peers)
        self.met: list[PeerId] = []

    async def look(self, members: frozenset[PeerId]) -> tuple[Candidate, ...]:
        return tuple(Candidate(one.id, one.id not in members, LARGE) for one in self.peers)

    async def meet(self, peer: PeerId) -> None:
        self.met.append(peer)

    def contacts(self, peers: Iterable[PeerId]) -> tuple[Contact, ...]:
        return tuple(Contact(peer=peer, addresses=()) for peer in peers)


@dataclass
class Scene:
    network: SimulatedNetwork
    members: list[Scripted]
    spares: list[Scripted]
    surroundings: ByHand
    guards: Guards
    links: Links
    owner: PeerId
    said: list[str]

    def begin(self, epoch: int = 1, state_step: int = 0) -> None:
        plan = Plan(
            graph=digest_of(b"graph"), scheduler="by hand", micro_batches=2, slice_of=SLICE_OF,
            slices=tuple(SlicePlan(one.id, 2) for one in self.members), edges=(),
        )  # fmt: skip
        self.guards.began(Stage(RunId(JOB, 1, epoch), GRAPH, plan, PARTS, (), SETTINGS, state_step), self.links)

    def keep(self, step: int, epoch: int = 1) -> None:
        """What members say after a commit with a copy."""
        for index, member in enumerate(self.members):
            digest = digest_of(f"{index} {step}".encode())
            assert self.guards.heard(member.id, Kept(epoch=epoch, slice=index, step=step, digest=digest, num_bytes=4096))

    async def pump(self) -> None:
        """Hand over what is heard, as the step loop does."""
        while True:
            event = await self.links.inbox.get()
            if isinstance(event, Gone):
                self.guards.gone(event.peer, event.reason)
            if isinstance(event, Heard) and not self.guards.heard(event.peer, event.message):
                assert event.peer in {member.id for member in self.members}

    async def until(self, condition: Callable[[], object], limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@contextlib.asynccontextmanager
async def scene(spares: int, every: int | None = 1, known: int | None = None) -> AsyncIterator[Scene]:
    """Two members, so many spares, and an owner that knows `known` of them."""
    async with SimulatedNetwork(seed=3) as network:
        scripted = [Scripted(network.join()) for _ in range(2 + spares)]
        for one in scripted:
            await one.peer.transport.serve(JOB_PROTOCOL, one.serve)
        owner = network.join()
        blobs = BlobServer(owner.transport)
        await blobs.start()
        surroundings = ByHand(scripted[2 : None if known is None else 2 + known])
        said: list[str] = []
        guards = Guards(JOB, 1, blobs, surroundings, LoopClock(), every, said.append)
        links = Links(owner.transport, [one.id for one in scripted[:2]])
        made = Scene(network, scripted[:2], scripted[2:], surroundings, guards, links, owner.peer_id, said)
        async with beside(links.run(), guards.run(), made.pump()):
            made.begin()
            await made.until(lambda: guards.line != "copies: nobody could hold one" or not surroundings.peers)
            yield made


def test_spares_come_to_hold_all_slices_and_all_hear_that_it_is_durable() -> None:
    async def work() -> None:
        async with scene(spares=2) as made:
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: all(made.guards.held[index] for index in range(2)))
            held = made.guards.held
            assert {peer for copies in held.values() for peer, _ in copies} == {one.id for one in made.spares}
            await made.until(lambda: all(one.told(Durable) for one in (*made.members, *made.spares)))
            assert made.said == ["copies of step 1: 2 of 2 slices held by 2 spares"]
            assert made.guards.admitted == {one.id for one in made.spares}
            assert set(made.surroundings.met) == made.guards.admitted
            for spare in made.spares:
                asked, admit = spare.told(Guard)[0], spare.told(Admit)[0]
                assert isinstance(asked, Guard)
                assert isinstance(admit, Admit)
                assert set(admit.peers) == {one.id for one in (*made.members, *made.spares)}
                assert asked.sources == (made.members[asked.slice].id,)
                assert asked.contacts == made.surroundings.contacts(map(PeerId, asked.sources))
                manifest = await fetch_content(
                    spare.peer.transport, made.owner, Digest(asked.manifest.digest), asked.manifest.num_bytes, timeout_s=5
                )
                wanted = required_tensors(GRAPH, PARTS.slices[asked.slice], SETTINGS)
                assert [(name, one.shape) for name, one in decode_manifest(manifest).items()] == [
                    (name, one.shape) for name, one in wanted.items()
                ]

    in_virtual_time(work())


def test_a_guard_that_is_lost_in_the_middle_is_replaced_and_a_reset_loses_nothing() -> None:
    async def work() -> None:
        async with scene(spares=2) as made:
            for spare in made.spares:
                spare.slow_s = 2.0
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: all(one.told(Guard) for one in made.spares))
            made.network.reset_streams()
            lost, left = made.spares
            made.network.crash(lost.id)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1])
            assert {peer for copies in made.guards.held.values() for peer, _ in copies} == {left.id}

    in_virtual_time(work())


def test_a_guard_that_has_forgotten_its_errand_is_replaced_and_a_slow_one_is_not() -> None:
    async def work() -> None:
        async with scene(spares=2) as made:
            forgetful, slow = made.spares
            forgetful.forgets, slow.slow_s = True, 100.0  # longer than anybody may be silent
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1], 450.0)
            assert not slow.told(Stop)
            assert made.said == ["copies of step 1: 2 of 2 slices held by 1 spare"]

    in_virtual_time(work())


def test_a_guard_that_refuses_is_sent_away_and_nobody_holds_it_against_the_run() -> None:
    async def work() -> None:
        async with scene(spares=1) as made:
            made.spares[0].refuses = True
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: made.spares[0].told(Stop))
            assert made.guards.admitted == frozenset()
            assert not made.links.gone
            await asyncio.sleep(20.0)
            made.spares[0].refuses = False
            assert made.guards.wants_copy(2)
            made.keep(2)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1])

    in_virtual_time(work())


def test_a_spare_that_comes_later_is_found_and_used_at_once() -> None:
    async def work() -> None:
        async with scene(spares=2, every=None, known=1) as made:
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1])
            await asyncio.sleep(2.0)
            assert not made.guards.wants_copy(2)
            made.surroundings.peers = list(made.spares)
            await asyncio.sleep(6.0)
            assert made.guards.wants_copy(3)
            made.keep(3)
            await made.until(lambda: {step for copies in made.guards.held.values() for _, step in copies} == {3})
            assert {peer for copies in made.guards.held.values() for peer, _ in copies} == {one.id for one in made.spares}

    in_virtual_time(work())


def test_a_spare_that_takes_over_keeps_its_link_and_the_others_go_back() -> None:
    async def work() -> None:
        async with scene(spares=2) as made:
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1])
            assert made.guards.wants_copy(2)
            made.guards.heard(made.members[0].id, Kept(epoch=1, slice=0, step=2, digest=digest_of(b"x"), num_bytes=4096))
            await made.until(lambda: any(step == 2 for _, step in made.guards.held[0]))
            holder = next(one for one in made.spares if one.id == made.guards.held[1][0][0])
            other = next(one for one in made.spares if one is not holder)
            made.network.crash(made.members[1].id)
            made.guards.gone(made.members[1].id, "lost")
            made.members[1] = holder
            made.begin(epoch=2, state_step=1)
            await made.until(lambda: other.told(Start))
            made.network.reset_streams()
            await asyncio.sleep(5.0)
            assert other.told(Start) == [Start(epoch=2, state_step=1)], "said again it would cost newer copies"
            assert not holder.told(Stop)
            assert holder.id in made.links.peers
            assert {step for copies in made.guards.held.values() for _, step in copies} == {1}
            assert made.guards.wants_copy(2)  # and the round begins anew
            made.keep(2, epoch=1)  # said again by who was frozen: it is of the past that did not happen
            await asyncio.sleep(5.0)
            assert {step for copies in made.guards.held.values() for _, step in copies} == {1}

    in_virtual_time(work())


def test_off_is_off() -> None:
    async def work() -> None:
        async with scene(spares=1, every=0, known=0) as made:
            await asyncio.sleep(30.0)
            assert not any(made.guards.wants_copy(step) for step in range(1, 50))
            assert made.links.peers == {one.id for one in made.members}

    in_virtual_time(work())


def test_a_guard_that_was_started_anew_is_not_taken_to_hold_what_it_held() -> None:
    async def work() -> None:
        async with scene(spares=1) as made:
            (spare,) = made.spares
            assert made.guards.wants_copy(1)
            made.keep(1)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1])
            spare.refuses = True  # its memory is empty now, and the members have dropped that copy
            made.network.reset_streams()
            await made.until(lambda: not made.guards.held[0] and not made.guards.held[1])
            spare.refuses = False
            await asyncio.sleep(1.0)
            assert made.guards.wants_copy(2)
            made.keep(2)
            await made.until(lambda: made.guards.held[0] and made.guards.held[1])

    in_virtual_time(work())
