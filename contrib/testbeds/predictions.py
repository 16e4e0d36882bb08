"""What the simulator says about a run that a plan was made for, when it is told how the emulator was really set up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.plan import Plan
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.timeline import Timeline


def read_plan(run: Path) -> Plan:
    """The newest plan of a run folder."""
    plan: Plan = TypeAdapter(Plan).validate_json((run / "plan.json").read_bytes())
    return plan


def as_set_up(bed: Network, peers: Sequence[PeerId], slower: Sequence[float], rates: Path, rates_times: float) -> Network:
    """The testbed's own links, with peers that compute so many times slower than the rates kept in the folder `rates`."""
    kept = json.loads(next(rates.glob("rates-*.json")).read_text())["rates"]
    times = rates_times / np.array(slower)
    per_s = np.array([kept["matmul_flops"], kept["convolution_flops"], kept["attention_flops"]])
    return replace(
        bed,
        peers=tuple(peers),
        flops_per_s=times[:, None] * per_s[None, :],
        memory_bytes_per_s=times * kept["memory_bytes_per_s"],
    )


def simulated(run: Path, network: Network) -> Timeline:
    """A step of the run's plan on this network."""
    plan, graph = read_plan(run), decode_graph((run / "graph.fusion").read_bytes())
    return simulate(pipeline_of_plan(graph, cut(graph, plan.slice_of), workload(graph), plan, network))
