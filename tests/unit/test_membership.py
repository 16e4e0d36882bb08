"""Membership: incarnations, suspicion, eviction, hearsay. A table of event sequences and what is left of the members."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest

from fusion_p2p.ids import PeerId
from fusion_p2p.peer.presence_messages import MAX_CHANGES, RosterChanges, changes_since
from fusion_p2p.swarm.members import DOUBT_S, MAX_PATIENCE, Following, Membership
from fusion_p2p.swarm.membership import (
    MAX_GONE,
    Action,
    Confirmed,
    Denied,
    Event,
    Gone,
    Heard,
    Ignored,
    Joined,
    Left,
    Listed,
    RosterTold,
    Suspected,
    Tick,
    Untold,
    step,
)
from fusion_p2p.swarm.node import begin
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


def test_a_suspect_that_nobody_reaches_is_evicted_at_once() -> None:
    state, actions = play([(0.0, beat()), *ticks(0, 4), (4.1, Denied(A))])
    assert actions[-1] == Gone(A, "not heard for 4.1 s, and nobody reaches it")
    assert state.is_gone(A, 1)


def test_who_was_heard_meanwhile_cannot_be_denied() -> None:
    state, actions = play([(0.0, beat()), *ticks(0, 4), (4.1, beat(sequence=2)), (4.2, Denied(A)), (4.3, Denied(B))])
    assert A in state.members
    assert actions[-2:] == [Ignored(A, "it is not suspected any more"), Ignored(B, "it is not suspected any more")]


def _suspected_after(gaps: list[float], wrong: int = 0) -> float:
    """How long after the last beat a peer is suspected whose beats came with these gaps, by an observer so often wrong."""
    now, events = 0.0, [(0.0, WATCHING)]
    for sequence, gap in enumerate(gaps, start=1):
        now += gap
        events += [(now, WATCHING), (now, beat(sequence=sequence))]
    state, _ = play(events)
    state = state._replace(doubt=wrong, doubted_at=now)
    for tenth in range(1, 200):
        state, actions = play([(now + tenth / 10, WATCHING)], state)
        if Suspected(A) in actions:
            return tenth / 10
    raise AssertionError("never suspected")


@pytest.mark.row(19)
def test_patience_follows_the_beats_and_the_observer_doubts_itself() -> None:
    steady, wavering = [1.0] * 20, [0.3, 1.4] * 10
    assert _suspected_after(steady) == pytest.approx(WAN.suspect_after_s, abs=0.2)
    assert WAN.suspect_after_s + 0.5 < _suspected_after(wavering) < 2 * WAN.suspect_after_s
    assert _suspected_after(steady, wrong=1) == pytest.approx(1.5 * WAN.suspect_after_s, abs=0.2)
    assert _suspected_after(wavering, wrong=2) <= MAX_PATIENCE * WAN.suspect_after_s + 0.1
    assert _suspected_after([*steady, 12.0, 1.0, 1.0]) < MAX_PATIENCE * WAN.suspect_after_s, "one outage is not the rule"


def test_a_wrong_suspicion_is_remembered_for_a_minute() -> None:
    state, _ = play([(0.0, beat()), *ticks(0, 4), (4.5, Confirmed(A)), *ticks(5, 6)])
    assert state.doubt == 1
    assert state.patience_s(state.members[A], 6.0, WAN) > WAN.suspect_after_s
    assert state.patience_s(state.members[A], 6.0 + DOUBT_S, WAN) == WAN.suspect_after_s


def test_who_begins_to_coordinate_accuses_nobody_of_silence_before() -> None:
    _, actions = play([(0.0, beat()), (10.0, NOT_WATCHING), (10.25, WATCHING), (10.5, WATCHING), (11.0, WATCHING)])
    assert actions == [Joined(A)]


def test_who_begins_to_coordinate_does_not_excuse_hearsay_that_has_become_too_old() -> None:
    """Ghosts would begin anew with it: told a moment before, and by the next tick nobody has heard them lately."""
    old = Listed(A, 1, holds=False, heard_ago_s=WAN.heard_lately_s - 0.1)
    state, actions = play([(0.0, NOT_WATCHING), (0.1, old), (0.25, WATCHING)])
    assert actions == [Joined(A), Gone(A, "not heard lately by anybody")]
    assert not state.members


C = PeerId("c")
D = PeerId("d")


def told(since: int, version: int, *peers: PeerId, gone: frozenset[PeerId] = frozenset(), complete: bool = True) -> RosterTold:
    return RosterTold(C, since, version, tuple(Listed(peer, 1, False, 0.0) for peer in peers), gone, complete)


def test_a_roster_keeps_its_peers_alive_without_naming_them_again() -> None:
    state, _ = play([(0.0, NOT_WATCHING), (0.0, told(0, 7, A, B))])
    assert state.followed_version(C) == 7
    for second in range(1, 40):
        state, actions = play([(float(second), told(7, 7)), (float(second), NOT_WATCHING)], state)
        assert actions == []
    assert state.heard_since(39.0) == {A, B}
    state, actions = play([(40.0, told(7, 8, gone=frozenset({A})))], state)
    assert actions == [Gone(A, "gone, says the coordinator")]
    state, actions = play(ticks(40, 56, NOT_WATCHING), state)
    assert actions == [Gone(B, "not heard lately by anybody")]


A_LEFT = told(7, 8, gone=frozenset({A}))


def test_whom_the_coordinator_saw_leave_when_we_had_just_heard_it_is_gone_once_we_hear_it_no_more() -> None:
    """It was kept for as long as who is heard by nobody: with the coordinator gone, too, nobody could be elected until then."""
    state, _ = play([(0.0, told(0, 7, A, B)), *ticks(0, 10, NOT_WATCHING), (10.0, beat(A)), (11.0, A_LEFT)])
    assert A in state.members, "we hear it: perhaps only the coordinator does not reach it"
    state, actions = play(ticks(11, 14, NOT_WATCHING), state)
    assert actions == [Gone(A, "gone, says the coordinator")]


def test_whom_only_the_coordinator_does_not_reach_stays_as_long_as_we_hear_it() -> None:
    state, _ = play([(0.0, told(0, 7, A, B)), *ticks(0, 10, NOT_WATCHING), (10.0, beat(A)), (11.0, A_LEFT)])
    state, actions = play([(12.0, beat(A, sequence=2)), *ticks(12, 20, NOT_WATCHING)], state)
    assert actions == []
    assert A in state.members


def test_changes_of_a_roster_that_we_do_not_know_wait_for_the_whole() -> None:
    state, _ = play([(0.0, told(3, 7, A)), (0.5, told(0, 7, A, B)), (0.6, told(5, 9, gone=frozenset({A})))])
    assert state.followed_version(C) == 7
    assert set(state.members) == {A, B}


def test_the_coordinator_brings_back_whom_we_saw_go() -> None:
    state, _ = play([(0.0, beat()), (1.0, Left(A, 1)), (2.0, Listed(A, 1, False, 0.0))])
    assert A not in state.members
    state, actions = play([(3.0, told(0, 7, A))], state)
    assert actions == [Joined(A)]
    assert not state.is_gone(A, 1)


def test_the_coordinator_knows_better_which_process_of_a_peer_lives() -> None:
    """One that lived for a moment told us alone that it is here; the one after it started with an earlier clock."""
    state, _ = play([(0.0, beat(incarnation=9)), (1.0, told(0, 7, A))])
    assert state.members[A].incarnation == 9, "we hear it still"
    state, actions = play([(5.0, told(0, 7, A))], state)
    assert actions == [Joined(A)]
    assert state.members[A].incarnation == 1
    assert state.superseded_by(A, 1) is None


def test_a_roster_tells_its_changes_in_order_and_in_pieces() -> None:
    many = [PeerId(f"p{number:04}") for number in range(MAX_CHANGES + 50)]
    state, _ = play([(0.0, beat(peer)) for peer in many])
    state, _ = play([(1.0, Left(many[3], 1)), (1.0, Left(many[-1], 1))], state)
    known, roster = 0, set[PeerId]()
    for _ in range(2):
        told_now = changes_since(state, known, 2.0, without=many[0])
        assert told_now.since == known
        assert len(told_now.members) + len(told_now.gone) <= MAX_CHANGES
        assert told_now.more == (known == 0)
        roster = (roster - set(told_now.gone)) | {PeerId(entry.peer) for entry in told_now.members}
        known = told_now.version
    assert known == state.version
    assert roster == set(state.members) - {many[0]}
    assert changes_since(state, known, 2.0, without=many[0]) == RosterChanges(known, known, (), ())
    assert changes_since(state, known + 5, 2.0, without=many[0]).since == 0, "numbers of another life start anew"


def test_who_knows_the_roster_of_an_earlier_process_is_told_all() -> None:
    """Who went between the two, the new one never knew: it cannot be among the changes."""
    earlier, _ = play([(0.0, beat()), (0.0, beat(B))], begin(C, 1_000, 0.0, WAN).membership)
    known = changes_since(earlier, 0, 1.0, without=D).version
    later, _ = play([(20.0, beat())], begin(C, 21_000, 20.0, WAN).membership)
    told_now = changes_since(later, known, 21.0, without=D)
    assert (told_now.since, [entry.peer for entry in told_now.members]) == (0, [A])
    assert changes_since(later, told_now.version, 22.0, without=D).since == told_now.version


def test_a_roster_in_pieces_counts_when_its_last_piece_is_here() -> None:
    """A new coordinator has too many peers for one answer: who is in the second is not forgotten after the first."""
    before = replace(told(0, 90, A, B), source=D)
    later = WAN.heard_lately_s - 1
    state, _ = play([(0.0, before), (later, replace(told(90, 90), source=D)), (later + 2, told(0, 4, A, complete=False))])
    assert state.followed_version(C) == 4, "it asks for the rest"
    state, actions = play([(later + 2.2, NOT_WATCHING)], state)
    assert (actions, state.heard_since(later + 2)) == ([], {A}), (
        "B is believed in, but the new coordinator has not named it yet"
    )
    state, actions = play([(later + 3, told(4, 7, B)), *ticks(later + 3, later + 13, NOT_WATCHING)], state)
    assert actions == []
    assert state.heard_since(later + 3) == {A, B}


def test_who_has_not_heard_all_of_a_roster_asks_at_once() -> None:
    state, actions = play([(0.0, told(0, 4, A, complete=False))])
    assert actions == [Joined(A), Untold(C)]
    state, actions = play([(0.1, told(4, 6, B, gone=frozenset({A}), complete=False))], state)
    assert actions == [Joined(B), Untold(C)], "A is heard a moment ago, so it stays"
    state, actions = play([(0.2, told(6, 7, D))], state)
    assert actions == [Joined(D)]
    assert state.following == Following(C, 7, frozenset({B, D}), 0.2)


def test_a_roster_that_cannot_be_kept_is_not_asked_for_again_and_again() -> None:
    unheard = Listed(A, 1, False, WAN.heard_lately_s + 1)
    _, actions = play([(0.0, replace(told(0, 4, complete=False), members=(unheard,)))])
    assert actions == [Ignored(A, "not heard lately by anybody")]


def test_a_coordinator_that_we_saw_go_ourselves_is_believed_again() -> None:
    state, _ = play([(0.0, beat(C)), *ticks(0, 8), (9.0, NOT_WATCHING), (9.1, beat(C, sequence=9))])
    assert C not in state.members, "evicted while we coordinated on our side of a partition"
    state, actions = play([(10.0, told(0, 7)), (11.0, beat(C, sequence=10))], state)
    assert actions == [Joined(C)]


def test_who_forgot_peers_of_a_roster_asks_for_all_of_it_again() -> None:
    """Out of the coordinator's reach for so long that one of its peers was forgotten, and back while nothing changed there."""
    away = WAN.heard_lately_s + 1
    state, _ = play([(0.0, told(0, 7, A, B)), (away, beat(B)), (away, NOT_WATCHING)])
    assert state.members.keys() == {B}
    assert state.followed_version(C) == 0
    # The answer to a beat from before we forgot changes nothing about that.
    state, _ = play([(away, told(7, 7))], state)
    assert state.followed_version(C) == 0
    state, _ = play([(away + 1, told(0, 7, A, B))], state)
    assert state.members.keys() == {A, B}
    assert state.followed_version(C) == 7
