"""An owner finds the coordinator and registers until it has a plan; and anyone may ask who is in the swarm.

look up peers -> ask the one believed to coordinate (else any) -> NotCoordinator(who) | Waiting(why)* | Proposal
                 a silent, lost or deposed coordinator: ask somebody else
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion_p2p.clock import SystemClock
from fusion_p2p.errors import Incompatible, NetworkError, SwarmUnreachable, WireError
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.net.blobs import fetch_content
from fusion_p2p.net.messaging import MessageStream, expect
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.owner.proposals import departure
from fusion_p2p.plan.encoding import MAX_PLAN_BYTES, decode_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.job_messages import Contact
from fusion_p2p.wire.swarm_messages import (
    Coordinator,
    Links,
    MeasureLinks,
    NotCoordinator,
    Proposal,
    Register,
    StatusReply,
    StatusRequest,
    Waiting,
)

logger = logging.getLogger(__name__)

DIAL_S = 5.0
SILENCE_S = 20.0
"""A coordinator speaks at least every 5 s; one that is silent this long is given up."""
FETCH_S = 60.0
PAUSE_S = 1.0
"""Between two rounds of asking."""


@dataclass(frozen=True, slots=True)
class Enlisted:
    """A plan for the job, who proposed it in which term, and how to reach its peers."""

    plan: Plan
    coordinator: PeerId
    term: int
    contacts: tuple[Contact, ...]


async def enlist(
    transport: Transport,
    directory: Directory,
    register: Register,
    *,
    report: Callable[[str], None],
    own_links: OwnLinks | None = None,
    no_peers_timeout_s: float = 30.0,
) -> Enlisted:
    """Register with whoever coordinates until a plan comes; `report` is told `waiting: ...` whenever the reason changes.

    `own_links` remembers what was measured for earlier plans.

    When no peer at all answers for `no_peers_timeout_s`: Incompatible if there are peers of another protocol version only,
    SwarmUnreachable otherwise. As long as somebody answers it waits.
    """
    links = own_links or OwnLinks(transport.peer_id, SystemClock())
    return await _Enlistment(transport, Finder(transport, directory), register, links, report).run(no_peers_timeout_s)


async def swarm_status(transport: Transport, directory: Directory, timeout_s: float) -> StatusReply:
    """The swarm as its coordinator sees it, or as any peer does when that one does not answer.

    SwarmUnreachable or Incompatible when nobody answers in time.
    """
    return await status_by(Finder(transport, directory), timeout_s)


async def status_by(finder: Finder, timeout_s: float) -> StatusReply:
    """The same; `finder` then knows what all have announced."""
    newest: StatusReply | None = None
    try:
        async with asyncio.timeout(timeout_s):
            while newest is None or not _is_final(newest):
                newest = await _ask_somebody(finder) or newest
    except TimeoutError:
        logger.debug("no first-hand status within %g s", timeout_s)
    if newest is None:
        raise finder.nobody(timeout_s)
    return newest


def _is_final(reply: StatusReply) -> bool:
    return reply.coordinator is None or reply.coordinator.peer == reply.asked


async def _ask_somebody(finder: Finder) -> StatusReply | None:
    for peer in await finder.candidates():
        try:
            reply = expect(await finder.others.ask(peer, StatusRequest(), timeout_s=DIAL_S), StatusReply)
        except (NetworkError, WireError) as error:
            finder.doubt(peer, error)
            continue
        finder.believe(reply.coordinator)
        return reply
    await asyncio.sleep(PAUSE_S)
    return None


class Finder:
    """Whom to ask: the believed coordinator first, then everybody announced."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self.others = Acquaintances(transport, None, SystemClock())
        self._directory = directory
        self._me = transport.peer_id
        self._believed: PeerId | None = None
        self._hints: tuple[str, ...] = ()

    async def candidates(self) -> Sequence[PeerId]:
        """Peers in the order in which to ask them; a directory that fails leaves those known before."""
        try:
            self.others.replace_by(await self._directory.lookup(), frozenset())
        except NetworkError as error:
            logger.debug("look-up failed: %s", error)
        rest = sorted(self.others.peers - {self._me, self._believed})
        return rest if self._believed is None else (self._believed, *rest)

    def believe(self, coordinator: Coordinator | None, hints: Sequence[str] = ()) -> None:
        """Somebody said who coordinates."""
        self._believed = None if coordinator is None else PeerId(coordinator.peer)
        self._hints = tuple(hints)

    def doubt(self, peer: PeerId, error: Exception) -> None:
        """A peer did not answer, or wrongly."""
        logger.debug("%s: %s", peer, error)
        if peer == self._believed:
            self._believed = None

    async def open(self, peer: PeerId) -> MessageStream:
        """NetworkError when the peer cannot be reached."""
        hints = self._hints if peer == self._believed else ()
        return await self.others.open(peer, timeout_s=DIAL_S, hints=hints)

    def nobody(self, waited_s: float) -> SwarmUnreachable | Incompatible:
        """The error that no peer answered."""
        if self.others.refused and not self.others.peers:
            count, reason = len(self.others.refused), next(iter(self.others.refused.values()))
            return Incompatible(f"none of the {count} peers found can work with this version: {reason}; upgrade the older side")
        found = f"{len(self.others.peers)} announced, none answered" if self.others.peers else "none is announced"
        return SwarmUnreachable(
            f"no peers for {waited_s:g} s ({found}); start some with `fusion-peer join` on the same bootstrap and --network"
        )


