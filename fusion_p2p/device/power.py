"""Whether this machine runs on its battery."""

from __future__ import annotations

from pathlib import Path

POWER_SUPPLIES = Path("/sys/class/power_supply")
"""Documentation/ABI/testing/sysfs-class-power of the Linux kernel."""


def on_battery(supplies: Path = POWER_SUPPLIES) -> bool:
    """True while a battery of the machine itself discharges and no charger is plugged in. False where there is no battery."""
    kinds = [(_read(supply, "type"), supply) for supply in _listed(supplies)]
    if any(kind in ("Mains", "USB") and _read(supply, "online") == "1" for kind, supply in kinds):
        return False
    batteries = (supply for kind, supply in kinds if kind == "Battery" and _read(supply, "scope") != "Device")
    return any(_read(supply, "status") == "Discharging" for supply in batteries)


def _listed(supplies: Path) -> list[Path]:
    try:
        return sorted(supplies.iterdir())
    except OSError:
        return []


def _read(supply: Path, name: str) -> str:
    """An attribute; empty when the driver has none, or the device has just gone."""
    try:
        return (supply / name).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
