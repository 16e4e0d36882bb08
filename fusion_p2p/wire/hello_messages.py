"""How two peers get acquainted (`/fusion/hello/1`), on a stream that stays open while the greeter lives.

greeter -> host   Versions      what I run                                   (this message never changes its form)
host -> greeter   Versions      what I run; either side stops here when the protocol numbers differ
greeter -> host   Hello         who I am besides my peer id, where I can be dialled
host -> greeter   Welcome       your reachability, my clock, relays  |  Taken: another living process has your peer id
host -> greeter   StillThere    every now and then, and when somebody else comes with the same peer id
greeter -> host   Here

prober -> peer    WhoAreYou     on a stream of its own, at the end of a dial-back
peer -> prober    Here
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fusion_p2p.wire.messages import Count, Message, MessageSet, Name, Record, Text

HELLO_PROTOCOL = "/fusion/hello/1"
MAX_ADDRESSES = 8

Address = Annotated[str, Field(max_length=256)]
UnixTime = Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
Nonce = Annotated[bytes, Field(min_length=16, max_length=16)]


class Versions(Message):
    kind: ClassVar[str] = "versions"
    protocol: Count
    """Both sides must have the same."""
    fusion: Name
    """Of the package, for people."""


class Hello(Message):
    kind: ClassVar[str] = "hello"
    network: Name
    process: Nonce
    """Random, one per process: tells two processes with one peer id apart."""
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]


class DialBack(Record):
    """What came of dialling one address of the greeter; `reason` is empty when it worked."""

    address: Address
    reason: Text


class Welcome(Message):
    kind: ClassVar[str] = "welcome"
    reachability: Literal["direct", "unreachable", "unknown"]
    """Unknown: this host does not dial back."""
    dial_backs: Annotated[tuple[DialBack, ...], Field(max_length=MAX_ADDRESSES)]
    received_s: UnixTime
    """The host's clock when Hello came."""
    sent_s: UnixTime
    """The host's clock when this went."""
    relays: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]


class Taken(Message):
    kind: ClassVar[str] = "taken"
    address: Address
    """Where the other process with this peer id is."""


class StillThere(Message):
    kind: ClassVar[str] = "still_there"


class WhoAreYou(Message):
    kind: ClassVar[str] = "who_are_you"


class Here(Message):
    kind: ClassVar[str] = "here"
    process: Nonce


HELLO_MESSAGES = MessageSet(Versions, Hello, Welcome, Taken, StillThere, WhoAreYou, Here)
