"""How much memory a device has to give, and what it is called."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

MARGIN = 0.1
"""Share of the free memory that is never promised: allocators fragment, and the machine's user has other things open."""

_CGROUP = Path("/sys/fs/cgroup")


def device_name(device: torch.device) -> str:
    """The name of the card or processor, as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _processor_name() or platform.processor() or platform.machine()


def free_bytes(device: torch.device) -> int:
    """Free memory less MARGIN. On the CPU, what the system can give without swapping, within the container's limit.

    What torch keeps of a card after its tensors have gone counts as free: the next slices get it.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    else:
        free = min(psutil.virtual_memory().available, _container_bytes_left(_CGROUP))
    return int(free * (1 - MARGIN))


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _container_bytes_left(cgroup: Path) -> int:
    """What a cgroup (version 2) still allows; unlimited when there is none, which psutil does not know of."""
    unlimited = 1 << 62
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = (cgroup / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return unlimited
    return max(0, int(limit) - int(used)) if limit.isdecimal() and used.isdecimal() else unlimited
