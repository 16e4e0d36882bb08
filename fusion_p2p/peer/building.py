"""From an owner's Prepare to slices that are ready to run: fetch, check, allocate. A volunteer trusts nobody here.

Graph and plan are identified by their digests and checked before anything is allocated; the slices must fit into the memory
that this peer offers. Weights come from the graph's rules or the owner. The states of a later step are taken, tensor by tensor,
from the first of these that has them: the epoch before, which stands still here; copies that lie here; other peers; the owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fusion_p2p.errors import AddressError, NetworkError, SliceFailed
from fusion_p2p.execute.compute import ComputeThread
from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState, required_tensors
from fusion_p2p.graph.check import Limits, check
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.schema import MAX_GRAPH_BYTES, Graph
from fusion_p2p.graph.slices import Cut, cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import Digest, JobId, PeerId
from fusion_p2p.job.topology import ReplicaEdges, replica_edges
from fusion_p2p.net.base import Transport
from fusion_p2p.net.blobs import BlobReader
from fusion_p2p.peer.copies import Lineage
from fusion_p2p.peer.edge_codecs import EdgeCodecs, planned_codecs
from fusion_p2p.peer.epoch_work import BuiltEpoch
from fusion_p2p.peer.fetching import Wanted, fetch_tensors
from fusion_p2p.peer.tasks import SliceTasks
from fusion_p2p.plan.encoding import check_plan, decode_plan
from fusion_p2p.plan.memory import gib, holding_of, num_moments, slice_bytes
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.sharing import exchange_bytes
from fusion_p2p.wire.frames import RunId
from fusion_p2p.wire.job_messages import Contact, Content, Prepare

log = logging.getLogger(__name__)

MAX_PLAN_BYTES = 4 << 20
CONNECT_TIMEOUT_S = 10.0
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Bench:
    """Where slices run: the device, the bytes of its memory that are offered now, and the thread that computes.

    `coding` turns tensors into bytes and back meanwhile; without it that is done in turn with computing.
    """

    device: torch.device
    offered_bytes: int
    thread: ComputeThread
    coding: ComputeThread | None = None

    async def run(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a call on the compute thread."""
        return await asyncio.wrap_future(self.thread.submit(call, *args, **kwargs))


