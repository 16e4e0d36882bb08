"""`fusion-peer bench`: what this machine's device reaches."""

from __future__ import annotations

from fusion_p2p.cli.flags import Given
from fusion_p2p.cli.logs import configure_logging
from fusion_p2p.config import BenchConfig


def bench(given: Given) -> int:
    """Show what this machine's device reaches in training, beside its peak. The figures are those that a peer announces."""
    config = given.resolve(BenchConfig)
    configure_logging(config.log_level)
    from fusion_p2p.cli.own_rates import print_rates  # imports torch

    return print_rates(config)
