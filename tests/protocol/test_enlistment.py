"""An owner registers with a swarm of real presences: it waits with reasons, gets a plan, survives coordinators that die."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import pytest

import fusion_p2p
from fusion_p2p.errors import Incompatible, SwarmUnreachable
from fusion_p2p.graph.encoding import encode_graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory import SimulatedPeer
from fusion_p2p.owner.enlistment import Enlisted, enlist, swarm_status
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.peer import planning
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan
from fusion_p2p.plan.schedulers import plan
from fusion_p2p.swarm.settings import WAN
from fusion_p2p.wire.job_messages import Content, OptimiserSettings
from fusion_p2p.wire.swarm_messages import Holding, Register
from tests.protocol.swarm_world import PROFILE, LoopClock, World, eventually, in_virtual_time
from tests.unit.chain_graphs import chain

GRAPH = chain(6)
JOB, OTHER_JOB = "0a" * 16, "0b" * 16


class Owner:
    """An owner with a graph to train."""

    def __init__(self, world: World, job: str = JOB, peers: int | None = None, graph: bytes | None = None) -> None:
        self.node: SimulatedPeer = world.network.join()
        self.blobs = BlobServer(self.node.transport)
        self.links = OwnLinks(self.node.peer_id, LoopClock())
        self.said: list[str] = []
        encoded = encode_graph(GRAPH) if graph is None else graph
        self.register = Register(
            job=job,
            incarnation=1,
            graph=Content(digest=self.blobs.offer(encoded), num_bytes=len(encoded)),
            micro_batches=4,
            optimiser=OptimiserSettings(name="sgd"),
            precision="fp32",
            base_epoch=3,
            peers=peers,
        )

    async def enlist(self, no_peers_timeout_s: float = 30.0) -> Enlisted:
        await self.blobs.start()
        transport, directory = self.node.transport, self.node.directory
        return await enlist(
            transport,
            directory,
            self.register,
            report=self.said.append,
            own_links=self.links,
            no_peers_timeout_s=no_peers_timeout_s,
        )

    def heard(self, fragment: str) -> bool:
        return any(fragment in line for line in self.said)


def start(work: Coroutine[Any, Any, Enlisted]) -> asyncio.Task[Enlisted]:
    return asyncio.get_running_loop().create_task(work)


async def finished(task: asyncio.Task[Enlisted], within_s: float) -> Enlisted:
    async with asyncio.timeout(within_s):
        return await task


@pytest.mark.row(20)
def test_a_job_registered_before_any_peer_waits_until_three_are_here() -> None:
    async def scenario() -> None:
        async with World(1) as world:
            owner = Owner(world, peers=3)
            enlisting = start(owner.enlist())
            await asyncio.sleep(5.0)
            assert owner.said == ["waiting: looking for peers"]
            world.add()
            await eventually(lambda: owner.heard("3 peers wanted: 1 peer free"), within_s=10.0)
            world.add()
            await eventually(lambda: owner.heard("3 peers wanted: 2 peers free"), within_s=10.0)
            world.add()
            enlisted = await finished(enlisting, 10.0)
            assert {part.peer for part in enlisted.plan.slices} == set(world.presences)
            assert (enlisted.term, enlisted.coordinator) == world.leader.coordinator
            assert {contact.peer for contact in enlisted.contacts} == set(world.presences)
            assert all(contact.addresses == world.nodes[contact.peer].transport.addresses for contact in enlisted.contacts)
            check_plan(enlisted.plan, GRAPH, cut(GRAPH, enlisted.plan.slice_of))

    in_virtual_time(scenario())


def test_without_a_number_it_is_planned_when_nobody_new_comes() -> None:
    async def scenario() -> None:
        async with World(2) as world:
            for _ in range(2):
                world.add()
            await eventually(world.complete, within_s=10.0)
            owner = Owner(world)
            enlisting = start(owner.enlist())
            for _ in range(3):
                await asyncio.sleep(3.0)
                world.add()
                assert not enlisting.done()
            enlisted = await finished(enlisting, 12.0)
            assert len(enlisted.plan.slices) == 5
            assert owner.heard("until nobody new has come for 5 s")

    in_virtual_time(scenario())


@pytest.mark.row(18)
def test_a_model_that_does_not_fit_waits_for_memory() -> None:
    async def scenario() -> None:
        async with World(3) as world:
            small = PROFILE.model_copy(update={"free_bytes": 1500})
            world.add(small)
            await eventually(world.complete, within_s=10.0)
            owner = Owner(world)
            enlisting = start(owner.enlist())
            await eventually(lambda: owner.heard("slice 0 needs"), within_s=20.0)
            assert any("more (" in line for line in owner.said)
            world.add()
            await asyncio.sleep(10.0)
            assert not enlisting.done(), "equal shares do not fit on the small one"
            world.presences[next(iter(world.presences))].set_profile(PROFILE)
            world.add()
            enlisted = await finished(enlisting, 20.0)
            assert len(enlisted.plan.slices) == 3

    in_virtual_time(scenario())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.row(12)
def test_a_coordinator_that_dies_while_the_owner_waits_is_replaced(seed: int) -> None:
    async def scenario() -> None:
        async with World(seed) as world:
            for _ in range(3):
                world.add()
            await eventually(world.complete, within_s=10.0)
            owner = Owner(world, peers=3)
            world.work[world.leader.me].held = Holding(job=OTHER_JOB, slices=(0,))
            await asyncio.sleep(2.0)
            enlisting = start(owner.enlist())
            await eventually(lambda: owner.heard("3 peers wanted"), within_s=10.0)
            before = world.leader.coordinator
            await world.kill(world.leader.me)
            world.add()
            enlisted = await finished(enlisting, 40.0)
            assert before is not None
            assert enlisted.term > before.term
            assert {part.peer for part in enlisted.plan.slices} == set(world.presences)

    in_virtual_time(scenario())


def test_two_jobs_share_the_swarm_in_order_of_registration() -> None:
    async def scenario() -> None:
        async with World(5) as world:
            for _ in range(3):
                world.add()
            await eventually(world.complete, within_s=10.0)
            first, second = Owner(world, peers=2), Owner(world, OTHER_JOB, peers=2)
            one = await finished(start(first.enlist()), 10.0)
            enlisting = start(second.enlist())
            await eventually(lambda: second.heard("2 peers wanted: 1 peer free, 2 busy or unfit"), within_s=10.0)
            for index, part in enumerate(one.plan.slices):
                world.work[part.peer].held = Holding(job=JOB, slices=(index,))
            await asyncio.sleep(WAN.reserve_s + 10.0)
            assert not enlisting.done(), "the peers hold the first job's slices"
            world.add()
            two = await finished(enlisting, 10.0)
            assert not {part.peer for part in one.plan.slices} & {part.peer for part in two.plan.slices}
            assert {reason for _, reason in two.plan.idle} == {f"works for job {JOB[:8]}"}

    in_virtual_time(scenario())


def test_a_graph_that_is_none_is_refused_and_the_owner_told() -> None:
    async def scenario() -> None:
        async with World(6) as world:
            world.add()
            await eventually(world.complete, within_s=10.0)
            owner = Owner(world, peers=1, graph=b"no graph at all")
            enlisting = start(owner.enlist())
            await eventually(lambda: owner.heard("the coordinator refuses the graph"), within_s=10.0)
            enlisting.cancel()
            await eventually(lambda: not world.leader.snapshot().jobs, within_s=WAN.waiting_s + 2)

    in_virtual_time(scenario())


def test_a_plan_that_was_not_asked_for_is_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that puts a lossy codec where the owner wants none."""

    def compressing(*arguments: Any) -> Plan | NoPlan:
        made = plan(*arguments)
        if not hostile or isinstance(made, NoPlan):
            return made
        return replace(made, edges=tuple(replace(edge, codec="topk:1000000") for edge in made.edges))

    hostile = [True]
    monkeypatch.setattr(planning, "plan", compressing)

    async def scenario() -> None:
        async with World(12) as world:
            for _ in range(2):
                world.add()
            await eventually(world.complete, within_s=10.0)
            owner = Owner(world, peers=2)
            enlisting = start(owner.enlist())
            await eventually(lambda: owner.heard("not what was asked for"), within_s=15.0)
            assert owner.heard("by codec 'topk:1000000', not by none")
            await asyncio.sleep(10.0)
            assert not enlisting.done()
            hostile.clear()
            assert {edge.codec for edge in (await finished(enlisting, 30.0)).plan.edges} == {"none"}

    in_virtual_time(scenario())