async def build_epoch(
    transport: Transport,
    bench: Bench,
    owner: PeerId,
    prepare: Prepare,
    progressed: Callable[[], None],
    before: BuiltEpoch | None,
    kept: Mapping[str, Tensor],
) -> BuiltEpoch:
    """Slices that are ready to run. GraphError, WireError, NetworkError or SliceFailed say why not, in one sentence.

    `progressed` is called whenever a piece is done: weights over a slow link take longer than any lease. `before` is the epoch
    of the same job that stands still here; `kept` are copies of tensors of the step that is asked for.
    """
    site = await _learnt(transport, bench, owner, prepare, before)
    meeting = asyncio.create_task(meet(transport, prepare.contacts))
    try:
        states = await bench.run(_taken_over, before, site.plan, prepare)
        here = {**kept, **await bench.run(_tensors_of, before, prepare)}
        tasks: dict[int, SliceTasks] = {}
        for number in site.plan.replicas_of(transport.peer_id):
            index = site.edges[number].slice
            if index not in states:
                tensors = await _tensors(transport, owner, site, index, prepare, here, progressed)
                states[index] = await bench.run(_state, site, index, bench.device, prepare, tensors)
            tasks[number] = await bench.run(_allocate, site, number, prepare, states[index])
            progressed()
        await meeting
    finally:
        meeting.cancel()
    run = RunId(JobId(prepare.job), prepare.incarnation, prepare.epoch)
    planned = planned_codecs(site.plan, site.edges)
    codecs = {number: EdgeCodecs(site.graph, site.edges[number], planned, bench.device) for number in tasks}
    return BuiltEpoch(
        run=run,
        owner=owner,
        graph=site.graph,
        plan=site.plan,
        parts=site.parts,
        edges=site.edges,
        tasks=tasks,
        codecs=codecs,
        settings=prepare.settings,
        state_step=prepare.state_step,
        needed_bytes=site.needed_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Site:
    graph: Graph
    parts: Cut
    plan: Plan
    edges: tuple[ReplicaEdges, ...]
    needed_bytes: int


async def _learnt(transport: Transport, bench: Bench, owner: PeerId, prepare: Prepare, before: BuiltEpoch | None) -> _Site:
    """Graph and plan, checked. The graph of the epoch before has been checked already."""
    graph = before.graph if before is not None and before.plan.graph == prepare.graph.digest else None
    async with BlobReader(transport, owner) as reader:
        if graph is None:
            graph = await bench.run(_checked, await _content(reader, prepare.graph, MAX_GRAPH_BYTES), bench.offered_bytes)
        encoded_plan = await _content(reader, prepare.plan, MAX_PLAN_BYTES)
    return await bench.run(_understand, graph, encoded_plan, transport.peer_id, prepare, bench.offered_bytes)


def _checked(encoded: bytes, offered_bytes: int) -> Graph:
    """Decode and check. On the compute thread: a stranger's graph may take long, and the event loop must not."""
    graph = decode_graph(encoded)
    check(graph, Limits(workspace_bytes=offered_bytes))
    return graph


def _understand(graph: Graph, encoded_plan: bytes, me: PeerId, prepare: Prepare, offered_bytes: int) -> _Site:
    """Decode a plan, check it and cut the graph. On the compute thread, as above."""
    plan = decode_plan(encoded_plan)
    parts = cut(graph, plan.slice_of)
    check_plan(plan, graph, parts)
    if plan.graph != prepare.graph.digest:
        raise SliceFailed("the plan was made for another graph")
    mine = plan.slices_of(me)
    if not mine:
        raise SliceFailed("the plan gives this peer nothing to do")
    needed = _needed_bytes(graph, parts, plan, mine, prepare)
    if needed > offered_bytes:
        raise SliceFailed(f"slices {list(mine)} need {gib(needed - offered_bytes)} more than the {gib(offered_bytes)} offered")
    return _Site(graph, parts, plan, replica_edges(graph, parts, plan), needed)


async def _content(reader: BlobReader, content: Content, limit: int) -> bytes:
    if content.num_bytes > limit:
        raise SliceFailed(f"{content.num_bytes} bytes exceed the limit of {limit}")
    return await reader.content(Digest(content.digest), content.num_bytes)


def _needed_bytes(graph: Graph, parts: Cut, plan: Plan, mine: Sequence[int], prepare: Prepare) -> int:
    """Device memory that our slices of a plan take at most."""
    saved = [node.saved_bytes for node in workload(graph)]
    shared = exchange_bytes(graph, parts, [len(part.members) for part in plan.slices])
    needed = 0
    for index in mine:
        holding = holding_of(graph, plan, index, num_moments(prepare.settings.optimiser))
        needed += slice_bytes(graph, parts.slices[index], saved, holding) + shared[index]
    return needed


def _taken_over(before: BuiltEpoch | None, plan: Plan, prepare: Prepare) -> dict[int, SliceState]:
    """The states, by slice, that the epoch before has as this one needs them. On the compute thread, which changes them."""
    if before is None:
        return {}
    same = (before.plan.graph, before.plan.slice_of, before.settings) == (plan.graph, plan.slice_of, prepare.settings)
    return {index: state for index, state in before.states.items() if same and state.step == prepare.state_step}


def _tensors_of(before: BuiltEpoch | None, prepare: Prepare) -> dict[str, Tensor]:
    """The tensors of the epoch before that are of the right step, also when it was cut otherwise. They are not copies."""
    if before is None or (before.plan.graph, before.settings) != (prepare.graph.digest, prepare.settings):
        return {}
    tensors: dict[str, Tensor] = {}
    for state in before.states.values():
        if state.step == prepare.state_step:
            tensors |= state.named_tensors()
    return tensors


def _state(site: _Site, index: int, device: torch.device, prepare: Prepare, tensors: dict[str, Tensor]) -> SliceState:
    graph, part = site.graph, site.parts.slices[index]
    if prepare.state_step or tensors.keys() == required_tensors(graph, part, prepare.settings).keys():
        return SliceState.restore(graph, part, prepare.settings, device, prepare.state_step, tensors)
    weights = {name.removeprefix("parameter/"): tensor for name, tensor in tensors.items()}
    return SliceState.initial(graph, part, prepare.settings, device, weights)


def _allocate(site: _Site, number: int, prepare: Prepare, state: SliceState) -> SliceTasks:
    graph, edges = site.graph, site.edges[number]
    part, planned = site.parts.slices[edges.slice], site.plan.slices[edges.slice]
    executor = SliceExecutor(
        graph,
        part,
        state,
        prepare.settings,
        micro_batches=site.plan.micro_batches,
        recompute=planned.recompute,
        turns=edges.own_turns,
    )
    return SliceTasks(graph, edges, executor)


async def _tensors(
    transport: Transport,
    owner: PeerId,
    site: _Site,
    index: int,
    prepare: Prepare,
    here: Mapping[str, Tensor],
    progressed: Callable[[], None],
) -> dict[str, Tensor]:
    """The whole state of a slice; before the first step, only what follows from no rule."""
    part = site.parts.slices[index]
    required = required_tensors(site.graph, part, prepare.settings)
    found = {name: here[name] for name in required if name in here}
    holders = [
        peer for source in prepare.sources if source.slice == index for peer in source.peers if peer != transport.peer_id
    ]
    if not prepare.state_step and len(found) < len(required):
        unruled = {
            f"parameter/{site.graph.parameter(value).name}" for value in part.parameters if not site.graph.parameter(value).rule
        }
        found, required, holders = {}, {name: required[name] for name in required if name in unruled}, []
    lineage = Lineage(owner, JobId(prepare.job), prepare.incarnation)
    wanted = Wanted(lineage, prepare.state_step, [*map(PeerId, holders), owner])
    missing = {name: type_ for name, type_ in required.items() if name not in found}
    return found | await fetch_tensors(transport, wanted, missing, progressed)


async def meet(transport: Transport, contacts: Sequence[Contact]) -> None:
    """Learn the way to the other peers of the plan. One that cannot be dialled now shows when its lane is opened."""

    async def dial(contact: Contact) -> None:
        try:
            await transport.connect(contact.addresses, timeout_s=CONNECT_TIMEOUT_S)
        except (NetworkError, AddressError) as error:
            log.info("cannot dial peer=%s yet: %s", contact.peer, error)

    await asyncio.gather(*(dial(contact) for contact in contacts if contact.peer != transport.peer_id))
