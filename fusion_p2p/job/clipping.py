"""Clipping by the global gradient norm, from sums of squares that every slice reports for the parameters it answers for."""

from __future__ import annotations

import math
from collections.abc import Iterable

EPSILON = 1e-6
"""Added to the norm, as torch.nn.utils.clip_grad_norm_ does."""


def gradient_norm(squares: Iterable[float]) -> float:
    """The norm of all gradients together; sums of squares per parameter in graph order, each tied one once."""
    return math.sqrt(math.fsum(squares))


def clip_coefficient(squares: Iterable[float], max_norm: float | None) -> float:
    """What every gradient is multiplied by: max_norm / (norm + 1e-6), at most 1; 1 without a limit.

    The norm must be finite: a step whose gradients are not is skipped, not clipped.
    """
    if max_norm is None:
        return 1.0
    return min(1.0, max_norm / (gradient_norm(squares) + EPSILON))
