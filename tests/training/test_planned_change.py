"""A plan that changes while its job runs: between two steps, as a new epoch, with the states where they are."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fusion_p2p.errors import SliceFailed
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner import changing, retuner
from fusion_p2p.owner.ledger import Start, read_ledger
from fusion_p2p.peer import engagements
from fusion_p2p.peer.building import build_epoch
from fusion_p2p.peer.epoch_work import BuiltEpoch
from fusion_p2p.plan import retuning
from fusion_p2p.plan.finishing import traceless
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import EdgePlan, Plan
from fusion_p2p.wire.job_messages import Prepare
from tests.swarm_in_memory import Owner, owner, run_config, volunteers
from tests.unit.networks import network as network_at

ADAM: dict[str, Any] = {"optimiser": "adam", "learning_rate": 1e-3, "checkpoint_every": 2}


def contiguous(graph: Any) -> list[int]:
    return [min(2, index * 3 // len(graph.nodes)) for index in range(len(graph.nodes))]


def coded(codec: str) -> Callable[[Plan, Any], Plan]:
    return lambda plan, _: dataclasses.replace(plan, edges=tuple(dataclasses.replace(edge, codec=codec) for edge in plan.edges))


async def train(config: Any, codec: str) -> Owner:
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous, helpers, coded(codec)) as owned,
    ):
        await owned.run.finish()
    return owned


def starts(run: Path) -> list[Start]:
    lines = [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]
    return [Start(**line | {"codecs": tuple(line["codecs"])}) for line in lines if line["kind"] == "start"]


def refusing(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Peers refuse the first changes, so many times; the epochs that they were asked for."""
    asked: list[int] = []

    async def build(*arguments: Any) -> BuiltEpoch:
        prepare = next(argument for argument in arguments if isinstance(argument, Prepare))
        if prepare.beside:
            asked.append(prepare.epoch)
            if len(asked) <= times:
                raise SliceFailed("no room for a change")
        return await build_epoch(*arguments)

    monkeypatch.setattr(engagements, "build_epoch", build)
    return asked


async def test_a_finish_is_a_run_that_was_stopped_and_resumed_with_other_codecs(tmp_path: Path) -> None:
    changed = await train(run_config(tmp_path / "changed", finish=0.5, **ADAM), "topk:5")
    stopped = await train(run_config(tmp_path / "other", steps=3, **ADAM), "topk:5")
    resumed = await train(run_config(None, resume=tmp_path / "other", **ADAM), "int8")
    assert changed.recorder.losses == [*stopped.recorder.losses, *resumed.recorder.losses]
    first, second = starts(tmp_path / "changed")
    assert (first.epoch, first.state_step, set(first.codecs)) == (1, 0, {"topk:5"})
    assert (second.epoch, second.state_step, set(second.codecs)) == (2, 3, {"int8"})
    assert [snapshot.epoch for snapshot in changed.recorder.snapshots] == [1, 1, 1, 2, 2, 2]
    assert {path.name for path in (tmp_path / "changed" / "plans").iterdir()} == {"epoch-1.json", "epoch-2.json"}
    assert any("topk:5 -> int8" in line for line in changed.recorder.lines)


async def test_a_run_that_is_resumed_in_its_finish_has_the_codecs_of_its_finish(tmp_path: Path) -> None:
    await train(run_config(tmp_path / "run", steps=6, finish=0.5, **ADAM), "topk:5")
    resumed = await train(run_config(None, resume=tmp_path / "run", steps=8, finish=0.5, **ADAM), "topk:5")
    assert [snapshot.step for snapshot in resumed.recorder.snapshots] == [7, 8]
    assert [set(start.codecs) for start in starts(tmp_path / "run")] == [{"topk:5"}, {"int8"}, {"int8"}]
    history = read_ledger(tmp_path / "run" / "ledger.jsonl")
    assert history.ended
    assert sorted(history.fates) == list(range(1, 9))


