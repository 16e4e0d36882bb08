"""bf16: autocast around the slice, float32 master weights, crossing values of the declared dtype."""

from __future__ import annotations

import random

import pytest
import torch

from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.training.builtin import example
from tests.training.cuts import random_cut
from tests.training.local_run import DEVICES, LocalRun, accumulate, gradients_of, worst_difference

BF16 = TrainingSettings(seed=7, optimiser=OptimiserSettings(name="adamw"), precision="bf16")
pytestmark = pytest.mark.parametrize("device", DEVICES, ids=str)


@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_cut_run_in_bf16_follows_autocast_on_the_module(family: str, device: torch.device):
    model = example(family)
    batches = [{key: tensor.to(device) for key, tensor in batch.items()} for batch in model.batches(2)]
    module = model.module.to(device)
    with torch.autocast(device.type, torch.bfloat16):
        losses = accumulate(module, batches)
    expected = gradients_of(module)
    slice_of = random_cut(model.graph, random.Random(1), 4, 0.1)
    run = LocalRun(model.graph, slice_of, {}, settings=BF16, micro_batches=2, device=device)
    assert len(run.slices) == 4
    assert run.accumulate(1, batches) == pytest.approx(losses, rel=1e-2)
    assert worst_difference(run.gradients(), expected) <= 5e-2


def test_bf16_computes_in_bf16_and_keeps_float32_outside(device: torch.device):
    model = example("gpt2")
    slice_of = random_cut(model.graph, random.Random(1), 3, 0.1)
    batch = model.batches(1)[0]
    half, full = (
        LocalRun(model.graph, slice_of, {}, settings=settings, device=device)
        for settings in (BF16, BF16.model_copy(update={"precision": "fp32"}))
    )
    crossing = [edge.value for edge in half.cut.edges if model.graph.types[edge.value].dtype == "float32"]
    values, exact = half.forward(1, 0, batch), full.forward(1, 0, batch)
    assert crossing
    for value in crossing:
        assert values[value].dtype == torch.float32
        assert torch.allclose(values[value], exact[value], atol=0.1)
    assert any(not torch.equal(values[value], exact[value]) for value in crossing)
    half.backward(1, 0)
    assert all(gradient.dtype == torch.float32 for gradient in half.gradients().values())


def test_training_in_bf16_learns(device: torch.device):
    model = example("gpt2")
    run = LocalRun(model.graph, random_cut(model.graph, random.Random(1), 3, 0.1), {}, settings=BF16, device=device)
    batches = model.batches(1)
    losses = [run.train(step, batches, 5e-3)[0] for step in range(1, 31)]
    assert losses[-1] < 0.5 * losses[0]
