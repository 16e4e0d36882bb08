"""A run in a simulated swarm: real owner, coordinator, peers and torch, in virtual time, with faults named by peer and step.

What a run owes, whatever happens to its peers:

    * it ends within FINISHED_S, every step with the loss, and the model with the bits, of the undisturbed run: so every
      micro-batch of a committed step was counted once;
    * one lineage of plans: epochs only grow, and a step counts only in the epoch that was started last;
    * when it has ended nobody who can be told so holds a slice of it, and no task and no stream is left behind.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
import sys
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from fusion_p2p.config import TrainConfig
from fusion_p2p.errors import FusionError
from fusion_p2p.graph.capture import Captured, capture
from fusion_p2p.ids import PeerId
from fusion_p2p.job.progress import RunSnapshot
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.owner.checkpoint import newest_checkpoint
from fusion_p2p.owner.data import open_data
from fusion_p2p.owner.driver import open_job, write_down
from fusion_p2p.owner.enlistment import enlist
from fusion_p2p.owner.guards import Guards
from fusion_p2p.owner.model_source import resolve_model
from fusion_p2p.owner.observers import SwarmObservers
from fusion_p2p.owner.own_links import OwnLinks
from fusion_p2p.owner.owned_run import OwnedRun, Partners
from fusion_p2p.owner.run_folder import RunFolder
from fusion_p2p.owner.spares import Swarm as Surroundings
from fusion_p2p.owner.stage import RunContext
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.job_service import JobService
from fusion_p2p.peer.swarm_view import WorkView
from tests.protocol.swarm_world import LoopClock
from tests.scenarios.hosts import Host, HostDirectory, HostTransport
from tests.scenarios.loop import PausableLoop
from tests.scenarios.swarm import Swarm
from tests.scenarios.virtual_bench import VirtualThread
from tests.swarm_in_memory import run_config

FINISHED_S = 300.0
SLICES, STEPS = 3, 6
LONGEST_TASK_S = 0.05
SETTINGS: dict[str, Any] = {"steps": STEPS, "layers": 1, "width": 16, "heads": 2, "context": 8, "checkpoint_every": 3}

Kind = Literal[
    "crash", "crash spare", "crash coordinator", "restart", "drain", "pause", "pause owner", "cut off", "lose", "reset streams"
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
FOR_A_WHILE = ("restart", "pause", "pause owner", "cut off", "lose")


@dataclass(frozen=True, slots=True)
class JobFault:
    """What happens `after_s` after a step was shown, to whoever holds a slice then (or to a spare, or the coordinator)."""

    step: int
    after_s: float
    kind: Kind
    slice: int
    for_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.kind} of slice {self.slice}, {self.after_s:.2f} s after step {self.step}, for {self.for_s:.1f} s"


@dataclass(frozen=True, slots=True)
class JobScenario:
    seed: int
    spares: int
    link: Link
    duplicates: float
    faults: tuple[JobFault, ...]


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What became of it: broken promises, and what happened."""

    scenario: JobScenario
    broken: tuple[str, ...]
    log: tuple[str, ...]
    seconds: float

    def explain(self) -> str:
        return f"PYTHONHASHSEED=0 python -m tests.scenarios {self.scenario.seed} --job   # {'; '.join(self.broken)}"


def draw_job(seed: int) -> JobScenario:
    """The scenario of a seed: never more peers lost for good than there are spares."""
    rng = random.Random(seed)
    faults, lost = [], 0
    for _ in range(rng.randint(1, 3)):
        kind = rng.choice(KINDS)
        lost += kind in ("crash", "crash spare", "crash coordinator", "drain")
        for_s = rng.choice((0.5, 3.0, 12.0)) * rng.uniform(0.5, 1.5) if kind in FOR_A_WHILE else 0.0
        faults.append(JobFault(rng.randint(1, STEPS - 1), rng.uniform(0, 0.6), kind, rng.randrange(SLICES), for_s))
    link = Link(latency_s=rng.choice((0.001, 0.02)), jitter_s=rng.choice((0.0, 0.01)), bytes_per_s=1e8)
    return JobScenario(seed, lost + rng.randint(1, 2), link, rng.choice((0.0, 0.1)), tuple(faults))


