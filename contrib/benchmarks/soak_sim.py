"""`make soak-sim`: the real swarm code on the simulated network: 20,000 small swarms, 200 large ones, 500 runs, 1,000 peers.

Each scenario draws its faults from its seed; one that breaks an invariant prints the line that plays it again. What was
played is kept, so a soak that was interrupted goes on where it was, unless the code has changed meanwhile.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from contrib.benchmarks.report import RESULTS, print_figures, write_figures
from tests.scenarios.crowd import crowd
from tests.scenarios.jobs import play_jobs
from tests.scenarios.playing import play_many

TARGET = "soak-sim"
BLOCK = 20
SMALL, LARGE, JOBS = 20_000, 200, 500
SMALL_PEERS, LARGE_PEERS, OF_A_JOB = (5, 9), (60, 60), (0, 0)
CROWD = 1_000
SAID_EVERY = 50
PLAYED = RESULTS / "soak-sim.jsonl"
ROOT = Path(__file__).resolve().parents[2]

Block = tuple[int, int, int, int]
"""The first seed and how many of them; the fewest and the most peers."""
Outcomes = list[tuple[bool, float]]
"""Of each scenario, whether it broke something, and the seconds until its swarm had settled."""


def scenarios(small: int, large: int, jobs: int, first: int) -> dict[str, float]:
    """Scenarios played and broken; the seconds until a swarm had settled after its last fault."""
    began, played, broken, slowest, cpu_seconds = time.monotonic(), 0, 0, 0.0, 0.0
    blocks = [
        *_blocks(first, small, *SMALL_PEERS, BLOCK),
        *_blocks(first, large, *LARGE_PEERS, 1),
        *_blocks(first, jobs, *OF_A_JOB, BLOCK),
    ]
    for number, (outcomes, seconds) in enumerate(_outcomes(blocks), start=1):
        played += len(outcomes)
        broken += sum(bad for bad, _ in outcomes)
        slowest = max(slowest, *(settled_s for _, settled_s in outcomes))
        cpu_seconds += seconds
        if number % SAID_EVERY == 0:
            print(f"  {played} scenarios, {broken} broken, {time.monotonic() - began:.0f} s", flush=True)
    return {"scenarios": played, "broken": broken, "settled_seconds_max": slowest, "soak_cpu_seconds": cpu_seconds}


def _outcomes(blocks: list[Block]) -> Iterator[tuple[Outcomes, float]]:
    """What became of each block, and the seconds of processor time it took: those played before first, then the others."""
    made_of = _made_of()
    before = {block: (outcomes, seconds) for block, outcomes, seconds in _played(made_of)}
    yield from (before[block] for block in blocks if block in before)
    # New processes, all with the same order of sets: a seed then means the same everywhere.
    os.environ["PYTHONHASHSEED"] = "0"
    PLAYED.parent.mkdir(exist_ok=True)
    with multiprocessing.get_context("spawn").Pool() as pool, PLAYED.open("a") as file:
        for block, outcomes, seconds in pool.imap_unordered(_play, [block for block in blocks if block not in before]):
            print(json.dumps([made_of, block, outcomes, seconds]), file=file, flush=True)
            yield outcomes, seconds


def _played(made_of: str) -> Iterator[tuple[Block, Outcomes, float]]:
    """The blocks that were played by this code."""
    lines = PLAYED.read_text().splitlines() if PLAYED.exists() else []
    for code, block, outcomes, seconds in map(json.loads, lines):
        if code == made_of:
            yield tuple(block), outcomes, seconds


def _made_of() -> str:
    """A digest of the code that a scenario runs."""
    files = {Path(file) for module in sys.modules.values() if (file := getattr(module, "__file__", None))}
    ours = sorted(file for file in files if file.is_relative_to(ROOT / "fusion_p2p") or file.is_relative_to(ROOT / "tests"))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in ours), digest_size=16).hexdigest()


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


def _blocks(first: int, count: int, fewest: int, most: int, size: int) -> Iterator[Block]:
    for start in range(first, first + count, size):
        yield start, min(size, first + count - start), fewest, most


def _play(block: Block) -> tuple[Block, Outcomes, float]:
    began = time.process_time()
    first, count, *peers = block
    if tuple(peers) == OF_A_JOB:
        outcomes = [(bool(outcome.broken), 0.0) for outcome in play_jobs(first, count)]
    else:
        outcomes = [(bool(outcome.broken), outcome.settled_s) for outcome in play_many(*block)]
    return block, outcomes, time.process_time() - began


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
