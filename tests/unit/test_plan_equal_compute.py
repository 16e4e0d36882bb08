"""The baseline scheduler: equal FLOPs, legal borders, memory as a hard limit, and a plan that explains itself."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.equal_compute import choose_borders, default_in_flight, equal_compute, legal_boundaries
from fusion_p2p.plan.explain import explain
from fusion_p2p.plan.memory import Holding, num_moments, slice_bytes
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan, PeerCapability, PlanRequest
from fusion_p2p.plan.schedulers import SCHEDULERS, plan
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.unit.chain_graphs import BATCH, WIDTH, chain, chain_costs, counting_chain

SGD = OptimiserSettings(name="sgd")
ADAM = OptimiserSettings(name="adam")
REQUEST = PlanRequest(Digest("cd" * 32), micro_batches=8, optimiser=SGD, idle=((PeerId("far"), "not reachable"),))


def peers(count: int, free_bytes: int = 1 << 30) -> list[PeerCapability]:
    return [PeerCapability(PeerId(f"peer{i}"), free_bytes, 10.0) for i in range(count)]


@pytest.mark.parametrize(
    ("flops", "num_slices", "borders"),
    [
        ([1.0] * 6, 1, ()),
        ([1.0] * 6, 2, (3,)),
        ([1.0] * 6, 3, (2, 4)),
        ([1.0] * 6, 6, (1, 2, 3, 4, 5)),
        ([1.0] * 6, 9, (1, 2, 3, 4, 5)),
        ([10.0, 1.0, 1.0, 1.0], 2, (1,)),
        ([1.0, 1.0, 1.0, 10.0], 2, (3,)),
        ([10.0, 1.0, 1.0, 1.0], 4, (1, 2, 3)),
        ([0.0] * 4, 3, (1, 2)),
    ],
)
def test_borders_lie_nearest_to_equal_shares(flops: list[float], num_slices: int, borders: tuple[int, ...]) -> None:
    assert choose_borders(flops, tuple(range(1, len(flops))), num_slices) == borders


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=30), st.integers(1, 40))
@settings(derandomize=True, deadline=None, max_examples=200)
def test_borders_are_legal_and_distinct(flops: list[float], num_slices: int) -> None:
    legal = tuple(b for b in range(1, len(flops)) if b % 3)
    borders = choose_borders(flops, legal, num_slices)
    assert set(borders) <= set(legal)
    assert list(borders) == sorted(set(borders))
    assert len(borders) == min(num_slices - 1, len(legal))


@pytest.mark.parametrize("num_peers", [1, 2, 3, 5, 7, 12])
def test_every_number_of_peers_gives_a_plan_that_passes_its_check(num_peers: int) -> None:
    graph = chain(6)
    made = equal_compute(graph, chain_costs(graph), peers(num_peers), REQUEST)
    assert isinstance(made, Plan)
    check_plan(made, graph, cut(graph, made.slice_of))
    assert len(made.slices) == min(num_peers, 7)
    assert [part.peer for part in made.slices] == [f"peer{i}" for i in range(len(made.slices))]
    assert len(made.idle) == 1 + max(0, num_peers - 7)
    assert made.slice_of == tuple(sorted(made.slice_of))


def test_a_buffer_and_its_update_stay_in_one_slice() -> None:
    graph = counting_chain()
    assert legal_boundaries(graph) == (4, 5)
    made = equal_compute(graph, chain_costs(graph), peers(6), REQUEST)
    assert isinstance(made, Plan)
    assert made.slice_of == (0, 0, 0, 0, 1, 2)
    check_plan(made, graph, cut(graph, made.slice_of))


@pytest.mark.parametrize(
    ("index", "num_slices", "micro_batches", "held"), [(0, 3, 8, 6), (2, 3, 8, 2), (0, 3, 4, 4), (0, 1, 1, 1), (9, 10, 64, 2)]
)
def test_default_in_flight(index: int, num_slices: int, micro_batches: int, held: int) -> None:
    assert default_in_flight(index, num_slices, micro_batches) == held


def test_memory_is_counted_by_the_formula() -> None:
    graph = chain(2)
    part = cut(graph, (0, 1, 1)).slices[0]
    weight, activation = WIDTH * WIDTH * 4, BATCH * WIDTH * 4
    saved = [100, 100, 0]
    assert num_moments(ADAM) == 2
    expected = 4 * weight + 3 * (100 + 2 * activation) + 2 * activation + 2 * activation
    assert slice_bytes(graph, part, saved, Holding(in_flight=3, credits=2, moments=2)) == expected
    recomputed = 4 * weight + 3 * 2 * activation + 100 + 2 * activation + 2 * activation
    assert slice_bytes(graph, part, saved, Holding(3, 2, 2, recompute=True)) == recomputed


def test_less_memory_means_fewer_in_flight_and_then_no_plan() -> None:
    graph = chain(3)
    costs = chain_costs(graph, saved_bytes=64 << 20)
    roomy = equal_compute(graph, costs, peers(3, 1 << 30), REQUEST)
    tight = equal_compute(graph, costs, peers(3, 200 << 20), REQUEST)
    none = equal_compute(graph, costs, peers(3, 32 << 20), REQUEST)
    assert isinstance(roomy, Plan)
    assert isinstance(tight, Plan)
    assert [part.in_flight for part in roomy.slices] == [6, 4, 2]
    assert [part.in_flight for part in tight.slices] == [3, 3, 2]
    assert isinstance(none, NoPlan)
    assert none.reason.startswith("slice 0 needs 32.0 MiB more")


def test_nobody_and_unknown_names_have_reasons() -> None:
    graph = chain(2)
    assert equal_compute(graph, chain_costs(graph), [], REQUEST) == NoPlan("no peer is free")
    unknown = plan("best", graph, chain_costs(graph), peers(1), REQUEST)
    assert isinstance(unknown, NoPlan)
    assert "equal-compute" in unknown.reason
    for name in SCHEDULERS:
        assert isinstance(plan(name, graph, chain_costs(graph), peers(2), REQUEST), Plan)


def test_the_prediction_is_the_pipeline_formula() -> None:
    graph = chain(4)
    made = equal_compute(graph, chain_costs(graph), peers(2), REQUEST)
    assert isinstance(made, Plan)
    assert made.predicted_step_s == pytest.approx(0.6 + 0.6 + 7 * 0.6)


def test_a_plan_explains_itself() -> None:
    graph = chain(4)
    made = equal_compute(graph, chain_costs(graph), peers(2), REQUEST)
    assert isinstance(made, Plan)
    lines = explain(made, graph, cut(graph, made.slice_of), chain_costs(graph), SGD)
    text = "\n".join(lines)
    assert "2 slices on 2 peers, 8 micro-batches" in lines[0]
    assert "slice 0 on peer0: layer.0 .. layer.1, 2 nodes, 50% of the FLOPs" in text
    assert f"edge 0 -> 1: 1 values, {BATCH * WIDTH * 4} bytes forward and {BATCH * WIDTH * 4} back" in text
    assert lines[-1] == "idle far: not reachable"
