"""How long every kind of process takes to be gone, with its daemon and its relay, after Ctrl+C, SIGTERM and SIGKILL.

One swarm per signal, and in it one process after the other: a peer at work (whose run goes on with a spare), an owner, an idle
peer, the bootstrap node. Then `fusion-peer --help`.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from contrib.benchmarks.swarm import Swarm, running_swarm
from contrib.chaos.watching import LedgerWatch
from contrib.processes import Program, ProgramFailed, processes_of

LIMIT_S = 30.0
"""How long a process that does not leave is waited for."""
GOES_ON_S = 60.0
HELP_RUNS = 5
MODEL = (
    "--model", "gpt2", "--layers", "2", "--width", "64", "--heads", "2", "--context", "64", "--steps", "100000", "--peers", "2",
    "--validate-every", "0", "--batch-size", "8", "--micro-batches", "4",
)  # fmt: skip


def measure() -> dict[str, float]:
    """`exit_seconds_max` and what it is the largest of; prints a table."""
    table = Table(title="seconds until a process and all its children are gone", title_justify="left")
    for heading in ("signal", "peer at work", "owner", "idle peer", "bootstrap", "next step of its run"):
        table.add_column(heading, justify="left" if heading == "signal" else "right")
    slowest = longest = 0.0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with tempfile.TemporaryDirectory(prefix="fusion-exits-") as folder, running_swarm(Path(folder), 3) as swarm:
            exits, run_s = _one_signal(swarm, number)
        table.add_row(number.name, *(f"{seconds:.2f}" for seconds in exits), f"{run_s:.2f}")
        slowest, longest = max(slowest, *exits), max(longest, run_s)
    Console(width=100, highlight=False).print(table)
    return {"exit_seconds_max": slowest, "next_step_seconds_max": longest}


def measure_help() -> dict[str, float]:
    """Wall time of `fusion-peer --help`, the median of some runs."""
    times = []
    for _ in range(HELP_RUNS):
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "fusion_p2p.cli.main", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=30
        )
        times.append(time.perf_counter() - begin)
    return {"help_seconds": statistics.median(times)}


def _one_signal(swarm: Swarm, number: signal.Signals) -> tuple[list[float], float]:
    """(peer at work, owner, idle peer, bootstrap), and how long after the signal the run did its next step without its peer."""
    run = swarm.folder / "first"
    with LedgerWatch(run) as watch, swarm.start_owner("first", *MODEL) as owner:
        _working(owner)
        worker = _worker(swarm, run)
        epoch = max(one.entry["epoch"] for one in watch.noted if one.kind == "start")
        begin = time.monotonic()
        at_work = seconds_to_leave(worker, number)
        step = watch.wait_for(lambda one: one.kind == "commit" and one.entry["epoch"] > epoch, GOES_ON_S)
        if step is None:
            raise ProgramFailed(f"a run that lost a peer did no step within {GOES_ON_S:g} s:\n{owner.tail()}")
        run_s = step.at_s - begin
    with swarm.start_owner("second", *MODEL) as owner:
        _working(owner)
        of_owner = seconds_to_leave(owner, number)
    idle = next(peer for peer in swarm.peers if peer.process.poll() is None)
    return [at_work, of_owner, seconds_to_leave(idle, number), seconds_to_leave(swarm.bootstrap, number)], run_s


def _working(owner: Program) -> None:
    owner.wait_for(r"step\s+\d+", 120.0)


def _worker(swarm: Swarm, run: Path) -> Program:
    """The process of the peer that holds the first slice: every peer prints its id when its daemon is up."""
    holder = json.loads((run / "plan.json").read_text())["slices"][0]["peer"]
    return next(peer for peer in swarm.peers if any(holder in line for line in peer.lines if "local daemon up" in line))


def seconds_to_leave(program: Program, number: signal.Signals) -> float:
    """Send the signal and wait until the process and all its children are gone. ProgramFailed after LIMIT_S."""
    family = [psutil.Process(program.session), *psutil.Process(program.session).children(recursive=True)]
    family += [psutil.Process(pid) for pid in processes_of([program.session])]
    begin = time.monotonic()
    program.process.send_signal(number)
    program.wait(LIMIT_S)
    _, alive = psutil.wait_procs(family, timeout=max(0.0, LIMIT_S - (time.monotonic() - begin)))
    seconds = time.monotonic() - begin
    if alive:
        raise ProgramFailed(f"{program.name} left {[process.name() for process in alive]} behind after {number.name}")
    return seconds
