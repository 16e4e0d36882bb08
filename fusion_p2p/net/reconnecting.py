"""Streams that are opened anew when they break: a relay's limit or a daemon's restart is a pause, not a death."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fusion_p2p.errors import NetworkError, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport

RECONNECT_S = 6.0
"""A peer that cannot be reached again for so long is lost. p2pd itself waits 5 s before it dials a failed address again."""


async def open_patiently(transport: Transport, peer: PeerId, protocol: str, patience_s: float = RECONNECT_S) -> Stream:
    """Open a stream, trying again with growing, jittered pauses. The last NetworkError when the patience is over."""
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + patience_s, 0.05
    while True:
        try:
            return await transport.open(peer, protocol, timeout_s=max(deadline - loop.time(), 0.5))
        except NetworkError:
            if loop.time() + pause >= deadline:
                raise
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(pause * 2, 1.0)


async def until_reset(close: Callable[[], Awaitable[None]], *halves: Coroutine[Any, Any, None]) -> None:
    """Run the speaking and the listening half of a stream until it is reset, then close it. Other errors are raised."""
    tasks = [asyncio.ensure_future(half) for half in halves]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    except StreamClosed:
        return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await close()
