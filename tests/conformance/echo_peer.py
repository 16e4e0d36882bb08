"""A process with a network of its own that echoes: tests kill it, stop it and start it again.

    python -m tests.conformance.echo_peer IDENTITY_FILE LISTEN [PEER_ADDRESS ...]

prints the pid of its daemon and its address, connects to the peers given and serves until it is killed or its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from fusion_p2p.net.hivemind import NetworkSettings, open_network
from tests.conformance.harness import connected, echo

PROTOCOL = "/test/echo/1"


async def main(identity: str, listen: str, *others: str) -> None:
    settings = NetworkSettings(identity_path=Path(identity), listen=(listen,))
    async with open_network(settings) as network:
        await network.transport.serve(PROTOCOL, echo)
        for other in others:
            await connected(network.transport, [other])
        print(network.transport.daemon.pid, network.transport.addresses[0], flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
