"""`make bench-churn`: what it costs when peers come and go, on real processes; every section can run alone (`--only NAME`)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from contrib.benchmarks.report import print_figures, write_figures

Section = Callable[[], dict[str, float]]


def recovery() -> dict[str, float]:
    """kill -9 of a slice's peer until the next commit; a frozen peer; a coordinator without a slice."""
    from contrib.benchmarks.recovering import measure

    return measure()


def join() -> dict[str, float]:
    """From the start of `fusion-peer join` to standby, and to a slice of a run that gains by it."""
    from contrib.benchmarks.joining import measure

    return measure()


def copies() -> dict[str, float]:
    """Blocks of steps with and without copies of slices, in turn."""
    from contrib.benchmarks.copying import measure

    return measure()


def crowd() -> dict[str, float]:
    """24 peers on this machine."""
    from contrib.benchmarks.crowd import measure

    return measure()


SECTIONS: dict[str, Section] = {"recovery": recovery, "join": join, "copies": copies, "crowd": crowd}


def main() -> int:
    """Measure all sections or the one named; 0 when everything holds."""
    parser = argparse.ArgumentParser(prog="make bench-churn ONLY=SECTION")
    parser.add_argument("--only", choices=SECTIONS, help="measure one section; the others keep their last figures")
    only = parser.parse_args().only
    figures: dict[str, float] = {}
    for name in [only] if only else SECTIONS:
        begin = time.monotonic()
        print(f"\n{name}: {(SECTIONS[name].__doc__ or '').rstrip('.')}", flush=True)
        measured = SECTIONS[name]()
        figures |= measured
        path = write_figures("bench-churn", measured)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    good = print_figures("make bench-churn", figures)
    print(f"figures {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
