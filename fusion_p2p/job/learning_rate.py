"""The learning rate of a step: linear warm-up, then constant, linear or cosine decay to zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True)
class RateSettings:
    """peak: highest rate. warmup: steps in which it rises. steps: all steps of the run, where a decay reaches zero."""

    peak: float
    schedule: Schedule
    warmup: int
    steps: int


def rate(settings: RateSettings, step: int) -> float:
    """The rate of a step; steps count from 1. It is peak * step / warmup up to step `warmup`, then decays over the rest.

    The last step still moves: with R = steps - warmup steps left after warm-up and k = step - warmup of them begun, the rest is
    1 - (k - 1) / R, linearly or through (1 + cos(pi * (k - 1) / R)) / 2.
    """
    if step <= settings.warmup:
        return settings.peak * step / settings.warmup
    if settings.schedule == "constant":
        return settings.peak
    progress = min(1.0, (step - settings.warmup - 1) / max(1, settings.steps - settings.warmup))
    if settings.schedule == "linear":
        return settings.peak * (1.0 - progress)
    return settings.peak * 0.5 * (1.0 + math.cos(math.pi * progress))
