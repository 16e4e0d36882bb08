"""A run loses peers, at every moment of a step, and ends with the bits of the undisturbed run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_p2p.errors import RunStopped
from fusion_p2p.ids import PeerId
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.owner import halting, moving, owned_run
from fusion_p2p.owner.checkpoint import newest_checkpoint
from fusion_p2p.owner.ledger import read_ledger
from fusion_p2p.owner.links import Links, Parted
from fusion_p2p.owner.metrics import read_curves
from fusion_p2p.owner.training import Training
from fusion_p2p.peer import tasks
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.reluctance import HASTY_GAIN
from fusion_p2p.plan.replan import GAIN
from tests.swarm_in_memory import Owner, Volunteer, owner, run_config, volunteers

SGD: dict[str, Any] = {"steps": 6, "checkpoint_every": 2}
ADAM: dict[str, Any] = {"steps": 6, "checkpoint_every": 2, "optimiser": "adam", "learning_rate": 1e-3, "clip": 1.0}
DEADLINE_S = 90
pytestmark = pytest.mark.timeout(180)


def contiguous(parts: int) -> Callable[[Any], list[int]]:
    return lambda graph: [min(parts - 1, index * parts // len(graph.nodes)) for index in range(len(graph.nodes))]


def coded(codec: str) -> Callable[[Plan, Any], Plan]:
    return lambda plan, _: replace(plan, edges=tuple(replace(edge, codec=codec) for edge in plan.edges))


@dataclass
class World:
    """A run over three peers with spares, and the network that they are on."""

    network: SimulatedNetwork
    helpers: Sequence[Volunteer]
    owned: Owner

    def crash(self, *helpers: int) -> None:
        for helper in helpers:
            self.network.crash(self.helpers[helper].peer.peer_id)

    def peer(self, helper: int) -> PeerId:
        return self.helpers[helper].peer.peer_id

    async def finish(self) -> None:
        await asyncio.wait_for(self.owned.run.finish(), DEADLINE_S)

    def said(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in self.owned.recorder.lines)


@asynccontextmanager
async def world(
    config: Any, spares: int = 1, codec: str = "none", arrange: Callable[[Plan, Any], Plan] | None = None, **options: Any
) -> AsyncIterator[World]:
    async with (
        SimulatedNetwork(seed=1) as network,
        volunteers(network, 3 + spares) as helpers,
        owner(network, config, contiguous(3), helpers, arrange or coded(codec), executing=3, **options) as owned,
    ):
        yield World(network, helpers, owned)


def final_state(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = newest_checkpoint(run / "checkpoint", print)
    assert checkpoint is not None
    return {name: checkpoint.tensor(name) for name in checkpoint.names}


def assert_same_bits(run: Path, expected: dict[str, torch.Tensor]) -> None:
    found = final_state(run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


UNDISTURBED: dict[str, tuple[dict[str, torch.Tensor], list[float]]] = {}


async def undisturbed(
    folder: Path, settings: dict[str, Any], codec: str = "none"
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The final state and the losses of a run that nothing happens to."""
    key = json.dumps([settings, codec])
    if key not in UNDISTURBED:
        async with world(run_config(folder / "undisturbed", **settings), spares=0, codec=codec) as calm:
            await calm.finish()
        UNDISTURBED[key] = final_state(folder / "undisturbed"), calm.owned.recorder.losses
    return UNDISTURBED[key]


def ledger_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "ledger.jsonl").read_text().splitlines()]


def committed(run: Path) -> list[int]:
    """The steps of all commits in the order of the ledger, repeated ones included."""
    return [line["step"] for line in ledger_lines(run) if line["kind"] == "commit"]


def starts(run: Path) -> list[tuple[int, int]]:
    """(epoch, step whose state it goes on from) of each epoch."""
    return [(line["epoch"], line["state_step"]) for line in ledger_lines(run) if line["kind"] == "start"]


