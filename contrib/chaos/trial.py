"""One trial: a run that is undisturbed, the same run under faults, and what became of its parameters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from contrib.chaos.aftermath import Aftermath, aftermaths
from contrib.chaos.doing import Chaos, Done
from contrib.chaos.population import Population, check_none_died
from contrib.chaos.schedule import Fault, Kind
from contrib.chaos.watching import LedgerWatch
from contrib.processes import Program, ProgramFailed

FIRST_STEP_S = 300.0
LEAVE_S = 40.0
"""Whoever was asked to leave is gone within this: the time to hand over, and five seconds."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened to a run, fault by fault."""

    done: tuple[Done, ...]
    followed: tuple[Aftermath, ...]
    seconds: float
    drained: tuple[int, ...]
    """Exit codes of the peers that were asked to leave."""

    @property
    def rarest(self) -> int:
        """How often the kind of fault was done that was done least."""
        return min(sum(one.fault.kind is kind for one in self.done) for kind in Kind)

    def of(self, kind: Kind) -> list[Aftermath]:
        return [after for one, after in zip(self.done, self.followed, strict=True) if one.fault.kind is kind]


def undisturbed(population: Population, run: Path, arguments: Sequence[str], timeout_s: float) -> None:
    """Train to the end. ProgramFailed when that does not come in time."""
    with population.start_owner(run, arguments) as owner:
        code = owner.wait(timeout_s)
    if code:
        raise failure(population, owner, f"of the undisturbed run ended with exit code {code}")


def disturbed(
    population: Population, run: Path, arguments: Sequence[str], faults: Sequence[Fault], timeout_s: float,
    say: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Train to the end under faults. ProgramFailed when it does not get there, or a peer dies that nobody killed."""
    with LedgerWatch(run) as watch, population.start_owner(run, arguments) as owner:
        if watch.wait_for(lambda one: one.kind == "commit", FIRST_STEP_S) is None:
            raise failure(population, owner, "did no step")
        begin = time.monotonic()
        done = Chaos(population, run, say).carry_out(faults, owner)
        population.full_speed()
        try:
            code = owner.wait(timeout_s)
        except ProgramFailed:
            raise failure(population, owner, f"still runs {timeout_s:g} s after the last fault") from None
        seconds = time.monotonic() - begin
        followed = aftermaths([one.at_s for one in done], watch.noted)
    if code:
        raise failure(population, owner, f"ended with exit code {code}")
    check_none_died(population, lambda one: one.unwell)
    drained = tuple(program.wait(LEAVE_S) for how, program in population.ended if how == "drained")
    return Outcome(tuple(done), tuple(followed), seconds, drained)


def failure(population: Population, owner: Program, what: str) -> ProgramFailed:
    """What happened to an owner, with the last lines of everybody."""
    said = "\n".join(f"{one.name}:\n{one.program.tail(12)}" for one in population.residents)
    return ProgramFailed(f"{owner.name} {what}\n{owner.tail(40)}\n{said}")


def differing(first: Path, second: Path) -> list[str]:
    """Names of the trained tensors of two runs whose bits differ, or that only one of them has."""
    from safetensors.numpy import load_file  # only the end of a trial needs it

    from fusion_p2p.owner.export import export_state_dict

    states = []
    for run in (first, second):
        export_state_dict(run, run / "model.safetensors")
        states.append(load_file(run / "model.safetensors"))
    one, other = states
    return sorted(
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or one[name].tobytes() != other[name].tobytes()
    )


def show(outcome: Outcome, title: str) -> None:
    """What the faults of each kind cost."""
    table = Table(title=title, title_justify="left")
    for heading in ("fault", "times", "steps repeated", "seconds lost: mean", "most", "all"):
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for kind in Kind:
        found = outcome.of(kind)
        if found:
            lost = [one.seconds_lost for one in found]
            row = (len(found), sum(one.steps_repeated for one in found))
            table.add_row(kind, *map(str, row), f"{fmean(lost):.2f}", f"{max(lost):.2f}", f"{sum(lost):.1f}")
    Console(width=100, highlight=False).print(table)


def figures_of(outcomes: Sequence[Outcome | None]) -> dict[str, float]:
    """Of all trials together: how many faults, how often the rarest kind, what they cost. None: it did not come to its end."""
    ended = [outcome for outcome in outcomes if outcome is not None]
    failed = len(ended) < len(outcomes)
    followed = [one for outcome in ended for one in outcome.followed]
    return {
        "faults": 0.0 if failed else float(min(len(outcome.done) for outcome in ended)),
        "faults_of_each_kind_min": 0.0 if failed else float(min(outcome.rarest for outcome in ended)),
        "steps_repeated": float(sum(one.steps_repeated for one in followed)),
        "seconds_lost": round(sum(one.seconds_lost for one in followed), 1),
    }
