from __future__ import annotations

import dataclasses
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion_p2p.plan.actions import classic_caps, rtt_caps, with_caps
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge, PipelineExchange, PipelineStage
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.timeline import Timeline
from tests.unit.pipeline_cases import NO_LIMIT, chain_pipeline, random_pipeline, uniform_network

SEEDS = st.integers(0, 2**32 - 1)


def stage(node: int, micro_batches: int, *, forward_s: float = 1.0, backward_s: float = 2.0) -> PipelineStage:
    return PipelineStage((node,), (forward_s,), (backward_s,), NO_LIMIT, (0,) * micro_batches)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (1, 7), (4, 1), (4, 9), (8, 32)])
def test_without_communication_every_schedule_takes_the_closed_form(stages: int, micro_batches: int) -> None:
    eager = chain_pipeline(stages, micro_batches)
    expected = (micro_batches + stages - 1) * 3.0
    for pipeline in (eager, chain_pipeline(stages, micro_batches, schedule="gpipe"), with_caps(eager, classic_caps(eager))):
        assert simulate(pipeline).step_s == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("stages", "micro_batches", "wire_s"), [(8, 32, 10.0), (8, 32, 2.5), (16, 64, 3.0), (4, 16, 0.3)])
def test_gpipe_over_slow_links_takes_the_closed_form(stages: int, micro_batches: int, wire_s: float) -> None:
    alpha_s = 0.5
    expected = sum(
        stages * compute_s + (stages - 1) * (wire_s + alpha_s) + (micro_batches - 1) * max(compute_s, wire_s)
        for compute_s in (1.0, 2.0)
    )
    pipeline = chain_pipeline(stages, micro_batches, wire_s=wire_s, alpha_s=alpha_s, schedule="gpipe")
    assert simulate(pipeline).step_s == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "wire_s", "gpipe_s", "classic_s", "eager_s"),
    [(8, 32, 10.0, 791, 831, 485), (8, 32, 2.5, 221, 321, 159), (16, 64, 3.0, 531, 755, 359), (4, 16, 0.3, 61.8, 79.4, 61.8)],
)
def test_limits_from_round_trips_are_as_fast_as_no_limits(
    stages: int, micro_batches: int, wire_s: float, gpipe_s: float, classic_s: float, eager_s: float
) -> None:
    eager = chain_pipeline(stages, micro_batches, wire_s=wire_s, alpha_s=0.5)
    caps = rtt_caps(eager)
    limited = simulate(with_caps(eager, caps))
    assert simulate(eager).step_s == pytest.approx(eager_s, rel=2e-3)
    assert simulate(dataclasses.replace(eager, schedule="gpipe")).step_s == pytest.approx(gpipe_s, rel=2e-3)
    assert simulate(with_caps(eager, classic_caps(eager))).step_s == pytest.approx(classic_s, rel=2e-3)
    assert limited.step_s <= 1.001 * eager_s
    assert max(caps) < micro_batches
    assert all(peak <= cap for (peak,), cap in zip(limited.peak_in_flight, caps, strict=True))


def test_half_duplex_takes_both_directions_from_one_link() -> None:
    full = chain_pipeline(8, 32, wire_s=10.0, alpha_s=0.5)
    half = dataclasses.replace(full, network=uniform_network(8, alpha_s=0.5, full_duplex=False))
    assert simulate(half).step_s == pytest.approx(787, rel=2e-3)
    assert simulate(half).link_busy_s[0, 1] == pytest.approx(640)
    assert simulate(full).link_busy_s[0, 1] == simulate(full).link_busy_s[1, 0] == pytest.approx(320)


def test_latency_occupies_no_link() -> None:
    pipeline = chain_pipeline(2, 4, wire_s=1.0, alpha_s=100.0, schedule="gpipe")
    assert simulate(pipeline).step_s == pytest.approx(2 * 1 + 1 + 100 + 3 + 2 * 2 + 1 + 100 + 3 * 2)


