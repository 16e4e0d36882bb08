"""A peer for tests: joins, echoes what comes, and does what its standard input says. One JSON object per line, both ways.

    -> {"to": peer id, "addresses": [...], "num_bytes": n, "piece_bytes": m}
    <- {"sent": n, "resets": how often the stream broke and was opened again, "via": address of the other end}

A piece is echoed before the next goes out, so after a reset exactly one piece is sent again: what a value lane does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import sys
import time
from pathlib import Path

from fusion_p2p.errors import FusionError, NetworkError, PeerUnreachable
from fusion_p2p.ids import PeerId
from fusion_p2p.net.base import Stream
from fusion_p2p.net.hello import address_of
from fusion_p2p.net.hivemind import NetworkSettings
from fusion_p2p.peer.joining import Joined, JoinSettings, join_swarm

PROTOCOL = "/test/echo/1"
PATIENCE_S = 30.0


async def main(folder: Path, bootstrap: str, listen: str, announce: tuple[str, ...]) -> None:
    settings = JoinSettings(
        network=NetworkSettings(identity_path=folder / "key", listen=(listen,), announce=announce, map_ports=False),
        bootstraps=(bootstrap,),
        peers_file=folder / "peers.json",
        join_timeout_s=30,
    )
    async with join_swarm(settings, lambda line: print(line, file=sys.stderr, flush=True)) as joined:
        await joined.transport.serve(PROTOCOL, echo)
        say(peer=joined.transport.peer_id, addresses=joined.transport.addresses, reachability=joined.reachability)
        while line := await asyncio.to_thread(sys.stdin.readline):
            await obey(joined, json.loads(line))


async def echo(stream: Stream) -> None:
    while True:
        size = int.from_bytes(await stream.read_exactly(4), "big")
        await stream.write(await stream.read_exactly(size))


async def obey(joined: Joined, order: dict[str, object]) -> None:
    peer, addresses = PeerId(str(order["to"])), [str(address) for address in order["addresses"]]  # type: ignore[attr-defined]
    pieces = int(order["num_bytes"]) // int(order["piece_bytes"])  # type: ignore[call-overload]
    rng, resets, sent, via = random.Random(1), 0, 0, ""
    stream: Stream | None = None
    deadline = time.monotonic() + PATIENCE_S
    while sent < pieces:
        piece = rng.randbytes(int(order["piece_bytes"]))  # type: ignore[call-overload]
        try:
            if stream is None:
                await joined.transport.connect(addresses, timeout_s=5)
                stream = await joined.transport.open(peer, PROTOCOL, timeout_s=5)
                via = address_of(stream)
            async with asyncio.timeout(10):
                await stream.write(len(piece).to_bytes(4, "big") + piece)
                if await stream.read_exactly(len(piece)) != piece:
                    raise AssertionError("the echo differs")
            sent += 1
        except NetworkError as error:
            if time.monotonic() > deadline:
                raise
            resets += not isinstance(error, PeerUnreachable)
            stream = None
            await asyncio.sleep(0.2)
    say(sent=sent * int(order["piece_bytes"]), resets=resets, via=via)  # type: ignore[call-overload]


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    try:
        asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], tuple(sys.argv[4:])))
    except FusionError as error:
        say(error=f"{type(error).__name__}: {error}")
