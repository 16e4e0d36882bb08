"""How fast this machine really computes one model, against what its rates promise: a factor for what emulated peers announce.

    python -m contrib.testbeds.calibration FOLDER '{"model": "gpt2", "layers": "6", ...}'        prints JSON

The workload estimator knows the rates of large kernels. A model that is small enough for many peers on one machine spends its
time in small ones, which live in caches and wait for the interpreter; so some micro-batches of the whole model are run forward
and backward and compared with the estimate. It is one factor, for all kinds of operators, all slices and all plans; both sides
are measured in processor time. FOLDER keeps the rates themselves, for the peers to find.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from contrib.processes import ENVIRONMENT, python_module
from contrib.testbeds.slow_peer import measure_in_processor_time
from fusion_p2p.config import PlanConfig, resolve
from fusion_p2p.device.rates import Rates, rates
from fusion_p2p.execute.slice import SliceExecutor
from fusion_p2p.execute.state import SliceState
from fusion_p2p.graph.schema import Graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.owner.data import DataSet, open_data
from fusion_p2p.owner.dry_run import cost_model
from fusion_p2p.plan.chain import Chain, chain_of
from fusion_p2p.plan.times import operator_seconds
from fusion_p2p.wire.job_messages import OptimiserSettings, TrainingSettings

MICRO_BATCHES = 24
WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds of one micro-batch, forward and backward, as run and as the rates say."""

    measured_s: float
    estimated_s: float

    @property
    def rates_times(self) -> float:
        """What announced rates have to be multiplied with."""
        return self.estimated_s / self.measured_s


def calibrate(folder: Path, model: Mapping[str, str]) -> Calibration:
    """Measure in a process of its own, on one thread, as peers run. `model`: settings of `fusion-peer plan` by name."""
    command = python_module("contrib.testbeds.calibration", str(folder), json.dumps(dict(model)))
    done = subprocess.run(
        command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, timeout=300, check=True
    )
    return Calibration(**json.loads(done.stdout.splitlines()[-1]))


def measure(folder: Path, model: Mapping[str, str]) -> Calibration:
    """The same in this process."""
    torch.set_num_threads(1)
    measure_in_processor_time()
    known = rates(torch.device("cpu"), folder)
    config = resolve(PlanConfig, {**model, "testbed": "."}, {})
    costed = cost_model(config)
    return Calibration(_measured_s(costed.graph, open_data(config)), _estimated_s(chain_of(costed.graph, costed.costs), known))


def _estimated_s(chain: Chain, known: Rates) -> float:
    per_s = np.array([known.matmul_flops, known.convolution_flops, known.attention_flops, known.memory_bytes_per_s])
    forward = operator_seconds(chain.kinds, chain.forward_flops, chain.bytes_moved, per_s)
    backward = operator_seconds(chain.kinds, chain.backward_flops, 2 * chain.bytes_moved, per_s)
    return float(forward.sum() + backward.sum())


def _measured_s(graph: Graph, data: DataSet) -> float:
    """The median over micro-batches of one step."""
    device, part = torch.device("cpu"), cut(graph, [0] * len(graph.nodes)).slices[0]
    settings = TrainingSettings(seed=0, optimiser=OptimiserSettings(name="sgd"))
    state = SliceState.initial(graph, part, settings, device, {})
    executor = SliceExecutor(graph, part, state, settings, device=device, micro_batches=MICRO_BATCHES, recompute=False)
    seconds = []
    for number in range(MICRO_BATCHES):
        batch = data.micro_batch(1, number)
        begun = time.thread_time()
        executor.forward(1, number, {value: batch[name] for value, name in enumerate(graph.inputs)})
        executor.backward(1, number, {})
        seconds.append(time.thread_time() - begun)
    return statistics.median(seconds[WARM_UP:])


def main() -> None:
    """Measure and print."""
    print(json.dumps(asdict(measure(Path(sys.argv[1]), json.loads(sys.argv[2])))))


if __name__ == "__main__":
    main()
