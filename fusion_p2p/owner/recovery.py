"""How a run goes on when an epoch is broken: halt who is left, choose the step to go back to, have the plan mended, start anew.

    Halt -> Halted(what lies there) -> `job.recovery` chooses the step -> the coordinator mends the plan, if somebody is missing
    -> Prepare beside the halted epoch, with whom to fetch states from -> Start

Whatever happens meanwhile - another loss, somebody who comes back, a peer that refuses - begins this anew with what is known
then. A peer that was lost may come back by itself; when it still has its slices nothing moves.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass

from fusion_p2p.errors import GraphError, Incompatible, RunStopped, SwarmUnreachable, WireError
from fusion_p2p.ids import PeerId
from fusion_p2p.job.recovery import Choice, choose, moves, sources
from fusion_p2p.owner.admissions import Admissions
from fusion_p2p.owner.breaks import EpochBroken, PeerFailed, PeerLost, PeersParted, Stalled
from fusion_p2p.owner.changing import Changes
from fusion_p2p.owner.checkpoints import KeptCheckpoints
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.guarding import Guarding
from fusion_p2p.owner.halting import Halting
from fusion_p2p.owner.launching import Draft, Launcher, States, Unlaunched
from fusion_p2p.owner.links import Links
from fusion_p2p.owner.moving import Enlist
from fusion_p2p.owner.registering import Registering
from fusion_p2p.owner.stage import RunContext, Stage
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.job_messages import Stop

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""Between two tries that failed without anybody being to blame."""


@dataclass(frozen=True, slots=True)
class Helpers:
    """What recovery works with."""

    links: Links
    guards: Guarding
    changes: Changes
    admissions: Admissions
    launcher: Launcher
    registering: Registering
    enlist: Enlist
    checkpoints: KeptCheckpoints


