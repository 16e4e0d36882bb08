"""A job that moves in vain moves less and less; what a move brought is measured."""

from __future__ import annotations

from fusion_p2p.plan.reluctance import (
    COMPARED_STEPS,
    HASTY_GAIN,
    LONGEST_PAUSE_S,
    MOST_GAIN,
    PAUSE_S,
    WARMING_STEPS,
    Reluctance,
)
from fusion_p2p.plan.replan import GAIN


def after_moving(state: Reluctance, before_s: float, after_s: float, now: float) -> Reluctance:
    """Moved, and so many steps made since that it is known what it brought."""
    state = state.moved(before_s, now)
    for step_s in [10.0] * WARMING_STEPS + [after_s] * COMPARED_STEPS:
        state = state.took(step_s, now)
    return state


def test_usually_a_tenth_is_enough() -> None:
    assert Reluctance().gain(0.0) == GAIN
    assert Reluctance().took(1.0, 0.0) == Reluctance(), "only steps after a move are compared"


def test_soon_after_a_move_only_a_much_better_plan_counts() -> None:
    state = Reluctance().moved(1.0, now=0.0)
    assert state.gain(PAUSE_S - 1) == HASTY_GAIN
    assert state.gain(PAUSE_S) == GAIN


def test_a_move_that_paid_is_followed_by_the_usual_pause_and_the_first_steps_do_not_count() -> None:
    state = after_moving(Reluctance(), before_s=1.0, after_s=0.8, now=0.0)
    assert state == Reluctance(quiet_until=PAUSE_S)
    one_outlier = Reluctance().moved(1.0, 0.0)
    for step_s in [0.5] * WARMING_STEPS + [0.8] * (COMPARED_STEPS - 1) + [30.0]:
        one_outlier = one_outlier.took(step_s, 0.0)
    assert one_outlier.vain == 0


def test_every_move_that_brought_nothing_raises_what_is_wanted_and_doubles_the_pause() -> None:
    state, wanted, pauses = Reluctance(), [], []
    for _ in range(10):
        state = after_moving(state, before_s=1.0, after_s=0.99, now=0.0)
        wanted.append(round(state.gain(LONGEST_PAUSE_S), 6))
        pauses.append(state.quiet_until)
    assert wanted == [0.2, 0.3, 0.4, *[MOST_GAIN] * 7]
    assert pauses[:3] == [2 * PAUSE_S, 4 * PAUSE_S, 8 * PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert after_moving(state, before_s=1.0, after_s=0.5, now=0.0).vain == 0, "one that pays, and all is forgiven"


def test_what_a_move_brought_is_not_told_from_steps_after_something_else_changed() -> None:
    state = Reluctance().moved(1.0, now=0.0).disturbed()
    for _ in range(WARMING_STEPS + COMPARED_STEPS):
        state = state.took(1.0, 0.0)
    assert state.vain == 0