def at(monkeypatch: pytest.MonkeyPatch, moment: str, step: int, happens: Callable[[], None]) -> None:
    """Let something happen once, at a moment of a step."""
    todo = [happens]

    def once() -> None:
        if todo:
            todo.pop()()

    publish, perform = Training._publish, tasks.SliceTasks.perform
    loop = asyncio.get_running_loop()

    def publishing(self: Training, decision: Any) -> None:
        if moment == "before commit" and decision.step == step:
            once()
        publish(self, decision)
        if moment == "after commit" and decision.step == step:
            once()

    def performing(self: Any, task: Any, *rest: Any) -> Any:
        if moment == task.kind.name.lower() and task.moment.step == step:
            loop.call_soon_threadsafe(once)
        return perform(self, task, *rest)

    monkeypatch.setattr(Training, "_publish", publishing)
    monkeypatch.setattr(tasks.SliceTasks, "perform", performing)


MOMENTS = ["forward", "backward", "before commit", "after commit", "update"]


@pytest.mark.row(12)
@pytest.mark.row(17)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(("settings", "codec"), [(ADAM, "none"), (SGD, "topk:10")], ids=["adam", "sgd-topk"])
async def test_a_peer_lost_at_any_moment_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, settings: dict[str, Any], codec: str
) -> None:
    expected, losses = await undisturbed(tmp_path, settings, codec)
    config = run_config(tmp_path / "run", **settings)
    async with world(config, codec=codec) as at_risk:
        at(monkeypatch, moment, 4, lambda: at_risk.crash(1))
        await at_risk.finish()
        lost, spare = at_risk.peer(1), at_risk.peer(3)
    assert_same_bits(config.run, expected)
    history = read_ledger(config.run / "ledger.jsonl")
    assert [history.fates[step].loss for step in range(1, 7)] == losses
    assert [epoch for epoch, _ in starts(config.run)] == [1, 2]
    back = starts(config.run)[1][1]
    assert back >= 2
    assert at_risk.said(f"lost peer {lost} (slice 1)", f"step {back}, slice 1 moves to peer {spare}")
    assert [step for step, _ in read_curves(config.run / "metrics.jsonl")[0]] == [1, 2, 3, 4, 5, 6]


@pytest.mark.row(12)
async def test_several_peers_lost_at_once_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await undisturbed(tmp_path, ADAM)
    config = run_config(tmp_path / "run", **ADAM)
    async with world(config, spares=2) as at_risk:
        at(monkeypatch, "forward", 4, lambda: at_risk.crash(0, 2))
        await at_risk.finish()
        lost = [at_risk.peer(0), at_risk.peer(2)]
    assert_same_bits(config.run, expected)
    assert [state_step for _, state_step in starts(config.run)][:2] == [0, 2]
    assert at_risk.said("going back to step 2", *lost)


async def test_a_run_without_a_checkpoint_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ADAM | {"checkpoint_every": 100}
    expected, _ = await undisturbed(tmp_path, settings)
    config = run_config(tmp_path / "run", **settings)
    async with world(config) as at_risk:
        at(monkeypatch, "backward", 3, lambda: at_risk.crash(2))
        await at_risk.finish()
    assert_same_bits(config.run, expected)
    assert starts(config.run) == [(1, 0), (2, 0)]
    assert committed(config.run) == [1, 2, 1, 2, 3, 4, 5, 6]


@pytest.mark.row(18)
async def test_with_nobody_to_take_over_the_run_waits_and_goes_on_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await undisturbed(tmp_path, ADAM)
    config = run_config(tmp_path / "run", **ADAM)
    async with world(config, spares=0) as at_risk:
        lost = at_risk.helpers[1].peer
        at(monkeypatch, "forward", 4, lambda: at_risk.crash(1))
        finishing = asyncio.create_task(at_risk.finish())
        async with asyncio.timeout(DEADLINE_S):
            await at_risk.owned.swarm.waits.wait()
            assert [register.current.without for register in at_risk.owned.swarm.asked if register.current] == [(lost.peer_id,)]
            async with volunteers(at_risk.network, 1) as more:
                at_risk.owned.swarm.peers = [*at_risk.owned.swarm.peers, more[0].peer]
                at_risk.owned.swarm.arrived.set()
                await finishing
    assert_same_bits(config.run, expected)


