"""`make bench-main`: what the product must hold, measured on real processes; every section can run alone (`--only NAME`)."""

from __future__ import annotations

import sys

from contrib.benchmarks.sections import Section, run_sections


def parity() -> dict[str, float]:
    """3 peers against one plain process: losses of every step."""
    from contrib.benchmarks.parity import measure

    return measure()


def efficiency() -> dict[str, float]:
    """2 peers against 2 independent loops: tokens per second."""
    from contrib.benchmarks.efficiency import measure

    return measure()


def interpreter() -> dict[str, float]:
    """The interpreter against eager PyTorch."""
    from contrib.benchmarks.interpreter import measure

    return measure()


def transport() -> dict[str, float]:
    """Frames against the raw stream."""
    from contrib.benchmarks.transport import measure

    return measure()


def fuzz() -> dict[str, float]:
    """Hostile graphs, frames and messages."""
    from contrib.benchmarks.hostile import measure

    return measure()


def exits() -> dict[str, float]:
    """Signals to every kind of process."""
    from contrib.benchmarks.exits import measure

    return measure()


def help_time() -> dict[str, float]:
    """`fusion-peer --help`."""
    from contrib.benchmarks.exits import measure_help

    return measure_help()


SECTIONS: dict[str, Section] = {
    "parity": parity,
    "efficiency": efficiency,
    "interpreter": interpreter,
    "transport": transport,
    "fuzz": fuzz,
    "exits": exits,
    "help": help_time,
}


if __name__ == "__main__":
    sys.exit(run_sections("bench-main", SECTIONS))
