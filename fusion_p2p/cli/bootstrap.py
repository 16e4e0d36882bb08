"""`fusion-peer bootstrap`: the node that others know the address of."""

from __future__ import annotations

from fusion_p2p.cli.addresses import check_addresses
from fusion_p2p.cli.flags import Given
from fusion_p2p.cli.identity_file import claimed_identity
from fusion_p2p.cli.logs import configure_logging
from fusion_p2p.cli.running import run
from fusion_p2p.config import BootstrapConfig


def bootstrap(given: Given) -> int:
    """Run a node that peers find each other through. It prints its address."""
    config = given.resolve(BootstrapConfig)
    check_addresses(config, config.bootstrap)
    configure_logging(config.log_level)
    from fusion_p2p.peer.bootstrap_node import run_bootstrap  # imports hivemind

    with claimed_identity(config, "bootstrap") as claimed:
        return run(run_bootstrap(claimed), stopped_code=0)
