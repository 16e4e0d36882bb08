"""Does the emulator do what it was told? One plain TCP connection between two nodes: round trips, then a stream of bytes.

python -m contrib.testbeds.wire_check ADDRESS                                            answers, on one node
python -m contrib.testbeds.wire_check ADDRESS PORT --num-bytes N --quiet-bytes M         asks, on another; prints JSON
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import struct
import sys
import time

ROUND_TRIPS = 10
PIECE_BYTES = 1 << 16
_COUNTS = struct.Struct("!QQ")


def answer(address: str) -> None:
    """Serve one asker: echo its round trips, take its stream, and tell the bytes per second of it after the quiet part."""
    with socket.create_server((address, 0)) as server:
        print(f"port {server.getsockname()[1]}", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ROUND_TRIPS):
            connection.sendall(_read(connection, 1))
        num_bytes, quiet_bytes = _COUNTS.unpack(_read(connection, _COUNTS.size))
        _read(connection, quiet_bytes)
        begun = time.monotonic()
        _read(connection, num_bytes)
        connection.sendall(struct.pack("!d", num_bytes / (time.monotonic() - begun)))


def ask(address: str, port: int, num_bytes: int, quiet_bytes: int) -> dict[str, float]:
    """`latency_s`, half of the median round trip, and `bytes_per_s` from here to there once the stream has settled."""
    with socket.create_connection((address, port), timeout=30.0) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        round_trips = []
        for _ in range(ROUND_TRIPS):
            begun = time.monotonic()
            connection.sendall(b"?")
            _read(connection, 1)
            round_trips.append(time.monotonic() - begun)
        connection.sendall(_COUNTS.pack(num_bytes, quiet_bytes))
        connection.sendall(bytes(num_bytes + quiet_bytes))
        bytes_per_s = struct.unpack("!d", _read(connection, 8))[0]
    return {"latency_s": statistics.median(round_trips) / 2, "bytes_per_s": bytes_per_s}


def _read(connection: socket.socket, num_bytes: int) -> bytes:
    """Read so many bytes; what is given back is whole when it is at most a piece, else its end."""
    piece = b""
    while num_bytes:
        wanted = num_bytes % PIECE_BYTES or PIECE_BYTES
        piece = connection.recv(wanted, socket.MSG_WAITALL)
        if len(piece) < wanted:
            raise ConnectionError("the other end has gone")
        num_bytes -= wanted
    return piece


def main() -> int:
    """Answer or ask."""
    parser = argparse.ArgumentParser(prog="python -m contrib.testbeds.wire_check")
    parser.add_argument("address")
    parser.add_argument("port", type=int, nargs="?", help="of the one that answers; none: answer")
    parser.add_argument("--num-bytes", type=int, default=1 << 20)
    parser.add_argument("--quiet-bytes", type=int, default=0, help="sent before the clock starts")
    given = parser.parse_args()
    if given.port is None:
        answer(given.address)
    else:
        print(json.dumps(ask(given.address, given.port, given.num_bytes, given.quiet_bytes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
