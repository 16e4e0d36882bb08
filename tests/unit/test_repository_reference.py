"""The reference loop itself: it learns, it agrees with the product's schedule, and the examples work in it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from contrib.reference.loop import learning_rate, reference_run
from contrib.reference.modules import materialise, reference_of, relative_difference
from fusion_p2p.config import TrainConfig
from fusion_p2p.graph.schema import Rule
from fusion_p2p.job.learning_rate import RateSettings, rate

CONFIG = TrainConfig(bootstrap=("/ip4/192.0.2.1/tcp/1/p2p/x",), steps=40, warmup=4, learning_rate=3e-3, batch_size=16)
EXAMPLE = dataclasses.replace(
    CONFIG,
    model="contrib.examples.two_towers:model",
    data="contrib.examples.two_towers:data",
    data_option=("examples=600",),
    batch_size=32,
)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.row(35)
def test_learning_rate_is_the_one_that_slices_are_told(schedule: str, warmup: int):
    config = TrainConfig(bootstrap=("x",), steps=60, warmup=warmup, schedule=schedule, learning_rate=0.01)  # type: ignore[arg-type]
    settings = RateSettings(0.01, schedule, warmup, 60)  # type: ignore[arg-type]
    for step in range(1, 61):
        assert learning_rate(config, step) == pytest.approx(rate(settings, step), rel=1e-12)


def test_example_model_learns_its_example_data():
    module, data = reference_of(EXAMPLE)
    losses = reference_run(module, data, EXAMPLE, steps=40).losses
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_reversed_micro_batches_are_the_same_run_up_to_rounding():
    runs = [reference_run(*reference_of(EXAMPLE), EXAMPLE, steps=5, reverse=reverse).losses for reverse in (False, True)]
    assert relative_difference(*runs) < 1e-5
    assert relative_difference(runs[0], [2 * loss for loss in runs[0]]) == pytest.approx(0.5)


def two_on_meta() -> nn.ModuleDict:
    with torch.device("meta"):
        return nn.ModuleDict({"first": nn.Linear(4, 4, bias=False), "second": nn.Linear(4, 4, bias=False)})


def test_materialised_module_keeps_ties_and_follows_rules():
    module = two_on_meta()
    module["second"].weight = module["first"].weight
    materialise(module, {"first.weight": Rule("normal", 0.0, 0.5)}, seed=3)
    assert module["second"].weight is module["first"].weight
    assert module["first"].weight.std().item() == pytest.approx(0.5, abs=0.25)


def test_a_parameter_without_memory_or_rule_is_named():
    with pytest.raises(ValueError, match=r"second\.weight"):
        materialise(two_on_meta(), {"first.weight": Rule("constant", 1.0)}, seed=3)
