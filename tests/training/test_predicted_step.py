"""The simulator against the real code: owner, peers, credits and frames over the simulated network, in virtual time.

Tasks really run, but take the seconds that the test says, so that the only difference is what the simulator leaves out.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import statistics
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import async_solipsism
import numpy as np
import pytest
import torch

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import PeerId
from fusion_p2p.job.flow import Task, TaskKind
from fusion_p2p.net.memory import SimulatedNetwork
from fusion_p2p.net.memory_pipe import Link
from fusion_p2p.peer.building import Bench
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import Plan, Schedule
from fusion_p2p.plan.simulate import simulate
from tests.swarm_in_memory import Volunteer, owner, run_config, volunteering
from tests.training.cuts import random_cut
from tests.unit.chain_graphs import Cost

TOLERANCE = 0.02
STEPS = 6


@dataclass(frozen=True)
class Case:
    """What is trained how. `forward_s` are for each slice in turn; a backward takes twice as long."""

    slices: Callable[[Graph], Sequence[int]]
    forward_s: tuple[float, ...]
    bytes_per_s: float
    latency_s: float
    in_flight: int = 2
    credits: int = 2
    schedule: Schedule = "1f1b"
    tied: bool = False
    replicated: int | None = None
    """The slice that the last peer executes too, two micro-batches out of three."""

    def seconds(self, index: int, kind: TaskKind) -> float:
        passes = {TaskKind.FORWARD: 1.0, TaskKind.BACKWARD: 2.0}.get(kind, 0.0)
        return passes * self.forward_s[index % len(self.forward_s)]

    def arranged(self, plan: Plan, peers: Sequence[PeerId]) -> Plan:
        """The plan by hand under this case's schedule, with its second member."""
        slices = list(plan.slices)
        if self.replicated is not None:
            slices[self.replicated] = dataclasses.replace(slices[self.replicated], replicas=(peers[-1],), deal=(0, 1, 1))
        return dataclasses.replace(plan, slices=tuple(slices), schedule=self.schedule)


def contiguous(parts: int) -> Callable[[Graph], Sequence[int]]:
    return lambda graph: [min(parts - 1, index * parts // len(graph.nodes)) for index in range(len(graph.nodes))]


def scattered(graph: Graph) -> list[int]:
    """Six slices that run through residual branches; with three peers each holds two."""
    return random_cut(graph, random.Random(5), 6, 0.3)


class LoopClock:
    """The virtual time of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 1.7e9 + self.now()

    def pause_s(self, about_s: float, *, often: bool = False) -> float:
        return about_s

    def keep_step(self, moment: float) -> None:
        """Nobody pauses for its sake."""


class TimedThread:
    """Stands for `ComputeThread`: runs a call at once, and gives its result when the time that it stands for has passed."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        result = call(*args, **kwargs)
        task = next((argument for argument in args if isinstance(argument, Task)), None)
        seconds = 0.0 if task is None else self._case.seconds(call.__self__._edges.slice, task.kind)  # type: ignore[attr-defined]
        loop.call_later(seconds, lambda: future.cancelled() or future.set_result(result))
        return future


@contextlib.asynccontextmanager
async def timed_volunteers(network: SimulatedNetwork, case: Case, count: int) -> AsyncIterator[list[Volunteer]]:
    bench = Bench(torch.device("cpu"), 4 << 30, TimedThread(case))  # type: ignore[arg-type]
    async with volunteering(network, count, bench, LoopClock()) as peers:
        yield peers


async def measured(case: Case, path: Path) -> tuple[float, Graph, Plan]:
    """Seconds per step of the real code, with the graph and the plan that it ran."""
    config = run_config(path, steps=STEPS, tied=case.tied)
    graphs: list[Graph] = []
    plans: list[Plan] = []

    def slices(graph: Graph) -> Sequence[int]:
        graphs.append(graph)
        return case.slices(graph)

    def arrange(plan: Plan, peers: Sequence[PeerId]) -> Plan:
        plans.append(case.arranged(plan, peers))
        return plans[0]

    link = Link(latency_s=case.latency_s, bytes_per_s=case.bytes_per_s, buffer_bytes=64 << 20)
    options = {"in_flight": case.in_flight, "credits": case.credits}
    async with (
        SimulatedNetwork(seed=1, link=link) as network,
        timed_volunteers(network, case, 3) as helpers,
        owner(network, config, slices, helpers, arrange, **options) as owned,
    ):
        owned.run._context = dataclasses.replace(owned.run._context, clock=LoopClock())
        await owned.run.finish()
    return statistics.median(snapshot.step_s for snapshot in owned.recorder.snapshots[2:]), graphs[0], plans[0]


def predicted(case: Case, graph: Graph, plan: Plan) -> float:
    """What the simulator says."""
    peers = sorted(plan.peers)
    costs = [Cost(0.0, 0.0, 0)] * len(graph.nodes)
    pipeline = pipeline_of_plan(graph, cut(graph, plan.slice_of), costs, plan, network_of(case, peers))
    stages = tuple(
        dataclasses.replace(
            stage,
            forward_s=(case.seconds(index, TaskKind.FORWARD),) * len(stage.nodes),
            backward_s=(case.seconds(index, TaskKind.BACKWARD),) * len(stage.nodes),
        )
        for index, stage in enumerate(pipeline.stages)
    )
    return simulate(dataclasses.replace(pipeline, stages=stages)).step_s


def network_of(case: Case, peers: Sequence[PeerId]) -> Network:
    nodes = len(peers) + 1
    apart = 1.0 - np.eye(nodes)
    return Network(
        peers=tuple(peers),
        flops_per_s=np.ones((len(peers), 3)),
        memory_bytes_per_s=np.full(len(peers), np.inf),
        free_bytes=np.full(len(peers), np.inf),
        sites=np.arange(nodes),
        alpha_s=case.latency_s * apart,
        beta_s=apart / case.bytes_per_s,
        uplink_s=np.zeros(nodes),
        downlink_s=np.zeros(nodes),
        has_owner=True,
    )


@pytest.mark.parametrize(
    "case",
    [
        Case(contiguous(3), (0.02, 0.05, 0.01), 5e4, 0.05, in_flight=4, credits=1),
        Case(contiguous(3), (0.02, 0.05, 0.01), 1e5, 0.05, in_flight=4, schedule="gpipe"),
        Case(scattered, (0.03, 0.01, 0.02, 0.03, 0.02, 0.01), 1e5, 0.01, in_flight=3),
        Case(contiguous(2), (0.05, 0.02), 1e5, 0.01, tied=True, replicated=0),
    ],
    ids=["slow links and one credit", "gpipe", "two slices each", "tied and replicated"],
)
def test_real_steps_take_what_the_simulator_says(case: Case, tmp_path: Path) -> None:
    with asyncio.Runner(loop_factory=async_solipsism.EventLoop) as runner:
        real_s, graph, plan = runner.run(measured(case, tmp_path / "run"))
    assert predicted(case, graph, plan) == pytest.approx(real_s, rel=TOLERANCE)
