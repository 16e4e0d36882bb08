"""Who is left of a broken epoch, what they have, and who comes back while the next one is prepared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from fusion_p2p.ids import PeerId
from fusion_p2p.job.recovery import Stocks
from fusion_p2p.owner.guarding import Guarding
from fusion_p2p.owner.links import Event, Gone, Heard, Links
from fusion_p2p.owner.stage import Stage
from fusion_p2p.owner.training import DECISION, RUNNING
from fusion_p2p.wire.job_messages import Failed, Halt, Halted, Leaving, Refused
from fusion_p2p.wire.messages import Message

log = logging.getLogger(__name__)

HALT = "halt"
ANSWER_S = 15.0
"""A peer that is heard, but does not say for so long what it has, is taken to have nothing: its task ends before that."""
GUARD_S = 2.0
"""The same for one that only keeps copies."""
RETURN_S = 2.0
"""Between two tries to reach a peer that was lost."""
SHUN_S = 30.0
"""A peer that refused is asked again after so long."""


class Halting:
    """One broken epoch, from its end to the start of the next."""

    def __init__(self, stage: Stage, links: Links, guards: Guarding) -> None:
        self._stage, self._links, self._guards = stage, links, guards
        self._stocks: dict[PeerId, Mapping[int, frozenset[int]]] = {}
        self._counted: dict[PeerId, frozenset[tuple[int, int]]] = {}
        """The copies, by slice and step, that we knew of when a peer answered: about those its answer counts."""
        self._lost: dict[PeerId, str] = {}
        self._shunned: dict[PeerId, float] = {}
        self._asked: dict[PeerId, float] = {}
        self._return_at: dict[PeerId, float] = {}
        self._changed = False
        self._order = Halt(epoch=stage.run.epoch, reason="")

    @property
    def lost(self) -> Mapping[PeerId, str]:
        """Peers of the plan that are gone, and why."""
        return self._lost

    @property
    def missing(self) -> frozenset[PeerId]:
        """Peers that the next plan has to do without."""
        return frozenset(self._lost) | frozenset(self._shunned)

    @property
    def stocks(self) -> Stocks:
        """What everybody has said to have, and the copies we have heard of since then, or at all from who has not answered."""
        stocks = dict(self._stocks)
        for peer in self._links.peers:
            for index, step in self._copies_of(peer) - self._counted.get(peer, frozenset()):
                known = stocks.get(peer, {})
                stocks[peer] = {**known, index: known.get(index, frozenset()) | {step}}
        return stocks

    def _copies_of(self, peer: PeerId) -> frozenset[tuple[int, int]]:
        """The copies that a peer is known to hold, by slice and step."""
        return frozenset((index, step) for index, held in self._guards.held.items() for other, step in held if other == peer)

    def begin(self, reason: str) -> None:
        """Tell all that are left to halt."""
        self._guards.broke()
        self._links.settle_all(RUNNING)
        self._order = Halt(epoch=self._stage.run.epoch, reason=reason[:1000])
        for peer in self._stage.plan.peers - self._links.peers:
            self.lose(peer, self._links.gone.get(peer, "it is not linked"))
        for peer in self._links.peers - self._lost.keys():
            self._ask(peer)

    def followed_by(self, stage: Stage) -> Halting:
        """The next epoch was written down but broke before all ran it: the same, for that one."""
        after = Halting(stage, self._links, self._guards)
        after._lost, after._shunned, after._return_at = self._lost, self._shunned, self._return_at
        after.begin(self._order.reason)
        return after

    def ask_again(self) -> None:
        """What somebody was believed to have may have gone: ask all that have answered."""
        for peer in self._stocks.keys() & self._links.peers:
            self._ask(peer)

    def lose(self, peer: PeerId, reason: str) -> None:
        """A peer is gone, or has failed: for now it is done without, and asked again in a while."""
        if peer not in self._lost:
            self._guards.gone(peer, reason)
            self._changed = True
        self._stocks.pop(peer, None)
        self._counted.pop(peer, None)
        self._asked.pop(peer, None)
        if peer in self._stage.plan.peers:
            self._lost[peer] = reason
            self._return_at[peer] = _now() + RETURN_S

    def shun(self, peer: PeerId) -> None:
        """Do without a peer, though it is there: what it has it may still give to others."""
        self._changed = self._changed or peer not in self._shunned
        self._shunned[peer] = _now() + SHUN_S

    def take(self, event: Event) -> None:
        """Take in what has happened."""
        match event:
            case Gone(peer, reason) if peer in self._stocks or peer in self._asked or peer in self._stage.plan.peers:
                self.lose(peer, reason)
            case Gone(peer, reason):
                self._guards.gone(peer, reason)
            case Heard(peer, message):
                self._hear(peer, message)

    async def answered(self) -> None:
        """Until all that were asked have said what they have, or are gone, or time is up."""
        while self._asked and _now() < max(self._asked.values()):
            await self._next(max(self._asked.values()) - _now())
        for peer in tuple(self._asked):
            log.warning("peer=%s does not say what it has", peer)
            self._answer(peer, {})
        self._changed = False

    async def until(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task as long as nothing happens that matters; whether it is done."""
        while not task.done() and not self._changed:
            await self._next(None, task)
        return task.done() and not self._changed

    async def pause(self, seconds: float) -> None:
        """Wait so long, or until something happens that matters."""
        deadline = _now() + seconds
        while not self._changed and _now() < deadline:
            await self._next(deadline - _now())

    async def _next(self, timeout_s: float | None, *others: asyncio.Task[Any]) -> None:
        """The next event, or the end of a task, or time to try those that were lost."""
        due = min([*self._return_at.values(), *self._shunned.values()], default=None)
        waits = [wait for wait in (timeout_s, None if due is None else due - _now()) if wait is not None]
        hearing = asyncio.ensure_future(self._links.inbox.get())
        try:
            await asyncio.wait(
                {hearing, *others}, timeout=max(0.0, min(waits)) if waits else None, return_when="FIRST_COMPLETED"
            )
        finally:
            if hearing.done():
                self.take(hearing.result())
            hearing.cancel()
        self._try_again()

    def _try_again(self) -> None:
        now = _now()
        for peer in [peer for peer, until in self._shunned.items() if until <= now]:
            del self._shunned[peer]
            self._changed = True
        for peer in [peer for peer, at in self._return_at.items() if at <= now]:
            del self._return_at[peer]
            self._links.add([peer])
            self._links.say(peer, self._order, until_settled=HALT)

    def _ask(self, peer: PeerId) -> None:
        allowed = ANSWER_S if peer in self._stage.plan.peers else GUARD_S
        self._asked[peer] = _now() + allowed
        self._links.say(peer, self._order, until_settled=HALT)

    def _hear(self, peer: PeerId, message: Message) -> None:
        match message:
            case Halted(epoch=epoch, stock=stock) if epoch == self._stage.run.epoch:
                self._answer(peer, {part.slice: frozenset(part.steps) for part in stock})
            case Refused(epoch=epoch) if epoch in (0, self._stage.run.epoch) and self._is_awaited(peer):
                self._answer(peer, {})  # it was started anew: it has nothing, but it can do everything
            case Failed(epoch=epoch, reason=reason) if epoch == self._stage.run.epoch:
                self.lose(peer, reason)
            case Leaving():
                self.shun(peer)
            case _:
                self._guards.heard(peer, message)

    def _is_awaited(self, peer: PeerId) -> bool:
        return peer in self._asked or peer in self._lost

    def _answer(self, peer: PeerId, stock: Mapping[int, frozenset[int]]) -> None:
        self._links.settle(peer, HALT)
        self._links.settle(peer, DECISION)
        self._asked.pop(peer, None)
        self._return_at.pop(peer, None)
        self._stocks[peer] = stock
        self._counted[peer] = self._copies_of(peer)
        if self._lost.pop(peer, None) is not None:
            log.info("peer=%s is back", peer)
            self._changed = True


def _now() -> float:
    return asyncio.get_running_loop().time()
