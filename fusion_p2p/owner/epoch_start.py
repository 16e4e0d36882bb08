"""From a proposal to a running epoch: prepare all its peers, write the start down, start them (`job.epochs` decides)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fusion_p2p.clock import Clock
from fusion_p2p.ids import PeerId
from fusion_p2p.job import epochs
from fusion_p2p.job.epochs import Epochs
from fusion_p2p.owner.links import Gone, Heard, Links
from fusion_p2p.wire.job_messages import Abort, Failed, Lost, Prepare, Prepared, Pulse, Refused, Start, Started

TICK_S = 1.0


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
    ) -> str | None:
        """Run the proposal's epoch, or say why it was aborted. `order` is for the epoch after the newest."""
        attempt = _Attempt(links, order, record_start)
        self._step(proposed, attempt)
        while not attempt.ended:
            try:
                async with asyncio.timeout(TICK_S):
                    heard = await links.inbox.get()
            except TimeoutError:
                self._step(epochs.Tick(), attempt)
                continue
            event = attempt.event(heard)
            if event is not None:
                self._step(event, attempt)
        return attempt.reason

    def _step(self, event: epochs.Event, attempt: _Attempt) -> None:
        self.state, actions = epochs.step(self.state, event, self._clock.now())
        for action in actions:
            attempt.act(action)


class _Attempt:
    """Turns the actions for one epoch into messages, and remembers how it ended."""

    def __init__(self, links: Links, order: Prepare, record_start: Callable[[], None]) -> None:
        self._links, self._order, self._record_start = links, order, record_start
        self._progress: dict[PeerId, int] = {}
        self.ended = False
        self.reason: str | None = None

    def event(self, heard: Heard | Gone) -> epochs.Event | None:
        """What a message means for the start, if anything."""
        peer = heard.peer
        if isinstance(heard, Gone):
            return epochs.PeerGone(peer, heard.reason)
        match heard.message:
            case Prepared(epoch=epoch):
                return epochs.PeerPrepared(peer, epoch)
            case Started(epoch=epoch):
                return epochs.PeerStarted(peer, epoch)
            case Refused(epoch=epoch, reason=reason) | Failed(epoch=epoch, reason=reason) | Lost(epoch=epoch, reason=reason):
                # Of another epoch: said again by a peer that was frozen while that one ended.
                return epochs.PeerGone(peer, reason) if epoch == self._order.epoch else None
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
            case epochs.SendAbort(epoch, peers, reason):
                self._links.settle_all("epoch")
                for peer in peers:
                    self._links.say(peer, Abort(epoch=epoch, reason=reason[:1000]))
                self.ended, self.reason = True, reason
            case epochs.ProposalRefused(reason):
                self.ended, self.reason = True, reason
