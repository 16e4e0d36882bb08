"""A volunteer's commands to its running peer: a Unix socket in the state directory that only its user can open.

    volunteer -> peer   {"command": "pause", "for_s": 7200}      one line, at most MAX_LINE_BYTES
    peer -> volunteer   {"text": "...", "wait_s": 30}            lines; after one with `wait_s` another one comes within it,
                                                                 or the stream ends, because the peer has gone

This module knows how commands travel, not what they do; it imports nothing heavy, as the command line uses it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from fusion_p2p.errors import DeadlinePassed, WireError
from fusion_p2p.ids import digest_of

log = logging.getLogger(__name__)

COMMANDS = ("leave", "pause", "resume", "show")
MAX_LINE_BYTES = 4096
ANSWER_S = 5.0
"""Within this a question is asked, and answered at first."""
PAUSE_S = 1.0
"""After the system had no room for a connection."""
MAX_NAME = 32


@dataclass(frozen=True, slots=True)
class Command:
    """What the volunteer wants. for_s: of a pause that ends by itself."""

    name: str
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A sentence for the volunteer; `wait_s`: another one comes within so many seconds, or the end."""

    text: str
    wait_s: float = 0.0


Obey = Callable[[Command], AsyncIterator[Answer]]


def socket_path(folder: Path, identity: Path) -> Path:
    """Where the peer with this key file listens."""
    place = str(identity.resolve())
    return folder / f"{identity.stem[:MAX_NAME]}-{digest_of(place.encode())[:8]}.sock"


class ControlSocket:
    """The peer's end. `run` until cancelled."""

    def __init__(self, path: Path, obey: Obey) -> None:
        """The caller holds the lock of its identity: a socket that lies there already is that of a process which has died."""
        self._path, self._obey = path, obey
        self.listening = asyncio.Event()

    async def run(self) -> None:
        """Answer one question per connection. A peer whose state directory cannot hold a socket works without commands."""
        try:
            listening = _listen(self._path)
        except OSError as error:
            log.warning("no commands are heard: cannot make the socket %s: %s", self._path, error.strerror or error)
            return
        self.listening.set()
        try:
            with listening:
                async with asyncio.TaskGroup() as group:
                    while True:
                        group.create_task(self._serve(await _accept(listening)))
        finally:
            self._path.unlink(missing_ok=True)

    async def _serve(self, connection: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES)
        try:
            if _user_of(connection) not in (0, os.getuid()):
                return
            async with asyncio.timeout(ANSWER_S):
                command = decode_command(await reader.readline())
            async for answer in self._obey(command):
                writer.write(_line({"text": answer.text, "wait_s": answer.wait_s}))
                await writer.drain()
        except WireError as error:
            writer.write(_line({"error": str(error)}))
        except (OSError, ValueError, TimeoutError) as error:  # ValueError: a line without an end
            log.info("a command was not heard to its end: %s", error)
        finally:
            writer.close()


def decode_command(line: bytes) -> Command:
    """WireError unless it is one of ours."""
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError):
        raise WireError("a command is a JSON object on one line") from None
    if not isinstance(asked, dict) or not asked.keys() <= {"command", "for_s"} or asked.get("command") not in COMMANDS:
        raise WireError(f"commands are {', '.join(COMMANDS)}")
    for_s = asked.get("for_s")
    if for_s is not None and (isinstance(for_s, bool) or not isinstance(for_s, int | float) or not 0 < for_s < 1e8):
        raise WireError("for_s is a number of seconds")
    return Command(asked["command"], for_s)


def ask(path: Path, command: Command) -> Iterator[Answer]:
    """The volunteer's end: what the peer answers, as it comes.

    FileNotFoundError or ConnectionRefusedError when no peer is there, WireError when it refuses, DeadlinePassed when it
    falls silent.
    """
    with socket.socket(socket.AF_UNIX) as connection, _short(path) as short:
        connection.settimeout(ANSWER_S)
        connection.connect(short)
        connection.sendall(_line({"command": command.name, "for_s": command.for_s}))
        with connection.makefile("rb") as lines:
            while line := _next(lines, path):
                answer = json.loads(line)
                if "error" in answer:
                    raise WireError(str(answer["error"]))
                connection.settimeout(ANSWER_S + float(answer["wait_s"]))
                yield Answer(str(answer["text"]), float(answer["wait_s"]))


def running(folder: Path) -> dict[Path, str]:
    """The sockets in a state directory behind which a peer lives, and what it says of itself."""
    found = {}
    for path in sorted(folder.glob("*.sock")):
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError, PermissionError, DeadlinePassed):
            found[path] = "; ".join(answer.text for answer in ask(path, Command("show")))
    return found


def _next(lines: BufferedReader, path: Path) -> bytes:
    """The next line; empty at the end."""
    try:
        return lines.readline(MAX_LINE_BYTES)
    except TimeoutError:
        raise DeadlinePassed(f"the peer behind {path} does not answer; end its process with Ctrl+C or SIGTERM") from None
    except ConnectionResetError:
        return b""


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _user_of(connection: socket.socket) -> int:
    """The user id at the other end, as the kernel knows it."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


def _listen(path: Path) -> socket.socket:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listening = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as short:
            before = os.umask(0o177)
            try:
                listening.bind(short)
            finally:
                os.umask(before)
        listening.listen(8)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


async def _accept(listening: socket.socket) -> socket.socket:
    while True:
        try:
            connection, _ = await asyncio.get_running_loop().sock_accept(listening)
        except OSError as error:  # too many open files, for example
            log.warning("a command cannot be heard: %s", error)
            await asyncio.sleep(PAUSE_S)
        else:
            return connection


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """Another name of the same place: the address of a socket has room for 107 bytes only."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
