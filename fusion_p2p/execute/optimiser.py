"""SGD with momentum, Adam and AdamW by name: torch.optim's formulas on tensors that the slice's state owns.

Operations and their order are those of torch's single-tensor implementations, so that on a CPU the result is bit-equal. Two
things are said differently: moments start as zeros (torch clones the first gradient, the same value), and the bias correction
of Adam counts the run's steps, so that a step alone determines it; a skipped step counts there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fusion_p2p.wire.job_messages import OptimiserSettings

Moments = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class UpdatePoint:
    """What a step's update depends on beside tensors: the learning rate and the step, counted from 1."""

    rate: float
    step: int


def moment_names(settings: OptimiserSettings) -> tuple[str, ...]:
    """The moments kept per trainable parameter, each of the parameter's own shape and dtype."""
    if settings.name == "sgd":
        return ("momentum",) if settings.momentum else ()
    return ("first_moment", "second_moment")


@torch.no_grad()
def update(settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, moments: Moments, at: UpdatePoint) -> None:
    """One optimiser step of one parameter, in place. `gradient` is clipped already and is not kept or changed."""
    _FORMULAS[settings.name](settings, parameter, gradient, moments, at)


def _sgd(settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, moments: Moments, at: UpdatePoint) -> None:
    if settings.weight_decay:
        gradient = gradient.add(parameter, alpha=settings.weight_decay)
    if settings.momentum:
        gradient = moments["momentum"].mul_(settings.momentum).add_(gradient)
    parameter.add_(gradient, alpha=-at.rate)


def _adam(settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, moments: Moments, at: UpdatePoint) -> None:
    if settings.weight_decay:
        gradient = gradient.add(parameter, alpha=settings.weight_decay)
    _adam_move(settings, parameter, gradient, moments, at)


def _adamw(settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, moments: Moments, at: UpdatePoint) -> None:
    if settings.weight_decay:
        parameter.mul_(1 - at.rate * settings.weight_decay)
    _adam_move(settings, parameter, gradient, moments, at)


def _adam_move(settings: OptimiserSettings, parameter: Tensor, gradient: Tensor, moments: Moments, at: UpdatePoint) -> None:
    first = moments["first_moment"].lerp_(gradient, 1 - settings.beta1)
    second = moments["second_moment"].mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    step_size = at.rate / (1 - settings.beta1**at.step)
    denominator = (second.sqrt() / (1 - settings.beta2**at.step) ** 0.5).add_(settings.epsilon)
    parameter.addcdiv_(first, denominator, value=-step_size)


_FORMULAS: dict[str, Callable[[OptimiserSettings, Tensor, Tensor, Moments, UpdatePoint], None]] = {
    "sgd": _sgd,
    "adam": _adam,
    "adamw": _adamw,
}
