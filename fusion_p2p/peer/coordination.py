"""The coordinator's service for owners: plans over the free peers and proposes, or says what it waits for.

Every peer has one; it answers only while its peer coordinates. `swarm.coordinator` decides who gets which peers, `planning`
computes in a worker thread, so that beats go on; this carries it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusion_p2p.clock import Clock
from fusion_p2p.errors import DeadlinePassed, NetworkError, StreamClosed, WireError
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.peer.link_tables import capability_of, gather_links, tables_of
from fusion_p2p.peer.planning import InThread, NotNow, Planner
from fusion_p2p.peer.presence import Presence
from fusion_p2p.peer.presence_messages import Present
from fusion_p2p.plan.encoding import encode_plan
from fusion_p2p.plan.measured import Links as MeasuredLinks
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan
from fusion_p2p.swarm import coordinator
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.swarm.coordinator import Jobs, MakePlan, Refuse, Seat, Wish
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.links import merged
from fusion_p2p.swarm.settings import WAN, SwarmSettings
from fusion_p2p.wire.job_messages import Contact, Content
from fusion_p2p.wire.swarm_messages import MAX_LINKS, JobStatus, LinkEntry, Links, MeasureLinks, Proposal, Register, Waiting

ADDRESSES_PER_CONTACT = 3
MAX_CONTACT_BYTES = 48 << 10
"""Contacts share a message of 64 KiB with the rest of the proposal."""
LINKS_S = 5.0
"""How long a plan waits for the links of its peers to be measured."""
QUIET_S = 0.5
"""Work that takes no longer needs no word."""
OWNER_LINKS_S = 5.0
"""How long it waits for the owner's: that one spends 3 s on it."""