class Recovery:
    """Finds the next epoch for a run whose epoch is broken, over the life of the run."""

    def __init__(self, context: RunContext, helpers: Helpers) -> None:
        self._context, self._report, self._ledger = context, context.report, context.folder.ledger
        self._helpers, self._links = helpers, helpers.links
        self._failures: dict[int, dict[PeerId, str]] = {}
        self._banned: dict[PeerId, str] = {}
        self._parted: set[frozenset[PeerId]] = set()
        self._stalled_at: int | None = None

    async def recover(self, stage: Stage, broken: EpochBroken) -> Stage:
        """The next epoch, started. RunStopped when the run has no sense any more; otherwise it waits as long as it takes."""
        halting = Halting(stage, self._links, self._helpers.guards)
        self._blame(stage, broken, halting)
        log.warning("epoch=%d broken %s: %s", stage.run.epoch, broken.at, broken)
        said = _what_broke(stage, broken)
        halting.begin(str(broken))
        concerned = stage.plan.peers
        while True:
            await halting.answered()
            launched = await self._try(stage, halting, said)
            if isinstance(launched, Stage):
                self._let_go(concerned, launched.plan.peers)
                return launched
            if launched is not None:
                self._blame_start(launched, halting)
                if launched.stage is not None:
                    stage = launched.stage
                    concerned |= stage.plan.peers
                    halting = halting.followed_by(stage)
                else:
                    if not launched.why.culprits:
                        await halting.pause(RETRY_S)
                    halting.ask_again()

    def _blame(self, stage: Stage, broken: EpochBroken, halting: Halting) -> None:
        """Who is not to be used for now, or never again. RunStopped when that is enough."""
        match broken.what:
            case PeerLost(peer, reason):
                halting.lose(peer, reason)
            case PeerFailed(peer, index, reason):
                self._ban(stage, peer, index, reason)
                halting.lose(peer, reason)
            case PeersParted(peer, other, reason):
                pair = frozenset({peer, other})
                if pair in self._parted:
                    halting.shun(other)
                self._parted.add(pair)
            case Stalled(reason):
                if self._stalled_at == self._ledger.history.step:
                    raise RunStopped(f"{reason}, for the second time after step {self._stalled_at}")
                self._stalled_at = self._ledger.history.step

    def _ban(self, stage: Stage, peer: PeerId, index: int | None, reason: str) -> None:
        self._banned[peer] = reason
        if index is None:
            return
        failures = self._failures.setdefault(index, {})
        failures[peer] = reason
        if len(failures) > 1:
            told = "; ".join(f"on {stage.describe(peer)}: {why}" for peer, why in failures.items())
            raise RunStopped(f"slice {index} failed on two peers: {told}")

    async def _try(self, stage: Stage, halting: Halting, said: str) -> Stage | Unlaunched | None:
        """The next epoch; None when something happened before it could be started."""
        choice = await self._chosen(stage, halting)
        draft = await self._planned(stage, halting, choice)
        if draft is None:
            return None
        plan, helpers = draft.plan, self._helpers
        also = sorted(peer for peer in halting.lost if peer not in said)
        said += f"; lost {' and '.join(map(stage.describe, also))}" if also else ""
        self._report.say(f"{said}: {_going_on(stage.plan, plan, choice.step, self._ledger.history.step)}")
        states = States(choice.step, sources(stage.parts, draft.parts, choice.holders) if choice.step else {})
        helpers.admissions.admit(stage.plan.peers | plan.peers | helpers.guards.admitted, again=True)
        return await helpers.launcher.launch(self._links, draft, states, halting.take, beside=True)

    async def _chosen(self, stage: Stage, halting: Halting) -> Choice:
        """The step to go back to. The owner's checkpoint is read only when somebody needs it."""
        history, kept, count = self._ledger.history, self._helpers.checkpoints, len(stage.plan.slices)
        at = kept.step(history.checkpoint_step)
        choice = choose(halting.stocks, at, max(history.step, at), count)
        if choice.step == at and not all(choice.holders.values()):
            at = await kept.read(history.checkpoint_step)
            choice = choose(halting.stocks, at, max(history.step, at), count)
        return choice

    async def _planned(self, stage: Stage, halting: Halting, choice: Choice) -> Draft | None:
        """The same plan when all are there, else what the coordinator makes of it; None when something happens meanwhile."""
        out = halting.missing | frozenset(self._banned)
        if not out & stage.plan.peers:
            same = self._helpers.changes.started(choice.step, stage.plan)
            return await asyncio.to_thread(self._helpers.launcher.understand, self._helpers.launcher.again(same))
        steps_left = self._context.config.steps - choice.step
        asking = asyncio.ensure_future(
            self._helpers.enlist(self._helpers.registering.mend(stage.plan, out, choice.holders, steps_left))
        )
        try:
            if not await halting.until(asking):
                return None
            enlisted = asking.result()
            plan = self._helpers.changes.started(choice.step, enlisted.plan)
            return await asyncio.to_thread(self._helpers.launcher.understand, _with(enlisted, plan))
        except (SwarmUnreachable, Incompatible, GraphError, WireError) as error:
            self._report.say(f"waiting: {error}")
            await halting.pause(RETRY_S)
            return None
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(asking, return_exceptions=True)

    def _blame_start(self, launched: Unlaunched, halting: Halting) -> None:
        why = launched.why
        self._report.say(f"waiting: the plan could not be started: {why.reason}")
        for peer in why.culprits:
            if peer in why.gone:
                halting.lose(peer, why.reason)
            if peer not in halting.lost:
                halting.shun(peer)

    def _let_go(self, before: frozenset[PeerId], after: frozenset[PeerId]) -> None:
        """Who has nothing to do with this run any more is told so, also when it comes back only later."""
        keeping = after | self._helpers.guards.admitted
        for peer in (self._links.peers | before) - keeping:
            self._links.drop(peer, Stop(job=self._helpers.registering.job, reason="its slices have moved to other peers"))


def _with(enlisted: Enlisted, plan: Plan) -> Enlisted:
    return Enlisted(plan, enlisted.coordinator, enlisted.term, enlisted.contacts)


def _what_broke(stage: Stage, broken: EpochBroken) -> str:
    """In words, for the owner's screen."""
    at = f" {broken.at}" if broken.at else ""
    match broken.what:
        case PeerLost(peer, reason):
            return f"lost {stage.describe(peer)}{at} ({reason})"
        case PeerFailed(peer, _, reason):
            return f"{stage.describe(peer)} failed{at} ({reason})"
        case PeersParted(peer, other, reason):
            return f"peer {peer} lost its way to {stage.describe(other)}{at} ({reason})"
        case Stalled(reason):
            return f"stalled{at} ({reason})"


def _going_on(before: Plan, after: Plan, step: int, newest: int) -> str:
    back = f"going back to step {step}" if step < newest else f"going on from step {step}"
    if before.slice_of != after.slice_of:
        return f"{back}, with a new cut for {len(after.peers)} peers"
    moved = moves([part.members for part in before.slices], [part.members for part in after.slices])
    return ", ".join([back, *(f"slice {move.slice} moves to peer {' and '.join(move.peers)}" for move in moved)])
