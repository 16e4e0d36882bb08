"""How other peers can be dialled: what answered before, what they announce, why a dial failed. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from fusion_p2p.ids import PeerId
from fusion_p2p.net.addresses import PeerAddress

MAX_PEERS = 4096
"""Whose addresses we remember; the oldest are forgotten."""
MAX_DIALS = 16
"""Of one peer."""

K = TypeVar("K")
V = TypeVar("V")


class Ways:
    """Addresses of peers, without their `/p2p/ID`."""

    def __init__(self) -> None:
        self._dialled: dict[PeerId, tuple[str, ...]] = {}
        self._heard: dict[PeerId, tuple[str, ...]] = {}
        self._reasons: dict[str, str] = {}
        self._met: dict[PeerId, float] = {}

    def dialling(self, targets: Sequence[PeerAddress]) -> None:
        """Addresses of one peer that somebody asked us to dial."""
        _keep(self._dialled, targets[0].peer, tuple(target.dial for target in targets))

    def heard(self, targets: Sequence[PeerAddress]) -> None:
        """Addresses of one peer that it announces."""
        _keep(self._heard, targets[0].peer, tuple(target.dial for target in targets))

    def met(self, peer: PeerId, now: float) -> None:
        """There was a stream with this peer."""
        _keep(self._met, peer, now)

    def met_since(self, earliest: float) -> tuple[PeerId, ...]:
        """Peers with which there was a stream lately and that can be dialled; the last one first."""
        return tuple(peer for peer, at in reversed(self._met.items()) if at >= earliest and self.to(peer))

    def to(self, peer: PeerId) -> tuple[str, ...]:
        """All that is known, what was dialled before first; none when nothing is known."""
        return tuple(dict.fromkeys((*self._dialled.get(peer, ()), *self._heard.get(peer, ()))))[:MAX_DIALS]

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why an address failed when p2pd last dialled it."""
        return self._reasons

    def failed(self, reasons: Mapping[str, str]) -> None:
        for dial, reason in reasons.items():
            _keep(self._reasons, dial, reason)


def _keep(mapping: dict[K, V], key: K, value: V) -> None:
    """As the newest entry of a bounded mapping."""
    mapping.pop(key, None)
    mapping[key] = value
    while len(mapping) > MAX_PEERS:
        mapping.pop(next(iter(mapping)))
