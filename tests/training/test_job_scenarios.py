"""Runs in simulated swarms under faults drawn from seeds: what they owe is in `tests.scenarios.jobs`."""

from __future__ import annotations

import sys

import pytest

from tests.scenarios.jobs import draw_job, play_job

BLOCKS, EACH = 4, 6


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.row(12)
@pytest.mark.timeout(240)
def test_a_run_keeps_every_bit_whatever_happens_to_its_peers(block: int) -> None:
    outcomes = [play_job(draw_job(seed)) for seed in range(block * EACH, (block + 1) * EACH)]
    broken = [outcome.explain() for outcome in outcomes if outcome.broken]
    for line in broken:
        print(line, file=sys.stderr)
    assert not broken