async def test_a_spare_lost_while_it_prepares_is_replaced_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = await undisturbed(tmp_path, ADAM)
    config = run_config(tmp_path / "run", **ADAM)
    async with world(config, spares=2) as at_risk:
        spare = at_risk.helpers[3]
        at(monkeypatch, "forward", 4, lambda: at_risk.crash(1))
        from fusion_p2p.peer import building

        understand = building._understand
        loop = asyncio.get_running_loop()
        todo = [3]

        def crashing(encoded_graph: bytes, encoded_plan: bytes, me: PeerId, *rest: Any) -> Any:
            if me == spare.peer.peer_id and todo:
                loop.call_soon_threadsafe(at_risk.crash, todo.pop())
            return understand(encoded_graph, encoded_plan, me, *rest)

        monkeypatch.setattr(building, "_understand", crashing)
        await at_risk.finish()
        second = at_risk.peer(4)
    assert_same_bits(config.run, expected)
    assert at_risk.said(f"slice 1 moves to peer {second}")


@pytest.mark.row(11)
async def test_a_frozen_peer_is_found_within_seconds_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = await undisturbed(tmp_path, ADAM)
    config = run_config(tmp_path / "run", **ADAM)
    loop, frozen_at = asyncio.get_running_loop(), []
    async with world(config) as at_risk:

        def freeze() -> None:
            frozen_at.append(loop.time())
            at_risk.network.freeze(at_risk.peer(1))

        at(monkeypatch, "forward", 4, freeze)
        await at_risk.finish()
        took_s = loop.time() - frozen_at[0]
    assert_same_bits(config.run, expected)
    assert at_risk.said("lost peer", "nobody else reaches it")
    assert took_s >= 3


async def test_a_slice_that_fails_on_two_peers_ends_the_run_with_both_reasons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusion_p2p.errors import SliceFailed

    perform = tasks.SliceTasks.perform

    def failing(self: Any, task: Any, *rest: Any) -> Any:
        if self._edges.slice == 1 and task.moment.step == 3:
            raise SliceFailed("out of memory")
        return perform(self, task, *rest)

    monkeypatch.setattr(tasks.SliceTasks, "perform", failing)
    config = run_config(tmp_path / "run", **SGD)
    async with world(config, spares=2) as at_risk:
        with pytest.raises(RunStopped, match=r"slice 1 failed on two peers: .*out of memory.*; .*out of memory"):
            await at_risk.finish()


