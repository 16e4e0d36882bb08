from __future__ import annotations

import dataclasses
import random
from collections import defaultdict

import pytest

from fusion_p2p.job import flow as flows
from fusion_p2p.plan.actions import action_table, classic_caps, rows, rtt_caps, table, wanted_credits, with_caps
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge, PipelineStage
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.timeline import Timeline
from fusion_p2p.wire.frames import OWNER, Direction, Edge, Moment
from tests.pipeline_simulation import RandomPlan, random_plan
from tests.unit.pipeline_cases import NO_LIMIT, chain_pipeline, uniform_network

CLASSIC = """\
stage 0 | F0 F1 F2 B0 F3 B1 B2 B3
stage 1 | F0 F1 B0 F2 B1 F3 B2 B3
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3"""
GPIPE = """\
stage 0 | F0 F1 F2 F3 B0 B1 B2 B3
stage 1 | F0 F1 F2 F3 B0 B1 B2 B3
stage 2 | F0 F1 F2 F3 B0 B1 B2 B3"""
FROM_ROUND_TRIPS = """\
stage 0 | F0 F1 F2 F3 F4 F5 B0 B1 B2 B3 B4 B5
stage 1 | F0 F1 F2 F3 B0 F4 F5 B1 B2 B3 B4 B5
stage 2 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5"""
REPLICAS = """\
stage 0   | F0 F1 F2 F3 B0 B1 B2 B3
stage 1.0 | F0 B0 F2 B2
stage 1.1 | F1 B1 F3 B3"""


def test_classic_1f1b_reads_as_in_the_books() -> None:
    eager = chain_pipeline(3, 4, wire_s=0.01)
    assert classic_caps(eager) == (3, 2, 1)
    assert action_table(with_caps(eager, classic_caps(eager))) == CLASSIC


def test_gpipe_reads_as_in_the_books() -> None:
    assert action_table(chain_pipeline(3, 4, wire_s=0.01, schedule="gpipe")) == GPIPE


def test_slow_links_are_hidden_by_more_in_flight() -> None:
    equal = chain_pipeline(3, 6, wire_s=2.0)
    quicker = dataclasses.replace(equal.stages[1], forward_s=(0.9,), backward_s=(1.9,))
    eager = dataclasses.replace(equal, stages=(equal.stages[0], quicker, equal.stages[2]))
    assert rtt_caps(eager) == (6, 5, 2)
    assert action_table(with_caps(eager, rtt_caps(eager))) == FROM_ROUND_TRIPS


def test_replicas_have_a_row_each() -> None:
    stages = (
        PipelineStage((0,), (1.0,), (2.0,), NO_LIMIT, (0,) * 4),
        PipelineStage((1, 2), (2.0, 2.0), (4.0, 2.0), NO_LIMIT, (0, 1, 0, 1)),
    )
    edges = (PipelineEdge(0, 1, 0.5, 0.5),)
    assert action_table(Pipeline(uniform_network(3), stages, edges, 4)) == REPLICAS


def test_an_idle_pipeline_has_limits_too() -> None:
    nothing = Pipeline(uniform_network(1), (PipelineStage((0,), (0.0,), (0.0,), 1, (0, 0)),), (), 2)
    assert rtt_caps(nothing) == (2,)


def test_the_members_of_a_stage_share_its_limit() -> None:
    one = chain_pipeline(2, 32, wire_s=1.0, alpha_s=9.0)
    (before, _) = rtt_caps(one)
    members = (0, 2, 3)
    group = dataclasses.replace(
        one.stages[0], nodes=members, forward_s=(3.0,) * 3, backward_s=(6.0,) * 3, deal=tuple(m % 3 for m in range(32))
    )
    pipeline = Pipeline(uniform_network(4, alpha_s=9.0), (group, one.stages[1]), one.edges, 32)
    assert before == 10  # 26 / 3 + 1
    assert rtt_caps(pipeline)[0] == 4  # (32 / 3.09 + 1) / 3


def test_credits_cover_the_round_trip_of_latency() -> None:
    pipeline = chain_pipeline(2, 32, wire_s=3.0, alpha_s=9.0)
    assert wanted_credits(pipeline) == (8,)
    assert wanted_credits(chain_pipeline(2, 32, wire_s=3.0)) == (2,)
    unlimited = simulate(pipeline).step_s
    edge = pipeline.edges[0]
    limited = {n: simulate(dataclasses.replace(pipeline, edges=(dataclasses.replace(edge, credits=n),))) for n in (2, 8)}
    assert limited[8].step_s == pytest.approx(unlimited)
    assert limited[2].step_s > 2 * unlimited


