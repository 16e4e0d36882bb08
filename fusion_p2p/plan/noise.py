"""A network without the differences that measuring alone can make.

Every figure becomes the median of all of its kind that cannot be told apart from it: of equal peers the one that happened to
be measured as the fastest is no faster then, and a link that looks slow because it is in use is as fast as idle ones nearby.
What really differs, differs still.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fusion_p2p.plan.network import Floats, Network

RATES_ALIKE = 1.25
"""Rates of peers that differ by no more, as a factor, may be equal: machines that also do something else are measured."""
LINKS_ALIKE = 2.0
"""The same of links, whose figures depend on what else is on the line."""
ALIKE_LATENCY_S, ALIKE_S_PER_BYTE = 1e-3, 4e-9
"""Or by less than this: nobody moves a slice for a millisecond, or for a link of 4 Gbit/s instead of 2."""


def evened(network: Network) -> Network:
    """The network with figures of rates, memory bandwidths and links that may be equal made equal."""
    links = ~np.eye(len(network.sites), dtype=np.bool_)
    alpha, beta = network.alpha_s.copy(), network.beta_s.copy()
    alpha[links] = _local_medians(alpha[links], LINKS_ALIKE, ALIKE_LATENCY_S)
    beta[links] = _local_medians(beta[links], LINKS_ALIKE, ALIKE_S_PER_BYTE)
    return replace(
        network,
        flops_per_s=np.apply_along_axis(_local_medians, 0, network.flops_per_s, RATES_ALIKE),
        memory_bytes_per_s=_local_medians(network.memory_bytes_per_s, RATES_ALIKE),
        alpha_s=alpha,
        beta_s=beta,
    )


def _local_medians(figures: Floats, factor: float, least: float = 0.0) -> Floats:
    """(n,) for each figure the median of those within this factor of it, or no further away than `least`."""
    in_order = np.sort(figures)
    lowest = np.fmin(figures / factor, figures - least)
    highest = np.fmax(figures * factor, figures + least)
    first, end = np.searchsorted(in_order, lowest, "left"), np.searchsorted(in_order, highest, "right")
    medians: Floats = in_order[(first + end - 1) // 2]
    return medians
