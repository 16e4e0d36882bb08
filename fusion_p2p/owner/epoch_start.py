"""From a proposal to a running epoch: prepare all its peers, write the start down, start them (`job.epochs` decides)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from fusion_p2p.clock import Clock
from fusion_p2p.ids import PeerId
from fusion_p2p.job import epochs
from fusion_p2p.job.epochs import Epochs
from fusion_p2p.owner.links import Event, Gone, Links, Parted
from fusion_p2p.wire.job_messages import Abort, Failed, Lost, Prepare, Prepared, Pulse, Refused, Start, Started

TICK_S = 1.0


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Why an epoch does not run. recorded: its start is in the ledger, so it has begun and ended.

    culprits: peers without which it could be tried again. gone: of those, who is lost; the others refused or were silent.
    """

    reason: str
    culprits: frozenset[PeerId] = frozenset()
    gone: frozenset[PeerId] = frozenset()
    recorded: bool = False


class EpochStart:
    """Starts one epoch after another; `state` survives an aborted one, whose number is used up."""

    def __init__(self, clock: Clock, newest_epoch: int) -> None:
        self.state = Epochs(epoch=newest_epoch)
        self._clock = clock

    async def start(
        self,
        links: Links,
        proposed: epochs.Proposed,
        order: Prepare,
        record_start: Callable[[], None],
        aside: Callable[[Event], None] = lambda event: None,
    ) -> NotStarted | None:
        """Run the proposal's epoch, or say why it does not. `order` is for the epoch after the newest.

        What does not concern the start, or not only that, goes to `aside`.
        """
        attempt = _Attempt(links, order, record_start)
        self._step(proposed, attempt)
        while not attempt.ended:
            try:
                async with asyncio.timeout(TICK_S):
                    happened = await links.inbox.get()
            except TimeoutError:
                self._step(epochs.Tick(), attempt)
                continue
            event = attempt.event(happened)
            if event is not None:
                self._step(event, attempt)
            if event is None or isinstance(happened, Gone):
                aside(happened)
        return attempt.failure

    def _step(self, event: epochs.Event, attempt: _Attempt) -> None:
        self.state, actions = epochs.step(self.state, event, self._clock.now())
        for action in actions:
            attempt.act(action)


class _Attempt:
    """Turns the actions for one epoch into messages, and remembers how it ended."""

    def __init__(self, links: Links, order: Prepare, record_start: Callable[[], None]) -> None:
        self._links, self._order, self._record_start = links, order, record_start
        self._progress: dict[PeerId, int] = {}
        self._gone: set[PeerId] = set()
        self.ended = False
        self.failure: NotStarted | None = None

    def event(self, happened: Event) -> epochs.Event | None:
        """What this means for the start, if anything."""
        peer = happened.peer
        if isinstance(happened, Gone):
            self._gone.add(peer)
            return epochs.PeerGone(peer, happened.reason)
        if isinstance(happened, Parted):
            return None
        match happened.message:
            case Prepared(epoch=epoch):
                return epochs.PeerPrepared(peer, epoch)
            case Started(epoch=epoch):
                return epochs.PeerStarted(peer, epoch)
            case Lost(epoch=epoch, peer=other, reason=reason) if epoch == self._order.epoch:
                return epochs.PeerGone(PeerId(other), f"{peer} cannot send to it: {reason}")
            case Refused(epoch=epoch, reason=reason) | Failed(epoch=epoch, reason=reason) if epoch == self._order.epoch:
                return epochs.PeerGone(peer, reason)  # of another epoch: said again by a peer that was frozen meanwhile
            case Pulse(progress=progress) if progress != self._progress.get(peer):
                self._progress[peer] = progress
                return epochs.PeerProgressed(peer)
        return None

    def act(self, action: epochs.Action) -> None:
        match action:
            case epochs.SendPrepare(_, peers):
                for peer in peers:
                    self._links.say(peer, self._order, until_settled="epoch")
            case epochs.RecordStart(epoch, peers):
                self._record_start()
                start = Start(epoch=epoch, state_step=self._order.state_step)
                for peer in peers:
                    self._links.say(peer, start, until_settled="epoch")
            case epochs.EpochRuns():
                self._links.settle_all("epoch")
                self.ended = True
            case epochs.SendAbort(epoch, peers, reason, culprits):
                self._links.settle_all("epoch")
                for peer in peers:
                    self._links.say(peer, Abort(epoch=epoch, reason=reason[:1000]))
                self._fail(NotStarted(reason, culprits, culprits & self._gone))
            case epochs.EpochBroke(_, reason, culprits):
                self._links.settle_all("epoch")
                self._fail(NotStarted(reason, culprits, culprits & self._gone, recorded=True))
            case epochs.ProposalRefused(reason):
                self._fail(NotStarted(reason))

    def _fail(self, why: NotStarted) -> None:
        self.ended, self.failure = True, why
