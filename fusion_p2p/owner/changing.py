"""When the plan of a running job changes between two steps: for its finish, when codecs no longer fit the links, when a peer
wants to go, and when another plan pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from fusion_p2p.ids import PeerId
from fusion_p2p.job.recovery import moves
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.moving import Moving
from fusion_p2p.owner.stage import Stage
from fusion_p2p.plan.finishing import traceless
from fusion_p2p.plan.plan import EdgePlan, Plan

PAUSE_STEPS = 10
"""After a change that a peer refused, the run goes on as it is for so long."""


@dataclass(frozen=True, slots=True)
class Change:
    """The run goes on under this plan after this step; `enlisted` says whose it is when peers or slices are others."""

    plan: Plan
    after: int
    enlisted: Enlisted | None = None


class Reason(Protocol):
    """Something that may want other codecs."""

    def plan_after(self, step: int, plan: Plan) -> Plan:
        """The plan after a step; `plan` itself when that is right."""

    def took(self, plan: Plan, step_s: float) -> None:
        """A step under this plan took so long."""


class Finish:
    """From `after` on without sparse codecs."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._before: tuple[EdgePlan, ...] = ()

    def plan_after(self, step: int, plan: Plan) -> Plan:
        """Without sparse codecs, or with them when the run has gone back to before its finish."""
        if step < self._after:
            return self.asked(plan)
        finished = traceless(plan)
        if finished != plan:
            self._before = plan.edges
        return finished

    def asked(self, plan: Plan) -> Plan:
        """The plan with the codecs that it had before its finish, if that was what changed them."""
        before = replace(plan, edges=self._before)
        same_cut = list(map(_ends, plan.edges)) == list(map(_ends, self._before))
        return before if same_cut and traceless(before).edges == plan.edges else plan

    def took(self, plan: Plan, step_s: float) -> None:
        """It does not matter how long steps take."""


class Changes:
    """Asked at the boundary of every step."""

    def __init__(self, reasons: Sequence[Reason], moving: Moving) -> None:
        self._reasons, self._moving = reasons, moving
        self._paused_until = 0

    def started(self, step: int, plan: Plan) -> Plan:
        """The plan for a start or restart at this step."""
        for reason in self._reasons:
            plan = reason.plan_after(step, plan)
        return plan

    def began(self, stage: Stage) -> None:
        """An epoch runs."""
        self._moving.began(stage)

    def leaves(self, peer: PeerId, reason: str) -> None:
        """A peer wants to go."""
        self._moving.leaves(peer, reason)

    def wanted(self, step: int, plan: Plan) -> Change | None:
        """What changes after this step."""
        enlisted = self._moving.found(plan)
        if enlisted is None and step < self._paused_until:
            return None
        changed = self.started(step, plan if enlisted is None else enlisted.plan)
        return None if changed == plan else Change(changed, step, enlisted)

    def took(self, plan: Plan, step_s: float) -> None:
        """A step under this plan took so long."""
        self._moving.took(step_s)
        for reason in self._reasons:
            reason.took(plan, step_s)

    def refused(self, change: Change, by: PeerId | None) -> None:
        """A change could not be made."""
        if change.enlisted is None:
            self._paused_until = change.after + PAUSE_STEPS
        else:
            self._moving.refused(by)


def _ends(edge: EdgePlan) -> tuple[int, int, int]:
    return edge.value, edge.source, edge.target


def in_words(before: Plan, after: Plan) -> str:
    """What a change is, in one line."""
    if before.slice_of != after.slice_of:
        return f"a new cut: {len(after.slices)} slices on {len(after.peers)} peers"
    moved = moves([part.members for part in before.slices], [part.members for part in after.slices])
    said = [f"slice {move.slice} moves to peer {', '.join(move.peers)}" for move in moved]
    pairs = zip(before.edges, after.edges, strict=True)
    said += dict.fromkeys(
        f"slice {old.source} to {old.target}: {old.codec} -> {new.codec}" for old, new in pairs if old.codec != new.codec
    )
    return "; ".join(said) or "the same peers take other shares"
