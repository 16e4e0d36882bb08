from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from contrib.benchmarks.operators import gpt2
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import Digest
from fusion_p2p.plan.chain import TiedParameter
from fusion_p2p.plan.estimate import step_estimate
from fusion_p2p.plan.fence import op_fence
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge, PipelineExchange
from fusion_p2p.plan.pipelines import group_sum_s, pipeline_of_layout, pipeline_of_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.testbed import load_testbed
from fusion_p2p.wire.frames import HEADER_BYTES
from tests.unit.chain_graphs import BATCH, WIDTH, chain, chain_costs
from tests.unit.graph_builder import GraphBuilder
from tests.unit.pipeline_cases import uniform_network
from tests.unit.planning_cases import random_chain, random_network

TESTBEDS = Path(__file__).parents[2] / "contrib" / "testbeds"
VALUE_BYTES = BATCH * WIDTH * 4
WEIGHT_BYTES = WIDTH * WIDTH * 4


def test_a_layout_becomes_stages_of_its_peers_and_edges_of_what_crosses() -> None:
    model, network = random_chain(0, 8), random_network(0, 4)
    layout = Layout("test", (Stage(0, 3, (2,)), Stage(3, 5, (0,)), Stage(5, 8, (3,))), (10.0, 1.0), "gpipe")
    pipeline = pipeline_of_layout(model, network, layout, Terms(micro_batches=4))
    flops = network.flops_per_s[2, 0]
    assert [stage.nodes for stage in pipeline.stages] == [(2,), (0,), (3,)]
    assert pipeline.stages[0].forward_s[0] == pytest.approx(model.forward_flops[:3].sum() / flops)
    assert pipeline.stages[0].backward_s[0] == pytest.approx(2 * model.forward_flops[:3].sum() / flops)
    crossing = model.crossing
    assert pipeline.edges == (
        PipelineEdge(0, 1, crossing[3] / 10, crossing[3] / 10),
        PipelineEdge(1, 2, crossing[5], crossing[5]),
    )
    again = pipeline_of_layout(model, network, dataclasses.replace(layout, recompute=True), Terms(micro_batches=4))
    assert again.stages[1].backward_s[0] == pytest.approx(1.5 * pipeline.stages[1].backward_s[0])


def test_the_owner_feeds_what_stages_read_first() -> None:
    model = dataclasses.replace(random_chain(0, 6), feed_bytes=500.0 * np.arange(7))
    network = random_network(0, 2, has_owner=True)
    layout = Layout("test", (Stage(0, 4, (0,)), Stage(4, 6, (1,))))
    edges = pipeline_of_layout(model, network, layout, Terms(micro_batches=2)).edges
    assert [(e.target, e.forward_bytes) for e in edges if e.source == OWNER_STAGE] == [(0, 2000.0), (1, 1000.0)]
    alone = dataclasses.replace(network, has_owner=False)
    assert all(e.source != OWNER_STAGE for e in pipeline_of_layout(model, alone, layout, Terms(micro_batches=2)).edges)


def test_memory_limits_what_a_stage_of_a_layout_holds() -> None:
    model, network = random_chain(0, 6), random_network(0, 2)
    layout = Layout("test", (Stage(0, 3, (0,)), Stage(3, 6, (1,))))
    roomy = dataclasses.replace(network, free_bytes=np.full(2, np.inf))
    parameters, saved = model.parameter_bytes[3], model.saved_bytes[3]
    fits_two = 4 * parameters + 2 * saved + 2.5 * model.crossing[3] + 2 * model.crossing_back[3]
    tight = dataclasses.replace(network, free_bytes=np.array([fits_two, np.inf]))
    terms = Terms(micro_batches=8)
    assert pipeline_of_layout(model, roomy, layout, terms).stages[0].in_flight > 2
    assert pipeline_of_layout(model, tight, layout, terms).stages[0].in_flight == 2
    careless = dataclasses.replace(terms, respect_memory=False)
    assert pipeline_of_layout(model, tight, layout, careless).stages[0].in_flight > 2
    nothing = dataclasses.replace(network, free_bytes=np.zeros(2))
    assert pipeline_of_layout(model, nothing, layout, terms).stages[0].in_flight == 1


