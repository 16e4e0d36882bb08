"""A run whose slices are copied to other peers: what these hold is the state, and a loss costs no more than the steps since."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import async_solipsism
import pytest
import torch

from fusion_p2p.ids import PeerId
from fusion_p2p.job.guard_choice import Candidate
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.owner.guards import Guards
from fusion_p2p.owner.halting import Halting
from fusion_p2p.owner.recovery import Recovery
from fusion_p2p.owner.registering import Job
from fusion_p2p.owner.stage import RunContext
from fusion_p2p.owner.training import Training
from fusion_p2p.wire.job_messages import Contact, Held
from fusion_p2p.wire.messages import Message
from tests.swarm_in_memory import Volunteer, owner, run_config
from tests.training.test_predicted_step import Case, LoopClock, contiguous, timed_volunteers
from tests.training.test_recovery import ADAM, World, assert_same_bits, starts, undisturbed, world

SETTINGS: dict[str, Any] = ADAM | {"steps": 16, "checkpoint_every": 100}


@dataclass
class Neighbours:
    """Surroundings by hand: these could guard, once they are known."""

    who: Callable[[frozenset[PeerId]], Sequence[PeerId]]
    free_bytes: int = 1 << 30

    async def look(self, members: frozenset[PeerId]) -> tuple[Candidate, ...]:
        return tuple(Candidate(peer, peer not in members, self.free_bytes) for peer in self.who(members))

    async def meet(self, peer: PeerId) -> None:
        """The simulated network knows the way."""

    def contacts(self, peers: Iterable[PeerId]) -> tuple[Contact, ...]:
        return ()


@dataclass
class Watched:
    """Makes the guards of a run, and does something to it once there are copies of all slices of a step after the first."""

    happens: Callable[[int], None]
    helpers: Sequence[Volunteer] = ()
    among: Callable[[frozenset[PeerId], Sequence[PeerId]], Sequence[PeerId]] = lambda members, peers: peers
    every: int | None = 2
    guards: Guards = field(init=False)
    done: int = 0

    def made(self, job: Job, blobs: BlobServer, me: SimulatedPeer, context: RunContext) -> Guards:
        peers = Neighbours(lambda members: self.among(members, [helper.peer.peer_id for helper in self.helpers]))
        self.guards = Guards(job.job, job.incarnation, blobs, peers, context.clock, self.every, context.report.say)
        return self.guards

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        publish = Training._publish

        def publishing(training: Training, decision: Any) -> None:
            complete = set.intersection(*({step for _, step in held} for held in self.guards.held.values()))
            if not self.done and complete:
                self.done = max(complete)
                self.happens(self.done)
            publish(training, decision)

        monkeypatch.setattr(Training, "_publish", publishing)


def copies_of(helper: Volunteer, index: int, step: int) -> list[dict[str, torch.Tensor]]:
    return [dict(copy.tensors) for copy in helper.service.copies if (copy.key.slice, copy.key.step) == (index, step)]


def spares_only(members: frozenset[PeerId], peers: Sequence[PeerId]) -> list[PeerId]:
    return [peer for peer in peers if peer not in members]


def members_only(members: frozenset[PeerId], peers: Sequence[PeerId]) -> list[PeerId]:
    return [peer for peer in peers if peer in members]


@pytest.mark.row(15)
@pytest.mark.row(17)
@pytest.mark.parametrize("among", [spares_only, members_only], ids=["spares", "each other"])
async def test_guards_hold_the_very_state_and_a_loss_goes_back_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, among: Any
) -> None:
    expected, _ = await undisturbed(tmp_path, SETTINGS)
    config = run_config(tmp_path / "run", **SETTINGS)
    found: list[World] = []

    def happens(step: int) -> None:
        at_risk = found[0]
        for index in range(3):
            (kept,) = copies_of(at_risk.helpers[index], index, step)
            holders = [at_risk.helpers[place] for place in range(5) if place != index]
            held = [copy for holder in holders for copy in copies_of(holder, index, step)]
            assert len(held) == 1
            assert kept.keys() == held[0].keys()
            assert all(torch.equal(kept[name], held[0][name]) for name in kept)
            assert any(tensor.abs().max() > 0 for name, tensor in held[0].items() if name.startswith("second_moment"))
        at_risk.crash(1)

    watched = Watched(happens, among=among)
    watched.watch(monkeypatch)
    async with world(config, spares=2, guards=watched.made) as at_risk:
        found.append(at_risk)
        watched.helpers = at_risk.helpers
        await at_risk.finish()
    assert_same_bits(config.run, expected)
    assert watched.done > 0
    assert starts(config.run)[1][1] >= watched.done  # without copies it would be 0: there is no checkpoint
    assert at_risk.said(f"copies of step {watched.done}: 3 of 3 slices held by")


@dataclass
class Late:
    """Lets the copy of slice 1 of a second step be completed when it has been chosen to which step a run goes back."""

    guards: Callable[[], Guards]
    happens: Callable[[], None]
    steps: list[int] = field(default_factory=list)
    withheld: list[tuple[PeerId, Held]] = field(default_factory=list)
    chosen: list[int] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        heard, answer, choosing = Guards.heard, Halting._answer, Recovery._chosen

        def hearing(guards: Guards, peer: PeerId, message: Message) -> bool:
            if isinstance(message, Held) and message.slice == 1 and message.step not in self.steps:
                self.steps.append(message.step)
                if len(self.steps) == 2:
                    self.withheld.append((peer, message))
                    self.happens()
                    return True
            return heard(guards, peer, message)

        def answering(halting: Halting, peer: PeerId, stock: Any) -> None:
            """What nobody has heard of is not there yet."""
            late = {self.steps[1]} if self.withheld else set()
            answer(halting, peer, {index: steps - late if index == 1 else steps for index, steps in stock.items()})

        async def chosen(recovery: Recovery, stage: Any, halting: Halting) -> Any:
            choice = await choosing(recovery, stage, halting)
            self.chosen.append(choice.step)
            while self.withheld:
                heard(self.guards(), *self.withheld.pop())
            return choice

        monkeypatch.setattr(Guards, "heard", hearing)
        monkeypatch.setattr(Halting, "_answer", answering)
        monkeypatch.setattr(Recovery, "_chosen", chosen)


@pytest.mark.row(15)
@pytest.mark.row(17)
async def test_a_copy_that_is_completed_while_the_run_goes_back_to_an_older_one_ousts_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await undisturbed(tmp_path, SETTINGS)
    config = run_config(tmp_path / "run", **SETTINGS)
    watched = Watched(lambda step: None, among=spares_only)
    late = Late(lambda: watched.guards, lambda: at_risk.crash(1))
    late.watch(monkeypatch)
    async with world(config, spares=2, guards=watched.made) as at_risk:
        watched.helpers = at_risk.helpers
        await at_risk.finish()
    assert_same_bits(config.run, expected)
    assert late.chosen == [late.steps[0]]
    assert starts(config.run)[1][1] == late.steps[0]


@pytest.mark.row(17)
async def test_copies_that_go_after_they_were_told_of_are_not_relied_on_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = await undisturbed(tmp_path, SETTINGS)
    config = run_config(tmp_path / "run", **SETTINGS)
    watched = Watched(lambda step: at_risk.crash(1), among=spares_only)
    watched.watch(monkeypatch)
    choosing, chosen = Recovery._chosen, list[int]()

    async def forgetting(recovery: Recovery, stage: Any, halting: Halting) -> Any:
        choice = await choosing(recovery, stage, halting)
        if not chosen:
            for helper in at_risk.helpers:
                for lineage in helper.service._keeping.copies.lineages:
                    helper.service._keeping.copies.forget(lineage)
        chosen.append(choice.step)
        return choice

    monkeypatch.setattr(Recovery, "_chosen", forgetting)
    async with world(config, spares=2, guards=watched.made) as at_risk:
        watched.helpers = at_risk.helpers
        await at_risk.finish()
    assert_same_bits(config.run, expected)
    assert chosen[0] == watched.done
    assert starts(config.run)[-1][1] == chosen[-1] == 0


async def steps_s(path: Path, steps: int, every: int | None) -> tuple[list[float], int]:
    """Seconds of each step over slow links in virtual time, and how many copies of all slices were made meanwhile."""
    case = Case(contiguous(3), (0.5, 1.25, 0.25), bytes_per_s=5e3, latency_s=0.05)
    config = run_config(path, steps=steps, momentum=0.0, checkpoint_every=100)
    made: list[Guards] = []
    durable: set[int] = set()

    def guards(job: Job, blobs: BlobServer, me: SimulatedPeer, context: RunContext) -> Guards:
        peers = Neighbours(lambda members: members_only(members, [helper.peer.peer_id for helper in helpers]))
        made.append(Guards(job.job, job.incarnation, blobs, peers, LoopClock(), every, context.report.say))
        return made[0]

    link = Link(latency_s=case.latency_s, bytes_per_s=case.bytes_per_s, buffer_bytes=64 << 20)
    async with (
        SimulatedNetwork(seed=1, link=link) as network,
        timed_volunteers(network, case, 3) as helpers,
        owner(network, config, case.slices, helpers, guards=guards) as owned,
    ):
        owned.run._context = dataclasses.replace(owned.run._context, clock=LoopClock())
        finishing = asyncio.create_task(owned.run.finish())
        while not finishing.done():
            await asyncio.wait({finishing}, timeout=1.0)
            held = made[0].held.values()
            durable |= set.intersection(*({step for _, step in copies} for copies in held)) if held else set()
        finishing.result()
    return [snapshot.step_s for snapshot in owned.recorder.snapshots[2:]], len(durable)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_copies_at_their_default_interval_cost_at_most_a_twentieth(tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        without, none = runner.run(steps_s(tmp_path / "without", 5, 0))
        with_copies, made = runner.run(steps_s(tmp_path / "with", 20, None))
    assert none == 0
    assert made >= 2
    assert statistics.fmean(with_copies) <= 1.05 * statistics.median(without)
    assert max(with_copies) > 1.02 * statistics.median(without)  # on these links a copy can be felt
