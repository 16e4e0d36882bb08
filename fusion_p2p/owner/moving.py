"""Another plan for a running job, looked for beside training: when a peer wants to go, and when another plan pays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from fusion_p2p.clock import Clock
from fusion_p2p.errors import Incompatible, SwarmUnreachable
from fusion_p2p.ids import PeerId
from fusion_p2p.job.recovery import Holders
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.guarding import Guarding
from fusion_p2p.owner.registering import Registering, SoFar
from fusion_p2p.owner.stage import Stage
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.reluctance import Reluctance
from fusion_p2p.wire.swarm_messages import Register

log = logging.getLogger(__name__)

TICK_S = 0.2
GAIN_EVERY_S = 5.0
"""Between two looks for a better plan: one is taken when it was found twice."""
SHUN_S = 60.0
"""A peer that refused a change is not asked again for so long."""
PAUSE_S = 2.0
"""After a change that could not be made nothing is looked for for so long."""
SMOOTHING = 0.3

Enlist = Callable[[Register], Awaitable[Enlisted]]
Better = Callable[[Register], Awaitable[Enlisted | str]]
"""A plan that pays, or why there is none."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A plan instead of one that runs; `gains`: because it pays, not because somebody leaves."""

    instead_of: Plan
    enlisted: Enlisted
    gains: bool

    def runs_as(self, plan: Plan) -> bool:
        """Whether this is what runs now, whatever its codecs."""
        found = self.enlisted.plan
        return (found.slice_of, found.slices) == (plan.slice_of, plan.slices)


class Moving:
    """Looks for another plan while `run` runs. Without `better` only who leaves is replaced."""

    def __init__(
        self,
        registering: Registering,
        enlist: Enlist,
        better: Better | None,
        steps: int,
        clock: Clock,
        guards: Guarding,
    ) -> None:
        self._registering, self._enlist, self._better, self._steps, self._clock = registering, enlist, better, steps, clock
        self._guards = guards
        self._stage: Stage | None = None
        self._leaving: dict[PeerId, str] = {}
        self._shunned: dict[PeerId, float] = {}
        self._found: _Found | None = None
        self._looked_at = self._pause_until = clock.now()
        self._step = 0
        self._step_s = 0.0
        self._reluctance = Reluctance()

    @property
    def leaving(self) -> frozenset[PeerId]:
        """Who wants to go."""
        return frozenset(self._leaving)

    def began(self, stage: Stage) -> None:
        """An epoch runs: what was found for another one is worth nothing."""
        moved = self._found is not None and self._found.gains and self._found.runs_as(stage.plan)
        known = self._reluctance
        self._reluctance = known.moved(self._step_s, self._clock.now()) if moved else known.disturbed()
        self._stage, self._found, self._step = stage, None, stage.state_step
        self._leaving = {peer: reason for peer, reason in self._leaving.items() if peer in stage.plan.peers}
        self._step_s = 0.0

    def broke(self) -> None:
        """No epoch runs: it is not for us to look for a plan."""
        self._stage = self._found = None

    def leaves(self, peer: PeerId, reason: str) -> None:
        """A peer wants to go."""
        if peer not in self._leaving:
            log.info("peer=%s wants to go: %s", peer, reason)
            self._leaving[peer], self._found = reason, None

    def refused(self, by: PeerId | None) -> None:
        """The plan that was found could not be started, because of this peer if of anybody."""
        self._found, self._pause_until = None, self._clock.now() + PAUSE_S
        if by is not None:
            self._shunned[by] = self._clock.now() + SHUN_S

    def found(self, plan: Plan) -> Enlisted | None:
        """Another plan instead of this one, if there is one by now."""
        return self._found.enlisted if self._found is not None and self._found.instead_of == plan else None

    def took(self, step_s: float) -> None:
        """One more step was made and took so long."""
        self._step += 1
        self._step_s = step_s if self._step_s == 0 else (1 - SMOOTHING) * self._step_s + SMOOTHING * step_s
        vain, self._reluctance = self._reluctance.vain, self._reluctance.took(step_s, self._clock.now())
        if self._reluctance.vain > vain:
            log.info("the last move brought nothing, steps take %.3g s: the next has to promise more", self._step_s)

    async def run(self) -> None:
        """Look whenever there is reason to, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            stage = self._stage
            if stage is None or self._found is not None or self._clock.now() < self._pause_until:
                continue
            if self._leaving:
                await self._while_valid(stage, self._replace(stage))
            elif self._better is not None and self._step_s and self._clock.now() - self._looked_at >= GAIN_EVERY_S:
                await self._while_valid(stage, self._improve(stage, self._better))
                self._looked_at = self._clock.now()

    async def _while_valid(self, stage: Stage, looking: Awaitable[None]) -> None:
        """Look as long as this epoch runs and nobody else wants to go."""
        task, leaving = asyncio.ensure_future(looking), self.leaving
        try:
            while not task.done() and self._stage is stage and self.leaving == leaving:
                await asyncio.wait({task}, timeout=TICK_S)
            if task.done():
                task.result()
        except (SwarmUnreachable, Incompatible) as error:
            log.info("no other plan: %s", error)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _replace(self, stage: Stage) -> None:
        without = self.leaving | self._shunned_now()
        steps_left = max(0, self._steps - self._step)
        nobody: Holders = {}  # who leaves gives its state as it is now: copies of earlier steps spare nobody a download
        register = self._registering.mend(stage.plan, without, nobody, steps_left)
        self._take(stage, await self._enlist(register), gains=False)

    async def _improve(self, stage: Stage, better: Better) -> None:
        so_far = SoFar(self._step_s, max(0, self._steps - self._step), self._reluctance.gain(self._clock.now()))
        answer = await better(self._registering.improve(stage.plan, self._shunned_now(), self._kept(), so_far))
        if isinstance(answer, str):
            log.debug("nothing moves: %s", answer)
        else:
            self._take(stage, answer, gains=True)

    def _take(self, stage: Stage, enlisted: Enlisted, *, gains: bool) -> None:
        if self._stage is stage and enlisted.plan != self._registering.asked(stage.plan):
            self._found = _Found(stage.plan, enlisted, gains)

    def _kept(self) -> Holders:
        return {index: tuple(peer for peer, _ in copies) for index, copies in self._guards.held.items()}

    def _shunned_now(self) -> frozenset[PeerId]:
        now = self._clock.now()
        self._shunned = {peer: until for peer, until in self._shunned.items() if until > now}
        return frozenset(self._shunned)
