"""Learning rate and clipping against their formulas and against torch."""

from __future__ import annotations

import math

import pytest
import torch

from fusion_p2p.job.clipping import clip_coefficient, gradient_norm
from fusion_p2p.job.learning_rate import RateSettings, rate


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 1, 0.1), ("constant", 5, 0.5), ("constant", 10, 1.0), ("constant", 11, 1.0), ("constant", 500, 1.0),
        ("linear", 10, 1.0), ("linear", 11, 1.0), ("linear", 61, 0.5), ("linear", 110, 0.01), ("linear", 111, 0.0),
        ("cosine", 4, 0.4), ("cosine", 11, 1.0), ("cosine", 61, 0.5), ("cosine", 36, 0.5 + math.sqrt(0.125)),
        ("cosine", 999, 0.0),
    ],
)  # fmt: skip
def test_rate(schedule: str, step: int, expected: float):
    settings = RateSettings(2.0, schedule, warmup=10, steps=110)  # type: ignore[arg-type]
    assert rate(settings, step) == pytest.approx(2.0 * expected, abs=1e-12)


def test_without_warm_up_the_first_step_has_the_peak():
    for schedule in ("constant", "linear", "cosine"):
        assert rate(RateSettings(0.5, schedule, warmup=0, steps=1), 1) == 0.5  # type: ignore[arg-type]


@pytest.mark.row(35)
@pytest.mark.parametrize("max_norm", [0.5, 1.0, 1000.0])
def test_clipping_is_torchs_over_all_slices(max_norm: float):
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 50, 7)]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    squares = [float(parameter.grad.double().square().sum()) for parameter in parameters if parameter.grad is not None]
    before = [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    assert gradient_norm(squares) == pytest.approx(float(norm), rel=1e-6)
    for gradient, parameter in zip(before, parameters, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient * clip_coefficient(squares, max_norm), parameter.grad, rtol=1e-6, atol=0)


def test_no_limit_changes_nothing():
    assert clip_coefficient([1e30, 4.0], None) == 1.0
