"""Measures this machine's device, or recalls what was measured, and prints it beside the device's peak."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fusion_p2p.config import BenchConfig
from fusion_p2p.device.choose import choose
from fusion_p2p.device.memory import device_name, free_bytes
from fusion_p2p.device.peak import Peak, peak
from fusion_p2p.device.rates import Rates, rates, rates_file
from fusion_p2p.plan.memory import gib


@dataclass(frozen=True, slots=True)
class OwnRates:
    """Everything that `bench` shows."""

    device: str
    precision: str
    threads: int | None
    free_bytes: int
    measured: Rates
    peak: Peak
    file: str


def print_rates(config: BenchConfig) -> int:
    """Print a table, or one JSON object."""
    found = own_rates(config)
    if config.json:
        print(json.dumps(asdict(found)))
    else:
        Console().print(picture(found))
    return 0


def own_rates(config: BenchConfig) -> OwnRates:
    """Measure or recall. ConfigError with `--benchmark off` when nothing is remembered; DeviceUnusable."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose(config.device)
    directory: Path = config.state_directory
    measured = rates(device, directory, benchmark=config.benchmark, precision=config.precision)
    return OwnRates(
        device=f"{device_name(device)} ({device})",
        precision=config.precision,
        threads=torch.get_num_threads() if device.type == "cpu" else None,
        free_bytes=free_bytes(device),
        measured=measured,
        peak=peak(device),
        file=str(rates_file(device, directory, config.precision)),
    )


def picture(found: OwnRates) -> Group:
    """The table for people."""
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for heading in ("kernel, forward + backward", "measured", "peak", "share"):
        table.add_column(heading, justify="left" if heading.startswith("kernel") else "right")
    measured, top = found.measured, found.peak
    kinds = (("matrix product", measured.matmul_flops), ("convolution", measured.convolution_flops))
    for name, value in (*kinds, ("attention", measured.attention_flops)):
        table.add_row(name, *_cells(value, top.flops_per_s, "GFLOP/s"))
    table.add_row("memory", *_cells(measured.memory_bytes_per_s, top.memory_bytes_per_s, "GB/s"))
    threads = f", {found.threads} threads" if found.threads else ""
    return Group(
        Text(f"{found.device}{threads}, {found.precision}, {gib(found.free_bytes)} free to give"),
        table,
        Text(f"peak in fp32: {top.how}; measured figures are kept in {found.file}"),
    )


def _cells(value: float, top: float | None, unit: str) -> tuple[str, str, str]:
    if top is None:
        return f"{value / 1e9:,.1f} {unit}", "unknown", ""
    return f"{value / 1e9:,.1f} {unit}", f"{top / 1e9:,.1f} {unit}", f"{value / top:.0%}"
