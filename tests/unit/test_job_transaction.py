from __future__ import annotations

import itertools
import math

import pytest

from fusion_p2p.errors import WireError
from fusion_p2p.job import transaction as transactions
from fusion_p2p.job.flow import Fate
from fusion_p2p.job.transaction import Applied, Complete, Decide, Report, Reported, StopRun, Terms, Transaction

TERMS = Terms(answers=((5, 7), (6,)), losses=((), (0, 1)), max_norm=1.0)
FIRST = Reported(0, 1, Report((9.0, 4.0), ()))
LAST = Reported(1, 1, Report((3.0,), (2.0, 4.0)))


def drive(state: Transaction, *events: transactions.Event) -> tuple[Transaction, list[transactions.Action]]:
    actions: list[transactions.Action] = []
    for event in events:
        state, new = transactions.step(state, event)
        actions += new
    return state, actions


@pytest.mark.row(35)
def test_the_norm_is_over_all_slices_in_graph_order_whoever_reports_first() -> None:
    for order in itertools.permutations([FIRST, LAST]):
        state, actions = drive(Transaction(TERMS, 1), *order)
        (decide,) = actions
        assert decide == Decide(1, Fate.COMMIT, pytest.approx(1 / (4 + 1e-6)), 3.0, 4.0)
        assert transactions.squares_in_graph_order(state) == [9.0, 3.0, 4.0]


def test_a_step_is_complete_once_every_slice_has_applied_it() -> None:
    state, actions = drive(Transaction(TERMS, 1), FIRST, LAST, Applied(1, 1), Applied(1, 1))
    assert [type(action) for action in actions] == [Decide]
    state, actions = drive(state, Applied(0, 1))
    assert actions == [Complete(1)]
    assert state.step == 2


def test_repetitions_change_nothing() -> None:
    state, _ = drive(Transaction(TERMS, 1), FIRST, FIRST)
    assert len(state.reports) == 1
    state, actions = drive(state, LAST, LAST, FIRST)
    assert len(actions) == 1


def test_a_report_may_come_before_the_last_step_is_known_to_be_applied() -> None:
    early = Reported(1, 2, Report((1.0,), (1.0, 1.0)))
    state, actions = drive(Transaction(TERMS, 1), FIRST, LAST, Applied(1, 1), early, Reported(0, 2, Report((1.0, 1.0), ())))
    assert len(actions) == 1
    state, actions = drive(state, Applied(0, 1))
    assert [type(action) for action in actions] == [Complete, Decide]
    assert actions[1].step == 2


@pytest.mark.row(30)
@pytest.mark.parametrize(
    "bad", [Report((math.inf,), (2.0, 4.0)), Report((3.0,), (math.nan, 4.0)), Report((1e300,), (1.0, 1.0))]
)
def test_a_step_that_is_not_finite_is_skipped_and_three_in_a_row_stop_the_run(bad: Report) -> None:
    state = Transaction(TERMS, 1)
    for step in (1, 2, 3):
        state, actions = drive(state, Reported(0, step, FIRST.report), Reported(1, step, bad))
        assert actions[0].fate is Fate.SKIP
        assert any(isinstance(action, StopRun) for action in actions) == (step == 3)
        state, _ = drive(state, Applied(0, step), Applied(1, step))


def test_a_good_step_resets_the_count_of_skips() -> None:
    bad = Report((math.nan,), (1.0, 1.0))
    state = Transaction(TERMS, 1)
    for step, report in enumerate([bad, bad, LAST.report, bad, bad], start=1):
        state, actions = drive(state, Reported(0, step, FIRST.report), Reported(1, step, report))
        assert not any(isinstance(action, StopRun) for action in actions)
        state, _ = drive(state, Applied(0, step), Applied(1, step))


@pytest.mark.parametrize(
    "event",
    [
        Reported(0, 1, Report((1.0,), ())),
        Reported(1, 1, Report((1.0,), (1.0,))),
        Reported(0, 1, Report((1.0, 1.0), (1.0, 1.0))),
        Reported(0, 1, Report((-1.0, 1.0), ())),
        Applied(0, 1),
    ],
)
def test_what_a_slice_must_not_say_breaks_the_protocol(event: transactions.Event) -> None:
    with pytest.raises(WireError):
        transactions.step(Transaction(TERMS, 1), event)
