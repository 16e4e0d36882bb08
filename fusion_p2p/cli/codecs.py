"""Checks the codec that the user asked for before anything slow begins."""

from __future__ import annotations

from fusion_p2p.errors import ConfigError


def check_codec(codec: str, ratio: float | None = None) -> None:
    """ConfigError, with what there is, unless a plan can use it; `ratio` is what was asked for beside it."""
    from fusion_p2p.plan.ratios import POLICIES, why_unknown  # imports numpy: kept out of --help

    unknown = why_unknown(codec)
    if unknown is not None:
        raise ConfigError(f"codec: {unknown}")
    if ratio is not None and codec not in POLICIES:
        own = f"as in {codec.partition(':')[0]}:{ratio:g}" if codec.startswith("topk") else "and takes none"
        raise ConfigError(
            f"ratio: it is for the policies {', '.join(POLICIES)}; codec {codec} says itself how much it keeps, {own}"
        )
