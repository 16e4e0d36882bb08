"""The judge of candidates: ratios fitted to each, memory respected, then a simulated step under every schedule allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.estimate import formula
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.memory import within_memory
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_layout
from fusion_p2p.plan.plan import Schedule
from fusion_p2p.plan.ratios import adatopk, most, with_ratios
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.plan.simulate import simulate

SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")


@dataclass(eq=False, slots=True)
class Judge:
    """Keeps the fastest of the layouts that it was offered. `tasks` counts what simulating cost, in tasks simulated."""

    chain: Chain
    network: Network
    terms: Terms
    best: Layout | None = None
    best_s: float = math.inf
    tasks: int = 0
    refusal: NoPlan | None = None
    seen: dict[tuple[tuple[Stage, ...], bool], float] = field(default_factory=dict)

    def offer(self, layout: Layout) -> float:
        """Seconds of a step of the layout under its better schedule and with ratios fitted to it; infinite: it does not fit."""
        key = layout.stages, layout.recompute
        if key not in self.seen:
            fitted = with_ratios(self.chain, self.network, layout, self.terms)
            self.seen[key] = min(self._under(replace(fitted, schedule=schedule)) for schedule in self.schedules())
        return self.seen[key]

    def stages(self, scheduler: str, stages: Sequence[Stage], *, recompute: bool) -> float:
        """The same for stages alone."""
        return self.offer(Layout(scheduler, tuple(stages), recompute=recompute))

    def estimate(self, stages: Sequence[Stage], *, recompute: bool) -> float:
        """Seconds by the formula. `adaptive` ratios end within a few percent of those with all links at the most, and cost far
        more to find.
        """
        layout = Layout("estimate", tuple(stages), recompute=recompute)
        links = formula(self.chain, self.network, layout, self.terms.micro_batches)
        if self.terms.codec == "adatopk":
            return links.step_s(adatopk(links.message_s, self.terms.ratio))
        return links.step_s(np.full(len(stages) - 1, most(self.terms)))

    def fastest(self, count: int) -> list[tuple[tuple[Stage, ...], bool]]:
        """Stages, and whether they recompute, of the fastest layouts offered."""
        return sorted(self.seen, key=lambda key: self.seen[key])[:count]

    def schedules(self) -> tuple[Schedule, ...]:
        """What the terms allow."""
        return SCHEDULES if self.terms.schedule == "auto" else (self.terms.schedule,)

    def _under(self, layout: Layout) -> float:
        within = within_memory(self.chain, self.network, layout, self.terms)
        if isinstance(within, NoPlan):
            self.refusal = self.refusal or within
            return math.inf
        seconds = simulate(pipeline_of_layout(self.chain, self.network, layout, self.terms)).step_s
        self.tasks += 2 * len(layout.stages) * self.terms.micro_batches
        if seconds < self.best_s:
            self.best, self.best_s = layout, seconds
        return seconds
