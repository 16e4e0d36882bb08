"""When the benchmark of recovery takes every slice to have a copy."""

from __future__ import annotations

from contrib.benchmarks.recovering import says_that_all_are_held

ALL = "12:00:00 INFO view: copies of step 30: 3 of 3 slices held by 2 spares"


def test_the_newest_word_on_copies_counts_and_another_plan_makes_it_worthless() -> None:
    assert not says_that_all_are_held([])
    assert says_that_all_are_held([ALL, "something else"])
    assert not says_that_all_are_held([ALL, "copies of step 30: 2 of 3 slices held by 1 spare"])
    assert not says_that_all_are_held([ALL, "new plan after step 32: slice 0 moves to peer x"])
    assert not says_that_all_are_held([ALL, "WARNING recovery: epoch=3 broken after step 39: refused"])
    assert says_that_all_are_held([ALL, "lost peer x: going back to step 30", ALL])
