"""A peer that wants to hand over what nobody takes: its owner has gone."""

from __future__ import annotations

import asyncio

import pytest

from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.peer import job_service
from tests.scripted_owner import scripted
from tests.swarm_in_memory import volunteers
from tests.training.test_halting import ADAM, begin


@pytest.mark.row(22)
async def test_a_peer_whose_owner_has_gone_does_not_wait_for_it_to_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_service, "ASK_AGAIN_S", 0.05)
    async with SimulatedNetwork(seed=1) as network, volunteers(network, 3) as helpers, scripted(network, **ADAM) as owner:
        await begin(owner, helpers)
        service = helpers[0].service
        network.crash(owner.peer.peer_id)
        async with asyncio.timeout(10.0):
            assert not await service.drain("its volunteer wants it back", 3600.0)
        service.close("its volunteer wants it back")
        assert service.holding() is None
