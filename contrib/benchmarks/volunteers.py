"""FusionAI's thought experiment as a plan: 50 RTX 3080 in 50 homes against four H100 in one machine, the same model on both.

Throughput is batch over seconds per step, each side with the best plan we find: the volunteers with compressed links, the H100
without. The batch is 128 sequences of 1024 tokens, activations are recomputed, fp32 on both sides, as everywhere here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from contrib.benchmarks.operators import gpt2
from contrib.benchmarks.planner_cases import AUTO, RATIO, network_of_bed, step_s
from fusion_p2p.plan.chain import Chain
from fusion_p2p.plan.layout import Layout
from fusion_p2p.plan.network import Network
from fusion_p2p.plan.request import Terms
from fusion_p2p.plan.schedulers import SCHEDULERS

SEQUENCES = 128
VOLUNTEERS, DATA_CENTRE = "t6-50-rtx3080", "h100-4"
SIZES: tuple[tuple[str, int, int, int], ...] = (
    ("0.35 B", 24, 1024, 16),
    ("1.6 B", 48, 1600, 25),
    ("6.7 B", 32, 4096, 32),
    ("13 B", 40, 5120, 40),
)
"""Name, layers, width, heads."""
FASTER = (1.0, 10.0, 100.0)
"""Homes with 100 Mbit/s, 1 and 10 Gbit/s."""
REFERENCE = "1.6 B"


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


def measure(codec: str = "adaptive", sizes: Sequence[tuple[str, int, int, int]] = SIZES) -> dict[str, float]:
    """Print the table of model sizes and bandwidths; the figure is that of GPT-2 XL at 100 Mbit/s."""
    found = [_compare(size, faster, codec) for size in sizes for faster in FASTER]
    table = Table(title=f"50 RTX 3080 over four H100, codec {codec} up to {RATIO:g}x", title_justify="left")
    for heading in ("GPT", "homes' Mbit/s", "sequences/s: 50 RTX 3080", "four H100", "ratio"):
        table.add_column(heading, justify="right")
    for entry in found:
        row = (
            entry.model,
            f"{entry.mbit_per_s:g}",
            f"{entry.volunteers:.2f}",
            f"{entry.data_centre:.2f}",
            f"{entry.ratio:.2f}",
        )
        table.add_row(*row)
    Console(width=100, highlight=False).print(table)
    reached = next((entry for entry in found if entry.ratio >= 1), None)
    where = f"{reached.model} at {reached.mbit_per_s:g} Mbit/s" if reached else "none of these"
    print(f"  the volunteers catch up first with: {where}")
    return {"rtx3080_50_over_h100_4": next(entry.ratio for entry in found if entry.model == REFERENCE)}


def _compare(size: tuple[str, int, int, int], faster: float, codec: str) -> Throughput:
    name, layers, width, heads = size
    chain = gpt2(layers, width, heads, batch=1)
    homes, machine = network_of_bed(VOLUNTEERS), network_of_bed(DATA_CENTRE)
    quick = replace(homes, beta_s=homes.beta_s / faster, uplink_s=homes.uplink_s / faster, downlink_s=homes.downlink_s / faster)
    return Throughput(name, 100 * faster, _sequences_per_s(chain, quick, codec), _sequences_per_s(chain, machine, "none"))


def _sequences_per_s(chain: Chain, network: Network, codec: str) -> float:
    terms = Terms(SEQUENCES, recompute=True, codec=codec, ratio=RATIO)
    found = SCHEDULERS[AUTO](chain, network, terms)
    return SEQUENCES / step_s(chain, network, found, terms) if isinstance(found, Layout) else 0.0