def test_replicas_get_micro_batches_by_speed_and_sum_their_gradients() -> None:
    model, network = random_chain(0, 4), random_network(0, 3)
    speeds = dataclasses.replace(network, flops_per_s=np.array([1e12, 3e12, 1e12])[:, None].repeat(3, axis=1))
    layout = Layout("test", (Stage(0, 4, (0, 1)),))
    (stage,) = pipeline_of_layout(model, speeds, layout, Terms(micro_batches=8)).stages
    assert (stage.deal.count(0), stage.deal.count(1)) == (2, 6)
    assert stage.finish_s == group_sum_s(speeds, (0, 1), model.parameter_bytes[4])


def test_a_ring_sums_at_the_pace_of_its_slowest_link() -> None:
    network = uniform_network(4, beta_s=1e-6, alpha_s=0.01)
    beta = network.beta_s.copy()
    beta[1, 2] = 4e-6
    slow = dataclasses.replace(network, beta_s=beta)
    assert group_sum_s(network, (0,), 4e6) == 0.0
    assert group_sum_s(network, (0, 1, 2, 3), 4e6) == pytest.approx(2 * 3 * (1.0 + 0.01))
    assert group_sum_s(slow, (0, 1, 2, 3), 4e6) == pytest.approx(2 * 3 * (4.0 + 0.01))


def planned(codec: str = "none", *, recompute: bool = False, replicas: int = 0) -> Plan:
    """Four linear layers and a loss in two slices."""
    network = uniform_network(4)
    return Plan(
        graph=Digest("0" * 64),
        scheduler="test",
        micro_batches=3,
        slice_of=(0, 0, 1, 1, 1),
        slices=(
            SlicePlan(network.peers[2], 2, recompute, network.peers[3 : 3 + replicas], (0, 1) if replicas else (0,)),
            SlicePlan(network.peers[0], 1),
        ),
        edges=(EdgePlan(6, 0, 1, codec, credits=3),),
    )


def measured(has_owner: bool = True) -> Network:
    return dataclasses.replace(uniform_network(4, beta_s=0.01, alpha_s=0.5, has_owner=has_owner))


def test_a_plan_becomes_the_frames_that_will_be_sent() -> None:
    graph = chain(4)
    plan = planned()
    pipeline = pipeline_of_plan(graph, cut(graph, plan.slice_of), chain_costs(graph), plan, measured())
    frame = HEADER_BYTES + VALUE_BYTES
    assert pipeline.edges == (
        PipelineEdge(OWNER_STAGE, 0, frame, 0.0, credits=2),
        PipelineEdge(0, 1, frame, frame, credits=3),
    )
    assert [stage.nodes for stage in pipeline.stages] == [(2,), (0,)]
    assert [(stage.forward_s, stage.backward_s, stage.in_flight) for stage in pipeline.stages] == [
        ((2.0,), (4.0,), 2),
        ((2.0,), (4.0,), 1),
    ]
    assert pipeline.stages[0].deal == (0, 0, 0)
    link_s = 0.5 + 0.01 * frame
    first, decision_s, report_s = 0.5 + 0.01 * frame, 0.5, 0.5
    assert first > decision_s
    whole_s = simulate(dataclasses.replace(pipeline, micro_batches=1, stages=tuple(
        dataclasses.replace(stage, deal=(0,)) for stage in pipeline.stages))).step_s  # fmt: skip
    assert whole_s == pytest.approx(first + 2 * 6 + 2 * link_s + report_s)


def test_codecs_recomputation_and_replicas_of_a_plan_count() -> None:
    graph = chain(4)

    def step(plan: Plan, network: Network | None = None) -> Pipeline:
        return pipeline_of_plan(graph, cut(graph, plan.slice_of), chain_costs(graph), plan, network or measured())

    assert step(planned("bf16")).edges[-1].forward_bytes == HEADER_BYTES + VALUE_BYTES / 2
    assert step(planned(recompute=True)).stages[0].backward_s == (6.0,)
    assert step(planned()).exchanges == ()
    assert step(planned(replicas=1)).exchanges == (
        PipelineExchange((0, 0), (0, 1), 2 * WEIGHT_BYTES / 2),
        PipelineExchange((0, 1), (0, 0), 2 * WEIGHT_BYTES / 2),
    )
    assert step(planned()).stages[0].finish_s == 0.5
    assert step(planned(), measured(has_owner=False)).stages[0].finish_s == 0.0


def test_an_update_takes_memory_time_before_a_slice_can_start() -> None:
    graph, plan = chain(4), planned()
    network = dataclasses.replace(measured(), memory_bytes_per_s=np.full(4, 1000.0))
    pipeline = pipeline_of_plan(graph, cut(graph, plan.slice_of), chain_costs(graph), plan, network)
    assert pipeline.stages[0].start_s == 0.5
    assert pipeline.stages[0].update_s == pytest.approx(7 * 2 * WEIGHT_BYTES / 1000)


