"""Slices executed by several peers at once: the same training as the uncut model's, and the same bits every time."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from contrib.reference.loop import reference_run
from contrib.reference.modules import reference_of, relative_difference
from fusion_p2p.ids import PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.peer.tasks import SliceTasks
from fusion_p2p.plan.plan import Plan, Schedule, SlicePlan
from tests.swarm_in_memory import Owner, owner, run_config, volunteers
from tests.training.local_run import worst_difference
from tests.training.test_run import contiguous, final_state, reached

Deals = Sequence[tuple[int, ...]]
THREE: Deals = [(0, 1), (0, 1, 0, 2), (0,)]
"""Two members; three of which the first does half; one."""
IMAGES = {
    "model": "resnet",
    "data": "digits",
    "width": 8,
    "option": ("blocks=[1,1]", 'stem="small"'),
    "learning_rate": 0.05,
    **dict.fromkeys(("layers", "heads", "context", "dropout", "tied")),
}


def dealt(deals: Deals, schedule: Schedule = "1f1b") -> Callable[[Plan, Sequence[PeerId]], Plan]:
    """A plan whose slices are dealt like this, every member another peer."""

    def arrange(plan: Plan, peers: Sequence[PeerId]) -> Plan:
        free, slices = iter(peers), []
        for part, deal in zip(plan.slices, deals, strict=True):
            members = [next(free) for _ in range(max(deal) + 1)]
            in_flight = plan.micro_batches if schedule == "gpipe" else part.in_flight
            slices.append(SlicePlan(members[0], in_flight, part.recompute, tuple(members[1:]), deal))
        return replace(plan, slices=tuple(slices), schedule=schedule)

    return arrange


async def train(config: Any, deals: Deals = THREE, schedule: Schedule = "1f1b") -> Owner:
    peers = sum(max(deal) + 1 for deal in deals)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, peers) as helpers,
        owner(network, config, contiguous(len(deals)), helpers, arrange=dealt(deals, schedule)) as owned,
    ):
        await owned.run.finish()
    return owned


def parameters_of(run: Path) -> dict[str, torch.Tensor]:
    state = final_state(run)
    return {name.removeprefix("parameter/"): tensor for name, tensor in state.items() if name.startswith("parameter/")}


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": True, "steps": 4},
        {
            "tied": True,
            "optimiser": "adam",
            "learning_rate": 1e-3,
            "clip": 1.0,
            "micro_batches": 6,
            "batch_size": 12,
            "steps": 3,
        },
    ],
    ids=["sgd-recompute", "adam-clip-tied-uneven"],
)
@pytest.mark.row(35)
async def test_replicas_train_as_one_pytorch_loop_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = run_config(tmp_path / "run", **settings)
    owned = await train(config)
    module, data = reference_of(config)
    expected = reference_run(module, data, config, steps=config.steps).losses
    assert relative_difference(owned.recorder.losses, expected) <= 1e-6
    kept, names = parameters_of(config.run), dict(module.named_parameters())
    ours = {name: kept[name] for name in names}
    tolerance = 1e-6 if config.optimiser == "sgd" else 1e-4  # Adam divides by what may be almost nothing
    assert worst_difference(ours, {name: tensor.detach() for name, tensor in names.items()}) <= tolerance


async def test_dropout_of_replicas_is_that_of_the_uncut_model(tmp_path: Path) -> None:
    one, many = run_config(tmp_path / "one", dropout=0.2, steps=3), run_config(tmp_path / "many", dropout=0.2, steps=3)
    whole, shared = await train(one, [(0,)]), await train(many)
    assert relative_difference(shared.recorder.losses, whole.recorder.losses) <= 1e-6
    assert worst_difference(parameters_of(many.run), parameters_of(one.run)) <= 1e-6


async def test_both_schedules_and_every_run_give_the_same_bits(tmp_path: Path) -> None:
    schedules: list[Schedule] = ["1f1b", "gpipe", "1f1b"]
    runs = [run_config(tmp_path / str(number), tied=True, clip=1.0, steps=3) for number in range(3)]
    losses = [(await train(run, schedule=schedule)).recorder.losses for run, schedule in zip(runs, schedules, strict=True)]
    assert losses[0] == losses[1] == losses[2]
    states = [final_state(run.run) for run in runs]
    for other in states[1:]:
        assert all(torch.equal(states[0][name], other[name]) for name in states[0])


@pytest.mark.row(29)
async def test_statistics_of_batch_norm_are_the_mean_of_the_members_by_micro_batches(tmp_path: Path) -> None:
    """Five micro-batches, of which the first member does three: each averages over its own, from the same beginning."""
    config = run_config(tmp_path / "run", **IMAGES, micro_batches=5, batch_size=40, steps=2)
    deal = (0, 1, 0)
    await train(config, [deal, deal])
    module, data = reference_of(config)
    optimiser = torch.optim.SGD(module.parameters(), config.learning_rate, momentum=config.momentum, foreach=False)
    for step in (1, 2):
        members = [copy.deepcopy(module), copy.deepcopy(module)]
        for index in range(5):
            batch = data.micro_batch(step, index)
            (module(**batch) / 5).backward()
            members[deal[index % 3]](**batch)
        for name, buffer in module.named_buffers():
            ours, theirs = (dict(member.named_buffers())[name] for member in members)
            if buffer.is_floating_point():  # a counter is right as it is: it counts all micro-batches
                buffer.copy_(0.6 * ours + 0.4 * theirs)
        optimiser.step()
        optimiser.zero_grad()
    kept = parameters_of(config.run)
    for name, tensor in module.state_dict().items():
        # Sums in another order differ by up to 1e-4 behind a BatchNorm; another mean of the statistics by a hundred times that.
        torch.testing.assert_close(kept[name], tensor, rtol=1e-3, atol=2e-4)


async def test_all_members_hold_the_same_state_and_validate_the_same_model(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", **IMAGES, steps=3, validate_every=1, validation_batches=5)
    deals: Deals = [(0, 1, 1), (0, 1)]
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 4) as helpers,
        owner(network, config, contiguous(2), helpers, arrange=dealt(deals)) as owned,
    ):
        finishing = asyncio.create_task(owned.run.finish())
        await reached(owned.recorder, 1)
        held: dict[int, SliceTasks] = {}
        for volunteer in helpers:
            held |= volunteer.service._engagements.first.built.tasks
        await finishing
    assert sorted(held) == [0, 1, 2, 3]
    for first, second in ((0, 1), (2, 3)):
        ours, theirs = (held[number]._executor.state.named_tensors() for number in (first, second))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    module, data = reference_of(config)
    module.load_state_dict(parameters_of(config.run))
    module.eval()
    with torch.no_grad():
        expected = sum(float(module(**data.validation(index))) for index in range(5)) / 5
    assert owned.recorder.snapshots[-1].validation_loss == pytest.approx(expected, rel=1e-5)
