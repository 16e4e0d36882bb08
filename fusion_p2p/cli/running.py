"""Runs one asyncio main function under the rules for signals: the first asks it to end, another one ends it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

LEAVE_WITHIN_S = 4.2
INTERRUPTED = 130


def nothing_to_hand_over() -> float:
    """Of a process on which nobody depends."""
    return 0.0


def run(main: Coroutine[Any, Any, int], *, stopped_code: int, drain: Callable[[], float] = nothing_to_hand_over) -> int:
    """The exit code of `main`, or `stopped_code` when SIGINT or SIGTERM ended it.

    The first signal asks `drain` for how many seconds `main` has something to hand over before it returns by itself. When
    there is nothing, when that time is over, or at the next signal, `main` is cancelled and has LEAVE_WITHIN_S to leave
    cleanly; then, or on another signal, the process ends at once, whatever its threads are doing. Child processes watch for
    that themselves.
    """
    stopping = Stopping(stopped_code, drain)
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

    def __init__(self, exit_code: int, drain: Callable[[], float]) -> None:
        self.exit_code = exit_code
        self._drain = drain
        self._leaving = False
        self._patience: asyncio.TimerHandle | None = None
        self._last_call: threading.Timer | None = None
        self.requested = False

    def asked(self, task: asyncio.Future[int]) -> None:
        """A signal arrived."""
        if self._leaving:
            leave_now(self.exit_code)
        drain_s = 0.0 if self.requested else self._drain()
        self.requested = True
        if drain_s:
            self._patience = asyncio.get_running_loop().call_later(drain_s, self._leave, task)
            self._end_after(drain_s + LEAVE_WITHIN_S)
        else:
            self._leave(task)

    def over(self) -> None:
        """The loop has ended, with all that ran in it."""
        if self._last_call is not None:
            self._last_call.cancel()

    def _leave(self, task: asyncio.Future[int]) -> None:
        if self._patience is not None:
            self._patience.cancel()
        self._leaving = True
        self._end_after(LEAVE_WITHIN_S)
        task.cancel()

    def _end_after(self, seconds: float) -> None:
        """A thread, not a timer of the loop: it fires even when the loop or a worker thread is stuck."""
        self.over()
        self._last_call = threading.Timer(seconds, leave_now, (self.exit_code,))
        self._last_call.daemon = True
        self._last_call.start()


def leave_now(exit_code: int) -> NoReturn:
    """End this process without waiting for anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(exit_code)
