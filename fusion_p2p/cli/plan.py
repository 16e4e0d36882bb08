"""`fusion-peer plan`: a dry run of the planner."""

from __future__ import annotations

import sys

from fusion_p2p.cli.addresses import check_addresses
from fusion_p2p.cli.codecs import check_codec
from fusion_p2p.cli.flags import Given
from fusion_p2p.cli.logs import configure_logging
from fusion_p2p.config import PlanConfig


def plan(given: Given) -> int:
    """Show who would execute what, how long a step takes, and why. For a network from a file or for a live swarm."""
    config = given.resolve(PlanConfig)
    check_addresses(config, config.bootstrap)
    check_codec(config.codec, config.ratio)
    configure_logging(config.log_level)
    from fusion_p2p.cli.planning import print_plan  # imports torch

    return print_plan(config, lambda line: print(line, file=sys.stderr))
