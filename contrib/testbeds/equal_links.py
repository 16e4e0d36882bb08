"""Equal peers on equal links, whose rate is chosen by what crosses them: a first run on fast links tells seconds and bytes."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contrib.testbeds.calibration import rates_times
from contrib.testbeds.emulation import RATES, emulated_swarm, read_testbed, slowness
from contrib.testbeds.predictions import as_set_up, read_plan
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.plan.network import Network

FAST_BYTES_PER_S = 50e6
"""Of the links of a first run that is not told how fast they are."""
WARM_UP = 1
"""Steps at the beginning of a run that do not count."""


@dataclass(frozen=True, slots=True)
class FirstRun:
    """What a run told that was made to learn it.

    rates_times: as `calibration.rates_times`. compute_s: seconds a step that the slowest slice computes. num_bytes: of dense
    values that cross the busiest link in one direction in a step.
    """

    rates_times: float
    compute_s: float
    num_bytes: int


def equal_links(folder: Path, peers: int, latency_s: float, bytes_per_s: float) -> Network:
    """So many peers, each a site of its own; the owner is beside the first one."""
    names = [f"home-{number}" for number in range(peers)]
    lan = {"mbit_per_s": 1000, "latency_ms": 0.5}
    bed = {
        "name": "equal-links",
        "devices": {"slow": {"slower": 1, "memory_gb": 4}},
        "sites": [{"name": name, "gpus": [{"device": "slow", "count": 1}], "lan": lan} for name in names],
        "wan": "uniform",
        "uniform": {"mbit_per_s": bytes_per_s * 8e-6, "latency_ms": latency_s * 1e3},
        "owner": names[0],
    }
    path = folder / "equal-links.json"
    path.write_text(json.dumps(bed), encoding="utf-8")
    return read_testbed(path)


def first_run(
    folder: Path,
    peers: int,
    latency_s: float,
    base: float,
    arguments: Sequence[str],
    bytes_per_s: float = FAST_BYTES_PER_S,
    options: Sequence[str] = (),
) -> FirstRun:
    """Train on such links; peers are `base` times slower than this machine. The rates stay in `folder`.

    options: further ones of `slow_peer.py` for all peers.
    """
    bed = equal_links(folder, peers, latency_s, bytes_per_s)
    with emulated_swarm(folder, bed, base, options=options) as swarm:
        run = swarm.train(f"first-{bytes_per_s:.0f}", arguments)
        network = as_set_up(bed, swarm.ids, slowness(bed, base), folder / RATES, 1.0)
    return FirstRun(rates_times(run, network, WARM_UP), max(busy_of_slices(run)), busiest_bytes(run))


def busy_of_slices(run: Path) -> list[float]:
    """Seconds a step that each slice computed, each on a peer of its own: the medians over the steps of a run."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    by_slice = [
        {peer["slices"][0]: peer["busy_share"] * line["step_s"] for peer in line["peers"] if peer["slices"]} for line in lines
    ]
    return [statistics.median(step[index] for step in by_slice) for index in range(len(read_plan(run).slices))]


def busiest_bytes(run: Path) -> int:
    """Dense bytes a step from one slice to another, of the pair that has the most."""
    plan, graph = read_plan(run), decode_graph((run / "graph.fusion").read_bytes())
    crossing: Counter[tuple[int, int]] = Counter()
    for edge in plan.edges:
        crossing[edge.source, edge.target] += graph.types[edge.value].num_bytes * plan.micro_batches
    return max(crossing.values())


def median_step_s(run: Path) -> float:
    """Of a run after its first steps."""
    steps = [json.loads(line)["step_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(steps[WARM_UP:]))
