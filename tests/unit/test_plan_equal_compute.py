"""The baseline schedulers and placing: equal shares, legal borders, memory as a hard limit, a plan that explains itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan import schedulers
from fusion_p2p.plan.chain import legal_boundaries
from fusion_p2p.plan.encoding import check_plan
from fusion_p2p.plan.explain import explain
from fusion_p2p.plan.measured import network_of
from fusion_p2p.plan.memory import Holding, num_moments, slice_bytes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan, PeerCapability, PlanRequest
from fusion_p2p.plan.schedulers import SCHEDULERS
from fusion_p2p.plan.splitting import split
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.unit.chain_graphs import BATCH, WIDTH, Cost, chain, chain_costs, counting_chain

SGD = OptimiserSettings(name="sgd")
ADAM = OptimiserSettings(name="adam")
REQUEST = PlanRequest(Digest("cd" * 32), micro_batches=8, optimiser=SGD, idle=((PeerId("far"), "not reachable"),))


def peers(count: int, free_bytes: int = 1 << 30) -> Network:
    return network_of([PeerCapability(PeerId(f"peer{i}"), free_bytes, 10.0) for i in range(count)], {})


def equal_compute(graph: Graph, costs: tuple[Cost, ...], network: Network, request: PlanRequest = REQUEST) -> Plan | NoPlan:
    return schedulers.plan("equal-compute", graph, costs, network, request)


@pytest.mark.parametrize(
    ("flops", "parts", "borders"),
    [
        ([1.0] * 6, 1, ()),
        ([1.0] * 6, 2, (3,)),
        ([1.0] * 6, 3, (2, 4)),
        ([1.0] * 6, 6, (1, 2, 3, 4, 5)),
        ([10.0, 1.0, 1.0, 1.0], 2, (1,)),
        ([1.0, 1.0, 1.0, 10.0], 2, (3,)),
        ([10.0, 1.0, 1.0, 1.0], 4, (1, 2, 3)),
        ([0.0] * 4, 3, (1, 2)),
    ],
)
def test_cuts_lie_nearest_to_equal_shares(flops: list[float], parts: int, borders: tuple[int, ...]) -> None:
    assert split(np.cumsum([0.0, *flops]), [1.0] * parts)[1:-1] == borders


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=30), st.data())
@settings(derandomize=True, deadline=None, max_examples=200)
def test_no_part_is_empty(flops: list[float], data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=len(flops)))
    cuts = split(np.cumsum([0.0, *flops]), shares)
    assert cuts[0] == 0
    assert cuts[-1] == len(flops)
    assert len(cuts) == len(shares) + 1
    assert all(first < last for first, last in pairwise(cuts))


@pytest.mark.parametrize("scheduler", sorted(SCHEDULERS))
@pytest.mark.parametrize("num_peers", [1, 2, 3, 5, 7, 12])
def test_every_number_of_peers_gives_a_plan_that_passes_its_check(scheduler: str, num_peers: int) -> None:
    graph = chain(6)
    made = schedulers.plan(scheduler, graph, chain_costs(graph), peers(num_peers), REQUEST)
    assert isinstance(made, Plan)
    check_plan(made, graph, cut(graph, made.slice_of))
    assert made.scheduler == scheduler
    assert len(made.peers) + len(made.idle) == num_peers + 1
    assert made.slice_of == tuple(sorted(made.slice_of))


@pytest.mark.parametrize("scheduler", ["equal-number", "equal-compute"])
def test_the_baselines_use_all_peers_as_listed(scheduler: str) -> None:
    graph = chain(6)
    for num_peers in (1, 3, 7, 9):
        made = schedulers.plan(scheduler, graph, chain_costs(graph), peers(num_peers), REQUEST)
        assert isinstance(made, Plan)
        assert [part.peer for part in made.slices] == [f"peer{i}" for i in range(min(num_peers, 7))]


def test_equal_number_counts_operators_and_equal_compute_their_flops() -> None:
    graph = chain(5)
    costs = (Cost(10.0, 20.0, 0), *chain_costs(graph)[1:])
    counted = schedulers.plan("equal-number", graph, costs, peers(2), REQUEST)
    weighed = equal_compute(graph, costs, peers(2))
    assert isinstance(counted, Plan)
    assert isinstance(weighed, Plan)
    assert counted.slice_of == (0, 0, 0, 1, 1, 1)
    assert weighed.slice_of == (0, 1, 1, 1, 1, 1)


def test_a_buffer_and_its_update_stay_in_one_slice() -> None:
    graph = counting_chain()
    assert legal_boundaries(graph) == (4, 5)
    made = equal_compute(graph, chain_costs(graph), peers(6))
    assert isinstance(made, Plan)
    assert made.slice_of == (0, 0, 0, 0, 1, 2)
    check_plan(made, graph, cut(graph, made.slice_of))


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


def test_nobody_and_unknown_names_have_reasons() -> None:
    graph = chain(2)
    unknown = schedulers.plan("best", graph, chain_costs(graph), peers(1), REQUEST)
    assert isinstance(unknown, NoPlan)
    assert "equal-compute" in unknown.reason
    for name in SCHEDULERS:
        assert schedulers.plan(name, graph, chain_costs(graph), peers(0), REQUEST) == NoPlan("no peer is free")


def test_a_plan_explains_itself() -> None:
    graph = chain(4)
    made = equal_compute(graph, chain_costs(graph), peers(2))
    assert isinstance(made, Plan)
    lines = explain(made, graph, cut(graph, made.slice_of), chain_costs(graph), SGD)
    text = "\n".join(lines)
    assert "slice 0 on peer0: layer.0 .. layer.1, 2 nodes, 50% of the FLOPs" in text
    assert f"edge 0 -> 1: 1 value, {BATCH * WIDTH * 4} bytes forward and {BATCH * WIDTH * 4} bytes back" in text
    assert lines[-1] == "idle far: not reachable"
