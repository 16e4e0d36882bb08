"""Pipelines by hand and at random, for tests of the simulator and of the schedules."""

from __future__ import annotations

import random

import numpy as np

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import OWNER_STAGE, Pipeline, PipelineEdge, PipelineStage
from fusion_p2p.plan.plan import Schedule

NO_LIMIT = 10**9


def uniform_network(
    num_peers: int, *, beta_s: float = 1.0, alpha_s: float = 0.0, has_owner: bool = False, full_duplex: bool = True
) -> Network:
    """Every peer its own site, all links equal."""
    nodes = num_peers + has_owner
    apart = 1.0 - np.eye(nodes)
    return Network(
        peers=tuple(PeerId(f"peer-{index}") for index in range(num_peers)),
        flops_per_s=np.ones((num_peers, 3)),
        memory_bytes_per_s=np.full(num_peers, np.inf),
        free_bytes=np.full(num_peers, np.inf),
        sites=np.arange(nodes),
        alpha_s=alpha_s * apart,
        beta_s=beta_s * apart,
        uplink_s=np.zeros(nodes),
        downlink_s=np.zeros(nodes),
        has_owner=has_owner,
        full_duplex=full_duplex,
    )


def chain_pipeline(
    num_stages: int,
    micro_batches: int,
    *,
    wire_s: float = 0.0,
    alpha_s: float = 0.0,
    schedule: Schedule = "1f1b",
    in_flight: int = NO_LIMIT,
    full_duplex: bool = True,
) -> Pipeline:
    """Equal stages in a row: forward 1 s, backward 2 s, `wire_s` seconds on each link in each direction."""
    stage = PipelineStage((0,), (1.0,), (2.0,), in_flight, (0,) * micro_batches)
    return Pipeline(
        uniform_network(num_stages, alpha_s=alpha_s, full_duplex=full_duplex),
        tuple(PipelineStage((index,), (1.0,), (2.0,), stage.in_flight, stage.deal) for index in range(num_stages)),
        tuple(PipelineEdge(index, index + 1, wire_s, wire_s) for index in range(num_stages - 1)),
        micro_batches,
        schedule,
    )


def random_pipeline(seed: int) -> Pipeline:
    """A DAG of 1 to 6 stages of 1 to 3 members on few or many nodes, skips, feeds, credits, any schedule and network."""
    rng = random.Random(seed)
    count, micro_batches = rng.randint(1, 6), rng.randint(1, 8)
    nodes = rng.randint(3, 8)
    stages = tuple(_random_stage(rng, micro_batches, rng.sample(range(nodes), rng.randint(1, 3))) for _ in range(count))
    edges = [_random_edge(rng, OWNER_STAGE, target) for target in range(count) if rng.random() < 0.4]
    for source in range(count - 1):
        targets = rng.sample(range(source + 1, count), rng.randint(1, min(2, count - 1 - source)))
        edges += [_random_edge(rng, source, target) for target in targets]
    return Pipeline(_random_network(rng, nodes), stages, tuple(edges), micro_batches, rng.choice(["gpipe", "1f1b"]))


def _random_stage(rng: random.Random, micro_batches: int, nodes: list[int]) -> PipelineStage:
    return PipelineStage(
        nodes=tuple(nodes),
        forward_s=tuple(rng.uniform(0.1, 2.0) for _ in nodes),
        backward_s=tuple(rng.uniform(0.1, 4.0) for _ in nodes),
        in_flight=rng.randint(1, 5),
        deal=tuple(rng.randrange(len(nodes)) for _ in range(micro_batches)),
        finish_s=rng.uniform(0.0, 0.5),
        start_s=rng.uniform(0.0, 0.5),
    )


def _random_edge(rng: random.Random, source: int, target: int) -> PipelineEdge:
    return PipelineEdge(
        source,
        target,
        rng.uniform(0.1, 3.0),
        rng.uniform(0.1, 3.0),
        gradient=rng.random() < 0.7,
        credits=rng.randint(0, 3),
        forward_coding=(rng.choice([0.0, 1.0]), rng.choice([0.0, 1.0])) if source != OWNER_STAGE else (0.0, 0.0),
    )


def _random_network(rng: random.Random, num_peers: int) -> Network:
    random_numbers = np.random.default_rng(rng.randrange(2**32))
    nodes = num_peers + 1
    apart = 1.0 - np.eye(nodes)
    sites = random_numbers.integers(0, 3, nodes)
    limited = random_numbers.random((2, 3)) < 0.5
    return Network(
        peers=tuple(PeerId(f"peer-{index}") for index in range(num_peers)),
        flops_per_s=np.ones((num_peers, 3)),
        memory_bytes_per_s=np.full(num_peers, 2.0),
        free_bytes=np.full(num_peers, np.inf),
        sites=sites,
        alpha_s=random_numbers.uniform(0.0, 1.0, (nodes, nodes)) * apart,
        beta_s=random_numbers.uniform(0.05, 1.0, (nodes, nodes)) * apart,
        uplink_s=np.where(limited[0], 0.7, 0.0),
        downlink_s=np.where(limited[1], 0.7, 0.0),
        has_owner=True,
        full_duplex=rng.random() < 0.5,
    )
