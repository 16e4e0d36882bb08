"""A run's real code - peers, owner, executor - over the simulated network in one process: no daemon, real torch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from fusion_p2p.clock import Clock, SystemClock
from fusion_p2p.config import MODEL_FLAGS, TrainConfig
from fusion_p2p.errors import NetworkError
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.graph.capture import Captured, capture
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import PeerId, digest_of
from fusion_p2p.job.progress import RunSnapshot
from fusion_p2p.net.base import Stream
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.messaging import MessageStream, request
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.driver import open_job, retuner_for, write_down
from fusion_p2p.owner.enlistment import Enlisted
from fusion_p2p.owner.guarding import Guarding, Unguarded
from fusion_p2p.owner.model_source import resolve_model
from fusion_p2p.owner.narrowing import narrowed
from fusion_p2p.owner.observers import SwarmObservers
from fusion_p2p.owner.owned_run import OwnedRun, Partners
from fusion_p2p.owner.registering import Job
from fusion_p2p.owner.retuner import Survey
from fusion_p2p.owner.run_folder import RunFolder
from fusion_p2p.owner.stage import RunContext
from fusion_p2p.peer.building import Bench
from fusion_p2p.peer.job_service import JobService
from fusion_p2p.plan.encoding import encode_plan
from fusion_p2p.plan.plan import EdgePlan, Plan, SlicePlan
from fusion_p2p.wire.job_messages import Contact
from fusion_p2p.wire.swarm_messages import SWARM_MESSAGES, SWARM_PROTOCOL, Current, Probe, ProbeReply, Register


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
class Observer:
    """Answers whether a peer can be reached, as the swarm service of a volunteer does."""

    peer: SimulatedPeer

    async def serve(self, stream: Stream) -> None:
        messages = MessageStream(stream, SWARM_MESSAGES)
        asked = await messages.receive(timeout_s=5)
        assert isinstance(asked, Probe)
        await messages.send(ProbeReply(heard=asked.peer == self.peer.peer_id or await self._reaches(PeerId(asked.peer))))

    async def _reaches(self, suspect: PeerId) -> bool:
        try:
            await request(self.peer.transport, suspect, SWARM_PROTOCOL, SWARM_MESSAGES, Probe(peer=suspect), timeout_s=1.5)
        except NetworkError:
            return False
        return True


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
        await peer.transport.serve(SWARM_PROTOCOL, Observer(peer).serve)
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
    swarm: ByHand


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


@dataclass
class ByHand:
    """Plans without a coordinator: the first one by hand, then with spares in place of who is missing."""

    plan: Plan
    peers: Sequence[SimulatedPeer]
    asked: list[Register] = field(default_factory=list)
    better_plan: Plan | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there is another spare."""
    waits: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when there was none."""
    _known: dict[str, Plan] = field(default_factory=dict)

    async def enlist(self, register: Register) -> Enlisted:
        """The plan; a mended one waits for a spare as long as it takes."""
        self.asked.append(register)
        while register.current is not None:
            mended = self._mended(register.current)
            if mended is not None:
                return self.enlisted(mended)
            self.waits.set()
            self.arrived.clear()
            await self.arrived.wait()
        return self.enlisted(self.plan)

    async def better(self, register: Register) -> Enlisted | str:
        """The plan that a test has put here."""
        self.asked.append(register)
        return "it is the best" if self.better_plan is None else self.enlisted(self.better_plan)

    def enlisted(self, plan: Plan) -> Enlisted:
        """A plan as a coordinator proposes it."""
        self._known[digest_of(encode_plan(plan))] = plan
        contacts = tuple(Contact(peer=peer.peer_id, addresses=tuple(peer.transport.addresses)) for peer in self.peers)
        return Enlisted(plan=plan, coordinator=self.peers[0].peer_id, term=1, contacts=contacts)

    def _mended(self, current: Current) -> Plan | None:
        plan = self._known.get(current.plan.digest, self.plan)
        held = [(entry.slice, PeerId(entry.peer)) for entry in current.held]
        free = [peer.peer_id for peer in self.peers if peer.peer_id not in {*current.without, *plan.peers}]
        slices = list(plan.slices)
        for index, part in enumerate(slices):
            members = list(part.members)
            for place, member in enumerate(members):
                if member in current.without:
                    able = sorted(free, key=lambda peer: (index, peer) not in held)
                    if not able:
                        return None
                    members[place] = able[0]
                    free.remove(able[0])
            slices[index] = replace(part, peer=members[0], replicas=tuple(members[1:]))
        return replace(plan, slices=tuple(slices))


def config_of_model(config: TrainConfig) -> TrainConfig:
    """Of a configuration that from which the captured model follows."""
    names = ("bootstrap", "model", "option", *MODEL_FLAGS, "data", "data_option", "batch_size", "micro_batches")
    return TrainConfig(**{name: getattr(config, name) for name in names})


@functools.cache
def captured_model(config: TrainConfig) -> tuple[Captured, tuple[str, ...]]:
    """The model and the names of its parameters, captured once for all runs of a test process."""
    data = open_data(config)
    source = resolve_model(config, data)
    return capture(source.module, data.example(), source.rules), tuple(source.module.state_dict())


@contextlib.asynccontextmanager
async def owner(
    network: SimulatedNetwork,
    config: TrainConfig,
    slices: Callable[[Graph], Sequence[int]],
    helpers: Sequence[Volunteer],
    arrange: Callable[[Plan, Sequence[PeerId]], Plan] = lambda plan, peers: plan,
    survey: Survey | None = None,
    guards: Callable[[Job, BlobServer, SimulatedPeer, RunContext], Guarding] | None = None,
    **options: int,
) -> AsyncIterator[Owner]:
    """The owner of a run whose cut is `slices(graph)`; the plan comes by hand, not from a coordinator.

    `arrange` may change the plan, in which each slice has one member; `survey` says what the links are like later.
    The plan is for as many helpers as `executing` says, else for all; the others are spares.
    """
    data, recorder = open_data(config), Recorder()
    folder = RunFolder.create(config) if config.resume is None else RunFolder.resume(config.resume)
    with folder:
        if config.resume is None:
            captured, names = captured_model(config_of_model(config))
            made = narrowed(captured.graph, config, config.num_cuts)
            captured = replace(captured, graph=made.graph, weights=captured.weights | made.weights)
            write_down(folder, captured, (*names, *made.parameters))
        job = open_job(config, folder, recorder)
        peers = [volunteer.peer for volunteer in helpers]
        members = peers[: options.pop("executing", len(peers))]
        plan = plan_for(job.graph_bytes, job.graph, slices(job.graph), members, config, **options)
        plan = arrange(plan, [peer.peer_id for peer in members])

        swarm = ByHand(plan, peers)
        context = RunContext(config, data, folder, recorder, SystemClock())
        retuner = retuner_for(context, job, survey) if survey is not None else None
        me = network.join()
        blobs = BlobServer(me.transport)
        kept = guards(job, blobs, me, context) if guards is not None else Unguarded()
        partners = Partners(swarm.enlist, swarm.better, SwarmObservers(me.transport, me.directory), kept)
        yield Owner(OwnedRun(context, job, me.transport, blobs, partners, retuner), recorder, folder, data, swarm)


def run_config(path: Path | None, **settings: object) -> TrainConfig:
    """A small run's configuration."""
    defaults: dict[str, object] = {
        "bootstrap": ("/ip4/127.0.0.1/tcp/1/p2p/none",), "model": "gpt2", "layers": 2, "width": 32, "heads": 2, "context": 16,
        "dropout": 0.0, "tied": False, "batch_size": 8, "micro_batches": 4, "steps": 6, "optimiser": "sgd",
        "learning_rate": 0.02, "momentum": 0.9, "validate_every": 0, "checkpoint_every": 100, "run": path, "seed": 3,
    }  # fmt: skip
    return TrainConfig(**(defaults | settings))
