"""Whom an owner asks: the believed coordinator first, soon some others too, until one answers that coordinates.

Looking up who is announced goes on beside: a directory may take seconds, and peers met before may know as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_p2p.clock import SystemClock
from fusion_p2p.errors import Incompatible, NetworkError, SwarmUnreachable, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.wire.messages import Message
from fusion_p2p.wire.swarm_messages import Coordinator, NotCoordinator, Register

logger = logging.getLogger(__name__)

DIAL_S = 5.0
HEDGE_S = 1.0
"""A believed coordinator that has not answered for so long may be dead: others are asked as well."""
WIDTH = 4
"""Peers asked at a time."""
MOST_ASKED = 12
"""Peers asked in one round, besides those that are named as the coordinator."""
AGAIN_S, STALE_S = 1.0, 30.0
"""Who is announced is looked up again after so long: while nobody is found that coordinates, and otherwise."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """A peer that answers to a registration as its coordinator does: its stream, and its first words."""

    peer: PeerId
    messages: MessageStream
    answer: Message


@dataclass(frozen=True, slots=True)
class NobodyFound:
    """Nobody that was asked coordinates. failure: the last error of one that did not answer; answered: somebody did."""

    failure: Exception | None
    answered: bool


class Finder:
    """Knows the peers announced or met, and who is believed to coordinate."""

    def __init__(self, transport: Transport, directory: Directory) -> None:
        self.others = Acquaintances(transport, None, SystemClock())
        self._directory = directory
        self._me = transport.peer_id
        self._believed: PeerId | None = None
        self._hints: tuple[str, ...] = ()
        self._met: frozenset[PeerId] = frozenset()
        self._looking: asyncio.Task[None] | None = None
        self._looked_up_at = -math.inf
        self._found = False
        self._random = random.Random(transport.peer_id)

    @property
    def believed(self) -> PeerId | None:
        """Who is believed to coordinate."""
        return self._believed

    async def candidates(self) -> Sequence[PeerId]:
        """All peers in the order in which to ask them; a directory that fails leaves those known before."""
        await self._look_up()
        rest = sorted(self.others.peers - {self._me, self._believed})
        return rest if self._believed is None else (self._believed, *rest)

    def some(self) -> list[PeerId]:
        """A few that may know who coordinates, in random order."""
        known = sorted((self.others.peers | self._met) - {self._me})
        return self._random.sample(known, min(MOST_ASKED, len(known)))

    def meet(self, peers: Iterable[PeerId]) -> None:
        """These can be asked too: there are connections to them."""
        self._met = frozenset(peers)

    def believe(self, coordinator: Coordinator | None, hints: Sequence[str] = ()) -> None:
        """Somebody said who coordinates."""
        self._believed = None if coordinator is None else PeerId(coordinator.peer)
        self._hints = tuple(hints)

    def coordinates(self, peer: PeerId) -> None:
        """This peer has answered as the coordinator does."""
        self._believed = peer

    def doubt(self, peer: PeerId, error: Exception) -> None:
        """A peer did not answer, or wrongly."""
        logger.debug("%s: %s", peer, error)
        if peer == self._believed:
            self._believed = None

    async def open(self, peer: PeerId) -> MessageStream:
        """NetworkError when the peer cannot be reached."""
        hints = self._hints if peer == self._believed else ()
        return await self.others.open(peer, timeout_s=DIAL_S, hints=hints)

    async def find(self, register: Register, patience_s: float) -> Greeting | NobodyFound:
        """One round of at most so long: register with whoever coordinates."""
        now = asyncio.get_running_loop().time()
        if self._looking is None and now - self._looked_up_at > (STALE_S if self._found else AGAIN_S):
            self._looking = asyncio.create_task(self._look_up_beside())
        found = await _Round(self, register).run(now + patience_s)
        self._found = isinstance(found, Greeting)
        return found

    async def looked_up(self) -> bool:
        """Whether something was being looked up, and now is."""
        if self._looking is None:
            return False
        await asyncio.wait({self._looking})
        return True

    async def rest(self) -> None:
        """Nobody is sought any more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait({self._looking})

    def nobody(self, waited_s: float) -> SwarmUnreachable | Incompatible:
        """The error that no peer answered."""
        if self.others.refused and not self.others.peers:
            count, reason = len(self.others.refused), next(iter(self.others.refused.values()))
            return Incompatible(f"none of the {count} peers found can work with this version: {reason}; upgrade the older side")
        found = f"{len(self.others.peers)} announced, none answered" if self.others.peers else "none is announced"
        return SwarmUnreachable(
            f"no peers for {waited_s:g} s ({found}); start some with `fusion-peer join` on the same bootstrap and --network"
        )

    async def _look_up(self) -> None:
        try:
            self.others.replace_by(await self._directory.lookup(), self._met)
            self._looked_up_at = asyncio.get_running_loop().time()
        except NetworkError as error:
            logger.debug("look-up failed: %s", error)

    async def _look_up_beside(self) -> None:
        try:
            await self._look_up()
        finally:
            self._looking = None


