"""How long an owner hears nothing move before it believes that something hangs."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.ids import PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner.breaks import EpochBroken
from fusion_p2p.owner.hearing import Hearing
from fusion_p2p.owner.links import Heard, Links
from fusion_p2p.wire.job_messages import Pulse
from tests.protocol.swarm_world import LoopClock, in_virtual_time


async def _alive_without_progress(links: Links, peer: PeerId) -> None:
    while True:
        await asyncio.sleep(1)
        links.inbox.put_nowait(Heard(peer, Pulse(progress=1)))


@pytest.mark.row(19)
@pytest.mark.parametrize(("longest_step_s", "borne_s"), [(1.0, 60), (20.0, 200)])
def test_standing_still_is_borne_in_proportion_to_the_steps_that_were_seen(longest_step_s: float, borne_s: int) -> None:
    async def scenario() -> None:
        async with SimulatedNetwork(seed=1) as network:
            links, peer = Links(network.join().transport), network.join().peer_id
            hearing = Hearing(links, LoopClock(), longest_step_s)
            links.inbox.put_nowait(Heard(peer, Pulse(progress=1)))
            pulsing = asyncio.create_task(_alive_without_progress(links, peer))
            with pytest.raises(EpochBroken, match=f"no task was finished for {borne_s} s"):
                await hearing.next()
            pulsing.cancel()

    in_virtual_time(scenario())
