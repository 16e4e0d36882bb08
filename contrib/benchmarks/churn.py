"""`make bench-churn`: what it costs when peers come and go, on real processes; every section can run alone (`--only NAME`)."""

from __future__ import annotations

import sys

from contrib.benchmarks.sections import Section, run_sections


def recovery() -> dict[str, float]:
    """kill -9 of a slice's peer until the next commit; a frozen peer; a coordinator without a slice."""
    from contrib.benchmarks.recovering import measure

    return measure()


def join() -> dict[str, float]:
    """From the start of `fusion-peer join` to standby, and to a slice of a run that gains by it."""
    from contrib.benchmarks.joining import measure

    return measure()


def settle() -> dict[str, float]:
    """A run on four of six equal peers for three minutes: nothing moves."""
    from contrib.benchmarks.settling import measure

    return measure()


def copies() -> dict[str, float]:
    """Blocks of steps with and without copies of slices, in turn."""
    from contrib.benchmarks.copying import measure

    return measure()


def crowd() -> dict[str, float]:
    """24 peers on this machine."""
    from contrib.benchmarks.crowd import measure

    return measure()


SECTIONS: dict[str, Section] = {"recovery": recovery, "join": join, "settle": settle, "copies": copies, "crowd": crowd}


if __name__ == "__main__":
    sys.exit(run_sections("bench-churn", SECTIONS))