def test_the_flows_of_a_site_share_its_uplink() -> None:
    network = dataclasses.replace(
        uniform_network(4), sites=np.array([0, 0, 1, 1]), uplink_s=np.array([2.0, 0.0]), downlink_s=np.zeros(2)
    )
    sources = [stage(0, 1), stage(1, 1)]
    pipeline = Pipeline(
        network,
        (*sources, stage(2, 1), stage(3, 1)),
        (PipelineEdge(0, 2, 5.0, 5.0), PipelineEdge(1, 3, 5.0, 5.0)),
        micro_batches=1,
    )
    timeline = simulate(pipeline, trace=True)
    forward = [(span.start_s, span.end_s) for span in timeline.transfers if span.kind == "F"]
    assert forward == [(1.0, 11.0), (11.0, 21.0)]
    alone = dataclasses.replace(pipeline, network=dataclasses.replace(network, uplink_s=np.zeros(2)))
    assert [span.end_s for span in simulate(alone, trace=True).transfers if span.kind == "F"] == [6.0, 6.0]


def test_a_fast_uplink_carries_other_flows_beside_a_slow_one() -> None:
    network = dataclasses.replace(
        uniform_network(4),
        sites=np.array([0, 0, 1, 2]),
        uplink_s=np.array([0.5, 0.0, 0.0]),
        downlink_s=np.array([0.0, 4.0, 0.0]),
    )
    edges = (PipelineEdge(0, 2, 5.0, 5.0), PipelineEdge(1, 3, 5.0, 5.0))
    pipeline = Pipeline(network, (stage(0, 1), stage(1, 1), stage(2, 1), stage(3, 1)), edges, micro_batches=1)
    timeline = simulate(pipeline, trace=True)
    assert [(span.start_s, span.end_s) for span in timeline.transfers if span.kind == "F"] == [(1.0, 21.0), (3.5, 8.5)]
    assert timeline.queue_busy_s["up", 0, 0] == 5.0


def test_a_stage_waits_for_all_its_edges_and_a_gradient_from_each_reader() -> None:
    skip = PipelineEdge(0, 2, 7.0, 3.0)
    pipeline = Pipeline(
        uniform_network(3),
        tuple(stage(index, 1) for index in range(3)),
        (PipelineEdge(0, 1, 1.0, 1.0), PipelineEdge(1, 2, 1.0, 1.0), skip),
        micro_batches=1,
    )
    spans = {(span.stage, span.kind): span for span in simulate(pipeline, trace=True).tasks}
    assert spans[2, "F"].start_s == 8.0
    assert spans[1, "B"].start_s == 12.0
    assert spans[0, "B"].start_s == 15.0
    masked = dataclasses.replace(pipeline, edges=(*pipeline.edges[:2], dataclasses.replace(skip, gradient=False)))
    assert {(s.stage, s.kind): s for s in simulate(masked, trace=True).tasks}[0, "B"].start_s == 15.0
    later = dataclasses.replace(pipeline, edges=(*pipeline.edges[:2], dataclasses.replace(skip, backward_bytes=30.0)))
    assert {(s.stage, s.kind): s for s in simulate(later, trace=True).tasks}[0, "B"].start_s == 41.0


def test_replicas_share_the_micro_batches_and_sum_at_the_end() -> None:
    alone = Pipeline(uniform_network(3), (stage(0, 6),), (), micro_batches=6)
    group = PipelineStage((0, 1, 2), (1.0,) * 3, (2.0,) * 3, NO_LIMIT, (0, 1, 2, 0, 1, 2), finish_s=0.5)
    assert simulate(alone).step_s == 18.0
    together = simulate(dataclasses.replace(alone, stages=(group,)))
    assert together.step_s == 6.5
    assert together.busy_s == ((6.0, 6.0, 6.0),)


def test_a_replica_keeps_micro_batch_order_though_a_later_one_is_there() -> None:
    """As `job.flow` does: sums have one order."""
    slow_and_fast = PipelineStage((0, 1), (10.0, 1.0), (1.0, 1.0), NO_LIMIT, (0, 1))
    pipeline = Pipeline(uniform_network(3), (slow_and_fast, stage(2, 2)), (PipelineEdge(0, 1, 1.0, 1.0),), micro_batches=2)
    order = [(span.kind, span.micro_batch) for span in simulate(pipeline, trace=True).tasks if span.stage == 1]
    assert order == [("F", 0), ("B", 0), ("F", 1), ("B", 1)]


