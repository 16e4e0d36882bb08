"""Processors that are kept awake, at the lowest priority and not a moment longer."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from contrib.testbeds.awake import awake

DEADLINE_S = 10.0


def spinners() -> set[int]:
    """Children of this process that run at the lowest priority."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(child) for child in children if os.sched_getscheduler(int(child)) == os.SCHED_IDLE}


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux only")
def test_every_processor_is_kept_busy_until_the_block_ends() -> None:
    wanted, deadline = len(os.sched_getaffinity(0)), time.monotonic() + DEADLINE_S
    with awake():
        while len(found := spinners()) < wanted and time.monotonic() < deadline:
            os.sched_yield()
        assert len(found) == wanted
    assert not spinners()
