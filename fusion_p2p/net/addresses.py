"""Multiaddrs as people type, paste and read them: checked component by component, sorted by how far they reach.

A wrong address is refused before any network is touched, and the sentence points at the component that is wrong.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

import base58
from multiaddr import Multiaddr

from fusion_p2p.errors import AddressError
from fusion_p2p.ids import PeerId

logging.getLogger("multiaddr").setLevel(logging.INFO)  # it reports every byte it parses
PEER_FORM = "/ip4/HOST/tcp/PORT/p2p/PEER_ID"
LISTEN_FORM = "/ip4/HOST/tcp/PORT"
CIRCUIT = "/p2p-circuit"
MAX_ADDRESS_CHARACTERS = 256
MAX_REMEMBERED = 4096
"""Addresses parsed once: peers announce the same ones again and again."""

_HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_PORTS = ("tcp", "udp")
_FLAGS = ("quic-v1", "ws", "p2p-circuit")
_MEANT = {"ip": "ip4", "ipv4": "ip4", "ipv6": "ip6", "ipfs": "p2p", "peer": "p2p", "host": "dns4", "port": "tcp"}


class Reach(IntEnum):
    """From how far away an address can be dialled; the smaller, the better to hand out."""

    PUBLIC = 0
    RELAYED = 1
    LAN = 2
    LOOPBACK = 3


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """A full address: how to dial, and who must answer."""

    text: str
    """With `/p2p/ID` at its end."""
    peer: PeerId

    @property
    def dial(self) -> str:
        """Without the closing `/p2p/ID`."""
        return self.text.removesuffix(f"/p2p/{self.peer}")


def parse_peer_address(text: str, *, own: PeerId | None = None) -> PeerAddress:
    """The address of another peer, `/p2p/ID` included. AddressError says which component is wrong and shows the right form."""
    address = _parse_peer_address(text)
    if address.peer == own:
        raise AddressError(f"address {text!r} is this peer's own: give the address of another one")
    return address


@functools.lru_cache(MAX_REMEMBERED)
def _parse_peer_address(text: str) -> PeerAddress:
    parts = _components(text, PEER_FORM)
    if parts[-1][0] != "p2p":
        raise AddressError(f"address {text!r} does not end in /p2p/PEER_ID: copy the whole line that the other side prints")
    for name, value in parts:
        if name in _PORTS and int(value) == 0:
            raise AddressError(f"address {text!r}: /{name}/0 is no port that can be dialled; use the one the other side prints")
    return PeerAddress(_normal(text), PeerId(parts[-1][1]))


def one_peer(addresses: Iterable[str], *, own: PeerId | None = None) -> list[PeerAddress]:
    """Addresses that are all of one peer. AddressError when they are not, or there is none."""
    targets = [parse_peer_address(address, own=own) for address in addresses]
    if len({target.peer for target in targets}) != 1:
        said = ", ".join(target.text for target in targets)
        raise AddressError(f"these addresses are not those of one peer: {said or 'none given'}")
    return targets


def parse_listen_address(text: str) -> str:
    """Where to listen; port 0 means any free one. AddressError as above."""
    parts = _components(text, LISTEN_FORM)
    if any(name in ("p2p", "p2p-circuit") for name, _ in parts):
        raise AddressError(f"address {text!r}: a listen address has no /p2p/...; the form is {LISTEN_FORM}")
    if parts[0][0] not in ("ip4", "ip6"):
        raise AddressError(f"address {text!r}: listen on a numeric address, such as /ip4/0.0.0.0/tcp/31337")
    return _normal(text)


def parse_announce_address(text: str) -> str:
    """What to tell others instead of what we listen on; a real port, no `/p2p/ID`. AddressError as above."""
    parts = _components(text, LISTEN_FORM)
    if any(name in ("p2p", "p2p-circuit") for name, _ in parts):
        raise AddressError(f"address {text!r}: our own /p2p/... is added by itself; the form is {LISTEN_FORM}")
    if any(name in _PORTS and int(value) == 0 for name, value in parts):
        raise AddressError(f"address {text!r}: port 0 cannot be announced; give the port that is forwarded to this machine")
    return _normal(text)


def circuit_address(relay: str, peer: PeerId) -> str:
    """How to dial `peer` through a relay whose full address is given."""
    return f"{relay}{CIRCUIT}/p2p/{peer}"


def is_relayed(address: str) -> bool:
    """Whether an address goes through a relay."""
    return CIRCUIT in address


def port_of(address: str) -> int:
    """The TCP or UDP port of a checked address."""
    return int(next(value for name, value in _components(address, LISTEN_FORM) if name in _PORTS))


def reach(address: str) -> Reach:
    """How far a checked address reaches; names count as public."""
    if is_relayed(address):
        return Reach.LOOPBACK if reach(address.split(CIRCUIT)[0]) is Reach.LOOPBACK else Reach.RELAYED
    name, value = address.split("/")[1:3]
    if name not in ("ip4", "ip6"):
        return Reach.PUBLIC
    host = ipaddress.ip_address(value)
    if host.is_loopback:
        return Reach.LOOPBACK
    return Reach.PUBLIC if host.is_global else Reach.LAN


def by_reach(addresses: Iterable[str]) -> tuple[str, ...]:
    """Each address once: public, relayed, LAN, loopback; TCP before others; otherwise in the order given."""
    return tuple(sorted(dict.fromkeys(addresses), key=lambda address: (reach(address), "/tcp/" not in address)))


def on_all_hosts(addresses: Iterable[str], listen: Iterable[str], hosts: Iterable[str]) -> tuple[str, ...]:
    """`addresses`, and those of the machine's other `hosts` (IPv4) when `listen` has the wildcard host."""
    ports = [address.split("/")[3:] for address in listen if address.startswith("/ip4/0.0.0.0/")]
    found = ["/".join(["/ip4", host, *port]) for port in ports for host in hosts]
    return tuple(dict.fromkeys((*addresses, *found)))


