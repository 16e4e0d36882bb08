"""A run's real code - peers, owner, executor - over the simulated network in one process: no daemon, real torch."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fusion_p2p.clock import Clock, SystemClock
from fusion_p2p.config import TrainConfig
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import PeerId, digest_of
from fusion_p2p.job.progress import RunSnapshot
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.driver import open_job, retuner_for, write_down
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.model_source import resolve_model
from fusion_p2p.owner.narrowing import narrowed
from fusion_p2p.owner.owned_run import OwnedRun
from fusion_p2p.owner.retuner import Survey
from fusion_p2p.owner.run_folder import RunFolder
from fusion_p2p.owner.training import RunContext
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.job_service import JobService
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.wire.job_messages import Contact
from fusion_p2p.wire.swarm_messages import Register


@dataclass
class Recorder:
    """What a run reported."""

    lines: list[str] = field(default_factory=list)
    snapshots: list[RunSnapshot] = field(default_factory=list)
    shown: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, snapshot: RunSnapshot) -> None:
        self.snapshots.append(snapshot)
        self.shown.set()

    @property
    def losses(self) -> list[float]:
        return [snapshot.loss for snapshot in self.snapshots if snapshot.loss is not None]


@dataclass
class Volunteer:
    """A peer at work in this process."""

    peer: SimulatedPeer
    service: JobService
    task: asyncio.Task[None]


@contextlib.asynccontextmanager
async def volunteers(
    network: SimulatedNetwork, count: int, *, offered_bytes: int = 4 << 30, overlap: bool = True
) -> AsyncIterator[list[Volunteer]]:
    """Peers that serve owners; they share one compute thread, as seeds and thread counts are process-wide.

    overlap: code on a thread of its own, beside computing.
    """
    thread, coding = ComputeThread(1), ComputeThread(name="coding")
    bench = Bench(torch.device("cpu"), offered_bytes, thread, coding if overlap else None)
    try:
        async with volunteering(network, count, bench, SystemClock()) as peers:
            yield peers
    finally:
        coding.close()
        thread.close()


@contextlib.asynccontextmanager
async def volunteering(network: SimulatedNetwork, count: int, bench: Bench, clock: Clock) -> AsyncIterator[list[Volunteer]]:
    """So many new peers that serve jobs, all on one bench."""
    peers: list[Volunteer] = []
    for _ in range(count):
        peer = network.join()
        blobs = BlobServer(peer.transport)
        await blobs.start()
        service = JobService(peer.transport, blobs, bench, clock)
        peers.append(Volunteer(peer, service, asyncio.create_task(service.run())))
    try:
        yield peers
    finally:
        for volunteer in peers:
            volunteer.task.cancel()
        await asyncio.gather(*(volunteer.task for volunteer in peers), return_exceptions=True)


@dataclass
class Owner:
    """A run that can be finished: `recorder` tells what happened, `folder` holds what is kept."""

    run: OwnedRun
    recorder: Recorder
    folder: RunFolder
    data: DataSet


def plan_for(
    graph_bytes: bytes,
    graph: Graph,
    slice_of: Sequence[int],
    peers: Sequence[SimulatedPeer],
    config: TrainConfig,
    **options: int,
) -> Plan:
    """The slices dealt to the peers in turn."""
    parts = cut(graph, slice_of)
    return Plan(
        graph=digest_of(graph_bytes),
        scheduler="by hand",
        micro_batches=config.micro_batches,
        slice_of=tuple(slice_of),
        slices=tuple(
            SlicePlan(peers[part.index % len(peers)].peer_id, options.get("in_flight", 2), config.recompute)
            for part in parts.slices
        ),
        edges=tuple(EdgePlan(edge.value, edge.source, edge.target, credits=options.get("credits", 2)) for edge in parts.edges),
    )


@contextlib.asynccontextmanager
async def owner(
    network: SimulatedNetwork,
    config: TrainConfig,
    slices: Callable[[Graph], Sequence[int]],
    helpers: Sequence[Volunteer],
    arrange: Callable[[Plan, Sequence[PeerId]], Plan] = lambda plan, peers: plan,
    survey: Survey | None = None,
    **options: int,
) -> AsyncIterator[Owner]:
    """The owner of a run whose cut is `slices(graph)`; the plan comes by hand, not from a coordinator.

    `arrange` may change the plan, in which each slice has one member; `survey` says what the links are like later.
    """
    data, recorder = open_data(config), Recorder()
    folder = RunFolder.create(config) if config.resume is None else RunFolder.resume(config.resume)
    with folder:
        if config.resume is None:
            source = resolve_model(config, data)
            captured = capture(source.module, data.example(), source.rules)
            made = narrowed(captured.graph, config, config.num_cuts)
            captured = replace(captured, graph=made.graph, weights=captured.weights | made.weights)
            write_down(folder, captured, (*source.module.state_dict(), *made.parameters))
        job = open_job(config, folder, recorder)
        peers = [volunteer.peer for volunteer in helpers]
        plan = plan_for(job.graph_bytes, job.graph, slices(job.graph), peers, config, **options)
        plan = arrange(plan, [peer.peer_id for peer in peers])

        async def by_hand(register: Register) -> Enlisted:
            contacts = tuple(Contact(peer=peer.peer_id, addresses=tuple(peer.transport.addresses)) for peer in peers)
            return Enlisted(plan=plan, coordinator=peers[0].peer_id, term=1, contacts=contacts)

        context = RunContext(config, data, folder, recorder, SystemClock())
        retuner = retuner_for(context, job, survey) if survey is not None else None
        run = OwnedRun(context, job, network.join().transport, by_hand, retuner)
        yield Owner(run, recorder, folder, data)


def run_config(path: Path | None, **settings: object) -> TrainConfig:
    """A small run's configuration."""
    defaults: dict[str, object] = {
        "bootstrap": ("/ip4/127.0.0.1/tcp/1/p2p/none",), "model": "gpt2", "layers": 2, "width": 32, "heads": 2, "context": 16,
        "dropout": 0.0, "tied": False, "batch_size": 8, "micro_batches": 4, "steps": 6, "optimiser": "sgd",
        "learning_rate": 0.02, "momentum": 0.9, "validate_every": 0, "checkpoint_every": 100, "run": path, "seed": 3,
    }  # fmt: skip
    return TrainConfig(**(defaults | settings))
