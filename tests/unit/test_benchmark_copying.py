"""The blocks in which the benchmark lets copies be made."""

from __future__ import annotations

from contrib.benchmarks.alternating_owner import allows


def test_blocks_take_turns_and_nothing_reaches_into_the_next() -> None:
    allowed = [step for step in range(1, 65) if allows(step, block=10, first=20, rest=2)]
    assert allowed == [*range(1, 21), *range(31, 39), *range(51, 59)]
