"""Losses after equal steps through codecs and cut layers, with the real slices and codecs, and the time to a given loss.

A byte model with four blocks of attention that sees four positions, on the standard library's own text, one block per slice:
depth matters, so what crosses the three cuts does. The controls show that: a model of one of the blocks, and one whose cuts
carry nothing though the reader of each knows tokens and positions. Two blocks are nearly enough there; so all that is held to
something is run again on a model whose attention sees two positions, where they lack more. A ResNet on digits beside it.

Runs of one seed begin with equal weights and see equal batches; figures are mean relative differences to `dense`, paired by
seed. Losses are those of the model as exported: without codecs, with the cut layers and masks that are part of it. Times on
links are simulated from each case's own bytes and the seconds that slices computed here.

    python -m contrib.benchmarks.convergence            all of it; runs that were made before are taken from bench-results
    python -m contrib.benchmarks.convergence --quick    a few steps of dense, int8 and a control
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from contrib.benchmarks.coded_run import NOTHING
from contrib.benchmarks.convergence_cases import (
    DEPTH,
    DIGITS,
    SLICES,
    TEXT,
    Case,
    Result,
    Settings,
    depth_cases,
    digit_cases,
    remembered,
    run,
    text_cases,
)
from contrib.benchmarks.report import RESULTS, print_figures, write_figures
from fusion_p2p.ids import PeerId
from fusion_p2p.plan.coding import coding_passes
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipeline import Pipeline, PipelineEdge, PipelineStage
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.wire.codecs import parse
from fusion_p2p.wire.frames import HEADER_BYTES

TARGET = "bench-convergence"
RUNS = RESULTS / TARGET
PROCESSES = 2
LINKS_MBIT = (8, 50, 200)
ALPHA_S = 0.02
MEMORY_BYTES_PER_S = 8e9
"""What coding runs at in the simulation."""
TARGET_AT = 0.75
"""The loss to be reached is that of `dense` after this share of its steps."""
QUICK = Settings(
    width=64, context=32, micro_batch_size=8, steps=60, warmup=10, peak=3e-3, curve_every=60, curve_batches=8, final_batches=8
)
CONTROLS = ("control", "one_layer")
DEPTH_CONTROLS = (*CONTROLS, "two_layers")
"""How much worse these are than `dense` is how much there is to lose: where that is little, codecs cannot do harm."""
Results = Mapping[str, Sequence[Result]]


def measure(only: Sequence[str] = ()) -> dict[str, float]:
    """Run what was not run before, print the tables, draw the curves."""
    cases = {case.name: case for case in (*text_cases(), *digit_cases())}
    chosen = [cases[name] for name in only or cases]
    found = run_all(chosen)
    print_cases("Text: byte model, 4 slices", [case for case in chosen if not _on_digits(case)], found, "dense")
    print_cases("Digits: ResNet, 4 slices", [case for case in chosen if _on_digits(case)], found, "digits_dense")
    figures = losses(found)
    if "dense" in found:
        figures |= times(chosen, found)
        draw(chosen, found, RESULTS / f"{TARGET}.png")
    return figures | measure_depth(only)


def measure_depth(only: Sequence[str] = ()) -> dict[str, float]:
    """The text model where half of the blocks lack more, with figures named `depth_*`."""
    chosen = [case for case in depth_cases() if not only or case.name in only]
    if not chosen:
        return {}
    found = run_all(chosen, DEPTH, RUNS / "depth")
    print_cases("Text where depth matters more: attention sees two positions", chosen, found, "dense")
    return {f"depth_{name.removeprefix('loss_')}": value for name, value in losses(found, DEPTH_CONTROLS).items()}


def run_all(cases: Iterable[Case], text: Settings = TEXT, folder: Path = RUNS) -> dict[str, list[Result]]:
    """Each case with each of its seeds, side by side on two cores."""
    pairs = [(case, seed) for case in cases for seed in case.seeds]
    found: dict[str, list[Result]] = {}
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        tasks = [pool.submit(remembered, case, seed, DIGITS if _on_digits(case) else text, folder) for case, seed in pairs]
        for (case, seed), task in zip(pairs, tasks, strict=True):
            result = task.result()
            found.setdefault(case.name, []).append(result)
            print(f"{case.name} seed {seed}: {result.exported:.4f} as exported, {result.ratio:.1f}x", flush=True)
    return found


def quick() -> dict[str, float]:
    """Dense, int8 and a control, in this process."""
    cases = (Case("dense", ""), Case("int8", "", ((0.0, ("int8",)),)), Case("control", "", ((0.0, (NOTHING,)),)))
    found = {case.name: [run(case, 0, QUICK)] for case in cases}
    return losses(found)


def _on_digits(case: Case) -> bool:
    return case.name.startswith("digits")


def losses(found: Results, controls: Sequence[str] = CONTROLS) -> dict[str, float]:
    """Relative differences to dense by the names that are held to something, and the rest by theirs."""
    figures: dict[str, float] = {}
    for name in found.keys() - {"dense", "digits_dense"}:
        base = "digits_dense" if name.startswith("digits") else "dense"
        if base not in found:
            continue
        worse = difference(found[name], found[base])
        if math.isfinite(worse):
            figures[f"loss_{name}"] = worse
            figures[f"ratio_{name}"] = statistics.fmean(result.ratio for result in found[name])
    worse_controls = [figures[f"loss_{name}"] for name in controls if f"loss_{name}" in figures]
    if worse_controls:
        figures["control_worse"] = min(worse_controls)
    if {"bottleneck_31x", "cut_embedding"} <= found.keys():
        figures["bottleneck_over_cut_embedding"] = difference(found["bottleneck_31x"], found["cut_embedding"])
    return dict(sorted(figures.items()))


def difference(results: Sequence[Result], base: Sequence[Result]) -> float:
    """The mean of the relative differences of the exported losses, seed by seed."""
    by_seed = {result.seed: result.exported for result in base}
    return statistics.fmean(result.exported / by_seed[result.seed] - 1 for result in results)


def print_cases(title: str, cases: Sequence[Case], found: Results, base: str) -> None:
    """One line per case."""
    if not cases:
        return
    table = Table(title=title, title_justify="left")
    for heading in ("", "ratio", "KB/step", "loss with codec", "as exported", "against dense"):
        table.add_column(heading, justify="right" if heading else "left")
    for case in cases:
        results = found[case.name]
        worse = f"{100 * difference(results, found[base]):+.2f} %" if base in found else ""
        rows = [(result.ratio, result.bytes_per_step / 1e3, result.coded, result.exported) for result in results]
        means = [statistics.fmean(column) for column in zip(*rows, strict=True)]
        table.add_row(case.title, f"{means[0]:.1f}", f"{means[1]:.0f}", f"{means[2]:.4f}", f"{means[3]:.4f}", worse)
    Console(width=110, highlight=False).print(table)


def times(cases: Sequence[Case], found: Results) -> dict[str, float]:
    """Simulated seconds to the target loss for each link, printed and as figures."""
    dense = found["dense"]
    target = statistics.fmean(_at(result.curve, TARGET_AT * TEXT.steps) for result in dense)
    title = f"Simulated seconds to {target:.3f} nats, as exported (dense after {TARGET_AT:.0%} of its steps), 20 ms links"
    table = Table(title=title, title_justify="left")
    for heading in ("", *(f"{rate} Mbit/s" for rate in LINKS_MBIT)):
        table.add_column(heading, justify="right" if heading else "left")
    figures: dict[str, float] = {}
    for case in cases:
        if _on_digits(case) or case.layers < SLICES or case.name == "control":
            continue
        seconds = [_mean_time(case, found[case.name], target, dense, rate) for rate in LINKS_MBIT]
        table.add_row(case.title, *(f"{value:.0f}" if math.isfinite(value) else "not reached" for value in seconds))
        named = {f"seconds_{case.name}_{rate}mbit": value for rate, value in zip(LINKS_MBIT, seconds, strict=True)}
        figures |= {name: value for name, value in named.items() if math.isfinite(value)}
    Console(width=110, highlight=False).print(table)
    return figures


def _mean_time(case: Case, results: Sequence[Result], target: float, dense: Sequence[Result], rate_mbit: float) -> float:
    return statistics.fmean(time_to(case, result, target, dense, rate_mbit) for result in results)


def time_to(case: Case, result: Result, target: float, dense: Sequence[Result], rate_mbit: float) -> float:
    """Simulated seconds until a run's loss is down to `target`; infinite if it never is."""
    reached = step_reaching(result.curve, target)
    if not math.isfinite(reached):
        return math.inf
    ends = [*(step - 1 for step, _, _ in result.phases[1:]), TEXT.steps]
    seconds = begun = 0.0
    for (_, there, back), end, (_, codecs) in zip(result.phases, ends, case.phases, strict=True):
        steps = max(0.0, min(reached, end) - begun)
        seconds += steps * step_s(there, back, codecs, dense, rate_mbit)
        begun = end
    return seconds


