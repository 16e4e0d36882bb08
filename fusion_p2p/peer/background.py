"""Work that goes on beside a body of code, in its task group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def beside(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` while the body runs; the first error of either ends both and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
            yield
            for task in running:
                task.cancel()
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
