from __future__ import annotations

import asyncio
import dataclasses
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from contrib.reference.loop import reference_run
from contrib.reference.modules import reference_of, relative_difference
from fusion_p2p.errors import RunStopped
from fusion_p2p.graph.schema import Graph
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner.checkpoint import newest_checkpoint
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.ledger import read_ledger
from tests.swarm_in_memory import Owner, Recorder, owner, run_config, volunteers
from tests.training.cuts import random_cut


def contiguous(parts: int):
    return lambda graph: [min(parts - 1, index * parts // len(graph.nodes)) for index in range(len(graph.nodes))]


def scattered(graph: Graph) -> list[int]:
    """Six slices that run through residual branches; with three peers each holds two."""
    return random_cut(graph, random.Random(5), 6, 0.3)


async def train(config: Any, slices: Any = None, peers: int = 3, **options: int) -> Owner:
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, peers) as helpers,
        owner(network, config, slices or contiguous(3), helpers, **options) as owned,
    ):
        await owned.run.finish()
    return owned


def final_state(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(run / "checkpoint", print)
    assert checkpoint is not None
    return {name: checkpoint.tensor(name) for name in checkpoint.names}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tied": True},
        {"optimiser": "adam", "learning_rate": 1e-3, "warmup": 3, "clip": 1.0, "tied": True},
        {"recompute": True},
    ],
    ids=["sgd", "tied", "adam-clip-tied", "recompute"],
)
@pytest.mark.row(35)
async def test_three_peers_train_as_one_pytorch_loop_does(tmp_path: Path, settings: dict[str, Any]) -> None:
    config = run_config(tmp_path / "run", **settings)
    owned = await train(config)
    module, data = reference_of(config)
    expected = reference_run(module, data, config, steps=config.steps).losses
    assert len(owned.recorder.losses) == config.steps
    assert relative_difference(owned.recorder.losses, expected) <= 1e-6


@pytest.mark.row(25)
@pytest.mark.row(29)
async def test_a_residual_network_with_batch_norm_trains_alike_when_cut_through_its_branches(tmp_path: Path) -> None:
    images = {
        "model": "resnet",
        "data": "digits",
        "layers": None,
        "heads": None,
        "context": None,
        "dropout": None,
        "tied": None,
    }
    config = run_config(
        tmp_path / "run", **images, width=8, option=("blocks=[1,1]", 'stem="small"'), batch_size=32, learning_rate=0.05
    )
    owned = await train(config, scattered, in_flight=3, credits=1)
    module, data = reference_of(config)
    expected = reference_run(module, data, config, steps=config.steps).losses
    assert relative_difference(owned.recorder.losses, expected) <= 1e-5
    kept, buffers = final_state(config.run), dict(module.named_buffers())
    for name, buffer in buffers.items():
        torch.testing.assert_close(kept[f"parameter/{name}"], buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.row(36)
async def test_dropout_is_the_same_bits_however_the_model_is_cut(tmp_path: Path) -> None:
    one = run_config(tmp_path / "one", dropout=0.2)
    three = run_config(tmp_path / "three", dropout=0.2)
    whole = await train(one, contiguous(1), peers=1)
    cut_up = await train(three, contiguous(3))
    assert whole.recorder.losses == cut_up.recorder.losses
    expected, found = final_state(one.run), final_state(three.run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


async def test_a_resumed_run_ends_where_an_undisturbed_one_does(tmp_path: Path) -> None:
    straight = run_config(tmp_path / "straight", optimiser="adam", learning_rate=1e-3, steps=6, checkpoint_every=2)
    await train(straight)
    first = run_config(tmp_path / "broken", optimiser="adam", learning_rate=1e-3, steps=4, checkpoint_every=2)
    await train(first)
    second = run_config(None, resume=tmp_path / "broken", optimiser="adam", learning_rate=1e-3, steps=6, checkpoint_every=2)
    resumed = await train(second)
    assert [snapshot.step for snapshot in resumed.recorder.snapshots] == [5, 6]
    expected, found = final_state(straight.run), final_state(tmp_path / "broken")
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert read_ledger(tmp_path / "broken" / "ledger.jsonl").step == 6


async def test_validation_is_of_the_model_without_dropout_and_changes_nothing(tmp_path: Path) -> None:
    plain = await train(run_config(tmp_path / "plain", dropout=0.3, steps=4))
    checked = await train(run_config(tmp_path / "checked", dropout=0.3, steps=4, validate_every=2, validation_batches=3))
    assert checked.recorder.losses == plain.recorder.losses
    losses = [snapshot.validation_loss for snapshot in checked.recorder.snapshots]
    assert losses[0] is not None
    assert losses[1] != losses[0]
    config = run_config(tmp_path / "x", dropout=0.3)
    module, data = reference_of(config)
    module.eval()
    with torch.no_grad():
        before = sum(float(module(**data.validation(index))) for index in range(3)) / 3
    assert losses[0] == pytest.approx(before, rel=1e-6)


@pytest.mark.row(12)
async def test_a_run_that_waits_for_a_peer_keeps_its_checkpoint_and_says_how_it_is_resumed(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", steps=10_000, checkpoint_every=2)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous(3), helpers) as owned,
    ):
        finishing = asyncio.create_task(owned.run.finish())
        await reached(owned.recorder, 5)
        network.crash(helpers[1].peer.peer_id)
        async with asyncio.timeout(15):
            await owned.swarm.waits.wait()
        finishing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await finishing
    said = owned.recorder.lines[-1]
    assert re.search(r"interrupted.*last checkpoint is of step \d+; resume with: fusion-peer train --resume", said)
    history = read_ledger(config.run / "ledger.jsonl")
    assert history.step - history.checkpoint_step <= 2
    assert newest_checkpoint(config.run / "checkpoint", print).step == history.checkpoint_step


@pytest.mark.row(5)
async def test_streams_that_are_reset_in_the_middle_change_nothing(tmp_path: Path) -> None:
    undisturbed = await train(run_config(tmp_path / "undisturbed", steps=8))
    config = run_config(tmp_path / "reset", steps=8)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous(3), helpers) as owned,
    ):
        finishing = asyncio.create_task(owned.run.finish())
        for step in (1, 3, 5):
            await reached(owned.recorder, step)
            assert network.reset_streams() > 0
        await finishing
    assert owned.recorder.losses == undisturbed.recorder.losses


