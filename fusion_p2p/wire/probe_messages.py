"""How two peers measure the links between them (`/fusion/probe/1`): latency, then the rate in each direction.

    asker   BeginProbe
    host    ProbeReady | ProbeBusy: try again later
    asker   Ping                              a few times
    host    Pong
    asker   Bulk, then so many raw bytes      in growing rounds
    host    Received: how fast they came
    asker   Pull                              in growing rounds
    host    Bulk, then so many raw bytes
    asker   EndProbe: what it found, so that both sides know

Raw bytes mean nothing and are thrown away. Both sides bound bytes and seconds; who asks proves its id as on every stream.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fusion_p2p.wire.messages import Message, MessageSet, Seconds

PROBE_PROTOCOL = "/fusion/probe/1"
MAX_ROUND_BYTES = 1 << 20
MAX_DIRECTION_BYTES = 4 << 20
"""Of all rounds of one probe in one direction."""
PING_BYTES = 48
"""With what surrounds it a ping is 64 bytes."""

BytesPerSecond = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
RoundBytes = Annotated[int, Field(ge=1, le=MAX_ROUND_BYTES)]
Padding = Annotated[bytes, Field(min_length=PING_BYTES, max_length=PING_BYTES)]


class BeginProbe(Message):
    kind: ClassVar[str] = "begin_probe"


class ProbeReady(Message):
    kind: ClassVar[str] = "probe_ready"


class ProbeBusy(Message):
    kind: ClassVar[str] = "probe_busy"
    retry_s: Seconds
    """Not before so many seconds."""


class Ping(Message):
    kind: ClassVar[str] = "ping"
    data: Padding


class Pong(Message):
    kind: ClassVar[str] = "pong"
    data: Padding


class Bulk(Message):
    kind: ClassVar[str] = "bulk"
    num_bytes: RoundBytes


class Received(Message):
    kind: ClassVar[str] = "received"
    seconds: Seconds
    """From this message's Bulk to its last byte."""


class Pull(Message):
    kind: ClassVar[str] = "pull"
    num_bytes: RoundBytes


class EndProbe(Message):
    kind: ClassVar[str] = "end_probe"
    latency_s: Seconds
    out_bytes_per_s: BytesPerSecond
    """From the asker to the host."""
    in_bytes_per_s: BytesPerSecond


PROBE_MESSAGES = MessageSet(BeginProbe, ProbeReady, ProbeBusy, Ping, Pong, Bulk, Received, Pull, EndProbe)
