"""The blocks in which the benchmark lets copies be made, and the clock by which they come due."""

from __future__ import annotations

import pytest

from contrib.benchmarks.alternating_owner import Blocks, StandingClock
from fusion_p2p.clock import SystemClock


def test_blocks_take_turns_and_nothing_reaches_into_the_next() -> None:
    blocks = Blocks(block=10, first=20, rest=2)
    assert [step for step in range(1, 65) if blocks.allow(step)] == [*range(1, 21), *range(31, 39), *range(51, 59)]
    assert [step for step in range(1, 65) if blocks.has_copies(step)] == [*range(1, 21), *range(31, 41), *range(51, 61)]


def test_a_copy_comes_no_nearer_while_blocks_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = 100.0
    monkeypatch.setattr(SystemClock, "now", lambda _: real)
    clock = StandingClock()
    real, before = 130.0, clock.now()
    assert (before, clock.now()) == (100.0, 130.0)
    clock.stand(still=True)
    real = 190.0
    clock.stand(still=True)
    assert clock.now() == 130.0
    clock.stand(still=False)
    real = 200.0
    clock.stand(still=False)
    assert clock.now() == 140.0
