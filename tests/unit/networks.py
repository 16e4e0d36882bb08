"""Small networks for tests of planners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Floats, Network


def network(
    sites: Sequence[int],
    *,
    speeds: Sequence[float] | None = None,
    within: tuple[float, float] = (1e-4, 1e-9),
    between: tuple[float, float] = (0.02, 1e-6),
    free_bytes: float = 1e12,
    uplink_s: float = 0.0,
) -> Network:
    """Peers p0, p1, ... at these sites; links are (alpha, beta) inside and between sites, all speeds 1 FLOP/s unless given."""
    place = np.array(sites, dtype=np.int64)
    count = len(place)
    same = place[:, None] == place[None, :]
    rates = np.ones(count) if speeds is None else np.array(speeds, dtype=np.float64)
    return Network(
        peers=tuple(PeerId(f"p{index}") for index in range(count)),
        flops_per_s=np.repeat(rates[:, None], 3, axis=1),
        memory_bytes_per_s=np.full(count, np.inf),
        free_bytes=np.full(count, free_bytes),
        sites=place,
        alpha_s=_off_diagonal(np.where(same, within[0], between[0])),
        beta_s=_off_diagonal(np.where(same, within[1], between[1])),
        uplink_s=np.full(max(sites, default=0) + 1, uplink_s),
        downlink_s=np.full(max(sites, default=0) + 1, uplink_s),
    )


def _off_diagonal(matrix: Floats) -> Floats:
    np.fill_diagonal(matrix, 0.0)
    return matrix
