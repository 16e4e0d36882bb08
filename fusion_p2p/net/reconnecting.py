"""Streams that are opened anew when they break: a relay's limit or a daemon's restart is a pause, not a death."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

from fusion_p2p.errors import NetworkError, StreamClosed
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream, Transport

log = logging.getLogger(__name__)

RECONNECT_S = 8.0
"""A peer that cannot be reached again for so long is lost. p2pd itself waits 5 s before it dials a failed address again."""
MAX_RESETS = 8
"""A peer that closes a stream this often within RECONNECT_S does not want it."""


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


async def keep_open(transport: Transport, peer: PeerId, protocol: str, use: Callable[[Stream], Awaitable[None]]) -> NoReturn:
    """Open a stream and use it until it is reset, again and again. NetworkError when the peer is lost; what `use` raises."""
    clock = asyncio.get_running_loop().time
    resets: deque[float] = deque([-RECONNECT_S] * MAX_RESETS, maxlen=MAX_RESETS)
    while clock() - resets[0] > RECONNECT_S:
        await use(await open_patiently(transport, peer, protocol))
        log.info("stream reset peer=%s protocol=%s, opening it again", peer, protocol)
        resets.append(clock())
    raise StreamClosed(f"{peer} closed its {protocol} stream {MAX_RESETS} times within {RECONNECT_S:g} s")


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
