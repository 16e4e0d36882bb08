"""What a device could reach at most, to put its measured rates beside: from its data, never from a table of names.

CUDA: multiprocessors x fp32 lanes of its architecture x 2 (a multiply-add) x highest clock; memory from bus width and clock.
CPU: threads x lanes of its widest vectors x 2 x 2 units x highest clock: an estimate, because the system does not tell how many
units there are, and clocks fall under load. What cannot be found out is None.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_CUDA_LANES = {7: 64, 8: 64, 9: 128, 10: 128, 11: 128, 12: 128}
"""fp32 lanes of a multiprocessor by major compute capability, as in NVIDIA's CUDA programming guide."""
_CUDA_LANES_EXACT = {(8, 6): 128, (8, 7): 128, (8, 9): 128}
_CPU_LANES = (("avx512f", 16), ("avx2", 8), ("avx", 8), ("asimd", 4), ("sse2", 4))
_UNITS = 2


@dataclass(frozen=True, slots=True)
class Peak:
    """Highest fp32 FLOP/s and bytes per second; None: unknown. how: where the figures come from, in words."""

    flops_per_s: float | None
    memory_bytes_per_s: float | None
    how: str


def peak(device: torch.device) -> Peak:
    """The most that a device could reach."""
    return _cuda_peak(device) if device.type == "cuda" else _cpu_peak()


def _cuda_peak(device: torch.device) -> Peak:
    found = torch.cuda.get_device_properties(device)
    lanes = _CUDA_LANES_EXACT.get((found.major, found.minor), _CUDA_LANES.get(found.major))
    clock_hz, memory_hz = (getattr(found, name, 0) * 1e3 for name in ("clock_rate", "memory_clock_rate"))
    bus_bytes = getattr(found, "memory_bus_width", 0) / 8
    flops = found.multi_processor_count * lanes * 2 * clock_hz if lanes and clock_hz else None
    memory = bus_bytes * 2 * memory_hz or None
    return Peak(flops, memory, f"{found.multi_processor_count} multiprocessors at {clock_hz / 1e9:.2f} GHz, as the driver says")


def _cpu_peak() -> Peak:
    lanes, clock_hz, threads = _vector_lanes(), _clock_hz(), torch.get_num_threads()
    if lanes is None or clock_hz is None:
        return Peak(None, None, "unknown: the system does not tell the processor's clock or vector width")
    how = f"estimated: {threads} threads x {lanes} lanes x 2 units x multiply-add at {clock_hz / 1e9:.2f} GHz"
    return Peak(threads * lanes * _UNITS * 2 * clock_hz, None, how)


def _vector_lanes() -> int | None:
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split())
    except OSError:
        return 4 if platform.machine().lower() in ("arm64", "aarch64") else None
    return next((lanes for flag, lanes in _CPU_LANES if flag in words), None)


def _clock_hz() -> float | None:
    """The highest clock, or the present one where only that is known."""
    try:
        clock = psutil.cpu_freq()
    except (OSError, NotImplementedError, AttributeError):
        return None
    mhz = (clock.max or clock.current) if clock is not None else 0.0
    return mhz * 1e6 or None
