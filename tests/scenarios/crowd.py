"""Many peers that start within seconds: do all see each other, and what does being here cost each of them?"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.wire.swarm_messages import SWARM_PROTOCOL
from tests.scenarios.loop import PausableLoop
from tests.scenarios.playing import settle
from tests.scenarios.swarm import Swarm

ARRIVE_WITHIN_S = 10.0
MUST_SEE_S = 60.0
MEASURED_S = 30.0


@dataclass(frozen=True, slots=True)
class Crowd:
    """Seconds from the last start until all saw each other (-1: not in time); then bytes per second, once all is quiet."""

    seconds_to_see_all: float
    broken: tuple[str, ...]
    peer_bytes_per_s: float
    """Sent on the swarm protocol by a peer, on average."""
    coordinator_bytes_per_s: float
    directory_bytes_per_s: float
    """Announced and looked up by a peer, on average, from its start on."""


def crowd(num_peers: int) -> Crowd:
    """So many simulated peers, 20 ms apart."""
    with asyncio.Runner(loop_factory=PausableLoop) as runner:
        return runner.run(_crowd(num_peers))


async def _crowd(num_peers: int) -> Crowd:
    loop = asyncio.get_running_loop()
    swarm = Swarm(num_peers, Link(latency_s=0.02, jitter_s=0.005), duplicates=0.0)
    async with swarm:
        for _ in range(num_peers):
            swarm.start()
            await asyncio.sleep(ARRIVE_WITHIN_S / num_peers)
        seconds = await settle(swarm, MUST_SEE_S, 1.0)
        before = _sent(swarm)
        await asyncio.sleep(MEASURED_S)
        rates = {peer: (sent - before[peer]) / MEASURED_S for peer, sent in _sent(swarm).items()}
        leaders = swarm.coordinators()
        followers = [rate for peer, rate in rates.items() if peer not in leaders]
        directory = [
            machine.host.counted.get(what, 0) / (loop.time() - machine.started_at)
            for machine in swarm.machines.values()
            for what in ("announced", "looked up")
        ]
    return Crowd(
        seconds_to_see_all=seconds,
        broken=tuple(swarm.broken),
        peer_bytes_per_s=sum(followers) / max(1, len(followers)),
        coordinator_bytes_per_s=sum(rates[leader] for leader in leaders),
        directory_bytes_per_s=sum(directory) / num_peers,
    )


def _sent(swarm: Swarm) -> dict[str, int]:
    return {peer: machine.host.counted.get(SWARM_PROTOCOL, 0) for peer, machine in swarm.machines.items()}
