"""Processors that never rest, without taking time from anybody: tasks take equally long however idle the machine is.

Emulated peers mostly sleep. A task that has the machine to itself is done up to twice as fast as one beside others, because two
processors of a virtual machine may be halves of one, and because a processor that has rested is cold. Real peers have a device
of their own. So what is idle here computes, too: then every task has the same company, whatever the plan.
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
import numpy
parent, matrix = os.getppid(), numpy.full((192, 192), 1 / 192, numpy.float32)
while os.getppid() == parent:
    for _ in range(100):
        matrix = matrix @ matrix
"""
"""Runs only when nothing else wants the processor, and not longer than whoever started it."""


@contextlib.contextmanager
def awake() -> Iterator[None]:
    """Keep all processors of this machine busy at the lowest priority there is. Linux."""
    count = len(os.sched_getaffinity(0))
    alone = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN], env=alone) for _ in range(count)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
