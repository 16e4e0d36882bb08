"""What one training step looks like to the simulator: stages with compute times, edges with bytes, a network. Pure data."""

from __future__ import annotations

from dataclasses import dataclass

from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Schedule

OWNER_STAGE = -1
"""The source of the edges that carry the owner's feeds."""


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One slice as it runs.

    nodes: network nodes of its members; stages that share a node share its device, which does one task at a time.
    forward_s, backward_s: seconds per micro-batch, for each member (backward includes recomputation).
    in_flight: micro-batches that each member may hold between forward and backward.
    deal: for every micro-batch the member that executes it.
    finish_s: seconds from a stage's last backward to the end of its step (gradients of replicas summed, report on its way).
    start_s: seconds into the step until its members know what became of the last one. update_s: seconds of their update then.
    """

    nodes: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    in_flight: int
    deal: tuple[int, ...]
    finish_s: float = 0.0
    start_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PipelineEdge:
    """Bytes per micro-batch from stage `source` (or OWNER_STAGE) to a later stage, and of the gradient on the way back.

    gradient: whether a gradient comes back, for which the source's backward waits (never to the owner).
    forward_coding, backward_coding: bytes of memory that a peer moves, beside its tasks, to encode and to decode a message.
    credits: values on their way or waiting at the reader, in each direction; later ones wait at the sender (0: no limit).
    """

    source: int
    target: int
    forward_bytes: float
    backward_bytes: float
    gradient: bool = True
    credits: int = 0
    forward_coding: tuple[float, float] = (0.0, 0.0)
    backward_coding: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PipelineExchange:
    """Gradients of shared parameters, once a step: from a (stage, member) to their home after its last backward.

    The home's step does not end before they are there. As many bytes of sums come back when the home reports (`finish_s` before
    the next step), and the source does not update before it has them.
    """

    source: tuple[int, int]
    home: tuple[int, int]
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """One step of `micro_batches` through `stages`."""

    network: Network
    stages: tuple[PipelineStage, ...]
    edges: tuple[PipelineEdge, ...]
    micro_batches: int
    schedule: Schedule = "1f1b"
    exchanges: tuple[PipelineExchange, ...] = ()