def step_reaching(curve: Sequence[tuple[int, float]], target: float) -> float:
    """The step at which a curve, straight between its points, is down to a loss."""
    for (before, high), (after, low) in pairwise(curve):
        if low <= target:
            return before if high <= target else before + (after - before) * (high - target) / (high - low)
    return math.inf


def _at(curve: Sequence[tuple[int, float]], step: float) -> float:
    steps, values = zip(*curve, strict=True)
    return float(np.interp(step, steps, values))


def step_s(
    there: Sequence[float], back: Sequence[float], codecs: tuple[str, ...], dense: Sequence[Result], rate_mbit: float
) -> float:
    """Simulated seconds per step of the four slices, which compute as long as those of `dense` did here."""
    stages = tuple(
        PipelineStage(
            nodes=(index,),
            forward_s=(statistics.fmean(result.forward_s[index] for result in dense),),
            backward_s=(statistics.fmean(result.backward_s[index] for result in dense),),
            in_flight=TEXT.micro_batches,
            deal=(0,) * TEXT.micro_batches,
        )
        for index in range(SLICES)
    )
    edges = tuple(_edge(index, *way, codecs) for index, way in enumerate(zip(there, back, strict=True)))
    return simulate(Pipeline(_links(rate_mbit), stages, edges, TEXT.micro_batches)).step_s


