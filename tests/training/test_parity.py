"""Whole runs of several slices against a plain PyTorch loop: original module, autograd, torch.optim, clip_grad_norm_."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.slices import cut
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings
from tests.training.builtin import Example, example
from tests.training.cuts import random_cut
from tests.training.local_run import DEVICES, LocalRun, accumulate

STEPS, MICRO_BATCHES = 20, 2
OPTIMISERS: dict[str, tuple[OptimiserSettings, type[torch.optim.Optimizer], dict[str, Any], float]] = {
    "sgd": (OptimiserSettings(name="sgd", momentum=0.9), torch.optim.SGD, {"momentum": 0.9}, 0.02),
    "adam": (OptimiserSettings(name="adam"), torch.optim.Adam, {}, 1e-3),
    "adamw": (OptimiserSettings(name="adamw", weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}, 1e-3),
}


def reference(model: Example, name: str, max_norm: float | None) -> list[list[float]]:
    _, kind, options, rate = OPTIMISERS[name]
    optimiser = kind(model.module.parameters(), lr=rate, foreach=False, **options)
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(accumulate(model.module, model.batches(MICRO_BATCHES, step)))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.module.parameters(), max_norm, foreach=False)
        optimiser.step()
        optimiser.zero_grad()
    return losses


def run_of(model: Example, name: str, slice_of: list[int], **options: Any) -> LocalRun:
    settings = TrainingSettings(seed=7, optimiser=OPTIMISERS[name][0])
    return LocalRun(model.graph, slice_of, {}, settings=settings, micro_batches=MICRO_BATCHES, **options)


def train(run: LocalRun, model: Example, name: str, max_norm: float | None) -> list[list[float]]:
    rate = OPTIMISERS[name][3]
    return [run.train(step, model.batches(MICRO_BATCHES, step), rate, max_norm) for step in range(1, STEPS + 1)]


def worst_relative(ours: list[list[float]], theirs: list[list[float]]) -> float:
    left, right = torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
    return float(((left - right) / right).abs().max())


@pytest.mark.row(26)
@pytest.mark.row(35)
@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("tied", [False, True])
def test_gpt2_over_slices_trains_as_a_plain_loop(name: str, max_norm: float | None, tied: bool):
    model = example("gpt2", tied=tied)
    slice_of = random_cut(model.graph, random.Random(8), 4, 0.1)
    run = run_of(model, name, slice_of)
    assert len(run.slices) == 4
    embedding = model.graph.first_parameter
    assert len(run.cut.holders(embedding)) == (2 if tied else 1)
    losses = train(run, model, name, max_norm)
    assert worst_relative(losses, reference(model, name, max_norm)) <= 1e-6
    copies = [run.slices[index].state.parameters[embedding] for index in run.cut.holders(embedding)]
    assert all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.row(29)
@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_resnet_cut_inside_a_residual_block_trains_and_evaluates_as_a_plain_loop(device: torch.device):
    model = example("resnet")
    shortcut = [index for index, node in enumerate(model.graph.nodes) if "layers.0.downsample" in node.module]
    slice_of = [0 if index < shortcut[0] else 1 if index <= shortcut[-1] else 2 for index in range(len(model.graph.nodes))]
    run = run_of(model, "sgd", slice_of, device=device)
    assert any(edge.source == 0 and edge.target == 2 for edge in run.cut.edges)
    losses = train(run, model, "sgd", None)
    assert worst_relative(losses, reference(model, "sgd", None)) <= 1e-5
    held = run.parameters()
    for buffer, tensor in model.module.named_buffers():
        assert torch.allclose(held[buffer].cpu(), tensor, rtol=1e-4, atol=1e-6), buffer
    assert int(held["stem.1.num_batches_tracked"]) == STEPS * MICRO_BATCHES
    batch = model.batches(1, step=500)[0]
    with torch.no_grad():
        expected = float(model.module.eval()(**batch))
    assert run.evaluate(STEPS, 0, batch) == pytest.approx(expected, rel=1e-4)


@pytest.mark.row(15)
@pytest.mark.parametrize("family", ["gpt2", "resnet"])
def test_restored_and_disturbed_runs_end_with_the_bits_of_an_undisturbed_one(family: str):
    """Snapshot after step 5, moved into new executors; an aborted half step and a rerun on the way."""
    model = example(family)
    slice_of = random_cut(model.graph, random.Random(4), 3, 0.05)
    calm, first = run_of(model, "adam", slice_of), run_of(model, "adam", slice_of)
    train(calm, model, "adam", 1.0)
    for step in range(1, 6):
        first.train(step, model.batches(MICRO_BATCHES, step), 1e-3, 1.0)
    snapshots = [executor.state.snapshot() for executor in first.slices]
    second = run_of(model, "adam", slice_of)
    settings = TrainingSettings(seed=7, optimiser=OPTIMISERS["adam"][0])
    device = torch.device("cpu")
    parts = cut(model.graph, slice_of).slices
    second.slices = [
        SliceExecutor(
            model.graph,
            part,
            SliceState.restore(model.graph, part, settings, device, snapshot.step, snapshot.tensors),
            settings,
            micro_batches=MICRO_BATCHES,
            recompute=False,
        )
        for part, snapshot in zip(parts, snapshots, strict=True)
    ]
    for step in range(6, STEPS + 1):
        second.forward(step, 0, model.batches(1, step=999)[0])
        for executor in second.slices:
            executor.abort_step()
        second.train(step, model.batches(MICRO_BATCHES, step), 1e-3, 1.0)
    ours, theirs = second.parameters(), calm.parameters()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
