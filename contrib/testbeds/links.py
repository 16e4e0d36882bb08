"""The emulator: one process that holds a network namespace for every node and carries the packets between them.

    python -m contrib.testbeds.links SHAPE.json

prints a line `node ADDRESS NAMESPACE` for every node and `links are up`, and runs until it is told to end or its parent is
gone; namespaces, devices and routes go with it. `nsenter --net=NAMESPACE PROGRAM` runs a program on a node.
"""

from __future__ import annotations

import errno
import heapq
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from contrib.testbeds.namespaces import Namespace, open_namespace, why_not
from contrib.testbeds.shaping import Shape, Shaper, read_shape

MAX_PACKET_BYTES = 65536
PACKETS_A_TURN = 64
LOOK_S = 1.0
"""How often the emulator looks whether it should end."""


class Emulator:
    """Reads packets from the wires, holds each until its time, and writes it to the wire of its target."""

    def __init__(self, shape: Shape, namespaces: Sequence[Namespace]) -> None:
        self._shaper = Shaper(shape)
        self._wires = [namespace.wire for namespace in namespaces]
        self._node_of_wire = {wire: node for node, wire in enumerate(self._wires)}
        self._node_of_address = {socket.inet_aton(address): node for node, address in enumerate(shape.addresses)}
        self._waiting: list[tuple[float, int, int, bytes]] = []
        self._number = 0
        self.ended = False

    def run(self) -> None:
        """Carry packets until `ended`, or until the parent process is gone."""
        parent = os.getppid()
        while not self.ended and os.getppid() == parent:
            wait_s = min(LOOK_S, self._waiting[0][0] - time.monotonic()) if self._waiting else LOOK_S
            # select, not poll: its time-out has microseconds, and a LAN has latencies below poll's millisecond
            ready, _, _ = select.select(self._wires, [], [], max(0.0, wait_s))
            for wire in ready:
                self._take(wire)
            self._deliver()

    def _take(self, wire: int) -> None:
        source = self._node_of_wire[wire]
        for _ in range(PACKETS_A_TURN):
            try:
                packet = os.read(wire, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            target = self._node_of_address.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is None:  # IPv6 and multicast: nobody here speaks them
                continue
            arrival = self._shaper.arrival(source, target, len(packet), time.monotonic())
            if arrival is not None:
                self._number += 1
                heapq.heappush(self._waiting, (arrival, self._number, target, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._waiting)
            try:
                os.write(self._wires[target], packet)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EIO):
                    raise
                # Its namespace takes no more, or its wire is down: lost, as on any network.


def main() -> int:
    """Bring up the links of a shape file and carry packets; 1 with a sentence when this machine cannot."""
    reason = why_not()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    shape = read_shape(Path(sys.argv[1]).read_text(encoding="utf-8"))
    try:
        namespaces = [open_namespace(address) for address in shape.addresses]
    except OSError as error:
        print(f"error: {error.strerror}", file=sys.stderr)
        return 1
    emulator = Emulator(shape, namespaces)

    def end(number: int, frame: FrameType | None) -> None:
        emulator.ended = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    for address, namespace in zip(shape.addresses, namespaces, strict=True):
        print(f"node {address} {namespace.path}")
    print("links are up", flush=True)
    emulator.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
