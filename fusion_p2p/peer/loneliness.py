"""A peer that finds nobody says so once: what it listens on, whom it dialled, and what came back."""

from __future__ import annotations

import logging

from fusion_p2p.clock import Clock
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.base import Transport

logger = logging.getLogger(__name__)

ALONE_S = 20.0
"""After so long without anybody it is said."""


class Loneliness:
    """How long a peer of a network has been without others."""

    def __init__(self, transport: Transport, others: Acquaintances, network: str, clock: Clock) -> None:
        self._transport = transport
        self._others = others
        self._network = network
        self._clock = clock
        self._since: float | None = None
        self._told = False

    def notice(self, *, alone: bool) -> None:
        """Whether nobody is here now; logs the reasons after ALONE_S, once."""
        if not alone:
            self._since = None
        elif self._since is None:
            self._since = self._clock.now()
        elif not self._told and self._clock.now() - self._since >= ALONE_S:
            self._told = True
            for line in self.reasons():
                logger.warning("%s", line)

    def reasons(self) -> tuple[str, ...]:
        """What this peer listens on, whom it dialled, and what came back, a line each."""
        listening = f"nobody else heard yet; listening on {', '.join(self._transport.addresses)}"
        silent = self._others.why_silent()
        if not silent and self._others.peers <= {self._transport.peer_id}:
            silent = (f"no other peer is announced on network {self._network!r}",)
        return (listening, *silent)
