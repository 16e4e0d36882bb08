"""Runs one asyncio main function under the rules for signals: the first asks it to end, the second ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any, NoReturn

LEAVE_WITHIN_S = 4.2
INTERRUPTED = 130


def run(main: Coroutine[Any, Any, int], *, stopped_code: int) -> int:
    """The exit code of `main`, or `stopped_code` when SIGINT or SIGTERM ended it.

    The first signal cancels `main`, which has LEAVE_WITHIN_S to leave cleanly; then, or on a second signal, the process ends
    at once, whatever its threads are doing. Child processes watch for that themselves.
    """
    stopping = Stopping(stopped_code)
    try:
        return asyncio.run(_supervise(main, stopping))
    finally:
        stopping.over()


async def _supervise(main: Coroutine[Any, Any, int], stopping: Stopping) -> int:
    task = asyncio.ensure_future(main)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.asked, task)
    try:
        return await task
    except asyncio.CancelledError:
        if stopping.requested:
            return stopping.exit_code
        raise


class Stopping:
    """What a process does when it is asked to stop."""

    def __init__(self, exit_code: int) -> None:
        self.exit_code = exit_code
        # A thread, not a timer of the loop: it fires even when the loop or a worker thread is stuck.
        self._last_call = threading.Timer(LEAVE_WITHIN_S, leave_now, (exit_code,))
        self._last_call.daemon = True
        self.requested = False

    def asked(self, task: asyncio.Future[int]) -> None:
        """A signal arrived."""
        if self.requested:
            leave_now(self.exit_code)
        self.requested = True
        self._last_call.start()
        task.cancel()

    def over(self) -> None:
        """The loop has ended, with all that ran in it."""
        self._last_call.cancel()


def leave_now(exit_code: int) -> NoReturn:
    """End this process without waiting for anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(exit_code)
