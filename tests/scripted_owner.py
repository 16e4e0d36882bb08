"""An owner that says exactly what a test tells it to, to real peers on the simulated network."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from fusion_p2p.config import TrainConfig
from fusion_p2p.errors import StreamClosed
from fusion_p2p.execute.state import required_tensors
from fusion_p2p.graph.capture import capture
from fusion_p2p.graph.encoding import encode_graph
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.ids import JobId, PeerId
from fusion_p2p.job.topology import replica_edges
from fusion_p2p.net.blobs import BlobServer
from fusion_p2p.net.memory import SimulatedNetwork, SimulatedPeer
from fusion_p2p.net.messaging import MessageStream
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.feeding import Feeder
from fusion_p2p.owner.model_source import resolve_model
from fusion_p2p.peer.copies import Lineage
from fusion_p2p.peer.fetching import Wanted, fetch_tensors
from fusion_p2p.plan.encoding import encode_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import (
    JOB_MESSAGES,
    JOB_PROTOCOL,
    Admit,
    Applied,
    Commit,
    Content,
    Guard,
    Halt,
    Halted,
    Kept,
    OptimiserSettings,
    Prepare,
    Prepared,
    Pulse,
    Source,
    Start,
    Started,
    StepReport,
    TrainingSettings,
)
from fusion_p2p.wire.manifest import encode_manifest
from fusion_p2p.wire.messages import Message
from tests.swarm_in_memory import Volunteer, plan_for, run_config

M = TypeVar("M", bound=Message)
HEARD_S = 30.0
PULSE_S = 0.3


class ScriptedOwner:
    """Says and hears job messages; feeds steps; asks for states."""

    def __init__(self, peer: SimulatedPeer, config: TrainConfig, slices: Callable[[Graph], Sequence[int]]) -> None:
        self.peer, self.transport, self.config, self.data = peer, peer.transport, config, open_data(config)
        self.graph = _graph(config, self.data)
        self.graph_bytes, self.slice_of = encode_graph(self.graph), tuple(slices(self.graph))
        self.parts = cut(self.graph, self.slice_of)
        optimiser = OptimiserSettings(name=config.optimiser, momentum=config.momentum)
        self.settings = TrainingSettings(seed=config.seed, optimiser=optimiser)
        self.job, self.epoch = JobId("ab" * 16), 0
        self.blobs = BlobServer(self.transport)
        self.lineage = Lineage(peer.peer_id, self.job, 1)
        self._streams: dict[PeerId, MessageStream] = {}
        self._heard: dict[PeerId, list[Message]] = defaultdict(list)
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.pulses = True

    async def meet(self, *peers: PeerId) -> None:
        """Open control streams."""
        for peer in peers:
            self._streams[peer] = messages = MessageStream(await self.transport.open(peer, JOB_PROTOCOL), JOB_MESSAGES)
            self._tasks.append(asyncio.create_task(self._listen(peer, messages)))

    async def run(self) -> None:
        await self.blobs.start()
        self._tasks.append(asyncio.create_task(self._pulse()))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, peer: PeerId, messages: MessageStream) -> None:
        while True:
            message = await messages.receive()
            if not isinstance(message, Pulse):
                self._heard[peer].append(message)
                self._news.set()

    async def _pulse(self) -> None:
        while True:
            await asyncio.sleep(PULSE_S)
            for messages in self._streams.values() if self.pulses else ():
                with contextlib.suppress(StreamClosed):
                    await messages.send(Pulse(progress=0))

    async def say(self, peer: PeerId, message: Message) -> None:
        await self._streams[peer].send(message)

    async def hear(self, peer: PeerId, kind: type[M], wanted: Callable[[M], bool] = lambda message: True) -> M:
        """The next message of a kind from a peer, which is then forgotten."""
        async with asyncio.timeout(HEARD_S):
            while True:
                for message in self._heard[peer]:
                    if isinstance(message, kind) and wanted(message):
                        self._heard[peer].remove(message)
                        return message
                self._news.clear()
                await self._news.wait()

    def plan(self, helpers: Sequence[Volunteer]) -> Plan:
        """The slices dealt to these peers in turn."""
        peers = [helper.peer for helper in helpers]
        return plan_for(self.graph_bytes, self.graph, self.slice_of, peers, self.config)

    async def prepare(
        self, plan: Plan, state_step: int, *, beside: bool = False, sources: Sequence[Source] = ()
    ) -> Sequence[PeerId]:
        """Ask all peers of a plan for the next epoch; who is to answer."""
        self.epoch += 1
        encoded = encode_plan(plan)
        order = Prepare(
            job=self.job,
            incarnation=1,
            epoch=self.epoch,
            graph=Content(digest=self.blobs.offer(self.graph_bytes), num_bytes=len(self.graph_bytes)),
            plan=Content(digest=self.blobs.offer(encoded), num_bytes=len(encoded)),
            settings=self.settings,
            state_step=state_step,
            contacts=(),
            beside=beside,
            sources=tuple(sources),
        )
        peers = sorted(plan.peers)
        for peer in self._streams:
            with contextlib.suppress(StreamClosed):
                await self.say(peer, Admit(job=self.job, incarnation=1, peers=tuple(sorted(self._streams))))
        for peer in peers:
            await self.say(peer, order)
        return peers

    async def start(self, plan: Plan, state_step: int = 0, **options: Any) -> None:
        """Run the next epoch."""
        peers = await self.prepare(plan, state_step, **options)
        for peer in peers:
            await self.hear(peer, Prepared, lambda message: message.epoch == self.epoch)
        for peer in peers:
            await self.say(peer, Start(epoch=self.epoch, state_step=state_step))
        for peer in peers:
            await self.hear(peer, Started)
        edges = replica_edges(self.graph, self.parts, plan)
        run = RunId(self.job, 1, self.epoch)
        self.running = plan
        self.feeder = Feeder(self.transport, run, self.graph, plan, edges, data=self.data, lost=lambda peer, reason: None)
        self._tasks.append(asyncio.create_task(self.feeder.run()))

    async def reports(self, step: int) -> None:
        """Wait until all replicas have reported a step."""
        for number, replica in enumerate(self.running.replicas):
            await self.hear(replica.peer, StepReport, lambda message, n=number: (message.step, message.replica) == (step, n))

    async def commit(self, step: int, *peers: PeerId, snapshot: bool = False) -> None:
        """Tell these peers, or all, to apply a step."""
        for peer in peers or sorted(self.running.peers):
            rate = self.config.learning_rate
            await self.say(peer, Commit(epoch=self.epoch, step=step, clip=1.0, rate=rate, snapshot=snapshot))

    async def applied(self, step: int) -> None:
        for number, replica in enumerate(self.running.replicas):
            await self.hear(replica.peer, Applied, lambda message, n=number: (message.step, message.replica) == (step, n))

    async def step(self, step: int, *, snapshot: bool = False) -> None:
        """One whole step."""
        self.feeder.feed_step(step)
        await self.reports(step)
        await self.commit(step, snapshot=snapshot)
        await self.applied(step)

    async def halt(self, *peers: PeerId) -> dict[PeerId, dict[int, tuple[int, ...]]]:
        """Halt these peers; by peer and slice, the steps of which they have the state."""
        for peer in peers:
            await self.say(peer, Halt(epoch=self.epoch, reason="a peer is lost"))
        stock: dict[PeerId, dict[int, tuple[int, ...]]] = {}
        for peer in peers:
            halted = await self.hear(peer, Halted, lambda message: message.epoch == self.epoch)
            stock[peer] = {entry.slice: entry.steps for entry in halted.stock}
        return stock

    async def state(self, index: int, step: int, *holders: PeerId) -> dict[str, Tensor]:
        """The state of a slice after a step, fetched from these peers in turn."""
        types = required_tensors(self.graph, self.parts.slices[index], self.settings)
        return await fetch_tensors(self.transport, Wanted(self.lineage, step, holders), types, lambda: None)

    async def states(self, step: int) -> list[dict[str, Tensor]]:
        """The states of all slices as their first members have them."""
        return [await self.state(index, step, part.peer) for index, part in enumerate(self.running.slices)]

    async def kept(self, index: int, step: int) -> Kept:
        """Wait until the peer of a slice has told of its copy."""
        peer = self.running.slices[index].peer
        return await self.hear(peer, Kept, lambda message: (message.slice, message.step) == (index, step))

    async def guard(self, peer: PeerId, kept: Kept, *sources: PeerId) -> None:
        """Ask a peer to keep a copy of what others have kept, and let it fetch that."""
        for source in sources:
            await self.say(source, Admit(job=self.job, incarnation=1, peers=(peer, *self.running.peers)))
        manifest = encode_manifest(required_tensors(self.graph, self.parts.slices[kept.slice], self.settings))
        content = Content(digest=self.blobs.offer(manifest), num_bytes=len(manifest))
        await self.say(
            peer,
            Guard(
                job=self.job,
                incarnation=1,
                slice=kept.slice,
                step=kept.step,
                digest=kept.digest,
                manifest=content,
                sources=sources,
                contacts=(),
            ),
        )


GRAPHS: dict[TrainConfig, Graph] = {}


def _graph(config: TrainConfig, data: DataSet) -> Graph:
    """The graph of a run; captured once, which takes seconds."""
    if config not in GRAPHS:
        source = resolve_model(config, data)
        source.module.train()
        GRAPHS[config] = capture(source.module, data.example(), source.rules).graph
    return GRAPHS[config]


def thirds(graph: Graph) -> list[int]:
    """Three slices of as many nodes."""
    return [min(2, index * 3 // len(graph.nodes)) for index in range(len(graph.nodes))]


@contextlib.asynccontextmanager
async def scripted(
    network: SimulatedNetwork, *, slices: Callable[[Graph], Sequence[int]] = thirds, **settings: Any
) -> AsyncIterator[ScriptedOwner]:
    """An owner of a small run."""
    owner = ScriptedOwner(network.join(), run_config(None, **settings), slices)
    await owner.run()
    try:
        yield owner
    finally:
        await owner.close()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that comes true by itself."""
    async with asyncio.timeout(HEARD_S):
        while not condition():  # noqa: ASYNC110 - any condition, with a deadline
            await asyncio.sleep(0)