def test_coding_moves_memory_at_both_ends() -> None:
    graph = chain(4)

    def coding(codec: str) -> tuple[tuple[float, float], tuple[float, float]]:
        plan = planned(codec)
        pipeline = pipeline_of_plan(graph, cut(graph, plan.slice_of), chain_costs(graph), plan, measured())
        return pipeline.edges[-1].forward_coding, pipeline.edges[-1].backward_coding

    assert coding("none") == ((0.0, 0.0), (0.0, 0.0))
    assert coding("int8") == ((9.0 * VALUE_BYTES, 5.0 * VALUE_BYTES),) * 2
    assert coding("topk:5:int8") == ((42.0 * VALUE_BYTES, 34.0 * VALUE_BYTES), (4.0 * VALUE_BYTES, 4.0 * VALUE_BYTES))


def test_tied_parameters_are_exchanged() -> None:
    builder = GraphBuilder({"x": torch.ones(4, 8)}, {"weight": torch.ones(8, 8)}, {})
    hidden = builder.add("linear", input=builder.ref("x"), weight=builder.ref("weight"), bias=None)
    again = builder.add("linear", input=hidden, weight=builder.ref("weight"), bias=None)
    graph = builder.graph(builder.add("mean", self=again, dtype=None))
    plan = dataclasses.replace(planned(), slice_of=(0, 1, 1), edges=(EdgePlan(2, 0, 1),))
    costs = chain_costs(graph)
    pipeline = pipeline_of_plan(graph, cut(graph, plan.slice_of), costs, plan, measured())
    tied = HEADER_BYTES + WEIGHT_BYTES
    assert pipeline.exchanges == (PipelineExchange((1, 0), (0, 0), tied),)
    group = dataclasses.replace(plan.slices[1], replicas=(measured().peers[1],), deal=(0, 1))
    both = dataclasses.replace(plan, slices=(plan.slices[0], group))
    exchanges = pipeline_of_plan(graph, cut(graph, plan.slice_of), costs, both, measured()).exchanges
    assert [exchange for exchange in exchanges if exchange.num_bytes] == [
        PipelineExchange((1, 0), (0, 0), tied),
        PipelineExchange((1, 1), (0, 0), tied),
    ]


def test_a_peer_that_the_network_lacks_is_an_error() -> None:
    graph, plan = chain(4), planned()
    few = uniform_network(2)
    with pytest.raises(KeyError):
        pipeline_of_plan(graph, cut(graph, plan.slice_of), chain_costs(graph), plan, few)


@pytest.mark.parametrize(
    ("name", "gpipe_s", "limited_s"),
    [("t1-24-gpus-2-sites", 87.8, 51.1), ("t2-24-gpus-3-sites", 21.5, 14.2), ("t3-48-gpus-3-sites", 53.9, 35.5)],
)
def test_op_fence_of_gpt2_xl_takes_what_formula_and_an_independent_prototype_say(
    name: str, gpipe_s: float, limited_s: float
) -> None:
    model, network = gpt2(48, 1600, 25, batch=1), load_testbed(TESTBEDS / f"{name}.json")
    terms = Terms(micro_batches=8, respect_memory=False)
    layout = op_fence(model, network, terms)
    assert isinstance(layout, Layout)
    pipeline = pipeline_of_layout(model, network, layout, terms)
    step_s = simulate(pipeline).step_s
    assert step_s == pytest.approx(limited_s, rel=5e-3)
    assert step_s == pytest.approx(step_estimate(model, network, layout, 8), rel=0.05)
    assert simulate(dataclasses.replace(pipeline, schedule="gpipe")).step_s == pytest.approx(gpipe_s, rel=5e-3)


def test_stages_of_a_layout_exchange_the_parameters_that_they_share() -> None:
    model = dataclasses.replace(random_chain(0, 6), tied=(TiedParameter(1000.0, (0, 1, 5)), TiedParameter(50.0, (2, 3))))
    layout = Layout("test", (Stage(0, 2, (0,)), Stage(2, 4, (1,)), Stage(4, 6, (2, 3))))
    pipeline = pipeline_of_layout(model, random_network(0, 4), layout, Terms(micro_batches=2))
    assert pipeline.exchanges == (PipelineExchange((2, 0), (0, 0), 1000.0), PipelineExchange((2, 1), (0, 0), 1000.0))
