"""Running jobs for which something better is looked for, at a real coordinator in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fusion_p2p.ids import PeerId
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.peer import planning
from fusion_p2p.peer.planning import CONFIRM_S, Computed
from fusion_p2p.peer.presence import Presence
from fusion_p2p.plan.improvement import improved
from fusion_p2p.plan.replan import Keep
from fusion_p2p.swarm.settings import WAN
from tests.protocol import swarm_world
from tests.protocol.swarm_world import PROFILE, World, eventually, in_virtual_time
from tests.protocol.test_enlistment import JOB, OTHER_JOB, finished, start
from tests.protocol.test_mending import Running, moved, now, spares, swarm_of

SLOW = PROFILE.model_copy(update={"rates": PROFILE.rates.model_copy(update={"matmul_flops": 1e4})})


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was computed, as it happens."""
    seen: list[str] = []
    better = improved

    def counting(*arguments: Any) -> Any:
        seen.append("improved")
        return better(*arguments)

    monkeypatch.setattr(planning, "improved", counting)
    return seen


def test_a_better_plan_comes_with_better_peers_and_nothing_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counted(monkeypatch)

    async def scenario() -> None:
        async with World(8) as world:
            await swarm_of(world, 2, SLOW)
            owner = Running(world)
            plan = await owner.begin(world)
            assert isinstance(await owner.improve(plan), str)
            assert seen == ["improved"]
            began = now()
            assert isinstance(await owner.improve(plan), str)
            assert now() - began < 0.5
            assert seen == ["improved"]
            fast = world.add()
            await eventually(world.complete, within_s=10.0)
            first = await owner.improve(plan)
            assert "another plan pays by these figures" in str(first)
            assert await owner.improve(plan) == first, "not before some seconds have passed"
            assert seen == ["improved", "improved"]
            await asyncio.sleep(CONFIRM_S)
            better = await owner.improve(plan)
            assert isinstance(better, Enlisted), better
            assert fast.me in better.plan.peers
            assert better.plan.predicted_step_s < 0.9 * plan.predicted_step_s
            assert seen == ["improved", "improved", "improved"]

    in_virtual_time(scenario())


def test_nothing_better_is_looked_for_while_another_job_waits_for_peers() -> None:
    async def scenario() -> None:
        async with World(9) as world:
            await swarm_of(world, 2)
            owner, other = Running(world), Running(world, job=OTHER_JOB, peers=3)
            plan = await owner.begin(world)
            waiting = start(other.enlist())
            await eventually(lambda: other.heard("3 peers wanted"), within_s=5.0)
            assert await owner.improve(plan) == f"job {OTHER_JOB[:8]} waits for peers and is served first"
            waiting.cancel()

    in_virtual_time(scenario())


@pytest.mark.row(20)
def test_every_spare_knows_which_one_it_is_and_why() -> None:
    async def scenario() -> None:
        async with World(10) as world:
            await swarm_of(world, 4)
            everybody = tuple(world.presences.values())
            await eventually(lambda: all("no job is registered" in one.standing for one in everybody), within_s=5.0)
            owner = Running(world, peers=2)
            plan = await owner.begin(world)
            one, two = spares(world, plan)
            told = dict(world.presences)
            await eventually(lambda: not any(told[peer].standing for peer in plan.peers), within_s=WAN.reserve_s)
            assert {told[one].standing[:12], told[two].standing[:12]} == {"spare 1 of 2", "spare 2 of 2"}
            assert isinstance(await owner.improve(plan, {1: two}), str)
            await eventually(lambda: f"holds copies of slice 1 of job {JOB[:8]}" in _told(world, two), within_s=5.0)

    in_virtual_time(scenario())


def _told(world: World, peer: PeerId) -> str:
    """What the status says of a peer."""
    leader: Presence = world.leader
    return next(one.standing for one in leader.snapshot().peers if one.peer == peer)


def test_who_is_lost_while_something_better_is_looked_for_is_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    enough = asyncio.Event()

    async def slowly(compute: Callable[[], Computed]) -> Computed:
        computed = compute()
        if isinstance(computed.made, Keep):
            await enough.wait()
        return computed

    monkeypatch.setattr(swarm_world, "at_once", slowly)

    async def scenario() -> None:
        async with World(12) as world:
            await swarm_of(world, 4)
            owner = Running(world, peers=3)
            plan = await owner.begin(world)
            improving = asyncio.get_running_loop().create_task(owner.improve(plan))
            await asyncio.sleep(3.0)
            enlisted = await finished(start(owner.mend(plan, {sorted(plan.peers)[0]})), 2.0)
            assert len(moved(plan, enlisted.plan)) == 1
            enough.set()
            assert await improving == "the job has been registered for something else since"
            assert owner.finder.believed == world.leader.me

    in_virtual_time(scenario())
