"""Runs one asyncio main function under the rules for signals: the first asks it to end, the second ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from typing import Any

LEAVE_WITHIN_S = 4.5
INTERRUPTED = 130


def run(main: Coroutine[Any, Any, int], *, stopped_code: int) -> int:
    """The exit code of `main`, or `stopped_code` when SIGINT or SIGTERM ended it.

    The first signal cancels `main`, which has LEAVE_WITHIN_S to leave cleanly; then, or on a second signal, the process ends
    at once, whatever its threads are doing. Child processes watch for that themselves.
    """
    return asyncio.run(_supervise(main, stopped_code))


async def _supervise(main: Coroutine[Any, Any, int], stopped_code: int) -> int:
    task = asyncio.ensure_future(main)
    stopping = Stopping(task, stopped_code)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.asked)
    try:
        return await task
    except asyncio.CancelledError:
        if stopping.requested:
            return stopped_code
        raise


class Stopping:
    """What a process does when it is asked to stop."""

    def __init__(self, task: asyncio.Future[int], exit_code: int) -> None:
        self.requested = False
        self._task = task
        self._exit_code = exit_code

    def asked(self) -> None:
        """A signal arrived."""
        if self.requested:
            leave_now(self._exit_code)
        self.requested = True
        # A thread, not a timer of the loop: it fires even when the loop or a worker thread is stuck.
        last_call = threading.Timer(LEAVE_WITHIN_S, leave_now, (self._exit_code,))
        last_call.daemon = True
        last_call.start()
        self._task.cancel()


def leave_now(exit_code: int) -> None:
    """End this process without waiting for anything."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
