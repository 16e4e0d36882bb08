"""Network namespaces of Linux without leftovers: held by file descriptors, so that they go when their process does.

Each has a loopback and a TUN device, a wire whose other end is a file that the holder reads and writes packets from. Needs the
right to make namespaces (root, or `unshare --user --map-root-user --net`) and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MTU = 9000
"""Jumbo frames: a sixth of the packets that the emulator has to carry."""
DEVICE = "links"
_TUN = "/dev/net/tun"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_INFO = 0x0001 | 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8916, 0x891C, 0x8922
_SETTINGS = {"tcp_slow_start_after_idle": "0", "tcp_no_metrics_save": "1"}
"""Links that pause between steps keep their speed, and a connection learns nothing from an earlier one."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace and the end of its wire: both are file descriptors of this process."""

    network: int
    wire: int

    @property
    def path(self) -> str:
        """What `nsenter --net=` takes, in any process of this machine."""
        return f"/proc/{os.getpid()}/fd/{self.network}"


def why_not() -> str | None:
    """Why namespaces cannot be made here; None when they can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root, or `unshare --user --map-root-user --net` before the command"
    if not os.access(_TUN, os.R_OK | os.W_OK):
        return f"{_TUN} is not there or not open to us"
    return None if shutil.which("nsenter") else "the program nsenter (util-linux) is missing"


def open_namespace(address: str) -> Namespace:
    """A new namespace whose wire has this address in 10.77.0.0/16. OSError when that is not allowed."""
    with _own_namespace() as network:
        _bring_up("lo")
        wire = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(wire, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_WITHOUT_INFO))
        _configure(DEVICE, _SIOCSIFADDR, _address(address))
        _configure(DEVICE, _SIOCSIFNETMASK, _address("255.255.0.0"))
        _configure(DEVICE, _SIOCSIFMTU, struct.pack("i", MTU))
        _bring_up(DEVICE)
        for name, value in _SETTINGS.items():
            Path("/proc/sys/net/ipv4", name).write_text(value)
    return Namespace(network, wire)


def set_wire(path: str, *, up: bool) -> None:
    """Take the wire of a namespace (`Namespace.path`) down, so that no packet passes any more, or up again."""
    network = os.open(path, os.O_RDONLY)
    try:
        with _coming_home() as libc:
            _go_to(libc, network)
            flags = _flags(DEVICE)
            _set_flags(DEVICE, flags | _IFF_UP if up else flags & ~_IFF_UP)
    finally:
        os.close(network)


@contextlib.contextmanager
def _own_namespace() -> Iterator[int]:
    """This thread in a new namespace for the time of the block; gives its descriptor."""
    with _coming_home() as libc:
        if libc.unshare(_CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot make a network namespace")
        yield os.open("/proc/thread-self/ns/net", os.O_RDONLY)


@contextlib.contextmanager
def _coming_home() -> Iterator[ctypes.CDLL]:
    """Wherever this thread goes in the block, it comes back to its own namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        try:
            yield libc
        finally:
            _go_to(libc, home)
    finally:
        os.close(home)


def _go_to(libc: ctypes.CDLL, network: int) -> None:
    if libc.setns(network, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot go to a network namespace")


def _configure(device: str, request: int, value: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, request, struct.pack("16s24s", device.encode(), value))


def _bring_up(device: str) -> None:
    _set_flags(device, _flags(device) | _IFF_UP)


def _flags(device: str) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        answer = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16s24x", device.encode()))
    return int(struct.unpack_from("16xH", answer)[0])


def _set_flags(device: str, flags: int) -> None:
    _configure(device, _SIOCSIFFLAGS, struct.pack("H", flags))


def _address(text: str) -> bytes:
    return struct.pack("HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
