"""Why a dial failed, per address, in words that a user can act on. Pure: reads what p2pd reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

NAME_NOT_FOUND = "name not found"
REFUSED = "refused"
NO_ANSWER = "no answer"
BACKOFF = "dial backoff"

_LINE = re.compile(r"\* \[(?P<address>[^\]]+)\] (?P<reason>[^\n]*)")
_OTHER_ID = re.compile(r"remote key matches (?P<id>\w+)")
_MEANINGS: Sequence[tuple[str, str]] = (
    ("connection refused", f"{REFUSED}: nothing listens there"),
    ("no such host", NAME_NOT_FOUND),
    ("no route to host", "no route to that host"),
    ("network is unreachable", "that network cannot be reached from here"),
    ("NO_RESERVATION", "the relay does not know that peer"),
    ("RESOURCE_LIMIT", "the relay is full"),
    ("connection reset", "the connection was cut: something else listens there, or it is shutting down"),
    ("EOF", "the connection was cut: something else listens there, or it is shutting down"),
    ("failed to negotiate", "something else than a peer listens there"),
    ("i/o timeout", NO_ANSWER),
    ("deadline exceeded", NO_ANSWER),
    ("canceled", NO_ANSWER),
)

_LASTING = ("other peer id", "something else")


def reason_of(report: str) -> str:
    """One reason in our words."""
    if match := _OTHER_ID.search(report):
        return f"other peer id: {match['id']} answers there (its key has changed, or the address is old)"
    for fragment, meaning in _MEANINGS:
        if fragment in report:
            return meaning
    return re.sub(r"\s+", " ", report)[:160]


def reasons_by_address(report: str, dials: Sequence[str], earlier: Mapping[str, str]) -> dict[str, str]:
    """Why each of `dials` failed. `earlier` are the reasons of dials that p2pd will not repeat yet (its back-off)."""
    said = {match["address"]: match["reason"] for match in _LINE.finditer(report)}
    reasons = {}
    for dial in dials:
        reason = said.get(dial)
        if reason is None:
            reason = report.split("\n", 1)[0] if not said else NO_ANSWER
        if BACKOFF in reason:
            reasons[dial] = earlier.get(dial, "it did not answer a moment ago")
        else:
            reasons[dial] = reason_of(reason)
    return reasons


def lasts(reason: str) -> bool:
    """Whether another dial a moment later would surely fail for the same reason."""
    return reason.startswith(_LASTING)
