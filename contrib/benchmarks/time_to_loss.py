"""`make bench-emulated ONLY=loss`: which codec policy brings a model to a loss first, on links that dense values fill.

Three slices, each on a slowed peer at its own home, as real processes. The rate of the links is chosen so that a step's dense
float32 values take eight times as long, each way, as the slowest slice computes. Dense goes first: the lowest loss that it
reaches in its steps is the one to reach. Equal seeds: all runs begin with equal weights and see equal batches. The loss is that
of the model as it is exported, on equal validation data every second step; the seconds are those of the steps alone.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from contrib.testbeds.emulation import EmulatedSwarm, emulated_swarm
from contrib.testbeds.equal_links import busy_of_slices, equal_links, first_run, median_step_s
from contrib.testbeds.predictions import read_plan

PEERS = 3
BASE = 4.0
"""Times that peers are slower than this machine."""
LATENCY_S = 0.02
TIMES_COMPUTE = 8.0
STEPS, FIRST_STEPS = 20, 5
EVERY = 2
"""Steps from one validation to the next."""
WATCHED = 1.2
"""TopK runs are watched for so many times what `adaptive` took: one that has not reached the loss by then is slower."""
LOOK_S, START_S = 0.2, 120.0
MODEL = {
    "model": "gpt2", "layers": "3", "width": "128", "heads": "4", "context": "64", "dropout": "0", "option": "tied=false",
    "data": "stdlib-text", "optimiser": "adamw", "learning_rate": "0.002", "validate_every": str(EVERY),
    "validation_batches": "4", "checkpoint_every": "1000",
    "peers": str(PEERS), "scheduler": "equal-compute", "pipeline": "1f1b", "micro_batches": "8", "batch_size": "32",
}  # fmt: skip
Stop = Callable[[list[tuple[float, float]]], bool]


@dataclass(frozen=True, slots=True)
class Policy:
    """What `--codec` and `--ratio` say."""

    codec: str
    ratio: float | None = None

    @property
    def name(self) -> str:
        return self.codec if self.ratio is None else f"{self.codec}-{self.ratio:g}"


DENSE, BF16, ADAPTIVE = Policy("none"), Policy("bf16"), Policy("adaptive")
TOPK = tuple(Policy(codec, ratio) for codec in ("uniform", "adatopk") for ratio in (10, 30, 100))


@dataclass(frozen=True, slots=True)
class Race:
    """How one run went. curve: (seconds of steps so far, validation loss) at each validation."""

    policy: Policy
    folder: Path
    curve: list[tuple[float, float]]

    def reached_s(self, loss: float) -> float | None:
        """When it reached a loss; None when it did not."""
        return next((seconds for seconds, reached in self.curve if reached <= loss), None)

    @property
    def watched_s(self) -> float:
        return self.curve[-1][0]


def measure(steps: int = STEPS) -> dict[str, float]:
    """Dense, then all others until they reach its loss or their time is over."""
    with tempfile.TemporaryDirectory(prefix="fusion-loss-") as name:
        folder = Path(name)
        first = first_run(folder, PEERS, LATENCY_S, BASE, _arguments(DENSE, FIRST_STEPS))
        bytes_per_s = first.num_bytes / (TIMES_COMPUTE * first.compute_s)
        print(
            f"the slowest slice computes {first.compute_s:.2f} s a step; links of {bytes_per_s * 8e-6:.2f} Mbit/s and "
            f"{LATENCY_S * 1e3:.0f} ms carry its {first.num_bytes / 1e6:.2f} MB of dense values in "
            f"{first.num_bytes / bytes_per_s:.2f} s each way",
            flush=True,
        )
        bed = equal_links(folder, PEERS, LATENCY_S, bytes_per_s)
        with emulated_swarm(folder, bed, BASE, first.rates_times) as swarm:
            return _race(swarm, steps)


def _race(swarm: EmulatedSwarm, steps: int) -> dict[str, float]:
    dense = _run(swarm, DENSE, steps, lambda curve: len(curve) == steps // EVERY)
    loss = min(reached for _, reached in dense.curve)
    _print(dense, loss)
    runs = {DENSE: dense}
    for policy in (ADAPTIVE, BF16, *TOPK):
        limit_s = dense.watched_s
        if policy in TOPK:
            limit_s = min(limit_s, WATCHED * runs[ADAPTIVE].watched_s)
        runs[policy] = _run(swarm, policy, 100 * steps, _until(loss, limit_s))
        _print(runs[policy], loss)
    return figures_of(runs, loss)


def figures_of(runs: dict[Policy, Race], loss: float) -> dict[str, float]:
    """How many times longer than `adaptive` the others took; at least so many, for those that were not there when watched."""
    adaptive_s = runs[ADAPTIVE].reached_s(loss) or math.inf
    times = {policy: (run.reached_s(loss) or run.watched_s) / adaptive_s for policy, run in runs.items()}
    return {
        "time_to_loss_over_fp32": times[DENSE],
        "time_to_loss_over_bf16": times[BF16],
        "time_to_loss_over_topk": min(times[policy] for policy in TOPK),
        "topk_runs_that_reached": sum(runs[policy].reached_s(loss) is not None for policy in TOPK),
        "dense_step_over_compute": median_step_s(runs[DENSE].folder) / max(busy_of_slices(runs[DENSE].folder)),
    }


def _run(swarm: EmulatedSwarm, policy: Policy, steps: int, stop: Stop) -> Race:
    """Train until the run has ended or `stop` says so, and end it then."""
    folder, deadline = swarm.folder / policy.name, time.monotonic() + START_S
    with swarm.start_training(folder, _arguments(policy, steps)) as owner:
        while not stop(curve := curve_of(folder)):
            if owner.process.poll() is not None or (not curve and time.monotonic() > deadline):
                raise swarm.failure(owner, f"was validated {len(curve)} times")
            time.sleep(LOOK_S)
    return Race(policy, folder, curve)


def curve_of(run: Path) -> list[tuple[float, float]]:
    """Seconds that the steps of a run took together and its validation loss, at each validation so far."""
    path = run / "metrics.jsonl"
    written = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [json.loads(text) for text in written.splitlines(keepends=True) if text.endswith("\n")]
    seconds = accumulate(line["step_s"] for line in lines)
    return [
        (at_s, line["validation_loss"])
        for at_s, line in zip(seconds, lines, strict=True)
        if line["validation_loss"] is not None
    ]


def _until(loss: float, limit_s: float) -> Stop:
    return lambda curve: bool(curve) and (curve[-1][0] >= limit_s or min(reached for _, reached in curve) <= loss)


def _print(run: Race, loss: float) -> None:
    reached_s, plan = run.reached_s(loss), read_plan(run.folder)
    codecs = ", ".join(dict.fromkeys(edge.codec for edge in plan.edges))
    result = f"reached {loss:.3f} in {reached_s:.1f} s" if reached_s else f"not at {loss:.3f} after {run.watched_s:.1f} s"
    print(
        f"{run.policy.name}: {result}, {EVERY * len(run.curve)} steps of {median_step_s(run.folder):.2f} s "
        f"({plan.predicted_step_s:.2f} promised), loss {run.curve[-1][1]:.3f}, codecs {codecs}",
        flush=True,
    )


def _arguments(policy: Policy, steps: int) -> list[str]:
    """Of `fusion-peer train`."""
    settings = MODEL | {"codec": policy.codec, "steps": str(steps)}
    if policy.ratio is not None:
        settings["ratio"] = f"{policy.ratio:g}"
    return [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), value)]
