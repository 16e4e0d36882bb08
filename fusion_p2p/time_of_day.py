"""Hours of the day and durations as people type them: `22-7`, `9:30-12`, `2h`, `1h30m`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from fusion_p2p.errors import ConfigError

MINUTES_OF_A_DAY = 1440
LONGEST = timedelta(days=366)
_TIME = r"(\d{1,2})(?::(\d{2}))?"
_HOURS = re.compile(rf"{_TIME}-{_TIME}")
_DURATION = re.compile(r"(?:(\d{1,9})d)?(?:(\d{1,9})h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?")


@dataclass(frozen=True, slots=True)
class Hours:
    """From one minute of the day until another, perhaps over midnight. `text` is what its user typed."""

    first: int
    """Minutes since midnight, local time."""
    end: int
    """The first minute that does not belong to it any more."""
    text: str

    def contain(self, when: datetime) -> bool:
        """Whether this moment lies in them."""
        minute = 60 * when.hour + when.minute
        if self.first < self.end:
            return self.first <= minute < self.end
        return minute >= self.first or minute < self.end

    def next_begin(self, when: datetime) -> datetime:
        """When they begin next, after this moment."""
        begin = when.replace(hour=self.first // 60, minute=self.first % 60, second=0, microsecond=0)
        return begin if begin > when else begin + timedelta(days=1)


def parse_hours(text: str) -> Hours:
    """`22-7` or `9:30-12:15`. ConfigError says how hours are written."""
    found = _HOURS.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ConfigError(f"hours: {text[:40]!r} is not FROM-TO, such as 22-7 or 9:30-12")
    first, end = (_minute(found.group(index), found.group(index + 1), text) for index in (1, 3))
    if first % MINUTES_OF_A_DAY == end % MINUTES_OF_A_DAY:
        raise ConfigError(f"hours: {text!r} begin when they end; leave hours out to work all day")
    return Hours(first % MINUTES_OF_A_DAY, end, text)


def _minute(hour: str, minute: str | None, text: str) -> int:
    minutes = 60 * int(hour) + int(minute or 0)
    if minutes > MINUTES_OF_A_DAY or int(minute or 0) > 59:
        raise ConfigError(f"hours: {text!r} names a time that no day has")
    return minutes


def parse_duration(text: str) -> timedelta:
    """`90s`, `30m`, `2h`, `1d12h`. ConfigError says how durations are written."""
    found = _DURATION.fullmatch(text.replace(" ", ""))
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups()) if found else (0, 0, 0, 0)
    duration = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds) if days <= LONGEST.days else LONGEST * 2
    if not timedelta(0) < duration <= LONGEST:
        raise ConfigError(f"{text[:40]!r} is not a duration of at most a year, such as 30m, 2h or 1d12h")
    return duration


def next_opening(hours: Iterable[Hours], when: datetime) -> datetime | None:
    """When the next of these hours begin, if this moment lies in none of them; None when it lies in one, or there are none."""
    all_hours = tuple(hours)
    if not all_hours or any(one.contain(when) for one in all_hours):
        return None
    return min(one.next_begin(when) for one in all_hours)


def first_of_next_month(when: datetime) -> datetime:
    """Midnight at which the calendar month after that of `when` begins."""
    midnight = when.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (midnight + timedelta(days=32)).replace(day=1)


def in_words(until: datetime, now: datetime) -> str:
    """A moment to come: `18:40` within a day, otherwise `1 December` or `1 December 18:40`."""
    if until - now < timedelta(days=1):
        return f"{until:%H:%M}"
    clock = f" {until:%H:%M}" if (until.hour, until.minute) != (0, 0) else ""
    return f"{until.day} {until:%B}{clock}"
