"""Pauses that end together."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.clock import LENIENCY_S, OFTEN_S, SELDOM_S, SystemClock, rounded_s

SOME_DAYS_S = 1e6


@given(st.floats(0.0, SOME_DAYS_S), st.floats(OFTEN_S, 600.0), st.booleans())
def test_a_pause_is_about_as_long_as_asked_and_ends_when_others_end(now: float, about_s: float, often: bool) -> None:
    pause_s = rounded_s(now, about_s, often=often)
    if about_s < SELDOM_S or often:
        step_s, shortest_s, longest_s = OFTEN_S, about_s - OFTEN_S / 2, about_s + OFTEN_S / 2
    else:
        step_s, shortest_s, longest_s = SELDOM_S, about_s + LENIENCY_S - SELDOM_S, about_s + LENIENCY_S
    assert shortest_s - 1e-6 <= pause_s <= longest_s + 1e-6
    assert pause_s > 0
    ends = (now + pause_s) / step_s
    assert ends == pytest.approx(round(ends), abs=1e-6)


@given(st.floats(0.0, SOME_DAYS_S), st.floats(0.0, OFTEN_S, exclude_max=True))
def test_a_short_pause_is_exact(now: float, about_s: float) -> None:
    assert rounded_s(now, about_s) == about_s


@pytest.mark.parametrize(("intervals", "times_a_second"), [((1.0, 2.0, 3.0, 3.4), 1), ((0.25, 1.0, 2.0, 3.0), 4)])
def test_what_comes_round_at_different_intervals_wakes_a_process_together(
    intervals: tuple[float, ...], times_a_second: int
) -> None:
    wakes = set[float]()
    for begins, interval_s in zip((0.1, 0.2, 0.03, 0.24), intervals, strict=True):
        now = begins
        while now < 60:
            now += rounded_s(now, interval_s)
            wakes.add(round(now, 6))
            now += 0.01  # what it does takes a moment
    assert len(wakes) <= 60 * times_a_second + 1


def test_the_system_clock_rounds_in_a_phase_of_its_process() -> None:
    clock = SystemClock()
    one, other = (clock.now() + clock.pause_s(about_s) for about_s in (1.0, 3.0))
    assert other - one == pytest.approx(round(other - one), abs=0.05)
