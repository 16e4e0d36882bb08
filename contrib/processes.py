"""Real `fusion-peer` processes for the demo, the benchmarks and the tests: started, watched and ended one by one.

Every program leads a session of its own, so that whatever it leaves behind (a p2p daemon, a relay) can be found by the session.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

ADDRESS = re.compile(r"/ip4/[\d.]+/tcp/\d+/p2p/\w+")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}
START_S = 90.0
"""A process imports torch and hivemind first: 4 s on a quiet machine, many times that on a busy one."""


class ProgramFailed(Exception):
    """A program ended, or did not say what it was expected to; the text holds the last lines that it wrote."""


class Program:
    """One running process and the lines it has written so far (stdout and stderr together).

    attached: it writes to our own terminal instead, and no lines are kept.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, environment: Mapping[str, str] | None = None, attached: bool = False
    ) -> None:
        self.name = name
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._ended = False
        self.process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=None if attached else subprocess.PIPE,
            stderr=None if attached else subprocess.STDOUT,
            env={**os.environ, **ENVIRONMENT, **(environment or {})},
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, name=f"output of {name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def session(self) -> int:
        """Number of the session, the same as the process id."""
        return self.process.pid

    def wait_for(self, pattern: str | re.Pattern[str], timeout_s: float, *, after: int = 0) -> re.Match[str]:
        """The first line that matches, of those `after` so many. ProgramFailed when the program ends or the time is over."""
        wanted, deadline, seen = re.compile(pattern), time.monotonic() + timeout_s, after
        with self._news:
            while True:
                for line in self.lines[seen:]:
                    if match := wanted.search(line):
                        return match
                seen = len(self.lines)
                left = deadline - time.monotonic()
                if self._ended or left <= 0 or not self._news.wait(left):
                    why = "ended" if self._ended else f"after {timeout_s:g} s"
                    raise ProgramFailed(f"{self.name} {why} without a line like {wanted.pattern!r}:\n{self.tail()}")

    def wait(self, timeout_s: float) -> int:
        """The exit code. ProgramFailed when it still runs after `timeout_s`."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ProgramFailed(f"{self.name} still runs after {timeout_s:g} s:\n{self.tail()}") from None
        self._reader.join(1.0)
        return code

    def tail(self, count: int = 25) -> str:
        """The last lines it wrote."""
        return "\n".join(f"    {line}" for line in self.lines[-count:])

    def end(self, timeout_s: float = 10.0) -> int:
        """Ask it to leave; kill it, and then whatever is left of its session, when it does not. The exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        for pid in processes_of([self.session]):
            _kill(pid)
        if self.process.stdout is not None:
            self._reader.join(5.0)
            self.process.stdout.close()
        return code

    def __enter__(self) -> Program:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()


def fusion_peer(name: str, *arguments: str, environment: Mapping[str, str] | None = None, attached: bool = False) -> Program:
    """Start `fusion-peer ARGUMENTS` with this interpreter."""
    return Program(name, python_module("fusion_p2p.cli.main", *arguments), environment=environment, attached=attached)


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module with this interpreter."""
    return [sys.executable, "-m", module, *arguments]


def start_bootstrap(state: Path, *arguments: str) -> tuple[Program, str]:
    """A bootstrap node on loopback and the address to give to others."""
    node = fusion_peer(
        "bootstrap",
        "bootstrap",
        "--listen",
        "/ip4/127.0.0.1/tcp/0",
        "--relay-listen",
        "/ip4/127.0.0.1/tcp/0",
        "--no-nat",
        "--state-dir",
        str(state),
        *arguments,
    )
    try:
        return node, node.wait_for(ADDRESS, START_S).group()
    except BaseException:
        node.end()
        raise


def start_peer(name: str, state: Path, address: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Program:
    """A volunteer's peer on loopback."""
    return fusion_peer(
        name, "join", "--bootstrap", address, "--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat", "--state-dir", str(state / name),
        "--device", "cpu", "--threads", "1", *arguments, environment=environment,
    )  # fmt: skip


def wait_until_joined(peers: Iterable[Program], timeout_s: float = 120.0) -> None:
    """Wait until every peer is in the swarm and could be given a slice. ProgramFailed when one is not in time."""
    deadline = time.monotonic() + timeout_s
    for peer in peers:
        peer.wait_for("standby", max(0.0, deadline - time.monotonic()))


def processes_of(sessions: Iterable[int]) -> list[int]:
    """Ids of the living processes of these sessions (Linux, macOS); zombies do not count."""
    import psutil  # only the ends of runs need it

    wanted, found = set(sessions), []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getsid(process.pid) in wanted and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, PermissionError):
            continue
    return found


def wait_until_gone(sessions: Iterable[int], timeout_s: float) -> list[int]:
    """Wait for all processes of these sessions to end; those that are left after `timeout_s`."""
    import psutil

    wanted, deadline = list(sessions), time.monotonic() + timeout_s
    while (left := processes_of(wanted)) and time.monotonic() < deadline:
        alive = [psutil.Process(pid) for pid in left if psutil.pid_exists(pid)]
        psutil.wait_procs(alive, timeout=min(0.5, max(0.0, deadline - time.monotonic())))
    return left


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