@pytest.mark.parametrize("seed", range(150))
def test_the_flow_machine_runs_what_the_simulator_says(seed: int) -> None:
    """Drive `job.flow` with the arrivals of the simulated step: the same tasks in the same order, and no credit overdrawn."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    pipeline = as_pipeline(plan, rng)
    timeline = simulate(pipeline, trace=True)
    assert table(real_rows(plan, pipeline, timeline)) == table(rows(timeline.tasks))


def as_pipeline(plan: RandomPlan, rng: random.Random) -> Pipeline:
    """The plan with random times, every value an edge of its own, every replica on a peer of its own."""
    numbers: dict[int, list[int]] = defaultdict(list)
    for number, replica in enumerate(plan.plan.replicas):
        numbers[replica.slice].append(number)
    returning = {(edge.value, edge.target, edge.source) for part in plan.edges for edge in part.backward_in}
    stages = tuple(
        PipelineStage(
            nodes=tuple(numbers[index]),
            forward_s=tuple(rng.uniform(0.5, 2.0) for _ in numbers[index]),
            backward_s=tuple(rng.uniform(0.5, 4.0) for _ in numbers[index]),
            in_flight=part.in_flight,
            deal=tuple(part.deal[m % len(part.deal)] for m in range(plan.plan.micro_batches)),
        )
        for index, part in enumerate(plan.plan.slices)
    )
    by_slice = {(value, plan.plan.replicas[s].slice, plan.plan.replicas[t].slice) for value, s, t in returning}
    edges = [
        PipelineEdge(e.source, e.target, *(rng.uniform(0.1, 3.0) for _ in "FB"),
                     gradient=(e.value, e.target, e.source) in by_slice or (e.value, e.source, e.target) in by_slice,
                     credits=e.credits)
        for e in plan.plan.edges
    ]  # fmt: skip
    feeds = [
        PipelineEdge(OWNER_STAGE, part.slice, rng.uniform(0.1, 3.0), 0.0, credits=2)
        for part in plan.edges
        if part.replica == numbers[part.slice][0]
        for _ in part.feeds
    ]
    network = uniform_network(len(plan.plan.replicas), alpha_s=rng.uniform(0.0, 5.0), has_owner=True)
    return Pipeline(network, stages, (*edges, *feeds), plan.plan.micro_batches, plan.plan.schedule)


def real_rows(plan: RandomPlan, pipeline: Pipeline, timeline: Timeline) -> dict[tuple[int, int], list[str]]:
    """What the flow machine of every replica runs when values arrive, and tasks end, as simulated."""
    machines = {
        number: flows.Flow(part, len(plan.micro_batches(number)), plan.in_flight(number), 1, plan.plan.schedule)
        for number, part in enumerate(plan.edges)
    }
    ran: dict[tuple[int, int], list[str]] = defaultdict(list)
    for _, replica, event in sorted(real_events(plan, pipeline, timeline), key=lambda entry: entry[0]):
        flow, _ = flows.step(machines[replica], event)
        task = flows.next_task(flow)
        if task is not None and task.kind in (flows.TaskKind.FORWARD, flows.TaskKind.BACKWARD):
            flow, _ = flows.step(flow, flows.Idle())
            ran[key_of(pipeline, replica)].append(repr(task))
        machines[replica] = flow
    return ran


def real_events(plan: RandomPlan, pipeline: Pipeline, timeline: Timeline) -> list[tuple[float, int, flows.Event]]:
    events: list[tuple[float, int, flows.Event]] = [
        (span.end_s, pipeline.stages[span.stage].nodes[span.member], flows.Finished()) for span in timeline.tasks
    ]
    feeds: dict[int, list[int]] = defaultdict(list)
    for index, edge in enumerate(pipeline.edges):
        if edge.source == OWNER_STAGE:
            feeds[edge.target].append(index)
    for span in timeline.transfers:
        edge = pipeline.edges[span.edge]
        direction = Direction.FORWARD if span.kind == "F" else Direction.BACKWARD
        if edge.source == OWNER_STAGE:
            value = plan.edges[span.target].feeds[feeds[edge.target].index(span.edge)].value
            real = Edge(value, OWNER, span.target, direction)
        else:
            real = Edge(plan.plan.edges[span.edge].value, span.source, span.target, direction)
        events.append((span.arrival_s, span.target, flows.Arrived(real, Moment(1, span.micro_batch), plan.credits[real])))
    return events


def key_of(pipeline: Pipeline, replica: int) -> tuple[int, int]:
    return next((i, stage.nodes.index(replica)) for i, stage in enumerate(pipeline.stages) if replica in stage.nodes)