async def test_a_member_of_a_replica_group_that_is_lost_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other member still has the state of their slice."""

    def grouped(plan: Plan, peers: Sequence[PeerId]) -> Plan:
        first = replace(plan.slices[0], peer=peers[0], replicas=(peers[1],), deal=(0, 1))
        others = tuple(replace(part, peer=peers[2]) for part in plan.slices[1:])
        return replace(plan, slices=(first, *others))

    settings = ADAM | {"checkpoint_every": 100}
    calm_config, config = run_config(tmp_path / "calm", **settings), run_config(tmp_path / "run", **settings)
    async with world(calm_config, spares=0, arrange=grouped) as calm:
        await calm.finish()
    async with world(config, arrange=grouped) as at_risk:
        at(monkeypatch, "forward", 4, lambda: at_risk.crash(1))
        await at_risk.finish()
    assert_same_bits(config.run, final_state(calm_config.run))
    assert starts(config.run) == [(1, 0), (2, 3)]
    assert committed(config.run) == [1, 2, 3, 4, 5, 6]


@pytest.mark.row(21)
async def test_a_peer_that_drains_loses_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "TICK_S", 0.01)
    settings = ADAM | {"steps": 12, "checkpoint_every": 100}
    expected, losses = await undisturbed(tmp_path, settings)
    config = run_config(tmp_path / "run", **settings)
    async with world(config) as at_risk:
        drained: list[asyncio.Task[bool]] = []

        def drain() -> None:
            drained.append(asyncio.create_task(at_risk.helpers[1].service.drain("its volunteer wants it back", 25)))

        at(monkeypatch, "before commit", 4, drain)
        await at_risk.finish()
        assert await drained[0]
        assert at_risk.helpers[1].service.holding() is None
    assert_same_bits(config.run, expected)
    assert at_risk.owned.recorder.losses == losses
    assert committed(config.run) == list(range(1, 13))
    assert len(starts(config.run)) == 2


async def test_a_better_plan_is_taken_between_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "TICK_S", 0.01)
    monkeypatch.setattr(moving, "GAIN_EVERY_S", 0.05)
    settings = ADAM | {"steps": 12, "checkpoint_every": 100}
    expected, losses = await undisturbed(tmp_path, settings)
    config = run_config(tmp_path / "run", **settings)
    async with world(config) as at_risk:
        plan = at_risk.owned.swarm.plan
        swapped = (replace(plan.slices[0], peer=at_risk.peer(3)), *plan.slices[1:])
        at_risk.owned.swarm.better_plan = replace(plan, slices=swapped)
        await at_risk.finish()
    assert_same_bits(config.run, expected)
    assert at_risk.owned.recorder.losses == losses
    assert committed(config.run) == list(range(1, 13))
    assert len(starts(config.run)) == 2
    assert at_risk.said("new plan after step", f"slice 0 moves to peer {at_risk.peer(3)}")
    wanted = [asked.current.gain for asked in at_risk.owned.swarm.asked if asked.current is not None]
    assert wanted[0] == GAIN
    assert wanted[-1] >= HASTY_GAIN, "it has just moved"


async def test_a_peer_that_comes_back_takes_its_slice_again_and_nothing_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was frozen, and there is no spare: it still has its slice at the right step."""
    monkeypatch.setattr(halting, "RETURN_S", 0.1)
    expected, _ = await undisturbed(tmp_path, ADAM)
    config = run_config(tmp_path / "run", **ADAM)
    async with world(config, spares=0) as at_risk:
        at(monkeypatch, "forward", 4, lambda: at_risk.network.freeze(at_risk.peer(1)))
        finishing = asyncio.create_task(at_risk.finish())
        async with asyncio.timeout(DEADLINE_S):
            await at_risk.owned.swarm.waits.wait()
        at_risk.network.thaw(at_risk.peer(1))
        await finishing
    assert_same_bits(config.run, expected)
    assert starts(config.run) == [(1, 0), (2, 3)]
    assert committed(config.run) == [1, 2, 3, 4, 5, 6]


async def test_peers_that_cannot_reach_each_other_try_again_and_then_one_of_them_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both are there with their states: no step is repeated."""
    found: list[Links] = []

    class Noted(Links):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            found.append(self)

    monkeypatch.setattr(owned_run, "Links", Noted)
    expected, _ = await undisturbed(tmp_path, ADAM)
    config = run_config(tmp_path / "run", **ADAM)
    async with world(config) as at_risk:
        parted = Parted(at_risk.peer(0), at_risk.peer(1), "the line is cut")
        for step in (3, 5):
            at(monkeypatch, "forward", step, lambda: found[-1].inbox.put_nowait(parted))
        await at_risk.finish()
        spare = at_risk.peer(3)
    assert_same_bits(config.run, expected)
    assert starts(config.run) == [(1, 0), (2, 2), (3, 4)]
    assert committed(config.run) == [1, 2, 3, 4, 5, 6]
    assert at_risk.said("lost its way", "going on from step 2")
    assert at_risk.said("lost its way", f"going on from step 4, slice 1 moves to peer {spare}")
