"""The peers and links a plan is made for: measured rates, memory, and the alpha-beta model of every directed link.

    seconds(i -> j, n bytes) = alpha_s[i, j] + n * beta_s[i, j]            (each direction; latency does not occupy the link)

Links are limited per flow (`beta_s`), and per site where `uplink_s` or `downlink_s` is not 0: all flows that leave (enter) a
site share that. Inside a site only the flow counts. The owner is a node too: what it feeds crosses links like everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fusion_p2p.ids import PeerId

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Queue = tuple[Literal["pair", "up", "down"], int, int]
"""A link that carries one message at a time: between two nodes, or out of or into a site (named twice)."""


@dataclass(frozen=True, eq=False, slots=True)
class Network:
    """P peers, and optionally the owner, joined by directed links. Arrays are not written to.

    peers: ids, in listed order.
    flops_per_s: (P, 3) FLOP/s for matrix product, convolution, attention (order of `graph.kinds.KINDS`).
    memory_bytes_per_s: (P,), infinite where unknown. free_bytes: (P,) memory each offers.
    sites: (n,) site number of every node, n = P, or P + 1 with the owner last.
    alpha_s: (n, n) seconds. beta_s: (n, n) seconds per byte, 0 on the diagonal.
    uplink_s, downlink_s: (sites,) seconds per byte shared by all flows that leave or enter a site, 0: no such limit.
    """

    peers: tuple[PeerId, ...]
    flops_per_s: Floats
    memory_bytes_per_s: Floats
    free_bytes: Floats
    sites: NDArray[np.int64]
    alpha_s: Floats
    beta_s: Floats
    uplink_s: Floats
    downlink_s: Floats
    has_owner: bool = False
    full_duplex: bool = True

    @property
    def owner(self) -> int | None:
        """The owner's index in the link matrices."""
        return len(self.peers) if self.has_owner else None

    def link_s(self, source: int, target: int, num_bytes: float) -> float:
        """Seconds for one message over an otherwise idle network, in one direction."""
        return float(self.alpha_s[source, target]) + num_bytes * self.pace(source, target)

    def pace(self, source: int, target: int) -> float:
        """Seconds per byte in one direction over an otherwise idle network."""
        beta = float(self.beta_s[source, target])
        if self.sites[source] != self.sites[target]:
            beta = max(beta, float(self.uplink_s[self.sites[source]]), float(self.downlink_s[self.sites[target]]))
        return beta

    def queues(self, source: int, target: int) -> tuple[tuple[Queue, float], ...]:
        """What a message occupies, each for so many seconds per byte.

        Its pair of nodes (half duplex: one for both directions), and links of sites with a limit. A fast uplink carries other
        flows beside one that is slow because of its other end, so it is occupied for its own share of the time only.
        """
        if source == target:
            return ()
        leaves, enters = int(self.sites[source]), int(self.sites[target])
        pair = (source, target) if self.full_duplex else (min(source, target), max(source, target))
        found: list[tuple[Queue, float]] = [(("pair", *pair), float(self.beta_s[source, target]))]
        if leaves != enters and self.uplink_s[leaves]:
            found.append((("up", leaves, leaves), float(self.uplink_s[leaves])))
        if leaves != enters and self.downlink_s[enters]:
            found.append((("down", enters, enters), float(self.downlink_s[enters])))
        return tuple(found)

    def select(self, peers: Sequence[int]) -> Network:
        """The same network with only these peers, in this order (and the owner, if it is a node)."""
        nodes = [*peers, *([self.owner] if self.owner is not None else [])]
        chosen = np.array(peers, dtype=np.int64)
        return Network(
            peers=tuple(self.peers[index] for index in peers),
            flops_per_s=self.flops_per_s[chosen],
            memory_bytes_per_s=self.memory_bytes_per_s[chosen],
            free_bytes=self.free_bytes[chosen],
            sites=self.sites[nodes],
            alpha_s=self.alpha_s[np.ix_(nodes, nodes)],
            beta_s=self.beta_s[np.ix_(nodes, nodes)],
            uplink_s=self.uplink_s,
            downlink_s=self.downlink_s,
            has_owner=self.has_owner,
            full_duplex=self.full_duplex,
        )
