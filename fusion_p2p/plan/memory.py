"""How much device memory a slice needs: arithmetic on declared sizes, the same for planners and for the peer that consents.

parameters   trainable bytes x (1 value + 1 gradient + optimiser moments) + 2 x buffer bytes (the pending update is kept aside)
in flight    in_flight x (bytes saved for backward + bytes of what it reads and sends)
             with recomputation: in_flight x bytes of what it reads and sends + 1 x bytes saved
credits      credits x (bytes it receives + bytes of the gradients it receives)
masks        (in_flight + credits) x 4 bytes per element that its TopK edges keep: their places, until the gradient has crossed
working      2 x its largest value (a value and its gradient while a node runs)
sharing      of what other replicas or slices hold too, once a step: what comes and what is copied to be sent (`plan.sharing`)

For a stage of a chain the same is estimated from sums (`stage_bytes`): without working memory, and with what it only relays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import Slice
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout, Stage
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.wire.codecs import effective, kept_elements, parse
from fusion_p2p.wire.job_messages import OptimiserSettings

GIB = 1 << 30
CREDITS = 2
"""Values per edge that a receiver lets come ahead of what it works on: one in use, one on its way."""
PLACE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Holding:
    """What bounds a slice's memory besides its size: micro-batches in flight, credits per edge, and the optimiser's moments.

    members: how many share the slice; only the estimate from sums takes that from here.
    places: elements of a micro-batch whose places its TopK edges remember (`remembered_places`).
    """

    in_flight: int
    credits: int
    moments: int
    recompute: bool = False
    members: int = 1
    places: int = 0


def num_moments(optimiser: OptimiserSettings) -> int:
    """Tensors of a parameter's size that an optimiser keeps."""
    if optimiser.name == "sgd":
        return 1 if optimiser.momentum else 0
    return 2


def remembered_places(graph: Graph, plan: Plan, index: int) -> int:
    """Elements of a micro-batch that the TopK edges of slice `index` keep: both ends know where until the gradient crosses."""
    touching = (edge for edge in plan.edges if index in (edge.source, edge.target))
    typed = [(effective(parse(edge.codec), graph.types[edge.value]), graph.types[edge.value]) for edge in touching]
    return sum(kept_elements(type.num_elements, spec.ratio) for spec, type in typed if spec.reuses_mask)


def holding_of(graph: Graph, plan: Plan, index: int, moments: int) -> Holding:
    """What slice `index` of a plan holds; of the credits of its edges the most counts for all."""
    part = plan.slices[index]
    credits = max((edge.credits for edge in plan.edges if index in (edge.source, edge.target)), default=0)
    return Holding(part.in_flight, credits, moments, part.recompute, places=remembered_places(graph, plan, index))


def slice_bytes(graph: Graph, part: Slice, saved_bytes: Sequence[int], holding: Holding) -> int:
    """Bytes of device memory a slice needs at most, without sharing; `saved_bytes[n]`: what node n keeps for backward."""
    saved = sum(saved_bytes[node] for node in part.nodes)
    crossing = _num_bytes(graph, (*part.receives, *part.inputs, *part.sends))
    kept = holding.in_flight * crossing + (saved if holding.recompute else holding.in_flight * saved)
    gradients = _num_bytes(graph, (value for value in part.sends if graph.types[value].grad))
    arriving = holding.credits * (_num_bytes(graph, part.receives) + gradients)
    masks = PLACE_BYTES * holding.places * (holding.in_flight + holding.credits)
    return _state_bytes(graph, part, holding.moments) + kept + arriving + masks + _working_bytes(graph, part)


def stage_bytes(chain: Chain, first: int, last: int, holding: Holding) -> float:
    """Bytes that blocks `first` to `last - 1` need as one stage, estimated from the sums of a chain."""
    parameters = chain.parameter_bytes[last] - chain.parameter_bytes[first]
    buffers = chain.buffer_bytes[last] - chain.buffer_bytes[first]
    saved = chain.saved_bytes[last] - chain.saved_bytes[first]
    crossing = chain.crossing[first] + chain.crossing[last] + chain.feed(first, last)
    kept = holding.in_flight * crossing + (saved if holding.recompute else holding.in_flight * saved)
    arriving = holding.credits * (chain.crossing[first] + chain.crossing_back[last])
    state = (2 + holding.moments) * parameters + 2 * buffers
    return float(state + kept + arriving + _sharing_bytes(chain, first, last, holding.members))


def _sharing_bytes(chain: Chain, first: int, last: int, members: int) -> float:
    """What agreeing with other members, or on tied parameters with another stage, takes, about."""
    if members > 1:
        return (3 - 2 / members) * float(chain.parameter_bytes[last] - chain.parameter_bytes[first])
    begin, end = int(chain.positions[first]), int(chain.positions[last])
    inside = ((tied, bisect_left(tied.readers, end) - bisect_left(tied.readers, begin)) for tied in chain.tied)
    return 2 * sum(tied.num_bytes for tied, readers in inside if 0 < readers < len(tied.readers))


def least_holding(stage: Stage, layout: Layout, terms: Terms) -> Holding:
    """The least that a stage may hold: one micro-batch, or under gpipe all that one member gets."""
    in_flight = -(-terms.micro_batches // len(stage.peers)) if layout.schedule == "gpipe" else 1
    return Holding(in_flight, CREDITS, terms.moments, layout.recompute, len(stage.peers))


def within_memory(chain: Chain, network: Network, layout: Layout, terms: Terms) -> Layout | NoPlan:
    """The layout, unless a peer lacks memory for it."""
    if not terms.respect_memory:
        return layout
    free = {peer: float(network.free_bytes[peer]) for peer in layout.peers}
    for index, stage in enumerate(layout.stages):
        need = stage_bytes(chain, stage.first, stage.last, least_holding(stage, layout, terms))
        poorest = min(stage.peers, key=lambda peer: free[peer])
        if need > free[poorest]:
            return shortage(index, network.peers[poorest], need, free[poorest])
        for peer in stage.peers:
            free[peer] -= need
    return layout


def shortage(index: int, peer: PeerId, need: float, free: float) -> NoPlan:
    """Why a slice does not fit, and how much is missing."""
    reason = f"slice {index} needs {gib(need - free)} more ({gib(need)} on {peer}, {gib(max(free, 0.0))} free)"
    return NoPlan(reason, lacking=peer, missing_bytes=need - free)


def gib(num_bytes: float) -> str:
    """Bytes for people: `3.1 GiB`, and MiB below a tenth of that unit."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / (1 << 20):.1f} MiB"


def _state_bytes(graph: Graph, part: Slice, moments: int) -> int:
    trainable = _num_bytes(graph, (value for value in part.parameters if graph.parameter(value).trainable))
    buffers = _num_bytes(graph, part.parameters) - trainable
    return (2 + moments) * trainable + 2 * buffers


def _working_bytes(graph: Graph, part: Slice) -> int:
    return 2 * max((graph.types[value].num_bytes for node in part.nodes for value in graph.nodes[node].outputs), default=0)


def _num_bytes(graph: Graph, values: Iterable[int]) -> int:
    return sum(graph.types[value].num_bytes for value in values)
