"""Words for people: strangers' text made harmless, numbers made short."""

from __future__ import annotations

from fusion_p2p.ids import PeerId
from fusion_p2p.plan.explain import short_peer


def harmless(text: str, limit: int = 200) -> str:
    """Text from a peer as one bounded line: what is not printable (escape sequences, line breaks) becomes `?`."""
    shown = "".join(character if character.isprintable() else "?" for character in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def peer_name(peer: PeerId) -> str:
    """How a peer is called in a line."""
    return harmless(short_peer(peer))


def duration(seconds: float) -> str:
    """`3:05` or `2:03:05`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def num_bytes(count: int) -> str:
    """`512 B`, `1.5 KiB`, `20.0 MiB`."""
    size, units = float(count), iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while size >= 1024 and unit != "GiB":
        size, unit = size / 1024, next(units)
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def loss(value: float | None) -> str:
    """Four decimals, or a dash when there is none yet."""
    return "-" if value is None else f"{value:.4f}"
