"""A compute thread of virtual time: calls run one after another on the event loop, each after some time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from fusion_p2p.execute.compute import ComputeThread


class VirtualThread(ComputeThread):
    """Has no thread. Every call takes between 0 and `longest_s`, drawn from `rng`; its work is done at the end of that."""

    def __init__(self, rng: random.Random, longest_s: float) -> None:
        self._rng = rng
        self._longest_s = longest_s
        self._free_at = 0.0

    def submit(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        loop = asyncio.get_running_loop()
        self._free_at = max(self._free_at, loop.time()) + self._rng.uniform(0, self._longest_s)

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = call(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - belongs to whoever waits for the future
                future.set_exception(error)
            else:
                future.set_result(result)

        loop.call_at(self._free_at, work)
        return future

    def close(self, timeout_s: float = 2.0) -> bool:
        return True
