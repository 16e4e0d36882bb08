"""How much of a month's traffic is used up: a file in the state directory for each peer of this machine.

    traffic-NAME.json    {"month": "2026-11", "bytes": 12345678}

A peer writes its own file only; all of them together are what the volunteer's line has carried in that month.
"""

from __future__ import annotations

import json
import logging
import os
from datetime import datetime
from pathlib import Path

from fusion_p2p.net.metering import Meter

log = logging.getLogger(__name__)


class MonthlyTraffic:
    """Counts one peer's bytes by calendar month, over restarts."""

    def __init__(self, folder: Path, name: str, meter: Meter, now: datetime) -> None:
        """`name` tells the peers of a machine apart; `meter` counts since the start of the process."""
        self._path = folder / f"traffic-{name}.json"
        self._meter = meter
        self._metered = meter.num_bytes
        self._month = _month(now)
        self._bytes = _bytes_in(self._path, self._month)

    def count(self, now: datetime) -> int:
        """Bytes of this month, of all peers of this machine; keeps our own part of it.

        Whatever interrupts that leaves the old count or the new one.
        """
        if _month(now) != self._month:
            self._month, self._bytes = _month(now), 0
        metered = self._meter.num_bytes
        self._bytes, self._metered = self._bytes + metered - self._metered, metered
        part = self._path.with_suffix(".part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"month": self._month, "bytes": self._bytes}), encoding="ascii")
            os.replace(part, self._path)
        except OSError as error:
            log.warning("this month's traffic is not kept: cannot write %s: %s", self._path, error.strerror)
        others = (path for path in self._path.parent.glob("traffic-*.json") if path != self._path)
        return self._bytes + sum(_bytes_in(path, self._month) for path in others)


def _month(now: datetime) -> str:
    return f"{now:%Y-%m}"


def _bytes_in(path: Path, month: str) -> int:
    """What a file counts for this month: nothing when it is of another one, or not there."""
    try:
        count = json.loads(path.read_text(encoding="ascii"))
        return max(0, int(count["bytes"])) if count["month"] == month else 0
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s does not say how much traffic there was: %s", path, error)
        return 0
