"""What a swarm has measured of itself: the network that its plans are made for, asked as a guest.

python -m contrib.testbeds.survey BOOTSTRAP STATE_DIR LISTEN           prints JSON
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from fusion_p2p.config import PlanConfig
from fusion_p2p.plan.network import Network


def as_dict(network: Network) -> dict[str, Any]:
    """Its links, the owner's included."""
    return {
        "peers": network.peers,
        "sites": network.sites.tolist(),
        "latency_s": network.alpha_s.tolist(),
        "seconds_per_byte": network.beta_s.tolist(),
    }


def main() -> int:
    """Ask and print."""
    from fusion_p2p.cli.live_network import live_network  # imports hivemind

    bootstrap, state, listen = sys.argv[1:]
    config = PlanConfig(bootstrap=(bootstrap,), state_dir=Path(state), listen=(listen,), no_nat=True)
    return asyncio.run(live_network(config, lambda line: None, lambda network: print(json.dumps(as_dict(network)))))


if __name__ == "__main__":
    sys.exit(main())
