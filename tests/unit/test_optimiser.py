from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion_p2p.execute.optimiser import UpdatePoint, moment_names, update
from fusion_p2p.wire.job_messages import OptimiserSettings

CASES: list[tuple[OptimiserSettings, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (OptimiserSettings(name="sgd"), torch.optim.SGD, {}),
    (OptimiserSettings(name="sgd", momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (
        OptimiserSettings(name="sgd", momentum=0.8, weight_decay=0.01),
        torch.optim.SGD,
        {"momentum": 0.8, "weight_decay": 0.01},
    ),
    (OptimiserSettings(name="adam"), torch.optim.Adam, {}),
    (
        OptimiserSettings(name="adam", beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.02),
        torch.optim.Adam,
        {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.02},
    ),
    (OptimiserSettings(name="adamw", weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    (
        OptimiserSettings(name="adamw", beta1=0.85, beta2=0.99, weight_decay=0.01),
        torch.optim.AdamW,
        {"betas": (0.85, 0.99), "weight_decay": 0.01},
    ),
]


def moments_of(settings: OptimiserSettings, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(parameter) for name in moment_names(settings)}


@pytest.mark.row(35)
@pytest.mark.parametrize(("settings", "kind", "options"), CASES, ids=lambda case: getattr(case, "name", ""))
def test_fifty_steps_equal_torch_optim_bit_for_bit(
    settings: OptimiserSettings, kind: type[torch.optim.Optimizer], options: dict[str, Any]
):
    generator = torch.Generator().manual_seed(3)
    theirs = torch.randn(13, 7, generator=generator)
    ours = theirs.clone()
    moments = moments_of(settings, ours)
    optimiser = kind([theirs], lr=1.0, foreach=False, **options)
    for step in range(1, 51):
        rate = 0.01 / step
        theirs.grad = torch.randn(13, 7, generator=generator)
        optimiser.param_groups[0]["lr"] = rate
        update(settings, ours, theirs.grad.clone(), moments, UpdatePoint(rate, step))
        optimiser.step()
        assert torch.equal(ours, theirs), step


def test_gradient_is_left_as_it_was():
    for settings, _, _ in CASES:
        parameter, gradient = torch.ones(5), torch.full((5,), 0.5)
        update(settings, parameter, gradient, moments_of(settings, parameter), UpdatePoint(0.1, 1))
        assert torch.equal(gradient, torch.full((5,), 0.5))
        assert not torch.equal(parameter, torch.ones(5))
