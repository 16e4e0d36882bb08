"""Tasks of a peer's services: one that fails does not end the others, and none is begun when the service has ended."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from fusion_p2p.errors import StreamClosed
from fusion_p2p.peer.supervision import Supervisor


async def _work(done: list[str]) -> None:
    done.append("done")


async def _fault() -> None:
    raise ValueError("a fault of ours")


async def test_a_fault_is_told_and_the_others_go_on() -> None:
    supervisor, told, done = Supervisor(), [], []
    async with asyncio.TaskGroup() as group:
        supervisor.use(group)
        await supervisor.spawn(_fault(), told.append)
        await supervisor.spawn(_work(done))
    assert told == ["unexpected ValueError: a fault of ours"]
    assert done == ["done"]


async def test_a_service_that_has_ended_or_not_begun_begins_nothing() -> None:
    supervisor, done = Supervisor(), []
    with pytest.raises(StreamClosed, match="has not begun"):
        supervisor.spawn(_work(done))
    async with asyncio.TaskGroup() as group:
        supervisor.use(group)
    with pytest.raises(StreamClosed, match="does not run"):
        supervisor.spawn(_work(done))
    assert not done


async def test_a_task_that_is_cancelled_at_once_leaves_no_work_behind() -> None:
    supervisor, done = Supervisor(), []
    work = _work(done)
    async with asyncio.TaskGroup() as group:
        supervisor.use(group)
        supervisor.spawn(work).cancel()
    await asyncio.sleep(0)
    assert inspect.getcoroutinestate(work) == inspect.CORO_CLOSED
    assert not done
