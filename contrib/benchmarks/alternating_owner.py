"""`fusion-peer train` that has copies of its slices made in every other block of steps only.

    python -m contrib.benchmarks.alternating_owner --block 10 --first 20 --rest 2 train --bootstrap ...

After `first` steps, blocks without copies and blocks with them take turns; within the latter copies are made as usual, but none
is begun in the last `rest` steps, so that nothing of it is still under way in the next block.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

ASKED = "copy asked for after step"


def allows(step: int, *, block: int, first: int, rest: int) -> bool:
    """Whether a copy may be begun after this step."""
    number, place = divmod(step - first - 1, block)
    return step <= first or (number % 2 == 1 and place < block - rest)


def alternating(wants_copy: Callable[..., bool], block: int, first: int, rest: int) -> Callable[..., bool]:
    """`Guards.wants_copy`, asked only where that is allowed; says when it was granted."""

    @functools.wraps(wants_copy)
    def call(guards: Any, step: int) -> bool:
        granted = allows(step, block=block, first=first, rest=rest) and wants_copy(guards, step)
        if granted:
            print(f"{ASKED} {step}", flush=True)
        return granted

    return call


def main() -> None:
    """Alternate, then be `fusion-peer` with the rest of the command line."""
    parser = argparse.ArgumentParser(prog="python -m contrib.benchmarks.alternating_owner", allow_abbrev=False)
    parser.add_argument("--block", type=int, required=True, help="steps of a block")
    parser.add_argument("--first", type=int, required=True, help="steps before the first block")
    parser.add_argument("--rest", type=int, required=True, help="steps at the end of a block in which no copy is begun")
    given, rest = parser.parse_known_args()
    from fusion_p2p.owner.guards import Guards

    Guards.wants_copy = alternating(Guards.wants_copy, given.block, given.first, given.rest)  # type: ignore[method-assign]
    from fusion_p2p.cli.main import main as fusion_peer

    fusion_peer(rest)


if __name__ == "__main__":
    main()
