"""24 real peers on this machine: whether all see each other, what each costs while nothing happens, and then a job.

python -m contrib.benchmarks.crowd [--peers 24] [--flat-minutes 10]     a part of it, to try something; writes no figures
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from contrib.benchmarks.report import print_figures
from contrib.chaos.places import Loopback
from contrib.chaos.population import Population, populated
from contrib.processes import Program, ProgramFailed, processes_of

PEERS = 24
START_S = 90.0
SEE_ALL_S = 60.0
SETTLE_S = 120.0
"""Links are measured first, twice, and the pauses between look-ups grow to their longest."""
MINUTES = 10.0
JOB_PEERS = 12
JOB = (
    "--model", "gpt2", "--layers", "12", "--width", "64", "--heads", "4", "--context", "64", "--batch-size", "8",
    "--micro-batches", "4", "--steps", "10", "--validate-every", "0", "--scheduler", "equal-compute",
)  # fmt: skip
JOB_S = 300.0


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one peer and its daemon, so far."""

    processor_s: float
    pss_bytes: int


def measure(minutes: float = MINUTES, peers: int = PEERS) -> dict[str, float]:
    """Start them one after the other, look at them, wait, and give them a job; prints a table."""
    with tempfile.TemporaryDirectory(prefix="fusion-crowd-") as name:
        folder = Path(name)
        with populated(Loopback(), folder / "peers", 1, with_pages=True) as population:
            for _ in range(peers - 1):
                population.add().program.wait_for("local daemon up", START_S)
            figures = {"crowd_peers": float(peers), "crowd_seconds_to_see_all": seconds_to_see_all(population)}
            print(f"all see all {figures['crowd_seconds_to_see_all']:.1f} s after the last start", flush=True)
            figures |= idle(population, minutes)
            num_workers = min(JOB_PEERS, peers)
            with population.start_owner(folder / "run", (*JOB, "--peers", str(num_workers))) as owner:
                if owner.wait(JOB_S):
                    raise ProgramFailed(f"the job on {num_workers} of {peers} peers failed:\n{owner.tail()}")
    return figures | {"crowd_job_steps": 10.0}


def seconds_to_see_all(population: Population) -> float:
    """From now until every peer sees all the others and exactly one says that it coordinates."""
    begin, residents = time.monotonic(), population.living
    while True:
        pages = [page(one.port) for one in residents]
        members, coordinating = ([view.get(name, 0.0) for view in pages] for name in ("members", "coordinating"))
        if min(members) >= len(residents) and sum(coordinating) == 1:
            return time.monotonic() - begin
        if time.monotonic() > begin + 2 * SEE_ALL_S:
            raise ProgramFailed(f"after {2 * SEE_ALL_S:g} s they see {sorted(members)} members, {coordinating} coordinate")
        time.sleep(0.5)


def page(port: int) -> dict[str, float]:
    """The numbers that a peer shows of itself; none as long as it does not answer."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5.0) as answer:
            text = answer.read().decode()
    except OSError:
        return {}
    return {name: float(value) for name, value in re.findall(r"^fusion_peer_(\w+) (\S+)$", text, re.MULTILINE)}


def idle(population: Population, minutes: float) -> dict[str, float]:
    """What every peer costs while nothing happens: shares of a processor, and memory at the end."""
    time.sleep(SETTLE_S)
    before, begin = [costs(one.program) for one in population.living], time.monotonic()
    time.sleep(60.0 * minutes)
    after, seconds = [costs(one.program) for one in population.living], time.monotonic() - begin
    shares = [(late.processor_s - early.processor_s) / seconds for early, late in zip(before, after, strict=True)]
    growth = [(late.pss_bytes - early.pss_bytes) / 1e6 for early, late in zip(before, after, strict=True)]
    coordinators = [one.is_coordinator for one in population.living]
    others = [share for share, coordinates in zip(shares, coordinators, strict=True) if not coordinates]
    coordinator = [share for share, coordinates in zip(shares, coordinators, strict=True) if coordinates]
    show(shares, [one.pss_bytes / 1e6 for one in after], growth)
    return {
        "idle_share_median": statistics.median(others),
        "idle_share_max": max(others),
        "coordinator_share": max(coordinator),
        "pss_mb_max": max(one.pss_bytes for one in after) / 1e6,
        "pss_growth_mb_median": statistics.median(growth),
        "idle_minutes": minutes,
    }


def costs(program: Program) -> Costs:
    """What a peer and its daemon have cost so far."""
    processor_s, pss_bytes = 0.0, 0
    for process in map(psutil.Process, processes_of([program.session])):
        times = process.cpu_times()
        processor_s += times.user + times.system
        pss_bytes += process.memory_full_info().pss
    return Costs(processor_s, pss_bytes)


def show(shares: Sequence[float], pss_mb: Sequence[float], growth_mb: Sequence[float]) -> None:
    table = Table(title="what an idle peer costs", title_justify="left")
    for heading in ("figure", "least", "median", "most"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for what, found in (("share of a processor, %", [100 * one for one in shares]), ("MB", pss_mb), ("MB more", growth_mb)):
        table.add_row(what, *(f"{figure:.2f}" for figure in (min(found), statistics.median(found), max(found))))
    Console(width=100, highlight=False).print(table)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(prog="python -m contrib.benchmarks.crowd")
    parser.add_argument("--peers", type=int, default=PEERS)
    parser.add_argument("--flat-minutes", type=float, default=MINUTES)
    arguments = parser.parse_args()
    print_figures("crowd", measure(arguments.flat_minutes, arguments.peers))


if __name__ == "__main__":
    main()
