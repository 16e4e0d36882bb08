"""A plan without some of its peers: nothing moves that need not, memory is respected, and the choice is the best there is."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan import mending
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.memory import holding_of, num_moments, slice_bytes
from fusion_p2p.plan.mending import COVERED, mend
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import NoPlan, PlanRequest
from fusion_p2p.plan.sharing import exchange_bytes
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.sizing import all_in_flight, sized
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.unit.chain_graphs import chain, chain_costs
from tests.unit.networks import network
from tests.unit.planning_cases import random_network

GRAPH = chain(6)
COSTS = chain_costs(GRAPH, saved_bytes=1 << 10)
SLICE_OF = (0, 0, 1, 1, 2, 2, 2)
PARTS = cut(GRAPH, SLICE_OF)
ADAM = OptimiserSettings(name="adam")
REQUEST = PlanRequest(Digest("cd" * 32), micro_batches=4, optimiser=ADAM, codec="int8")
Held = Mapping[int, Collection[PeerId]]


def peer(number: int) -> PeerId:
    return PeerId(f"p{number}")


def plan_of(net: Network, *members: tuple[int, ...], schedule: str = "1f1b", deal: tuple[int, ...] = ()) -> Plan:
    """Three slices on the peers with these numbers."""
    groups = [tuple(net.peers[number] for number in group) for group in members]
    slices = tuple(
        SlicePlan(group[0], 1, False, group[1:], (deal if len(group) > 1 and deal else tuple(range(len(group)))))
        for group in groups
    )
    edges = tuple(EdgePlan(edge.value, edge.source, edge.target, "int8") for edge in PARTS.edges)
    draft = Plan(Digest("cd" * 32), "equal-compute", 4, SLICE_OF, slices, edges, schedule=schedule)  # type: ignore[arg-type]
    draft = replace(draft, slices=tuple(all_in_flight(part, 4) for part in slices))
    roomy = replace(net, free_bytes=np.full(len(net.peers), 1e12))
    made = sized(GRAPH, PARTS, COSTS, draft, roomy, 2)
    assert isinstance(made, Plan)
    return made


def least(plan: Plan) -> Plan:
    """The plan with as little in flight as its schedule allows."""
    if plan.schedule == "gpipe":
        return plan
    edges = tuple(replace(edge, credits=2) for edge in plan.edges)
    return replace(plan, slices=tuple(replace(part, in_flight=1) for part in plan.slices), edges=edges)


def mended(plan: Plan, net: Network, without: Collection[PeerId], held: Held | None = None) -> Plan:
    made = mend(GRAPH, PARTS, COSTS, plan, net, REQUEST, without, held or {})
    assert isinstance(made, Plan), made
    check_plan(made, GRAPH, PARTS)
    return made


def members(plan: Plan) -> list[tuple[PeerId, ...]]:
    return [part.members for part in plan.slices]


def need(plan: Plan, of: PeerId) -> int:
    """What a volunteer counts before it consents."""
    saved = [cost.saved_bytes for cost in COSTS]
    shared = exchange_bytes(GRAPH, PARTS, [len(part.members) for part in plan.slices])
    return sum(
        slice_bytes(GRAPH, PARTS.slices[index], saved, holding_of(GRAPH, plan, index, num_moments(ADAM))) + shared[index]
        for index in plan.slices_of(of)
    )


@pytest.mark.row(17)
def test_a_spare_takes_the_slice_and_nothing_else_changes() -> None:
    net = network([0] * 5)
    plan = plan_of(net, (0,), (1,), (2,))
    made = mended(plan, net, {peer(1)})
    assert members(made) in ([(peer(0),), (peer(3),), (peer(2),)], [(peer(0),), (peer(4),), (peer(2),)])
    same = (made.graph, made.slice_of, made.scheduler, made.schedule, made.micro_batches)
    assert same == (plan.graph, plan.slice_of, plan.scheduler, plan.schedule, plan.micro_batches)
    assert [edge.codec for edge in made.edges] == ["int8"] * len(plan.edges)
    (spare,) = {peer(3), peer(4)} - made.peers
    assert made.idle == ((spare, COVERED),)
    assert made.predicted_step_s == simulate(pipeline_of_plan(GRAPH, PARTS, COSTS, made, net)).step_s


def test_who_keeps_a_copy_comes_before_who_is_faster() -> None:
    net = network([0] * 5, speeds=[1, 1, 1, 100, 1])
    plan = plan_of(net, (0,), (1,), (2,))
    assert members(mended(plan, net, {peer(1)}))[1] == (peer(3),)
    assert members(mended(plan, net, {peer(1)}, {1: {peer(4)}}))[1] == (peer(4),)
    assert members(mended(plan, net, {peer(1)}, {0: {peer(4)}}))[1] == (peer(3),), "a copy of another slice does not help"


def test_a_spare_comes_before_a_peer_that_has_a_slice_already() -> None:
    net = network([0] * 4, speeds=[100, 1, 100, 0.01])
    plan = plan_of(net, (0,), (1,), (2,))
    assert members(mended(plan, net, {peer(1)}))[1] == (peer(3),)
    alone = net.select([0, 1, 2])
    made = mended(plan, alone, {peer(1)})
    assert members(made)[1] in ((peer(0),), (peer(2),))


def test_a_group_keeps_its_number_and_its_deal() -> None:
    net = network([0] * 5)
    plan = plan_of(net, (0,), (1, 2, 3), (4,), deal=(0, 1, 0, 2))
    wide = replace(network([0] * 6))
    made = mended(plan, wide, {peer(2)})
    assert members(made)[1] == (peer(1), peer(5), peer(3))
    assert made.slices[1].deal == (0, 1, 0, 2)


def test_a_group_shrinks_only_when_nobody_has_room() -> None:
    net = network([0] * 4)
    plan = plan_of(net, (0,), (1, 2), (3,), deal=(0, 1, 0, 1))
    plan = least(plan)
    tight = replace(net, free_bytes=np.array([float(need(plan, one)) for one in net.peers]))
    made = mended(plan, tight, {peer(2)})
    assert members(made) == [(peer(0),), (peer(1),), (peer(3),)]
    assert made.slices[1].deal == (0,)
    roomy = replace(net, free_bytes=np.array([1e9, *(float(need(plan, one)) for one in net.peers[1:])]))
    assert members(mended(plan, roomy, {peer(2)})) == [(peer(0),), (peer(1), peer(0)), (peer(3),)]


@pytest.mark.row(18)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_what_is_missing_is_said(schedule: str) -> None:
    net = network([0] * 4)
    plan = least(plan_of(net, (0,), (1,), (2,), schedule=schedule))
    small = replace(net, free_bytes=np.array([*(float(need(plan, one)) for one in net.peers[:3]), 100.0]))
    found = mend(GRAPH, PARTS, COSTS, plan, small, REQUEST, {peer(1)}, {})
    assert isinstance(found, NoPlan)
    assert found.reason.startswith("slice 1 needs ")
    assert found.missing_bytes > 0
    enough = replace(small, free_bytes=small.free_bytes + np.array([0, 0, 0, found.missing_bytes]))
    assert members(mended(plan, enough, {peer(1)}))[1] == (peer(3),)
    one_less = replace(enough, free_bytes=enough.free_bytes - np.array([0, 0, 0, 1.0]))
    assert isinstance(mend(GRAPH, PARTS, COSTS, plan, one_less, REQUEST, {peer(1)}, {}), NoPlan)


def test_nobody_here() -> None:
    net = network([0] * 3)
    plan = plan_of(net, (0,), (1,), (2,))
    found = mend(GRAPH, PARTS, COSTS, plan, net, REQUEST, set(net.peers), {})
    assert found == NoPlan("slice 1 needs a peer: nobody else is here")


def test_who_is_lost_need_not_be_in_the_network_and_who_stays_keeps_what_it_has() -> None:
    """A new coordinator has not heard a survivor yet, so it counts on no memory of it."""
    net = network([0] * 4)
    plan = plan_of(net, (0,), (1,), (2,))
    unheard = replace(net, free_bytes=np.array([0.0, 0.0, 0.0, 1e9])).select([0, 2, 3])
    assert members(mended(plan, unheard, {peer(1)})) == [(peer(0),), (peer(3),), (peer(2),)]


def test_nobody_is_lost_after_all() -> None:
    net = network([0] * 4)
    plan = plan_of(net, (0,), (1,), (2,))
    assert members(mended(plan, net, {PeerId("somebody else")})) == members(plan)


def test_one_spare_takes_both_slices_of_a_peer_if_it_has_room_and_copies_of_both() -> None:
    net = network([0] * 4)
    plan = plan_of(net, (0,), (1,), (0,))
    made = mended(plan, net, {peer(0)}, {0: {peer(3)}, 2: {peer(3)}})
    assert members(made) == [(peer(3),), (peer(1),), (peer(3),)]
    assert need(made, peer(3)) > 0


def test_many_peers_are_mended_with_few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = chain(52)
    slice_of = tuple(min(node, 49) for node in range(53))
    parts, costs = cut(graph, slice_of), chain_costs(graph, saved_bytes=1 << 10)
    net = random_network(3, 80, has_owner=True)
    slices = tuple(SlicePlan(net.peers[index], 4) for index in range(50))
    edges = tuple(EdgePlan(edge.value, edge.source, edge.target) for edge in parts.edges)
    plan = Plan(Digest("cd" * 32), "auto", 16, slice_of, slices, edges)
    tasks: list[int] = []

    def counting(pipeline: object) -> object:
        tasks.append(2 * 16 * 50)
        return simulate(pipeline)  # type: ignore[arg-type]

    monkeypatch.setattr(mending, "simulate", counting)
    made = mend(graph, parts, costs, plan, net, REQUEST, {net.peers[7], net.peers[20]}, {})
    assert isinstance(made, Plan)
    assert sum(tasks) <= max(mending.SIMULATED_TASKS, 2 * 16 * 50)
    assert sum(old.members != new.members for old, new in zip(plan.slices, made.slices, strict=True)) == 2


def test_a_plan_that_lost_very_much_is_not_mended_place_by_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mending, "MOST_PLACES", 1)
    net = network([0] * 5)
    plan = plan_of(net, (0,), (1,), (2,))
    found = mend(GRAPH, PARTS, COSTS, plan, net, REQUEST, {peer(0), peer(1)}, {})
    assert found == NoPlan("2 places of the plan are empty, too many to be filled one by one")


# Against trying everything.


def choices(plan: Plan, net: Network, without: Collection[PeerId], held: Held) -> Iterator[tuple[tuple[int, int, int], float]]:
    """Every way to fill the places that fits, with what it costs."""
    places = [(i, m) for i, part in enumerate(plan.slices) for m, one in enumerate(part.members) if one in without]
    takers = [one for one in net.peers if one not in without]
    for chosen in product([*takers, None], repeat=len(places)):
        taken = dict(zip(places, chosen, strict=True))
        slices = []
        for index, part in enumerate(plan.slices):
            new = [taken.get((index, member), one) for member, one in enumerate(part.members)]
            staying = [member for member, one in enumerate(new) if one is not None]
            left = [one for one in new if one is not None]
            if not left or len(set(left)) < len(left):
                break
            deal = tuple(staying.index(member) for member in part.deal if member in staying)
            slices.append(SlicePlan(left[0], 1, part.recompute, tuple(left[1:]), deal if len(left) > 1 else (0,)))
        if len(slices) < len(plan.slices):
            continue
        draft = replace(plan, slices=tuple(all_in_flight(part, plan.micro_batches) for part in slices))
        made = sized(GRAPH, PARTS, COSTS, draft, net, 2)
        if isinstance(made, Plan):
            given = [one for one in chosen if one is not None]
            fetching = sum(one is not None and one not in held.get(i, ()) for (i, _), one in taken.items())
            doubled = sum(given.count(one) - (one not in plan.peers) for one in set(given))
            rank = (chosen.count(None), fetching, doubled)
            yield rank, simulate(pipeline_of_plan(GRAPH, PARTS, COSTS, made, net)).step_s


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_no_choice_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_peers = int(random.integers(4, 6))
    net = random_network(seed, num_peers, has_owner=True)
    groups = [(0,), (1,), (2,)] if random.random() < 0.5 else [(0,), (1, 2), (0,)]
    plan = plan_of(net, *groups)
    lost = [net.peers[int(number)] for number in random.choice(3, int(random.integers(1, 3)), replace=False)]
    most = max(need(plan, one) for one in net.peers)
    net = replace(net, free_bytes=np.round(most * random.choice([0.1, 0.6, 1.0, 1.7, 4.0], num_peers)))
    stays = np.array([float(need(plan, one)) if one not in lost else 0.0 for one in net.peers])
    net = replace(net, free_bytes=np.maximum(net.free_bytes, stays))
    held = {index: {one for one in net.peers if random.random() < 0.2 and one not in lost} for index in range(3)}
    best = min(choices(plan, net, lost, held), default=None)
    made = mend(GRAPH, PARTS, COSTS, plan, net, REQUEST, lost, held)
    if best is None:
        assert isinstance(made, NoPlan)
        return
    assert isinstance(made, Plan), made
    assert not made.peers & set(lost)
    for one in made.peers:
        assert need(made, one) <= net.free_bytes[net.peers.index(one)]
    given = [
        (index, new)
        for index, (before, after) in enumerate(zip(plan.slices, made.slices, strict=True))
        for new in after.members
        if new not in before.members
    ]
    takers = [one for _, one in given]
    shrunk = sum(len(a.members) - len(b.members) for a, b in zip(plan.slices, made.slices, strict=True))
    fetching = sum(one not in held[index] for index, one in given)
    doubled = sum(takers.count(one) - (one not in plan.peers) for one in set(takers))
    assert (shrunk, fetching, doubled) == best[0]
    assert made.predicted_step_s == pytest.approx(best[1])
