"""When the plan of a running job changes between two steps: for its finish, and when codecs no longer fit the links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fusion_p2p.plan.finishing import traceless
from fusion_p2p.plan.plan import Plan

PAUSE_STEPS = 10
"""After a change that a peer refused, the run goes on as it is for so long."""


@dataclass(frozen=True, slots=True)
class Change:
    """The run goes on under this plan after this step, with the same slices on the same peers."""

    plan: Plan
    after: int


class Reason(Protocol):
    """Something that may want another plan."""

    def plan_after(self, step: int, plan: Plan) -> Plan:
        """The plan after a step; `plan` itself when that is right."""

    def took(self, plan: Plan, step_s: float) -> None:
        """A step under this plan took so long."""


class Finish:
    """From `after` on without sparse codecs."""

    def __init__(self, after: int) -> None:
        self._after = after

    def plan_after(self, step: int, plan: Plan) -> Plan:
        """Without sparse codecs, or the plan as it is."""
        return traceless(plan) if step >= self._after else plan

    def took(self, plan: Plan, step_s: float) -> None:
        """It does not matter how long steps take."""


class Changes:
    """Asked at the boundary of every step."""

    def __init__(self, reasons: Sequence[Reason]) -> None:
        self._reasons = reasons
        self._paused_until = 0

    def started(self, step: int, plan: Plan) -> Plan:
        """The plan for a start or restart at this step."""
        for reason in self._reasons:
            plan = reason.plan_after(step, plan)
        return plan

    def wanted(self, step: int, plan: Plan) -> Change | None:
        """What changes after this step."""
        if step < self._paused_until:
            return None
        changed = self.started(step, plan)
        return None if changed == plan else Change(changed, step)

    def took(self, plan: Plan, step_s: float) -> None:
        """A step under this plan took so long."""
        for reason in self._reasons:
            reason.took(plan, step_s)

    def refused(self, change: Change) -> None:
        """A change could not be made."""
        self._paused_until = change.after + PAUSE_STEPS


def in_words(before: Plan, after: Plan) -> str:
    """What a change of codecs is, in one line."""
    pairs = zip(before.edges, after.edges, strict=True)
    changed = dict.fromkeys(
        f"slice {old.source} to {old.target}: {old.codec} -> {new.codec}" for old, new in pairs if old.codec != new.codec
    )
    return "; ".join(changed) or "no codec changes"
