"""A graph as a chain: what crosses a position is what a cut there sends; times per peer; coarser chains keep what is cheap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.graph.kinds import ATTENTION, CONVOLUTION, MEMORY
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.plan.chain import Chain, Operator, chain_of, chain_of_operators, coarsen, legal_boundaries
from fusion_p2p.plan.memory import Holding, slice_bytes, stage_bytes
from fusion_p2p.plan.request import NodeCost
from fusion_p2p.plan.times import deal, times, work
from tests.training.builtin import example
from tests.unit.chain_graphs import BATCH, WIDTH, Cost, chain, chain_costs, counting_chain
from tests.unit.networks import network

HOLDING = Holding(in_flight=3, credits=2, moments=2)


@pytest.fixture(scope="module", params=["gpt2", "gpt2-tied", "resnet", "counting"])
def model(request: pytest.FixtureRequest) -> tuple[Graph, tuple[NodeCost, ...]]:
    if request.param == "counting":
        graph = counting_chain()
        return graph, chain_costs(graph)
    family, *tied = request.param.split("-")
    graph = example(family, **({"tied": True, "dropout": 0.1} if tied else {})).graph
    return graph, workload(graph)


def test_what_crosses_a_position_is_what_a_cut_there_sends(model: tuple[Graph, tuple[NodeCost, ...]]) -> None:
    graph, costs = model
    made = chain_of(graph, costs)
    assert made.positions.tolist() == [0, *legal_boundaries(graph), len(graph.nodes)]
    assert made.crossing[0] == made.crossing[-1] == made.crossing_back[0] == made.crossing_back[-1] == 0
    for index in range(1, made.num_blocks):
        border = made.positions[index]
        edges = cut(graph, tuple(int(node >= border) for node in range(len(graph.nodes)))).edges
        types = [graph.types[edge.value] for edge in edges]
        assert made.crossing[index] == sum(kind.num_bytes for kind in types)
        assert made.crossing_back[index] == sum(kind.num_bytes for kind in types if kind.grad)


def test_sums_cover_the_whole_model_once(model: tuple[Graph, tuple[NodeCost, ...]]) -> None:
    graph, costs = model
    made = chain_of(graph, costs)
    whole = cut(graph, (0,) * len(graph.nodes)).slices[0]
    parameters = {value: graph.types[value].num_bytes for value in whole.parameters}
    trainable = sum(size for value, size in parameters.items() if graph.parameter(value).trainable)
    assert made.parameter_bytes[-1] == trainable
    assert made.buffer_bytes[-1] == sum(parameters.values()) - trainable
    assert made.feed(0, made.num_blocks) == sum(graph.types[value].num_bytes for value in whole.inputs)
    assert made.saved_bytes[-1] == sum(cost.saved_bytes for cost in costs)
    assert made.work()[-1] == pytest.approx(sum(cost.forward_flops + cost.backward_flops for cost in costs))
    for sums in (made.parameter_bytes, made.buffer_bytes, made.saved_bytes, made.feed_bytes):
        assert np.all(np.diff(sums) >= 0)


def test_the_estimate_of_memory_is_near_the_exact_one(model: tuple[Graph, tuple[NodeCost, ...]]) -> None:
    graph, costs = model
    made = chain_of(graph, costs)
    whole = cut(graph, (0,) * len(graph.nodes)).slices[0]
    exact = slice_bytes(graph, whole, [cost.saved_bytes for cost in costs], HOLDING)
    largest = max(graph.types[value].num_bytes for value in range(graph.first_node_value, len(graph.types)))
    assert stage_bytes(made, 0, made.num_blocks, HOLDING) == exact - 2 * largest


def test_a_tied_parameter_costs_room_only_where_stages_share_it() -> None:
    graph = example("gpt2", tied=True).graph
    made = chain_of(graph, workload(graph))
    untied = replace(made, tied=())
    (embedding,) = made.tied
    half = made.num_blocks // 2
    for first, last, extra in ((0, made.num_blocks, 0.0), (0, half, 2.0), (half, made.num_blocks, 2.0), (half - 1, half, 0.0)):
        more = stage_bytes(made, first, last, HOLDING) - stage_bytes(untied, first, last, HOLDING)
        assert more == extra * embedding.num_bytes


def test_a_value_with_two_readers_crosses_once_and_a_skip_at_every_position_it_spans() -> None:
    made = chain_of_operators(
        "skip",
        [
            Operator("a", 1.0, 100.0, ()),
            Operator("b", 1.0, 10.0, (0,)),
            Operator("c", 1.0, 1.0, (0, 1)),
            Operator("d", 1.0, 5.0, (2,)),
            Operator("e", 1.0, 7.0, (0, 3)),
        ],
    )
    assert made.crossing.tolist() == [0, 100, 110, 101, 105, 0]
    assert made.backward_flops.tolist() == [2.0] * 5


def test_hand_made_chain() -> None:
    graph = chain(3)
    made = chain_of(graph, chain_costs(graph))
    activation, weight = BATCH * WIDTH * 4, WIDTH * WIDTH * 4
    assert made.crossing.tolist() == [0, activation, activation, activation, 0]
    assert made.parameter_bytes.tolist() == [0, weight, 2 * weight, 3 * weight, 3 * weight]
    assert made.feed_bytes.tolist() == [0, activation, activation, activation, activation]
    assert made.feed(1, 4) == 0


def line(crossing: list[float], flops: list[float] | None = None) -> Chain:
    operators = [Operator(f"o{i}", (flops or [1.0] * 999)[i], size, (i - 1,) if i else ()) for i, size in enumerate(crossing)]
    return chain_of_operators("line", operators)


def test_coarsening_keeps_the_cheapest_position_of_each_share() -> None:
    made = coarsen(line([5, 1, 5, 5, 5, 2, 5, 3, 5, 5, 5, 5]), 3)
    assert made.positions.tolist() == [0, 2, 6, 12]
    assert made.crossing.tolist() == [0, 1, 2, 0]
    assert made.work().tolist() == [0, 6, 18, 36]
    assert coarsen(made, 3) is made


def test_positions_that_lie_close_together_become_one() -> None:
    made = coarsen(line([9, 4, 9, 9, 1, 9] * 20, [100.0, 0, 0, 0, 0, 0] * 20), 60)
    assert made.num_blocks <= 60
    assert set(made.crossing[1:-1].tolist()) == {1}


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=60), st.integers(1, 80), st.booleans())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_coarse_chains_are_no_longer_than_asked(sizes: list[float], max_blocks: int, idle: bool) -> None:
    fine = line(sizes, [0.0] * len(sizes) if idle else None)
    made = coarsen(fine, max_blocks)
    assert 1 <= made.num_blocks <= max(1, max_blocks)
    assert made.positions[0] == 0
    assert made.positions[-1] == len(sizes)
    assert np.all(np.diff(made.positions) > 0)
    assert made.crossing.tolist() == fine.crossing[made.positions].tolist()


def test_times_take_the_rate_of_each_kind_or_of_memory() -> None:
    graph = chain(4)
    costs = (
        Cost(60.0, 120.0, 0),
        Cost(60.0, 120.0, 0, CONVOLUTION),
        Cost(60.0, 0.0, 0, ATTENTION, 1.0),
        Cost(60.0, 60.0, 0, MEMORY, 1000.0),
        Cost(0.0, 0.0, 0),
    )
    net = replace(
        network([0, 0, 0]),
        flops_per_s=np.array([[60.0, 30.0, 20.0], [1.0, 1.0, 1.0], [60.0, 30.0, 20.0]]),
        memory_bytes_per_s=np.array([100.0, np.inf, 100.0]),
    )
    known = times(chain_of(graph, costs), net)
    assert np.diff(known.forward_s[0]).tolist() == [1, 2, 3, 10, 0]
    assert np.diff(known.backward_s[0])[:2].tolist() == [2, 4]
    assert np.diff(known.forward_s[1]).tolist() == [60, 60, 60, 60, 0]
    assert known.forward_s[2].tolist() == known.forward_s[0].tolist()
    assert known.both(0, 0, 2) == pytest.approx(9)
    assert known.both(0, 0, 2, recompute=True) == pytest.approx(12)
    made = chain_of(graph, costs)
    assert work(made, net)[0, 2] == pytest.approx(9)
    assert work(made, net, True)[0, 2] == pytest.approx(12)
    assert times(made, net) is times(made, net), "the same chain and network are computed once"


@pytest.mark.parametrize(
    ("seconds", "dealt"),
    [([1.0], (0, 0, 0, 0, 0, 0)), ([1.0, 1.0], (0, 1, 0, 1, 0, 1)), ([1.0, 2.0], (0, 0, 1, 0, 0, 1)), ([1.0, 99.0], (0,) * 6)],
)
def test_micro_batches_go_to_whoever_is_done_first(seconds: list[float], dealt: tuple[int, ...]) -> None:
    assert deal(seconds, 6) == dealt
