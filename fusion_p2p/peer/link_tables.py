"""What peers announce and measured, gathered for a plan: their tables of links, their capabilities, where they are."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from fusion_p2p.errors import NetworkError, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.acquaintances import Acquaintances
from fusion_p2p.net.addresses import CIRCUIT, Reach, is_relayed, reach
from fusion_p2p.net.messaging import expect
from fusion_p2p.plan.request import PeerCapability
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.swarm.links import UNKNOWN_AGE_S
from fusion_p2p.wire.swarm_messages import LinkEntry, Links, LinksRequest

ASK_S = 2.0
"""How long a peer may take to answer with its table."""
PARALLEL = 32


async def gather_links(others: Acquaintances, peers: Iterable[PeerId], timeout_s: float = ASK_S) -> dict[PeerId, Links]:
    """The tables of these peers, asked in parallel; who does not answer in time or breaks the protocol is missing."""
    places = asyncio.Semaphore(PARALLEL)

    async def ask(peer: PeerId) -> tuple[PeerId, Links] | None:
        async with places:
            try:
                return peer, expect(await others.ask(peer, LinksRequest(), timeout_s=timeout_s), Links)
            except (NetworkError, WireError):
                return None

    answers = await asyncio.gather(*map(ask, peers))
    return dict(answer for answer in answers if answer is not None)


def announced_links(announcement: Announcement) -> tuple[LinkEntry, ...]:
    """The links that a peer announces, for when its table cannot be had; older than any table."""
    return tuple(
        LinkEntry(
            peer=link.peer,
            latency_s=link.latency_s,
            out_bytes_per_s=link.out,
            in_bytes_per_s=link.back,
            age_s=UNKNOWN_AGE_S,
            in_age_s=UNKNOWN_AGE_S,
        )
        for link in announcement.line.links
    )


def tables_of(
    announcements: Mapping[PeerId, Announcement], told: Mapping[PeerId, Links]
) -> dict[PeerId, tuple[LinkEntry, ...]]:
    """For every peer what it told, else what it announces."""
    return {
        peer: told[peer].entries if peer in told else announced_links(announcement)
        for peer, announcement in announcements.items()
    }


def capability_of(peer: PeerId, announcement: Announcement) -> PeerCapability:
    """What a plan can count on, as the peer announces it."""
    public_host, local_network, relay = place_of(announcement.addresses)
    return PeerCapability(
        peer=peer,
        free_bytes=announcement.free_bytes,
        flops_per_s=announcement.rates.matmul_flops,
        convolution_flops_per_s=announcement.rates.convolution_flops or None,
        attention_flops_per_s=announcement.rates.attention_flops or None,
        memory_bytes_per_s=announcement.rates.memory_bytes_per_s or None,
        up_bytes_per_s=announcement.line.up_bytes_per_s,
        down_bytes_per_s=announcement.line.down_bytes_per_s,
        up_cap=announcement.caps.upload_bytes_per_s,
        down_cap=announcement.caps.download_bytes_per_s,
        public_host=public_host,
        local_network=local_network,
        relay=relay,
    )


def place_of(addresses: Sequence[str]) -> tuple[str, str, str]:
    """Public host, local network and relay that the addresses tell of; one of them, the others are empty.

    A local network means something only where no address reaches further: every second home has 192.168.1.0/24.
    """
    return _place_of(tuple(addresses))


@lru_cache(maxsize=4096)
def _place_of(addresses: tuple[str, ...]) -> tuple[str, str, str]:
    """Remembered: every peer asks it of every other several times a second."""
    known = [(_reach_of(address), address) for address in addresses]
    public = next((_host(address) for how, address in known if how is Reach.PUBLIC), "")
    relay = next((address.split(CIRCUIT)[0] for _, address in known if is_relayed(address)), "")
    if public or relay:
        return public, "", "" if public else relay
    return "", next((_network(_host(address)) for how, address in known if how is not None), ""), ""


def same_place(mine: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the addresses of two peers suggest that they are in one place."""
    host, network, _ = place_of(mine)
    other_host, other_network, _ = place_of(others)
    return (host or network) != "" and (host, network) == (other_host, other_network)


def _reach_of(address: str) -> Reach | None:
    """None for what a stranger announces and is no address."""
    try:
        return reach(address)
    except (ValueError, IndexError):
        return None


def _host(address: str) -> str:
    return address.split("/")[2]


def _network(host: str) -> str:
    """The /24, or the /64, that a host is in; the host itself when it is a name."""
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return host
    return str(ipaddress.ip_network(f"{host}/{24 if parsed.version == 4 else 64}", strict=False))
