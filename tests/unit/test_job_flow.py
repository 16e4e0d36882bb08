from __future__ import annotations

import random

import pytest

from fusion_p2p.errors import WireError
from fusion_p2p.job import flow as flows
from fusion_p2p.job.topology import ReplicaEdges
from fusion_p2p.wire.frames import OWNER, Direction, Edge, Moment
from tests.pipeline_simulation import PipelineSimulation, random_plan

FEED = Edge(0, OWNER, 0, Direction.FORWARD)
OUT = Edge(7, 0, 1, Direction.FORWARD)
BACK = Edge(7, 1, 0, Direction.BACKWARD)
FIRST = ReplicaEdges(0, 0, feeds=(FEED,), forward_out=(OUT,), backward_in=(BACK,))


def drive(flow: flows.Flow, *events: flows.Event) -> tuple[flows.Flow, list[flows.Action]]:
    actions: list[flows.Action] = []
    for event in events:
        flow, new = flows.step(flow, event)
        actions += new
    return flow, actions


def runs(actions: list[flows.Action]) -> list[str]:
    return [repr(action.task) for action in actions if isinstance(action, flows.Run)]


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.row(12)
@pytest.mark.parametrize("block", range(10))
def test_no_deadlock_in_five_thousand_random_plans(block: int) -> None:
    for seed in range(500 * block, 500 * (block + 1)):
        rng = random.Random(seed)
        simulation = PipelineSimulation(random_plan(rng), rng)
        if seed % 5 == 0:
            simulation.validate(1, rng.randint(1, 9))
        simulation.run_step(1)
        if seed % 10 == 0:
            simulation.run_step(2)


def test_tasks_run_once_in_order_and_within_the_cap_even_when_streams_break() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        plan = random_plan(rng)
        simulation = PipelineSimulation(plan, rng, resend=0.2)
        simulation.run_step(1)
        for index, log in enumerate(simulation.log):
            forwards = [f"F{m}" for m in plan.micro_batches(index)]
            assert [task for task in log if task[0] == "F"] == forwards
            assert [task for task in log if task[0] == "B"] == [task.replace("F", "B") for task in forwards]
            assert log[-2:] == ["R", "U"]
            assert ("S" in log) == bool(plan.edges[index].gradients_out)
            assert simulation.most_in_flight[index] <= plan.in_flight(index)
            if plan.plan.schedule == "gpipe":
                assert log[: 2 * len(forwards)] == forwards + [task.replace("F", "B") for task in forwards]
        assert all(not sent for outbox in simulation.outboxes.values() for sent in outbox.sent.values())


def test_a_ready_backward_goes_before_the_next_forward() -> None:
    flow = flows.Flow(FIRST, micro_batches=3, in_flight=2, step=1)
    arrive = [flows.Arrived(FEED, Moment(1, m), credits=3) for m in range(3)]
    flow, actions = drive(flow, *arrive, flows.Idle(), flows.Finished(), flows.Arrived(BACK, Moment(1, 0), 2), flows.Idle())
    assert runs(actions) == ["F0", "B0"]


def test_the_cap_holds_back_a_forward() -> None:
    flow = flows.Flow(FIRST, micro_batches=3, in_flight=1, step=1)
    flow, actions = drive(flow, *[flows.Arrived(FEED, Moment(1, m), 3) for m in range(3)], flows.Idle(), flows.Finished())
    assert runs(actions) == ["F0"]
    assert flows.next_task(flow) is None


def test_a_repeated_value_is_dropped_and_one_already_taken_is_acknowledged_again() -> None:
    flow = flows.Flow(FIRST, micro_batches=2, in_flight=2, step=1)
    value = flows.Arrived(FEED, Moment(1, 0), 1)
    flow, actions = drive(flow, value, value)
    assert actions == [flows.Keep()]
    flow, actions = drive(flow, flows.Idle(), value)
    assert actions[-1] == flows.Acknowledge(FEED, Moment(1, 0))


@pytest.mark.parametrize("moment", [Moment(1, 1), Moment(3, 0)])
def test_a_value_without_credit_or_of_a_far_step_breaks_the_protocol(moment: Moment) -> None:
    flow, _ = drive(flows.Flow(FIRST, micro_batches=2, in_flight=2, step=1), flows.Arrived(FEED, Moment(1, 0), 1))
    with pytest.raises(WireError):
        flows.step(flow, flows.Arrived(FEED, moment, 1))


def test_a_decision_repeated_after_it_was_applied_is_answered_again() -> None:
    flow = flows.Flow(FIRST, micro_batches=1, in_flight=1, step=2)
    assert drive(flow, flows.Decided(1, flows.Fate.COMMIT))[1] == [flows.AnswerApplied(1)]
    with pytest.raises(WireError):
        flows.step(flow, flows.Decided(2, flows.Fate.COMMIT))


def reported() -> flows.Flow:
    """A replica that has reported step 1 and knows the feed of step 2."""
    flow = flows.Flow(FIRST, micro_batches=1, in_flight=1, step=1)
    arrivals = [
        flows.Arrived(FEED, Moment(1, 0), 2),
        flows.Arrived(BACK, Moment(1, 0), 2),
        flows.Arrived(FEED, Moment(2, 0), 2),
    ]
    flow, actions = drive(flow, *arrivals, *[flows.Idle(), flows.Finished()] * 3)
    assert runs(actions) == ["F0", "B0", "R"]
    return flow


def test_halted_it_begins_nothing_and_resumed_it_goes_on() -> None:
    flow, actions = drive(flows.Flow(FIRST, 1, 1, step=1), flows.Arrived(FEED, Moment(1, 0), 2), flows.Halt(), flows.Idle())
    assert runs(actions) == []
    assert runs(drive(flow, flows.Resume(), flows.Idle())[1]) == ["F0"]


@pytest.mark.parametrize(("fate", "task"), [(flows.Fate.COMMIT, "U"), (flows.Fate.SKIP, "K")])
def test_halted_it_still_applies_what_was_decided_but_not_the_next_step(fate: flows.Fate, task: str) -> None:
    events = [flows.Decided(1, fate), flows.Idle(), flows.Finished(), flows.Idle()]
    flow, actions = drive(flows.step(reported(), flows.Halt())[0], *events)
    assert runs(actions) == [task]
    assert (flow.step, flow.halted) == (2, True)
    assert runs(drive(flow, flows.Resume(), flows.Idle())[1]) == ["F0"]


def test_halted_after_its_report_it_waits_for_a_decision() -> None:
    flow, actions = drive(reported(), flows.Halt(), flows.Idle())
    assert runs(actions) == []
    assert flow.fate is flows.Fate.OPEN
