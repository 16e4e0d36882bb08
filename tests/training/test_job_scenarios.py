"""Runs in simulated swarms under faults drawn from seeds: what they owe is in `tests.scenarios.jobs`."""

from __future__ import annotations

import pytest

from tests.scenarios.jobs import play_jobs

BLOCKS, EACH = 4, 8


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.row(12)
@pytest.mark.timeout(240)
def test_a_run_keeps_every_bit_whatever_happens_to_its_peers(block: int) -> None:
    assert not [outcome.explain() for outcome in play_jobs(block * EACH, EACH) if outcome.broken]
