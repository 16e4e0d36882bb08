"""`make bench-emulated`: what plans promise against what real runs take, and who is faster in truth.

The testbed t7 (six peers in three sites) as real `fusion-peer` processes on shaped links, each peer slowed by waiting. Every
case is a training run of its own: a plan by the swarm's coordinator from what the peers measured of themselves and of their
links, then steps on the clock of the owner. Predictions are the plan's own, made before the first step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from contrib.benchmarks.report import print_figures, write_figures
from contrib.testbeds.calibration import rates_times
from contrib.testbeds.emulation import RATES, EmulatedSwarm, emulated_swarm, read_testbed, slowness
from contrib.testbeds.namespaces import why_not
from contrib.testbeds.predictions import as_set_up, read_plan, simulated
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.plan import Plan

TESTBED = Path(__file__).resolve().parents[1] / "testbeds" / "t7-emulated.json"
BASE = 5.0
"""Times that the fastest peer is slower than this machine: all together then keep less than 1.2 cores busy."""
SETTLE_S = 45.0
"""Peers look at their links when they join, and again half a minute later: the first look is disturbed by the others' start."""
SEQUENCES = 4
"""Examples of a micro-batch."""
STEPS = 5
WARM_UP = 2
MODEL = {
    "model": "gpt2", "layers": "6", "width": "128", "heads": "4", "context": "128", "dropout": "0", "option": "tied=false",
    "data": "stdlib-text", "optimiser": "sgd",
}  # fmt: skip
RUN = {"learning_rate": "0.01", "validate_every": "0", "checkpoint_every": "1000", "peers": "6", "steps": str(STEPS)}
EQUAL = ("equal-number", "equal-compute")


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    scheduler: str
    pipeline: str
    micro_batches: int
    codec: str = "none"

    @property
    def name(self) -> str:
        return f"{self.scheduler}-{self.pipeline}-{self.micro_batches}-{self.codec}"

    @property
    def arguments(self) -> list[str]:
        """Of `fusion-peer train`."""
        settings = {
            **MODEL, **RUN, "scheduler": self.scheduler, "pipeline": self.pipeline, "codec": self.codec,
            "micro_batches": str(self.micro_batches), "batch_size": str(SEQUENCES * self.micro_batches),
        }  # fmt: skip
        return [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]


SCHEDULERS = (*EQUAL, "op-fence", "auto")
CASES = (
    *(Case(scheduler, "1f1b", 4) for scheduler in SCHEDULERS),
    *(Case(scheduler, pipeline, 8) for scheduler in SCHEDULERS for pipeline in ("gpipe", "1f1b")),
    *(Case(scheduler, "auto", 8, "adaptive") for scheduler in (*EQUAL, "auto")),
)

CALIBRATIONS = (Case("equal-number", "gpipe", 4), Case("op-fence", "gpipe", 4))
"""One that mostly waits for links, so that its tasks find caches cold, and one that mostly computes. Neither is among the
cases: no prediction is judged by a run that it was fitted to."""


@dataclass(frozen=True, slots=True)
class Run:
    """A case as predicted and as it went, in seconds a step.

    announced_s: what the plan itself says. shaped_s: what the simulator says with links as they were set up instead of as they
    were measured. raw_s: that with rates as measured on large kernels, not calibrated. cores: processors kept busy by all
    processes of the swarm together, the emulator included.
    """

    case: Case
    plan: Plan
    announced_s: float
    shaped_s: float
    raw_s: float
    measured_s: float
    cores: float

    def error(self, predicted_s: float) -> float:
        """Of a prediction, relative to what was measured."""
        return abs(predicted_s / self.measured_s - 1)


@dataclass(frozen=True, slots=True)
class Stage:
    """Where cases run, and what is known about it from having set it up."""

    swarm: EmulatedSwarm
    calibrated: Network
    raw: Network

    def run(self, case: Case) -> Run:
        """Train, and compare."""
        used, begun = self._used_s(), time.monotonic()
        folder = self.swarm.train(case.name, case.arguments)
        cores = (self._used_s() - used) / (time.monotonic() - begun)
        plan = read_plan(folder)
        return Run(
            case,
            plan,
            announced_s=plan.predicted_step_s,
            shaped_s=simulated(folder, self.calibrated).step_s,
            raw_s=simulated(folder, self.raw).step_s,
            measured_s=_measured_step_s(folder),
            cores=cores,
        )

    def _used_s(self) -> float:
        return self.swarm.processor_seconds() + self.swarm.emulator_seconds()


def measure(cases: Sequence[Case]) -> dict[str, float]:
    """Run the cases one after the other and print each; the figures of all."""
    bed = read_testbed(TESTBED)
    with tempfile.TemporaryDirectory(prefix="fusion-emulated-") as name:
        first, folder = Path(name, "first"), Path(name, "cases")
        times = _calibrated(first, bed)
        folder.mkdir()
        shutil.copytree(first / RATES, folder / RATES)
        with emulated_swarm(folder, bed, BASE, times) as swarm:
            time.sleep(SETTLE_S)
            links = link_figures(bed, swarm.survey())
            print("; ".join(f"{name} {value:.3g}" for name, value in links.items()), flush=True)
            stage = Stage(swarm, _set_up(swarm, bed, times), _set_up(swarm, bed, 1.0))
            runs = []
            for case in cases:
                runs.append(stage.run(case))
                print(_line(runs[-1]), flush=True)
    _print_table(runs)
    return figures_of(runs) | links


