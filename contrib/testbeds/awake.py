"""Processors that never rest, without taking time from anybody: tasks take equally long however idle the machine is.

Emulated peers mostly sleep. A processor that rests in between wakes up slowly and with a low clock, so tasks of a plan whose
peers wait for links would take up to half as long again as those of one whose peers are busy.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

SPIN = """
import os
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = os.getppid()
while os.getppid() == parent:
    sum(range(100_000))
"""
"""Runs only when nothing else wants the processor, and not longer than whoever started it."""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Keep all processors of this machine busy at the lowest priority there is. Linux."""
    count = len(os.sched_getaffinity(0))
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
