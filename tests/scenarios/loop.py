"""An event loop of virtual time in which a host can be paused: what runs in its context stands still meanwhile.

Nothing here waits for the outside, so when nothing is left to run the clock jumps to the next timer.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import async_solipsism

from fusion_p2p.net.memory_pipe import Pipe

TICK_S = 1e-5
"""Timers fall due at multiples of this, so that sums of floats that mean the same time are the same."""


@dataclass(eq=False)
class Pausable:
    """A process: its callbacks are those that were scheduled in its context."""

    paused: bool = False
    held: list[asyncio.Handle] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.context = contextvars.copy_context()
        self.context.run(_PROCESS.set, self)

    def pause(self) -> None:
        if not self.paused:
            self.paused = True
            _running_loop().num_paused += 1

    def resume(self) -> None:
        """What fell due meanwhile runs now, in the order in which it fell due, unless somebody cancels it first."""
        if self.paused:
            self.paused = False
            _running_loop().num_paused -= 1
            held, self.held = self.held, []
            _running_loop().run_again(held)


_PROCESS: contextvars.ContextVar[Pausable | None] = contextvars.ContextVar("process", default=None)


def _holds(handle: asyncio.Handle) -> bool:
    """Keep a callback of a paused process for later. What is on the wire arrives though its sender has been stopped."""
    process = handle._context.get(_PROCESS)  # type: ignore[attr-defined]
    if process is None or not process.paused or isinstance(getattr(handle._callback, "__self__", None), Pipe):  # type: ignore[attr-defined]
        return False
    process.held.append(handle)
    return True


class _Handle(asyncio.Handle):
    """A callback, without what asyncio keeps for its debug mode."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: PausableLoop, context: contextvars.Context | None) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = contextvars.copy_context() if context is None else context
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: PausableLoop, context: contextvars.Context | None) -> None:
        _Handle.__init__(self, callback, args, loop, context)  # type: ignore[arg-type]
        self._when, self._scheduled = when, False


class PausableLoop(async_solipsism.EventLoop):  # type: ignore[misc]
    """Virtual time, with processes that can be paused. It has no sockets, so it looks for none."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self.num_paused = 0

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        when = math.ceil(when / TICK_S) * TICK_S
        timer = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is skipped when it falls due."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._timers
        if not ready:
            self._skip_to_the_next_timer()
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled and not (self.num_paused and _holds(handle)):
                handle._run()

    def _skip_to_the_next_timer(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise async_solipsism.SleepForeverError("nothing is left to run, and nothing will ever be")
        self._now = max(self._now, timers[0][0])

    def run_again(self, handles: Iterable[asyncio.Handle]) -> None:
        self._ready.extend(handle for handle in handles if not handle.cancelled())


def _running_loop() -> PausableLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, PausableLoop)
    return loop