def _calibrated(folder: Path, bed: Network) -> float:
    """First runs tell what the rates have to be multiplied with; then the swarm starts anew, and announces that."""
    folder.mkdir()
    with emulated_swarm(folder, bed, BASE) as swarm:
        set_up = _set_up(swarm, bed, 1.0)
        each = [rates_times(swarm.train(case.name, case.arguments), set_up, WARM_UP) for case in CALIBRATIONS]
    times = statistics.geometric_mean(each)
    longer = " and ".join(f"{1 / factor:.2f}" for factor in each)
    print(f"first runs computed {longer} times as long as rates promised: rates are announced times {times:.2f}", flush=True)
    return times


def _set_up(swarm: EmulatedSwarm, bed: Network, times: float) -> Network:
    return as_set_up(bed, swarm.ids, slowness(bed, BASE), swarm.folder / RATES, times)


def link_figures(bed: Network, told: Mapping[str, Any]) -> dict[str, float]:
    """How far the swarm's own figures of the links between sites are from what was set up: medians over directed pairs."""
    count = len(bed.peers)
    between = bed.sites[:count, None] != bed.sites[None, :count]
    rate = bed.beta_s[:count, :count][between] / np.array(told["seconds_per_byte"])[between]
    latency_s = np.array(told["latency_s"])[between] - bed.alpha_s[:count, :count][between]
    return {
        "link_rate_error_median": float(np.median(np.abs(rate - 1))),
        "link_latency_excess_ms": float(np.median(latency_s) * 1e3),
    }


def figures_of(runs: Sequence[Run]) -> dict[str, float]:
    """Errors over all runs; speed-ups of `auto` over the better equal split, each side under its better pipeline schedule."""
    errors = [run.error(run.announced_s) for run in runs]
    figures = {
        "prediction_error_median": statistics.median(errors),
        "prediction_error_max": max(errors),
        "prediction_error_median_uncalibrated": statistics.median(run.error(run.raw_s) for run in runs),
        "prediction_error_max_uncalibrated": max(run.error(run.raw_s) for run in runs),
        "best_prediction_over_best": max(_best_promised_over_best(group) for group in _competing(runs)),
        "cores_together": max(run.cores for run in runs),
        "plans_measured": len(runs),
    }
    plain = [run for run in runs if run.case.micro_batches == 8 and run.case.codec == "none"]
    any_codec = [run for run in runs if run.case.micro_batches == 8]
    for name, among in (("measured_speedup", plain), ("measured_speedup_best_codecs", any_codec)):
        equal = [run.measured_s for run in among if run.case.scheduler in EQUAL]
        auto = [run.measured_s for run in among if run.case.scheduler == "auto"]
        if equal and auto:
            figures[name] = min(equal) / min(auto)
    return figures


def _competing(runs: Sequence[Run]) -> list[list[Run]]:
    """Plans for the same batch."""
    counts = sorted({run.case.micro_batches for run in runs})
    return [[run for run in runs if run.case.micro_batches == count] for count in counts]


def _best_promised_over_best(runs: Sequence[Run]) -> float:
    """How much slower than the fastest plan that one really is which promised the most."""
    return min(runs, key=lambda run: run.announced_s).measured_s / min(run.measured_s for run in runs)


def _measured_step_s(run: Path) -> float:
    """The median step of a run after its first ones."""
    steps = [json.loads(line)["step_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float(statistics.median(steps[WARM_UP:]))


def _line(run: Run) -> str:
    return (
        f"{run.case.name}: {run.measured_s:.2f} s/step measured, {run.announced_s:.2f} promised "
        f"({run.announced_s / run.measured_s - 1:+.0%}), {len(run.plan.slices)} slices on {len(run.plan.peers)} peers"
    )


def _print_table(runs: Sequence[Run]) -> None:
    table = Table(title="t7, really run: seconds a step", title_justify="left")
    for heading in ("scheduler", "pipeline", "micro-batches", "codec"):
        table.add_column(heading)
    for heading in ("slices", "peers", "promised", "measured", "error", "links as set up", "rates uncalibrated", "cores"):
        table.add_column(heading, justify="right")
    for run in runs:
        table.add_row(
            run.case.scheduler, run.plan.schedule, str(run.case.micro_batches), run.case.codec, str(len(run.plan.slices)),
            str(len(run.plan.peers)), f"{run.announced_s:.2f}", f"{run.measured_s:.2f}",
            f"{run.announced_s / run.measured_s - 1:+.1%}", f"{run.shaped_s:.2f}", f"{run.raw_s:.2f}", f"{run.cores:.2f}",
        )  # fmt: skip
    Console(width=130, highlight=False).print(table)


def loss() -> dict[str, float]:
    """Codec policies against each other: time to a loss."""
    from contrib.benchmarks.time_to_loss import measure

    return measure()


def overlap() -> dict[str, float]:
    """Sending beside computing, against both in turn."""
    from contrib.benchmarks.overlap import measure

    return measure()


SECTIONS: dict[str, Callable[[], dict[str, float]]] = {"plans": lambda: measure(CASES), "loss": loss, "overlap": overlap}


def main() -> int:
    """Measure everything, a section, or a few cases of plans; 0 when all that must hold does."""
    parser = argparse.ArgumentParser(prog="make bench-emulated")
    help_only = f"{', '.join(SECTIONS)}, or cases of plans whose name contains one of these; figures of cases are not kept"
    parser.add_argument("--only", nargs="+", help=help_only)
    only = parser.parse_args().only or list(SECTIONS)
    reason = why_not()
    if reason is not None:
        print(f"error: this machine cannot emulate a network: {reason}", file=sys.stderr)
        return 1
    if not set(only) <= set(SECTIONS):
        figures = measure([case for case in CASES if any(part in case.name for part in only)])
        return 0 if print_figures("make bench-emulated", figures) else 1
    figures = {}
    for section in only:
        figures |= SECTIONS[section]()
        write_figures("bench-emulated", figures)
    return 0 if print_figures("make bench-emulated", figures) else 1


if __name__ == "__main__":
    sys.exit(main())