class _Round:
    """Asks whoever is named as the coordinator, and a few others at once while nobody is, or that one is slow."""

    def __init__(self, finder: Finder, register: Register) -> None:
        self._finder, self._register = finder, register
        self._asking: dict[asyncio.Task[Greeting | None], PeerId] = {}
        self._asked: set[PeerId] = set()
        self._hedging = False
        self._answered = False
        self._failure: Exception | None = None

    async def run(self, deadline: float) -> Greeting | NobodyFound:
        found: Greeting | None = None
        try:
            while found is None and (left_s := deadline - asyncio.get_running_loop().time()) > 0:
                self._ask_more()
                if self._asking:
                    found = await self._next(min(HEDGE_S, left_s))
                elif self._asked or not await self._finder.looked_up():
                    break
        finally:
            await self._end()
        return found or NobodyFound(self._failure, self._answered)

    def _ask_more(self) -> None:
        believed = self._finder.believed
        if believed is not None and believed not in self._asked:
            self._ask(believed)
        if believed in self._asking.values() and not self._hedging:
            return
        for peer in self._finder.some():
            if peer not in self._asked and len(self._asking) < WIDTH and len(self._asked) < MOST_ASKED:
                self._ask(peer)

    def _ask(self, peer: PeerId) -> None:
        self._asked.add(peer)
        self._asking[asyncio.create_task(self._greet(peer))] = peer

    async def _next(self, timeout_s: float) -> Greeting | None:
        """Wait for an answer, at most so long; the coordinator's, if it is one."""
        done, _ = await asyncio.wait(self._asking, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        self._hedging = self._hedging or not done
        greetings: list[Greeting] = []
        for task in done:
            peer = self._asking.pop(task)
            try:
                answer = task.result()
            except (NetworkError, WireError) as error:
                self._finder.doubt(peer, error)
                self._failure = error
                continue
            self._answered = True
            if answer is not None:
                greetings.append(answer)
        for late in greetings[1:]:
            await late.messages.close()
        return greetings[0] if greetings else None

    async def _greet(self, peer: PeerId) -> Greeting | None:
        """Register with a peer and hear its first words; None when it names another coordinator, or none."""
        messages = await self._finder.open(peer)
        greeting: Greeting | None = None
        try:
            await messages.send(self._register)
            answer = await messages.receive()
            if isinstance(answer, NotCoordinator):
                self._finder.believe(answer.coordinator, answer.addresses)
            else:
                greeting = Greeting(peer, messages, answer)
        finally:
            if greeting is None:
                await messages.close()
        return greeting

    async def _end(self) -> None:
        """End what is still asked; who is too slow to say that it coordinates is not believed to."""
        if self._finder.believed in self._asking.values() and self._hedging:
            self._finder.believe(None)
        for task in self._asking:
            task.cancel()
        for late in await asyncio.gather(*self._asking, return_exceptions=True):
            if isinstance(late, Greeting):
                await late.messages.close()
