"""A peer whose sending and computing do not overlap, to compare with: it begins no task before what the last one made is sent.

Switched off is only that: after every task the peer encodes what the task made and then waits for as long as those bytes
occupy the link, as a blocking send would. Peers still work on different micro-batches at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from fusion_p2p.net.values import Payload, ValueSender
from fusion_p2p.peer.epoch_work import EpochWork
from fusion_p2p.wire.frames import Edge, Moment


def take_turns(seconds_per_byte: float) -> None:
    """Make the peers of this process compute and send in turn from now on; seconds_per_byte: of their links."""
    run_task, offer = EpochWork._run_task, ValueSender.offer
    waiting: Counter[ValueSender] = Counter()

    def offer_counted(self: ValueSender, edge: Edge, moment: Moment, payload: Payload) -> None:
        waiting[self] += len(payload.data)
        offer(self, edge, moment, payload)

    async def run_and_send(self: EpochWork, index: int) -> bool:
        goes_on = await run_task(self, index)
        await self._coding.settled()
        await asyncio.sleep(waiting.pop(self._sender, 0) * seconds_per_byte)
        return goes_on

    ValueSender.offer = offer_counted  # type: ignore[method-assign]
    EpochWork._run_task = run_and_send  # type: ignore[method-assign]
