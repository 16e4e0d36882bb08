"""A target whose sections can run alone (`--only NAME`): each is timed, and its figures are kept when it has ended."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping

from contrib.benchmarks.report import print_figures, write_figures

Section = Callable[[], dict[str, float]]


def sections_parser(target: str, sections: Mapping[str, Section]) -> argparse.ArgumentParser:
    """Knows `--only NAME`."""
    parser = argparse.ArgumentParser(prog=f"make {target} ONLY=SECTION")
    parser.add_argument("--only", choices=sections, help="measure one section; the others keep their last figures")
    return parser


def measure_sections(target: str, sections: Mapping[str, Section], only: str | None) -> int:
    """Measure all sections or one; 0 when everything holds."""
    figures: dict[str, float] = {}
    for name in [only] if only else sections:
        begin = time.monotonic()
        print(f"\n{name}: {(sections[name].__doc__ or '').rstrip('.')}", flush=True)
        measured = sections[name]()
        figures |= measured
        path = write_figures(target, measured)
        print(f"{name}: {time.monotonic() - begin:.0f} s", flush=True)
    good = print_figures(f"make {target}", figures)
    print(f"figures {path}")
    return 0 if good else 1


def run_sections(target: str, sections: Mapping[str, Section]) -> int:
    """The same, as the command line says."""
    return measure_sections(target, sections, sections_parser(target, sections).parse_args().only)
