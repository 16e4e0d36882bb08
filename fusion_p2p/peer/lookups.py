"""When a peer reads the directory: often while it knows nobody, seldom when its coordinator tells it who is here."""

from __future__ import annotations

import asyncio
import logging

from fusion_p2p.clock import Clock, pause_unless
from fusion_p2p.errors import NetworkError
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Directory
from fusion_p2p.peer.loneliness import Loneliness
from fusion_p2p.peer.swarm_view import SwarmView
from fusion_p2p.swarm.settings import SwarmSettings

logger = logging.getLogger(__name__)

LOOKED_UP_PER_S = 3.0
"""Announcements that a peer reads from the directory, on average: some 2 KB/s, however large the swarm."""


class Lookups:
    """Keeps what one peer knows of announcements up to date."""

    def __init__(
        self,
        directory: Directory,
        view: SwarmView,
        others: Acquaintances,
        loneliness: Loneliness,
        clock: Clock,
        settings: SwarmSettings,
    ) -> None:
        self._directory, self._view, self._others = directory, view, others
        self._loneliness, self._clock, self._settings = loneliness, clock, settings
        self._now = asyncio.Event()
        self.done = asyncio.Event()
        """Set when the first look-up was answered."""

    def hurry(self) -> None:
        """Look up now: from now on others rely on what we find."""
        self._now.set()

    async def run(self) -> None:
        """Look up until cancelled."""
        wait_s = self._settings.first_lookup_s
        while True:
            self._now.clear()
            await self._look_up()
            alone = not self._view.node.membership.members
            self._loneliness.notice(alone=alone)
            wait_s = self._settings.first_lookup_s if alone else min(2 * wait_s, self._longest_s())
            await pause_unless(self._now, self._clock, wait_s)

    async def _look_up(self) -> None:
        try:
            records = await self._directory.lookup()
        except NetworkError as error:
            logger.debug("look-up failed: %s", error)
        else:
            self._others.replace_by(records, frozenset(self._view.node.membership.members))
            self._view.continue_after(self._others.sequence(self._view.me))
            self.done.set()

    def _longest_s(self) -> float:
        """Between two look-ups, however quiet it is."""
        follows = self._view.coordinator is not None and not self._view.coordinating
        quiet_s = self._settings.lookup_as_follower_s if follows else self._settings.lookup_s
        return max(quiet_s, len(self._others.peers) / LOOKED_UP_PER_S)
