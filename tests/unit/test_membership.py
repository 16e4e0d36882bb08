"""Membership: incarnations, suspicion, eviction, hearsay. A table of event sequences and what is left of the members."""

from __future__ import annotations

from functools import reduce

import pytest

from fusion_p2p.ids import PeerId
from fusion_p2p.swarm.membership import (
    MAX_GONE,
    Action,
    Confirmed,
    Event,
    Gone,
    Heard,
    Ignored,
    Joined,
    Left,
    Listed,
    Membership,
    Suspected,
    Tick,
    step,
)
from fusion_p2p.swarm.settings import WAN

A, B = PeerId("a"), PeerId("b")
WATCHING, NOT_WATCHING = Tick(observing=True), Tick(observing=False)


def beat(peer: PeerId = A, incarnation: int = 1, sequence: int = 1) -> Heard:
    return Heard(peer, incarnation, holds=False, sequence=sequence)


def play(events: list[tuple[float, Event]], state: Membership | None = None) -> tuple[Membership, list[Action]]:
    def one(so_far: tuple[Membership, list[Action]], event: tuple[float, Event]) -> tuple[Membership, list[Action]]:
        after, actions = step(so_far[0], event[1], event[0], WAN)
        return after, [*so_far[1], *actions]

    return reduce(one, events, (state or Membership(), []))


def ticks(start: float, end: float, tick: Tick = WATCHING) -> list[tuple[float, Event]]:
    return [(start + i, tick) for i in range(int(end - start) + 1)]


def test_the_silent_are_suspected_then_evicted() -> None:
    state, actions = play([(0.0, beat()), *ticks(0, 8)])
    assert actions[:2] == [Joined(A), Suspected(A)]
    assert isinstance(actions[2], Gone)
    assert "second observer" in actions[2].reason
    assert state.members == {}


@pytest.mark.parametrize("answer", [Confirmed(A), beat(sequence=2)])
def test_a_suspect_that_is_heard_stays(answer: Event) -> None:
    state, actions = play([(0.0, beat()), *ticks(0, 4), (4.5, answer), *ticks(5, 7)])
    assert actions == [Joined(A), Suspected(A)]
    assert state.members[A].suspected_at is None


@pytest.mark.row(11)
def test_an_evicted_incarnation_stays_gone_and_the_next_one_is_welcome() -> None:
    state, _ = play([(0.0, beat()), *ticks(0, 8)])
    assert state.is_gone(A, 1)
    assert not state.is_gone(A, 2)
    same, actions = play([(9.0, beat(sequence=9))], state)
    assert same.members == {}
    assert actions == [Ignored(A, "this incarnation is gone")]
    back, actions = play([(9.0, beat(incarnation=2))], state)
    assert actions == [Joined(A)]
    assert back.members[A].incarnation == 2


def test_an_observer_that_slept_accuses_nobody() -> None:
    state, actions = play([(0.0, beat()), (0.0, WATCHING), (60.0, WATCHING), (61.0, WATCHING)])
    assert actions == [Joined(A)]
    assert state.members[A].heard_at == 60.0


def test_who_does_not_coordinate_forgets_instead_of_accusing() -> None:
    _, actions = play([(0.0, beat()), *ticks(0, 15, NOT_WATCHING)])
    assert actions == [Joined(A)]
    state, actions = play([(0.0, beat()), *ticks(0, 16, NOT_WATCHING)])
    assert actions == [Joined(A), Gone(A, "not heard lately by anybody")]
    assert not state.is_gone(A, 1)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (beat(incarnation=4, sequence=9), "an older incarnation"),
        (beat(incarnation=5, sequence=5), "a later beat came first"),
        (Listed(A, 5, False, heard_ago_s=3.0), "heard later"),
        (Listed(B, 1, False, heard_ago_s=15.5), "not heard lately by anybody"),
        (Confirmed(B), "confirmed too late"),
        (Left(A, 4), "an older incarnation left"),
    ],
)
def test_refusals_have_reasons(event: Event, reason: str) -> None:
    before, _ = play([(8.0, beat(incarnation=5, sequence=5))])
    after, actions = play([(10.0, event)], before)
    assert after == before
    assert [action.reason for action in actions if isinstance(action, Ignored)] == [reason]


def test_hearsay_introduces_and_refreshes_members_but_never_the_gone() -> None:
    state, actions = play([(10.0, Listed(A, 1, True, 2.0)), (11.0, Listed(A, 1, True, 1.0)), (12.0, Left(A, 1))])
    assert actions == [Joined(A), Gone(A, "left")]
    _, actions = play([(12.5, Listed(A, 1, True, 0.1))], state)
    assert actions == [Ignored(A, "this incarnation is gone")]


def test_a_restart_joins_anew_at_once() -> None:
    state, actions = play([(0.0, beat(sequence=50)), (1.0, beat(incarnation=2, sequence=1))])
    assert actions == [Joined(A), Joined(A)]
    assert state.members[A].sequence == 1


def test_the_gone_are_bounded() -> None:
    state, _ = play([(0.0, Left(PeerId(f"p{i}"), 1)) for i in range(MAX_GONE + 5)])
    assert len(state.gone) == MAX_GONE
    assert not state.is_gone(PeerId("p0"), 1)


def test_heard_lately() -> None:
    state, _ = play([(0.0, beat(A)), (10.0, beat(B))])
    assert state.heard_since(5.0) == {B}
    assert state.heard_since(0.0) == {A, B}


def test_an_observer_does_not_believe_hearsay_about_those_it_observes() -> None:
    state, actions = play([(0.0, beat()), *ticks(0, 4), (4.5, Listed(A, 1, False, 0.0)), *ticks(5, 8)])
    assert state.members == {}
    assert Ignored(A, "observed ourselves") in actions
