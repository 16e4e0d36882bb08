"""The owner keeps codecs to the links: it asks its peers what their links are like, and has `plan.retuning` judge."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fusion_p2p.clock import Clock
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import PlanRequest
from fusion_p2p.plan.retuning import Rhythm, retuned

log = logging.getLogger(__name__)

TICK_S = 1.0

Survey = Callable[[frozenset[PeerId]], Awaitable[Network | None]]
"""The network of these peers as it is now; None while not all of them can be found."""


class Retuner:
    """Wants other codecs when the links have changed. It looks while `run` runs, beside training."""

    def __init__(self, survey: Survey, graph: Graph, request: PlanRequest, clock: Clock) -> None:
        self._survey, self._graph, self._request, self._clock = survey, graph, request, clock
        self._costs = workload(graph)
        self._rhythm = Rhythm(looked_at=clock.now())
        self._plan: Plan | None = None
        self._better: tuple[Plan, Plan] | None = None

    async def run(self) -> None:
        """Look at the links whenever it is time, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            if self._plan is not None and self._better is None and self._rhythm.due(self._clock.now()):
                await self._look(self._plan)

    def plan_after(self, step: int, plan: Plan) -> Plan:
        """The plan with better codecs, once they are known."""
        better, self._better = self._better, None
        if better is None or better[0] != plan:
            return plan
        self._rhythm = self._rhythm.changed(self._clock.now())
        return better[1]

    def took(self, plan: Plan, step_s: float) -> None:
        """A step under this plan took so long."""
        self._plan = plan
        self._rhythm = self._rhythm.took(step_s, plan.predicted_step_s)

    async def _look(self, plan: Plan) -> None:
        network = await self._survey(plan.peers)
        self._rhythm = self._rhythm.looked(self._clock.now())
        if network is None:
            log.info("the links of the peers are not known: not all of them are found")
            return
        found = await asyncio.to_thread(retuned, self._graph, self._costs, plan, network, self._request)
        log.info("codecs by the links as they are now: %s", "as they are" if found == plan else "others")
        if found != plan:
            self._better = plan, found
