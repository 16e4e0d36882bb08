"""What the tests of real processes share: a swarm on loopback, what it is asked, how its processes are made to leave.

Nothing here sleeps: waits are for a line of output, for the end of a process, or for an answer of `fusion-peer status`.
"""

from __future__ import annotations

import functools
import json
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from contrib.benchmarks.swarm import Swarm, running_swarm
from contrib.processes import START_S, Program, fusion_peer, processes_of, start_peer, wait_until_gone
from fusion_p2p.device.rates import rates
from fusion_p2p.ids import PeerId
from fusion_p2p.monitor.text import peer_name

RUN_S = 90.0
EXIT_S = 5.0
"""Whoever is asked to leave, or killed, is gone within this, with its daemon and its relay."""
STANDBY = r"standby: "
TRAINING = r"training: slice"
TINY = (
    "--model", "gpt2", "--layers", "4", "--width", "32", "--heads", "2", "--context", "32", "--batch-size", "8",
    "--micro-batches", "2", "--learning-rate", "0.01", "--validate-every", "0",
)  # fmt: skip
ENDLESS = (*TINY, "--steps", "1000000")


@dataclass(frozen=True)
class Left:
    """How a process left: exit code, and seconds until it and all its children were gone."""

    code: int
    seconds: float


@functools.cache
def measured_rates() -> tuple[str, str]:
    """Name and text of the file in which a one-thread peer on this machine remembers what it reaches."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rates(torch.device("cpu"), Path(folder), budget_s=0.2)
            (path,) = Path(folder).iterdir()
            return path.name, path.read_text()
    finally:
        torch.set_num_threads(threads)


def leave_rates(state: Path, **changed: float) -> None:
    """Spare a peer that will start in this state directory the second that measuring takes; all peers here are one machine."""
    name, text = measured_rates()
    remembered = json.loads(text)
    remembered["rates"] |= changed
    state.mkdir(parents=True, exist_ok=True)
    (state / name).write_text(json.dumps(remembered))


@contextmanager
def swarm_of(folder: Path, num_peers: int) -> Iterator[Swarm]:
    """A bootstrap node and its peers; after the block they are ended, and have left nothing behind."""
    for number in range(1, num_peers + 1):
        if not (folder / f"peer-{number}").exists():
            leave_rates(folder / f"peer-{number}")
    with running_swarm(folder, num_peers) as swarm:
        try:
            yield swarm
        finally:
            for peer in swarm.peers:
                peer.end()
    for program in (swarm.bootstrap, *swarm.peers):
        no_traceback(program)
    assert not wait_until_gone([program.session for program in (swarm.bootstrap, *swarm.peers)], EXIT_S)


def one_more(swarm: Swarm) -> Program:
    """A further peer of the swarm, which is perhaps not up yet."""
    name = f"peer-{len(swarm.peers) + 1}"
    leave_rates(swarm.folder / name)
    peer = start_peer(name, swarm.folder, swarm.address)
    swarm.peers.append(peer)
    return peer


def living(swarm: Swarm) -> list[Program]:
    """The peers that have not ended."""
    return [peer for peer in swarm.peers if peer.process.poll() is None]


def family(program: Program) -> list[psutil.Process]:
    """The process, its p2pd, its relay: whatever lives in its session."""
    return [psutil.Process(pid) for pid in processes_of([program.session])]


def daemon_of(program: Program) -> psutil.Process:
    """The p2pd of a process."""
    return next(process for process in family(program) if process.name() == "p2pd")


def leave(program: Program, number: signal.Signals, within_s: float = EXIT_S) -> Left:
    """Send a signal; AssertionError when the process or a child of it is still there after `within_s`."""
    children = [member for member in family(program) if member.pid != program.session]
    assert any(child.name() == "p2pd" for child in children), f"{program.name} has no daemon"
    begin = time.monotonic()
    program.process.send_signal(number)
    code = program.wait(within_s)
    _, alive = psutil.wait_procs(children, timeout=max(0.0, begin + within_s - time.monotonic()))
    left = Left(code, time.monotonic() - begin)
    assert not alive, (
        f"{program.name} {number.name}: {[one.name() for one in alive]} not gone in {within_s} s\n{program.tail()}"
    )
    print(f"{program.name:<20} {number.name:<8} gone after {left.seconds:.2f} s, exit code {left.code}")
    no_traceback(program)
    return left


def no_traceback(program: Program) -> None:
    """Nothing of what it wrote is for programmers only."""
    for line in program.lines:
        for word in ("Traceback", "never retrieved", "was destroyed but", "Warning:", "unexpected "):
            assert word not in line, f"{program.name} wrote:\n{program.tail(40)}"


def status(swarm: Swarm) -> dict[str, Any]:
    """What `fusion-peer status --json` answers."""
    arguments = ("status", "--json", "--bootstrap", swarm.address, "--state-dir", str(swarm.folder / "status"), "--no-nat")
    with fusion_peer("status", *arguments, "--listen", "/ip4/127.0.0.1/tcp/0") as asking:
        code = asking.wait(START_S)
    assert code == 0, asking.tail()
    answer: dict[str, Any] = json.loads(next(line for line in asking.lines if line.startswith("{")))
    return answer


def status_once(swarm: Swarm, wanted: Callable[[dict[str, Any]], bool], within_s: float) -> dict[str, Any]:
    """Ask until the answer is as wanted."""
    deadline = time.monotonic() + within_s
    while not wanted(answer := status(swarm)):
        assert time.monotonic() < deadline, json.dumps(answer, indent=1)
    return answer


def peer_id(peer: Program) -> str:
    """The id that a peer printed with its address."""
    return peer.wait_for(r"reachable: direct, at \S+/p2p/(\w+)", START_S).group(1)


def holders(swarm: Swarm, owner: Program) -> list[Program]:
    """The peers of the plan that an owner has printed, in the order of their slices; they say themselves that they train."""
    planned = [match.group(1) for line in owner.lines if (match := re.match(r"slice \d+ on (\w+):", line))]
    by_name = {peer_name(PeerId(peer_id(peer))): peer for peer in living(swarm)}
    found = [by_name[name] for name in dict.fromkeys(planned)]
    for peer in found:
        before = max(number for number, line in enumerate(peer.lines) if re.search("(standby|preparing)", line))
        peer.wait_for(TRAINING, START_S, after=before)
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    """A ledger or a metrics file, line by line; a torn last line is left out."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
