"""How long a newcomer takes: from the start of `fusion-peer join` to standby, and to a slice of a run that gains by it."""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from contrib.benchmarks.swarm import running_swarm
from contrib.chaos.places import Loopback
from contrib.chaos.population import populated
from contrib.processes import Program, start_peer

JOINS = 7
LIMIT_S = 60.0
GAIN_LIMIT_S = 120.0
SLOWER = 12.0
"""Times that the peers of a run take, which then gains by one that does not."""
MODEL = (
    "--model", "gpt2", "--layers", "6", "--width", "128", "--heads", "4", "--context", "64", "--dropout", "0", "--no-tied",
    "--batch-size", "16", "--micro-batches", "4", "--steps", "1000000", "--validate-every", "0", "--checkpoint-every", "1000",
)  # fmt: skip


def measure() -> dict[str, float]:
    """Seconds to standby, the median and the longest of several, on an otherwise idle machine; then seconds to a slice."""
    with tempfile.TemporaryDirectory(prefix="fusion-joining-") as name:
        folder = Path(name)
        seconds = _to_standby(folder / "idle")
        gaining = _to_a_slice(folder / "gain")
    print(f"seconds to standby: {', '.join(f'{one:.2f}' for one in sorted(seconds))}; to a slice: {gaining:.1f}", flush=True)
    return {
        "join_seconds": statistics.median(seconds),
        "join_seconds_max": max(seconds),
        "seconds_to_a_slice": gaining,
    }


def _to_standby(folder: Path) -> list[float]:
    folder.mkdir()
    seconds = []
    with running_swarm(folder, 2) as swarm:
        measured = next((folder / "peer-1").glob("rates-*.json"))
        for number in range(JOINS):
            state = folder / f"newcomer-{number}"
            state.mkdir()
            shutil.copy(measured, state)
            begin = time.monotonic()
            with start_peer(state.name, folder, swarm.address) as newcomer:
                newcomer.wait_for("standby|spare", LIMIT_S)
                seconds.append(time.monotonic() - begin)
                _show_phases(newcomer, number)
    return seconds


def _show_phases(newcomer: Program, number: int) -> None:
    if number == 0:
        print(newcomer.tail(), flush=True)


def _to_a_slice(folder: Path) -> float:
    """A run on two slow peers; a fast one joins: seconds from its start until it trains."""
    run = folder / "run"
    with populated(Loopback(), folder, 2, slower=SLOWER) as population, population.start_owner(run, MODEL) as owner:
        owner.wait_for(r"^step \d+", GAIN_LIMIT_S)
        begin = time.monotonic()
        newcomer = population.add(slower=1.0)
        newcomer.program.wait_for("training: slice", GAIN_LIMIT_S)
        return time.monotonic() - begin
