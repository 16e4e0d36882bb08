"""Swarms in virtual time under faults drawn from seeds: what they owe is in `tests.scenarios.playing`."""

from __future__ import annotations

import pytest

from tests.scenarios.playing import play_many

BLOCKS, SMALL, LARGE = 10, 50, 2


@pytest.mark.parametrize("block", range(BLOCKS))
@pytest.mark.row(11)
@pytest.mark.row(13)
@pytest.mark.timeout(240)
def test_nothing_that_peers_owe_each_other_breaks_under_faults(block: int) -> None:
    """500 swarms of 5 to 9 peers and 20 of 60."""
    outcomes = [*play_many(block * SMALL, SMALL, 5, 9), *play_many(block * LARGE, LARGE, 60, 60)]
    assert not [outcome.explain() for outcome in outcomes if outcome.broken]
