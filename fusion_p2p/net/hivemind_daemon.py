"""One p2pd process: started, spoken to, and gone again. hivemind ships the binary; how it is started is decided here.

* Without initial peers: a dead bootstrap would kill it at its start. Whoever needs a peer dials it afterwards.
* Its listen ports are ours before it starts (see ports.py).
* Its sockets live in a folder of our own, named by our process; folders of dead processes are removed at the next start.
* It runs in a process group of its own (Ctrl+C reaches us, not it) and ends by itself when we die: it exits with its last
  persistent connection, or after IDLE_TIMEOUT_S if none was ever made.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.resources
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fusion_p2p.errors import ConfigError, NetworkError
from fusion_p2p.ids import PeerId
from fusion_p2p.net.hivemind_control import ControlSocket
from fusion_p2p.net.hivemind_parts import P2P, HivemindMultiaddr, P2PDaemonError, use_hivemind_log_handler

logger = logging.getLogger(__name__)
use_hivemind_log_handler("nowhere")  # what it says goes where our own log goes
logging.getLogger("hivemind").setLevel(logging.ERROR)

IDLE_TIMEOUT_S = 10
STOP_TIMEOUT_S = 2.0
MAX_UNIX_PATH_BYTES = 100
"""Linux allows 107 in a socket address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """How p2pd is started."""

    identity_path: Path
    listen: tuple[str, ...]
    """Multiaddrs with real ports; none at all: it only dials."""
    announce: tuple[str, ...] = ()
    """Instead of the listen addresses, when not empty."""
    relays: tuple[str, ...] = ()
    """Full addresses of relays to be reachable through; then it counts itself as not dialable."""
    map_ports: bool = False
    """Ask the router for a port (UPnP, NAT-PMP)."""
    find_peers: bool = True
    """Take part in libp2p's own peer routing, which finds the addresses of a peer id."""
    startup_timeout_s: float = 15.0


