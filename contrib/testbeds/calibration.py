"""How fast emulated peers really compute a model, against what their rates promise: a factor for what they announce.

The workload estimator knows the rates of large kernels. A model that is small enough for many peers on one machine spends its
time in small ones, which wait for the interpreter and find caches cold. So the busy seconds that the peers of one run report
are compared with the estimate: one factor, for all kinds of operators, all peers and all plans.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from contrib.testbeds.predictions import simulated
from fusion_p2p.plan.network import Network


def rates_times(run: Path, network: Network, warm_up: int) -> float:
    """What the rates of `network` have to be multiplied with, so that its peers are as busy as those of the run were.

    warm_up: steps at the beginning that do not count.
    """
    estimated_s = sum(seconds for members in simulated(run, network).busy_s for seconds in members)
    return estimated_s / busy_s(run, warm_up)


def busy_s(run: Path, warm_up: int) -> float:
    """Seconds that all peers of a run together computed in a step, the median over its steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [sum(float(peer["busy_share"]) for peer in line["peers"]) * float(line["step_s"]) for line in lines[warm_up:]]
    return statistics.median(steps)
