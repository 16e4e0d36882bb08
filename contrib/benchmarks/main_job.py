"""`make bench-main`: what the product must hold, measured on real processes; every section can run alone (`--only NAME`)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from contrib.benchmarks.report import print_figures, write_figures

Section = Callable[[], dict[str, float]]


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


def main() -> int:
    """Measure all sections or the one named; 0 when everything holds."""
    parser = argparse.ArgumentParser(prog="make bench-main ONLY=SECTION")
    parser.add_argument("--only", choices=SECTIONS, help="measure one section; the others keep their last figures")
    only = parser.parse_args().only
    figures: dict[str, float] = {}
    for name in [only] if only else SECTIONS:
        begin = time.monotonic()
        print(f"\n{name}: {(SECTIONS[name].__doc__ or '').rstrip('.')}", flush=True)
        measured = SECTIONS[name]()
        figures |= measured
        path = write_figures("bench-main", measured)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    good = print_figures("make bench-main", figures)
    print(f"figures {path}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