def test_stages_of_one_peer_compete_and_a_ready_backward_goes_first() -> None:
    pipeline = Pipeline(uniform_network(1), (stage(0, 2), stage(0, 2)), (PipelineEdge(0, 1, 99.0, 99.0),), micro_batches=2)
    timeline = simulate(pipeline, trace=True)
    assert timeline.step_s == 12.0
    assert timeline.link_busy_s == {}
    order = [f"{span.kind}{span.micro_batch}@{span.stage}" for span in timeline.tasks]
    assert order == ["F0@0", "F1@0", "F0@1", "B0@1", "F1@1", "B0@0", "B1@1", "B1@0"]


def test_credits_bound_what_is_on_its_way() -> None:
    """One value per round trip: 1 s of wire, 10 s there, taken at once, 10 s until the sender may send again."""
    edges = (PipelineEdge(0, 1, 1.0, 1.0, credits=1),)
    pipeline = Pipeline(uniform_network(2, alpha_s=10.0), (stage(0, 3), stage(1, 3)), edges, 3, "gpipe")
    there = [span.start_s for span in simulate(pipeline, trace=True).transfers if span.kind == "F"]
    assert there == [1.0, 22.0, 43.0]
    plenty = dataclasses.replace(pipeline, edges=(dataclasses.replace(edges[0], credits=3),))
    assert [span.start_s for span in simulate(plenty, trace=True).transfers if span.kind == "F"] == [1.0, 2.0, 3.0]


def test_the_owner_feeds_over_its_links() -> None:
    edges = (PipelineEdge(OWNER_STAGE, 0, 4.0, 0.0, credits=2),)
    pipeline = Pipeline(uniform_network(1, has_owner=True), (stage(0, 3),), edges, micro_batches=3)
    assert [span.start_s for span in simulate(pipeline, trace=True).tasks if span.kind == "F"] == [4.0, 8.0, 12.0]
    with pytest.raises(ValueError, match="the owner is no node"):
        simulate(dataclasses.replace(pipeline, network=uniform_network(1)))


def test_a_step_starts_with_the_update_and_ends_with_the_report() -> None:
    framed = dataclasses.replace(stage(0, 1), start_s=4.0, update_s=1.0, finish_s=7.0)
    assert simulate(Pipeline(uniform_network(1), (framed,), (), micro_batches=1)).step_s == 15.0


def test_shared_gradients_travel_among_the_values() -> None:
    """Gradient home: 10 s after the last backward. Sum back: it left 1 s before the step and goes before the first value."""
    stages = tuple(dataclasses.replace(stage(index, 1), finish_s=1.0) for index in range(2))
    exchange = PipelineExchange((1, 0), (0, 0), 10.0)
    pipeline = Pipeline(uniform_network(2), stages, (PipelineEdge(0, 1, 5.0, 4.0),), micro_batches=1, exchanges=(exchange,))
    timeline = simulate(pipeline, trace=True)
    spans = {(span.stage, span.kind): span.start_s for span in timeline.tasks}
    assert spans == {(0, "F"): 0.0, (1, "F"): 14.0, (1, "B"): 15.0, (0, "B"): 21.0}
    assert timeline.step_s == 17.0 + 4.0 + 10.0 + 1.0
    assert timeline.link_busy_s == {(0, 1): 15.0, (1, 0): 14.0}
    apart = dataclasses.replace(pipeline, edges=(dataclasses.replace(pipeline.edges[0], forward_bytes=0.0),))
    assert {(s.stage, s.kind): s.start_s for s in simulate(apart, trace=True).tasks}[1, "F"] == 9.0


