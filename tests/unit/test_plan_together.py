"""Tied parameters in plans: their exchange counts, and a layout may hold both copies on one peer to avoid it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusion_p2p.plan.auto import auto
from fusion_p2p.plan.chain import Chain, Operator, TiedParameter, chain_of, chain_of_operators
from fusion_p2p.plan.estimate import formula
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import within_memory
from fusion_p2p.plan.pipelines import pipeline_of_layout
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.together import together
from tests.training.builtin import example
from tests.unit.chain_graphs import Cost
from tests.unit.networks import network

TERMS = Terms(micro_batches=8)
HALVES = (Stage(0, 4, (0,)), Stage(4, 8, (1,)))


def line(tied_bytes: float) -> Chain:
    """Eight operators; the first and the last read one parameter of so many bytes."""
    made = chain_of_operators("tied", [Operator(f"o{i}", 1.0, 1e3, (i - 1,) if i else (), 1e3) for i in range(8)])
    return replace(made, tied=(TiedParameter(tied_bytes, (0, 7)),))


def test_a_captured_model_tells_which_parameters_are_tied() -> None:
    graph = example("gpt2", tied=True).graph
    costs = [Cost(1.0, 2.0, 0) for _ in graph.nodes]
    (embedding,) = (tied for tied in chain_of(graph, costs).tied if len(tied.readers) == 2)
    name = next(p.name for i, p in enumerate(graph.parameters) if "wte" in p.name or "embed" in p.name)
    value = graph.first_parameter + [p.name for p in graph.parameters].index(name)
    assert embedding.num_bytes == graph.types[value].num_bytes
    assert graph.nodes[embedding.readers[0]].op == "embedding"
    assert not chain_of(example("gpt2", tied=False).graph, costs).tied


def test_the_exchange_takes_its_time_unless_one_peer_holds_both_copies() -> None:
    net = network([0, 1], between=(0.0, 1e-6))
    apart = Layout("test", HALVES)
    step = {size: simulate(pipeline_of_layout(line(size), net, apart, TERMS)).step_s for size in (1e3, 1e8)}
    assert step[1e8] - step[1e3] > 100, "a hundred megabytes at a megabyte per second"
    joined = Layout("test", (Stage(0, 4, (0,)), Stage(4, 7, (1,)), Stage(7, 8, (0,))))
    assert simulate(pipeline_of_layout(line(1e8), net, joined, TERMS)).step_s < step[1e3] * 1.5


def test_the_last_reader_moves_to_the_first() -> None:
    assert list(together(line(1e6), HALVES)) == [(Stage(0, 4, (0,)), Stage(4, 7, (1,)), Stage(7, 8, (0,)))]
    thirds = (Stage(0, 3, (0,)), Stage(3, 6, (1, 2)), Stage(6, 8, (3,)))
    assert list(together(line(1e6), thirds)) == [
        (*thirds[:2], Stage(6, 8, (0,))),
        (*thirds[:2], Stage(6, 7, (3,)), Stage(7, 8, (0,))),
    ]
    assert not list(together(line(1e6), (Stage(0, 8, (0,)),)))
    assert not list(together(replace(line(1e6), tied=()), HALVES))


def test_a_peer_with_two_stages_pays_for_both() -> None:
    layout = Layout("test", (Stage(0, 2, (0,)), Stage(2, 7, (1,)), Stage(7, 8, (0,))), (1.0, 1.0))
    chain, net = line(1e3), network([0, 1])
    assert formula(chain, net, layout, 8).stage_s == pytest.approx(15.0)
    assert formula(chain, net, replace(layout, stages=(Stage(0, 4, (0,)), *layout.stages[1:])), 8).stage_s == pytest.approx(
        15.0
    )
    assert isinstance(within_memory(chain, net, layout, TERMS), Layout)
    free = net.free_bytes.copy()
    free[0] = 4 * 2e3 + 3 * 1e3 + 2e3
    assert isinstance(within_memory(chain, replace(net, free_bytes=free), layout, TERMS), NoPlan)


def test_auto_keeps_a_large_tied_parameter_on_one_peer() -> None:
    net = network([0, 1, 2], between=(0.001, 1e-6))
    apart, near = auto(line(1e3), net, TERMS), auto(line(1e8), net, TERMS)
    assert isinstance(apart, Layout)
    assert isinstance(near, Layout)
    assert len(apart.peers) == 3
    assert len(near.peers) == 3
    assert near.stages[0].peers == near.stages[-1].peers
    assert apart.stages[0].peers != apart.stages[-1].peers
