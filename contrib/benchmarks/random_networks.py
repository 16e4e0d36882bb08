"""Made-up worlds for planners: sites of a few equal GPUs each, fast inside, joined by links like those of homes and offices."""

from __future__ import annotations

import numpy as np

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.testbed import builtin_devices

SITE_SIZE = 8
"""Peers of a site on average; sizes are geometric."""
MEDIAN_MBIT, SPREAD, LEAST_MBIT, MOST_MBIT = 60.0, 1.0, 8.0, 1000.0
"""Rates between sites are lognormal, the same both ways."""


def random_network(num_peers: int, seed: int = 0) -> Network:
    """So many peers of the kinds of devices that are known, in sites."""
    random = np.random.default_rng(seed)
    sizes: list[int] = []
    while sum(sizes) < num_peers:
        sizes.append(min(int(random.geometric(1 / SITE_SIZE)), num_peers - sum(sizes)))
    sites = np.repeat(np.arange(len(sizes)), sizes)
    known = builtin_devices()
    names = [sorted(known)[int(random.integers(len(known)))] for _ in sizes]
    mbit, latency_ms = _between_sites(random, len(sizes))
    np.fill_diagonal(mbit, random.choice([1000.0, 10000.0], len(sizes)))
    np.fill_diagonal(latency_ms, 0.2)
    beta, alpha = 8e-6 / mbit[np.ix_(sites, sites)], latency_ms[np.ix_(sites, sites)] / 1e3
    np.fill_diagonal(beta, 0.0)
    np.fill_diagonal(alpha, 0.0)
    return Network(
        peers=tuple(PeerId(f"s{site}/{index}/{names[site]}") for index, site in enumerate(sites.tolist())),
        flops_per_s=np.repeat(np.array([[known[names[site]].flops_per_s] for site in sites.tolist()]), 3, axis=1),
        memory_bytes_per_s=np.full(num_peers, np.inf),
        free_bytes=np.array([known[names[site]].memory_bytes for site in sites.tolist()]),
        sites=sites.astype(np.int64),
        alpha_s=alpha,
        beta_s=beta,
        uplink_s=np.zeros(len(sizes)),
        downlink_s=np.zeros(len(sizes)),
    )


def _between_sites(random: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(sites, sites) Mbit/s and one-way milliseconds."""
    rates = np.clip(random.lognormal(np.log(MEDIAN_MBIT), SPREAD, (count, count)), LEAST_MBIT, MOST_MBIT)
    latencies = random.uniform(10, 100, (count, count))
    lower = np.tril_indices(count)
    for matrix in (rates, latencies):
        matrix.T[lower] = matrix[lower]
    return rates, latencies
