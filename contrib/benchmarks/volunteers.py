"""FusionAI's thought experiment as a plan: 50 RTX 3080 in 50 homes against four H100 in one machine, the same model on both.

Throughput is batch over seconds per step, each side with the best plan we find: the volunteers with compressed links, the H100
without. The batch is 128 sequences of 1024 tokens, activations are recomputed. Both compute in fp32 without tensor cores, as
everywhere in this comparison; with them the H100 gain more than the RTX 3080.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from rich.console import Console
from rich.table import Table

from contrib.benchmarks.operators import gpt2
from contrib.benchmarks.planner_cases import AUTO, network_of_bed, step_s
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.schedulers import SCHEDULERS
from fusion_p2p.wire.codecs import LADDER

SEQUENCES = 128
VOLUNTEERS, DATA_CENTRE = "t6-50-rtx3080", "h100-4"
SIZES: dict[str, tuple[int, int, int]] = {
    "0.4 B": (24, 1024, 16),
    "1.6 B": (48, 1600, 25),
    "6.7 B": (32, 4096, 32),
    "13 B": (40, 5120, 40),
}
"""GPT models by their parameters: layers, width, heads."""
FASTER = (0.1, 1.0, 10.0)
"""Homes with 10 and 100 Mbit/s and 1 Gbit/s."""
REFERENCE = "1.6 B"
TRACELESS = LADDER[-1][0]
"""The most that codecs divide bytes by without leaving a trace in the model."""
CODECS: dict[str, tuple[str, float]] = {
    "dense": ("none", 1.0),
    "traceless": ("adaptive", TRACELESS),
    "sparse": ("adaptive", 100.0),
}


@dataclass(frozen=True, slots=True)
class Throughput:
    """Sequences per second of both sides; 0 where the model does not fit."""

    model: str
    mbit_per_s: float
    volunteers: float
    data_centre: float

    @property
    def ratio(self) -> float:
        """Volunteers over data centre; infinite where only the volunteers can hold the model, 0 where they cannot."""
        if not self.volunteers:
            return 0.0
        return self.volunteers / self.data_centre if self.data_centre else float("inf")


def measure(sizes: Sequence[str] = tuple(SIZES)) -> dict[str, float]:
    """Print the ratios of model sizes, bandwidths and codecs; the figures are those of GPT-2 XL at 100 Mbit/s."""
    figures = {}
    for name in CODECS:
        found = [compare(size, faster, name) for size in sizes for faster in FASTER]
        _print_table(name, found)
        same = next(entry for entry in found if (entry.model, entry.mbit_per_s) == (REFERENCE, 100.0))
        figures["rtx3080_50_over_h100_4" + ("" if name == "traceless" else f"_{name}")] = same.ratio
    return figures


def compare(size: str, faster: float, codec: str) -> Throughput:
    """Both sides on one model, the homes with `faster` times 100 Mbit/s and a codec of CODECS."""
    homes = network_of_bed(VOLUNTEERS)
    quick = replace(homes, beta_s=homes.beta_s / faster, uplink_s=homes.uplink_s / faster, downlink_s=homes.downlink_s / faster)
    return Throughput(size, 100 * faster, _sequences_per_s(_model(size), quick, *CODECS[codec]), _of_data_centre(size))


@cache
def _model(size: str) -> Chain:
    layers, width, heads = SIZES[size]
    return gpt2(layers, width, heads, batch=1)


@cache
def _of_data_centre(size: str) -> float:
    return _sequences_per_s(_model(size), network_of_bed(DATA_CENTRE), "none", 1.0)


def _sequences_per_s(chain: Chain, network: Network, codec: str, ratio: float) -> float:
    terms = Terms(SEQUENCES, recompute=True, codec=codec, ratio=ratio)
    found = SCHEDULERS[AUTO](chain, network, terms)
    return SEQUENCES / step_s(chain, network, found, terms) if isinstance(found, Layout) else 0.0


def _print_table(name: str, found: Sequence[Throughput]) -> None:
    codec, ratio = CODECS[name]
    table = Table(title=f"50 RTX 3080 over four H100: {name} ({codec} up to {ratio:g}x)", title_justify="left")
    for heading in ("GPT", "homes' Mbit/s", "sequences/s: 50 RTX 3080", "four H100", "ratio"):
        table.add_column(heading, justify="right")
    for entry in found:
        rates = (f"{entry.volunteers:.3g}", f"{entry.data_centre:.3g}", f"{entry.ratio:.2f}")
        table.add_row(entry.model, f"{entry.mbit_per_s:g}", *rates)
    Console(width=100, highlight=False).print(table)
    reached = [f"{entry.model} from {entry.mbit_per_s:g} Mbit/s" for entry in _first_of_each_size(found)]
    print(f"  the volunteers are at least as fast with: {', '.join(reached) or 'none of these'}", flush=True)


def _first_of_each_size(found: Sequence[Throughput]) -> list[Throughput]:
    """For every model the slowest homes that still keep up."""
    first: dict[str, Throughput] = {}
    for entry in found:
        if entry.ratio >= 1:
            first.setdefault(entry.model, entry)
    return list(first.values())
