"""The network of a live swarm: what its coordinator knows about the peers that are free to execute slices."""

from __future__ import annotations

from collections.abc import Callable

from fusion_p2p.config import CommonConfig, PlanConfig, StatusConfig, settings_of
from fusion_p2p.errors import SwarmUnreachable
from fusion_p2p.ids import PeerId
from fusion_p2p.owner.enlistment import swarm_status
from fusion_p2p.peer.joining import join_as_guest
from fusion_p2p.plan.measured import network_of
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.request import PeerCapability


async def live_network(config: PlanConfig, report: Callable[[str], None], found: Callable[[Network], None]) -> int:
    """Join as a guest, ask who is there, and give `found` their network. SwarmUnreachable when nobody is free or answers."""
    common = {name: getattr(config, name) for name in settings_of(CommonConfig)}
    guest = StatusConfig(**common, bootstrap=config.bootstrap, timeout_s=config.join_timeout_s)
    async with join_as_guest(guest, report) as joined:
        reply = await swarm_status(joined.transport, joined.directory, config.join_timeout_s)
    peers = [
        PeerCapability(PeerId(peer.peer), peer.free_bytes, peer.flops_per_s) for peer in reply.peers if peer.state == "standby"
    ]
    if not peers:
        raise SwarmUnreachable(f"none of the {len(reply.peers)} peers of network {config.network} is free to execute slices")
    found(network_of(peers, {}))
    return 0
