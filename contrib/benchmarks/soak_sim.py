"""`make soak-sim`: the real swarm code on the simulated network: 20,000 small swarms, 200 large ones, 500 runs, 1,000 peers.

Each scenario draws its faults from its seed; one that breaks an invariant prints the line that plays it again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator

from contrib.benchmarks.report import print_figures, write_figures
from tests.scenarios.crowd import crowd
from tests.scenarios.jobs import play_jobs
from tests.scenarios.playing import play_many

TARGET = "soak-sim"
BLOCK = 20
SMALL, LARGE, JOBS = 20_000, 200, 500
SMALL_PEERS, LARGE_PEERS, OF_A_JOB = (5, 9), (60, 60), (0, 0)
CROWD = 1_000
SAID_EVERY = 50


def scenarios(small: int, large: int, jobs: int, first: int) -> dict[str, float]:
    """Scenarios played and broken; the seconds until a swarm had settled after its last fault."""
    began, played, broken, slowest = time.monotonic(), 0, 0, 0.0
    blocks = [
        *_blocks(first, small, *SMALL_PEERS, BLOCK),
        *_blocks(first, large, *LARGE_PEERS, 1),
        *_blocks(first, jobs, *OF_A_JOB, BLOCK),
    ]
    # New processes, all with the same order of sets: a seed then means the same everywhere.
    os.environ["PYTHONHASHSEED"] = "0"
    with multiprocessing.get_context("spawn").Pool() as pool:
        for number, outcomes in enumerate(pool.imap_unordered(_play, blocks), start=1):
            played += len(outcomes)
            broken += sum(bad for bad, _ in outcomes)
            slowest = max(slowest, *(settled_s for _, settled_s in outcomes))
            if number % SAID_EVERY == 0:
                print(f"  {played} scenarios, {broken} broken, {time.monotonic() - began:.0f} s", flush=True)
    return {"scenarios": played, "broken": broken, "settled_seconds_max": slowest, "soak_seconds": time.monotonic() - began}


def crowds(num_peers: int) -> dict[str, float]:
    """A crowd of peers that start within seconds: when all see each other, and the traffic of each."""
    seen = crowd(num_peers)
    for line in seen.broken:
        print(f"  {line}")
    return {
        "simulated_peers": num_peers,
        "simulated_broken": len(seen.broken),
        "simulated_seconds_to_see_all": seen.seconds_to_see_all,
        "beat_bytes_per_s": seen.peer_bytes_per_s,
        "coordinator_bytes_per_s": seen.coordinator_bytes_per_s,
        "directory_bytes_per_s": seen.directory_bytes_per_s,
    }


def _blocks(first: int, count: int, fewest: int, most: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    for start in range(first, first + count, size):
        yield start, min(size, first + count - start), fewest, most


def _play(block: tuple[int, int, int, int]) -> list[tuple[bool, float]]:
    first, count, *peers = block
    if tuple(peers) == OF_A_JOB:
        return [(bool(outcome.broken), 0.0) for outcome in play_jobs(first, count)]
    return [(bool(outcome.broken), outcome.settled_s) for outcome in play_many(*block)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make soak-sim", description=__doc__)
    parser.add_argument("--only", choices=("scenarios", "crowd"))
    parser.add_argument("--small", type=int, default=SMALL, help="scenarios of 5 to 9 peers")
    parser.add_argument("--large", type=int, default=LARGE, help="scenarios of 60 peers")
    parser.add_argument("--jobs", type=int, default=JOBS, help="scenarios of a run over 4 to 8 peers")
    parser.add_argument("--crowd", type=int, default=CROWD, help="simulated peers at once")
    parser.add_argument("--first", type=int, default=1_000_000, help="the first seed; CI plays those from 0")
    arguments = parser.parse_args()
    sections: dict[str, Callable[[], dict[str, float]]] = {
        "scenarios": lambda: scenarios(arguments.small, arguments.large, arguments.jobs, arguments.first),
        "crowd": lambda: crowds(arguments.crowd),
    }
    good = True
    for name, section in sections.items():
        if arguments.only in (None, name):
            figures = section()
            write_figures(TARGET, figures)
            good &= print_figures(f"{TARGET}: {name}", figures)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
