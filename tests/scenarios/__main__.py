"""Plays one scenario again and tells what happened: python -m tests.scenarios SEED --peers 5-9"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from tests.scenarios.jobs import JobOutcome, draw_job, play_job
from tests.scenarios.playing import Outcome, play, reproducible


class _InVirtualTime(logging.Formatter):
    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        try:
            return f"{asyncio.get_running_loop().time():8.2f}"
        except RuntimeError:
            return "        "


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.scenarios", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("--peers", default="5-9", help="how many at the start: a number or a range")
    parser.add_argument("--job", action="store_true", help="a scenario of a run instead of a swarm")
    parser.add_argument("--verbose", action="store_true", help="every decision of every peer")
    arguments = parser.parse_args()
    if not reproducible():
        os.execve(
            sys.executable, [sys.executable, "-m", "tests.scenarios", *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"}
        )
    if arguments.verbose:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_InVirtualTime("%(asctime)s %(name)s %(message)s"))
        logging.basicConfig(level=logging.DEBUG, handlers=[handler])
    outcome: Outcome | JobOutcome
    if arguments.job:
        outcome = play_job(draw_job(arguments.seed))
    else:
        fewest, _, most = arguments.peers.partition("-")
        outcome = play(arguments.seed, int(fewest), int(most or fewest))
    print(outcome.scenario)
    print("\n".join(outcome.log))
    print("\n".join(outcome.broken) or "nothing broken")
    return int(bool(outcome.broken))


if __name__ == "__main__":
    sys.exit(main())
