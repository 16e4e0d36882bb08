"""Codecs that follow the links: only when it pays, and not to and fro."""

from __future__ import annotations

import random
from dataclasses import replace

from fusion_p2p.ids import Digest
from fusion_p2p.plan import schedulers
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import PlanRequest
from fusion_p2p.plan.retuning import EVERY_S, LEAST_S, PAUSE_S, SLOW_STEPS, Rhythm, retuned
from fusion_p2p.wire.job_messages import OptimiserSettings
from tests.unit.chain_graphs import BATCH, WIDTH, chain, chain_costs
from tests.unit.networks import network

GRAPH = chain(6)
COSTS = chain_costs(GRAPH)
MESSAGE = BATCH * WIDTH * 4
REQUEST = PlanRequest(Digest("ab" * 32), 8, OptimiserSettings(name="sgd"), codec="adaptive", ratio=7.5, schedule="1f1b")


def links(message_s: float) -> Network:
    """Three peers that need six seconds for a micro-batch of two layers; dense messages between them take so long."""
    return network([0, 1, 2], between=(0.01, message_s / MESSAGE))


def planned(message_s: float) -> Plan:
    made = schedulers.plan("equal-compute", GRAPH, COSTS, links(message_s), REQUEST)
    assert isinstance(made, Plan)
    return made


def codecs(plan: Plan) -> list[str]:
    return [edge.codec for edge in plan.edges]


def now(plan: Plan, message_s: float) -> Plan:
    return retuned(GRAPH, COSTS, plan, links(message_s), REQUEST)


def test_slow_links_get_lossier_codecs_on_the_same_slices_and_fast_ones_lose_them() -> None:
    dense = planned(0.01)
    assert codecs(dense) == ["none", "none"]
    slow = now(dense, 40.0)
    assert codecs(slow) == ["int4", "int4"]
    assert (slow.slice_of, slow.slices) == (dense.slice_of, dense.slices)
    assert slow.predicted_step_s > dense.predicted_step_s
    assert codecs(now(slow, 0.01)) == ["none", "none"]


def test_a_plan_made_for_these_links_stays() -> None:
    for message_s in (0.01, 1.0, 5.0, 10.0, 40.0):
        plan = planned(message_s)
        assert now(plan, message_s) is plan


def test_what_gains_little_is_left() -> None:
    plan = planned(0.5)
    assert codecs(planned(1.2)) != codecs(plan), "a new plan would have other codecs"
    assert now(plan, 1.2) is plan


def test_a_cut_through_branches_keeps_its_codecs() -> None:
    plan = planned(0.01)
    scattered = replace(plan, slice_of=(0, 1, 0, *plan.slice_of[3:]))
    assert now(scattered, 40.0) is scattered


def test_noise_never_makes_it_change_to_and_fro() -> None:
    """Whatever the links are, once fitted to them a plan stays when all figures vary by a tenth."""
    noise = random.Random(7)
    for _ in range(12):
        message_s = 10 ** noise.uniform(-1, 2)
        plan = now(planned(0.01), message_s)
        seen = {tuple(codecs(plan))}
        for _ in range(12):
            plan = now(plan, message_s * noise.uniform(0.95, 1.05))
            seen.add(tuple(codecs(plan)))
        assert len(seen) <= 2, f"{seen} at {message_s} s"


def test_links_are_looked_at_now_and_then_and_soon_after_slow_steps() -> None:
    rhythm = Rhythm(looked_at=100.0)
    assert not rhythm.due(100.0 + EVERY_S - 1)
    assert rhythm.due(100.0 + EVERY_S)
    for _ in range(SLOW_STEPS):
        assert not rhythm.due(100.0 + LEAST_S)
        rhythm = rhythm.took(1.2, 1.0)
    assert rhythm.due(100.0 + LEAST_S)
    assert not rhythm.due(100.0 + LEAST_S - 1)
    assert not rhythm.took(1.1, 1.0).due(100.0 + LEAST_S), "one step as predicted"
    assert not rhythm.looked(106.0).due(111.0)


def test_steps_that_stay_slow_call_for_one_early_look_only() -> None:
    rhythm = Rhythm(looked_at=100.0)
    for _ in range(SLOW_STEPS):
        rhythm = rhythm.took(2.0, 1.0)
    rhythm = rhythm.looked(106.0)
    for _ in range(20):
        rhythm = rhythm.took(2.1, 1.0)
    assert not rhythm.due(106.0 + EVERY_S - 1)
    for _ in range(SLOW_STEPS):
        rhythm = rhythm.took(3.0, 1.0)
    assert rhythm.due(112.0), "slower still"
    assert rhythm.changed(112.0).usual_s == 0.0


def test_after_a_change_nothing_changes_for_a_while() -> None:
    changed = Rhythm().changed(1000.0)
    assert not changed.due(1000.0 + PAUSE_S - 1)
    assert changed.due(1000.0 + PAUSE_S)
    assert replace(changed, quiet_until=0.0).due(1000.0)


def test_a_step_without_a_prediction_is_not_slow() -> None:
    assert Rhythm().took(5.0, 0.0).slow == 0
