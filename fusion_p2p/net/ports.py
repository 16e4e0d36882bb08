"""Listen ports: found to be free, chosen where any will do, and kept ours while we live.

p2pd listens with SO_REUSEPORT: two daemons of one user would share a port and steal each other's connections without a word.
A socket that is bound but never listens keeps the port from everybody but our own daemon, also while that is restarted.
And when it listens on all hosts, p2pd tells only the one of the default route, which may be a VPN's: the others are found here.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import psutil

from fusion_p2p.errors import ConfigError

INNER_INTERFACES = ("docker", "br-", "veth", "virbr", "cni", "lxc")


@contextlib.contextmanager
def reserved_ports(listen: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The checked listen addresses with real ports instead of 0, kept until the end. ConfigError names a port that is taken."""
    with contextlib.ExitStack() as held:
        yield tuple(_reserve(address, held) for address in listen)


def machine_hosts() -> tuple[str, ...]:
    """IPv4 addresses of interfaces that lead somewhere: up, not loopback, not the bridges of containers on this machine."""
    states = psutil.net_if_stats()
    return tuple(
        entry.address
        for name, entries in psutil.net_if_addrs().items()
        if name in states and states[name].isup and not name.startswith(INNER_INTERFACES)
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith(("127.", "169.254."))
    )


def _reserve(address: str, held: contextlib.ExitStack) -> str:
    _, family_name, host, transport, port, *rest = address.split("/")
    family = socket.AF_INET6 if family_name == "ip6" else socket.AF_INET
    kind = socket.SOCK_STREAM if transport == "tcp" else socket.SOCK_DGRAM
    try:
        chosen = _free_port(family, kind, host, int(port))
        if transport == "tcp":  # p2pd's UDP sockets do not share
            keeper = held.enter_context(socket.socket(family, kind))
            keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            _bind(keeper, host, chosen)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {address}: port {port}: {error.strerror}; stop what uses it or choose another with --listen"
        ) from None
    return "/".join(["", family_name, host, transport, str(chosen), *rest])


def _free_port(family: int, kind: int, host: str, port: int) -> int:
    """`port` itself, or any free one for 0; OSError when somebody listens there."""
    with socket.socket(family, kind) as probe:
        if kind == socket.SOCK_STREAM:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger from before do not count
        _bind(probe, host, port)
        return int(probe.getsockname()[1])


def _bind(sock: socket.socket, host: str, port: int) -> None:
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    sock.bind((host, port))
