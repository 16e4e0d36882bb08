"""Asks the swarm who is in it and prints the answer."""

from __future__ import annotations

import sys

from rich.console import Console

from fusion_p2p.config import StatusConfig
from fusion_p2p.monitor.swarm_table import swarm_json, swarm_picture
from fusion_p2p.owner.enlistment import swarm_status
from fusion_p2p.peer.joining import join_as_guest


async def print_status(config: StatusConfig) -> int:
    """Join as a guest, ask, print a table (or one JSON object) on standard output. SwarmUnreachable when nobody answers."""

    def unheard(line: str) -> None:
        """Phases of joining are of no interest here; with --debug they are shown beside the answer."""
        if config.debug:
            print(line, file=sys.stderr)

    async with join_as_guest(config, unheard) as joined:
        reply = await swarm_status(joined.transport, joined.directory, config.timeout_s)
    if config.json:
        print(swarm_json(reply))
    else:
        Console().print(swarm_picture(reply))
    return 0
