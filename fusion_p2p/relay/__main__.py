"""`python -m fusion_p2p.relay`: the circuit relay, started by a bootstrap node as its child and ended with it.

One JSON line on standard output says that it is up: {"peer_id": ..., "addresses": [...]}.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path


def main() -> int:
    """Exit code 0 when the parent has gone or asked for it, 2 for wrong arguments, 1 when a port is taken."""
    parser = argparse.ArgumentParser(prog="python -m fusion_p2p.relay", description="A libp2p circuit relay.")
    parser.add_argument("--listen", action="append", required=True, help="multiaddr to listen on (repeatable)")
    parser.add_argument("--identity", type=Path, required=True, help="Ed25519 key file; created when there is none")
    parser.add_argument("--reservations", type=int, default=128, help="peers that may be reached through it at once")
    parser.add_argument("--circuits", type=int, default=256, help="circuits open at once per peer")
    parser.add_argument("--duration-s", type=int, default=7200, help="age in seconds at which a circuit is reset")
    parser.add_argument("--bytes", type=int, default=16 << 30, help="bytes after which a circuit is reset")
    arguments = parser.parse_args()

    import trio

    from fusion_p2p.errors import FusionError
    from fusion_p2p.net.identity import Identity
    from fusion_p2p.relay.node import RelaySettings, run_relay

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C goes to the whole group: the parent decides when we end
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    settings = RelaySettings(
        listen=tuple(arguments.listen),
        reservations=arguments.reservations,
        circuits=arguments.circuits,
        duration_s=arguments.duration_s,
        num_bytes=arguments.bytes,
    )
    try:
        trio.run(run_relay, settings, Identity.load_or_create(arguments.identity))
    except FusionError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: the relay cannot listen on {', '.join(settings.listen)}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
