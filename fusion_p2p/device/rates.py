"""What a device really reaches in training: small kernels run forward and backward, timed, and remembered.

Never a table of device names: the same card reaches other rates under another driver, torch, dtype or number of threads, which
together are the key of the remembered figures. Operations are counted as `graph.workload` counts them: backward = 2 x forward.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from fusion_p2p.device.memory import device_name
from fusion_p2p.errors import ConfigError
from fusion_p2p.ids import digest_of

Benchmark = Literal["auto", "again", "off"]
Precision = Literal["fp32", "bf16"]

_MINIMUM_RUNS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Floating-point operations per second by kind of kernel, and bytes per second of what only moves memory."""

    matmul_flops: float
    convolution_flops: float
    attention_flops: float
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A differentiable call on tensors of these shapes, and the work (operations or bytes) of it with its backward pass."""

    call: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    work: float


def measure(device: torch.device, budget_s: float = 1.0, *, precision: Precision = "fp32") -> Rates:
    """Run each kind of kernel for about a quarter of `budget_s` (at least three times) and take the median time."""
    kernels = _kernels(scale=4 if device.type == "cuda" else 1)
    rates = {
        name: kernel.work / _seconds(kernel, device, budget_s / len(kernels), precision) for name, kernel in kernels.items()
    }
    return Rates(**rates)


def rates(
    device: torch.device,
    directory: Path,
    *,
    benchmark: Benchmark = "auto",
    precision: Precision = "fp32",
    budget_s: float = 1.0,
) -> Rates:
    """The remembered rates of this device, measured first when there are none (`auto`) or in any case (`again`).

    ConfigError when the benchmark is `off` and nothing is remembered: a peer announces only what was measured.
    """
    key = cache_key(device, precision)
    path = rates_file(device, directory, precision)
    remembered = None if benchmark == "again" else _read(path, key)
    if remembered is not None:
        return remembered
    if benchmark == "off":
        raise ConfigError(f"no measured rates of {key['device']} in {directory}: run once without --benchmark off")
    measured = measure(device, budget_s, precision=precision)
    _write(path, key, measured)
    return measured


def rates_file(device: torch.device, directory: Path, precision: Precision = "fp32") -> Path:
    """Where the rates of a device are remembered."""
    return directory / f"rates-{digest_of(json.dumps(cache_key(device, precision)).encode())[:16]}.json"


def cache_key(device: torch.device, precision: Precision) -> dict[str, str | int]:
    """Everything that the rates depend on."""
    return {
        "device": device_name(device),
        "driver": _driver() if device.type == "cuda" else "",
        "torch": str(torch.__version__),
        "precision": precision,
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
    }


def _kernels(scale: int) -> dict[str, _Kernel]:
    size, batch, elements = 384 * scale, 4 * scale, (4 << 20) * scale
    matmul = _Kernel(torch.matmul, ((size, size), (size, size)), 3 * 2 * size**3)
    images, filters = (batch, 64, 28, 28), (64, 64, 3, 3)
    convolution = _Kernel(_convolve, (images, filters), 3 * 2 * batch * 28 * 28 * 64 * 64 * 9)
    heads = (batch, 8, 256, 32)
    attention = _Kernel(_attend, (heads,) * 3, 3 * 4 * batch * 8 * 256 * 256 * 32)
    multiply = _Kernel(torch.mul, ((elements,), (elements,)), 9 * 4 * elements)
    return {
        "matmul_flops": matmul,
        "convolution_flops": convolution,
        "attention_flops": attention,
        "memory_bytes_per_s": multiply,
    }


def _convolve(images: Tensor, filters: Tensor) -> Tensor:
    return functional.conv2d(images, filters, padding=1)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=False)


def _seconds(kernel: _Kernel, device: torch.device, budget_s: float, precision: Precision) -> float:
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in kernel.shapes]
    gradient: Tensor | None = None
    times: list[float] = []
    started = time.perf_counter()
    while len(times) <= _MINIMUM_RUNS or time.perf_counter() - started < budget_s:
        begin = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            result = kernel.call(*leaves)
        gradient = torch.ones_like(result) if gradient is None else gradient
        torch.autograd.grad(result, leaves, gradient)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def _driver() -> str:
    """The driver's version: NVML knows it on every system (extra `gpu`), without it a file of Linux does."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except ImportError:
        return _driver_of_linux()
    except pynvml.NVMLError as error:
        return f"unknown ({error})"


def _driver_of_linux() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return f"cuda {torch.version.cuda}"
    return text.partition("\n")[0].strip()


def _read(path: Path, key: dict[str, str | int]) -> Rates | None:
    """The figures in `path`; None when it is missing, damaged or of another key, which only means to measure again."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            return None
        return Rates(**{field.name: _positive(content["rates"][field.name]) for field in fields(Rates)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _positive(number: object) -> float:
    if not isinstance(number, float) or not 0 < number < float("inf"):
        raise ValueError(f"{number!r} is not a rate")
    return number


def _write(path: Path, key: dict[str, str | int], measured: Rates) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.part")
    partial.write_text(json.dumps({"key": key, "rates": asdict(measured)}, indent=2), encoding="utf-8")
    partial.replace(path)
