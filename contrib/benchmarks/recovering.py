"""What the loss of a peer costs a run: seconds from kill -9 to the first Commit, until a frozen peer is given up, and how long
the loss of a coordinator without a slice delays anything.

Three slices of 25 MB of parameters on loopback, with spares that hold copies; whoever is killed is started again as a spare.
How late steps are is told beside what it is without a fault: on a machine with few cores every copy makes one late.
"""

from __future__ import annotations

import math
import re
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from contrib.benchmarks.report import RESULTS
from contrib.chaos.aftermath import Noted, longest_wait_s, usual_step_s
from contrib.chaos.places import Loopback
from contrib.chaos.population import Population, Resident, holders, populated, read_plan
from contrib.chaos.watching import LedgerWatch
from contrib.processes import Program, ProgramFailed

SLICES = 3
SPARES = 2
KILLS = 12
FREEZES = 4
COORDINATORS = 3
ATTEMPTS = 10
"""The spare that is elected is often the one that has the copies, and takes the slice over."""
LIMIT_S = 60.0
MISSED_S = 10.0
"""Anything that a coordinator is needed for is missed within this time. It is started again only then: starting takes the
processors from those who train here."""
POLL_S = 0.05
LOGS = RESULTS / "recovery"
COPIES = re.compile(r"copies of step \d+: (\d+) of \1 slices")
TELLING = re.compile(r"copies|new plan|going back|going on|epoch=\d+ broken")
"""The newest of these lines says whether every slice has a copy: another plan makes what was said before it worthless."""
LOST = re.compile(r"epoch=\d+ broken")
CALM_STEPS = 5
"""A run that has done so many steps since the last fault is in its stride again."""
MODEL = (
    "--model", "gpt2", "--layers", "6", "--width", "512", "--heads", "8", "--context", "64", "--dropout", "0", "--no-tied",
    "--batch-size", "4", "--micro-batches", "4", "--steps", "1000000", "--validate-every", "0", "--checkpoint-every", "1000",
    "--scheduler", "equal-compute", "--peers", str(SLICES),
)  # fmt: skip
OFTEN = ("--copies", "5")
"""So that spares hold a copy soon after each loss. Not while coordinators are killed: so many copies delay steps themselves."""


def measure() -> dict[str, float]:
    """Kill, freeze, and kill the coordinator; prints a table."""
    with tempfile.TemporaryDirectory(prefix="fusion-recovery-") as name:
        with _running(Path(name, "coordinators"), MODEL) as trial:
            calm, delays = zip(*(trial.kill_coordinator() for _ in range(COORDINATORS)), strict=True)
        with _running(Path(name, "slices"), (*MODEL, *OFTEN)) as trial:
            kills = [trial.kill() for _ in range(KILLS)]
            freezes = [trial.freeze() for _ in range(FREEZES)]
    show(
        {
            "kill -9, to the first commit": kills,
            "SIGSTOP, until it is given up": freezes,
            "longest delay without a fault": calm,
            "coordinator": delays,
        }
    )
    return {
        "recovery_seconds_median": statistics.median(kills),
        "recovery_seconds_p95": percentile(kills, 0.95),
        "kills": float(len(kills)),
        "frozen_seconds_max": max(freezes),
        "calm_delay_max": max(calm),
        "coordinator_delay_max": max(delays),
    }


@contextmanager
def _running(folder: Path, arguments: Sequence[str]) -> Iterator[Trial]:
    """A run of its own, with spares. What all of its processes said is kept."""
    folder.mkdir()
    try:
        with populated(Loopback(), folder / "peers", SLICES + SPARES) as population:
            run = folder / "run"
            with LedgerWatch(run) as watch, population.start_owner(run, arguments) as owner:
                yield Trial(population, run, watch, owner)
    finally:
        shutil.rmtree(LOGS / folder.name, ignore_errors=True)
        shutil.copytree(folder / "peers" / "logs", LOGS / folder.name)