@pytest.mark.row(4)
def test_a_peer_that_cannot_be_dialled_gets_no_slice() -> None:
    async def scenario() -> None:
        async with World(7) as world:
            world.add()
            hidden = world.add(PROFILE.model_copy(update={"reachability": "outbound-only"}))
            await eventually(world.complete, within_s=10.0)
            enlisted = await finished(start(Owner(world).enlist()), 20.0)
            assert enlisted.plan.idle == ((hidden.me, "cannot be dialled by others"),)

    in_virtual_time(scenario())


def test_a_swarm_without_peers_ends_the_command() -> None:
    async def scenario() -> None:
        async with World(8) as world:
            with pytest.raises(SwarmUnreachable, match="no peers for 12 s"):
                await Owner(world).enlist(no_peers_timeout_s=12.0)
            assert 12.0 <= asyncio.get_running_loop().time() < 16.0

    in_virtual_time(scenario())


@pytest.mark.row(6)
def test_peers_of_another_protocol_are_named_as_the_reason() -> None:
    async def scenario() -> None:
        async with World(9) as world:
            other = PROFILE.versions.model_copy(update={"protocol": fusion_p2p.PROTOCOL + 1})
            world.add(PROFILE.model_copy(update={"versions": other}))
            with pytest.raises(Incompatible, match="protocol 2, we speak 1"):
                await Owner(world).enlist(no_peers_timeout_s=8.0)

    in_virtual_time(scenario())


def test_status_comes_from_the_coordinator_whoever_is_asked() -> None:
    async def scenario() -> None:
        async with World(10) as world:
            for _ in range(5):
                world.add()
            await eventually(world.complete, within_s=10.0)
            worker = next(peer for peer in world.presences if peer != world.leader.me)
            world.work[worker].held = Holding(job=JOB, slices=(0, 2))
            waiting = Owner(world, OTHER_JOB, peers=9)
            enlisting = start(waiting.enlist())
            await eventually(lambda: waiting.heard("9 peers wanted: 4 peers free"), within_s=10.0)
            looker = world.network.join()
            status = await swarm_status(looker.transport, looker.directory, 10.0)
            assert status.coordinator is not None
            assert status.asked == status.coordinator.peer == world.leader.me
            assert {peer.peer for peer in status.peers} == set(world.presences)
            assert next(peer.holding for peer in status.peers if peer.peer == worker) == Holding(job=JOB, slices=(0, 2))
            assert [job.reason for job in status.jobs] == ["9 peers wanted: 4 peers free, 1 busy or unfit"]
            enlisting.cancel()

    in_virtual_time(scenario())


def test_status_of_nothing() -> None:
    async def scenario() -> None:
        async with World(11) as world:
            looker = world.network.join()
            with pytest.raises(SwarmUnreachable, match="no peers for 5 s"):
                await swarm_status(looker.transport, looker.directory, 5.0)

    in_virtual_time(scenario())
