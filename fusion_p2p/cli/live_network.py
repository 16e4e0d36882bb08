"""The network of a live swarm: the peers that are free to execute slices, and the links that were measured."""

from __future__ import annotations

from collections.abc import Callable

from fusion_p2p.clock import SystemClock
from fusion_p2p.config import CommonConfig, PlanConfig, StatusConfig, settings_of
from fusion_p2p.owner.swarm_survey import survey
from fusion_p2p.peer.joining import join_as_guest
from fusion_p2p.plan.network import Network


async def live_network(config: PlanConfig, report: Callable[[str], None], found: Callable[[Network], None]) -> int:
    """Join as a guest, ask who is there, and give `found` their network. SwarmUnreachable when nobody is free or answers."""
    common = {name: getattr(config, name) for name in settings_of(CommonConfig)}
    guest = StatusConfig(**common, bootstrap=config.bootstrap, timeout_s=config.join_timeout_s)
    async with join_as_guest(guest, report) as joined:
        network = await survey(
            joined.transport, joined.directory, SystemClock(), timeout_s=config.join_timeout_s, report=report
        )
    found(network)
    return 0
