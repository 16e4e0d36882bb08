"""A `fusion-peer` that computes several times slower by waiting, so that many peers fit on a few cores.

    python -m contrib.testbeds.slow_peer --slower 8 --rates FOLDER --rates-times 1.2 join --bootstrap ...

A task that needs t seconds of a processor ends after 8 t: the thread that computes sleeps for the rest. Processor time, not
wall time, because it does not grow when the peers get in each other's way. The peer announces 1.2 / 8 of the rates it
measured, in processor time too; a peer that finds figures in FOLDER takes those, for all peers here are one machine.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from contrib.testbeds.task_times import TaskTimes


def _as_measured(used_s: float, *_: Any) -> float:
    return used_s


def slow_down(
    slower: float, rates_folder: Path, rates_times: float = 1.0, until: Path | None = None, times_folder: Path | None = None
) -> None:
    """Slow this process's tasks and rates from now on. To be called before anything of `fusion_p2p.peer` is imported.

    until: tasks that end when this file exists are not slowed. times_folder: as `task_times.TaskTimes`.
    """
    from fusion_p2p.device import rates as device_rates
    from fusion_p2p.peer import tasks

    tasks.SliceTasks.perform = slowed(  # type: ignore[method-assign]
        tasks.SliceTasks.perform, slower, until, TaskTimes(times_folder) if times_folder is not None else _as_measured
    )
    measure_in_processor_time()
    device_rates.rates = _scaled(device_rates.rates, rates_times / slower, rates_folder)


def measure_in_processor_time() -> None:
    """Rates measured from now on do not depend on what else this machine does."""
    from fusion_p2p.device import rates as device_rates

    device_rates.time = SimpleNamespace(perf_counter=time.thread_time)  # type: ignore[assignment, attr-defined]


def slowed(
    perform: Callable[..., Any],
    slower: float,
    until: Path | None = None,
    times: Callable[..., float] = _as_measured,
) -> Callable[..., Any]:
    """`perform`, which gives an `Outcome`, so many times slower; what it says about its busy seconds is true of it.

    times: what a task is taken to need, given the processor seconds that it used and its arguments.
    """

    @functools.wraps(perform)
    def call(*arguments: Any) -> Any:
        begun, used = time.perf_counter(), time.thread_time()
        outcome = perform(*arguments)
        used = times(time.thread_time() - used, *arguments)
        if until is None or not until.exists():
            time.sleep(max(0.0, begun + slower * used - time.perf_counter()))
        return replace(outcome, busy_s=time.perf_counter() - begun)

    return call


def _scaled(measure: Callable[..., Any], times: float, folder: Path) -> Callable[..., Any]:
    @functools.wraps(measure)
    def call(device: Any, directory: Path, **options: Any) -> Any:
        measured = measure(device, folder, **options)
        return replace(measured, **{field.name: getattr(measured, field.name) * times for field in fields(measured)})

    return call


def main() -> None:
    """Slow down, then be `fusion-peer` with the rest of the command line."""
    parser = argparse.ArgumentParser(prog="python -m contrib.testbeds.slow_peer", allow_abbrev=False)
    parser.add_argument("--slower", type=float, required=True, help="times that every task takes")
    parser.add_argument("--rates", type=Path, required=True, help="folder of the figures measured once for all peers")
    parser.add_argument("--rates-times", type=float, default=1.0, help="what they are multiplied with, as calibration.py found")
    parser.add_argument("--until", type=Path, help="not any more when this file exists")
    parser.add_argument("--task-times", type=Path, help="folder where times of tasks are noted, or kept when they are settled")
    parser.add_argument("--in-turn", type=float, help="send and compute in turn, on links of so many seconds per byte")
    given, rest = parser.parse_known_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded, as `fusion-peer join` does
    slow_down(given.slower, given.rates, given.rates_times, given.until, given.task_times)
    if given.in_turn is not None:
        from contrib.testbeds.in_turn import take_turns  # of the product, so after slowing down

        take_turns(given.in_turn)
    from fusion_p2p.cli.main import main as fusion_peer

    fusion_peer(rest)


if __name__ == "__main__":
    main()
