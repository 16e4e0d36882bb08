"""`fusion-peer join`: gives this machine's device to a swarm."""

from __future__ import annotations

import os
from functools import partial

from fusion_p2p.cli.addresses import check_addresses
from fusion_p2p.cli.flags import Given
from fusion_p2p.cli.identity_file import claimed_identity
from fusion_p2p.cli.logs import configure_logging
from fusion_p2p.cli.running import run
from fusion_p2p.config import JoinConfig


def join(given: Given) -> int:
    """Give this machine's device to a swarm. Ctrl+C hands over what it executes, and leaves; Ctrl+C again leaves at once."""
    config = given.resolve(JoinConfig)
    check_addresses(config, config.bootstrap)
    configure_logging(config.log_level)
    # Before torch is loaded: several peers on one machine whose idle kernels' threads spin slow each other down fivefold.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from fusion_p2p.monitor.join_view import JoinView
    from fusion_p2p.monitor.metrics_page import MetricsPage
    from fusion_p2p.peer.agent import run_join  # imports torch and hivemind
    from fusion_p2p.peer.volunteer_service import Farewell

    with claimed_identity(config, "join") as claimed:
        page = MetricsPage(claimed.metrics_port) if claimed.metrics_port is not None else None
        view = JoinView(partial(print, flush=True), page=page)
        farewell = Farewell()
        return run(run_join(claimed, view, farewell), stopped_code=0, drain=farewell.asked)
