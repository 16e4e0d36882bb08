"""What distribution costs: two one-thread peers against two independent one-thread reference loops running at the same time.

Both sides keep two cores busy with the same model, batch and arithmetic; the peers also cut, send, wait and agree. With two
equal slices and M micro-batches the pipeline's bubble alone allows M / (M + 1) of the reference's rate. Pairs are interleaved,
because machines are noisy; the first step of every run is dropped.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from contrib.benchmarks.swarm import Swarm, running_swarm
from contrib.processes import Program, ProgramFailed

PAIRS = 5
STEPS = {8: 5, 32: 3}
"""Steps of a run by micro-batches; one example each."""
MODEL = (
    "--model", "gpt2", "--layers", "6", "--width", "384", "--heads", "6", "--context", "256", "--dropout", "0",
    "--data", "stdlib-text",
    "--optimiser", "sgd", "--learning-rate", "0.01", "--validate-every", "0", "--checkpoint-every", "1000", "--peers", "2",
)  # fmt: skip


def measure() -> dict[str, float]:
    """`efficiency_M` for 8 and 32 micro-batches; prints every pair."""
    table = Table(title="tokens/s of 2 peers against 2 independent loops", title_justify="left")
    for heading in ("micro-batches", "pair", "2 peers", "2 loops", "ratio"):
        table.add_column(heading, justify="right")
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="fusion-efficiency-") as folder, running_swarm(Path(folder), 2) as swarm:
        for micro_batches in STEPS:
            ratios = []
            for pair in range(1, PAIRS + 1):
                peers = _peers(swarm, micro_batches, pair)
                loops = _loops(swarm.folder / _name(micro_batches, pair) / "config.toml", STEPS[micro_batches])
                ratios.append(peers / loops)
                table.add_row(str(micro_batches), str(pair), f"{peers:.0f}", f"{loops:.0f}", f"{ratios[-1]:.3f}")
            figures[f"efficiency_{micro_batches}"] = statistics.median(ratios)
    Console(width=100, highlight=False).print(table)
    return figures


def _name(micro_batches: int, pair: int) -> str:
    return f"efficiency-{micro_batches}-{pair}"


def _peers(swarm: Swarm, micro_batches: int, pair: int) -> float:
    """Tokens per second of a run over the two peers, from the end of its first step to the end of its last."""
    count = str(micro_batches)
    steps = STEPS[micro_batches]
    arguments = (*MODEL, "--batch-size", count, "--micro-batches", count, "--steps", str(steps))
    run = swarm.train(_name(micro_batches, pair), arguments)
    ended = [json.loads(line)["wall_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return float((steps - 1) * micro_batches * 256 / (ended[-1] - ended[0]))


def _loops(config: Path, steps: int) -> float:
    """Tokens per second of two reference loops together, measured as above, each alone on one thread."""
    command = [sys.executable, "-m", "contrib.reference", str(config), "--steps", str(steps)]
    programs = [Program(f"reference loop {number}", command) for number in (1, 2)]
    total = 0.0
    try:
        for program in programs:
            if program.wait(900.0):
                raise ProgramFailed(f"{program.name} failed:\n{program.tail()}")
            told = json.loads(program.lines[-1])
            total += (steps - 1) * told["units_per_step"] / (told["ended_s"][-1] - told["ended_s"][0])
    finally:
        for program in programs:
            program.end()
    return total
