"""The coordinator's service for owners: plans over the free peers and proposes, or says what it waits for.

Every peer has one; it answers only while its peer coordinates. `swarm.coordinator` decides who gets which peers, `planning`
computes in a worker thread, so that beats go on; this carries it out. A job that is to be mended stands still meanwhile: for it
nothing is measured, and nobody is waited for.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from fusion_p2p.clock import Clock
from fusion_p2p.errors import NetworkError, StreamClosed, WireError
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.peer.link_tables import capability_of, gather_links, tables_of
from fusion_p2p.peer.owner_talk import OwnerTalk
from fusion_p2p.peer.planning import InThread, NotNow, Planner, Told
from fusion_p2p.peer.presence import Presence
from fusion_p2p.peer.presence_messages import Present
from fusion_p2p.plan.encoding import encode_plan
from fusion_p2p.plan.measured import Links as MeasuredLinks
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.replan import Keep
from fusion_p2p.plan.request import NoPlan
from fusion_p2p.swarm import coordinator
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.swarm.coordinator import MAX_JOBS, Jobs, MakePlan, Refuse, Seat, Stay, Wish
from fusion_p2p.swarm.election import Token
from fusion_p2p.swarm.links import merged
from fusion_p2p.swarm.settings import WAN, SwarmSettings
from fusion_p2p.swarm.standing import Copies, standings
from fusion_p2p.wire.job_messages import Contact, Content
from fusion_p2p.wire.swarm_messages import JobStatus, LinkEntry, Links, Proposal, Register, Unchanged

ADDRESSES_PER_CONTACT = 3
MAX_CONTACT_BYTES = 48 << 10
"""Contacts share a message of 64 KiB with the rest of the proposal."""
LINKS_S = 5.0
"""How long a plan waits for the links of its peers to be measured."""
KNOWN_LINKS_S = 0.5
"""How long a job that is to be mended waits for the tables of links as they are."""
URGENT_S = 5.0
"""For so long it is looked several times a second who is here now for such a job."""
AGAIN_S = 1.0
"""An owner whose job stands still hears from us at least this often, so that it soon knows when we are lost."""


@dataclass(frozen=True, slots=True)
class _OwnersLinks:
    """What an owner said of its links to the peers that it was asked for, for when there is no time to ask again."""

    asked: frozenset[PeerId] = frozenset()
    entries: tuple[LinkEntry, ...] = ()


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
        self._planner = Planner(transport, clock, in_thread)
        self._jobs = Jobs()
        self._newest: dict[JobId, MessageStream] = {}
        """Which stream speaks for a job."""
        self._owners_links: OrderedDict[PeerId, _OwnersLinks] = OrderedDict()
        self._told: dict[PeerId, Links] = {}
        """The newest tables of links of the peers here."""
        self._copies: dict[JobId, Copies] = {}
        self._idle: dict[JobId, Mapping[PeerId, str]] = {}
        self._standings: tuple[float, Mapping[PeerId, str]] = (-1.0, {})
        presence.serve_owners(self.serve, self.jobs, self.standings)

    def jobs(self) -> Iterator[JobStatus]:
        """The jobs known, in the order of registration."""
        for job, entry in self._jobs.jobs.items():
            yield JobStatus(
                job=job,
                owner=entry.wish.owner,
                state="proposed" if entry.phase == "proposed" else "waiting",
                reason=entry.reason,
            )

    def standings(self) -> Mapping[PeerId, str]:
        """What there is for each peer to do, in words; not older than a beat."""
        now = self._clock.now()
        if now - self._standings[0] >= self._settings.beat_s or self._standings[0] < 0:
            known = self._jobs.jobs
            for memory in (self._copies, self._idle):
                for job in [job for job in memory if job not in known]:
                    del memory[job]
            idle = {peer: reason for reasons in self._idle.values() for peer, reason in reasons.items()}
            self._standings = now, standings(self._jobs, self._seats(), self._copies, idle, now)
        return self._standings[1]

    async def serve(self, messages: MessageStream, register: Register) -> None:
        """Talk to one owner until it has its proposal or somebody else coordinates."""
        job = JobId(register.job)
        refusals = self._step(coordinator.Registered(_wish(register, messages.remote)))
        waiting_s = self._settings.waiting_s
        talk = OwnerTalk(messages, self._clock, min(AGAIN_S, waiting_s) if _purpose(register) == "mend" else waiting_s)
        for refusal in refusals:
            if isinstance(refusal, Refuse):
                await talk.say(refusal.reason)
                return
        self._newest[job] = messages
        if register.current is not None:
            self._copies[job] = _copies(register)
        try:
            await self._serve_registered(talk, register)
        finally:
            if self._newest.get(job) is messages:
                del self._newest[job]
                self._forget_unless_proposed(job)

    async def _serve_registered(self, talk: OwnerTalk, register: Register) -> None:
        began = self._clock.now()
        while self._in_charge(talk, register):
            if await self._look(talk, register):
                return
            urgent = _purpose(register) == "mend" and self._clock.now() - began < URGENT_S
            await asyncio.sleep(self._settings.beat_s / (8 if urgent else 2))
        if self._presence.coordinating and _purpose(register) == "improve":
            await talk.messages.send(Unchanged(reason="the job has been registered for something else since"))
        else:
            await talk.messages.send(self._presence.not_coordinator())

    def _in_charge(self, talk: OwnerTalk, register: Register) -> bool:
        """Whether we still coordinate, and this stream still speaks for its job."""
        return self._presence.coordinating and self._newest.get(JobId(register.job)) is talk.messages

    async def _look(self, talk: OwnerTalk, register: Register) -> bool:
        """Look once at who is here; whether the owner has its answer."""
        look = coordinator.Look(JobId(register.job), self._seats(), self._presence.coordinating_since)
        for action in self._step(look):
            match action:
                case MakePlan():
                    return await self._plan(talk, register, action)
                case Stay(reason=reason):
                    await talk.messages.send(Unchanged(reason=reason[:1024]))
                    return True
            await talk.say(action.reason)
        return False

    async def _plan(self, talk: OwnerTalk, register: Register, wanted: MakePlan) -> bool:
        made = await self._plan_while_talking(talk, register, wanted)
        token = self._presence.coordinator
        if not self._in_charge(talk, register) or token is None:
            return False
        if isinstance(made, Plan):
            self._step(coordinator.Planned(wanted.job, made.peers))
            self._idle[wanted.job] = dict(made.idle)
            await self._propose(talk, register, made, token)
        elif _purpose(register) == "improve" or isinstance(made, Keep):
            self._step(coordinator.NotImproved(wanted.job))
            await talk.messages.send(Unchanged(reason=made.reason[:1024]))
        else:
            self._step(coordinator.NotPlanned(wanted.job, made.reason, lasting=isinstance(made, NoPlan)))
            await talk.say(made.reason)
            return False
        return True

    async def _plan_while_talking(self, talk: OwnerTalk, register: Register, wanted: MakePlan) -> Plan | NoPlan | NotNow | Keep:
        """Plan, and let the owner hear from us meanwhile."""
        announced = {present.peer: present.announcement for present in self._presence.members()}
        known = {peer: found for peer in wanted.peers if (found := announced.get(peer)) is not None}
        peers = tuple(capability_of(peer, found) for peer, found in known.items())
        lost = False
        try:
            async with asyncio.TaskGroup() as group:
                surveying = group.create_task(self._survey(talk, register, known))
                await talk.until_done(surveying, f"measuring links of {len(peers)} peers")
                told = Told(talk.messages.remote, peers, surveying.result(), wanted.left_out)
                planning = group.create_task(self._planner.plan(register, told))
                await talk.until_done(planning, f"planning over {len(peers)} of the peers here")
        except* (NetworkError, WireError):
            lost = True  # raised below: from here it would come as a group
        if lost:
            raise StreamClosed(f"{talk.messages.remote} went away, or spoke out of turn, while its job was planned")
        return planning.result()

    async def _survey(self, talk: OwnerTalk, register: Register, known: Mapping[PeerId, Announcement]) -> MeasuredLinks:
        """All links that are known: after the peers had a little time to measure theirs, and then the owner its own.

        At once for a job that stands still; without bothering an owner that trains if it has measured them already.
        """
        owner = talk.messages.remote
        if _purpose(register) == "mend":
            tables = await self._known_tables(known)
        else:
            tables = await self._tables(known)
            if _purpose(register) == "begin" or not self._links_of(owner).asked >= known.keys():
                self._remember_links(owner, _OwnersLinks(frozenset(known), await talk.links_to(list(known))))
        return merged({owner: self._links_of(owner).entries, **tables_of(known, tables)})

    async def _known_tables(self, known: Mapping[PeerId, Announcement]) -> Mapping[PeerId, Links]:
        """What these peers told last time; those that were never asked are asked now, but not waited for."""
        before = {peer: links for peer, links in self._told.items() if peer in known}
        unasked = known.keys() - before.keys() - {self._presence.me}
        return {**before, **await gather_links(self._presence.others, unasked, KNOWN_LINKS_S)}

    async def _tables(self, known: Mapping[PeerId, Announcement]) -> Mapping[PeerId, Links]:
        """The tables of these peers, when all have measured what they want to, or time is up."""
        deadline = self._clock.now() + LINKS_S
        while True:
            told = await gather_links(self._presence.others, set(known) - {self._presence.me})
            told |= {self._presence.me: self._presence.links()}
            measured = len(known) < 2 or not any(told[peer].measuring for peer in known if peer in told)
            if measured or self._clock.now() >= deadline:
                here = {present.peer for present in self._presence.members()}
                self._told = {peer: links for peer, links in {**self._told, **told}.items() if peer in here}
                return told
            await asyncio.sleep(self._settings.beat_s / 2)

    def _links_of(self, owner: PeerId) -> _OwnersLinks:
        return self._owners_links.get(owner, _OwnersLinks())

    def _remember_links(self, owner: PeerId, told: _OwnersLinks) -> None:
        self._owners_links[owner] = told
        self._owners_links.move_to_end(owner)
        while len(self._owners_links) > MAX_JOBS:
            self._owners_links.popitem(last=False)

    async def _propose(self, talk: OwnerTalk, register: Register, made: Plan, token: Token) -> None:
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

    def _seats(self) -> tuple[Seat, ...]:
        return tuple(_seat(present) for present in self._presence.members())

    def _step(self, event: coordinator.Event) -> tuple[coordinator.Action, ...]:
        self._jobs, actions = coordinator.step(self._jobs, event, self._clock.now(), self._settings)
        return actions

    def _forget_unless_proposed(self, job: JobId) -> None:
        entry = self._jobs.jobs.get(job)
        if entry is not None:
            self._step(coordinator.NotImproved(job) if entry.phase == "proposed" else coordinator.OwnerGone(job))


def _purpose(register: Register) -> Literal["begin", "mend", "improve"]:
    return "begin" if register.current is None else register.current.purpose


def _wish(register: Register, owner: PeerId) -> Wish:
    job, current = JobId(register.job), register.current
    if current is None:
        return Wish(job, owner, register.incarnation, register.peers)
    without = frozenset(map(PeerId, current.without))
    guards = frozenset(PeerId(copy.peer) for copy in current.held)
    return Wish(job, owner, register.incarnation, register.peers, current.purpose, without, guards)


def _copies(register: Register) -> Copies:
    """The slices of which each peer keeps a copy."""
    kept: dict[PeerId, list[int]] = {}
    for copy in register.current.held if register.current is not None else ():
        kept.setdefault(PeerId(copy.peer), []).append(copy.slice)
    return {peer: tuple(sorted(set(slices))) for peer, slices in kept.items()}


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
