"""What a volunteer allows its peer, from moment to moment; pure.

    RUNNING --a reason to pause--> HANDING_OVER --HandedOver--> PAUSED --no reason is left--> RUNNING
    RUNNING, HANDING_OVER, PAUSED --LeaveAsked--> LEAVING --HandedOver--> GONE

A peer pauses because it was told to, outside of its hours, when the traffic of the month is used up, and on battery. Of
several reasons the first in this order is the one that is shown. A pause hands the slices over first, as leaving does. What a
cap asks for is no command: `resume` ends only the pause that was ordered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import Enum
from typing import assert_never

from fusion_p2p.time_of_day import Hours, first_of_next_month, in_words, next_opening
from fusion_p2p.wire.swarm_messages import PeerState

BATTERY_PATIENCE = timedelta(seconds=20)
"""A plug that is pulled for a moment moves no slice."""
GIB = 1 << 30


class Mode(Enum):
    RUNNING = "running"
    HANDING_OVER = "handing over"
    PAUSED = "paused"
    LEAVING = "leaving"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Allowed:
    """The caps that the volunteer set. hours: none means all day. monthly_bytes: sent and received, in a calendar month.

    drain_timeout_s: how long handing over slices may take.
    """

    hours: tuple[Hours, ...] = ()
    monthly_bytes: int | None = None
    on_battery: bool = False
    drain_timeout_s: float = 25.0


@dataclass(frozen=True, slots=True)
class Ordered:
    """A pause that was asked for. until: None is until it is taken back."""

    until: datetime | None


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a peer pauses, and until when, in words where no clock says it."""

    text: str
    until: datetime | str

    def described(self, now: datetime) -> str:
        """`outside of the hours 22-7, until 22:00`."""
        return f"{self.text}, until {self.until if isinstance(self.until, str) else in_words(self.until, now)}"


@dataclass(frozen=True, slots=True)
class Volunteer:
    """State. Times are aware, in the local time zone."""

    allowed: Allowed
    mode: Mode = Mode.RUNNING
    ordered: Ordered | None = None
    unplugged_at: datetime | None = None
    month_bytes: int = 0
    """Of the calendar month in which it was last looked at."""
    reason: Reason | None = None
    """Why it pauses or is about to."""


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """By command. duration: None is until ResumeAsked."""

    duration: timedelta | None = None


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """Take the ordered pause back."""


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """By command or signal."""


@dataclass(frozen=True, slots=True)
class Looked:
    """Time has passed; this is how things are."""

    on_battery: bool
    month_bytes: int


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Nothing is executed here any more."""


Event = PauseAsked | ResumeAsked | LeaveAsked | Looked | HandedOver


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the swarm what may be expected of this peer."""

    state: PeerState


@dataclass(frozen=True, slots=True)
class HandOver:
    """Have the slices taken over, take no new ones, then say HandedOver."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resume:
    """Slices are welcome again."""


@dataclass(frozen=True, slots=True)
class Go:
    """Nothing keeps the process any more."""


Action = Announce | HandOver | Resume | Go
Step = tuple[Volunteer, tuple[Action, ...]]


def step(state: Volunteer, event: Event, now: datetime) -> Step:
    """The next state and what to do."""
    match event:
        case PauseAsked(duration):
            return _judge(replace(state, ordered=Ordered(None if duration is None else now + duration)), now)
        case ResumeAsked():
            return _judge(replace(state, ordered=None), now)
        case Looked():
            return _judge(_seen(state, event, now), now)
        case HandedOver():
            return _handed_over(state, now)
        case LeaveAsked():
            return _leave(state)
        case _:
            assert_never(event)


def reason_to_pause(state: Volunteer, now: datetime) -> Reason | None:
    """The first that there is."""
    allowed = state.allowed
    if state.ordered is not None:
        return Reason("by its volunteer", state.ordered.until or "`fusion-peer resume`")
    if (opening := next_opening(allowed.hours, now)) is not None:
        return Reason(f"outside of the hours {', '.join(hours.text for hours in allowed.hours)}", opening)
    if allowed.monthly_bytes is not None and state.month_bytes >= allowed.monthly_bytes:
        return Reason(f"this month's {allowed.monthly_bytes / GIB:g} GiB of traffic are used up", first_of_next_month(now))
    unplugged = state.unplugged_at
    if not allowed.on_battery and unplugged is not None and now - unplugged >= BATTERY_PATIENCE:
        return Reason("on battery", "it is plugged in")
    return None


def describe(state: Volunteer, now: datetime) -> str | None:
    """`paused: ...` for the volunteer; None when its work is what matters, or what is handed over."""
    if state.mode is Mode.PAUSED and state.reason is not None:
        return f"paused: {state.reason.described(now)}"
    return None


def _seen(state: Volunteer, event: Looked, now: datetime) -> Volunteer:
    unplugged_at = (state.unplugged_at or now) if event.on_battery else None
    return replace(state, unplugged_at=unplugged_at, month_bytes=event.month_bytes)


def _judge(state: Volunteer, now: datetime) -> Step:
    """Compare what is with what is allowed."""
    if state.ordered is not None and state.ordered.until is not None and now >= state.ordered.until:
        state = replace(state, ordered=None)
    if state.mode in (Mode.LEAVING, Mode.GONE):
        return state, ()
    state = replace(state, reason=reason_to_pause(state, now))
    if state.mode is Mode.RUNNING and state.reason is not None:
        return replace(state, mode=Mode.HANDING_OVER), (Announce("draining"), HandOver(state.reason.text))
    if state.mode is Mode.PAUSED and state.reason is None:
        return replace(state, mode=Mode.RUNNING), (Resume(), Announce("standby"))
    return state, ()


def _handed_over(state: Volunteer, now: datetime) -> Step:
    if state.mode is Mode.LEAVING:
        return replace(state, mode=Mode.GONE), (Go(),)
    if state.mode is not Mode.HANDING_OVER:
        return state, ()
    # What asked for the pause may be over meanwhile: then the pause was none.
    state, more = _judge(replace(state, mode=Mode.PAUSED), now)
    return state, more or (Announce("paused"),)


def _leave(state: Volunteer) -> Step:
    leaving = replace(state, mode=Mode.LEAVING, reason=None)
    match state.mode:
        case Mode.RUNNING | Mode.PAUSED:
            return leaving, (Announce("draining"), HandOver("it leaves the swarm"))
        case Mode.HANDING_OVER:
            return leaving, ()
        case _:
            return state, ()
