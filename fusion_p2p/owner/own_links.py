"""The owner measures its own links to the peers of a plan: what it feeds crosses them. Bounded, and remembered over plans."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence

from fusion_p2p.clock import Clock
from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.probing import DIRECTION_S, Busy, Open, Prober
from fusion_p2p.swarm import links
from fusion_p2p.wire.swarm_messages import Links

log = logging.getLogger(__name__)

MEASURE_S = 3.0
"""For all links together; what is not measured by then is estimated by the coordinator."""
SHORTEST_S = 0.05


class OwnLinks:
    """The links of an owner, which probes but is not probed."""

    def __init__(self, me: PeerId, clock: Clock) -> None:
        self._clock = clock
        self._prober = Prober(clock)
        self._table = links.LinkTable(me)

    async def measure(self, open_stream: Open, peers: Sequence[PeerId]) -> Links:
        """Measure the links to these peers that are not known from a while ago, as many as time allows."""
        now = self._clock.now()
        known = {peer for peer, link in self._table.links.items() if now - link.oldest_at < links.REFRESH_S}
        unknown = [peer for peer in peers if peer not in known]
        budget_s = max(SHORTEST_S, min(DIRECTION_S, MEASURE_S / 3 / max(1, len(unknown))))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(MEASURE_S):
                while unknown:
                    unknown = await self._round(open_stream, unknown, budget_s)
        return self.known(peers)

    def known(self, peers: Collection[PeerId]) -> Links:
        """What was measured of the links to these peers."""
        told = [entry for entry in links.entries(self._table, self._clock.now()) if entry.peer in peers]
        return Links(entries=tuple(told), measuring=False)

    async def _round(self, open_stream: Open, peers: Sequence[PeerId], budget_s: float) -> list[PeerId]:
        """Probe one after the other; those that were busy, for the next round."""
        waits: dict[PeerId, float] = {}
        for peer in peers:
            try:
                found = await self._prober.probe(open_stream, peer, budget_s)
            except (NetworkError, WireError) as error:
                log.info("the links to peer=%s cannot be measured: %s", peer, error)
                continue
            if isinstance(found, Busy):
                waits[peer] = found.retry_s
            else:
                event = links.Probed(peer, found.latency_s, found.out_bytes_per_s, found.in_bytes_per_s)
                self._table, _ = links.step(self._table, event, self._clock.now())
        again = [peer for peer, wait_s in waits.items() if wait_s < MEASURE_S]
        if again:
            await asyncio.sleep(min(waits[peer] for peer in again))
        return again
