"""`fusion-peer train` that has copies of its slices made in every other block of steps only.

    python -m contrib.benchmarks.alternating_owner --block 10 --first 20 --rest 2 train --bootstrap ...

After `first` steps, blocks without copies and blocks with them take turns; within the latter copies are made as usual, but none
is begun in the last `rest` steps, so that nothing of it is still under way in the next block. In blocks without copies time
stands still for who decides when one is due: otherwise what had come due meanwhile would be made up for in the next block, and
blocks with copies would have more of them than a run at the default interval has in as many steps.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, ClassVar

from fusion_p2p.clock import SystemClock
from fusion_p2p.owner import guards
from fusion_p2p.owner.guards import Guards

ASKED = "copy asked for after step"


@dataclass(frozen=True, slots=True)
class Blocks:
    """Which steps are in which block: `first` steps with copies, then blocks without and with them in turn."""

    block: int
    first: int
    rest: int

    def has_copies(self, step: int) -> bool:
        """Whether a step is in a block with copies."""
        return step <= self.first or (step - self.first - 1) // self.block % 2 == 1

    def allow(self, step: int) -> bool:
        """Whether a copy may be begun after this step."""
        ends_soon = (step - self.first - 1) % self.block >= self.block - self.rest
        return self.has_copies(step) and (step <= self.first or not ends_soon)


class StandingClock(SystemClock):
    """A clock that can be told to stand still."""

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._stands_at: float | None = None

    def now(self) -> float:
        """Seconds, without those for which it stood still."""
        return (super().now() if self._stands_at is None else self._stands_at) - self._stood_s

    def stand(self, still: bool) -> None:
        """From now on it stands still, or goes on."""
        now = super().now()
        if still and self._stands_at is None:
            self._stands_at = now
        elif not still and self._stands_at is not None:
            self._stood_s += now - self._stands_at
            self._stands_at = None


class AlternatingGuards(Guards):
    """Has copies made in every other block, and says when one is asked for."""

    blocks: ClassVar[Blocks]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._clock = self._standing = StandingClock()

    def wants_copy(self, step: int) -> bool:
        granted = self.blocks.allow(step) and super().wants_copy(step)
        if granted:
            print(f"{ASKED} {step}", flush=True)
        self._standing.stand(not self.blocks.has_copies(step + 1))
        return granted


def main() -> None:
    """Alternate, then be `fusion-peer` with the rest of the command line."""
    parser = argparse.ArgumentParser(prog="python -m contrib.benchmarks.alternating_owner", allow_abbrev=False)
    parser.add_argument("--block", type=int, required=True, help="steps of a block")
    parser.add_argument("--first", type=int, required=True, help="steps before the first block")
    parser.add_argument("--rest", type=int, required=True, help="steps at the end of a block in which no copy is begun")
    given, rest = parser.parse_known_args()
    AlternatingGuards.blocks = Blocks(given.block, given.first, given.rest)
    guards.Guards = AlternatingGuards  # type: ignore[misc]
    from fusion_p2p.cli.main import main as fusion_peer

    fusion_peer(rest)


if __name__ == "__main__":
    main()
