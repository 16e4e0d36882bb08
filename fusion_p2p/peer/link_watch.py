"""A peer measures its links beside everything else: after joining, then now and then; `swarm.links` says whom.

It never delays standby, and it neither probes nor lets itself be probed while slices are executed here: a peer that holds
slices but has done nothing for `IDLE_AFTER_S` counts as idle.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from fusion_p2p.clock import Clock
from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Transport
from fusion_p2p.net.probing import Busy, Measured, Prober
from fusion_p2p.peer.link_tables import same_place
from fusion_p2p.peer.presence import Presence
from fusion_p2p.peer.swarm_view import WorkView
from fusion_p2p.swarm import links
from fusion_p2p.swarm.announcement import MAX_LINKS, Line, LinkFigure
from fusion_p2p.wire.swarm_messages import Links

logger = logging.getLogger(__name__)

LOOK_S = 0.25
CALM_LOOK_S = 3.0
"""When all that is to be known is known."""
IDLE_AFTER_S = 10.0
OCCUPIED_S = 30.0
"""When a peer that is at work may be asked again."""
ANNOUNCE_S = 60.0
"""Between two announcements because of links."""
ANNOUNCE_CHANGE = 0.2
"""What changed by less is not announced."""


class LinkWatch:
    """Keeps the table of this peer's links, and tells the swarm of it."""

    def __init__(self, transport: Transport, presence: Presence, work: WorkView, clock: Clock) -> None:
        self._transport = transport
        self._presence = presence
        self._work = work
        self._clock = clock
        self._prober = Prober(clock, self._found, self._occupied_s, self._is_here, transport.bandwidth)
        self._table = links.LinkTable(presence.me)
        self._random = random.Random(presence.me)
        self._progress = (0, clock.now())
        self._told = Line()
        self._announced_at = -ANNOUNCE_S
        self.measured: Callable[[Line], None] = lambda line: None
        """Told what our line carries, whenever that has changed much."""
        presence.serve_links(self.table)

    def table(self) -> Links:
        """All that is known now."""
        return Links(entries=links.entries(self._table, self._clock.now()), measuring=self._table.measuring)

    def saw_traffic(self, peer: PeerId, bytes_per_s: float) -> None:
        """A large value came in so fast."""
        self._step(links.Traffic(peer, bytes_per_s))

    def is_near(self, peer: PeerId) -> bool:
        """Whether a peer seems to be in our place: what is sent to it does not take our line."""
        found = self._presence.others.announcement(peer)
        return found is not None and same_place(self._transport.addresses, found.addresses)

    async def run(self) -> None:
        """Probe and be probed until cancelled. ValueError when the probe protocol is served already."""
        await self._prober.serve(self._transport)
        while True:
            for action in self._step(links.Look(self._others(), idle=self._occupied_s() == 0)):
                await self._probe(action.peer)
            self._announce()
            pause_s = LOOK_S if self._table.measuring else CALM_LOOK_S
            await asyncio.sleep(self._clock.pause_s(pause_s * self._random.uniform(0.5, 1.5)))

    async def _probe(self, peer: PeerId) -> None:
        try:
            found = await self._prober.probe(self._presence.others.open_stream, peer)
        except (NetworkError, WireError) as error:
            logger.info("the links with peer=%s cannot be measured: %s", peer, error)
            self._step(links.Failed(peer))
            return
        if isinstance(found, Busy):
            self._step(links.Postponed(peer, found.retry_s))
        else:
            self._found(peer, found)

    def _found(self, peer: PeerId, found: Measured) -> None:
        self._step(links.Probed(peer, found.latency_s, found.out_bytes_per_s, found.in_bytes_per_s))

    def _step(self, event: links.Event) -> tuple[links.Probe, ...]:
        self._table, actions = links.step(self._table, event, self._clock.now())
        return actions

    def _others(self) -> dict[PeerId, bool]:
        """The peers here that can be dialled, and whether they seem to be in our place."""
        mine, announcement = self._transport.addresses, self._presence.others.announcement
        announced = {peer: announcement(peer) for peer in sorted(self._presence.peers - {self._presence.me})}
        return {
            peer: same_place(mine, found.addresses)
            for peer, found in announced.items()
            if found is not None and found.reachability != "outbound-only"
        }

    def _is_here(self, peer: PeerId) -> bool:
        return peer in self._presence.peers

    def _occupied_s(self) -> float:
        """0 when there is time for probes. A paused volunteer's line is its own."""
        if self._presence.state in ("paused", "draining"):
            return OCCUPIED_S
        now, progress = self._clock.now(), self._work.progress()
        if progress != self._progress[0]:
            self._progress = (progress, now)
        at_work = self._work.holding() is not None and now - self._progress[1] < IDLE_AFTER_S
        return OCCUPIED_S if at_work else 0.0

    def _announce(self) -> None:
        """Tell everybody when what is known of our line has changed much, and not in the middle of measuring."""
        now = self._clock.now()
        if self._table.measuring or now - self._announced_at < ANNOUNCE_S:
            return
        line = _line(self._table)
        if _differs(self._told, line):
            self._told, self._announced_at = line, now
            self._presence.set_line(line)
            self.measured(line)


def _line(table: links.LinkTable) -> Line:
    up, down = links.summary(table)
    newest = sorted(table.links.items(), key=lambda item: (-item[1].newest_at, item[0]))
    whole = (
        LinkFigure(peer=peer, latency_s=link.latency_s, out=link.out_bytes_per_s, back=link.in_bytes_per_s)
        for peer, link in newest
        if link.latency_s is not None and link.out_bytes_per_s is not None and link.in_bytes_per_s is not None
    )
    return Line(up_bytes_per_s=up, down_bytes_per_s=down, links=tuple(whole)[:MAX_LINKS])


def _differs(told: Line, now: Line) -> bool:
    """Whether a rate has become known or has changed by more than a fifth."""
    pairs = ((told.up_bytes_per_s, now.up_bytes_per_s), (told.down_bytes_per_s, now.down_bytes_per_s))
    return any(
        (old is None) != (new is None) or abs((new or 0.0) - (old or 0.0)) > ANNOUNCE_CHANGE * (old or 0.0)
        for old, new in pairs
    )