class JobSwarm(Swarm):
    """A swarm whose peers serve jobs. `back_at`: when peers that were out of reach came back."""

    def __init__(self, seed: int, link: Link, duplicates: float) -> None:
        super().__init__(seed, link, duplicates)
        self.back_at: dict[PeerId, float] = {}

    def _work(self, host: Host, transport: HostTransport, blobs: BlobServer, clock: LoopClock) -> WorkView:
        thread = VirtualThread(random.Random(self.rng.random()), LONGEST_TASK_S)
        return JobService(transport, blobs, Bench(torch.device("cpu"), 1 << 30, thread), clock)

    def _tasks_of(self, work: WorkView) -> list[Coroutine[Any, Any, None]]:
        return [work.run()] if isinstance(work, JobService) else []

    def service(self, peer: PeerId) -> JobService:
        work = self.machines[peer].work
        assert isinstance(work, JobService)
        return work

    def holder(self, index: int) -> PeerId | None:
        """Who executes a slice now."""
        held = {peer: self.service(peer).holding() for peer in self.here()}
        return next((peer for peer, holding in held.items() if holding is not None and index in holding.slices), None)

    def spare(self) -> PeerId | None:
        return next((peer for peer in self.here() if self.service(peer).holding() is None), None)

    async def drain(self, peer: PeerId) -> None:
        """SIGTERM: it hands its slices over first."""
        self.note(f"drain {peer[-4:]}")
        machine = self.machines[peer]
        machine.presence.set_state("draining")
        handed_over = await machine.host.start(self._drain(peer))
        self.note(f"drain {peer[-4:]}: {handed_over}")
        if peer in self.machines:
            self.leave(peer)

    async def _drain(self, peer: PeerId) -> Any:
        return await self.service(peer).drain("its volunteer needs it", 25.0)


class Recorder:
    """What the owner reports; a step that is shown may set off faults."""

    def __init__(self, swarm: JobSwarm, owner: Host, faults: tuple[JobFault, ...]) -> None:
        self._swarm = swarm
        self._owner = owner
        self._todo = list(faults)

    def say(self, line: str) -> None:
        self._swarm.note(f"owner: {line}")

    def show(self, snapshot: RunSnapshot) -> None:
        self._swarm.note(f"owner: step {snapshot.step} of epoch {snapshot.epoch}, loss {snapshot.loss}")
        for fault in [fault for fault in self._todo if fault.step == snapshot.step]:
            self._todo.remove(fault)
            self._swarm.do(self._happen(fault))

    async def _happen(self, fault: JobFault) -> None:
        swarm = self._swarm
        await asyncio.sleep(fault.after_s)
        swarm.note(str(fault))
        victims = {"crash spare": swarm.spare(), "crash coordinator": next(iter(swarm.coordinators()), None)}
        victim = victims.get(fault.kind, swarm.holder(fault.slice))
        if fault.kind == "reset streams":
            swarm.network.reset_streams()
        elif fault.kind == "pause owner":
            self._owner.pause()
            await asyncio.sleep(fault.for_s)
            self._owner.resume()
        elif victim is None:
            swarm.note("nobody is there for that")
        elif fault.kind == "drain":
            await swarm.drain(victim)
        elif fault.kind == "pause":
            swarm.pause(victim)
            await asyncio.sleep(fault.for_s)
            swarm.resume(victim)
            swarm.back_at[victim] = asyncio.get_running_loop().time()
        elif fault.kind == "cut off":
            swarm.partition([victim])
            await asyncio.sleep(fault.for_s)
            swarm.heal()
            swarm.back_at[victim] = asyncio.get_running_loop().time()
        elif fault.kind == "lose":
            swarm.set_link(victim, replace(swarm.link, loss=0.3))
            await asyncio.sleep(fault.for_s)
            swarm.set_link(victim, swarm.link)
        else:
            identity = swarm.crash(victim)
            if fault.kind == "restart":
                await asyncio.sleep(fault.for_s)
                swarm.start(identity=identity)


@dataclass(frozen=True, slots=True)
class Result:
    """Losses by step, and the final state, of a run that ended."""

    losses: tuple[float, ...]
    state: dict[str, torch.Tensor]


@functools.cache
def captured() -> tuple[Captured, tuple[str, ...]]:
    """The model, captured once for all scenarios."""
    torch.set_num_threads(1)
    config = run_config(None, **SETTINGS)
    source = resolve_model(config, open_data(config))
    source.module.train()
    return capture(source.module, open_data(config).example(), source.rules), tuple(source.module.state_dict())


@functools.cache
def undisturbed() -> Result:
    """What every run must come to."""
    calm = JobScenario(0, 0, Link(latency_s=0.001), 0.0, ())
    outcome, result = _run(calm)
    if outcome.broken or result is None:
        raise RuntimeError(f"the undisturbed run failed: {outcome.broken}")
    return result


