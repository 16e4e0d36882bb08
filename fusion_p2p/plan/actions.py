"""The pipeline schedule: how many micro-batches each stage may hold, what edges need for that, and who does what when.

A stage hides the way of its micro-batches to the loss and back if it may begin as many others as fit into that round trip:

    T          seconds per micro-batch of the slowest stage or link
    R(edge)    seconds one way;  C(stage) seconds forward and backward
    RTT(s)     C(s) + the most over edges s -> t of (R there and back + RTT(t))
    limit(s)   ceil((RTT(s) / T + 1) / members), at most its own micro-batches

Classic 1F1B (limit = stages from s to the end) counts computing only, and is slower than GPipe where links are slow.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge, PipelineStage
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.timeline import TaskSpan

LEAST_CREDITS = 2
"""Values per edge that a reader lets come ahead of what it works on: one in use, one on its way."""


def rtt_caps(pipeline: Pipeline) -> tuple[int, ...]:
    """For every stage the in-flight limit of each member that hides its round trip."""
    pace_s = _pace(pipeline)
    round_trips = _round_trips(pipeline)
    return tuple(
        max(1, min(_most_own(stage.deal), math.ceil((_quotient(round_trips[index], pace_s) + 1) / len(stage.nodes))))
        for index, stage in enumerate(pipeline.stages)
    )


def classic_caps(pipeline: Pipeline) -> tuple[int, ...]:
    """The in-flight limits of classic 1F1B: stages from each one to the end, shared by its members."""
    count = len(pipeline.stages)
    return tuple(max(1, -(-(count - index) // len(stage.nodes))) for index, stage in enumerate(pipeline.stages))


def with_caps(pipeline: Pipeline, caps: Sequence[int]) -> Pipeline:
    """The same pipeline with these in-flight limits."""
    stages = tuple(replace(stage, in_flight=cap) for stage, cap in zip(pipeline.stages, caps, strict=True))
    return replace(pipeline, stages=stages)


def wanted_credits(pipeline: Pipeline) -> tuple[int, ...]:
    """For every edge the credits with which its link need not pause: values on their way while one is said to be taken."""
    pace_s = _pace(pipeline)
    wanted = []
    for edge in pipeline.edges:
        away_s = max(
            pipeline.network.link_s(source, target, edge.forward_bytes) + pipeline.network.link_s(target, source, 0.0)
            for source, target in set(_ways(pipeline, edge))
        )
        most = min(pipeline.micro_batches, 1 + math.ceil(_quotient(away_s, pace_s)))
        wanted.append(max(LEAST_CREDITS, most))
    return tuple(wanted)


def action_table(pipeline: Pipeline) -> str:
    """Who does what in which order, as simulated; one line for every member of every stage, as `stage 0 | F0 F1 B0 B1`."""
    return table(rows(simulate(pipeline, trace=True).tasks))


def rows(tasks: Iterable[TaskSpan]) -> dict[tuple[int, int], list[str]]:
    """The tasks of each (stage, member), as `F3`, in the order in which they began."""
    found: dict[tuple[int, int], list[str]] = defaultdict(list)
    for task in sorted(tasks, key=lambda task: task.start_s):
        found[task.stage, task.member].append(f"{task.kind}{task.micro_batch}")
    return dict(found)


def table(lines: Mapping[tuple[int, int], Sequence[str]]) -> str:
    """Rows as text. A stage with several members has a line for each: `stage 1.0`, `stage 1.1`."""
    shared = {stage for stage, member in lines if member > 0}
    names = {key: f"stage {key[0]}.{key[1]}" if key[0] in shared else f"stage {key[0]}" for key in sorted(lines)}
    width = max(map(len, names.values()), default=0)
    return "\n".join(f"{name:<{width}} | {' '.join(lines[key])}" for key, name in names.items())


def _most_own(deal: Sequence[int]) -> int:
    """The most micro-batches that one member gets."""
    return max((deal.count(member) for member in set(deal)), default=1)


def _pace(pipeline: Pipeline) -> float:
    """T: seconds per micro-batch that the busiest device or link works."""
    busy: dict[Hashable, float] = defaultdict(float)
    for stage in pipeline.stages:
        for member in stage.deal:
            busy[stage.nodes[member]] += stage.forward_s[member] + stage.backward_s[member]
    for edge in pipeline.edges:
        for (source, target), messages in Counter(_ways(pipeline, edge)).items():
            _occupy(busy, pipeline.network, source, target, messages * edge.forward_bytes)
            if edge.gradient and edge.source != OWNER_STAGE:
                _occupy(busy, pipeline.network, target, source, messages * edge.backward_bytes)
    return max(busy.values()) / pipeline.micro_batches


def _occupy(busy: dict[Hashable, float], network: Network, source: int, target: int, num_bytes: float) -> None:
    """Add the seconds that bytes occupy the links between two nodes, as the simulator counts them."""
    for queue, pace in network.queues(source, target):
        busy[queue] += num_bytes * pace


def _ways(pipeline: Pipeline, edge: PipelineEdge) -> list[tuple[int, int]]:
    """For every micro-batch the nodes between which an edge carries it."""
    if edge.source == OWNER_STAGE:
        owner = pipeline.network.owner
        senders = [] if owner is None else [owner] * pipeline.micro_batches
    else:
        senders = _nodes(pipeline.stages[edge.source], pipeline.micro_batches)
    return list(zip(senders, _nodes(pipeline.stages[edge.target], pipeline.micro_batches), strict=False))


def _nodes(stage: PipelineStage, micro_batches: int) -> list[int]:
    """For every micro-batch the node that executes it."""
    return [stage.nodes[member] for member in stage.deal] if len(stage.nodes) > 1 else [stage.nodes[0]] * micro_batches


def _round_trips(pipeline: Pipeline) -> list[float]:
    """RTT of every stage; edges go to higher stages, so the last comes first."""
    trips = [
        max(forward + backward for forward, backward in zip(stage.forward_s, stage.backward_s, strict=True))
        for stage in pipeline.stages
    ]
    below = [0.0] * len(trips)
    for edge in sorted(pipeline.edges, key=lambda edge: edge.target, reverse=True):
        if edge.source == OWNER_STAGE:
            continue
        pairs = set(_ways(pipeline, edge))
        way = max(pipeline.network.link_s(source, target, edge.forward_bytes) for source, target in pairs)
        if edge.gradient:
            way += max(pipeline.network.link_s(target, source, edge.backward_bytes) for source, target in pairs)
        below[edge.source] = max(below[edge.source], way + trips[edge.target] + below[edge.target])
    return [trip + further for trip, further in zip(trips, below, strict=True)]


def _quotient(seconds: float, pace_s: float) -> float:
    """How many paces fit; one when nothing takes time, and a hair less than an exact number is that number."""
    return seconds / pace_s - 1e-9 if pace_s > 0 else 1.0
