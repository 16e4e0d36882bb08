"""Plans as bytes and back, and the check that a plan fits its graph.

    plan = MessagePack map {graph, scheduler, micro_batches, slice_of, slices, edges, idle, predicted_step_s, schedule}

`slice_of` travels as runs `[slice, number of nodes]`, because neighbouring nodes usually share a slice. Slices and edges are
arrays in the order of the dataclass fields. Decoding applies MessagePack's limits first, then strict types, then the limits of
the graph schema; the bytes of a plan are canonical, so its digest identifies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Annotated

import msgpack
from pydantic import Field, ValidationError

from fusion_p2p.errors import GraphError, WireError
from fusion_p2p.graph.schema import MAX_NODES, Graph
from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan.plan import EdgePlan, Plan, Schedule, SlicePlan
from fusion_p2p.wire import codecs
from fusion_p2p.wire.frames import OWNER
from fusion_p2p.wire.messages import DigestText, Name, PeerName, Record, Seconds, Text, describe, unpack

MAX_PLAN_BYTES = 4 << 20
MAX_EDGES = 200_000
MAX_PEERS = 4096
MAX_WAYS = 400_000
"""Edges and copies of parameters, counted for each pair of replicas: a stranger's plan must not make millions of them."""

if TYPE_CHECKING:
    from fusion_p2p.graph.slices import Cut  # pulls in torch, which who only decodes a plan does not need

_Positive = Annotated[int, Field(ge=1, lt=1 << 31)]
_Value = Annotated[int, Field(ge=0, lt=1 << 31)]
_SliceIndex = Annotated[int, Field(ge=0, lt=OWNER)]
_Member = Annotated[int, Field(ge=0, lt=MAX_PEERS)]
_Members = Annotated[tuple[PeerName, ...], Field(max_length=MAX_PEERS - 1)]
_Deal = Annotated[tuple[_Member, ...], Field(min_length=1, max_length=MAX_PEERS)]


class _PlanRecord(Record):
    """The strict shape of an encoded plan."""

    graph: DigestText
    scheduler: Name
    micro_batches: _Positive
    slice_of: Annotated[tuple[tuple[_SliceIndex, _Positive], ...], Field(max_length=MAX_NODES)]
    slices: Annotated[tuple[tuple[PeerName, _Positive, bool, _Members, _Deal], ...], Field(min_length=1, max_length=OWNER)]
    edges: Annotated[tuple[tuple[_Value, _SliceIndex, _SliceIndex, Name, _Positive], ...], Field(max_length=MAX_EDGES)]
    idle: Annotated[tuple[tuple[PeerName, Text], ...], Field(max_length=MAX_PEERS)]
    predicted_step_s: Seconds
    schedule: Schedule


def encode_plan(plan: Plan) -> bytes:
    """The canonical bytes of a plan, at most MAX_PLAN_BYTES. ValueError when it is larger: our own fault."""
    fields = {
        "graph": plan.graph,
        "scheduler": plan.scheduler,
        "micro_batches": plan.micro_batches,
        "slice_of": list(_runs(plan.slice_of)),
        "slices": [(part.peer, part.in_flight, part.recompute, part.replicas, part.deal) for part in plan.slices],
        "edges": [(edge.value, edge.source, edge.target, edge.codec, edge.credits) for edge in plan.edges],
        "idle": list(plan.idle),
        "predicted_step_s": float(plan.predicted_step_s),
        "schedule": plan.schedule,
    }
    data: bytes = msgpack.packb(fields)
    if len(data) > MAX_PLAN_BYTES:
        raise ValueError(f"plan of {len(data)} bytes exceeds {MAX_PLAN_BYTES}")
    return data


def decode_plan(data: bytes) -> Plan:
    """The plan in `data`. WireError for anything that is not a well-formed plan; nothing is checked against a graph yet."""
    fields = unpack(data, MAX_PLAN_BYTES)
    try:
        record = _PlanRecord.model_validate(fields)
    except ValidationError as error:
        raise WireError(f"plan: {describe(error)}") from None
    if sum(count for _, count in record.slice_of) > MAX_NODES:
        raise WireError(f"plan: more than {MAX_NODES} nodes")
    return Plan(
        graph=Digest(record.graph),
        scheduler=record.scheduler,
        micro_batches=record.micro_batches,
        slice_of=tuple(index for index, count in record.slice_of for _ in range(count)),
        slices=tuple(_slice(*fields) for fields in record.slices),
        edges=tuple(EdgePlan(*edge) for edge in record.edges),
        idle=tuple((PeerId(peer), reason) for peer, reason in record.idle),
        predicted_step_s=record.predicted_step_s,
        schedule=record.schedule,
    )


def _slice(peer: str, in_flight: int, recompute: bool, replicas: tuple[str, ...], deal: tuple[int, ...]) -> SlicePlan:
    return SlicePlan(PeerId(peer), in_flight, recompute, tuple(map(PeerId, replicas)), deal)


def check_plan(plan: Plan, graph: Graph, cut: Cut) -> None:
    """That a plan belongs to `graph` and to `cut`, the result of `cut(graph, plan.slice_of)`.

    GraphError when nodes, slices or edges differ from the cut's; WireError when a bound or a codec is not one we know.
    """
    if len(plan.slice_of) != len(graph.nodes):
        raise GraphError(f"the plan places {len(plan.slice_of)} nodes, the graph has {len(graph.nodes)}")
    if len(plan.slices) != len(cut.slices):
        raise GraphError(f"the plan has {len(plan.slices)} slices, its cut has {len(cut.slices)}")
    planned = [(edge.value, edge.source, edge.target) for edge in plan.edges]
    if planned != [(edge.value, edge.source, edge.target) for edge in cut.edges]:
        raise GraphError("the edges of the plan are not those of its cut")
    _check_bounds(plan)
    _check_size(plan, cut)


def _check_size(plan: Plan, cut: Cut) -> None:
    members = [len(part.members) for part in plan.slices]
    ways = sum(members[edge.source] * members[edge.target] for edge in plan.edges)
    copies = sum(members[part.index] * len(part.parameters) for part in cut.slices)
    places = sum(len(part.deal) for part in plan.slices)
    if max(ways, copies) > MAX_WAYS or max(places, sum(members)) > OWNER:
        raise WireError("plan: too many stage replicas")


def _check_bounds(plan: Plan) -> None:
    if plan.micro_batches < 1:
        raise WireError("plan: no micro-batches")
    for index, part in enumerate(plan.slices):
        _check_slice(plan, index, part)
    for edge in plan.edges:
        if edge.credits < 1:
            raise WireError(f"plan: no credit for value {edge.value} from slice {edge.source} to {edge.target}")
        codecs.parse(edge.codec)


def _check_slice(plan: Plan, index: int, part: SlicePlan) -> None:
    if part.in_flight < 1:
        raise WireError(f"plan: slice {index} may hold no micro-batch in flight")
    if len(set(part.members)) < len(part.members):
        raise WireError(f"plan: slice {index} names a peer twice")
    if set(part.deal) != set(range(len(part.members))) or len(part.deal) > plan.micro_batches:
        raise WireError(f"plan: slice {index} does not deal its {plan.micro_batches} micro-batches to every member")
    if plan.schedule == "gpipe" and part.in_flight < max(turns.before(plan.micro_batches) for turns in part.turns):
        raise WireError(f"plan: slice {index} may not hold all forward passes of a step, as gpipe needs")


def _runs(slice_of: Sequence[int]) -> Iterator[tuple[int, int]]:
    for index, group in groupby(slice_of):
        yield index, sum(1 for _ in group)
