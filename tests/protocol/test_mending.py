"""Jobs that lost peers, want to let peers go, or look for something better, at a real coordinator in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fusion_p2p.graph.encoding import encode_graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import PeerId
from fusion_p2p.owner.enlistment import Enlisted, better_plan, enlist
from fusion_p2p.owner.finder import Finder
from fusion_p2p.peer import planning
from fusion_p2p.plan.encoding import check_plan, encode_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan
from fusion_p2p.swarm.announcement import Profile
from fusion_p2p.swarm.settings import WAN
from fusion_p2p.wire.job_messages import Content
from fusion_p2p.wire.swarm_messages import Current, HeldAt, Holding, Register
from tests.protocol.swarm_world import PROFILE, World, eventually, in_virtual_time
from tests.protocol.test_enlistment import GRAPH, OTHER_JOB, Owner, finished, start


class Running(Owner):
    """An owner whose job runs on a plan."""

    def __init__(self, world: World, **wishes: Any) -> None:
        super().__init__(world, **wishes)
        self.finder = Finder(self.node.transport, self.node.directory)

    async def begin(self, world: World) -> Plan:
        """Get a plan; its peers hold their slices from now on."""
        enlisted = await finished(start(self.enlist()), 30.0)
        self.work(world, enlisted.plan)
        return enlisted.plan

    def work(self, world: World, plan: Plan) -> None:
        for peer, work in world.work.items():
            slices = plan.slices_of(peer)
            held = work.held
            if slices:
                work.held = Holding(job=self.register.job, slices=slices)
            elif held is not None and held.job == self.register.job:
                work.held = None

    def asking(
        self,
        purpose: str,
        plan: Plan,
        without: Collection[PeerId] = (),
        held: Mapping[int, PeerId] | None = None,
    ) -> Register:
        encoded = encode_plan(plan)
        current = Current(
            purpose=purpose,  # type: ignore[arg-type]
            plan=Content(digest=self.blobs.offer(encoded), num_bytes=len(encoded)),
            without=tuple(without),
            held=tuple(HeldAt(slice=index, peer=peer) for index, peer in (held or {}).items()),
            steps_left=1000,
        )
        return self.register.model_copy(update={"current": current})

    async def mend(self, plan: Plan, without: Collection[PeerId], held: Mapping[int, PeerId] | None = None) -> Enlisted:
        return await enlist(
            self.node.transport,
            self.node.directory,
            self.asking("mend", plan, without, held),
            report=self.said.append,
            own_links=self.links,
            finder=self.finder,
            offered=self.blobs.offered,
        )

    async def improve(self, plan: Plan, held: Mapping[int, PeerId] | None = None) -> Enlisted | str:
        return await better_plan(
            self.node.transport,
            self.node.directory,
            self.asking("improve", plan, (), held),
            own_links=self.links,
            finder=self.finder,
            offered=self.blobs.offered,
        )


def now() -> float:
    return asyncio.get_running_loop().time()


def spares(world: World, plan: Plan) -> list[PeerId]:
    return sorted(set(world.presences) - plan.peers)


def moved(before: Plan, after: Plan) -> list[tuple[int, PeerId]]:
    """Which slices have another peer, and who."""
    check_plan(after, GRAPH, cut(GRAPH, after.slice_of))
    assert after.slice_of == before.slice_of
    pairs = enumerate(zip(before.slices, after.slices, strict=True))
    return [(index, new.peer) for index, (old, new) in pairs if new.members != old.members]


async def without_room(world: World) -> None:
    """From now on nobody here has room for more than it holds."""
    for presence in world.presences.values():
        presence.set_profile(PROFILE.model_copy(update={"free_bytes": 1}))
    await asyncio.sleep(3.0)


async def swarm_of(world: World, count: int, profile: Profile = PROFILE) -> None:
    for _ in range(count):
        world.add(profile)
    await eventually(world.complete, within_s=10.0)


@pytest.mark.row(17)
def test_the_slice_of_a_lost_peer_goes_to_the_spare_that_keeps_a_copy_at_once() -> None:
    async def scenario() -> None:
        async with World(1) as world:
            await swarm_of(world, 6)
            owner = Running(world, peers=4)
            plan = await owner.begin(world)
            lost = next(peer for peer in sorted(plan.peers) if peer != world.leader.me)
            (index,) = plan.slices_of(lost)
            for guard in spares(world, plan):
                began = now()
                enlisted = await finished(start(owner.mend(plan, {lost}, {index: guard})), 5.0)
                assert now() - began < 0.5
                assert moved(plan, enlisted.plan) == [(index, guard)]
                assert enlisted.plan.predicted_step_s > 0
                assert guard in {contact.peer for contact in enlisted.contacts}
            await world.kill(lost)
            began = now()
            enlisted = await finished(start(owner.mend(plan, {lost}, {index: guard})), 5.0)
            assert now() - began < 0.6, "a dead peer that nobody knows to be dead is not waited for"

    in_virtual_time(scenario())


@pytest.mark.row(18)
def test_without_room_it_waits_and_goes_on_when_somebody_comes() -> None:
    async def scenario() -> None:
        async with World(2) as world:
            await swarm_of(world, 3)
            owner = Running(world, peers=3)
            plan = await owner.begin(world)
            await without_room(world)
            lost = next(peer for peer in sorted(plan.peers) if peer != world.leader.me)
            await world.kill(lost)
            mending = start(owner.mend(plan, {lost}))
            await eventually(lambda: owner.heard("waiting: slice ") and owner.heard(" more ("), within_s=5.0)
            await asyncio.sleep(20.0)
            assert not mending.done()
            assert world.leader.standing.startswith("waiting: slice ")
            came = world.add()
            await eventually(lambda: came.me in {one.peer for one in world.leader.members()}, within_s=10.0)
            enlisted = await finished(mending, 2.0)
            assert moved(plan, enlisted.plan) == [(plan.slices_of(lost)[0], came.me)]

    in_virtual_time(scenario())


def test_a_job_that_lost_a_peer_is_served_before_one_that_waits() -> None:
    async def scenario() -> None:
        async with World(3) as world:
            await swarm_of(world, 3)
            first, second = Running(world, peers=3), Running(world, job=OTHER_JOB, peers=1)
            plan = await first.begin(world)
            waiting = start(second.enlist())
            await eventually(lambda: second.heard("1 peers wanted: 0 peers free"), within_s=5.0)
            lost = next(peer for peer in sorted(plan.peers) if peer != world.leader.me)
            await without_room(world)
            await world.kill(lost)
            mending = start(first.mend(plan, {lost}))
            await eventually(lambda: first.heard("waiting: slice "), within_s=3.0)
            came = world.add()
            enlisted = await finished(mending, 10.0)
            assert came.me in enlisted.plan.peers
            assert not waiting.done()
            assert not second.heard("planning")
            first.work(world, enlisted.plan)
            world.add()
            assert (await finished(waiting, 15.0)).plan.peers.isdisjoint(enlisted.plan.peers)

    in_virtual_time(scenario())


def test_freed_peers_go_to_the_job_that_waits() -> None:
    async def scenario() -> None:
        async with World(4) as world:
            await swarm_of(world, 3)
            first, second = Running(world, peers=2), Running(world, job=OTHER_JOB, peers=2)
            plan = await first.begin(world)
            waiting = start(second.enlist())
            await eventually(lambda: second.heard("2 peers wanted: 1 peer free"), within_s=5.0)
            leaving = sorted(plan.peers)[0]
            enlisted = await finished(start(first.mend(plan, {leaving})), 5.0)
            assert len(moved(plan, enlisted.plan)) == 1
            first.work(world, enlisted.plan)
            await asyncio.sleep(WAN.reserve_s)
            assert not waiting.done()
            world.add()
            assert leaving in (await finished(waiting, 10.0)).plan.peers

    in_virtual_time(scenario())


@pytest.mark.parametrize("seed", range(3))
def test_when_the_coordinator_is_lost_too_the_next_one_is_found_within_a_second(seed: int) -> None:
    async def scenario() -> None:
        async with World(seed) as world:
            await swarm_of(world, 6)
            owner = Running(world, peers=4)
            plan = await owner.begin(world)
            await finished(start(owner.mend(plan, {sorted(plan.peers)[0]})), 5.0)
            before = world.leader.me
            await world.kill(before)
            lost = {before} if before in plan.peers else {sorted(plan.peers)[0]}
            mending = start(owner.mend(plan, lost))
            await eventually(lambda: len(world.coordinators()) == 1, within_s=15.0)
            elected = now()
            enlisted = await finished(mending, 10.0)
            assert now() - elected < 1.0
            assert enlisted.coordinator == world.leader.me
            assert enlisted.plan.peers.isdisjoint(lost)
            survivors = plan.peers - lost
            assert survivors <= enlisted.plan.peers, "also those that the new coordinator has not heard yet keep their slices"

    in_virtual_time(scenario())


def test_a_coordinator_that_is_frozen_holds_nobody_up_for_longer_than_its_election() -> None:
    async def scenario() -> None:
        async with World(13) as world:
            await swarm_of(world, 6)
            owner = Running(world, peers=4)
            plan = await owner.begin(world)
            frozen = world.leader.me
            world.network.freeze(frozen)
            lost = {frozen} if frozen in plan.peers else {sorted(plan.peers)[0]}
            mending = start(owner.mend(plan, lost))
            await eventually(lambda: any(one.me != frozen for one in world.coordinators()), within_s=15.0)
            elected = now()
            enlisted = await finished(mending, 10.0)
            assert now() - elected < 2.5
            assert enlisted.plan.peers.isdisjoint(lost)

    in_virtual_time(scenario())


def test_if_nothing_mends_the_job_is_cut_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "mend", lambda *arguments: NoPlan("slice 1 needs 3.1 GiB more"))

    async def scenario() -> None:
        async with World(5) as world:
            await swarm_of(world, 3)
            owner = Running(world, peers=3)
            plan = await owner.begin(world)
            lost = sorted(plan.peers)[0]
            enlisted = await finished(start(owner.mend(plan, {lost})), 5.0)
            assert enlisted.plan.peers == plan.peers - {lost}
            for presence in world.presences.values():
                presence.set_profile(PROFILE.model_copy(update={"free_bytes": 1}))
            await asyncio.sleep(3.0)
            mending = start(owner.mend(plan, {lost}))
            await eventually(lambda: owner.heard("waiting: slice 1 needs 3.1 GiB more"), within_s=5.0)
            mending.cancel()

    in_virtual_time(scenario())


def test_a_coordinator_that_uses_a_peer_it_should_not_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with World(6) as world:
            await swarm_of(world, 4)
            owner = Running(world, peers=3)
            plan = await owner.begin(world)
            monkeypatch.setattr(planning, "mend", lambda *arguments: plan)
            mending = start(owner.mend(plan, {sorted(plan.peers)[0]}))
            await eventually(lambda: owner.heard("which is lost, leaves, or failed"), within_s=5.0)
            mending.cancel()

    in_virtual_time(scenario())


def test_codecs_that_the_owner_chose_later_are_no_reason_to_refuse_a_mended_plan() -> None:
    async def scenario() -> None:
        async with World(7) as world:
            await swarm_of(world, 4)
            owner = Running(world, peers=3)
            plan = await owner.begin(world)
            changed = replace(plan, edges=tuple(replace(edge, codec="int8") for edge in plan.edges))
            enlisted = await finished(start(owner.mend(changed, {sorted(plan.peers)[0]})), 5.0)
            assert {edge.codec for edge in enlisted.plan.edges} == {"int8"}

    in_virtual_time(scenario())


def test_a_plan_for_another_graph_is_refused() -> None:
    async def scenario() -> None:
        async with World(11) as world:
            await swarm_of(world, 3)
            owner = Running(world, peers=2)
            plan = await owner.begin(world)
            other = encode_graph(replace(GRAPH, inputs=("y",)))
            graph = Content(digest=owner.blobs.offer(other), num_bytes=len(other))
            owner.register = owner.register.model_copy(update={"graph": graph})
            mending = start(owner.mend(plan, {sorted(plan.peers)[0]}))
            await eventually(lambda: owner.heard("the plan in use is for something else"), within_s=5.0)
            mending.cancel()

    in_virtual_time(scenario())


def test_a_plan_that_takes_too_long_to_judge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MAX_TASKS", 1)

    async def scenario() -> None:
        async with World(14) as world:
            await swarm_of(world, 3)
            owner = Running(world, peers=2)
            plan = replace(await owner.begin(world), predicted_step_s=1.0)
            mending = start(owner.mend(plan, {sorted(plan.peers)[0]}))
            await eventually(lambda: owner.heard("16 tasks a step, at most 1 are judged"), within_s=5.0)
            mending.cancel()

    in_virtual_time(scenario())
