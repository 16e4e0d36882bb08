"""Does faults to real processes while a run goes on, and undoes the ones that last."""

from __future__ import annotations

import heapq
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from contrib.chaos.population import Population, Resident, holders, read_plan
from contrib.chaos.schedule import Fault, Kind
from contrib.processes import Program, processes_of

LOOK_S = 0.05
PATIENCE_S = 15.0
"""How long a fault waits for somebody that it can be done to: a coordinator that was killed is followed by another first."""


@dataclass(frozen=True, slots=True)
class Done:
    """A fault as it was done: when, on the clock of `time.monotonic`, and to whom."""

    fault: Fault
    at_s: float
    whom: str


class Chaos:
    """Carries out a schedule on the peers of one run."""

    def __init__(self, population: Population, run: Path, say: Callable[[str], None]) -> None:
        self._population, self._run, self._say = population, run, say
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._doing: dict[Kind, Callable[[Fault], str | None]] = {
            Kind.KILL: self._kill,
            Kind.COORDINATOR: self._kill_coordinator,
            Kind.DRAIN: self._drain,
            Kind.JOIN: self._join,
            Kind.RESTART: self._restart,
            Kind.FREEZE: self._freeze,
            Kind.CUT: self._cut,
            Kind.DAEMON: self._kill_daemon,
        }

    def carry_out(self, faults: Sequence[Fault], owner: Program) -> list[Done]:
        """Do the faults at their times, as long as the owner runs; those that were done. What lasts is undone at the end."""
        begin, done = time.monotonic(), list[Done]()
        for fault in faults:
            self._wait(owner, begin + fault.at_s)
            one = self._do(fault, owner)
            if one is None:
                continue
            done.append(one)
            lasts = f", for {fault.lasts_s:g} s" if fault.lasts_s else ""
            self._say(f"{time.strftime('%H:%M:%S')} {one.at_s - begin:6.1f} s  {fault.kind:<16} {one.whom}{lasts}")
        self._wait(owner, max((at_s for at_s, _, _ in self._agenda), default=0.0))
        for _, _, undo in self._agenda:  # the owner ended first
            undo()
        return done

    def _do(self, fault: Fault, owner: Program) -> Done | None:
        """Do one as soon as there is somebody to do it to; None when the owner ends first or nobody turns up."""
        deadline = time.monotonic() + PATIENCE_S
        while owner.process.poll() is None and time.monotonic() < deadline:
            at_s = time.monotonic()
            whom = self._doing[fault.kind](fault)
            if whom is not None:
                return Done(fault, at_s, whom)
            self._turn()
        if owner.process.poll() is None:
            self._say(f"                   {fault.kind:<16} left out: nobody there that it could be done to")
        return None

    def _wait(self, owner: Program, until_s: float) -> None:
        while owner.process.poll() is None and (time.monotonic() < until_s or self._due):
            self._turn()

    @property
    def _due(self) -> bool:
        return bool(self._agenda) and self._agenda[0][0] <= time.monotonic()

    def _turn(self) -> None:
        while self._due:
            heapq.heappop(self._agenda)[2]()
        time.sleep(LOOK_S)

    def _later(self, after_s: float, undo: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + after_s, next(self._order), undo))

    def _holder(self, fault: Fault) -> tuple[Resident, str] | None:
        """One of those that execute a slice, and how to call it."""
        plan = read_plan(self._run)
        found = [(one, index) for one, index in holders(self._population.living, plan) if not one.unwell]
        if not found:
            return None
        one, index = found[int(fault.pick * len(found))]
        return one, f"{one.name} (slice {index})"

    def _kill(self, fault: Fault) -> str | None:
        return self._signal_holder(fault, signal.SIGKILL)

    def _drain(self, fault: Fault) -> str | None:
        return self._signal_holder(fault, signal.SIGTERM)

    def _signal_holder(self, fault: Fault, number: signal.Signals) -> str | None:
        chosen = self._holder(fault)
        if chosen is None:
            return None
        one, whom = chosen
        self._take_away(one, number, f"{fault.kind}ed")
        return whom

    def _kill_coordinator(self, fault: Fault) -> str | None:
        one = self._population.coordinator
        if one is None:
            return None
        whom = f"{one.name} ({one.state[9:].partition(':')[0]})"
        self._take_away(one, signal.SIGKILL, "killed")
        return whom

    def _take_away(self, one: Resident, number: signal.Signals, how: str) -> None:
        one.unwell = True
        one.program.process.send_signal(number)
        self._population.ended.append((how, one.program))

    def _join(self, fault: Fault) -> str:
        return self._population.add().name

    def _restart(self, fault: Fault) -> str | None:
        candidates = self._population.well
        if not candidates:
            return None
        one = candidates[int(fault.pick * len(candidates))]
        one.program.process.kill()
        one.program.process.wait()
        self._population.restart(one)
        return one.name

    def _freeze(self, fault: Fault) -> str | None:
        """Only the process or, every other time, its daemon too, as when a laptop is closed."""
        chosen = self._holder(fault)
        if chosen is None:
            return None
        one, whom = chosen
        everything = int(fault.pick * 1000) % 2 == 1
        stopped = processes_of([one.program.session]) if everything else [one.program.process.pid]
        self._afflict(one, fault.lasts_s, lambda: _signal(stopped, signal.SIGCONT))
        _signal(stopped, signal.SIGSTOP)
        return f"{whom}{' with its daemon' if everything else ''}"

    def _cut(self, fault: Fault) -> str | None:
        chosen = self._holder(fault)
        if chosen is None:
            return None
        one, whom = chosen
        self._afflict(one, fault.lasts_s, lambda: self._population.place.mend(one.node))
        self._population.place.cut(one.node)
        return whom

    def _afflict(self, one: Resident, lasts_s: float, undo: Callable[[], None]) -> None:
        def over() -> None:
            undo()
            one.unwell = False

        one.unwell = True
        self._later(lasts_s, over)

    def _kill_daemon(self, fault: Fault) -> str | None:
        chosen = self._holder(fault)
        if chosen is None:
            return None
        one, whom = chosen
        daemons = [process for process in map(psutil.Process, processes_of([one.program.session])) if process.name() == "p2pd"]
        if not daemons:  # it died a moment ago
            return None
        _signal([daemon.pid for daemon in daemons], signal.SIGKILL)
        return whom


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