async def test_a_peer_that_refuses_leaves_the_run_on_its_plan_until_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changing, "PAUSE_STEPS", 2)
    asked = refusing(monkeypatch, times=3)
    changed = await train(run_config(tmp_path / "run", steps=6, finish=0.5, **ADAM), "topk:5")
    assert [snapshot.epoch for snapshot in changed.recorder.snapshots] == [1, 1, 1, 1, 1, 3]
    assert sorted(set(asked)) == [2, 3]
    assert [(start.epoch, start.state_step) for start in starts(tmp_path / "run")] == [(1, 0), (3, 5)]
    assert any("the plan stays as it is" in line and "no room for a change" in line for line in changed.recorder.lines)


async def test_a_peer_that_is_lost_while_the_plan_changes_is_replaced_and_then_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def build(*arguments: Any) -> BuiltEpoch:
        if any(isinstance(argument, Prepare) and argument.epoch == 2 for argument in arguments):
            asked.set()
            await asyncio.Event().wait()
        return await build_epoch(*arguments)

    monkeypatch.setattr(engagements, "build_epoch", build)
    config = run_config(tmp_path / "run", finish=0.5, checkpoint_every=2)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 4) as helpers,
        owner(network, config, contiguous, helpers, coded("topk:5"), executing=3) as owned,
    ):
        finishing = asyncio.create_task(owned.run.finish())
        await asyncio.wait_for(asked.wait(), 60)
        network.crash(helpers[1].peer.peer_id)
        await asyncio.wait_for(finishing, 25)
    assert [(start.epoch, start.state_step) for start in starts(tmp_path / "run")] == [(1, 0), (3, 2), (4, 3)]
    assert [set(start.codecs) for start in starts(tmp_path / "run")] == [{"topk:5"}, {"topk:5"}, {"int8"}]


def test_a_finish_takes_the_least_lossy_codec_that_is_not_much_larger() -> None:
    assert coded_as("topk:5") == "int8"
    assert coded_as("topk:100") == "int4"
    assert coded_as("bf16") == "bf16"


def coded_as(codec: str) -> str:
    """What the finish makes of an edge."""
    plan = Plan(Digest("0" * 64), "by hand", 2, (0, 1), (), (EdgePlan(0, 0, 1, codec),))
    return traceless(plan).edges[0].codec


class Links:
    """Links between three peers, as slow as they are told to be, and as noisy as measurements are."""

    def __init__(self) -> None:
        self.bytes_per_s = 1e9
        self.asked = 0

    async def survey(self, peers: frozenset[PeerId]) -> Network:
        self.asked += 1
        noisy = network_at(
            range(len(peers)), speeds=[1e8] * 3, between=(0.001, (1 + 0.03 * (-1) ** self.asked) / self.bytes_per_s)
        )
        return dataclasses.replace(noisy, peers=tuple(sorted(peers)))


async def test_a_link_that_slows_down_changes_the_codec_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retuner, "TICK_S", 0.01)
    monkeypatch.setattr(retuning, "EVERY_S", 0.05)
    monkeypatch.setattr(retuning, "PAUSE_S", 0.1)
    links, config = Links(), run_config(tmp_path / "run", codec="adaptive", steps=10_000)
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3) as helpers,
        owner(network, config, contiguous, helpers, survey=links.survey) as owned,
    ):
        finishing = asyncio.create_task(owned.run.finish())
        await looked(owned, links, 5)
        assert len(starts(tmp_path / "run")) == 1
        links.bytes_per_s = 1e5
        await until(owned, lambda: len(starts(tmp_path / "run")) == 2)
        await looked(owned, links, 20)
        finishing.cancel()
        await asyncio.gather(finishing, return_exceptions=True)
    assert [set(start.codecs) for start in starts(tmp_path / "run")] == [{"none"}, {"int4"}]


async def looked(owned: Owner, links: Links, times: int) -> None:
    """Wait until the owner has looked at the links so many times more."""
    before = links.asked
    await until(owned, lambda: links.asked >= before + times)


async def until(owned: Owner, condition: Callable[[], bool]) -> None:
    """Wait for a condition that may come true with any step."""
    async with asyncio.timeout(60):
        while not condition():
            owned.recorder.shown.clear()
            await owned.recorder.shown.wait()
