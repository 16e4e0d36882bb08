"""Checks every address the user gave before any network is touched."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_p2p.config import CommonConfig


def check_addresses(config: CommonConfig, bootstrap: Sequence[str]) -> None:
    """AddressError that points at the wrong component of the first wrong address."""
    from fusion_p2p.net import addresses  # the multiaddr package is slow to import: kept out of --help

    for text in config.listen:
        addresses.parse_listen_address(text)
    for text in config.announce:
        addresses.parse_announce_address(text)
    for text in bootstrap:
        addresses.parse_peer_address(text)
