"""Tasks of a peer's services: a fault of ours in one of them must not take the volunteer's process with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fusion_p2p.errors import StreamClosed

log = logging.getLogger(__name__)


class Supervisor:
    """Runs tasks in a group. One that ends by an unexpected error is logged, and `failed` is told why; the others go on."""

    def __init__(self) -> None:
        self._group: asyncio.TaskGroup | None = None

    def use(self, group: asyncio.TaskGroup) -> None:
        """Run tasks in this group from now on."""
        self._group = group

    def spawn(self, work: Coroutine[Any, Any, None], failed: Callable[[str], None] = lambda reason: None) -> asyncio.Task[None]:
        """Begin a task. StreamClosed when the service does not run any more: who asked for it is not served either."""
        supervised = _supervised(work, failed)
        try:
            if self._group is None:
                raise RuntimeError("it has not begun")
            task = self._group.create_task(supervised)
        except RuntimeError as error:
            work.close()
            supervised.close()
            raise StreamClosed(f"the service does not run: {error}") from None
        task.add_done_callback(lambda _: work.close())  # a task that is cancelled at once never began its work
        return task


async def _supervised(work: Coroutine[Any, Any, None], failed: Callable[[str], None]) -> None:
    try:
        await work
    except Exception as error:
        log.exception("a task ended by an unexpected error")
        failed(f"unexpected {type(error).__name__}: {error}"[:1000])