@pytest.mark.row(30)
async def test_steps_that_are_not_finite_are_skipped_named_and_three_in_a_row_end_the_run(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", learning_rate=1e30, steps=50, checkpoint_every=1)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous(3), helpers) as owned,
    ):
        with pytest.raises(RunStopped, match=r"3 steps in a row.*is not finite"):
            await owned.run.finish()
    named = [line for line in owned.recorder.lines if "is skipped" in line]
    assert any(f"{volunteer.peer.peer_id}: value" in line and "computed by" in line for line in named for volunteer in helpers)
    history = read_ledger(config.run / "ledger.jsonl")
    assert [type(fate).__name__ for fate in history.fates.values()][-2:] == ["Skip", "Skip"]
    assert history.checkpoint_step >= history.step - 1


async def test_a_plan_that_is_none_and_addresses_that_are_none_make_the_owner_wait_not_fail(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run", steps=2)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous(3), helpers) as owned,
    ):
        good = owned.swarm.enlisted(owned.swarm.plan)
        bad = dataclasses.replace(good, plan=dataclasses.replace(good.plan, slice_of=good.plan.slice_of[:-1]))
        nowhere = tuple(contact.model_copy(update={"addresses": ("/ip4/1.2.3.4",)}) for contact in good.contacts)
        answers = iter([bad, dataclasses.replace(good, contacts=nowhere)])

        async def enlist(register: object) -> Enlisted:
            return next(answers)

        owned.run._enlist = enlist
        await owned.run.finish()
    assert any("is refused" in line for line in owned.recorder.lines)
    assert len(owned.recorder.losses) == 2


async def test_what_does_not_fit_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    config = run_config(tmp_path / "run")
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3, offered_bytes=1 << 16) as helpers,
        owner(network, config, contiguous(3), helpers) as owned,
    ):
        finishing = asyncio.create_task(owned.run.finish())
        while not any("more than the" in line for line in owned.recorder.lines):
            await asyncio.wait([finishing], timeout=0.05)
            assert not finishing.done()
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)


async def reached(recorder: Recorder, step: int, timeout_s: float = 60.0) -> None:
    """Wait until a step was shown."""
    async with asyncio.timeout(timeout_s):
        while not recorder.snapshots or recorder.snapshots[-1].step < step:
            recorder.shown.clear()
            await recorder.shown.wait()
