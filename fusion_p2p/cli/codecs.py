"""Checks the codec that the user asked for before anything slow begins."""

from __future__ import annotations

from fusion_p2p.errors import ConfigError


def check_codec(codec: str) -> None:
    """ConfigError, with what there is, unless a plan can use it."""
    from fusion_p2p.plan.ratios import why_unknown  # imports numpy: kept out of --help

    unknown = why_unknown(codec)
    if unknown is not None:
        raise ConfigError(f"codec: {unknown}")