def test_coding_goes_on_beside_computing_and_delays_what_it_codes() -> None:
    network = dataclasses.replace(uniform_network(2), memory_bytes_per_s=np.array([10.0, 5.0]))
    edge = PipelineEdge(0, 1, 2.0, 2.0, forward_coding=(30.0, 5.0), backward_coding=(10.0, 0.0))
    timeline = simulate(Pipeline(network, (stage(0, 2), stage(1, 2)), (edge,), micro_batches=2), trace=True)
    spans = {(span.stage, f"{span.kind}{span.micro_batch}"): span.start_s for span in timeline.tasks}
    assert (spans[0, "F0"], spans[0, "F1"]) == (0.0, 1.0)
    assert (spans[1, "F0"], spans[1, "F1"]) == (1.0 + 3.0 + 2.0 + 1.0, 4.0 + 3.0 + 2.0 + 1.0)
    assert spans[0, "B0"] == 10.0 + 2.0 + 2.0


def test_a_standstill_is_an_error_that_says_where() -> None:
    stuck = with_caps(chain_pipeline(2, 3), (1, 0))
    with pytest.raises(RuntimeError, match=r"stage 0.0: F1 B0 of 3, stage 1.0: F0 B0 of 3"):
        simulate(stuck)


@settings(max_examples=150, deadline=None)
@given(SEEDS)
def test_random_pipelines_end_and_respect_every_bound(seed: int) -> None:
    pipeline = random_pipeline(seed)
    timeline = simulate(pipeline, trace=True)
    assert_all_tasks_once(pipeline, timeline)
    by_node: dict[int, float] = defaultdict(float)
    for planned, busy in zip(pipeline.stages, timeline.busy_s, strict=True):
        for node, seconds in zip(planned.nodes, busy, strict=True):
            by_node[node] += seconds
    assert timeline.step_s >= max(by_node.values()) - 1e-9
    assert timeline.step_s >= max(timeline.link_busy_s.values(), default=0.0) - 1e-9
    for planned, peaks in zip(pipeline.stages, timeline.peak_in_flight, strict=True):
        assert pipeline.schedule == "gpipe" or max(peaks) <= planned.in_flight


def assert_all_tasks_once(pipeline: Pipeline, timeline: Timeline) -> None:
    """Every task once, in order, none while its device is at work, and no backward before its forward."""
    done = [(span.stage, span.kind, span.micro_batch) for span in timeline.tasks]
    every = {(i, k, m) for i in range(len(pipeline.stages)) for k in "FB" for m in range(pipeline.micro_batches)}
    assert len(done) == len(every)
    assert set(done) == every
    free: dict[int, float] = defaultdict(float)
    for span in timeline.tasks:
        node = pipeline.stages[span.stage].nodes[span.member]
        assert span.start_s >= free[node] - 1e-9
        free[node] = span.end_s
    for index, planned in enumerate(pipeline.stages):
        for member in range(len(planned.nodes)):
            own = [m for m, dealt in enumerate(planned.deal) if dealt == member]
            for kind in "FB":
                mine = [s for s in timeline.tasks if (s.stage, s.member, s.kind) == (index, member, kind)]
                assert [span.micro_batch for span in mine] == own


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.floats(1.0, 4.0))
def test_slower_links_never_make_a_gpipe_chain_faster(seed: int, slower: float) -> None:
    rng = np.random.default_rng(seed)
    count, micro_batches = int(rng.integers(2, 6)), int(rng.integers(1, 9))
    stages = tuple(
        stage(index, micro_batches, forward_s=float(rng.uniform(0.1, 2)), backward_s=float(rng.uniform(0.1, 4)))
        for index in range(count)
    )
    edges = tuple(PipelineEdge(index, index + 1, *rng.uniform(0, 5, 2).tolist()) for index in range(count - 1))
    fast = Pipeline(uniform_network(count), stages, edges, micro_batches, "gpipe")
    slow = dataclasses.replace(fast, network=uniform_network(count, beta_s=slower))
    assert simulate(slow).step_s >= simulate(fast).step_s - 1e-9


def test_it_is_fast_enough_to_search_with() -> None:
    pipeline = chain_pipeline(48, 32, wire_s=0.5, alpha_s=0.1)
    begun = time.process_time()
    simulate(pipeline)
    assert time.process_time() - begun < 0.3
