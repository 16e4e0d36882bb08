"""`fusion-peer status`: who is in the swarm."""

from __future__ import annotations

from fusion_p2p.cli.addresses import check_addresses
from fusion_p2p.cli.flags import Given
from fusion_p2p.cli.identity_file import claimed_identity
from fusion_p2p.cli.logs import configure_logging
from fusion_p2p.cli.running import INTERRUPTED, run
from fusion_p2p.config import StatusConfig


def status(given: Given) -> int:
    """Show who is in the swarm, what they hold, and who coordinates."""
    config = given.resolve(StatusConfig)
    check_addresses(config, config.bootstrap)
    configure_logging(config.log_level)
    from fusion_p2p.cli.swarm_status import print_status  # imports hivemind

    with claimed_identity(config, "status") as claimed:
        return run(print_status(claimed), stopped_code=INTERRUPTED)
