"""A model as a chain of blocks: what schedulers cut. Every cut position knows what it costs to cut there.

Operators stay in topological order, so any set of positions is an acyclic cut. Position p lies before operator `positions[p]`;
what crosses it is every distinct value made before and read at or after it, once (a skip over a whole stage is counted at each
position it spans, FusionLLM's chain view of a DAG).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.plan.network import Floats


@dataclass(frozen=True, eq=False, slots=True)
class Chain:
    """M operators, N blocks, N + 1 positions (position 0 and N are the ends). All figures are for one micro-batch.

    kinds: (M,) index into `graph.workload.KINDS`. forward_flops, backward_flops, bytes_moved: (M,) per operator; the backward
    pass moves twice the bytes. positions: (N + 1,) ascending operator indices, 0 and M at the ends.
    crossing, crossing_back: (N + 1,) bytes forward and of gradients back at each position, 0 at the ends.
    parameter_bytes, buffer_bytes, saved_bytes: (N + 1,) sums over all operators before the position; a value is counted once,
    a parameter where it is first read.
    """

    name: str
    kinds: NDArray[np.int64]
    forward_flops: Floats
    backward_flops: Floats
    bytes_moved: Floats
    positions: NDArray[np.int64]
    crossing: Floats
    crossing_back: Floats
    parameter_bytes: Floats
    buffer_bytes: Floats
    saved_bytes: Floats

    @property
    def num_blocks(self) -> int:
        """N, the number of blocks between positions."""
        return len(self.positions) - 1
