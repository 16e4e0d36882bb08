"""Small random chains and networks for tests of planners."""

from __future__ import annotations

import numpy as np

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.network import Network


def random_chain(seed: int, num_blocks: int, *, feed_bytes: float = 0.0) -> Chain:
    """Blocks of uneven FLOPs and cuts of uneven bytes, each block one operator of 1 GFLOP or so."""
    random = np.random.default_rng(seed)
    forward = random.uniform(0.3, 2.0, num_blocks) * 1e9
    crossing = random.uniform(0.2, 2.0, num_blocks + 1) * 1e6
    crossing[[0, -1]] = 0.0
    feeds = np.concatenate([np.zeros(1), np.full(num_blocks, feed_bytes)])
    return Chain(
        name="random",
        kinds=np.zeros(num_blocks, dtype=np.int64),
        forward_flops=forward,
        backward_flops=2 * forward,
        bytes_moved=np.zeros(num_blocks),
        positions=np.arange(num_blocks + 1),
        crossing=crossing,
        crossing_back=crossing.copy(),
        parameter_bytes=_sums(random.uniform(0.5, 1.5, num_blocks) * 1e7),
        buffer_bytes=np.zeros(num_blocks + 1),
        saved_bytes=_sums(random.uniform(0.5, 1.5, num_blocks) * 1e7),
        feed_bytes=feeds if feed_bytes else np.zeros(0),
    )


def random_network(seed: int, num_peers: int, *, num_sites: int = 0, has_owner: bool = False) -> Network:
    """Peers of 1 to 8 TFLOP/s and 0.2 to 1 GB on links of 8 to 1000 Mbit/s; no two in one site unless `num_sites` is given."""
    random = np.random.default_rng(seed)
    nodes = num_peers + has_owner
    sites = np.sort(random.integers(0, num_sites, nodes)) if num_sites else np.arange(nodes)
    same = sites[:, None] == sites[None, :]
    rate = np.where(same, 1e10, np.clip(random.lognormal(np.log(6e7), 1.0, (nodes, nodes)), 8e6, 1e9))
    latency = np.where(same, 1e-4, random.uniform(0.01, 0.08, (nodes, nodes)))
    np.fill_diagonal(latency, 0.0)
    beta = 8.0 / rate
    np.fill_diagonal(beta, 0.0)
    flops = random.choice([1e12, 2e12, 4e12, 8e12], num_peers)
    return Network(
        peers=tuple(PeerId(f"peer-{index}") for index in range(num_peers)),
        flops_per_s=np.repeat(flops[:, None], 3, axis=1),
        memory_bytes_per_s=np.full(num_peers, np.inf),
        free_bytes=random.uniform(0.2, 1.0, num_peers) * 1e9,
        sites=sites,
        alpha_s=latency,
        beta_s=beta,
        uplink_s=np.zeros(int(sites.max()) + 1),
        downlink_s=np.zeros(int(sites.max()) + 1),
        has_owner=has_owner,
    )


def _sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1), np.cumsum(values)])