class Trial:
    """One run to which things are done, one after the other, each when the run is in its stride again."""

    def __init__(self, population: Population, run: Path, watch: LedgerWatch, owner: Program) -> None:
        self._population, self._run, self._watch, self._owner = population, run, watch, owner
        self._turn = 0

    def kill(self) -> float:
        """kill -9 of who executes a slice of which a spare has a copy; seconds to the first Commit of an epoch after it."""
        victim = self._victim()
        epoch, begin = self._epoch, time.monotonic()
        victim.program.process.kill()
        seconds = self._first_commit(begin, epoch) - begin
        victim.program.process.wait()
        self._population.restart(victim)
        print(f"kill -9 of {victim.name}: {seconds:.2f} s", flush=True)
        return seconds

    def freeze(self) -> float:
        """SIGSTOP; seconds until the owner says that the peer is lost."""
        victim = self._victim()
        epoch, begin, seen = self._epoch, time.monotonic(), len(self._owner.lines)
        victim.program.process.send_signal(signal.SIGSTOP)
        try:
            self._owner.wait_for(LOST, LIMIT_S, after=seen)
            seconds = time.monotonic() - begin
            self._first_commit(begin, epoch)
        finally:
            victim.program.process.send_signal(signal.SIGCONT)
        print(f"SIGSTOP of {victim.name}: given up after {seconds:.2f} s", flush=True)
        return seconds

    def kill_coordinator(self) -> tuple[float, float]:
        """How much later than usual a step came at most, without a fault and after kill -9 of a coordinator without a slice."""
        coordinator, calm = self._calm_coordinator()
        coordinator.program.process.kill()
        delay = self._longest_delay_s()
        coordinator.program.process.wait()
        self._population.restart(coordinator)
        print(f"kill -9 of the coordinator {coordinator.name}: {delay:.2f} s, before it {calm:.2f} s", flush=True)
        return calm, delay

    def _calm_coordinator(self) -> tuple[Resident, float]:
        """One that was given no slice for MISSED_S either, and how much later than usual a step came in that time."""
        for _ in range(ATTEMPTS):
            coordinator = self._coordinator_without_slice()
            calm = self._longest_delay_s()
            if coordinator is self._population.coordinator and not self._has_slice(coordinator):
                return coordinator, calm
        raise ProgramFailed(f"{ATTEMPTS} times a coordinator was given a slice within {MISSED_S:g} s")

    def _longest_delay_s(self) -> float:
        """How much later than usual a step comes at most, from now on for MISSED_S."""
        usual_s, begin = usual_step_s(self._watch.noted[-20:]), time.monotonic()
        time.sleep(MISSED_S)
        return max(0.0, longest_wait_s(self._watch.noted, begin, time.monotonic()) - usual_s)

    def _coordinator_without_slice(self) -> Resident:
        """One that has a slice, too, is killed until one coordinates that has none: spares are elected first."""
        for _ in range(ATTEMPTS):
            self._in_stride()
            coordinator = self._population.coordinator
            if coordinator is None:
                continue
            if not self._has_slice(coordinator):
                return coordinator
            coordinator.program.process.kill()
            coordinator.program.process.wait()
            self._population.restart(coordinator)
        raise ProgramFailed(f"after {ATTEMPTS} elections the coordinator still has a slice")

    def _victim(self) -> Resident:
        """The holder of a slice, each in its turn, as soon as copies of all slices are held."""
        self._in_stride()
        deadline = time.monotonic() + LIMIT_S
        while not says_that_all_are_held(self._owner.lines):
            if time.monotonic() > deadline:
                raise ProgramFailed(f"not all slices had copies within {LIMIT_S:g} s:\n{self._owner.tail(40)}")
            time.sleep(POLL_S)
        found = self._holders()
        self._turn += 1
        return found[self._turn % len(found)][0]

    def _has_slice(self, resident: Resident) -> bool:
        return resident in [one for one, _ in self._holders()]

    def _holders(self) -> list[tuple[Resident, int]]:
        return holders(self._population.living, read_plan(self._run))

    def _in_stride(self) -> None:
        """Until everybody is here, and some steps were made."""
        for one in self._population.living:
            one.program.wait_for("standby|training|spare", LIMIT_S)
        begin = time.monotonic()
        for _ in range(CALM_STEPS):
            begin = self._first_commit(begin)

    @property
    def _epoch(self) -> int:
        return max(int(one.entry["epoch"]) for one in self._watch.noted if one.kind == "start")

    def _first_commit(self, after_s: float, after_epoch: int = 0) -> float:
        def wanted(one: Noted) -> bool:
            return one.kind == "commit" and one.entry["epoch"] > after_epoch

        commit = self._watch.wait_for(wanted, LIMIT_S, after_s=after_s)
        if commit is None:
            raise ProgramFailed(f"no commit within {LIMIT_S:g} s:\n{self._owner.tail(40)}")
        return commit.at_s


def says_that_all_are_held(lines: Sequence[str]) -> bool:
    """Whether every slice has a copy, as far as an owner has said."""
    newest = next((line for line in reversed(list(lines)) if TELLING.search(line)), "")
    return COPIES.search(newest) is not None


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def show(seconds: Mapping[str, Sequence[float]]) -> None:
    table = Table(title="seconds", title_justify="left")
    for heading in ("what", "times", "least", "median", "most"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for what, found in seconds.items():
        if found:
            figures = (min(found), statistics.median(found), max(found))
            table.add_row(what, str(len(found)), *(f"{figure:.2f}" for figure in figures))
    Console(width=100, highlight=False).print(table)
