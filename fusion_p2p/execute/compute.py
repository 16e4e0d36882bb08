"""Threads that run torch: one of a process computes, because seeds and thread counts are process-wide; another may code."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Task(Generic[R]):
    future: Future[R]
    call: Callable[[], R]

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the future, as in concurrent.futures
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class ComputeThread:
    """Runs calls one after another in the order they came.

    A daemon thread: a kernel that will not end cannot keep the process alive, which `concurrent.futures` would let it.
    """

    def __init__(self, num_threads: int | None = None, name: str = "compute") -> None:
        """`num_threads` is for torch's kernels; None leaves the process's own choice."""
        self._num_threads = num_threads
        self._tasks: queue.SimpleQueue[_Task[object] | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run `call(*args, **kwargs)` after all earlier calls. RuntimeError after `close`."""
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the compute thread is closed")
            self._tasks.put(_Task(future, lambda: call(*args, **kwargs)))  # type: ignore[arg-type]
        return future

    def close(self, timeout_s: float = 2.0) -> bool:
        """Cancel what has not begun and wait for what has; False when that is still running after `timeout_s`."""
        with self._lock:
            self._closed = True
            self._cancel_waiting()
            self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _cancel_waiting(self) -> None:
        while not self._tasks.empty():
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                return
            if task is not None:
                task.future.cancel()

    def _work(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        while (task := self._tasks.get()) is not None:
            task.run()
