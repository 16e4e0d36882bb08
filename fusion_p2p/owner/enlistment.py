"""An owner finds the coordinator and registers until it has a plan; and anyone may ask who is in the swarm.

register with whoever coordinates (`owner.finder`) -> Waiting(why)* | MeasureLinks* | Proposal | Unchanged | NotCoordinator
a silent, lost or deposed coordinator: find another

A run that asks again and again passes the same `Finder` each time: it knows whom to ask then, also when the directory is slow.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion_p2p.clock import SystemClock
from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.net.blobs import fetch_content
from fusion_p2p.net.messaging import expect
from fusion_p2p.owner.finder import DIAL_S, Finder, Greeting
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.owner.proposals import departure
from fusion_p2p.plan.encoding import MAX_PLAN_BYTES, decode_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.job_messages import Contact
from fusion_p2p.wire.swarm_messages import (
    Links,
    MeasureLinks,
    NotCoordinator,
    Proposal,
    Register,
    StatusReply,
    StatusRequest,
    Unchanged,
    Waiting,
)

logger = logging.getLogger(__name__)

SILENCE_S, MENDING_SILENCE_S = 20.0, 4.0
"""A coordinator speaks at least every 5 s, every second about a job that stands still; one silent this long is given up."""
PATIENCE_S, MENDING_PATIENCE_S = 20.0, 2.0
"""For one round of looking for the coordinator; when the job stands still the first is short, and every next twice as long."""
PAUSE_S, MENDING_PAUSE_S = 1.0, 0.25
"""Between two rounds."""
FETCH_S = 60.0
IMPROVING_S = 300.0
"""A better plan that took longer to find is out of date."""


@dataclass(frozen=True, slots=True)
class Enlisted:
    """A plan for the job, who proposed it in which term, and how to reach its peers, as far as that one knows."""

    plan: Plan
    coordinator: PeerId
    term: int
    contacts: tuple[Contact, ...]


Offered = Callable[[Digest], bytes | None]
"""What the owner serves under a digest."""


def _nothing(digest: Digest) -> bytes | None:
    return None


async def enlist(
    transport: Transport,
    directory: Directory,
    register: Register,
    *,
    report: Callable[[str], None],
    own_links: OwnLinks | None = None,
    no_peers_timeout_s: float = 30.0,
    finder: Finder | None = None,
    offered: Offered = _nothing,
) -> Enlisted:
    """Register with whoever coordinates until a plan comes; `report` is told `waiting: ...` whenever the reason changes.

    `own_links` remembers what was measured for earlier plans, `finder` who coordinated. `offered` gives the bytes of the plan
    that `register.current` names, if it does.

    When no peer at all answers for `no_peers_timeout_s`: Incompatible if there are peers of another protocol version only,
    SwarmUnreachable otherwise. As long as somebody answers it waits.
    """
    links = own_links or OwnLinks(transport.peer_id, SystemClock())
    finder = finder or Finder(transport, directory)
    try:
        return await _Enlistment(transport, finder, register, _current(register, offered), links, report).run(
            no_peers_timeout_s
        )
    finally:
        await finder.rest()


async def better_plan(
    transport: Transport,
    directory: Directory,
    register: Register,
    *,
    own_links: OwnLinks | None = None,
    finder: Finder | None = None,
    offered: Offered = _nothing,
) -> Enlisted | str:
    """A plan that is worth changing to from the one that `register.current` names, or why there is none. Never raises."""
    links, current = own_links or OwnLinks(transport.peer_id, SystemClock()), _current(register, offered)
    finder = finder or Finder(transport, directory)

    def unheard(line: str) -> None:
        """A run that trains has nothing to wait for."""

    try:
        async with asyncio.timeout(IMPROVING_S):
            return await _Enlistment(transport, finder, register, current, links, unheard).ask_once()
    except TimeoutError:
        return f"the coordinator has found none for {IMPROVING_S:g} s"
    finally:
        await finder.rest()


def _current(register: Register, offered: Offered) -> Plan | None:
    """The plan that is to be mended or improved, as the owner itself has it."""
    encoded = None if register.current is None else offered(Digest(register.current.plan.digest))
    return None if encoded is None else decode_plan(encoded)


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


class _Enlistment:
    """One job on its way to a plan."""

    def __init__(
        self,
        transport: Transport,
        finder: Finder,
        register: Register,
        current: Plan | None,
        links: OwnLinks,
        report: Callable[[str], None],
    ) -> None:
        self._transport, self._finder, self._links, self._report = transport, finder, links, report
        self._register, self._current = register, current
        self._mending = register.current is not None and register.current.purpose == "mend"
        self._reported = ""
        self._heard_at = 0.0
        if current is not None:
            finder.meet(current.peers)

    async def run(self, no_peers_timeout_s: float) -> Enlisted:
        """Ask round after round."""
        self._heard_at = asyncio.get_running_loop().time()
        patience_s = MENDING_PATIENCE_S if self._mending else PATIENCE_S
        while True:
            answer = await self._ask_around(patience_s)
            if isinstance(answer, Enlisted):
                return answer
            if asyncio.get_running_loop().time() - self._heard_at >= no_peers_timeout_s:
                raise self._finder.nobody(no_peers_timeout_s)
            await asyncio.sleep(MENDING_PAUSE_S if self._mending else PAUSE_S)
            patience_s = min(2 * patience_s, PATIENCE_S)

    async def ask_once(self) -> Enlisted | str:
        """The answer of whoever coordinates now."""
        found = await self._finder.find(self._register, PATIENCE_S)
        if not isinstance(found, Greeting):
            return f"nobody coordinates at the moment{f': {found.failure}' if found.failure else ''}"
        try:
            answer = await self._converse(found)
        except (NetworkError, WireError) as error:
            self._finder.doubt(found.peer, error)
            return str(error)
        if isinstance(answer, Unchanged):
            return answer.reason
        return answer or "another peer coordinates now"

    async def _ask_around(self, patience_s: float) -> Enlisted | None:
        found = await self._finder.find(self._register, patience_s)
        if isinstance(found, Greeting):
            try:
                answer = await self._converse(found)
            except (NetworkError, WireError) as error:
                self._finder.doubt(found.peer, error)
                self._say(f"no peer has made a plan yet, asking again: {error}")
                return None
            return answer if isinstance(answer, Enlisted) else None
        if found.answered:
            self._heard_at = asyncio.get_running_loop().time()
            if self._finder.believed is None:
                self._say("the peers have no coordinator yet")
        elif found.failure is not None:
            self._say(f"no peer has made a plan yet, asking again: {found.failure}")
        elif not self._reported:
            self._say("looking for peers")
        return None

    async def _converse(self, greeting: Greeting) -> Enlisted | Unchanged | None:
        """What a coordinator answers in the end; None when it says that it is none. NetworkError, WireError: it fails us."""
        peer, messages, answer = greeting.peer, greeting.messages, greeting.answer
        try:
            while True:
                self._heard_at = asyncio.get_running_loop().time()
                match answer:
                    case Waiting(reason=reason):
                        self._say(reason)
                    case MeasureLinks(request=request, peers=peers):
                        measured = await self._measure(peers)
                        await messages.send(measured.model_copy(update={"request": request}))
                    case NotCoordinator(coordinator=coordinator, addresses=addresses):
                        self._finder.believe(coordinator, addresses)
                        return None
                    case Proposal():
                        return await self._accept(peer, answer)
                    case Unchanged() if self._register.current is not None:
                        self._finder.coordinates(peer)
                        return answer
                    case _:
                        raise WireError(f"{peer} answered {answer.kind} to a registration")
                answer = await messages.receive(timeout_s=MENDING_SILENCE_S if self._mending else SILENCE_S)
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
        departs = departure(plan, register, self._current)
        if departs is not None:
            self._say(f"the plan of peer {peer} is not what was asked for: {departs}")
            raise WireError(f"{peer} proposed a plan that was not asked for: {departs}")
        self._finder.coordinates(peer)
        return Enlisted(plan, peer, proposal.term, proposal.contacts)

    def _say(self, reason: str) -> None:
        if reason != self._reported:
            self._reported = reason
            self._report("waiting: " + "".join(letter if letter.isprintable() else "?" for letter in reason))