def play_job(scenario: JobScenario) -> JobOutcome:
    """Play one scenario in virtual time."""
    expected = undisturbed()
    outcome, result = _run(scenario)
    broken = list(outcome.broken)
    if result is not None and result.losses != expected.losses:
        broken.append(f"losses {result.losses} instead of {expected.losses}")
    if result is not None and not _same(result.state, expected.state):
        broken.append("the model has other bits than the undisturbed run's")
    return replace(outcome, broken=tuple(broken))


def _same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _run(scenario: JobScenario) -> tuple[JobOutcome, Result | None]:
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner(loop_factory=PausableLoop) as runner:
        return runner.run(_played(scenario, Path(folder) / "run"))


async def _played(scenario: JobScenario, path: Path) -> tuple[JobOutcome, Result | None]:
    loop, result = asyncio.get_running_loop(), None
    swarm = JobSwarm(scenario.seed, scenario.link, scenario.duplicates)
    config = replace(run_config(path, **SETTINGS), peers=SLICES, scheduler="equal-compute")
    async with swarm:
        for _ in range(SLICES + scenario.spares):
            swarm.start()
        owner = swarm.network.join()
        host = Host()
        transport = HostTransport(owner.transport, host, swarm.replays)
        directory = HostDirectory(owner.directory, host)
        try:
            async with asyncio.timeout(FINISHED_S):
                await host.start(_train(swarm, scenario, config, host, transport, directory))
        except TimeoutError:
            swarm.broken.append(f"the run has not ended after {FINISHED_S:g} s")
        except FusionError as error:
            swarm.broken.append(f"the run ended early: {type(error).__name__}: {error}")
        else:
            result = _result(path, swarm)
        seconds = loop.time()
        await owner.transport.close()
        await swarm.all_done()
        await asyncio.sleep(2.0)
        # Who was out of reach at the end was told nothing: it keeps its state for the owner's return, as long as a tenure is.
        told = [peer for peer in swarm.here() if swarm.back_at.get(peer, 0.0) < seconds]
        holding = [peer[-4:] for peer in told if swarm.service(peer).holding() is not None]
        if holding and result is not None:
            swarm.broken.append(f"{holding} hold slices of a run that has ended")
    return JobOutcome(scenario, tuple(swarm.broken), tuple(swarm.log), seconds), result


async def _train(
    swarm: JobSwarm,
    scenario: JobScenario,
    config: TrainConfig,
    host: Host,
    transport: HostTransport,
    directory: HostDirectory,
) -> None:
    model, names = captured()
    clock = LoopClock()
    with RunFolder.create(config) as folder:
        write_down(folder, model, names)
        recorder = Recorder(swarm, host, scenario.faults)
        job, blobs = open_job(config, folder, recorder), BlobServer(transport)
        context = RunContext(config, open_data(config), folder, recorder, clock)
        register = functools.partial(
            enlist,
            transport,
            directory,
            report=recorder.say,
            own_links=OwnLinks(transport.peer_id, clock),
            offered=blobs.offered,
        )
        around = Surroundings(transport, directory)
        guards = Guards(job.job, job.incarnation, blobs, around, clock, config.copy_every, recorder.say)
        partners = Partners(register, None, SwarmObservers(transport, directory), guards)
        await OwnedRun(context, job, transport, blobs, partners).finish()


def _result(path: Path, swarm: JobSwarm) -> Result:
    """What the run folder says; the lineage of its plans is looked at on the way."""
    lines = [json.loads(line) for line in (path / "ledger.jsonl").read_text().splitlines()]
    epoch, losses = 0, dict[int, float]()
    for line in lines:
        if line["kind"] == "start":
            if line["epoch"] <= epoch:
                swarm.broken.append(f"epoch {line['epoch']} was started after {epoch}")
            epoch = line["epoch"]
            losses = {step: loss for step, loss in losses.items() if step <= line["state_step"]}
        elif line["kind"] == "commit":
            if line["epoch"] != epoch or line["step"] != max(losses, default=0) + 1:
                swarm.broken.append(
                    f"step {line['step']} of epoch {line['epoch']} counts in epoch {epoch} after {sorted(losses)}"
                )
            losses[line["step"]] = line["loss"]
    checkpoint = newest_checkpoint(path / "checkpoint", swarm.note)
    state = {} if checkpoint is None else {name: checkpoint.tensor(name) for name in checkpoint.names}
    return Result(tuple(losses[step] for step in sorted(losses)), state)


def play_jobs(first: int, count: int) -> list[JobOutcome]:
    """The scenarios of so many seeds, each told on stderr with a line that replays it when it broke something."""
    outcomes = [play_job(draw_job(seed)) for seed in range(first, first + count)]
    for outcome in outcomes:
        if outcome.broken:
            print(outcome.explain(), file=sys.stderr, flush=True)
    return outcomes
