"""How often copies are made: by hand against the formulas, and by simulating the loss they are meant to make least."""

from __future__ import annotations

import math
import random

import pytest

from fusion_p2p.job.copy_interval import BUDGET, LONGEST_S, Laps, LossRate, interval_s, shortest_s


def test_the_interval_is_that_of_young_and_daly() -> None:
    assert interval_s(cost_s=2.0, mean_time_s=3600.0, last_s=1.0) == pytest.approx(math.sqrt(2 * 2.0 * 3600.0))  # 120 s
    assert interval_s(cost_s=0.5, mean_time_s=100.0, last_s=1.0) == pytest.approx(
        12.5
    )  # sqrt(100) = 10, but 0.5 is 4 % of 12.5


@pytest.mark.parametrize(
    ("cost_s", "mean_time_s", "last_s", "expected"),
    [
        (1.0, 1e9, 0.0, LONGEST_S),  # reliable peers: ten minutes all the same
        (1.0, 3600.0, 700.0, 700.0),  # a slow uplink: never before the last copy has arrived
        (1.0, 1.0, 0.0, 1.0 / BUDGET),  # peers that go every second: no more than the budget
        (30.0, 1e9, 0.0, 750.0),  # the budget holds before the ten minutes
    ],
)
def test_the_interval_has_bounds(cost_s: float, mean_time_s: float, last_s: float, expected: float) -> None:
    assert interval_s(cost_s, mean_time_s, last_s) == pytest.approx(expected)
    assert shortest_s(cost_s, last_s) <= interval_s(cost_s, mean_time_s, last_s)


def test_no_interval_near_it_loses_less_time() -> None:
    """Renewals: each loss costs what was done since the last copy; each copy its cost."""
    cost_s, mean_s, rng = 4.0, 900.0, random.Random(5)
    losses = [rng.expovariate(1 / mean_s) for _ in range(20_000)]

    def share_lost(interval: float) -> float:
        lost = sum((time // (interval + cost_s)) * cost_s + time % (interval + cost_s) for time in losses)
        return lost / sum(losses)

    best = interval_s(cost_s, mean_s, 0.0)
    assert best == pytest.approx(100.0)  # sqrt(7200) = 85 would be 4.7 % of the time: the budget says 100
    free = math.sqrt(2 * cost_s * mean_s)
    assert share_lost(free) < min(share_lost(free / 2), share_lost(free * 2))
    assert share_lost(best) < share_lost(free) * 1.05


def test_losses_that_were_seen_replace_the_prior() -> None:
    assert LossRate().mean_time_s(4) == pytest.approx(900.0)  # one an hour and peer
    assert LossRate(losses=0, peer_s=35 * 3600.0).mean_time_s(4) == pytest.approx(9 * 3600.0)
    assert LossRate(losses=60, peer_s=600.0 * 6).mean_time_s(6) == pytest.approx(7200 / 61 / 6)


def laps(durations: list[tuple[float, bool]]) -> Laps:
    """Steps of these durations; True: a copy was on its way at the end of it, or began in it."""
    state, now = Laps().decided(1, 0.0, copying=False), 0.0
    for step, (duration, copying) in enumerate(durations, 2):
        now += duration
        state = state.decided(step, now, copying=copying)
    return state


def test_a_copy_costs_what_its_steps_take_beyond_others() -> None:
    state = laps([(1.0, False)] * 5)
    assert state.cost_s(0, 0.0) == pytest.approx(0.02)
    assert state.cost_s(2_000_000_000, 0.0) == pytest.approx(2.02)  # not measured yet: as long as memory takes
    assert state.cost_s(0, 8.0) == pytest.approx(2.02)  # or a quarter of the time that the last one took
    state = state.touch()
    for step, (now, copying) in enumerate([(7.5, True), (8.75, True), (9.8, False), (10.8, False)], 7):
        state = state.decided(step, now, copying=copying)
    assert state.cost_s(0, 100.0) == pytest.approx(1.8)  # 2.5 + 1.25 + 1.05, beyond three quiet ones


def test_one_odd_round_does_not_change_the_cost() -> None:
    state, now, step = laps([(1.0, False)] * 5), 5.0, 6
    for excess in (0.5, 0.5, 30.0, 0.5):  # the third one met a validation
        state = state.touch()
        for duration in (1.0 + excess, 1.0, 1.0):
            now, step = now + duration, step + 1
            state = state.decided(step, now, copying=False)
    assert state.cost_s(0, 100.0) == pytest.approx(0.5)


def test_going_back_is_no_step() -> None:
    state = laps([(1.0, False)] * 3)
    assert state.decided(2, 100.0, copying=False).quiet_s == state.quiet_s


def test_the_first_copy_is_measured_when_others_steps_are_known() -> None:
    state, now = Laps().decided(1, 0.0, copying=False).touch(), 0.0
    for step, lap in enumerate([3.0, 1.0, 1.0, 1.0], 2):
        assert state.cost_s(0, 40.0) == pytest.approx(10.02)
        now += lap
        state = state.decided(step, now, copying=False)
    assert state.cost_s(0, 40.0) == pytest.approx(2.0)
