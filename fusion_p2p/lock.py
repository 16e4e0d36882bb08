"""A file that at most one living process holds: the kernel lets go of it however the process ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from fusion_p2p.errors import ConfigError


class InUse(ConfigError):
    """Another living process holds the lock; the text names it."""


class FileLock:
    """An exclusive advisory lock on `path`, which holds the pid of its holder. Use as a context manager or call `release`."""

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock. InUse names `what` and the pid of its holder; ConfigError when `path` cannot be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{what}: cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 16).decode("ascii", "replace").strip() or "unknown"
            os.close(self._descriptor)
            raise InUse(f"{what} is in use by process {holder}") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others have it. Doing so twice is harmless."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
