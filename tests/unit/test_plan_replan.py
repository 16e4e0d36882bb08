"""When a running job changes its layout, and how little it then moves."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fusion_p2p.ids import Digest
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan, SlicePlan
from fusion_p2p.plan.replan import GONE, Change, Keep, Predicted, layout_of, replan
from fusion_p2p.plan.request import Terms
from tests.unit.planning_cases import random_chain, random_network

CHAIN = random_chain(0, 6)
TERMS = Terms(4)


def alike_network(num_peers: int = 4, mbit_per_s: float = 100.0) -> Network:
    """Peers and an owner."""
    network = random_network(0, num_peers, num_sites=1, has_owner=True)
    beta = np.full((num_peers + 1, num_peers + 1), 8e-6 / mbit_per_s)
    np.fill_diagonal(beta, 0.0)
    return replace(
        network,
        flops_per_s=np.full((num_peers, 3), 1e12),
        free_bytes=np.full(num_peers, 1e12),
        alpha_s=np.zeros((num_peers + 1, num_peers + 1)),
        beta_s=beta,
    )


def layout(*stages: tuple[int, int, tuple[int, ...]]) -> Layout:
    return Layout("auto", tuple(Stage(*stage) for stage in stages))


def state_bytes(first: int, last: int) -> float:
    return float(3 * (CHAIN.parameter_bytes[last] - CHAIN.parameter_bytes[first]))


def test_slices_stay_with_alike_peers() -> None:
    current = layout((0, 3, (0,)), (3, 6, (1,)))
    candidate = layout((0, 3, (2,)), (3, 6, (0,)))
    decision = replan(CHAIN, alike_network(), TERMS, current, candidate, Predicted(2.0, 1.0, 10))
    assert decision == Keep("the best layout now is the one in use")


def test_with_the_same_cut_only_what_changes_hands_moves_and_the_owner_sends_it() -> None:
    current = layout((0, 3, (0,)), (3, 6, (1,)))
    network = alike_network()
    network.beta_s[4, 2] = 8e-6  # 1 Mbit/s from the owner, while other peers are near
    uneven = replace(network, flops_per_s=np.outer([1e12, 1e12, 2e12, 2e12], np.ones(3)))
    decision = replan(CHAIN, uneven, TERMS, current, layout((0, 3, (0,)), (3, 6, (2,))), Predicted(2.0, 1.0, 10**6))
    assert isinstance(decision, Change)
    assert decision.moved_bytes == pytest.approx(state_bytes(3, 6))
    assert decision.move_s == pytest.approx(state_bytes(3, 6) * 8e-6)


def test_with_another_cut_all_of_it_leaves_the_owner_over_its_uplink() -> None:
    current = layout((0, 3, (0,)), (3, 6, (1,)))
    candidate = layout((0, 2, (3,)), (2, 6, (2,)))
    decision = replan(CHAIN, alike_network(), TERMS, current, candidate, Predicted(2.0, 1.0, 10**6))
    assert isinstance(decision, Change)
    assert decision.layout.stages == (Stage(0, 2, (0,)), Stage(2, 6, (1,)))
    assert decision.moved_bytes == pytest.approx(state_bytes(0, 6))
    assert decision.move_s == pytest.approx(state_bytes(0, 6) * 8e-8)


def test_where_the_owners_links_are_unknown_nothing_moves_without_need() -> None:
    network = replace(alike_network().select(range(4)), has_owner=False)
    candidate = layout((0, 3, (0,)), (3, 6, (1,)))
    for current_s, kind in ((100.0, Keep), (math.inf, Change)):
        decision = replan(CHAIN, network, TERMS, layout((0, 6, (0,))), candidate, Predicted(current_s, 1.0, 10**6))
        assert isinstance(decision, kind)


@pytest.mark.parametrize(("steps", "changes"), [(1, False), (10**6, True)])
def test_moving_has_to_pay(steps: int, changes: bool) -> None:
    current = layout((0, 6, (0,)))
    candidate = layout((0, 3, (0,)), (3, 6, (1,)))
    decision = replan(CHAIN, alike_network(), TERMS, current, candidate, Predicted(2.0, 1.0, steps))
    assert isinstance(decision, Change if changes else Keep)


@pytest.mark.parametrize(("candidate_s", "changes"), [(0.91, False), (0.89, True)])
def test_less_than_a_tenth_faster_is_noise(candidate_s: float, changes: bool) -> None:
    current, candidate = layout((0, 6, (0,))), layout((0, 3, (0,)), (3, 6, (1,)))
    decision = replan(CHAIN, alike_network(), TERMS, current, candidate, Predicted(1.0, candidate_s, 10**9))
    assert isinstance(decision, Change if changes else Keep)


def test_a_layout_that_cannot_run_is_changed_whatever_it_costs() -> None:
    current = layout((0, 3, (0,)), (3, 6, (GONE,)))
    candidate = layout((0, 3, (0,)), (3, 6, (1,)))
    decision = replan(CHAIN, alike_network(mbit_per_s=1), TERMS, current, candidate, Predicted(math.inf, 5.0, 1))
    assert isinstance(decision, Change)
    assert decision.moved_bytes == pytest.approx(state_bytes(3, 6))


def test_peers_of_different_rates_do_not_stand_for_each_other() -> None:
    network = alike_network()
    uneven = replace(network, flops_per_s=np.outer([1e12, 1e12, 2e12, 2e12], np.ones(3)))
    current = layout((0, 6, (0,)))
    decision = replan(CHAIN, uneven, TERMS, current, layout((0, 6, (3,))), Predicted(2.0, 1.0, 10**6))
    assert isinstance(decision, Change)
    assert decision.layout.stages[0].peers == (3,)
    about = replace(network, flops_per_s=np.outer([1e12, 1.01e12, 1.02e12, 0.99e12], np.ones(3)))
    same = replan(CHAIN, about, TERMS, current, layout((0, 6, (3,))), Predicted(2.0, 1.0, 10**6))
    assert isinstance(same, Keep)


def test_the_layout_of_a_plan() -> None:
    network = alike_network(2)
    slices = (SlicePlan(network.peers[1], 2), SlicePlan(random_network(0, 9).peers[8], 1, recompute=True))
    plan = Plan(Digest(""), "auto", 4, (0, 0, 0, 0, 1, 1), slices, ())
    assert layout_of(plan, CHAIN, network).stages == (Stage(0, 4, (1,)), Stage(4, 6, (GONE,)))
