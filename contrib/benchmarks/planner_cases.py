"""One cell of the planner's comparison: a network, a model, micro-batches and a codec; what every scheduler makes of it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path

from contrib.benchmarks.operators import MODELS
from fusion_p2p.plan.bound import bound_s
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.pipelines import pipeline_of_layout
from fusion_p2p.plan.plan import Schedule
from fusion_p2p.plan.request import NoPlan, Terms
from fusion_p2p.plan.schedulers import SCHEDULERS
from fusion_p2p.plan.simulate import simulate
from fusion_p2p.plan.testbed import load_testbed

TESTBEDS = Path(__file__).resolve().parents[1] / "testbeds"
EXPECTED = Path(__file__).with_name("planner_expected.json")
CLUSTERED = ("t1-24-gpus-2-sites", "t2-24-gpus-3-sites", "t3-48-gpus-3-sites")
BEDS = (*CLUSTERED, "t4-24-homes", "t5-world-64-gpus-8-cities", "t6-50-rtx3080")
CODECS = ("none", "uniform", "adatopk", "adaptive")
EQUAL = ("equal-number", "equal-compute")
FENCE, AUTO = "op-fence", "auto"
RECOMPUTED_FROM = 32
"""With so many micro-batches activations are recomputed: they would not fit otherwise."""
RATIO = 100.0
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")


@dataclass(frozen=True, slots=True)
class Case:
    """What is compared."""

    testbed: str
    model: str
    micro_batches: int
    codec: str

    @property
    def terms(self) -> Terms:
        """The case in the words of schedulers."""
        recompute = self.micro_batches >= RECOMPUTED_FROM
        return Terms(self.micro_batches, recompute=recompute, codec=self.codec, ratio=RATIO)


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds per step of every (scheduler, schedule) that was asked; `auto` chooses its schedule itself.

    over_memory: schedulers whose layout does not fit, and ran as if it did. idle: peers that auto's plan does not need.
    """

    case: Case
    seconds: dict[tuple[str, str], float]
    over_memory: frozenset[str]
    bound_s: float
    chosen: str
    idle: tuple[str, ...]

    def best(self, *schedulers: str, schedule: str | None = None) -> float:
        """The least seconds of these schedulers, under one schedule or the better one."""
        return min(
            value
            for (name, order), value in self.seconds.items()
            if name in schedulers and (schedule is None or order in (schedule, AUTO))
        )

    @property
    def auto_s(self) -> float:
        """Seconds of the planner."""
        return self.seconds[AUTO, AUTO]


@lru_cache(maxsize=8)
def network_of_bed(testbed: str) -> Network:
    """A testbed by name."""
    return load_testbed(TESTBEDS / f"{testbed}.json")


@lru_cache(maxsize=8)
def model_of(name: str) -> Chain:
    """A model by name."""
    return MODELS[name]()


def step_s(chain: Chain, network: Network, layout: Layout, terms: Terms) -> float:
    """Simulated seconds of a step."""
    return simulate(pipeline_of_layout(chain, network, layout, terms)).step_s


def run_case(case: Case) -> Result:
    """Ask every scheduler: the baselines under both schedules, auto once."""
    chain, network, terms = model_of(case.model), network_of_bed(case.testbed), case.terms
    seconds, over_memory = run_baselines(case)
    found = SCHEDULERS[AUTO](chain, network, terms)
    if not isinstance(found, Layout):
        raise SystemExit(f"{case}: {found.reason}")
    seconds[AUTO, AUTO] = step_s(chain, network, found, terms)
    idle = tuple(peer for index, peer in enumerate(network.peers) if index not in found.peers)
    return Result(case, seconds, over_memory, bound_s(chain, network, terms), describe(found), idle)


def run_baselines(case: Case) -> tuple[dict[tuple[str, str], float], frozenset[str]]:
    """Seconds of the equal splits and of op-fence, and which of them do not fit memory and ran as if they did."""
    chain, network = model_of(case.model), network_of_bed(case.testbed)
    seconds: dict[tuple[str, str], float] = {}
    over_memory = set()
    for name, schedule in product((*EQUAL, FENCE), SCHEDULES):
        terms = replace(case.terms, schedule=schedule)
        layout = SCHEDULERS[name](chain, network, terms)
        if isinstance(layout, NoPlan):
            over_memory.add(name)
            terms = replace(terms, respect_memory=False)
            layout = SCHEDULERS[name](chain, network, terms)
        if isinstance(layout, Layout):
            seconds[name, schedule] = step_s(chain, network, layout, terms)
    return seconds, frozenset(over_memory)


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    copies = max(len(stage.peers) for stage in layout.stages)
    groups = f", up to {copies} replicas" if copies > 1 else ""
    squeezed = sum(ratio > 1.0 for ratio in layout.ratios)
    return f"{len(layout.stages)} stages on {len(layout.peers)} peers{groups}, {layout.schedule}, {squeezed} links compressed"


def cases(beds: Sequence[str], models: Sequence[str], micro_batches: Sequence[int]) -> list[Case]:
    """All combinations, with every codec."""
    return [Case(bed, model, count, codec) for bed in beds for model in models for count in micro_batches for codec in CODECS]


def run_cases(chosen: Sequence[Case], workers: int | None = None) -> Iterator[Result]:
    """The results in order, computed by several processes."""
    workers = workers or os.cpu_count() or 1
    if workers == 1:
        yield from map(run_case, chosen)
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(run_case, chosen)


def deviations(measured: Iterable[tuple[Case, Mapping[tuple[str, str], float]]]) -> Iterator[tuple[str, float]]:
    """How far baselines and op-fence are from the committed figures of the prototype, as shares."""
    expected = {
        (entry["testbed"], entry["model"], entry["micro_batches"]): entry["seconds"]
        for entry in json.loads(EXPECTED.read_text())["cases"]
    }
    for case, seconds in measured:
        for scheduler, by_codec in expected.get((case.testbed, case.model, case.micro_batches), {}).items():
            if case.codec in by_codec:
                where = f"{scheduler} on {case.testbed}, {case.model}, {case.micro_batches}, {case.codec}"
                yield where, abs(seconds[scheduler, "gpipe"] / by_codec[case.codec] - 1)
