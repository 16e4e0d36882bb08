"""Real peers that come and go: who they are, what they say they do, and which of them are gone on purpose."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrib.chaos.places import Place
from contrib.processes import ADDRESS, Program, ProgramFailed, python_module, wait_until_joined

START_S = 90.0
RATES = "rates"
"""Folder of the rates that were measured once for all peers: equal ones, so that every plan cuts alike."""
FULL_SPEED = "full-speed"
"""Name of the file with which slowed peers are slowed no longer."""
BOOTSTRAP_NODE = 0
STATE = re.compile(r"^\d\d:\d\d:\d\d (standby|spare|training|preparing|holds|paused|draining|waiting)")
_PEER_ID = re.compile(r"/p2p/(\w+)")


@dataclass
class Resident:
    """One peer: its node, pace and identity stay when it is started again."""

    name: str
    node: int
    slower: float
    port: int
    """Where it shows its numbers; 0: nowhere."""
    program: Program
    unwell: bool = False
    """Frozen or cut off, or asked to leave: no other fault is done to it."""

    @property
    def alive(self) -> bool:
        return self.program.process.poll() is None

    @property
    def peer(self) -> str | None:
        """Its id; None as long as it has not said it."""
        said = (_PEER_ID.search(line) for line in list(self.program.lines) if "local daemon up" in line)
        return next((match.group(1) for match in said if match), None)

    @property
    def state(self) -> str:
        """What it said last that it does."""
        return next((line for line in reversed(list(self.program.lines)) if STATE.match(line)), "")

    @property
    def is_coordinator(self) -> bool:
        return "coordinating the swarm" in self.state


@dataclass
class Population:
    """The peers of one swarm, those that have gone included."""

    place: Place
    folder: Path
    slower: float
    """Times that a task takes at a peer of which nothing else is said, by waiting."""
    num_nodes: int
    with_pages: bool = False
    address: str = ""
    bootstrap: Program | None = None
    residents: list[Resident] = field(default_factory=list)
    ended: list[tuple[str, Program]] = field(default_factory=list)
    """Processes that were taken away, with how."""
    owners: list[Program] = field(default_factory=list)

    @property
    def living(self) -> list[Resident]:
        return [one for one in self.residents if one.alive]

    @property
    def well(self) -> list[Resident]:
        """Those that a fault can be done to."""
        return [one for one in self.living if not one.unwell]

    @property
    def coordinator(self) -> Resident | None:
        """Who says that it coordinates, if that is one."""
        return next((one for one in self.well if one.is_coordinator), None)

    def found(self) -> None:
        """Start the bootstrap node."""
        state = ("--state-dir", str(self.folder / "bootstrap"))
        command = python_module("fusion_p2p.cli.main", "bootstrap", *self._reach(BOOTSTRAP_NODE), "--no-relay", *state)
        self.bootstrap = self.place.start("bootstrap", BOOTSTRAP_NODE, command)
        self.address = self.bootstrap.wait_for(ADDRESS, START_S).group()

    def add(self, slower: float | None = None) -> Resident:
        """Start one more peer, on a node where none is; it is perhaps not up yet."""
        taken = {one.node for one in self.living}
        node = next(node for node in range(1, self.num_nodes) if node not in taken)
        name, port = f"peer-{len(self.residents) + 1}", _free_port() if self.with_pages else 0
        pace = self.slower if slower is None else slower
        self.residents.append(Resident(name, node, pace, port, self._start(name, node, pace, port)))
        return self.residents[-1]

    def restart(self, one: Resident) -> None:
        """Start a peer whose process has ended again."""
        self.ended.append(("restarted", one.program))
        one.program = self._start(one.name, one.node, one.slower, one.port)

    def grow(self, count: int) -> None:
        """Add peers and wait until all are in the swarm; the very first measures this machine for all, alone."""
        for _ in range(count):
            added = self.add()
            if len(self.residents) == 1:
                added.program.wait_for("device cpu", START_S)
        wait_until_joined([one.program for one in self.living])

    def start_owner(self, run: Path, arguments: Sequence[str]) -> Program:
        """Start an owner beside the bootstrap node, that trains into a run folder."""
        command = python_module(
            "fusion_p2p.cli.main", "train", "--bootstrap", self.address, *self._reach(BOOTSTRAP_NODE), "--run", str(run),
            "--state-dir", str(self.folder / "owner"), "--log-level", "info", *arguments,
        )  # fmt: skip
        self.owners.append(self.place.start(f"owner of {run.name}", BOOTSTRAP_NODE, command))
        return self.owners[-1]

    def full_speed(self) -> None:
        """From now on nobody is slowed."""
        (self.folder / FULL_SPEED).touch()

    def programs(self) -> list[Program]:
        """Every program that was started, the bootstrap node first."""
        started = [*([] if self.bootstrap is None else [self.bootstrap]), *(program for _, program in self.ended)]
        return list(dict.fromkeys([*started, *(one.program for one in self.residents), *self.owners]))

    def write_logs(self, folder: Path) -> None:
        """What every program has said, a file each."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, program in enumerate(self.programs()):
            (folder / f"{number:02}-{program.name.replace(' ', '-')}.log").write_text("\n".join([*program.lines, ""]))

    def _reach(self, node: int) -> tuple[str, ...]:
        return ("--listen", f"/ip4/{self.place.address(node)}/tcp/0", "--no-nat")

    def _start(self, name: str, node: int, slower: float, port: int) -> Program:
        command = python_module(
            "contrib.testbeds.slow_peer",
            "--slower", repr(slower), "--until", str(self.folder / FULL_SPEED), "--rates", str(self.folder / RATES),
            "join", "--bootstrap", self.address, *self._reach(node), "--state-dir", str(self.folder / name),
            "--device", "cpu", "--threads", "1", "--memory-gib", "1", "--log-level", "info",
            *(("--metrics-port", str(port)) if port else ()),
        )  # fmt: skip
        return self.place.start(name, node, command)


@contextmanager
def populated(
    place: Place, folder: Path, count: int, *, slower: float = 1.0, num_nodes: int = 64, with_pages: bool = False
) -> Iterator[Population]:
    """A bootstrap node and `count` peers in the swarm; all that runs is ended after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    population = Population(place, folder, slower, num_nodes, with_pages)
    try:
        population.found()
        population.grow(count)
        yield population
    finally:
        for program in reversed(population.programs()):
            program.end()
        population.write_logs(folder / "logs")


def holders(residents: Sequence[Resident], plan: Mapping[str, Any]) -> list[tuple[Resident, int]]:
    """Who executes which slice of a plan (as in `plan.json`), in the order of the slices."""
    by_peer = {one.peer: one for one in residents}
    return [
        (by_peer[peer], index)
        for index, part in enumerate(plan["slices"])
        for peer in (part["peer"], *part["replicas"])
        if peer in by_peer
    ]


def read_plan(run: Path) -> dict[str, Any]:
    """The newest plan of a run."""
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())
    return plan


def check_none_died(population: Population, expected: Callable[[Resident], bool]) -> None:
    """ProgramFailed when a peer has ended that nobody ended."""
    for one in population.residents:
        if not one.alive and not expected(one):
            raise ProgramFailed(f"{one.name} ended by itself, exit code {one.program.process.poll()}:\n{one.program.tail()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
