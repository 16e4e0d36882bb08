"""Chaos: which faults happen when, and what is said to have followed them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrib.chaos.aftermath import Aftermath, Noted, aftermaths, first_commit_after, longest_wait_s
from contrib.chaos.doing import Done
from contrib.chaos.schedule import AWAY, EVERY_KIND, Fault, Kind, change, schedule
from contrib.chaos.trial import Outcome, figures_of


@given(st.integers(0, 1000), st.sampled_from([EVERY_KIND, tuple(kind for kind in Kind if kind is not Kind.CUT)]))
def test_fifty_faults_have_every_kind_five_times_and_as_many_newcomers_as_are_taken_away(seed: int, kinds: tuple[Kind, ...]):
    faults = schedule(seed, 50, 10.0, kinds)
    counts = Counter(fault.kind for fault in faults)
    assert set(counts) == set(kinds)
    assert min(counts.values()) >= 5
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    more = 0
    for fault in faults:
        more += change(fault.kind)
        assert -1 <= more <= 1


def test_a_seed_gives_the_same_faults_again_and_their_mean_distance_is_as_asked():
    faults = schedule(3, 2000, 10.0)
    assert faults == schedule(3, 2000, 10.0)
    assert faults != schedule(4, 2000, 10.0)
    assert faults[-1].at_s / len(faults) == pytest.approx(10.0, rel=0.1)


def test_short_and_long_freezes_take_turns():
    lasting = [fault.lasts_s for fault in schedule(1, 60, 10.0) if fault.kind is Kind.FREEZE]
    assert lasting[0] < 3.0 < lasting[1]
    assert lasting[:2] == lasting[2:4]


def test_only_what_takes_a_peer_away_calls_for_a_newcomer():
    assert {kind for kind in Kind if change(kind) < 0} == AWAY
    assert [kind for kind in Kind if change(kind) > 0] == [Kind.JOIN]


def ledger(*lines: tuple[float, str, int]) -> list[Noted]:
    """(time, kind, step); the step of a start is that of its state."""
    return [Noted(at_s, {"kind": kind, "state_step" if kind == "start" else "step": step}) for at_s, kind, step in lines]


COMMITS = [(float(step), "commit", step) for step in range(1, 11)]


def test_steps_that_are_made_again_and_the_wait_for_a_new_one_are_the_faults():
    """Killed at 10.5; the epoch from step 8 on makes 9 and 10 again, 11 comes at 15.5 instead of at 11."""
    noted = ledger(
        (0.0, "start", 0), *COMMITS, (13.0, "start", 8), (14.0, "commit", 9), (14.5, "commit", 10), (15.5, "commit", 11)
    )
    assert aftermaths([10.5], noted) == [Aftermath(steps_repeated=2, seconds_lost=pytest.approx(4.5), epochs=1)]
    assert first_commit_after(noted, 10.5) == 14.0
    assert longest_wait_s(noted, 10.5, 20.0) == 4.0


def test_a_wait_in_which_several_faults_lie_is_the_first_ones_and_one_that_changes_nothing_costs_nothing():
    noted = ledger((0.0, "start", 0), *COMMITS, (15.0, "start", 10), (16.0, "commit", 11), (17.0, "commit", 12))
    borne, first, second = aftermaths([4.5, 11.0, 12.0], noted)
    assert borne == Aftermath(seconds_lost=pytest.approx(0.0))
    assert first == Aftermath(seconds_lost=pytest.approx(5.0))
    assert second == Aftermath(epochs=1)


def test_what_drags_on_without_a_fault_and_without_an_epoch_is_nobodys():
    noted = ledger((0.0, "start", 0), *COMMITS, (11.0, "commit", 11), (17.0, "commit", 12), (18.0, "commit", 13))
    assert aftermaths([10.5], noted) == [Aftermath(seconds_lost=pytest.approx(0.0))]


def test_steps_that_were_skipped_are_made_again_too():
    noted = ledger((0.0, "start", 0), (1.0, "commit", 1), (2.0, "skip", 2), (4.0, "start", 1), (5.0, "skip", 2))
    assert aftermaths([3.0], noted)[0].steps_repeated == 1


def outcome(*kinds: Kind) -> Outcome:
    done = tuple(Done(Fault(float(at_s), kind, 0.0), float(at_s), "peer-1") for at_s, kind in enumerate(kinds))
    return Outcome(done, tuple(Aftermath(steps_repeated=2, seconds_lost=0.5) for _ in done), 60.0, ())


def test_the_figures_of_trials_are_those_of_the_one_with_the_fewest_faults():
    many, few = outcome(*Kind, *Kind, Kind.JOIN), outcome(*Kind)
    assert figures_of([many, few]) == {
        "faults": float(len(Kind)),
        "faults_of_each_kind_min": 1.0,
        "steps_repeated": 2.0 * (3 * len(Kind) + 1),
        "seconds_lost": 0.5 * (3 * len(Kind) + 1),
    }


def test_a_trial_that_did_not_come_to_its_end_counts_as_one_without_faults():
    assert figures_of([outcome(*Kind), None])["faults"] == 0.0
    assert figures_of([None])["faults_of_each_kind_min"] == 0.0
