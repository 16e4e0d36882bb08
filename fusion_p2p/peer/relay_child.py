"""The circuit relay as a child process of a bootstrap node: started, watched, restarted on the same port, gone with us.

The child ends when its standard input does, so it dies with us even on SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fusion_p2p.errors import AddressError, ConfigError, NetworkError
from fusion_p2p.net.addresses import by_reach, parse_peer_address

logger = logging.getLogger(__name__)

STARTUP_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 2.0
MAX_RESTARTS = 3
RESTART_WINDOW_S = 60.0
WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayChildSettings:
    """What the relay offers, and where."""

    listen: str
    identity_path: Path
    reservations: int
    circuits: int
    duration_s: int
    num_bytes: int


class RelayChild:
    """A running relay process. Call `start`, then `watch`; `stop` at the end."""

    def __init__(self, settings: RelayChildSettings) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._address = ""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Until it is up. ConfigError when it cannot listen; NetworkError when it does not come up."""
        settings = self._settings
        arguments = [
            sys.executable, "-m", "fusion_p2p.relay", "--listen", settings.listen, "--identity", str(settings.identity_path),
            "--reservations", str(settings.reservations), "--circuits", str(settings.circuits),
            "--duration-s", str(settings.duration_s), "--bytes", str(settings.num_bytes),
        ]  # fmt: skip
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*arguments, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
        self._process = process
        try:
            async with asyncio.timeout(STARTUP_TIMEOUT_S):
                line = await _first_line(process)
                if not line:
                    raise ConfigError(f"the relay did not start: {await _complaint(process)}")
        except TimeoutError:
            raise NetworkError(f"the relay process was not up within {STARTUP_TIMEOUT_S:g} s") from None
        self._address = str(json.loads(line)["addresses"][0])
        _, family, host, transport, _, *rest = settings.listen.split("/")
        port = self._address.split("/")[4]
        self._settings = replace(settings, listen="/".join(["", family, host, transport, port, *rest]))

    async def watch(self) -> None:
        """Restart it when it dies; NetworkError when it does not stay up."""
        deaths: deque[float] = deque(maxlen=MAX_RESTARTS)
        loop = asyncio.get_running_loop()
        while self._process is not None:
            complaint = await _complaint(self._process)
            if len(deaths) == MAX_RESTARTS and loop.time() - deaths[0] < RESTART_WINDOW_S:
                raise NetworkError(f"the relay died {MAX_RESTARTS + 1} times in {RESTART_WINDOW_S:g} s; it said: {complaint}")
            deaths.append(loop.time())
            logger.warning("the relay died (%s): starting it again", complaint)
            await self.start()

    def addresses(self, own: Sequence[str]) -> tuple[str, ...]:
        """How others dial the relay, given how they dial us: on the same hosts, when it listens on all of them."""
        if not self._address:
            return ()
        parts = self._address.split("/")
        if parts[2] not in WILDCARDS:
            return (self._address,)
        hosts = [address.split("/")[1:3] for address in own]
        found = ["/".join(["", family, host, *parts[3:]]) for family, host in hosts if _same_family(family, parts[1])]
        return by_reach(address for address in found if _is_valid(address))

    async def stop(self) -> None:
        process = self._process
        if process is None:
            return
        self._process = None
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await process.communicate()
        except TimeoutError:
            process.kill()
            await process.communicate()


async def _first_line(process: asyncio.subprocess.Process) -> bytes:
    return await process.stdout.readline() if process.stdout else b""


async def _complaint(process: asyncio.subprocess.Process) -> str:
    """Until the process ends: the last line of its standard error."""
    last = b""
    while process.stderr is not None and (line := await process.stderr.readline()):
        last = line
    await process.wait()
    return last.decode(errors="replace").strip().removeprefix("error: ")[:300] or f"exit code {process.returncode}"


def _same_family(ours: str, relays: str) -> bool:
    return ours == relays or ours.startswith("dns")


def _is_valid(address: str) -> bool:
    try:
        parse_peer_address(address)
    except AddressError:
        return False
    return True
