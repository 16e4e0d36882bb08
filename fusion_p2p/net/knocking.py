"""Whether anything listens at an address, found out with a plain TCP connection before p2pd is told to dial it.

p2pd remembers a dial that failed: it refuses to repeat it for 5 s, and for minutes after some more, so a peer that came back
would not be found. And it waits 5 s for an address that swallows everything. A connection of ours is refused or not at once.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from fusion_p2p.net.addresses import is_relayed
from fusion_p2p.net.dialling import NAME_NOT_FOUND, NO_ANSWER, reason_of

STRAGGLERS_S = 0.1
"""After the first answer the other addresses get this much longer."""
BESIDE_S = 1.0
"""They get so long when there are others which only p2pd can try."""


@dataclass(frozen=True, slots=True)
class Knocked:
    """What came of it."""

    worth_dialling: tuple[str, ...]
    """Something listens there, or one cannot know: relayed ones and such that are not TCP."""
    reasons: dict[str, str]
    """Why the others are not."""


async def knock(dials: Sequence[str], timeout_s: float) -> Knocked:
    """Connect to all addresses at once, and wait for the first that answers or until none is left."""
    knocks = {asyncio.ensure_future(_connect(dial)): dial for dial in dials if _is_plain(dial)}
    reasons: dict[str, str] = {}
    clock = asyncio.get_running_loop().time
    deadline = clock() + (timeout_s if len(knocks) == len(dials) else min(timeout_s, BESIDE_S))
    pending = set(knocks)
    try:
        while pending:
            left_s = max(0.0, deadline - clock())
            done, pending = await asyncio.wait(pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                if reason := task.result():
                    reasons[knocks[task]] = reason
                else:
                    deadline = min(deadline, clock() + STRAGGLERS_S)
    finally:
        for task in knocks:
            task.cancel()
        if knocks:
            await asyncio.wait(knocks)
    silent = {knocks[task] for task in pending}
    reasons |= dict.fromkeys(silent, NO_ANSWER)
    return Knocked(tuple(dial for dial in dials if dial not in reasons), reasons)


def _is_plain(dial: str) -> bool:
    return dial.split("/")[3] == "tcp" and not is_relayed(dial)


def _reason(error: OSError) -> str:
    """In our words; asyncio has its own for the system's, and gathers those of all addresses of a name in one text."""
    number = error.errno or next(map(int, re.findall(r"\[Errno (\d+)\]", str(error))), None)
    return reason_of(os.strerror(number).lower() if number else str(error))


async def _connect(dial: str) -> str:
    """Empty when somebody answers, otherwise why not."""
    _, _, host, _, port, *_ = dial.split("/")
    try:
        _, writer = await asyncio.open_connection(host, int(port))
    except (socket.gaierror, UnicodeError):
        return NAME_NOT_FOUND
    except OSError as error:
        return _reason(error)
    writer.transport.abort()
    return ""
