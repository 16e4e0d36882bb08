"""From layouts to plans: replicas and their deal, memory as a hard limit, credits, codecs per edge, and why peers are idle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest
from fusion_p2p.plan import schedulers
from fusion_p2p.plan.actions import rtt_caps
from fusion_p2p.plan.chain import chain_of
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.idle import NO_MEMORY, NO_PLACE, SLOW_DEVICE, SLOW_LINK, SPARE
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import Holding, holding_of, slice_bytes, stage_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.placing import place
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan, PlanRequest
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.unit.chain_graphs import BATCH, WIDTH, chain, chain_costs
from tests.unit.networks import network

GRAPH = chain(6)
COSTS = chain_costs(GRAPH, saved_bytes=1 << 20)
CHAIN = chain_of(GRAPH, COSTS)
REQUEST = PlanRequest(Digest("cd" * 32), micro_batches=8, optimiser=OptimiserSettings(name="adam"))
HALVES = Layout("test", (Stage(0, 3, (0,)), Stage(3, 7, (1,))), (1.0,))


def placed(layout: Layout, net: Network, **request: object) -> Plan:
    made = place(GRAPH, COSTS, CHAIN, net, layout, replace(REQUEST, **request))  # type: ignore[arg-type]
    assert isinstance(made, Plan), made
    check_plan(made, GRAPH, cut(GRAPH, made.slice_of))
    return made


def needs(plan: Plan) -> list[int]:
    parts = cut(GRAPH, plan.slice_of)
    saved = [cost.saved_bytes for cost in COSTS]
    return [slice_bytes(GRAPH, part, saved, holding_of(GRAPH, plan, part.index, 2)) for part in parts.slices]


def test_a_plan_is_what_its_layout_says_and_takes_as_long_as_its_simulation() -> None:
    net = network([0, 0])
    plan = placed(HALVES, net)
    assert plan.slice_of == (0, 0, 0, 1, 1, 1, 1)
    assert [part.members for part in plan.slices] == [("p0",), ("p1",)]
    pipeline = pipeline_of_plan(GRAPH, cut(GRAPH, plan.slice_of), COSTS, plan, net)
    assert plan.predicted_step_s == simulate(pipeline).step_s
    assert 9 + 7 * 9 + 9 <= plan.predicted_step_s < 9 + 7 * 9 + 9 + 1, "nine seconds a stage, and almost nothing on links"


def test_members_get_micro_batches_by_their_speed() -> None:
    net = network([0, 0, 0], speeds=[300, 100, 1])
    plan = placed(Layout("test", (Stage(0, 7, (0, 1, 2)),)), net)
    assert plan.slices[0].members == ("p0", "p1"), "the third would be done with its first after the others with all"
    assert plan.slices[0].deal == (0, 0, 0, 1, 0, 0, 0, 1)
    assert 1 <= plan.slices[0].in_flight <= 6
    assert plan.peers == {"p0", "p1"}


def test_a_slow_link_asks_for_more_in_flight_and_more_credits() -> None:
    near = placed(HALVES, network([0, 0]), schedule="1f1b")
    far = placed(HALVES, network([0, 1], between=(12.0, 1e-9)), schedule="1f1b")
    assert [part.in_flight for part in near.slices] == [4, 2]
    assert far.slices[0].in_flight == 6
    assert near.edges[0].credits == 2
    assert far.edges[0].credits > 2


def test_places_that_topk_edges_remember_take_memory_at_both_ends() -> None:
    net = network([0, 1])
    dense = placed(HALVES, net)
    coded = placed(HALVES, net, codec="topk:4:int8")
    assert [edge.codec for edge in coded.edges] == ["topk:4:int8"]
    for index in (0, 1):
        held = holding_of(GRAPH, coded, index, 2)
        assert held.places == BATCH * WIDTH // 4 > 0
        assert dense.slices[index].in_flight == held.in_flight
        assert needs(coded)[index] == needs(dense)[index] + 4 * held.places * (held.in_flight + held.credits)
    exact = placed(HALVES, replace(net, free_bytes=net.free_bytes * 0 + max(needs(coded))), codec="topk:4:int8")
    tight = placed(HALVES, replace(net, free_bytes=net.free_bytes * 0 + max(needs(coded)) - 1), codec="topk:4:int8")
    assert needs(exact) == needs(coded)
    assert needs(tight) != needs(coded)


def test_less_memory_means_fewer_in_flight_and_then_no_plan() -> None:
    net = network([0, 1], between=(12.0, 1e-9))
    roomy = placed(HALVES, net)
    full = max(needs(roomy))
    for short in (1, 1 << 20, 2 << 20, 4 << 20):
        tight = placed(HALVES, replace(net, free_bytes=net.free_bytes * 0 + full - short))
        assert max(needs(tight)) <= full - short
        assert sum(part.in_flight for part in tight.slices) <= sum(part.in_flight for part in roomy.slices)
    one = needs(placed(HALVES, replace(net, free_bytes=net.free_bytes * 0 + full - (4 << 20))))
    none = place(GRAPH, COSTS, CHAIN, replace(net, free_bytes=net.free_bytes * 0 + (2 << 20)), HALVES, REQUEST)
    assert isinstance(none, NoPlan)
    assert none.reason.startswith("slice 0 needs 1.0 MiB more (3.0 MiB on p0, 2.0 MiB free)")
    assert none.lacking == "p0"
    assert min(one) > 0


def test_gpipe_holds_all_or_nothing() -> None:
    net = network([0, 0])
    plan = placed(replace(HALVES, schedule="gpipe"), net)
    assert [part.in_flight for part in plan.slices] == [8, 8]
    assert plan.schedule == "gpipe"
    poor = replace(net, free_bytes=net.free_bytes * 0 + max(needs(plan)) - 1)
    assert isinstance(place(GRAPH, COSTS, CHAIN, poor, replace(HALVES, schedule="gpipe"), REQUEST), NoPlan)
    assert isinstance(place(GRAPH, COSTS, CHAIN, poor, HALVES, REQUEST), Plan)


def test_a_peer_pays_for_all_of_its_slices() -> None:
    twice = Layout("test", (Stage(0, 2, (0,)), Stage(2, 5, (1,)), Stage(5, 7, (0,))), (1.0, 1.0))
    net = network([0, 0])
    plan = placed(twice, net)
    sizes = needs(plan)
    enough = replace(net, free_bytes=net.free_bytes * 0 + sizes[0] + sizes[2])
    assert placed(twice, enough).slices == plan.slices
    less = placed(twice, replace(net, free_bytes=net.free_bytes * 0 + sizes[0] + sizes[2] - 1))
    assert less.slices != plan.slices


def test_members_of_a_group_need_room_to_agree() -> None:
    """Two members: the gradient or term of the other and a copy to send or to return, of every parameter."""
    group, alone = (Layout("test", (Stage(0, 7, peers),), ()) for peers in ((0, 1), (0,)))
    net = network([0, 0])
    parameters = 6 * WIDTH * WIDTH * 4
    enough = needs(placed(group, net, micro_batches=2))[0] + 2 * parameters
    for layout, short, fits in ((group, 0, True), (group, 1, False), (alone, 1, True)):
        made = place(
            GRAPH,
            COSTS,
            CHAIN,
            replace(net, free_bytes=net.free_bytes * 0 + enough - short),
            layout,
            replace(REQUEST, micro_batches=2),
        )
        assert isinstance(made, Plan) == fits
    holding = Holding(1, 2, 2)
    assert stage_bytes(CHAIN, 0, 7, replace(holding, members=2)) == stage_bytes(CHAIN, 0, 7, holding) + 2 * parameters


def test_limits_are_those_of_the_schedule_table() -> None:
    net = network([0, 1, 2], between=(3.0, 1e-9))
    thirds = Layout("test", (Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 7, (2,))), (1.0, 1.0))
    plan = placed(thirds, net, schedule="1f1b")
    pipeline = pipeline_of_plan(GRAPH, cut(GRAPH, plan.slice_of), COSTS, plan, net)
    assert tuple(part.in_flight for part in plan.slices) == rtt_caps(pipeline)


@pytest.mark.parametrize(
    ("codec", "ratio", "ratios", "expected"),
    [
        ("none", 100.0, (1.0, 1.0), ["none", "none"]),
        ("uniform", 100.0, (100 / 3, 100 / 3), ["topk-paper:100", "topk-paper:100"]),
        ("adatopk", 100.0, (100.0, 1.0), ["topk-paper:300", "none"]),
        ("adaptive", 7.5, (1.5, 7.5), ["bf16", "int4"]),
        ("adaptive", 100.0, (1.0, 12.0), ["none", "topk:5:int8"]),
        ("int8", 1.0, (3.87, 3.87), ["int8", "int8"]),
    ],
)
def test_codecs_follow_the_ratios(codec: str, ratio: float, ratios: tuple[float, ...], expected: list[str]) -> None:
    thirds = Layout("test", (Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 7, (2,))), ratios)
    plan = placed(thirds, network([0, 1, 2]), codec=codec, ratio=ratio)
    assert [edge.codec for edge in plan.edges] == expected


@pytest.mark.parametrize(
    ("memory_bytes_per_s", "rungs"),
    [
        (7e9, ["topk:5:int8", "int8", "bf16", "none"]),
        (2e12, ["topk:5:int8", "topk:5:int8", "topk:5:int8", "topk:5:int8"]),
    ],
    ids=["a CPU core", "a GPU"],
)
def test_adaptive_takes_nothing_that_takes_longer_than_it_saves(memory_bytes_per_s: float, rungs: list[str]) -> None:
    halves = replace(HALVES, ratios=(16.0,))
    for bits_per_s, rung in zip((1e8, 2e9, 5e9, 2e10), rungs, strict=True):
        net = network([0, 1], between=(0.02, 8 / bits_per_s))
        net = replace(net, memory_bytes_per_s=np.full(2, memory_bytes_per_s))
        assert placed(halves, net, codec="adaptive").edges[0].codec == rung


def test_the_slowest_link_of_two_groups_says_whether_a_codec_pays() -> None:
    net = network([0, 0, 1], between=(0.02, 8e-10))
    net.beta_s[1, 2] = net.beta_s[2, 1] = 8e-8
    net = replace(net, memory_bytes_per_s=np.full(3, 7e9))
    halves = Layout("test", (Stage(0, 3, (0, 1)), Stage(3, 7, (2,))), (16.0,))
    assert placed(halves, net, codec="adaptive").edges[0].codec == "topk:5:int8"


def test_the_better_schedule_is_taken() -> None:
    net = network([0, 1, 2], between=(0.5, 0.02))
    plans = {
        schedule: schedulers.plan("equal-compute", GRAPH, COSTS, net, replace(REQUEST, schedule=schedule))
        for schedule in ("gpipe", "1f1b", "auto")
    }
    steps = {name: plan.predicted_step_s for name, plan in plans.items() if isinstance(plan, Plan)}
    assert steps["gpipe"] != steps["1f1b"]
    assert steps["auto"] == min(steps["gpipe"], steps["1f1b"])


def test_unknown_codecs_are_no_plan() -> None:
    refused = schedulers.plan("op-fence", GRAPH, COSTS, network([0, 0]), replace(REQUEST, codec="zip"))
    assert isinstance(refused, NoPlan)
    assert refused.reason.startswith("unknown codec 'zip'")
    assert "adaptive" in refused.reason


def test_idle_peers_learn_why() -> None:
    net = network([0, 0, 0, 1, 0, 0], speeds=[2, 2, 1, 2, 3, 2])
    free = net.free_bytes.copy()
    free[5] = 10
    plan = placed(HALVES, replace(net, free_bytes=free), idle=(("far", "not reachable"),))
    assert plan.idle == (("far", "not reachable"), ("p2", SLOW_DEVICE), ("p3", SLOW_LINK), ("p4", SPARE), ("p5", NO_MEMORY))
    full = schedulers.plan("equal-number", GRAPH, COSTS, network([0] * 9), REQUEST)
    assert isinstance(full, Plan)
    assert full.idle == (("p7", NO_PLACE), ("p8", NO_PLACE))


def test_auto_is_asked_again_when_exact_memory_refuses() -> None:
    wide = chain_costs(GRAPH, saved_bytes=100)
    chained = chain_of(GRAPH, wide)
    estimate = stage_bytes(chained, 0, 7, Holding(1, 2, 2))
    net = replace(network([0, 1], between=(1000.0, 1.0)), free_bytes=np.array([estimate, 2 * estimate]))
    request = replace(REQUEST, micro_batches=1)
    alone = place(GRAPH, wide, chained, net, Layout("test", (Stage(0, 7, (0,)),)), request)
    assert isinstance(alone, NoPlan), "the estimate leaves working memory out"
    plan = schedulers.plan("auto", GRAPH, wide, net, request)
    assert isinstance(plan, Plan)
    assert plan.peers == {"p1"}


@pytest.mark.parametrize("scheduler", ["auto", "equal-number"])
def test_a_refusal_speaks_of_the_memory_that_there_is(scheduler: str) -> None:
    net = network([0, 1], free_bytes=3.0 * (1 << 20))
    wide = chain_costs(GRAPH, saved_bytes=4 << 20)
    none = schedulers.plan(scheduler, GRAPH, wide, net, REQUEST)
    assert isinstance(none, NoPlan)
    assert ", 3.0 MiB free)" in none.reason
    assert none.missing_bytes < 30 << 20


@pytest.mark.parametrize(("sites", "codec"), [([0, 1, 0, 1], "none"), ([0, 1, 2], "adatopk"), ([0, 0, 1, 1, 1], "adaptive")])
def test_no_scheduler_beats_auto_with_plans_as_they_run(sites: list[int], codec: str) -> None:
    net = network(sites, speeds=[1 + index % 3 for index in range(len(sites))], between=(0.3, 0.01))
    request = replace(REQUEST, codec=codec, ratio=10.0)
    plans = {name: schedulers.plan(name, GRAPH, COSTS, net, request) for name in schedulers.SCHEDULERS}
    steps = {name: plan.predicted_step_s for name, plan in plans.items() if isinstance(plan, Plan)}
    assert len(steps) == 4
    assert steps["auto"] == min(steps.values())
    assert len(set(steps.values())) > 1