def reach_warning(addresses: Iterable[str]) -> str | None:
    """A sentence when nobody on another machine can use any of these addresses."""
    if all(reach(address) is Reach.LOOPBACK for address in addresses):
        return "only this machine can dial this peer: it listens on loopback; use --listen /ip4/0.0.0.0/tcp/PORT for others"
    return None


def _components(text: str, form: str) -> list[tuple[str, str]]:
    """Names and values of a multiaddr; AddressError points at the first component that is wrong."""
    _refuse_other_syntax(text, form)
    words = text.strip("/").split("/") if text.strip("/") else []
    parts: list[tuple[str, str]] = []
    while words:
        name = words.pop(0)
        if name in _FLAGS:
            parts.append((name, ""))
        elif name in (*_HOSTS, *_PORTS, "p2p"):
            value = words.pop(0) if words else ""
            if problem := _value_problem(name, value):
                raise AddressError(f"address {text!r}: /{name}/{value} {problem}; the form is {form}")
            parts.append((name, value))
        else:
            meant = _MEANT.get(name.lower())
            hint = f"did you mean /{meant}" if meant else "it is no part of an address"
            raise AddressError(f"address {text!r}: /{name[:40]} is unknown ({hint}); the form is {form}")
    _check_order(parts, text, form)
    return parts


def _refuse_other_syntax(text: str, form: str) -> None:
    if len(text) > MAX_ADDRESS_CHARACTERS:
        raise AddressError(f"address {text[:40]!r}... has {len(text)} characters, more than {MAX_ADDRESS_CHARACTERS}")
    if re.search(r"\s", text):
        raise AddressError(f"address {text!r} contains a space: give one address at a time, without blanks; the form is {form}")
    if "://" in text:
        raise AddressError(f"address {text!r} is a URL; the form is {form}")
    if not text.startswith("/"):
        raise AddressError(f"address {text!r} does not begin with '/'; the form is {form}")
    if not text.isprintable() or not text.isascii():
        raise AddressError(f"address {text!r} contains characters that no address has; the form is {form}")


def _value_problem(name: str, value: str) -> str | None:
    """What is wrong with the value of a component, in words that follow it; None when it is right."""
    if not value:
        return "has no value"
    if name in _PORTS:
        return None if value.isdecimal() and int(value) <= 65535 else "is not a port from 1 to 65535"
    if name in ("ip4", "ip6"):
        family = ipaddress.IPv4Address if name == "ip4" else ipaddress.IPv6Address
        return None if _parses(family, value) else f"is not an IPv{name[-1]} address" + _dns_hint(value)
    if name == "p2p":
        return None if is_peer_id(value) else "is not a peer id (they begin with 12D3Koo)"
    return None if _HOST_NAME.fullmatch(value) else "is not a host name"


def _parses(family: type[ipaddress.IPv4Address] | type[ipaddress.IPv6Address], value: str) -> bool:
    try:
        family(value)
    except ValueError:
        return False
    return True


def _normal(text: str) -> str:
    """The address as the multiaddr package writes it, which refuses more than is checked here."""
    try:
        return str(Multiaddr(text))
    except ValueError as error:
        raise AddressError(f"address {text!r} cannot be used: {error}") from None


def _dns_hint(value: str) -> str:
    return f" (for a name write /dns4/{value})" if re.search(r"[g-z]", value.lower()) and _HOST_NAME.fullmatch(value) else ""


def is_peer_id(value: str) -> bool:
    """An Ed25519 peer id, or the sha-256 one of an older key."""
    try:
        data = base58.b58decode(value)
    except ValueError:
        return False
    return (len(data) == 38 and data.startswith(b"\x00\x24")) or (len(data) == 34 and data.startswith(b"\x12\x20"))


def _check_order(parts: list[tuple[str, str]], text: str, form: str) -> None:
    names = [name for name, _ in parts]
    if not names or names[0] not in _HOSTS:
        raise AddressError(f"address {text!r} does not begin with a host such as /ip4/...; the form is {form}")
    if len(names) < 2 or names[1] not in _PORTS:
        raise AddressError(f"address {text!r} has no /tcp/PORT after its host; the form is {form}")
    if names[1] == "udp" and names[2:3] != ["quic-v1"]:
        raise AddressError(f"address {text!r}: /udp/... must be followed by /quic-v1; over TCP the form is {form}")
    for index, name in enumerate(names[2:], start=2):
        if name in (*_HOSTS, *_PORTS):
            raise AddressError(f"address {text!r}: a second /{name}/{parts[index][1]}; give one address at a time")
        if name == "p2p" and names[index + 1 :] not in ([], ["p2p-circuit"], ["p2p-circuit", "p2p"]):
            raise AddressError(f"address {text!r}: /p2p/... must be its end; the form is {form}")