class Coordination:
    """Plans the jobs of owners that register with this peer."""

    def __init__(
        self,
        transport: Transport,
        presence: Presence,
        blobs: BlobServer,
        clock: Clock,
        settings: SwarmSettings = WAN,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._presence = presence
        self._blobs = blobs
        self._clock = clock
        self._settings = settings
        self._planner = Planner(transport, in_thread)
        self._jobs = Jobs()
        self._newest: dict[JobId, MessageStream] = {}
        """Which stream speaks for a job."""
        presence.serve_owners(self.serve, self.jobs)

    def jobs(self) -> Iterator[JobStatus]:
        """The jobs known, in the order of registration."""
        for job, entry in self._jobs.jobs.items():
            yield JobStatus(
                job=job,
                owner=entry.wish.owner,
                state="proposed" if entry.phase == "proposed" else "waiting",
                reason=entry.reason,
            )

    async def serve(self, messages: MessageStream, register: Register) -> None:
        """Talk to one owner until it has its proposal or somebody else coordinates."""
        job = JobId(register.job)
        refusals = self._step(coordinator.Registered(Wish(job, messages.remote, register.incarnation, register.peers)))
        talk = _Talk(messages, self._clock, self._settings.waiting_s)
        for refusal in refusals:
            if isinstance(refusal, Refuse):
                await talk.say(refusal.reason)
                return
        self._newest[job] = messages
        try:
            await self._serve_registered(talk, register)
        finally:
            if self._newest.get(job) is messages:
                del self._newest[job]
                self._forget_unless_proposed(job)

    async def _serve_registered(self, talk: _Talk, register: Register) -> None:
        while self._presence.coordinating and self._newest.get(JobId(register.job)) is talk.messages:
            if await self._look(talk, register):
                return
            await asyncio.sleep(self._settings.beat_s / 2)
        await talk.messages.send(self._presence.not_coordinator())

    async def _look(self, talk: _Talk, register: Register) -> bool:
        """Look once at who is here; whether a proposal was delivered."""
        seats = tuple(_seat(present) for present in self._presence.members())
        look = coordinator.Look(JobId(register.job), seats, self._presence.coordinating_since)
        for action in self._step(look):
            if isinstance(action, MakePlan):
                return await self._plan(talk, register, action)
            await talk.say(action.reason)
        return False

    async def _plan(self, talk: _Talk, register: Register, wanted: MakePlan) -> bool:
        made = await self._plan_while_talking(talk, register, wanted)
        token = self._presence.coordinator
        if isinstance(made, Plan) and token is not None and self._presence.coordinating:
            self._step(coordinator.Planned(wanted.job, made.peers))
            await self._propose(talk, register, made, token)
            return True
        if not isinstance(made, Plan):
            self._step(coordinator.NotPlanned(wanted.job, made.reason, lasting=isinstance(made, NoPlan)))
            await talk.say(made.reason)
        return False

    async def _plan_while_talking(self, talk: _Talk, register: Register, wanted: MakePlan) -> Plan | NoPlan | NotNow:
        """Plan, and let the owner hear from us meanwhile."""
        announced = {present.peer: present.announcement for present in self._presence.members()}
        known = {peer: found for peer in wanted.peers if (found := announced.get(peer)) is not None}
        peers = [capability_of(peer, found) for peer, found in known.items()]
        lost = False
        try:
            async with asyncio.TaskGroup() as group:
                surveying = group.create_task(self._survey(talk, known))
                await self._talk_until(surveying, talk, f"measuring links of {len(peers)} peers")
                work = self._planner.plan(talk.messages.remote, register, peers, surveying.result(), wanted.left_out)
                planning = group.create_task(work)
                await self._talk_until(planning, talk, f"planning over {len(peers)} of the peers here")
        except* (NetworkError, WireError):
            lost = True  # raised below: from here it would come as a group
        if lost:
            raise StreamClosed(f"{talk.messages.remote} went away, or spoke out of turn, while its job was planned")
        return planning.result()

    async def _talk_until(self, task: asyncio.Task[Any], talk: _Talk, reason: str) -> None:
        while not task.done():
            await asyncio.wait({task}, timeout=QUIET_S)
            if not task.done():
                await talk.say(reason)

    async def _survey(self, talk: _Talk, known: Mapping[PeerId, Announcement]) -> MeasuredLinks:
        """All links that are known, after the peers had a little time to measure theirs, and then the owner its own."""
        told = await self._tables(known)
        owners = await talk.links_to(list(known))
        return merged({talk.messages.remote: owners, **tables_of(known, told)})

    async def _tables(self, known: Mapping[PeerId, Announcement]) -> dict[PeerId, Links]:
        """The tables of these peers, when all have measured what they want to, or time is up."""
        deadline = self._clock.now() + LINKS_S
        while True:
            told = await gather_links(self._presence.others, set(known) - {self._presence.me})
            told |= {self._presence.me: self._presence.links()}
            measured = len(known) < 2 or not any(told[peer].measuring for peer in known if peer in told)
            if measured or self._clock.now() >= deadline:
                return told
            await asyncio.sleep(self._settings.beat_s / 2)

    async def _propose(self, talk: _Talk, register: Register, made: Plan, token: Token) -> None:
        """Serve the plan until the owner has it: it closes the stream then."""
        encoded = encode_plan(made)
        digest = self._blobs.offer(encoded)
        try:
            await talk.messages.send(
                Proposal(
                    job=register.job,
                    term=token.term,
                    coordinator=token.peer,
                    base_epoch=register.base_epoch,
                    plan=Content(digest=digest, num_bytes=len(encoded)),
                    contacts=self._contacts(made),
                )
            )
            await talk.until_closed(self._settings.reserve_s)
        finally:
            self._blobs.withdraw(digest)

    def _contacts(self, made: Plan) -> tuple[Contact, ...]:
        """How to reach the peers of a plan; fewer addresses each when they are many."""
        used = made.peers
        known = {p.peer: p.announcement.addresses for p in self._presence.members() if p.announcement and p.peer in used}
        size = sum(len(address) for addresses in known.values() for address in addresses[:ADDRESSES_PER_CONTACT])
        most = ADDRESSES_PER_CONTACT if size <= MAX_CONTACT_BYTES else 1
        return tuple(Contact(peer=peer, addresses=addresses[:most]) for peer, addresses in known.items())

    def _step(self, event: coordinator.Event) -> tuple[coordinator.Action, ...]:
        self._jobs, actions = coordinator.step(self._jobs, event, self._clock.now(), self._settings)
        return actions

    def _forget_unless_proposed(self, job: JobId) -> None:
        entry = self._jobs.jobs.get(job)
        if entry is not None and entry.phase != "proposed":
            self._step(coordinator.OwnerGone(job))


class _Talk:
    """Says the same thing to an owner only every few seconds, another thing at once."""

    def __init__(self, messages: MessageStream, clock: Clock, again_s: float) -> None:
        self.messages = messages
        self._clock = clock
        self._again_s = again_s
        self._said = ""
        self._said_at = 0.0
        self._asked = 0

    async def say(self, reason: str) -> None:
        """StreamClosed when the owner has gone."""
        now = self._clock.now()
        if reason != self._said or now - self._said_at >= self._again_s:
            self._said, self._said_at = reason, now
            await self.messages.send(Waiting(reason=reason[:1024]))

    async def links_to(self, peers: Sequence[PeerId]) -> tuple[LinkEntry, ...]:
        """What the owner measures of its links to these peers; nothing when it does not answer in time.

        What it still answers to an earlier question is not heard. StreamClosed when it has gone, WireError when it says
        something else.
        """
        self._asked += 1
        await self.messages.send(MeasureLinks(request=self._asked, peers=tuple(peers[:MAX_LINKS])))
        deadline = self._clock.now() + OWNER_LINKS_S
        while (left_s := deadline - self._clock.now()) > 0:
            try:
                answer = expect(await self.messages.receive(timeout_s=left_s), Links)
            except DeadlinePassed:
                break
            if answer.request == self._asked:
                return answer.entries
        return ()

    async def until_closed(self, timeout_s: float) -> None:
        """Until the owner closes, at most so long; what it says meanwhile comes too late."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self.messages.receive()
        except (NetworkError, TimeoutError):
            return


def _seat(present: Present) -> Seat:
    return Seat(
        peer=present.peer,
        joined_at=present.joined_at,
        flops_per_s=present.announcement.rates.matmul_flops if present.announcement else 0.0,
        holds=JobId(present.holding.job) if present.holding else None,
        unusable=_why_unusable(present),
    )


def _why_unusable(present: Present) -> str | None:
    if present.announcement is None:
        return "has not announced what it can do"
    if present.state in ("paused", "draining"):
        return f"is {present.state}"
    if present.announcement.reachability == "outbound-only":
        return "cannot be dialled by others"
    if not present.reported:
        return "has not reported to the coordinator lately"
    return None
