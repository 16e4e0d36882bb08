"""Where processes run: all on loopback, or each on a node of its own whose links can be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from contrib.processes import Program
from contrib.testbeds.emulation import EmulatedNetwork, emulated_network
from contrib.testbeds.namespaces import set_wire
from contrib.testbeds.shaping import Shape


class Place(Protocol):
    """Nodes, numbered from 0, that programs can run on."""

    def address(self, node: int) -> str:
        """Its IPv4 address."""

    def start(self, name: str, node: int, command: Sequence[str]) -> Program:
        """Start a program there."""

    def cut(self, node: int) -> None:
        """No packet reaches the node or leaves it any more. NotImplementedError where that cannot be done."""

    def mend(self, node: int) -> None:
        """They do again."""


class Loopback:
    """All nodes are this machine."""

    def address(self, node: int) -> str:
        return "127.0.0.1"

    def start(self, name: str, node: int, command: Sequence[str]) -> Program:
        return Program(name, command)

    def cut(self, node: int) -> None:
        raise NotImplementedError("links are cut in network namespaces only")

    def mend(self, node: int) -> None:
        raise NotImplementedError("links are cut in network namespaces only")


class Nodes:
    """A network namespace each, joined by links as fast as this machine carries them."""

    def __init__(self, network: EmulatedNetwork) -> None:
        self._network = network

    def address(self, node: int) -> str:
        return self._network.shape.addresses[node]

    def start(self, name: str, node: int, command: Sequence[str]) -> Program:
        return self._network.start(name, node, command)

    def cut(self, node: int) -> None:
        set_wire(self._network.namespaces[self.address(node)], up=False)

    def mend(self, node: int) -> None:
        set_wire(self._network.namespaces[self.address(node)], up=True)


@contextmanager
def nodes(count: int, folder: Path) -> Iterator[Nodes]:
    """So many nodes while the block runs. ProgramFailed says why this machine cannot have them."""
    nothing = tuple((0.0,) * count for _ in range(count))
    shape = Shape(
        addresses=tuple(f"10.77.1.{node + 1}" for node in range(count)),
        sites=(0,) * count,
        latency_s=nothing,
        seconds_per_byte=nothing,
        uplink_s=(0.0,),
        downlink_s=(0.0,),
    )
    with emulated_network(shape, folder) as network:
        yield Nodes(network)
