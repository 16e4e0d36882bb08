"""The network of a live swarm as an owner would have it planned for: for dry runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fusion_p2p.clock import Clock
from fusion_p2p.errors import SwarmUnreachable
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Directory, Transport
from fusion_p2p.owner.enlistment import status_by
from fusion_p2p.owner.finder import Finder
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.peer.link_tables import capability_of, gather_links, tables_of
from fusion_p2p.plan.measured import network_of
from fusion_p2p.plan.network import Network
from fusion_p2p.swarm.announcement import Announcement
from fusion_p2p.swarm.links import merged
from fusion_p2p.wire.swarm_messages import Links


async def survey(
    transport: Transport, directory: Directory, clock: Clock, *, timeout_s: float, report: Callable[[str], None]
) -> Network:
    """The free peers, their links as they measured them, and ours to them as the owner's.

    SwarmUnreachable when nobody answers in time or nobody is free, Incompatible when all are of another version.
    """
    finder = Finder(transport, directory)
    status = await status_by(finder, timeout_s)
    free = [PeerId(peer.peer) for peer in status.peers if peer.state == "standby"]
    known = {peer: found for peer in free if (found := finder.others.announcement(peer)) is not None}
    if not known:
        raise SwarmUnreachable(f"none of the {len(status.peers)} peers of this swarm is free to execute slices")
    report(f"measuring links to {len(known)} peers")
    own = await OwnLinks(transport.peer_id, clock).measure(finder.others.open_stream, list(known))
    return await _network(finder, known, own, transport.peer_id)


async def survey_of(
    transport: Transport, directory: Directory, own_links: OwnLinks, peers: frozenset[PeerId]
) -> Network | None:
    """The network of peers that execute slices, by what they know of their links; nothing is measured, for they are at work.

    None while not all of them are found.
    """
    finder = Finder(transport, directory)
    await finder.candidates()
    known = {peer: found for peer in sorted(peers) if (found := finder.others.announcement(peer)) is not None}
    return await _network(finder, known, own_links.known(peers), transport.peer_id) if len(known) == len(peers) else None


async def _network(finder: Finder, known: Mapping[PeerId, Announcement], own: Links, me: PeerId) -> Network:
    told = await gather_links(finder.others, known)
    links = merged({me: own.entries, **tables_of(known, told)})
    return network_of([capability_of(peer, found) for peer, found in known.items()], links, me)