class _Enlistment:
    """One job on its way to a plan."""

    def __init__(
        self, transport: Transport, finder: Finder, register: Register, links: OwnLinks, report: Callable[[str], None]
    ) -> None:
        self._transport = transport
        self._finder = finder
        self._register = register
        self._links = links
        self._report = report
        self._reported = ""
        self._heard_at = 0.0

    async def run(self, no_peers_timeout_s: float) -> Enlisted:
        """Ask round after round."""
        self._heard_at = asyncio.get_running_loop().time()
        while True:
            enlisted = await self._ask_around()
            if enlisted is not None:
                return enlisted
            if asyncio.get_running_loop().time() - self._heard_at >= no_peers_timeout_s:
                raise self._finder.nobody(no_peers_timeout_s)
            await asyncio.sleep(PAUSE_S)

    async def _ask_around(self) -> Enlisted | None:
        """Until one answers: its answer says whom to ask next."""
        failure: Exception | None = None
        for peer in await self._finder.candidates():
            try:
                return await self._ask(peer)
            except (NetworkError, WireError) as error:
                self._finder.doubt(peer, error)
                failure = error
        if failure is not None:
            self._say(f"no peer has made a plan yet, asking again: {failure}")
        elif not self._reported:
            self._say("looking for peers")
        return None

    async def _ask(self, peer: PeerId) -> Enlisted | None:
        """Register with a peer; None when it names another coordinator. NetworkError or WireError when it fails us."""
        messages = await self._finder.open(peer)
        try:
            await messages.send(self._register)
            while True:
                answer = await messages.receive(timeout_s=SILENCE_S)
                self._heard_at = asyncio.get_running_loop().time()
                match answer:
                    case Waiting(reason=reason):
                        self._say(reason)
                    case MeasureLinks(request=request, peers=peers):
                        measured = await self._measure(peers)
                        await messages.send(measured.model_copy(update={"request": request}))
                    case NotCoordinator(coordinator=coordinator, addresses=addresses):
                        self._finder.believe(coordinator, addresses)
                        if coordinator is None:
                            self._say("the peers have no coordinator yet")
                        return None
                    case Proposal():
                        return await self._accept(peer, answer)
                    case _:
                        raise WireError(f"{peer} answered {answer.kind} to a registration")
        finally:
            await messages.close()

    async def _measure(self, peers: Sequence[str]) -> Links:
        self._say(f"measuring links to {len(peers)} peers")
        return await self._links.measure(self._finder.others.open_stream, [PeerId(peer) for peer in peers])

    async def _accept(self, peer: PeerId, proposal: Proposal) -> Enlisted:
        register = self._register
        if (proposal.job, proposal.base_epoch, proposal.coordinator) != (register.job, register.base_epoch, peer):
            raise WireError(f"{peer} proposed a plan for something else")
        if proposal.plan.num_bytes > MAX_PLAN_BYTES:
            raise WireError(f"{peer} proposed a plan of {proposal.plan.num_bytes} bytes, at most {MAX_PLAN_BYTES} are allowed")
        encoded = await fetch_content(
            self._transport, peer, Digest(proposal.plan.digest), proposal.plan.num_bytes, timeout_s=FETCH_S
        )
        plan = decode_plan(encoded)
        departs = departure(plan, register)
        if departs is not None:
            self._say(f"the plan of peer {peer} is not what was asked for: {departs}")
            raise WireError(f"{peer} proposed a plan that was not asked for: {departs}")
        self._finder.believe(Coordinator(term=proposal.term, peer=peer))
        return Enlisted(plan, peer, proposal.term, proposal.contacts)

    def _say(self, reason: str) -> None:
        if reason != self._reported:
            self._reported = reason
            self._report("waiting: " + "".join(letter if letter.isprintable() else "?" for letter in reason))
