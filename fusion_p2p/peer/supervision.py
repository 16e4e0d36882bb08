"""Tasks of a peer's services: a fault of ours in one of them must not take the volunteer's process with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


class Supervisor:
    """Runs tasks in a group. One that ends by an unexpected error is logged, and `failed` is told why; the others go on."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    def use(self, group: asyncio.TaskGroup) -> None:
        """Run tasks in this group from now on."""
        self._group = group

    def spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[str], None] = lambda reason: None) -> asyncio.Task[None]:
        """Begin a task. RuntimeError when its service does not run."""
        if self._group is None:
            work.close()
            raise RuntimeError("the service does not run")
        return self._group.create_task(_supervised(work, failed))


async def _supervised(work: Coroutine[Any, Any, None], failed: Callable[[str], None]) -> None:
    try:
        await work
    except Exception as error:
        log.exception("a task ended by an unexpected error")
        failed(f"unexpected {type(error).__name__}: {error}"[:1000])
