"""`make bench-emulated ONLY=overlap`: two slices whose values are on their way for as long as they are computed.

Real processes on a shaped link, whose tasks take as long in every run as they did in one before. The same run with sending and
computing in turn is what overlap is compared with, and what the simulator says about the plan at the seconds that its slices
really computed is the ideal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from contrib.testbeds.emulation import emulated_swarm
from contrib.testbeds.equal_links import FirstRun, busy_of_slices, equal_links, first_run, median_step_s
from contrib.testbeds.predictions import read_plan
from contrib.testbeds.task_times import settle
from fusion_p2p.graph.encoding import decode_graph
from fusion_p2p.graph.slices import cut
from fusion_p2p.graph.workload import workload
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_plan
from fusion_p2p.plan.simulate import simulate

PEERS = 2
MICRO_BATCHES, SEQUENCES = 32, 2
BASE = 20.0
"""Times that peers are slower than this machine, so that they do not compete for its processors."""
LATENCY_S = 0.005
TASKS = "tasks"
MODEL = {
    "model": "gpt2", "layers": "2", "width": "128", "heads": "4", "context": "64", "dropout": "0", "option": "tied=false",
    "data": "stdlib-text", "optimiser": "sgd", "learning_rate": "0.01", "validate_every": "0", "checkpoint_every": "1000",
    "peers": str(PEERS), "scheduler": "equal-compute", "pipeline": "1f1b", "micro_batches": str(MICRO_BATCHES),
    "batch_size": str(MICRO_BATCHES * SEQUENCES),
}  # fmt: skip


def measure(steps: int = 9) -> dict[str, float]:
    """Run with and without overlap."""
    arguments = [word for name, value in (MODEL | {"steps": str(steps)}).items() for word in _flag(name, value)]
    with tempfile.TemporaryDirectory(prefix="fusion-overlap-") as name:
        first = _balanced(Path(name), arguments)
        bed = equal_links(Path(name), PEERS, LATENCY_S, first.num_bytes / first.compute_s)
        pace = float(bed.beta_s[0, 1])
        print(
            f"a micro-batch: {first.compute_s / MICRO_BATCHES * 1e3:.0f} ms of computing by the slower slice, as long on a "
            f"link of {8e-6 / pace:.1f} Mbit/s for {first.num_bytes / MICRO_BATCHES / 1e3:.0f} kB each way",
            flush=True,
        )
        kept = ("--task-times", str(Path(name, TASKS)))
        overlapped, peers = _run(Path(name), "overlapped", bed, first, arguments, kept)
        in_turn, _ = _run(Path(name), "in-turn", bed, first, arguments, (*kept, "--in-turn", repr(pace)))
        return _figures(overlapped, in_turn, ideal_s(overlapped, replace(bed, peers=peers)))


def _balanced(folder: Path, arguments: Sequence[str]) -> FirstRun:
    """What is computed and sent, on links as long busy as peers are; how long tasks take is settled, in `folder` / TASKS.

    A peer that waits for its link between two tasks may find its caches cold, and then computes longer than on fast links.
    """
    (folder / TASKS).mkdir()
    fast = first_run(folder, PEERS, LATENCY_S, BASE, arguments)
    noted = ("--task-times", str(folder / TASKS))
    alike = first_run(folder, PEERS, LATENCY_S, BASE, arguments, fast.num_bytes / fast.compute_s, noted)
    times_s = settle(folder / TASKS)
    micro_batch_s = BASE * max(times_s[f"{index} F"] + times_s[f"{index} B"] for index in range(PEERS))
    return replace(alike, compute_s=MICRO_BATCHES * micro_batch_s)


def ideal_s(run: Path, network: Network) -> float:
    """A step by the simulator when each slice, on a peer of its own, computes for as long as it did in the run."""
    plan, graph = read_plan(run), decode_graph((run / "graph.fusion").read_bytes())
    pipeline = pipeline_of_plan(graph, cut(graph, plan.slice_of), workload(graph), plan, network)
    stages = []
    for stage, busy_s, (estimated_s,) in zip(pipeline.stages, busy_of_slices(run), simulate(pipeline).busy_s, strict=True):
        times = busy_s / (estimated_s + stage.update_s)
        forward_s, backward_s = (tuple(times * seconds for seconds in each) for each in (stage.forward_s, stage.backward_s))
        stages.append(replace(stage, forward_s=forward_s, backward_s=backward_s, update_s=times * stage.update_s))
    return simulate(replace(pipeline, stages=tuple(stages))).step_s


def _run(
    folder: Path, name: str, bed: Network, first: FirstRun, arguments: Sequence[str], options: Sequence[str] = ()
) -> tuple[Path, tuple[PeerId, ...]]:
    """A run by a swarm of its own, and who its peers were."""
    with emulated_swarm(folder, bed, BASE, first.rates_times, options) as swarm:
        return swarm.train(name, arguments), swarm.ids


def _figures(overlapped: Path, in_turn: Path, ideal: float) -> dict[str, float]:
    overlapped_s, in_turn_s = median_step_s(overlapped), median_step_s(in_turn)
    plan = read_plan(overlapped)
    busy = ", ".join(f"{seconds:.2f}" for seconds in busy_of_slices(overlapped))
    print(
        f"seconds a step: {overlapped_s:.2f} overlapped, {in_turn_s:.2f} when peers compute and send in turn, {ideal:.2f} "
        f"ideal (simulated), {plan.predicted_step_s:.2f} promised; slices computed {busy} s, "
        f"in flight {', '.join(str(part.in_flight) for part in plan.slices)}",
        flush=True,
    )
    return {
        "overlap_step_s": overlapped_s,
        "overlap_over_ideal": overlapped_s / ideal,
        "overlap_over_serial": overlapped_s / in_turn_s,
    }


def _flag(name: str, value: str) -> tuple[str, str]:
    return "--" + name.replace("_", "-"), value
