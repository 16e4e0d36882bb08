"""What a scheduler is given: the costs of the nodes, the peers and what they can do, and what the owner wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from fusion_p2p.ids import Digest, PeerId
from fusion_p2p.plan.plan import Schedule
from fusion_p2p.wire.job_messages import OptimiserSettings


class NodeCost(Protocol):
    """The cost of one node on one micro-batch, as `graph.workload` counts it."""

    @property
    def kind(self) -> str:
        """One of `graph.kinds.KINDS`."""

    @property
    def forward_flops(self) -> float: ...
    @property
    def backward_flops(self) -> float: ...
    @property
    def bytes_moved(self) -> float:
        """Bytes read and written by the forward pass; the backward pass moves twice as many."""

    @property
    def saved_bytes(self) -> int:
        """Bytes kept from the forward pass until the backward pass."""


@dataclass(frozen=True, slots=True)
class PeerCapability:
    """A peer that may execute slices, as it announces itself. None: unknown.

    free_bytes: the device memory it offers. flops_per_s: its measured rate of matrix products; of the other kinds where known.
    up_bytes_per_s, down_bytes_per_s: the best it was seen to send and receive. up_cap, down_cap: what its volunteer allows,
    bytes per second.
    public_host, local_network, relay: where it is, for guesses about links that nobody has measured: the public IP address that
    others dial, the private /24 it announces, the relay it is behind; empty where there is none.
    """

    peer: PeerId
    free_bytes: int
    flops_per_s: float
    convolution_flops_per_s: float | None = None
    attention_flops_per_s: float | None = None
    memory_bytes_per_s: float | None = None
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None
    up_cap: float | None = None
    down_cap: float | None = None
    public_host: str = ""
    local_network: str = ""
    relay: str = ""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the owner of a job asks for.

    codec: `none`, `uniform`, `adatopk`, `adaptive`, or one codec for every edge; `ratio` is what the sparse ones divide by.
    schedule: a pipeline schedule, or `auto`: the better one by simulation.
    `idle` are peers that were left out before planning, each with the reason; they are carried into the plan.
    """

    graph: Digest
    micro_batches: int
    optimiser: OptimiserSettings
    recompute: bool = False
    idle: tuple[tuple[PeerId, str], ...] = ()
    schedule: Schedule | Literal["auto"] = "auto"
    codec: str = "none"
    ratio: float = 100.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a scheduler may count on, in terms of a chain.

    moments: tensors of a parameter's size that the optimiser keeps. respect_memory: False only to compare with a baseline that
    would not fit.
    """

    micro_batches: int
    moments: int = 2
    recompute: bool = False
    schedule: Schedule | Literal["auto"] = "auto"
    codec: str = "none"
    ratio: float = 100.0
    seed: int = 0
    respect_memory: bool = True


@dataclass(frozen=True, slots=True)
class NoPlan:
    """There is no plan, and why: one sentence that says what is missing. If that is memory: whose, and how much."""

    reason: str
    lacking: PeerId | None = None
    missing_bytes: float = 0.0