@dataclass(slots=True)
class Daemon:
    """A running p2pd."""

    peer_id: PeerId
    control: ControlSocket
    p2p: P2P
    """hivemind's view of it, for its DHT; holds the persistent connection that keeps the daemon alive."""
    _process: asyncio.subprocess.Process
    _output: asyncio.Task[None]
    _last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @classmethod
    async def start(cls, settings: DaemonSettings, folder: Path) -> Daemon:
        """Start p2pd with its control socket in `folder`. ConfigError when it cannot run so; NetworkError."""
        control_path = folder / f"d{secrets.token_hex(4)}"
        process = await _spawn(_arguments(settings, control_path))
        lines: deque[str] = deque(maxlen=20)
        ready = asyncio.Event()
        output = asyncio.create_task(_read_output(process, lines, ready))
        try:
            await _until_ready(process, ready, lines, settings)
            control = ControlSocket(control_path)
            peer_id, _ = await control.identify()
            p2p = await _replicate(control_path)
        except BaseException:  # cancelled or failed: no daemon may stay behind
            await _end(process, output)
            raise
        return cls(peer_id, control, p2p, process, output, lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def terminate(self) -> None:
        """Ask the process to end; `wait` tells when it has."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End the process, though it may be stopped or hang."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> str:
        """Until the process ends; the last thing it said."""
        await self._process.wait()
        return self._last_lines[-1] if self._last_lines else f"exit code {self._process.returncode}"

    async def stop(self) -> None:
        """End the process; SIGKILL after STOP_TIMEOUT_S."""
        await self.p2p.shutdown()
        await asyncio.wait(_connection_tasks(self.p2p), timeout=STOP_TIMEOUT_S)
        await _end(self._process, self._output)


def daemon_binary() -> Path:
    """Where hivemind keeps p2pd. ConfigError when its wheel has none for this platform, or it may not be run."""
    path = Path(str(importlib.resources.files("hivemind.hivemind_cli") / "p2pd"))
    if not path.is_file():
        raise ConfigError(f"hivemind has no p2pd for this platform ({os.uname().machine}): none at {path}")
    if not os.access(path, os.X_OK):
        raise ConfigError(f"the network daemon {path} may not be executed: make it executable, or install hivemind elsewhere")
    return path


@contextlib.contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder for Unix sockets, removed at the end. ConfigError when the temp folder cannot hold it."""
    parent = Path(tempfile.gettempdir()) / f"fusion-p2p-{os.getuid()}"
    folder = parent / f"{os.getpid()}-{secrets.token_hex(3)}"
    try:
        parent.mkdir(mode=0o700, exist_ok=True)
        _remove_stale(parent)
        folder.mkdir(mode=0o700)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(
            f"temp folder {parent.parent} cannot be used: {error.strerror}; set TMPDIR to a writable folder"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if len(os.fsencode(folder)) > MAX_UNIX_PATH_BYTES - len("/d12345678"):
            shutil.rmtree(folder)
            raise ConfigError(
                f"the path of temp folder {parent.parent} is too long for a Unix socket; set TMPDIR to a shorter one"
            )
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(parent: Path) -> None:
    """Folders whose process is dead, here and (its lock tells) in any other container that shares this temp folder."""
    for folder in parent.iterdir():
        pid, _, _ = folder.name.partition("-")
        if not pid.isdecimal() or _process_exists(int(pid)):
            continue
        with contextlib.suppress(OSError), (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _arguments(settings: DaemonSettings, control_path: Path) -> list[str]:
    flags: dict[str, object] = {
        "listen": f"/unix{control_path}",
        "id": settings.identity_path,
        "idleTimeout": f"{IDLE_TIMEOUT_S}s",
        "natPortMap": int(settings.map_ports),
        "autonat": 0,
        "connManager": 1,
        "relay": 1,
        "relayService": 0,  # p2pd's own relay cuts circuits after 128 KiB half of the time
        "tls": 1,
    }
    if settings.find_peers:
        flags["dhtServer"] = 1
    if settings.listen:
        flags["hostAddrs"] = ",".join(settings.listen)
    else:
        flags["noListenAddrs"] = 1
    if settings.announce:
        flags["announceAddrs"] = ",".join(settings.announce)
    if settings.relays:
        # Static relays only: looking for others delays the first reservation by three minutes.
        flags |= {
            "autoRelay": 1,
            "relayDiscovery": 0,
            "forceReachabilityPrivate": 1,
            "trustedRelays": ",".join(settings.relays),
        }
    else:
        # How we are reached is found out by our own dial-back. p2pd would ask others to dial it, again and again, unless it is
        # told; it does nothing else with the answer here.
        flags["forceReachabilityPublic"] = 1
    return [str(daemon_binary()), *(f"-{name}={value}" for name, value in flags.items())]


async def _spawn(arguments: list[str]) -> asyncio.subprocess.Process:
    environment = {**os.environ, "GOLOG_LOG_LEVEL": "error"}
    try:
        return await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        raise ConfigError(f"the network daemon {arguments[0]} does not run here: {error.strerror}") from None


async def _read_output(process: asyncio.subprocess.Process, lines: deque[str], ready: asyncio.Event) -> None:
    """Keep the pipe empty, remember the last lines, and tell when the daemon is up or has ended."""
    stream = process.stdout
    while stream is not None and (line := await stream.readline()):
        text = re.sub(r"[^\x20-\x7e]", "", line.decode(errors="replace"))[:500]
        logger.debug("p2pd: %s", text)
        lines.append(text)
        if text.startswith("Peer ID:"):
            ready.set()
    await process.wait()
    ready.set()


async def _until_ready(
    process: asyncio.subprocess.Process, ready: asyncio.Event, lines: deque[str], settings: DaemonSettings
) -> None:
    try:
        async with asyncio.timeout(settings.startup_timeout_s):
            await ready.wait()
    except TimeoutError:
        raise NetworkError(
            f"the local network daemon p2pd was not up within {settings.startup_timeout_s:g} s: "
            "this machine is very busy or its disk very slow; no other machine was asked yet"
        ) from None
    if process.returncode is None:
        return
    said = lines[-1] if lines else f"exit code {process.returncode}"
    if "bind" in said or "listen" in said:
        raise ConfigError(f"cannot listen on {', '.join(settings.listen)}: {said}")
    raise NetworkError(f"the local network daemon p2pd ended at its start: {said}")


async def _replicate(control_path: Path) -> P2P:
    try:
        p2p = await P2P.replicate(HivemindMultiaddr(f"/unix{control_path}"))
    except (OSError, EOFError, P2PDaemonError) as error:
        raise NetworkError(f"the local network daemon p2pd broke off at its start: {error}") from None
    for task in _connection_tasks(p2p):
        task.add_done_callback(_take_result)
    return p2p


def _connection_tasks(p2p: P2P) -> list[asyncio.Task[None]]:
    """The tasks that read and write hivemind's persistent connection to the daemon."""
    control = p2p._client.control
    return [control._read_task, control._write_task]


def _take_result(task: asyncio.Task[None]) -> None:
    """They fail when the daemon dies; hivemind never looks, and asyncio would report that as an error of ours."""
    if not task.cancelled():
        task.exception()


async def _end(process: asyncio.subprocess.Process, output: asyncio.Task[None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
    await output
