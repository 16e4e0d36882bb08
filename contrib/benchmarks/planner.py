"""`make bench-planner`: the schedulers against each other, against optima and against the clock, all simulated.

The seconds are those of the simulator, which `make bench-emulated` compares with real runs. `--quick` is a subset for CI.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from contrib.benchmarks.operators import MODELS
from contrib.benchmarks.planner_cases import (
    AUTO,
    BEDS,
    CLUSTERED,
    EQUAL,
    FENCE,
    Case,
    Result,
    cases,
    deviations,
    run_cases,
)
from contrib.benchmarks.report import print_figures
from contrib.benchmarks.sections import measure_sections, sections_parser

TARGET = "bench-planner"
LOSS_TOLERANCE = 1e-9
QUICK = (Case(CLUSTERED[1], "gpt2-xl", 8, "adatopk"), Case(CLUSTERED[1], "gpt2-xl", 8, "uniform"))


def compare(chosen: Sequence[Case] | None = None) -> dict[str, float]:
    """Every scheduler on every testbed, model, number of micro-batches and codec; s/step, the bound, who is idle."""
    asked = chosen if chosen is not None else cases(BEDS, tuple(MODELS), (8, 32))
    results = []
    for result in run_cases(asked, 1 if chosen is not None else None):
        results.append(result)
        print(f"  {_line(result)}", flush=True)
    _print_table(results)
    return figures_of(results)


def figures_of(results: Sequence[Result]) -> dict[str, float]:
    """The ratios that must hold, of the cases that there are."""
    clustered = [result for result in results if result.case.testbed in CLUSTERED]
    gpt2 = [result for result in clustered if result.case.model.startswith("gpt2")]
    resnet = [result for result in clustered if result.case.model.startswith("resnet")]
    equal = [result.best(*EQUAL, schedule="gpipe") / result.best(FENCE) for result in _with(gpt2, "uniform")]
    bound = [result.auto_s / result.bound_s for result in _with(clustered, "adatopk", "adaptive")]
    off = sorted(deviations((result.case, result.seconds) for result in results), key=lambda item: -item[1])
    if off:
        print(f"  farthest from the prototype: {off[0][0]}, {off[0][1]:.1%}")
    losses = [result for result in results if result.auto_s > min(result.seconds.values()) * (1 + LOSS_TOLERANCE)]
    for result in losses:
        print(f"  auto loses: {_line(result)}")
    figures = {
        "baseline_deviation_max": max((share for _, share in off), default=np.nan),
        "fence_over_equal_min": min(equal, default=np.nan),
        "fence_over_equal_geo": _geometric_mean(equal),
        "auto_over_fence_gpt2_geo": _geometric_mean(_over_fence(gpt2)),
        "auto_over_fence_resnet_geo": _geometric_mean(_over_fence(resnet)),
        "auto_over_fence_gpt2_gpipe_geo": _geometric_mean(_over_fence(gpt2, "gpipe")),
        "auto_over_bound_geo": _geometric_mean(bound),
        "auto_over_bound_max": max(bound, default=np.nan),
        "auto_losses": float(len(losses)),
    }
    return {name: float(value) for name, value in figures.items() if not np.isnan(value)}


def small() -> dict[str, float]:
    """Random small networks against the optimum over all orders, subsets and cuts."""
    from contrib.benchmarks.small_cases import measure

    return measure()


def published() -> dict[str, float]:
    """The strongest published planner, DT-FM, on its own network."""
    from contrib.benchmarks.dt_fm_cases import measure

    return measure()


def speed() -> dict[str, float]:
    """Planning in a cold process with empty compile caches."""
    from contrib.benchmarks.planning_speed import measure

    return measure()


def volunteers() -> dict[str, float]:
    """50 RTX 3080 in homes against four H100."""
    from contrib.benchmarks.volunteers import measure

    return measure()


SECTIONS: dict[str, Callable[[], dict[str, float]]] = {
    "compare": compare,
    "small": small,
    "published": published,
    "speed": speed,
    "volunteers": volunteers,
}


def main() -> int:
    """Measure all sections or the one named; 0 when everything holds."""
    parser = sections_parser(TARGET, SECTIONS)
    parser.add_argument("--quick", action="store_true", help="two cells of the comparison; nothing is kept")
    given = parser.parse_args()
    if given.quick:
        return 0 if print_figures("quick", compare(QUICK)) else 1
    return measure_sections(TARGET, SECTIONS, given.only)


def _with(results: Iterable[Result], *codecs: str) -> list[Result]:
    return [result for result in results if result.case.codec in codecs]


def _over_fence(results: Iterable[Result], schedule: str | None = None) -> list[float]:
    return [result.best(FENCE, schedule=schedule) / result.auto_s for result in _with(results, "adatopk")]


def _geometric_mean(values: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(values)))) if values else float("nan")


def _line(result: Result) -> str:
    case = result.case
    idle = f"{len(result.idle)} idle" if result.idle else "nobody idle"
    return (
        f"{case.testbed}, {case.model}, {case.micro_batches} micro-batches, {case.codec}: "
        f"auto {result.auto_s:.3g} s ({result.chosen}; {idle}), bound {result.bound_s:.3g} s"
    )


def _print_table(results: Sequence[Result]) -> None:
    table = Table(
        title="simulated seconds per step: GPipe / 1F1B; (m): does not fit memory, run as if it did", title_justify="left"
    )
    for heading in ("testbed", "model", "n", "codec", *EQUAL, FENCE, AUTO, "bound", "idle"):
        table.add_column(heading, justify="left" if heading in ("testbed", "model", "codec") else "right")
    for result in results:
        case = result.case
        names = (case.testbed.split("-")[0], case.model, str(case.micro_batches), case.codec)
        baselines = (_cell(result, name) for name in (*EQUAL, FENCE))
        table.add_row(*names, *baselines, f"{result.auto_s:.3g}", f"{result.bound_s:.3g}", str(len(result.idle)))
    Console(width=140, highlight=False).print(table)


def _cell(result: Result, scheduler: str) -> str:
    shown = " / ".join(f"{value:.3g}" for (name, _), value in result.seconds.items() if name == scheduler)
    return shown + (" (m)" if scheduler in result.over_memory else "")


if __name__ == "__main__":
    sys.exit(main())
