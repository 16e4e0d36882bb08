"""What copies of slices cost a run at their default interval: 20 blocks of 10 steps, without and with copies in turn.

Three slices of 25 MB of parameters on loopback and two spares: peers, spares and owner share the cores of one machine, so that
whatever copying computes is paid for by training; a swarm of machines pays less.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

from contrib.benchmarks.alternating_owner import ASKED
from contrib.benchmarks.recovering import MODEL, SLICES, SPARES
from contrib.chaos.places import Loopback
from contrib.chaos.population import populated
from contrib.processes import ProgramFailed, python_module

BATCH = 64
"""Steps of two or three seconds: a block then takes about half of the default interval, as it is measured here."""
BLOCK = 10
PAIRS = 10
FIRST = 10
"""Steps before the blocks: the first ones take longer, and the first copies are made."""
REST = 2
STEPS = FIRST + 2 * PAIRS * BLOCK
LIMIT_S = 2400.0


def measure() -> dict[str, float]:
    """Train, and compare each block with copies with the one before; prints a line for each pair."""
    with tempfile.TemporaryDirectory(prefix="fusion-copying-") as name:
        run = Path(name) / "run"
        with populated(Loopback(), Path(name) / "peers", SLICES + SPARES) as population:
            arguments = [*MODEL, "--batch-size", str(BATCH), "--steps", str(STEPS), "--checkpoint-every", str(STEPS)]
            command = python_module(
                "contrib.benchmarks.alternating_owner", "--block", str(BLOCK), "--first", str(FIRST), "--rest", str(REST),
                "train", "--bootstrap", population.address, "--listen", "/ip4/127.0.0.1/tcp/0", "--no-nat", "--run", str(run),
                "--state-dir", str(Path(name) / "owner"), *arguments,
            )  # fmt: skip
            owner = population.place.start("owner", 0, command)
            try:
                code = owner.wait(LIMIT_S)
            finally:
                owner.end()
            if code:
                raise ProgramFailed(f"the run ended with exit code {code}:\n{owner.tail()}")
        asked = [int(step) for line in owner.lines for step in re.findall(rf"{ASKED} (\d+)", line)]
        return _figures(read_walls(run / "metrics.jsonl"), asked)


def read_walls(metrics: Path) -> dict[int, float]:
    """When each step ended."""
    return {line["step"]: line["wall_s"] for line in map(json.loads, metrics.read_text().splitlines())}


def _figures(walls: Mapping[int, float], asked: list[int]) -> dict[str, float]:
    ratios, copies, with_copies_s = [], [], 0.0
    for begin in range(FIRST, STEPS, 2 * BLOCK):
        without, with_copies = walls[begin + BLOCK] - walls[begin], walls[begin + 2 * BLOCK] - walls[begin + BLOCK]
        made = sum(begin + BLOCK < step <= begin + 2 * BLOCK for step in asked)
        ratios.append(with_copies / without - 1.0)
        copies.append(made)
        with_copies_s += with_copies
        print(f"10 steps: {without:.2f} s without, {with_copies:.2f} s with {made} copies: {ratios[-1]:+.1%}", flush=True)
    return {
        "snapshot_overhead": statistics.median(ratios),
        "snapshot_overhead_mean": statistics.fmean(ratios),
        "copies_per_block": statistics.fmean(copies),
        "copy_interval_s": with_copies_s / max(1, sum(copies)),
    }