def _edge(index: int, there: float, back: float, codecs: tuple[str, ...]) -> PipelineEdge:
    spec = parse(codecs[min(index, len(codecs) - 1)])
    coded = 4.0 * TEXT.micro_batch_size * TEXT.context * TEXT.width
    ways = [coding_passes(spec, backward=backward) for backward in (False, True)]
    forward, backward = ((coded * way.encode, coded * way.decode) for way in ways)
    sizes = HEADER_BYTES + there, HEADER_BYTES + back
    return PipelineEdge(index, index + 1, *sizes, forward_coding=forward, backward_coding=backward)


def _links(rate_mbit: float) -> Network:
    """Four peers, every pair joined by equal links."""
    apart = 1.0 - np.eye(SLICES)
    none = np.zeros(SLICES)
    return Network(
        peers=tuple(PeerId(f"peer-{index}") for index in range(SLICES)),
        flops_per_s=np.ones((SLICES, 3)),
        memory_bytes_per_s=np.full(SLICES, MEMORY_BYTES_PER_S),
        free_bytes=np.full(SLICES, np.inf),
        sites=np.arange(SLICES),
        alpha_s=ALPHA_S * apart,
        beta_s=8e-6 / rate_mbit * apart,
        uplink_s=none,
        downlink_s=none,
    )


def draw(cases: Sequence[Case], found: Results, path: Path) -> None:
    """Validation loss as exported over steps, and final loss over bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 6), layout="constrained")
    FigureCanvasAgg(figure)
    over_steps, over_bytes = figure.subplots(1, 2)
    for case in cases:
        if _on_digits(case):
            continue
        steps, values = zip(*found[case.name][0].curve, strict=True) if found[case.name][0].curve else ((), ())
        over_steps.plot(steps, values, label=case.title, linewidth=1.2)
        kilobytes = found[case.name][0].bytes_per_step / 1e3
        if kilobytes:
            over_bytes.scatter([kilobytes], [found[case.name][0].exported], s=24)
            over_bytes.annotate(case.title, (kilobytes, found[case.name][0].exported), fontsize=7)
    over_steps.set(xlabel="step", ylabel="validation loss as exported, nats per byte")
    over_steps.legend(fontsize=7)
    over_bytes.set(xlabel="KB per step over three cuts", ylabel="final loss as exported", xscale="log")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> int:
    """Print and keep the figures; 1 when one does not hold."""
    parser = argparse.ArgumentParser(description="Losses through codecs and cut layers.")
    parser.add_argument("--quick", action="store_true", help="a few steps of dense, int8 and a control")
    parser.add_argument("--only", nargs="+", default=(), metavar="CASE", help="only these cases")
    given = parser.parse_args()
    figures = quick() if given.quick else measure(given.only)
    if not given.quick:
        write_figures(TARGET, figures)
    return 0 if print_figures("Convergence", figures) else 1


if __name__ == "__main__":
    sys.exit(main())
