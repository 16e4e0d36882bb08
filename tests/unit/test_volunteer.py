"""What a volunteer allows: hours, traffic, battery, commands; one reason at a time, and no slice is dropped without a word."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion_p2p.errors import ConfigError
from fusion_p2p.peer.volunteer import (
    BATTERY_PATIENCE,
    GIB,
    Action,
    Allowed,
    Announce,
    Event,
    Go,
    HandedOver,
    HandOver,
    LeaveAsked,
    Looked,
    Mode,
    PauseAsked,
    Resume,
    ResumeAsked,
    Volunteer,
    describe,
    reason_to_pause,
    step,
)
from fusion_p2p.time_of_day import first_of_next_month, in_words, next_opening, parse_duration, parse_hours

pytestmark = pytest.mark.row(21)

NOON = datetime(2026, 11, 29, 12, 0, tzinfo=timezone(timedelta(hours=1)))
QUIET = Looked(on_battery=False, month_bytes=0)
NIGHT = Allowed(hours=(parse_hours("22-7"),))


def after(state: Volunteer, *events: Event, now: datetime = NOON) -> tuple[Volunteer, list[Action]]:
    """The state after these events at one moment, and all that was to be done."""
    done: list[Action] = []
    for event in events:
        state, actions = step(state, event, now)
        done += actions
    return state, done


def test_outside_of_its_hours_a_peer_hands_over_and_says_until_when():
    state, actions = after(Volunteer(NIGHT), QUIET)
    assert actions == [Announce("draining"), HandOver("outside of the hours 22-7")]
    assert describe(state, NOON) is None, "slices that are handed over are what matters"
    state, actions = after(state, HandedOver())
    assert actions == [Announce("paused")]
    assert describe(state, NOON) == "paused: outside of the hours 22-7, until 22:00"
    evening = NOON.replace(hour=22)
    state, actions = after(state, QUIET, now=evening)
    assert actions == [Resume(), Announce("standby")]
    assert state.mode is Mode.RUNNING
    assert after(state, QUIET, now=NOON.replace(hour=6, minute=59) + timedelta(days=1))[1] == []
    assert after(state, QUIET, now=NOON.replace(hour=7) + timedelta(days=1))[0].mode is Mode.HANDING_OVER


def test_a_pause_with_a_duration_ends_by_itself_and_one_without_by_command():
    state, _ = after(Volunteer(Allowed()), PauseAsked(timedelta(hours=2)), HandedOver())
    assert describe(state, NOON) == "paused: by its volunteer, until 14:00"
    assert after(state, QUIET, now=NOON + timedelta(minutes=119))[0].mode is Mode.PAUSED
    assert after(state, QUIET, now=NOON + timedelta(hours=2))[0].mode is Mode.RUNNING
    state, _ = after(state, PauseAsked())
    assert describe(state, NOON) == "paused: by its volunteer, until `fusion-peer resume`"
    assert after(state, QUIET, now=NOON + timedelta(days=40))[0].mode is Mode.PAUSED
    assert after(state, ResumeAsked())[1] == [Resume(), Announce("standby")]


def test_a_month_whose_traffic_is_used_up_pauses_until_the_next_one():
    state, _ = after(Volunteer(Allowed(monthly_bytes=200 * GIB)), Looked(False, 200 * GIB - 1))
    assert state.mode is Mode.RUNNING
    state, _ = after(state, Looked(False, 200 * GIB), HandedOver())
    assert describe(state, NOON) == "paused: this month's 200 GiB of traffic are used up, until 1 December"
    assert after(state, Looked(False, 0), now=NOON + timedelta(days=2))[0].mode is Mode.RUNNING


def test_on_battery_it_pauses_unless_the_plug_was_pulled_for_a_moment_only():
    unplugged = Looked(on_battery=True, month_bytes=0)
    state, actions = after(Volunteer(Allowed()), unplugged)
    assert (state.mode, actions) == (Mode.RUNNING, [])
    replugged, _ = after(state, QUIET)
    assert after(replugged, unplugged, now=NOON + BATTERY_PATIENCE)[0].mode is Mode.RUNNING
    state, _ = after(state, unplugged, HandedOver(), now=NOON + BATTERY_PATIENCE)
    assert describe(state, NOON) == "paused: on battery, until it is plugged in"
    assert after(state, QUIET, now=NOON + BATTERY_PATIENCE)[0].mode is Mode.RUNNING
    allowed, _ = after(Volunteer(Allowed(on_battery=True)), unplugged)
    assert after(allowed, unplugged, now=NOON + BATTERY_PATIENCE)[0].mode is Mode.RUNNING


def test_no_command_overrides_a_cap_and_only_one_reason_is_shown():
    state, _ = after(Volunteer(NIGHT), QUIET, HandedOver(), PauseAsked(timedelta(hours=1)))
    assert describe(state, NOON) == "paused: by its volunteer, until 13:00"
    state, actions = after(state, ResumeAsked())
    assert actions == []
    assert describe(state, NOON) == "paused: outside of the hours 22-7, until 22:00"


def test_a_pause_taken_back_while_slices_are_handed_over_was_none():
    state, actions = after(Volunteer(Allowed()), PauseAsked(), ResumeAsked())
    assert actions == [Announce("draining"), HandOver("by its volunteer")]
    assert after(state, HandedOver())[1] == [Resume(), Announce("standby")]


def test_leaving_hands_over_once_and_then_goes():
    state, actions = after(Volunteer(Allowed()), LeaveAsked(), LeaveAsked())
    assert actions == [Announce("draining"), HandOver("it leaves the swarm")]
    assert after(state, HandedOver(), HandedOver())[1] == [Go()]
    pausing, _ = after(Volunteer(Allowed()), PauseAsked())
    assert after(pausing, LeaveAsked(), ResumeAsked(), QUIET, HandedOver())[1] == [Go()]


_EVENTS = st.lists(
    st.tuples(
        st.timedeltas(timedelta(0), timedelta(hours=9)),
        st.one_of(
            st.builds(Looked, st.booleans(), st.sampled_from([0, GIB - 1, GIB])),
            st.builds(PauseAsked, st.none() | st.timedeltas(timedelta(seconds=1), timedelta(hours=12))),
            st.builds(ResumeAsked),
            st.builds(HandedOver),
            st.builds(LeaveAsked),
        ),
    ),
    max_size=30,
)
_ALLOWED = st.builds(
    Allowed,
    st.lists(st.sampled_from([parse_hours(text) for text in ("22-7", "9-12", "23:30-0:15", "0:30-24")]), max_size=2).map(tuple),
    st.sampled_from([None, GIB]),
    st.booleans(),
)


@given(_ALLOWED, _EVENTS)
def test_whatever_happens_the_swarm_is_told_what_holds(allowed: Allowed, events: list[tuple[timedelta, Event]]):
    state, now = Volunteer(allowed), NOON
    announced, open_to_slices, handing_over, gone = "standby", True, False, 0
    for wait, event in events:
        now += wait
        if isinstance(event, HandedOver) and not handing_over:
            continue
        handing_over &= not isinstance(event, HandedOver)
        state, actions = step(state, event, now)
        for action in actions:
            match action:
                case Announce(said):
                    announced = said
                case HandOver():
                    assert not handing_over, "one at a time"
                    handing_over, open_to_slices = True, False
                case Resume():
                    open_to_slices = True
                case Go():
                    gone += 1
        assert announced == {
            Mode.RUNNING: "standby", Mode.HANDING_OVER: "draining", Mode.PAUSED: "paused", Mode.LEAVING: "draining",
            Mode.GONE: "draining",
        }[state.mode]  # fmt: skip
        assert open_to_slices == (state.mode is Mode.RUNNING)
        assert handing_over == (state.mode in (Mode.HANDING_OVER, Mode.LEAVING))
        assert gone == (state.mode is Mode.GONE)
        assert (describe(state, now) is not None) == (state.mode is Mode.PAUSED)
        if state.mode is Mode.RUNNING:
            assert reason_to_pause(state, now) is None or isinstance(event, HandedOver)


@given(_ALLOWED, _EVENTS)
def test_every_pause_ends_when_it_says(allowed: Allowed, events: list[tuple[timedelta, Event]]):
    state, now = Volunteer(allowed), NOON
    for wait, event in events:
        now += wait
        if not isinstance(event, LeaveAsked):
            state, _ = step(state, event, now)
    state, _ = after(state, ResumeAsked(), QUIET, HandedOver(), QUIET, now=now)
    if state.reason is not None:
        assert isinstance(state.reason.until, datetime)
        now = state.reason.until
        state, _ = after(state, QUIET, now=now)
    assert state.mode is Mode.RUNNING, "nothing but hours was left to wait for"


@pytest.mark.parametrize("text", ["22", "22-25", "9:60-10", "7-7", "0-24:30", "a-b", "", "-", "24-0"])
def test_hours_that_no_day_has_are_refused(text: str):
    with pytest.raises(ConfigError, match="hours"):
        parse_hours(text)


@given(st.integers(0, 1439), st.integers(1, 1440), st.datetimes(timezones=st.just(UTC), max_value=datetime(2200, 1, 1)))
def test_outside_of_hours_they_begin_within_a_day(first: int, end: int, when: datetime):
    if first % 1440 == end % 1440:
        return
    hours = parse_hours(f"{first // 60}:{first % 60:02}-{end // 60}:{end % 60:02}")
    opening = next_opening((hours,), when)
    if hours.contain(when):
        assert opening is None
    else:
        assert opening is not None
        assert when < opening <= when + timedelta(days=1)
        assert hours.contain(opening)
        assert not hours.contain(opening - timedelta(minutes=1))


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d12h", 129_600), ("1h30m", 5400), ("366d", 31_622_400)]
)
def test_durations(text: str, seconds: int):
    assert parse_duration(text).total_seconds() == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "-2h", "2 weeks", "0m", "367d", "999999999d", "999999999h", "2h2h"])
def test_what_is_no_duration_is_refused(text: str):
    with pytest.raises(ConfigError, match="is not a duration"):
        parse_duration(text)


def test_moments_to_come_in_words():
    assert in_words(NOON + timedelta(hours=6, minutes=40), NOON) == "18:40"
    assert in_words(first_of_next_month(NOON), NOON) == "1 December"
    assert in_words(NOON + timedelta(days=3), NOON) == "2 December 12:00"
    assert first_of_next_month(datetime(2026, 12, 31, 23, 59, tzinfo=UTC)) == datetime(2027, 1, 1, tzinfo=UTC)
