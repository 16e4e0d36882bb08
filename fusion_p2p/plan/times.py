"""How long each peer computes on each operator (design of FusionLLM, arXiv 2410.12707: its workload estimator).

    seconds(operator, peer) = max(FLOPs / rate of its kind, bytes moved / memory rate)      forward and backward each

A backward pass moves twice the bytes of its forward pass. With recomputation a backward task runs the forward pass again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.network import Floats, Network

REMEMBERED = 16
"""Pairs of chain and network whose times are kept: a search asks for the same ones thousands of times."""


@dataclass(frozen=True, eq=False, slots=True)
class Times:
    """Seconds for all operators before each position, per micro-batch: both (P, N + 1), read-only."""

    forward_s: Floats
    backward_s: Floats

    def forward(self, peer: int, first: int, last: int) -> float:
        """Seconds of one forward pass of blocks `first` to `last - 1`."""
        return float(self.forward_s[peer, last] - self.forward_s[peer, first])

    def backward(self, peer: int, first: int, last: int, *, recompute: bool = False) -> float:
        """Seconds of one backward pass of them, with what it computes again."""
        again = self.forward(peer, first, last) if recompute else 0.0
        return float(self.backward_s[peer, last] - self.backward_s[peer, first]) + again

    def both(self, peer: int, first: int, last: int, *, recompute: bool = False) -> float:
        """Seconds of one micro-batch there and back."""
        return self.forward(peer, first, last) + self.backward(peer, first, last, recompute=recompute)


@lru_cache(maxsize=REMEMBERED)
def times(chain: Chain, network: Network) -> Times:
    """The times of every peer of a network; peers of equal rates are computed once."""
    rates = np.column_stack([network.flops_per_s, network.memory_bytes_per_s])
    different, which = np.unique(rates, axis=0, return_inverse=True)
    forward = np.stack([_seconds(chain, row, chain.forward_flops, 1.0) for row in different])
    backward = np.stack([_seconds(chain, row, chain.backward_flops, 2.0) for row in different])
    made = Times(forward[which.ravel()], backward[which.ravel()])
    made.forward_s.flags.writeable = made.backward_s.flags.writeable = False
    return made


def work(chain: Chain, network: Network, recompute: bool = False) -> Floats:
    """(P, N + 1) seconds there and back of all operators before each position."""
    known = times(chain, network)
    return known.forward_s * (2 if recompute else 1) + known.backward_s


def deal(seconds: Sequence[float], micro_batches: int) -> tuple[int, ...]:
    """For every micro-batch the member that executes it: each goes to whoever would be done with it first.

    seconds: of one micro-batch on each member. A member that is too slow to get one does not occur.
    """
    if len(seconds) == 1:
        return (0,) * micro_batches
    done = list(seconds)
    dealt: list[int] = []
    for _ in range(micro_batches):
        member = done.index(min(done))
        done[member] += seconds[member]
        dealt.append(member)
    return tuple(dealt)


def operator_seconds(kinds: NDArray[np.int64], flops: Floats, bytes_moved: Floats, rates: Floats) -> Floats:
    """(M,) seconds of every operator on a peer; `rates` are three kinds of FLOP/s (order of KINDS), then bytes/s."""
    usable = np.maximum(rates, 1.0)
    flops_per_s = usable[[0, 1, 2, 0]]  # what only moves memory computes as fast as a matrix product
    seconds: Floats = np.maximum(flops / flops_per_s[kinds], bytes_moved / usable[3])
    return seconds


def _seconds(chain: Chain, rates: Floats, flops: Floats, passes: float) -> Floats:
    """(N + 1,) sums before each position."""
    seconds = operator_seconds(chain.kinds, flops, passes * chain.bytes_moved, rates)
    return np.concatenate([np.zeros(1), np.cumsum(seconds)])[chain.positions]
